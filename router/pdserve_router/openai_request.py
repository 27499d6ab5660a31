"""From the bytes of an OpenAI request to tokens: one function, for this process or another."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve_common.engine_types import SamplingParams
from pdserve_common.errors import InvalidRequestError
from pdserve_router.input_processor import GenerationRequest, InputProcessor, ProcessedInput
from pdserve_router.openai_types import ChatCompletionBody, CompletionBody, parse_body
from pdserve_router.parent_request import is_ranked
from pdserve_router.request_limits import INLINE_BYTES, check_json_counts
from pdserve_router.worker_pool import ModelLimits

Body = CompletionBody | ChatCompletionBody


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """What is known of a request besides its body."""

    body: type[Body]
    request_id: str
    arrival_ns: int
    trace_headers: Mapping[str, str]
    # As in GenerationRequest.
    max_logprob_entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How a body wants its answer."""

    is_stream: bool
    include_usage: bool
    shows_prompt_logprobs: bool
    is_prompt_only: bool
    echoes_prompt: bool
    # Only of a prompt that is echoed.
    prompt_text: str


async def prepare(
    processor: InputProcessor, raw: bytes, call: HttpCall, limits: ModelLimits
) -> tuple[ProcessedInput, AnswerOptions]:
    """Parse, check and tokenize. Raises InvalidRequestError naming the field."""
    if len(raw) > INLINE_BYTES:
        check_json_counts(raw, max_token_ids=limits.max_model_len + limits.vocab_size)
    body = parse_body(call.body, raw)
    request = _generation_request(body, call)
    processed = await processor.process(request, limits)
    options = AnswerOptions(
        is_stream=bool(body.stream),
        include_usage=body.include_usage,
        shows_prompt_logprobs=body.prompt_logprobs is not None,
        is_prompt_only=body.is_prompt_only,
        echoes_prompt=body.echoes_prompt,
        prompt_text=await _prompt_text(processor, request, processed) if body.echoes_prompt else "",
    )
    return processed, options


async def _prompt_text(
    processor: InputProcessor, request: GenerationRequest, processed: ProcessedInput
) -> str:
    if request.text is not None:
        return request.text
    return await processor.text_of(processed.request.prompt_token_ids)


def _generation_request(body: Body, call: HttpCall) -> GenerationRequest:
    if not body.model:
        raise InvalidRequestError("model is empty", field="model")
    request = GenerationRequest(
        request_id=call.request_id,
        model=body.model,
        sampling_params=body.sampling_params(),
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        arrival_ns=call.arrival_ns,
        max_logprob_entries=call.max_logprob_entries,
        trace_headers=call.trace_headers,
        **body.prompt_input(),
    )
    if body.stream:
        _check_streamable(request.sampling_params)
    return request


def _check_streamable(params: SamplingParams) -> None:
    if params.use_beam_search or is_ranked(params):
        reason = "use_beam_search" if params.use_beam_search else "best_of above n"
        raise InvalidRequestError(
            f"stream is true, must be false with {reason}: the answer is not known before its end",
            field="stream",
        )
