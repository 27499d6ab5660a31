"""Sending what the prompts of one request bring, as a stream or as a whole."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Send

from pdserve_common.errors import PdserveError, error_from_engine
from pdserve_router.api.http.large_answers import write_all_off_loop, write_off_loop
from pdserve_router.api.http.stall_guard import StallGuard
from pdserve_router.api.merged_outputs import MergedOutputs
from pdserve_router.api.openai.format import EchoedPrompt
from pdserve_router.api.openai.request import AnswerOptions
from pdserve_router.requests.output.outputs import RequestOutput, Usage
from pdserve_router.requests.records.request_metrics import RequestMetrics

# The server takes any message at once, and the next one when little of it is left to send: sliced,
# an answer of megabytes also reaches a client that reads slowly.
_SLICE_BYTES = 64 * 1024

_END_MESSAGE = {"type": "http.response.body", "body": b""}
_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class AnswerFormat(Protocol):
    """Writes what one prompt of a request brings, as an endpoint has it."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt, for an echo of it."""

    @property
    def shows_logprobs(self) -> bool:
        """Also of an echoed prompt."""

    def first_events(self, prompt: EchoedPrompt | None = None) -> bytes:
        """Return what comes before the first text, with the prompt if that is given."""

    def events(self, output: RequestOutput) -> bytes:
        """Return what an output adds."""

    def text_event(self, text: str, token_ids: Sequence[int], *, index: int = 0) -> bytes:
        """Return what some text adds to a completion."""

    def text_events(self, output: RequestOutput) -> bytes:
        """Return the text of an output that an error will follow."""

    def end_events(self, usage: Usage, metrics: RequestMetrics) -> bytes:
        """Return what ends a stream, whose prompts had these together."""

    def error_events(self, error: PdserveError) -> bytes:
        """Return what ends a stream that has already begun."""

    def whole(self, output: RequestOutput, prompt: EchoedPrompt | None = None) -> Any:
        """Return what `answer` takes of a finished request."""

    def answer(self, wholes: Sequence[Any], usage: Usage, metrics: RequestMetrics) -> bytes:
        """Return the whole answer of all prompts together, as JSON."""


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
                data += form.text_events(output)
                data += form.error_events(error_from_engine(output.error))
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
        write = partial(self._body, prompts, _metrics(last))
        body = await write_all_off_loop(self._endings.values(), write)
        headers = {
            **dict(_metrics(last).trailers()),
            "pdserve-seed": str(last.seed),
            "x-request-id": last.request_id,
        }
        await send_json(body, headers, send, guard)

    def _body(self, prompts: Sequence[EchoedPrompt | None], metrics: RequestMetrics) -> bytes:
        wholes = [
            form.whole(self._endings[index], prompt)
            for index, (form, prompt) in enumerate(zip(self._forms, prompts, strict=True))
        ]
        return self._forms[0].answer(wholes, self._usage(), metrics)

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


async def send_json(body: bytes, headers: Mapping[str, str], send: Send, guard: StallGuard) -> None:
    """Send a whole answer; return when little of it is left to send."""
    answer = Response(body, media_type="application/json", headers=headers)
    await guard.write(send(_start_message(answer.raw_headers)))
    await _send_body(answer.body, send, guard)
    await guard.write(send(_END_MESSAGE))


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
