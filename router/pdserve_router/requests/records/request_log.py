"""One line in the log for each request when it ends, over whichever API, and its span. They say
whose request it was, where it went and what it took: nothing of what it asks, and nothing of its
answer.
"""

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve_common.errors import InvalidRequestError, PdserveError
from pdserve_common.limits.validation import MAX_REQUEST_ID_CHARS
from pdserve_common.types.engine import ErrorCode, Generate, Pool
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.live_request import LiveRequest
from pdserve_router.requests.records.request_spans import begin_request, end_request
from pdserve_router.workers.routing.route_chooser import PoolingRoute

if TYPE_CHECKING:
    from pdserve_common.observability.tracing import Span, Tracing

logger = logging.getLogger(__name__)

# What clients write as they like is cut to this.
MAX_PATH_CHARS = 128
MAX_NAME_CHARS = 64
# Requests that no worker got, with the same status, bring at most so many lines: anybody can send
# as many as they like.
MAX_LINES_PER_S = 5
# So many completions of one request have spans of their own: it may have thousands of prompts.
MAX_TRACED_SEQUENCES = 8


class RequestLine:
    """What is known of a request so far."""

    __slots__ = (
        "api_key",
        "began_ns",
        "error",
        "is_chat",
        "lives",
        "method",
        "num_traced",
        "path",
        "request_id",
        "span",
        "status",
    )

    def __init__(self, *, path: str, method: str = "", request_id: str = "") -> None:
        self.path = path
        # "" over gRPC.
        self.method = method
        # "" until somebody has said it.
        self.request_id = request_id
        # HTTP's number, or gRPC's name.
        self.status = "none"
        self.api_key = ""
        self.error: PdserveError | None = None
        # One for each prompt; none if no worker got it.
        self.lives: list[LiveRequest] = []
        self.began_ns = time.monotonic_ns()
        # None: without tracing.
        self.span: Span | None = None
        # Its prompt is a conversation.
        self.is_chat = False
        # Sequences that have spans below it.
        self.num_traced = 0

    def write(self) -> None:
        """Log it; what is not known is left out."""
        fields = self._fields()
        texts = (_TEXTS[name] for name in fields)
        logger.info("".join(texts), fields)

    def _fields(self) -> dict[str, object]:
        """Return them in the order of the text."""
        fields: dict[str, object] = {}
        if self.method:
            fields["method"] = self.method
        fields["path"] = _clip(self.path, MAX_PATH_CHARS)
        fields["status"] = self.status
        if request_id := self.request_id or self._given_id:
            fields["request_id"] = _clip(request_id, MAX_REQUEST_ID_CHARS)
        if self.api_key:
            fields["api_key"] = _clip(self.api_key, MAX_NAME_CHARS)
        if (code := self.error_code) is not None:
            fields["error"] = code.name.lower()
        if isinstance(self.error, InvalidRequestError) and self.error.field is not None:
            fields["field"] = _clip(self.error.field, MAX_NAME_CHARS)
        fields.update(_outcome(self.lives))
        # For a request that a worker got it is the time that its answer tells.
        fields.setdefault("e2e_ms", _ms(time.monotonic_ns() - self.began_ns))
        return fields

    @property
    def _given_id(self) -> str | None:
        return self.lives[0].core_request.external_req_id if self.lives else None

    @property
    def error_code(self) -> ErrorCode | None:
        """What it failed with, before or after workers had it."""
        if self.error is not None:
            return self.error.code
        for live in self.lives:
            if live.ending is not None and live.ending.error is not None:
                return live.ending.error.code
        return None


# What each field adds to the text. One that may come first has nothing in front of it.
_TEXTS = {
    "method": "%(method)s ",
    "path": "%(path)s",
    "status": " %(status)s",
    "request_id": ", request %(request_id)s",
    "api_key": " of %(api_key)s",
    "error": ", %(error)s",
    "field": " in %(field)s",
    "num_prompts": ", %(num_prompts)d prompts",
    "num_prompt_tokens": ", %(num_prompt_tokens)d tokens in",
    "num_cached_tokens": " (%(num_cached_tokens)d cached)",
    "num_output_tokens": ", %(num_output_tokens)d out",
    "ttft_ms": ", TTFT %(ttft_ms).1f ms",
    "e2e_ms": ", E2E %(e2e_ms).1f ms",
    "route": ", %(route)s:",
    "worker": " %(worker)s",
    "prefill": " %(prefill)s ->",
    "decode": " %(decode)s",
    "route_reason": " (%(route_reason)s)",
    "finish_reason": ", %(finish_reason)s",
    "num_redrives": ", %(num_redrives)d redrives",
}


def _outcome(lives: Sequence[LiveRequest]) -> dict[str, object]:
    """Return what a request's prompts came to, all together; the route is the first one's."""
    endings = [live.ending for live in lives if live.ending is not None]
    if not endings:
        return {}
    fields: dict[str, object] = {}
    if len(endings) > 1:
        fields["num_prompts"] = len(endings)
    for name in ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens"):
        fields[name] = sum(getattr(ending.usage, name) for ending in endings)
    if ttfts := [each.metrics.ttft_ns for each in endings if each.metrics.ttft_ns]:
        fields["ttft_ms"] = _ms(min(ttfts))
    fields["e2e_ms"] = _ms(max(ending.metrics.e2e_ns for ending in endings))
    route = lives[0].route
    fields["route"] = route.path
    if isinstance(route, PoolingRoute):
        fields["worker"] = route.prompt_worker.engine_id
    else:
        if route.prefill is not None:
            fields["prefill"] = route.prefill.engine_id
        fields["decode"] = route.decode.engine_id
    if route.reason:
        fields["route_reason"] = route.reason
    fields["finish_reason"] = ",".join(dict.fromkeys(str(each.finish_reason) for each in endings))
    fields["num_redrives"] = sum(ending.metrics.num_redrives for ending in endings)
    return fields


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "..."


_current: ContextVar[RequestLine | None] = ContextVar("request_line", default=None)


def note_api_key(name: str) -> None:
    """The current request came with the key of this name."""
    if (line := _current.get()) is not None:
        line.api_key = name


def note_request_id(request_id: str) -> None:
    """The current request calls itself so."""
    if (line := _current.get()) is not None:
        line.request_id = request_id


def note_error(error: PdserveError) -> None:
    """The current request is answered with this."""
    if (line := _current.get()) is not None:
        line.error = error


def note_taken(lives: Sequence[LiveRequest]) -> None:
    """Workers have the current request."""
    if (line := _current.get()) is not None:
        line.lives.extend(lives)


def put_in_trace(processed: ProcessedInput) -> "tuple[ProcessedInput, Span | None]":
    """Return a prompt of the current request with the trace context that workers are told, and the
    span that its own are children of, if it has any: a prompt after MAX_TRACED_SEQUENCES has none.
    """
    line = _current.get()
    if line is None or line.span is None:
        return processed, None
    line.is_chat = processed.is_chat
    if line.num_traced >= MAX_TRACED_SEQUENCES:
        return _with_trace_headers(processed, {}), None
    match processed.core_request.task:
        case Generate(params):
            line.num_traced += params.best_of or params.n
        case Pool():
            line.num_traced += 1
    # Whether it is sampled or not, workers do the same.
    processed = _with_trace_headers(processed, line.span.headers)
    return processed, line.span if line.span.is_recording else None


def _with_trace_headers(processed: ProcessedInput, headers: Mapping[str, str]) -> ProcessedInput:
    request = dataclasses.replace(processed.core_request, trace_headers=headers)
    return dataclasses.replace(processed, core_request=request)


class RequestLog:
    """Writes lines and ends spans; of requests that no worker got a few a second, and how many more
    there were.
    """

    def __init__(
        self, *, writes: bool = True, tracing: "Tracing | None" = None, model: str = ""
    ) -> None:
        """`writes`: there are lines. `model` is the one that spans name."""
        self._writes = writes
        self.tracing = tracing
        self._model = model
        # Since a second at most, by status.
        self._num_untaken: Counter[str] = Counter()

    def begin(self, line: RequestLine, headers: Mapping[str, str] | None = None) -> RequestLine:
        """From here on it is the current one, in this task. `headers` are needed for spans."""
        if self.tracing is not None:
            line.span = begin_request(
                self.tracing,
                headers or {},
                method=line.method,
                path=_clip(line.path, MAX_PATH_CHARS),
                began_ns=line.began_ns,
            )
        _current.set(line)
        return line

    def end(self, line: RequestLine) -> None:
        """The request has its answer, or nobody waits for one any more."""
        if not line.lives and not self._has_room(line.status):
            return
        if self._writes:
            line.write()
        if line.span is not None:
            end_request(
                line.span,
                method=line.method,
                path=line.path,
                status=line.status,
                error=line.error_code,
                lives=line.lives,
                is_chat=line.is_chat,
                model=self._model,
                now_ns=time.monotonic_ns(),
            )

    def _has_room(self, status: str) -> bool:
        if not self._num_untaken:
            asyncio.get_running_loop().call_later(1.0, self._log_left_out)
        self._num_untaken[status] += 1
        return self._num_untaken[status] <= MAX_LINES_PER_S

    def _log_left_out(self) -> None:
        counts, self._num_untaken = self._num_untaken, Counter()
        for status, count in counts.items():
            if count > MAX_LINES_PER_S and self._writes:
                logger.info(
                    "%(num_left_out)d more requests ended with %(status)s and left no line",
                    {"num_left_out": count - MAX_LINES_PER_S, "status": status},
                )


class HttpRequestLog:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, log: RequestLog, *, silent: Collection[str]) -> None:
        """Requests of the paths in `silent` leave no line."""
        self._app = app
        self._log = log
        self._silent = silent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._silent:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        line = self._log.begin(
            RequestLine(
                method=scope["method"],
                path=scope["path"],
                request_id=headers.get("x-request-id", ""),
            ),
            headers,
        )

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        finally:
            self._log.end(line)
