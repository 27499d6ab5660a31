"""Sending what the prompts of one request bring, as a stream or as a whole."""

from collections.abc import Sequence
from functools import partial

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Send

from pdserve_common.errors import error_from_engine
from pdserve_router.api.merged_outputs import MergedOutputs
from pdserve_router.api.offload import write_all_off_loop, write_off_loop
from pdserve_router.api.openai_format import AnswerFormat, EchoedPrompt, error_event
from pdserve_router.api.openai_request import AnswerOptions
from pdserve_router.api.stall_guard import StallGuard
from pdserve_router.requests.outputs import RequestOutput, Usage
from pdserve_router.requests.request_metrics import RequestMetrics

# The server takes any message at once, and the next one when little of it is left to send: sliced,
# an answer of megabytes also reaches a client that reads slowly.
_SLICE_BYTES = 64 * 1024

_END_MESSAGE = {"type": "http.response.body", "body": b""}
_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class Answer:
    """What the prompts of one request bring, sent as one answer."""

    def __init__(self, forms: Sequence[AnswerFormat], options: AnswerOptions) -> None:
        self._forms = forms
        self._options = options
        # By prompt.
        self._endings: dict[int, RequestOutput] = {}

    async def stream(
        self, first: tuple[int, RequestOutput], rest: MergedOutputs, send: Send, guard: StallGuard
    ) -> None:
        await guard.write(send(_start_message(_stream_headers(first[1].request_id))))
        begun: set[int] = set()
        async for index, output in _chain(first, rest):
            form = self._forms[index]
            data = b""
            if index not in begun:
                begun.add(index)
                prompt = self._echoed(index, output)
                data = await write_off_loop(output, partial(form.first_events, prompt))
            if output.error is not None:  # merged outputs may hold text besides their error
                data += form.text_events(output) + error_event(error_from_engine(output.error))
                await _send_body(data, send, guard)
                break
            data += await write_off_loop(output, partial(form.events, output))
            if output.finished:
                self._endings[index] = output
                if len(self._endings) == len(self._forms):
                    data += form.end_events(self._usage(), _metrics(output))
                    await _send_body(data, send, guard, is_end=True)
                    return
            await _send_body(data, send, guard)
        await guard.write(send(_END_MESSAGE))

    async def send_whole(
        self, first: tuple[int, RequestOutput], rest: MergedOutputs, send: Send, guard: StallGuard
    ) -> None:
        """Return when little of it is left to send: a message waits for those before it, the last
        one of an answer for nothing.
        """
        async for index, output in _chain(first, rest):
            raise_error(output)
            self._endings[index] = output
            last = output
        prompts = [self._echoed(index, self._endings[index]) for index in range(len(self._forms))]
        write = partial(self._body, prompts)
        # An answer with logprobs may have megabytes: this is several times as fast as json.
        body = await write_all_off_loop(self._endings.values(), lambda: to_json(write()))
        headers = {
            **dict(_metrics(last).trailers()),
            "pdserve-seed": str(last.seed),
            "x-request-id": last.request_id,
        }
        answer = Response(body, media_type="application/json", headers=headers)
        await guard.write(send(_start_message(answer.raw_headers)))
        await _send_body(answer.body, send, guard)
        await guard.write(send(_END_MESSAGE))

    def _body(self, prompts: Sequence[EchoedPrompt | None]) -> dict[str, object]:
        choices: list[dict[str, object]] = []
        beside: dict[str, object] = {}
        for index, (form, prompt) in enumerate(zip(self._forms, prompts, strict=True)):
            more, beside = form.whole(self._endings[index], prompt)
            choices += more
        return self._forms[0].answer(choices, beside, self._usage())

    def _usage(self) -> Usage:
        usages = [output.usage for output in self._endings.values()]
        return Usage.total(usage for usage in usages if usage is not None)

    def _echoed(self, index: int, output: RequestOutput) -> EchoedPrompt | None:
        if not self._options.echoes_prompt:
            return None
        form = self._forms[index]
        return EchoedPrompt(
            text=self._options.prompt_texts[index],
            token_ids=form.prompt_token_ids,
            logprobs=output.prompt_logprobs if form.shows_logprobs else None,
        )


async def _chain(first: tuple[int, RequestOutput], rest: MergedOutputs) -> MergedOutputs:
    yield first
    async for item in rest:
        yield item


async def _send_body(
    data: bytes | memoryview, send: Send, guard: StallGuard, *, is_end: bool = False
) -> None:
    """With `is_end` nothing follows: a message of its own for that took another write."""
    view = memoryview(data)
    for start in range(0, len(view), _SLICE_BYTES):
        end = start + _SLICE_BYTES
        is_last = is_end and end >= len(view)
        await guard.write(send(_body_message(view[start:end], more=not is_last)))


def _metrics(output: RequestOutput) -> RequestMetrics:
    assert output.metrics is not None, "the last output of a request has them"
    return output.metrics


def raise_error(output: RequestOutput) -> None:
    if output.error is not None:
        raise error_from_engine(output.error)


def _stream_headers(request_id: str) -> list[tuple[bytes, bytes]]:
    headers = {**_STREAM_HEADERS, "x-request-id": request_id}
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def _start_message(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, object]:
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body_message(data: memoryview, *, more: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}
