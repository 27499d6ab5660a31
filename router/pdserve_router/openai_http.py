"""The OpenAI-compatible HTTP API."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pdserve_common.engine_types import EngineCoreRequest, FinishReason
from pdserve_common.errors import (
    ClientTooSlowError,
    PdserveError,
    RequestAbortedError,
    error_from_engine,
)
from pdserve_common.validation import validate_request_id
from pdserve_router.edge_processes import EdgeProcesses
from pdserve_router.held_bytes import Held
from pdserve_router.input_processor import ProcessedInput, trace_context
from pdserve_router.live_request import LiveRequest
from pdserve_router.offload import write_off_loop
from pdserve_router.openai_format import (
    AnswerFormat,
    BodyTooLargeError,
    EchoedPrompt,
    error_event,
    error_headers,
    error_object,
    http_status,
    plain_error_object,
)
from pdserve_router.openai_request import AnswerOptions, Body, HttpCall, prepare
from pdserve_router.openai_types import ChatCompletionBody, CompletionBody
from pdserve_router.output_processor import RequestOutput
from pdserve_router.request_limits import INLINE_BYTES, is_small
from pdserve_router.router import Router
from pdserve_router.stall_guard import StallGuard
from pdserve_router.worker_pool import ModelLimits

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
) -> Starlette:
    """Return the ASGI application."""

    def endpoint(body: type[Body]) -> GenerationEndpoint:
        return GenerationEndpoint(
            router,
            body,
            client_stall_timeout_s=client_stall_timeout_s,
            max_body_bytes=max_body_bytes,
            cut=cut,
            edge=edge,
        )

    info = InfoEndpoints(router)
    return Starlette(
        routes=[
            Route("/v1/completions", endpoint(CompletionBody), methods=["POST"]),
            Route("/v1/chat/completions", endpoint(ChatCompletionBody), methods=["POST"]),
            Route("/v1/models", info.list_models),
            Route("/v1/models/{model:path}", info.get_model),
            Route("/health", info.health),
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

    def _model(self) -> dict[str, object]:
        limits = self._router.pool.limits
        return {
            "id": self._router.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdserve",
            "max_model_len": limits.max_model_len if limits is not None else None,
        }


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
    ) -> None:
        self._router = router
        self._edge = edge
        self._body = body
        self._is_chat = body is ChatCompletionBody
        self._client_stall_timeout_s = client_stall_timeout_s
        self._max_body_bytes = max_body_bytes
        self._cut = cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as answering:
            live, options = await self._take(scope, receive, answering)
            with live:
                await self._answer(live, options, scope, receive, send)

    async def _take(
        self, scope: Scope, receive: Receive, answering: ExitStack
    ) -> tuple[LiveRequest, AnswerOptions]:
        """Read a body and send off what it asks for; from when it is read, it is being answered."""
        call = self._call(Request(scope))
        client = _address(scope)
        with self._edge.hold(client) as held:
            raw = await _read_in_time(Request(scope, receive), self._most_bytes(), held)
            answering.enter_context(self._router.answering())
            preparation = _Preparation(self._edge, raw, call, client)
            live = await self._router.submit(preparation)
        assert preparation.options is not None, "a request that was taken is prepared"
        return live, preparation.options

    def _call(self, http: Request) -> HttpCall:
        arrival_ns = time.monotonic_ns()
        request_id = http.headers.get("x-request-id") or secrets.token_hex(12)
        validate_request_id(request_id)
        return HttpCall(
            body=self._body,
            request_id=request_id,
            arrival_ns=arrival_ns,
            trace_headers=trace_context(http.headers),
            max_logprob_entries=MAX_ANSWER_LOGPROB_ENTRIES,
        )

    def _most_bytes(self) -> int:
        most = self._router.max_request_bytes
        return self._max_body_bytes if most is None else min(most, self._max_body_bytes)

    async def _answer(
        self,
        live: LiveRequest,
        options: AnswerOptions,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        form = self._form(options, live.request)
        async with _abort_on_disconnect(live, receive) as disconnected:
            # An error before the first token still becomes a status.
            first = await anext(live)
            _raise_error(first)
            prompt = _echoed(first, options, live.request) if options.echoes_prompt else None
            try:
                with StallGuard(self._client_stall_timeout_s) as guard:
                    if options.is_stream:
                        await _stream(first, live, form, send, guard, prompt)
                    else:
                        answer = await write_off_loop(first, partial(_answer, first, form, prompt))
                        await _send_whole(answer, send, guard)
            except ClientTooSlowError as error:
                live.cut(FinishReason.ABORT, error.to_engine_error())
                self._cut(scope)
                await asyncio.wait_for(disconnected.wait(), _CUT_TIMEOUT_S)

    def _form(self, options: AnswerOptions, request: EngineCoreRequest) -> AnswerFormat:
        assert request.sampling_params is not None
        return AnswerFormat(
            answer_id=f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request.external_req_id}",
            model=self._router.model_name,
            created=int(time.time()),
            is_chat=self._is_chat,
            num_choices=request.sampling_params.n,
            include_usage=options.include_usage,
            tokenizer=self._router.tokenizer,
            skip_special_tokens=request.sampling_params.skip_special_tokens,
            shows_prompt_logprobs=options.shows_prompt_logprobs,
            is_prompt_only=options.is_prompt_only,
        )


class _Preparation:
    """Makes tokens of a body; knows afterwards how that wants its answer."""

    def __init__(self, edge: EdgeProcesses, raw: bytes, call: HttpCall, client: str) -> None:
        self._edge = edge
        self._raw = raw
        self._call = call
        self._client = client
        self.options: AnswerOptions | None = None

    async def __call__(self, limits: ModelLimits) -> ProcessedInput:
        processed, self.options = await self._edge.run(
            prepare,
            self._raw,
            self._call,
            limits,
            client=self._client,
            is_small=is_small(self._raw, b"{"),
        )
        return processed


def _echoed(
    first: RequestOutput, options: AnswerOptions, request: EngineCoreRequest
) -> EchoedPrompt:
    assert request.sampling_params is not None
    wants_logprobs = request.sampling_params.logprobs is not None
    return EchoedPrompt(
        text=options.prompt_text,
        token_ids=first.prompt_token_ids,
        logprobs=first.prompt_logprobs if wants_logprobs else None,
    )


async def _stream(
    first: RequestOutput,
    live: LiveRequest,
    form: AnswerFormat,
    send: Send,
    guard: StallGuard,
    prompt: EchoedPrompt | None,
) -> None:
    headers = {**_STREAM_HEADERS, "x-request-id": first.request_id}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await guard.write(send(_start_message(raw)))
    data = await write_off_loop(first, lambda: form.first_events(prompt) + form.events(first))
    await _send_body(data, send, guard)
    async for output in live:
        if (error := output.error) is None:
            data = await write_off_loop(output, partial(form.events, output))
        else:  # merged outputs may hold text besides their error
            data = form.text_events(output) + error_event(error_from_engine(error))
        await _send_body(data, send, guard)
    await guard.write(send(_END_MESSAGE))


async def _send_whole(answer: Response, send: Send, guard: StallGuard) -> None:
    """Return when little of it is left to send: a message waits for those before it, the last one
    of an answer for nothing.
    """
    await guard.write(send(_start_message(answer.raw_headers)))
    await _send_body(answer.body, send, guard)
    await guard.write(send(_END_MESSAGE))


async def _send_body(data: bytes | memoryview, send: Send, guard: StallGuard) -> None:
    view = memoryview(data)
    for start in range(0, len(view), _SLICE_BYTES):
        await guard.write(send(_body_message(view[start : start + _SLICE_BYTES])))


def _answer(output: RequestOutput, form: AnswerFormat, prompt: EchoedPrompt | None) -> Response:
    assert output.metrics is not None, "the only output of a FINAL_ONLY request is its last"
    headers = {
        **dict(output.metrics.trailers()),
        "pdserve-seed": str(output.seed),
        "x-request-id": output.request_id,
    }
    # An answer with logprobs may have megabytes: this is several times as fast as json.
    body = to_json(form.answer(output, prompt))
    return Response(body, media_type="application/json", headers=headers)


def _raise_error(output: RequestOutput) -> None:
    if output.error is not None:
        raise error_from_engine(output.error)


@asynccontextmanager
async def _abort_on_disconnect(live: LiveRequest, receive: Receive) -> AsyncIterator[asyncio.Event]:
    """End the request when its client disconnects; the event says that it did."""
    disconnected = asyncio.Event()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected.set()
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
        raise BodyTooLargeError(f"body has {num_bytes} bytes or more, at most {limit}")
    if num_bytes > INLINE_BYTES:
        held.grow(num_bytes)


def _address(scope: Scope) -> str:
    """Of whoever sent it, without the port."""
    return str(scope["client"][0]) if scope.get("client") else ""


def _start_message(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, object]:
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body_message(data: memoryview) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PdserveError)
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
