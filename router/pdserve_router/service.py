"""The public gRPC API."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import grpc

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve.v1 import inference_service_pb2_grpc as pb2_grpc
from pdserve_common import wire
from pdserve_common.engine_types import FinishReason
from pdserve_common.errors import ClientTooSlowError, InvalidRequestError, PdserveError
from pdserve_common.rpc import rpc_errors, status_of
from pdserve_common.validation import MAX_REQUEST_ID_CHARS
from pdserve_router.input_processor import ChatMessage, GenerationRequest, trace_context
from pdserve_router.live_request import LiveRequest
from pdserve_router.offload import write_off_loop
from pdserve_router.origin import Origin
from pdserve_router.output_processor import CompletionOutput, RequestOutput
from pdserve_router.resume import ResumedCompletion
from pdserve_router.router import Router
from pdserve_router.stall_guard import StallGuard

SERVICE_NAME = pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

TokenText = Callable[[int], str]

# How long a cut client has to take its status, which waits behind the data it does not read.
_ABORT_TIMEOUT_S = 0.5


class InferenceService(pb2_grpc.InferenceServiceServicer):
    """Serves InferenceService from a Router."""

    def __init__(self, router: Router, *, client_stall_timeout_s: float) -> None:
        self._router = router
        self._client_stall_timeout_s = client_stall_timeout_s

    def add_to(self, server: grpc.aio.Server) -> None:
        pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

    async def Generate(
        self, request: pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with rpc_errors(context):
            generation = _generation_request(request, context)
            # Without detokenization tokens stay numbers, also those of logprobs.
            has_text = generation.sampling_params.detokenize
            token_text = self._router.tokenizer.token_text if has_text else None
            # Also when the call is cancelled: leaving ends the request on every worker.
            with self._router.answering(), await self._router.submit(generation) as live:
                try:
                    await self._stream(live, context, token_text)
                except ClientTooSlowError as error:
                    # Not an error, which would be the service's: the client has left, in effect.
                    live.cut(FinishReason.ABORT, error.to_engine_error())
                    await _cut(context, error)

    async def _stream(
        self, live: LiveRequest, context: grpc.aio.ServicerContext, token_text: TokenText | None
    ) -> None:
        with StallGuard(self._client_stall_timeout_s) as guard:
            async for output in live:
                if output.finished:
                    context.set_trailing_metadata(_trailers(output))
                message = await write_off_loop(output, partial(_response, output, token_text))
                await guard.write(context.write(message))

    async def Tokenize(
        self, request: pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb2.TokenizeResponse:
        async with rpc_errors(context):
            self._router.input_processor.check_model(request.model)
            limits = self._router.pool.model_limits()
            kind = request.WhichOneof("prompt")
            token_ids = await self._router.input_processor.tokenize(
                text=request.text if kind == "text" else None,
                messages=_messages(request.chat) if kind == "chat" else None,
            )
            return pb2.TokenizeResponse(token_ids=token_ids, max_model_len=limits.max_model_len)
        raise AssertionError("unreachable: rpc_errors aborts")

    async def Detokenize(
        self, request: pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb2.DetokenizeResponse:
        async with rpc_errors(context):
            self._router.input_processor.check_model(request.model)
            text = await self._router.input_processor.detokenize(request.token_ids)
            return pb2.DetokenizeResponse(text=text)
        raise AssertionError("unreachable: rpc_errors aborts")

    async def ListModels(
        self, request: pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb2.ListModelsResponse:
        limits = self._router.pool.limits
        if limits is None:
            return pb2.ListModelsResponse()
        model = pb2.ModelInfo(id=self._router.model_name, max_model_len=limits.max_model_len)
        return pb2.ListModelsResponse(models=[model])


async def _cut(context: grpc.aio.ServicerContext, error: PdserveError) -> None:
    try:
        await asyncio.wait_for(context.abort(status_of(error), error.message), _ABORT_TIMEOUT_S)
    except asyncio.TimeoutError:
        # The status is queued in gRPC; nothing here waits for the client any more.
        return


def _generation_request(
    request: pb2.GenerateRequest, context: grpc.aio.ServicerContext
) -> GenerationRequest:
    arrival_ns = time.monotonic_ns()
    if request.lora_name:
        raise InvalidRequestError("lora_name is set: not served yet", field="lora_name")
    remaining_s = context.time_remaining()
    kind = request.WhichOneof("prompt")
    return GenerationRequest(
        request_id=request.request_id or f"req-{secrets.token_hex(8)}",
        model=request.model,
        text=request.text if kind == "text" else None,
        messages=_messages(request.chat) if kind == "chat" else None,
        token_ids=tuple(request.tokens.token_ids) if kind == "tokens" else None,
        sampling_params=wire.sampling_params_from_proto(request.sampling_params),
        priority=request.priority,
        cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
        arrival_ns=arrival_ns,
        deadline=None if remaining_s is None else arrival_ns / 1e9 + remaining_s,
        trace_headers=trace_context(_text_metadata(context)),
        resume=tuple(map(_resumed_completion, request.resume)),
    )


def _resumed_completion(message: pb2.ResumedCompletion) -> ResumedCompletion:
    return ResumedCompletion(
        index=message.index,
        token_ids=tuple(message.token_ids),
        is_finished=message.finished,
        origin=Origin.parse(message.origin),
    )


def _text_metadata(context: grpc.aio.ServicerContext) -> dict[str, str]:
    metadata = context.invocation_metadata() or ()
    return {key: value for key, value in metadata if isinstance(value, str)}


def _messages(chat: pb2.ChatPrompt) -> Sequence[ChatMessage]:
    return [ChatMessage(role=m.role, content=m.content) for m in chat.messages]


def _trailers(output: RequestOutput) -> tuple[tuple[str, str], ...]:
    assert output.metrics is not None
    return (
        *output.metrics.trailers(),
        ("pdserve-seed", str(output.seed)),
        ("pdserve-request-id", output.request_id[:MAX_REQUEST_ID_CHARS]),
    )


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
        origin=completion.origin,
    )
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
        message.error.CopyFrom(wire.engine_error_to_proto(completion.error))
    return message
