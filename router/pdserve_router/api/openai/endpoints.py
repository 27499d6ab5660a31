"""The ASGI applications behind the POST paths."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve_common.errors import ClientTooSlowError, RequestAbortedError
from pdserve_common.limits.validation import validate_request_id
from pdserve_common.types.engine import FinishReason
from pdserve_router.api.http.body import address_of, most_bytes, read_in_time
from pdserve_router.api.http.connections import connection_of
from pdserve_router.api.http.stall_guard import StallGuard
from pdserve_router.api.http.text_writer import TextWriter
from pdserve_router.api.http.write_queue import WriteQueue
from pdserve_router.api.large_requests.processes import EdgeProcesses, Job
from pdserve_router.api.merged_outputs import merged_outputs
from pdserve_router.api.openai.answer import Answer, AnswerFormat, raise_error
from pdserve_router.api.openai.fields import UnknownFields
from pdserve_router.api.openai.format import ChoicesFormat
from pdserve_router.api.openai.request import AnswerOptions, Body, GenerationCall, prepare
from pdserve_router.api.openai.tokenize import Result
from pdserve_router.api.openai.types import ChatCompletionBody
from pdserve_router.api.responses.format import ResponseFormat
from pdserve_router.api.responses.types import ResponsesBody
from pdserve_router.requests.input.generation_request import named_rank, trace_context
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.input.request_limits import is_small
from pdserve_router.requests.live_request import LiveRequest
from pdserve_router.requests.tenants.tenant import session_id, tenant_var
from pdserve_router.router import Router
from pdserve_router.workers.model_limits import ModelLimits

# The server reports a connection that was cut within a turn of the event loop.
_CUT_TIMEOUT_S = 1.0
# An answer that is sent as a whole has at most so many: some 70 MiB of JSON.
MAX_ANSWER_LOGPROB_ENTRIES = 2**20


class JobEndpoint:
    """An ASGI application that answers with what a job makes of a body."""

    def __init__(
        self,
        router: Router,
        job: Job[Result],
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        edge: EdgeProcesses,
        unknown_fields: UnknownFields,
    ) -> None:
        self._router = router
        self._job = job
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._edge = edge
        self._unknown_fields = unknown_fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = address_of(scope)
        limits = self._router.pool.model_limits()
        with self._edge.hold(client) as held:
            most = most_bytes(self._router, self._max_body_bytes)
            raw = await read_in_time(
                Request(scope, receive), most, held, timeout_s=self._body_timeout_s
            )
            small = is_small(raw, b"{")
            answer, unknown = await self._edge.run(
                self._job, raw, limits, client=client, is_small=small
            )
        self._unknown_fields.count(unknown)
        await Response(answer, media_type="application/json")(scope, receive, send)


class GenerationEndpoint:
    """An ASGI application for one of the POST endpoints that generate."""

    def __init__(
        self,
        router: Router,
        body: type[Body],
        *,
        client_stall_timeout_s: float,
        max_body_bytes: int,
        body_timeout_s: float,
        writes: WriteQueue,
        edge: EdgeProcesses,
        unknown_fields: UnknownFields,
    ) -> None:
        self._router = router
        self._unknown_fields = unknown_fields
        self._edge = edge
        self._body = body
        self._client_stall_timeout_s = client_stall_timeout_s
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._writes = writes

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
        call = GenerationCall(
            body=self._body,
            max_logprob_entries=MAX_ANSWER_LOGPROB_ENTRIES,
            data_parallel_rank=named_rank(Request(scope).headers),
            **call_fields(Request(scope)),
        )
        client = address_of(scope)
        with ExitStack() as holding:
            held = holding.enter_context(self._edge.hold(client))
            most = most_bytes(self._router, self._max_body_bytes)
            raw = await read_in_time(
                Request(scope, receive), most, held, timeout_s=self._body_timeout_s
            )
            answering.enter_context(self._router.answering())
            preparation = _Preparation(self._edge, raw, call, client, holding)
            del raw
            async with leave_on_disconnect(receive):
                lives = await self._router.submit(preparation)
        assert preparation.options is not None, "a request that was taken is prepared"
        return lives, preparation.options

    async def _answer(
        self,
        lives: Sequence[LiveRequest],
        options: AnswerOptions,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        forms = [self._form(options, live, index) for index, live in enumerate(lives)]
        answer = Answer(forms, options)
        async with (
            abort_on_disconnect(lives, receive) as disconnected,
            aclosing(merged_outputs(lives)) as outputs,
        ):
            # An error before the first token still becomes a status.
            first = await anext(outputs)
            raise_error(first[1])
            try:
                with StallGuard(self._client_stall_timeout_s) as guard:
                    if options.is_stream:
                        if len(lives) == 1:
                            TextWriter(lives[0], forms[0], scope, self._writes).start()
                        await answer.stream(first, outputs, send, guard)
                    else:
                        await answer.send_whole(first, outputs, send, guard)
            except ClientTooSlowError as error:
                for live in lives:
                    live.cut(FinishReason.ABORT, error.to_engine_error())
                await cut_connection(scope, disconnected)

    def _form(self, options: AnswerOptions, live: LiveRequest, index: int) -> AnswerFormat:
        request = live.core_request
        params, lora = options.params, request.lora_request
        model = self._router.model_name if lora is None else lora.lora_name
        if self._body is ResponsesBody:
            return ResponseFormat(
                request_id=str(request.external_req_id),
                model=model,
                created=int(time.time()),
                repeated_fields=options.repeated_fields,
                include_metrics=options.include_metrics,
            )
        is_chat = self._body is ChatCompletionBody
        return ChoicesFormat(
            answer_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{request.external_req_id}",
            model=model,
            created=int(time.time()),
            is_chat=is_chat,
            tokenizer=self._router.tokenizer,
            prompt_token_ids=request.prompt_token_ids,
            first_index=index * params.n,
            num_choices=params.n,
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage,
            include_metrics=options.include_metrics,
            returns_token_ids=options.returns_token_ids,
            params=params,
            shows_prompt_logprobs=options.shows_prompt_logprobs,
            shows_logprobs=params.logprobs is not None,
            is_prompt_only=options.is_prompt_only,
            shows_reasoning=options.shows_reasoning,
        )


async def cut_connection(scope: Scope, disconnected: asyncio.Event) -> None:
    """Leave a client that does not read; `disconnected` is `abort_on_disconnect`'s."""
    connection_of(scope).cut()
    await asyncio.wait_for(disconnected.wait(), _CUT_TIMEOUT_S)


class _Preparation:
    """Makes tokens of a body, which is let go then: a request may wait long for its turn. Knows
    afterwards how that wants its answer.
    """

    def __init__(
        self,
        edge: EdgeProcesses,
        raw: bytes,
        call: GenerationCall,
        client: str,
        holding: ExitStack,
    ) -> None:
        """`holding` counts the body until it is closed."""
        self._edge = edge
        self._raw = raw
        self._call = call
        self._client = client
        self._holding = holding
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
        self._edge.remember(processed)
        self._raw = b""
        self._holding.close()
        return processed


def call_fields(http: Request) -> dict[str, Any]:
    """Return the fields of an HttpCall. Raises InvalidRequestError for a header."""
    arrival_ns = time.monotonic_ns()
    request_id = http.headers.get("x-request-id", "")
    if request_id:
        validate_request_id(request_id)
    return {
        "request_id": request_id,
        "arrival_ns": arrival_ns,
        "trace_headers": trace_context(http.headers),
        "tenant": tenant_var.get(),
        "address": address_of(http.scope),
        "session": session_id(http.headers),
    }


class Abortable(Protocol):
    """What a client may leave."""

    def abort(self) -> None:
        """End it. Does nothing after the end."""


@asynccontextmanager
async def leave_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel what the block waits for when its client disconnects, and raise RequestAbortedError:
    a request that waits for its turn has nothing yet that could be aborted.
    """
    task = asyncio.current_task()
    assert task is not None, "an ASGI application runs in a task"
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not is_gone:
            raise
        raise RequestAbortedError("the client cancelled the request") from None
    finally:
        # From here on it cancels nothing: what the block has brought is the caller's.
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@asynccontextmanager
async def abort_on_disconnect(
    parts: Collection[Abortable], receive: Receive
) -> AsyncIterator[asyncio.Event]:
    """End what a call has under way when its client disconnects; the event says that it did."""
    disconnected = asyncio.Event()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected.set()
        for part in parts:
            part.abort()

    task = asyncio.create_task(watch())
    try:
        yield disconnected
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
