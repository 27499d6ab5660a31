"""The ASGI applications behind the POST paths."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve_common.engine_types import FinishReason
from pdserve_common.errors import ClientTooSlowError
from pdserve_common.validation import validate_request_id
from pdserve_router.api.edge_processes import EdgeProcesses, Job
from pdserve_router.api.http_body import address_of, most_bytes, read_in_time
from pdserve_router.api.http_connections import connection_of
from pdserve_router.api.merged_outputs import merged_outputs
from pdserve_router.api.openai_answer import Answer, raise_error
from pdserve_router.api.openai_fields import UnknownFields
from pdserve_router.api.openai_format import AnswerFormat
from pdserve_router.api.openai_request import AnswerOptions, Body, HttpCall, prepare
from pdserve_router.api.openai_tokenize import Result
from pdserve_router.api.openai_types import ChatCompletionBody
from pdserve_router.api.stall_guard import StallGuard
from pdserve_router.api.text_writer import TextWriter
from pdserve_router.api.write_queue import WriteQueue
from pdserve_router.requests.generation_request import trace_context
from pdserve_router.requests.input_processor import ProcessedInput
from pdserve_router.requests.live_request import LiveRequest
from pdserve_router.requests.request_limits import is_small
from pdserve_router.requests.tenant import session_id, tenant_var
from pdserve_router.router import Router
from pdserve_router.workers.model_limits import ModelLimits

# The server reports a connection that was cut within a turn of the event loop.
_CUT_TIMEOUT_S = 1.0
# Of an answer that is sent as a whole: some 70 MiB of JSON.
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
    """An ASGI application for one of the two POST endpoints."""

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
        self._is_chat = body is ChatCompletionBody
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
        call = self._call(Request(scope))
        client = address_of(scope)
        with self._edge.hold(client) as held:
            most = most_bytes(self._router, self._max_body_bytes)
            raw = await read_in_time(
                Request(scope, receive), most, held, timeout_s=self._body_timeout_s
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
            tenant=tenant_var.get(),
            session=session_id(http.headers),
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
        answer = Answer(forms, options)
        async with (
            _abort_on_disconnect(lives, receive) as disconnected,
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
                connection_of(scope).cut()
                await asyncio.wait_for(disconnected.wait(), _CUT_TIMEOUT_S)

    def _form(self, options: AnswerOptions, live: LiveRequest, index: int) -> AnswerFormat:
        request = live.core_request
        params, lora = request.sampling_params, request.lora_request
        assert params is not None
        return AnswerFormat(
            answer_id=f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request.external_req_id}",
            model=self._router.model_name if lora is None else lora.lora_name,
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
            shows_reasoning=options.shows_reasoning,
        )


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
        self._edge.remember(processed)
        return processed


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
