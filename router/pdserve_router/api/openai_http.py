"""The OpenAI-compatible HTTP API."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial

from prometheus_client import Counter
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pdserve_common.engine_types import FinishReason
from pdserve_common.errors import (
    ClientTooSlowError,
    PdserveError,
    RequestAbortedError,
    error_from_engine,
)
from pdserve_common.validation import validate_request_id
from pdserve_common.version import VERSION
from pdserve_router.api import chat_page
from pdserve_router.api.api_keys import OPEN_PATHS
from pdserve_router.api.edge_processes import EdgeProcesses, Job
from pdserve_router.api.held_bytes import Held
from pdserve_router.api.merged_outputs import MergedOutputs, merged_outputs
from pdserve_router.api.offload import write_all_off_loop, write_off_loop
from pdserve_router.api.openai_fields import UnknownFields
from pdserve_router.api.openai_format import (
    AnswerFormat,
    BodyTooLargeError,
    EchoedPrompt,
    error_event,
    error_headers,
    error_object,
    http_status,
    plain_error_object,
)
from pdserve_router.api.openai_request import AnswerOptions, Body, HttpCall, prepare
from pdserve_router.api.openai_tokenize import Result, detokenize, tokenize
from pdserve_router.api.openai_types import ChatCompletionBody, CompletionBody
from pdserve_router.api.openapi import docs_page, openapi
from pdserve_router.api.stall_guard import StallGuard
from pdserve_router.requests.input_processor import ProcessedInput, trace_context
from pdserve_router.requests.live_request import LiveRequest
from pdserve_router.requests.output_processor import RequestOutput, Usage
from pdserve_router.requests.request_limits import INLINE_BYTES, is_small
from pdserve_router.requests.request_log import note_error
from pdserve_router.requests.request_metrics import RequestMetrics
from pdserve_router.router import Router
from pdserve_router.workers.worker_pool import ModelLimits

logger = logging.getLogger(__name__)

# Closes the connection of a scope at once, data not sent yet included.
CutConnection = Callable[[Scope], None]

# The server reports a connection that was cut within a turn of the event loop.
_CUT_TIMEOUT_S = 1.0
# A client that sends its body more slowly holds a connection, and nothing else.
_BODY_TIMEOUT_S = 30.0
# The server takes any message at once, and the next one when little of it is left to send: sliced,
# an answer of megabytes also reaches a client that reads slowly.
_SLICE_BYTES = 64 * 1024
# Of an answer that is sent as a whole: some 70 MiB of JSON.
MAX_ANSWER_LOGPROB_ENTRIES = 2**20

_END_MESSAGE = {"type": "http.response.body", "body": b""}
_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


def build_app(
    router: Router,
    *,
    client_stall_timeout_s: float,
    max_body_bytes: int,
    cut: CutConnection,
    edge: EdgeProcesses,
    unknown_fields: Counter,
) -> Starlette:
    """Return the ASGI application. `unknown_fields` counts by field."""
    unknown = UnknownFields(unknown_fields)

    def endpoint(body: type[Body]) -> GenerationEndpoint:
        return GenerationEndpoint(
            router,
            body,
            client_stall_timeout_s=client_stall_timeout_s,
            max_body_bytes=max_body_bytes,
            cut=cut,
            edge=edge,
            unknown_fields=unknown,
        )

    def job(function: Job[Result]) -> JobEndpoint:
        return JobEndpoint(
            router, function, max_body_bytes=max_body_bytes, edge=edge, unknown_fields=unknown
        )

    info = InfoEndpoints(router)
    pages = {
        "/": chat_page.show,
        "/health": info.health,
        "/version": info.version,
        "/openapi.json": info.openapi,
        "/docs": info.docs,
    }
    return Starlette(
        routes=[
            Route("/v1/completions", endpoint(CompletionBody), methods=["POST"]),
            Route("/v1/chat/completions", endpoint(ChatCompletionBody), methods=["POST"]),
            Route("/v1/models", info.list_models),
            Route("/v1/models/{model:path}", info.get_model),
            Route("/tokenize", job(tokenize), methods=["POST"]),
            Route("/detokenize", job(detokenize), methods=["POST"]),
            *(Route(path, pages[path]) for path in OPEN_PATHS),
        ],
        exception_handlers={
            HTTPException: _on_http_exception,
            PdserveError: _on_error,
            Exception: _on_unexpected,
        },
    )


class InfoEndpoints:
    """What is served, and whether."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._created = int(time.time())

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def get_model(self, request: Request) -> Response:
        self._router.input_processor.check_model(request.path_params["model"])
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        if self._router.is_ready:
            return JSONResponse({"status": "ok"})
        reason = "draining" if self._router.is_draining else "no decode worker is ready"
        return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi())

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(docs_page())

    def _model(self) -> dict[str, object]:
        limits = self._router.pool.limits
        return {
            "id": self._router.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdserve",
            "max_model_len": limits.max_model_len if limits is not None else None,
        }


class JobEndpoint:
    """An ASGI application that answers with what a job makes of a body."""

    def __init__(
        self,
        router: Router,
        job: Job[Result],
        *,
        max_body_bytes: int,
        edge: EdgeProcesses,
        unknown_fields: UnknownFields,
    ) -> None:
        self._router = router
        self._job = job
        self._max_body_bytes = max_body_bytes
        self._edge = edge
        self._unknown_fields = unknown_fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = _address(scope)
        limits = self._router.pool.model_limits()
        with self._edge.hold(client) as held:
            most = _most_bytes(self._router, self._max_body_bytes)
            raw = await _read_in_time(Request(scope, receive), most, held)
            small = is_small(raw, b"{")
            answer, unknown = await self._edge.run(
                self._job, raw, limits, client=client, is_small=small
            )
        self._unknown_fields.count(unknown)
        await Response(answer, media_type="application/json")(scope, receive, send)


class GenerationEndpoint:
    """An ASGI application for one of the two POST endpoints."""

    def __init__(
        self,
        router: Router,
        body: type[Body],
        *,
        client_stall_timeout_s: float,
        max_body_bytes: int,
        cut: CutConnection,
        edge: EdgeProcesses,
        unknown_fields: UnknownFields,
    ) -> None:
        self._router = router
        self._unknown_fields = unknown_fields
        self._edge = edge
        self._body = body
        self._is_chat = body is ChatCompletionBody
        self._client_stall_timeout_s = client_stall_timeout_s
        self._max_body_bytes = max_body_bytes
        self._cut = cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack:
            lives, options = await self._take(scope, receive, stack)
            self._unknown_fields.count(options.unknown_fields)
            for live in lives:
                stack.enter_context(live)
            await self._answer(lives, options, scope, receive, send)

    async def _take(
        self, scope: Scope, receive: Receive, answering: ExitStack
    ) -> tuple[list[LiveRequest], AnswerOptions]:
        """Read a body and send off what it asks for, a request for each prompt; from when it is
        read, it is being answered.
        """
        call = self._call(Request(scope))
        client = _address(scope)
        with self._edge.hold(client) as held:
            raw = await _read_in_time(
                Request(scope, receive), _most_bytes(self._router, self._max_body_bytes), held
            )
            answering.enter_context(self._router.answering())
            preparation = _Preparation(self._edge, raw, call, client)
            lives = await self._router.submit(preparation)
        assert preparation.options is not None, "a request that was taken is prepared"
        return lives, preparation.options

    def _call(self, http: Request) -> HttpCall:
        arrival_ns = time.monotonic_ns()
        request_id = http.headers.get("x-request-id", "")
        if request_id:
            validate_request_id(request_id)
        return HttpCall(
            body=self._body,
            request_id=request_id,
            arrival_ns=arrival_ns,
            trace_headers=trace_context(http.headers),
            max_logprob_entries=MAX_ANSWER_LOGPROB_ENTRIES,
        )

    async def _answer(
        self,
        lives: Sequence[LiveRequest],
        options: AnswerOptions,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        forms = [self._form(options, live, index) for index, live in enumerate(lives)]
        answer = _Answer(forms, options)
        async with (
            _abort_on_disconnect(lives, receive) as disconnected,
            aclosing(merged_outputs(lives)) as outputs,
        ):
            # An error before the first token still becomes a status.
            first = await anext(outputs)
            _raise_error(first[1])
            try:
                with StallGuard(self._client_stall_timeout_s) as guard:
                    if options.is_stream:
                        await answer.stream(first, outputs, send, guard)
                    else:
                        await answer.send_whole(first, outputs, send, guard)
            except ClientTooSlowError as error:
                for live in lives:
                    live.cut(FinishReason.ABORT, error.to_engine_error())
                self._cut(scope)
                await asyncio.wait_for(disconnected.wait(), _CUT_TIMEOUT_S)

    def _form(self, options: AnswerOptions, live: LiveRequest, index: int) -> AnswerFormat:
        request = live.core_request
        params = request.sampling_params
        assert params is not None
        return AnswerFormat(
            answer_id=f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request.external_req_id}",
            model=self._router.model_name,
            created=int(time.time()),
            is_chat=self._is_chat,
            tokenizer=self._router.tokenizer,
            prompt_token_ids=request.prompt_token_ids,
            first_index=index * params.n,
            num_choices=params.n,
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage,
            include_metrics=options.include_metrics,
            returns_token_ids=options.returns_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            shows_prompt_logprobs=options.shows_prompt_logprobs,
            shows_logprobs=params.logprobs is not None,
            is_prompt_only=options.is_prompt_only,
        )


class _Answer:
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
            await _send_body(data, send, guard)
        await guard.write(send(_END_MESSAGE))

    async def send_whole(
        self, first: tuple[int, RequestOutput], rest: MergedOutputs, send: Send, guard: StallGuard
    ) -> None:
        """Return when little of it is left to send: a message waits for those before it, the last
        one of an answer for nothing.
        """
        async for index, output in _chain(first, rest):
            _raise_error(output)
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


class _Preparation:
    """Makes tokens of a body; knows afterwards how that wants its answer."""

    def __init__(self, edge: EdgeProcesses, raw: bytes, call: HttpCall, client: str) -> None:
        self._edge = edge
        self._raw = raw
        self._call = call
        self._client = client
        self.options: AnswerOptions | None = None

    async def __call__(self, limits: ModelLimits) -> Sequence[ProcessedInput]:
        processed, self.options = await self._edge.run(
            prepare,
            self._raw,
            self._call,
            limits,
            client=self._client,
            is_small=is_small(self._raw, b"{"),
        )
        return processed


async def _send_body(data: bytes | memoryview, send: Send, guard: StallGuard) -> None:
    view = memoryview(data)
    for start in range(0, len(view), _SLICE_BYTES):
        await guard.write(send(_body_message(view[start : start + _SLICE_BYTES])))


def _metrics(output: RequestOutput) -> RequestMetrics:
    assert output.metrics is not None, "the last output of a request has them"
    return output.metrics


def _raise_error(output: RequestOutput) -> None:
    if output.error is not None:
        raise error_from_engine(output.error)


@asynccontextmanager
async def _abort_on_disconnect(
    lives: Sequence[LiveRequest], receive: Receive
) -> AsyncIterator[asyncio.Event]:
    """End the requests when their client disconnects; the event says that it did."""
    disconnected = asyncio.Event()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected.set()
        for live in lives:
            live.abort()

    task = asyncio.create_task(watch())
    try:
        yield disconnected
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _read_in_time(http: Request, limit: int, held: Held) -> bytes:
    try:
        return await asyncio.wait_for(_read_body(http, limit, held), _BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise HTTPException(
            408,
            f"the body did not come within {_BODY_TIMEOUT_S:g} s",
            headers={"connection": "close"},
        ) from None


async def _read_body(http: Request, limit: int, held: Held) -> bytes:
    """Read the body. Raises BodyTooLargeError as soon as it is known to be too large, and
    OverloadedError as soon as there is no room for it.
    """
    declared = http.headers.get("content-length", "0")
    if declared.isdigit():
        _check_size(int(declared), limit, held)
    chunks = []
    num_bytes = 0
    try:
        async for chunk in http.stream():
            num_bytes += len(chunk)
            _check_size(num_bytes, limit, held)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise RequestAbortedError("the client disconnected while sending its body") from error
    return b"".join(chunks)


def _check_size(num_bytes: int, limit: int, held: Held) -> None:
    if num_bytes > limit:
        raise BodyTooLargeError(
            f"body has {num_bytes} bytes or more, at most {limit} are of use or allowed "
            "(max_model_len, max_body_bytes)"
        )
    if num_bytes > INLINE_BYTES:
        held.grow(num_bytes)


def _most_bytes(router: Router, max_body_bytes: int) -> int:
    most = router.max_request_bytes
    return max_body_bytes if most is None else min(most, max_body_bytes)


def _address(scope: Scope) -> str:
    """Of whoever sent it, without the port."""
    return str(scope["client"][0]) if scope.get("client") else ""


def _stream_headers(request_id: str) -> list[tuple[bytes, bytes]]:
    headers = {**_STREAM_HEADERS, "x-request-id": request_id}
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def _start_message(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, object]:
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body_message(data: memoryview) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PdserveError)
    note_error(error)
    return JSONResponse(
        error_object(error), status_code=http_status(error), headers=error_headers(error)
    )


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(
        plain_error_object(str(error.detail), status=error.status_code),
        status_code=error.status_code,
        headers=error.headers,
    )


async def _on_unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises the error again behind this answer, and uvicorn logs it.
    message = "internal error, see the server's log"
    return JSONResponse(plain_error_object(message, status=500), status_code=500)
