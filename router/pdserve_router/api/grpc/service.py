"""The public gRPC API."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common import wire
from pdserve_common.errors import (
    ClientTooSlowError,
    InvalidRequestError,
    PdserveError,
    error_from_engine,
)
from pdserve_common.limits.validation import MAX_BAD_WORDS, MAX_N, MAX_REQUEST_ID_CHARS
from pdserve_common.rpc.channels import status_of
from pdserve_common.types.engine import FinishReason, Generate
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.api.grpc.chat import add_parts, chat_messages, chat_tools, check_chat
from pdserve_router.api.grpc.pool import pool_response, pooling_input
from pdserve_router.api.http.large_answers import write_off_loop
from pdserve_router.api.http.stall_guard import StallGuard
from pdserve_router.api.http.write_queue import WriteQueue
from pdserve_router.api.large_requests.processes import EdgeProcesses, Job
from pdserve_router.requests.input.generation_request import GenerationRequest, trace_context
from pdserve_router.requests.input.input_processor import InputProcessor, ProcessedInput
from pdserve_router.requests.input.request_limits import (
    INLINE_BYTES,
    MAX_DETOKENIZE_BYTES,
    MAX_PARAMS,
    check_lengths,
    check_wire_counts,
    is_small,
)
from pdserve_router.requests.live_request import LiveRequest
from pdserve_router.requests.output.outputs import CompletionOutput, RequestOutput
from pdserve_router.requests.output.resume import ResumedCompletion
from pdserve_router.requests.records.request_log import note_request_id
from pdserve_router.requests.tenants.tenant import session_id, tenant_var
from pdserve_router.router import Router
from pdserve_router.workers.model_limits import ModelLimits
from pdserve_router.workers.model_version import ModelVersion

SERVICE_NAME = pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

TokenText = Callable[[int], str]
R = TypeVar("R")
M = TypeVar("M", pb2.GenerateRequest, pb2.PoolRequest, pb2.TokenizeRequest, pb2.DetokenizeRequest)

# How long a cut client has to take its status, which waits behind the data it does not read.
_ABORT_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcCall:
    """What is known of a request besides its message."""

    arrival_ns: int
    # time.monotonic(), of the whole machine.
    deadline: float | None
    trace_headers: Mapping[str, str]
    # As in GenerationRequest.
    tenant: str
    address: str
    session: str


class InferenceService:
    """Serves InferenceService from a Router. Messages come as bytes: what is made of them depends
    on how many there are. Methods raise a PdserveError, of which ReceiveGuard makes a status.
    """

    def __init__(
        self,
        router: Router,
        writes: WriteQueue,
        *,
        client_stall_timeout_s: float,
        edge: EdgeProcesses,
    ) -> None:
        self._router = router
        self._writes = writes
        self._client_stall_timeout_s = client_stall_timeout_s
        self._edge = edge

    def add_to(self, server: grpc.aio.Server) -> None:
        serialize = pb2.GenerateResponse.SerializeToString
        pool = pb2.PoolResponse.SerializeToString
        list_models = pb2.ListModelsResponse.SerializeToString
        handlers = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.Generate, response_serializer=serialize
            ),
            "Pool": grpc.unary_unary_rpc_method_handler(self.Pool, response_serializer=pool),
            "Tokenize": grpc.unary_unary_rpc_method_handler(self.Tokenize),
            "Detokenize": grpc.unary_unary_rpc_method_handler(self.Detokenize),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.ListModels, response_serializer=list_models
            ),
        }
        server.add_registered_method_handlers(SERVICE_NAME, handlers)

    async def Generate(self, raw: bytes, context: grpc.aio.ServicerContext) -> None:
        # Also when the call is cancelled: leaving ends the request on every worker.
        take = self._take(prepare_generate, raw, context)
        with self._router.answering(), await take as live:
            try:
                await self._stream(live, context, self._token_text(live))
            except ClientTooSlowError as error:
                # Not an error, which would be the service's: the client has left, in effect.
                live.cut(FinishReason.ABORT, error.to_engine_error())
                await _cut(context, error)

    async def Pool(self, raw: bytes, context: grpc.aio.ServicerContext) -> pb2.PoolResponse:
        take = self._take(prepare_pool, raw, context)
        with self._router.answering(), await take as live:
            output = await anext(live)
        if output.error is not None:
            raise error_from_engine(output.error)
        assert output.metrics is not None, "it has ended"
        context.set_trailing_metadata((*output.metrics.trailers(), _request_id_trailer(output)))
        return pool_response(output, live.core_request, self._router.model_name)

    async def _take(
        self, job: Job[ProcessedInput], raw: bytes, context: grpc.aio.ServicerContext
    ) -> LiveRequest:
        prepare = partial(self._prepare, job, raw, context, _call(context))
        (live,) = await self._router.submit(prepare)
        return live

    async def _prepare(
        self,
        job: Job[ProcessedInput],
        raw: bytes,
        context: grpc.aio.ServicerContext,
        call: GrpcCall,
        limits: ModelLimits,
    ) -> Sequence[ProcessedInput]:
        most = self._router.max_request_bytes
        processed = (await self._run(job, raw, most, context, call, limits),)
        self._edge.remember(processed)
        return processed

    def _token_text(self, live: LiveRequest) -> TokenText | None:
        """Without detokenization tokens stay numbers, also those of logprobs."""
        task = live.core_request.task
        is_text = isinstance(task, Generate) and task.sampling_params.detokenize
        return self._router.tokenizer.token_text if is_text else None

    async def _stream(
        self, live: LiveRequest, context: grpc.aio.ServicerContext, token_text: TokenText | None
    ) -> None:
        with StallGuard(self._client_stall_timeout_s) as guard:
            async for message in self._messages(live, context, token_text):
                await guard.write(context.write(message))

    async def _messages(
        self, live: LiveRequest, context: grpc.aio.ServicerContext, token_text: TokenText | None
    ) -> AsyncIterator[pb2.GenerateResponse]:
        collector = live.collector
        if collector is None:
            async for output in live:
                yield await _message(output, context, token_text)
            return
        collector.on_text = partial(self._writes.add, collector.wake)
        # The last one of text alone: of the next one only the text and the tokens differ. Making it
        # anew took 20 us.
        last: pb2.GenerateResponse | None = None
        while True:
            await collector.wait()
            if last is not None and (new := collector.take_text()) is not None:
                _set_text(last.output.outputs[0], *new, model_version=collector.model_version)
                yield last
                continue
            output = collector.take()
            message = await _message(output, context, token_text)
            yield message
            if output.finished:
                return
            last = message if _is_text_alone(output) else None

    async def Tokenize(self, raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
        limits = self._router.pool.model_limits()
        most = self._router.max_request_bytes
        return await self._run(prepare_tokenize, raw, most, context, limits)

    async def Detokenize(self, raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return await self._run(prepare_detokenize, raw, MAX_DETOKENIZE_BYTES, context)

    async def _run(
        self,
        job: Job[R],
        raw: bytes,
        most: int | None,
        context: grpc.aio.ServicerContext,
        *args: object,
    ) -> R:
        if most is not None and len(raw) > most:
            raise InvalidRequestError(
                f"the message has {len(raw)} bytes, at most {most} are of use (max_model_len)"
            )
        client = _address(context.peer())
        # Each message within begins with it.
        small = is_small(raw, b"\n")
        with self._edge.hold(client) as held:
            if not small:
                held.grow(len(raw))
            return await self._edge.run(job, raw, *args, client=client, is_small=small)

    async def ListModels(
        self, raw: bytes, context: grpc.aio.ServicerContext
    ) -> pb2.ListModelsResponse:
        limits = self._router.pool.limits
        if limits is None:
            return pb2.ListModelsResponse()
        shared: dict[str, Any] = {
            "max_model_len": limits.max_model_len,
            "tasks": sorted(limits.capabilities.tasks),
            "embedding_size": limits.embedding_size,
        }
        model = pb2.ModelInfo(id=self._router.model_name, **shared)
        adapters = [
            pb2.ModelInfo(id=each.name, parent=model.id, **shared)
            for each in self._router.pool.listed_adapters()
        ]
        return pb2.ListModelsResponse(models=[model, *adapters])


async def _message(
    output: RequestOutput, context: grpc.aio.ServicerContext, token_text: TokenText | None
) -> pb2.GenerateResponse:
    if output.finished:
        context.set_trailing_metadata(_trailers(output))
    return await write_off_loop(output, partial(_response, output, token_text))


def _is_text_alone(output: RequestOutput) -> bool:
    return output.outputs[0].is_text_alone and not output.prompt_token_ids


def _set_text(
    message: pb2.CompletionOutput, text: str, token_ids: Sequence[int], *, model_version: str
) -> None:
    message.text = text
    message.token_ids[:] = token_ids
    message.model_version = model_version


async def _cut(context: grpc.aio.ServicerContext, error: PdserveError) -> None:
    try:
        await asyncio.wait_for(context.abort(status_of(error), error.message), _ABORT_TIMEOUT_S)
    except asyncio.TimeoutError:
        # The status is queued in gRPC; nothing here waits for the client any more.
        return


def _call(context: grpc.aio.ServicerContext) -> GrpcCall:
    arrival_ns = time.monotonic_ns()
    remaining_s = context.time_remaining()
    metadata = _text_metadata(context)
    return GrpcCall(
        arrival_ns=arrival_ns,
        deadline=None if remaining_s is None else arrival_ns / 1e9 + remaining_s,
        trace_headers=trace_context(metadata),
        tenant=tenant_var.get(),
        address=_address(context.peer()),
        session=session_id(metadata),
    )


def _address(peer: str) -> str:
    """Of whoever sent it, without the port, as over HTTP."""
    return unquote(peer.rpartition(":")[0].partition(":")[2]).strip("[]")


async def prepare_generate(
    processor: InputProcessor, raw: bytes, call: GrpcCall, limits: ModelLimits
) -> ProcessedInput:
    """Parse, check and tokenize. Raises InvalidRequestError naming the field."""
    request = _parse(pb2.GenerateRequest, raw)
    note_request_id(request.request_id)
    params = request.sampling_params
    check_lengths(
        [
            ("resume", len(request.resume), MAX_N),
            ("bad_words_token_ids", len(params.bad_words_token_ids), 2 * MAX_BAD_WORDS),
            *((name, len(getattr(params, name)), limit) for name, limit in MAX_PARAMS.items()),
        ]
    )
    check_chat(request.chat)
    if request.include_events and params.use_beam_search:
        raise InvalidRequestError(
            "include_events is set with beam search, which is many requests to workers",
            field="include_events",
        )
    generation = _generation_request(request, call)
    processor.check_constraint(generation, limits)
    return await processor.process(generation, limits)


async def prepare_pool(
    processor: InputProcessor, raw: bytes, call: GrpcCall, limits: ModelLimits
) -> ProcessedInput:
    """Parse, check and tokenize. Raises InvalidRequestError naming the field."""
    request = _parse(pb2.PoolRequest, raw)
    note_request_id(request.request_id)
    pooling = pooling_input(
        request,
        request_id=request.request_id or _new_request_id(),
        arrival_ns=call.arrival_ns,
        deadline=call.deadline,
        trace_headers=call.trace_headers,
        tenant=call.tenant,
        session=call.session,
    )
    return await processor.process_pooling(pooling, limits)


async def prepare_tokenize(processor: InputProcessor, raw: bytes, limits: ModelLimits) -> bytes:
    """Return a TokenizeResponse."""
    request = _parse(pb2.TokenizeRequest, raw)
    processor.check_model(request.model, limits)
    check_chat(request.chat)
    kind = request.WhichOneof("prompt")
    tools = chat_tools(request.chat)
    token_ids = await processor.tokenize(
        text=request.text if kind == "text" else None,
        messages=chat_messages(request.chat) if kind == "chat" else None,
        tools=tools.tools if tools is not None else (),
        max_model_len=limits.max_model_len,
    )
    response = pb2.TokenizeResponse(token_ids=token_ids, max_model_len=limits.max_model_len)
    return response.SerializeToString()


async def prepare_detokenize(processor: InputProcessor, raw: bytes) -> bytes:
    """Return a DetokenizeResponse."""
    request = _parse(pb2.DetokenizeRequest, raw)
    processor.check_model(request.model)
    text = await processor.detokenize(request.token_ids)
    return pb2.DetokenizeResponse(text=text).SerializeToString()


def _parse(cls: type[M], raw: bytes) -> M:
    if len(raw) > INLINE_BYTES:
        check_wire_counts(raw, cls.DESCRIPTOR)
    try:
        return cls.FromString(raw)
    except DecodeError as error:
        raise InvalidRequestError(f"the message is no {cls.DESCRIPTOR.full_name}") from error


def _generation_request(request: pb2.GenerateRequest, call: GrpcCall) -> GenerationRequest:
    kind = request.WhichOneof("prompt")
    return GenerationRequest(
        request_id=request.request_id or _new_request_id(),
        model=request.model,
        lora_name=request.lora_name,
        text=request.text if kind == "text" else None,
        messages=chat_messages(request.chat) if kind == "chat" else None,
        tools=chat_tools(request.chat),
        token_ids=tuple(request.tokens.token_ids) if kind == "tokens" else None,
        sampling_params=wire.from_proto(SamplingParams, request.sampling_params),
        priority=request.priority,
        cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
        arrival_ns=call.arrival_ns,
        deadline=call.deadline,
        trace_headers=call.trace_headers,
        tenant=call.tenant,
        address=call.address,
        session=call.session,
        resume=tuple(map(_resumed_completion, request.resume)),
        prediction=request.prediction,
        include_events=request.include_events,
        data_parallel_rank=(
            request.data_parallel_rank if request.HasField("data_parallel_rank") else None
        ),
    )


def _new_request_id() -> str:
    return f"req-{secrets.token_hex(8)}"


def _resumed_completion(message: pb2.ResumedCompletion) -> ResumedCompletion:
    return ResumedCompletion(
        index=message.index,
        token_ids=tuple(message.token_ids),
        is_finished=message.finished,
        model_version=ModelVersion.parse(message.model_version),
    )


def _text_metadata(context: grpc.aio.ServicerContext) -> dict[str, str]:
    metadata = context.invocation_metadata() or ()
    return {key: value for key, value in metadata if isinstance(value, str)}


def _trailers(output: RequestOutput) -> tuple[tuple[str, str], ...]:
    assert output.metrics is not None
    return (
        *output.metrics.trailers(),
        ("pdserve-seed", str(output.seed)),
        _request_id_trailer(output),
    )


def _request_id_trailer(output: RequestOutput) -> tuple[str, str]:
    return ("pdserve-request-id", output.request_id[:MAX_REQUEST_ID_CHARS])


def _response(output: RequestOutput, token_text: TokenText | None) -> pb2.GenerateResponse:
    return pb2.GenerateResponse(output=_request_output_to_proto(output, token_text))


def _request_output_to_proto(
    output: RequestOutput, token_text: TokenText | None
) -> pb2.RequestOutput:
    message = pb2.RequestOutput(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        outputs=[_completion_to_proto(completion, token_text) for completion in output.outputs],
        finished=output.finished,
        seed=output.seed,
    )
    if output.prompt_logprobs is not None:
        message.prompt_logprobs.CopyFrom(
            wire.logprobs_to_proto(output.prompt_logprobs, token_text=token_text)
        )
    if output.usage is not None:
        message.usage.CopyFrom(pb2.Usage(**asdict(output.usage)))
    if output.metrics is not None:
        message.metrics.CopyFrom(pb2.RequestMetrics(**asdict(output.metrics)))
    return message


def _completion_to_proto(
    completion: CompletionOutput, token_text: TokenText | None
) -> pb2.CompletionOutput:
    message = pb2.CompletionOutput(
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids,
        model_version=completion.model_version,
    )
    add_parts(message, completion.parts)
    for event in completion.events:
        message.events.add(**asdict(event))
    if completion.logprobs is not None:
        message.logprobs.CopyFrom(
            wire.logprobs_to_proto(completion.logprobs, token_text=token_text)
        )
    if completion.cumulative_logprob is not None:
        message.cumulative_logprob = completion.cumulative_logprob
    if completion.finish_reason is not None:
        message.finish_reason = int(completion.finish_reason)  # type: ignore[assignment]
    if isinstance(completion.stop_reason, str):
        message.stop_string = completion.stop_reason
    elif completion.stop_reason is not None:
        message.stop_token_id = completion.stop_reason
    if completion.error is not None:
        message.error.CopyFrom(wire.to_proto(completion.error))
    return message
