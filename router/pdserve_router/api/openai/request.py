"""From the bytes of an OpenAI request to tokens: one function, for this process or another."""

import asyncio
import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve_common.errors import InvalidRequestError
from pdserve_common.limits.validation import DRAWN_SEED_BITS, validate_request_id
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.api.openai.model import session_of
from pdserve_router.api.openai.parse import parse_body
from pdserve_router.api.openai.types import ChatCompletionBody, CompletionBody, StreamOptions
from pdserve_router.api.responses.types import ResponsesBody
from pdserve_router.requests.input.generation_request import GenerationRequest
from pdserve_router.requests.input.input_processor import InputProcessor, ProcessedInput
from pdserve_router.requests.input.request_limits import INLINE_BYTES, check_json_counts
from pdserve_router.workers.model_limits import ModelLimits

Body = CompletionBody | ChatCompletionBody | ResponsesBody


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """What is known of a request besides its body."""

    # "" if only the body may say it.
    request_id: str
    arrival_ns: int
    trace_headers: Mapping[str, str]
    # As in GenerationRequest.
    tenant: str
    address: str
    # "" if only the body may say it.
    session: str

    def request_id_or(self, named: str | None) -> str:
        """Return the request's name, which its body may tell, too; made if nobody does. Raises
        InvalidRequestError.
        """
        request_id = self.request_id or named or secrets.token_hex(12)
        validate_request_id(request_id)
        return request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall(HttpCall):
    """And of one that generates."""

    body: type[Body]
    data_parallel_rank: int | None
    # As in GenerationRequest.
    max_logprob_entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How a body wants its answer."""

    # What every prompt asks for, before the input processor fills in what is unset.
    params: SamplingParams
    is_stream: bool
    include_usage: bool
    continuous_usage: bool
    include_metrics: bool
    returns_token_ids: bool
    shows_prompt_logprobs: bool
    is_prompt_only: bool
    echoes_prompt: bool
    shows_reasoning: bool
    # The texts of echoed prompts, one for each.
    prompt_texts: tuple[str, ...]
    # As in GenerationBody.
    repeated_fields: bytes
    # Names of fields that nobody knows.
    unknown_fields: tuple[str, ...]


async def prepare(
    processor: InputProcessor, raw: bytes, call: GenerationCall, limits: ModelLimits
) -> tuple[tuple[ProcessedInput, ...], AnswerOptions]:
    """Parse, check and tokenize, prompt by prompt. Raises InvalidRequestError naming the field."""
    if len(raw) > INLINE_BYTES:
        check_json_counts(raw, max_token_ids=limits.max_model_len + limits.vocab_size)
    body, unknown_fields = parse_body(call.body, raw)
    try:
        requests = _generation_requests(body, call)
        processed, texts = await _process(processor, body, requests, limits)
    except InvalidRequestError as error:
        raise body.own_error(error) from error
    params = requests[0].sampling_params
    return processed, _answer_options(body, params, texts, unknown_fields)


async def _process(
    processor: InputProcessor,
    body: Body,
    requests: Sequence[GenerationRequest],
    limits: ModelLimits,
) -> tuple[tuple[ProcessedInput, ...], tuple[str, ...]]:
    """Return the prompts, and the texts of those that are echoed."""
    if body.stream:
        _check_streamable(requests[0].sampling_params)
    processor.check_constraint(requests[0], limits)
    processed: list[ProcessedInput] = []
    for request in requests:
        if processed:
            await asyncio.sleep(0)  # other streams go on between two prompts
        processed.append(await processor.process(request, limits))
    texts: list[str] = []
    if body.echoes_prompt:
        texts = [
            await _prompt_text(processor, *pair, is_answered=not body.is_prompt_only)
            for pair in zip(requests, processed, strict=True)
        ]
    return tuple(processed), tuple(texts)


async def _prompt_text(
    processor: InputProcessor,
    request: GenerationRequest,
    processed: ProcessedInput,
    *,
    is_answered: bool,
) -> str:
    """Return what an echo shows; of a prompt that was cut, what is left."""
    if request.text is not None and request.truncate_prompt_tokens is None:
        return request.text
    return await processor.text_of_prompt(
        processed.core_request.prompt_token_ids, is_answered=is_answered
    )


def _answer_options(
    body: Body,
    params: SamplingParams,
    prompt_texts: tuple[str, ...],
    unknown_fields: tuple[str, ...],
) -> AnswerOptions:
    stream = body.stream_options or StreamOptions()
    return AnswerOptions(
        params=params,
        is_stream=bool(body.stream),
        include_usage=bool(stream.include_usage),
        continuous_usage=bool(stream.continuous_usage_stats),
        include_metrics=bool(stream.include_metrics),
        returns_token_ids=body.returns_token_ids,
        shows_prompt_logprobs=body.shows_prompt_logprobs,
        is_prompt_only=body.is_prompt_only,
        echoes_prompt=body.echoes_prompt,
        shows_reasoning=body.shows_reasoning,
        prompt_texts=prompt_texts,
        repeated_fields=body.repeated_fields,
        unknown_fields=unknown_fields,
    )


def _generation_requests(body: Body, call: GenerationCall) -> list[GenerationRequest]:
    """Return one for each prompt. Their answers come as one: the limit of what may be in that is
    theirs together.
    """
    prompts = body.prompt_inputs()
    request_id = call.request_id_or(body.request_id)
    constraint = body.constraint()
    params = body.sampling_params()
    if constraint is not None:
        params = dataclasses.replace(params, structured_outputs=constraint.params)
    if len(prompts) > 1 and params.seed is None:
        # All have the one that the answer tells.
        params = dataclasses.replace(params, seed=secrets.randbits(DRAWN_SEED_BITS))
    return [
        GenerationRequest(
            request_id=request_id,
            model=body.model or "",
            sampling_params=params,
            constraint_field=constraint.field if constraint else None,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            arrival_ns=call.arrival_ns,
            max_logprob_entries=call.max_logprob_entries // len(prompts),
            trace_headers=call.trace_headers,
            tenant=call.tenant,
            address=call.address,
            session=call.session or session_of(body.user),
            data_parallel_rank=call.data_parallel_rank,
            **prompt,
        )
        for prompt in prompts
    ]


def _check_streamable(params: SamplingParams) -> None:
    if params.use_beam_search or params.is_ranked:
        reason = "use_beam_search" if params.use_beam_search else "best_of above n"
        raise InvalidRequestError(
            f"stream is true, must be false with {reason}: the answer is not known before its end",
            field="stream",
        )
