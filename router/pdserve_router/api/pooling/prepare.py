"""From the bytes of a request for vectors or scores to tokens: for this process or another."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pdserve_common.errors import InvalidRequestError
from pdserve_common.types.capabilities import check_task
from pdserve_common.types.pooling_params import CLASSIFY, EMBED, SCORE, PoolingParams
from pdserve_router.api.openai.model import prompt_input, prompt_list, session_of
from pdserve_router.api.openai.parse import check_names, json_object, validate
from pdserve_router.api.openai.request import HttpCall
from pdserve_router.api.pooling.types import (
    ClassifyBody,
    EmbeddingBody,
    InputBody,
    PoolBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from pdserve_router.requests.input.input_processor import InputProcessor, ProcessedInput
from pdserve_router.requests.input.pooling_input import PoolingInput
from pdserve_router.requests.input.request_limits import (
    INLINE_BYTES,
    MAX_POOLED_CHARS,
    MAX_POOLED_INPUTS,
    MAX_POOLED_NUMBERS,
    MAX_POOLED_TOKENS,
    check_json_counts,
    check_num_entries,
)
from pdserve_router.workers.model_limits import ModelLimits

B = TypeVar("B", bound=PoolingBody)
# Where an input stands in its body, and its fields of a PoolingInput.
Place = tuple[str, dict[str, Any]]

_LISTS = ("input", "documents", "text_1", "text_2")
_PROMPT_FIELDS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a body asks for: the vectors of some inputs, and what is made of them."""

    task: str
    inputs: tuple[ProcessedInput, ...]
    # Scores of embeddings: which inputs are compared. None: vectors are the answer.
    compared: tuple[tuple[int, int], ...] | None = None
    is_base64: bool = False
    # What a reranking has: the documents' texts, how many results, and whether texts are told.
    documents: tuple[str, ...] = ()
    top_n: int | None = None
    returns_documents: bool = True
    # Names of fields that nobody knows.
    unknown_fields: tuple[str, ...] = ()


async def prepare_embeddings(
    processor: InputProcessor, raw: bytes, call: HttpCall, limits: ModelLimits
) -> Prepared:
    """Of an EmbeddingBody. Raises InvalidRequestError naming the field, as all of these."""
    body, unknown = _parse(EmbeddingBody, raw, limits)
    return await _prepare_vectors(processor, EMBED, body, unknown, call, limits)


async def prepare_pooling(
    processor: InputProcessor, raw: bytes, call: HttpCall, limits: ModelLimits
) -> Prepared:
    """Of a PoolBody."""
    body, unknown = _parse(PoolBody, raw, limits)
    served = [task for task in (EMBED, CLASSIFY, SCORE) if task in limits.capabilities.tasks]
    task: str = body.task or next(iter(served), EMBED)
    return await _prepare_vectors(processor, task, body, unknown, call, limits)


async def _prepare_vectors(
    processor: InputProcessor,
    task: str,
    body: EmbeddingBody,
    unknown: tuple[str, ...],
    call: HttpCall,
    limits: ModelLimits,
) -> Prepared:
    params = _params(task, body, body.dimensions)
    return Prepared(
        task=task,
        inputs=await _process(processor, body, _places(body), params, call, limits),
        is_base64=body.encoding_format == "base64",
        unknown_fields=unknown,
    )


async def prepare_classes(
    processor: InputProcessor, raw: bytes, call: HttpCall, limits: ModelLimits
) -> Prepared:
    """Of a ClassifyBody."""
    body, unknown = _parse(ClassifyBody, raw, limits)
    params = _params(CLASSIFY, body)
    inputs = await _process(processor, body, _places(body), params, call, limits)
    return Prepared(task=CLASSIFY, inputs=inputs, unknown_fields=unknown)


async def prepare_scores(
    processor: InputProcessor, raw: bytes, call: HttpCall, limits: ModelLimits
) -> Prepared:
    """Of a ScoreBody."""
    body, unknown = _parse(ScoreBody, raw, limits)
    task, inputs, compared = await _compare(
        processor, body, body.pairs(), ("text_1", "text_2"), call, limits
    )
    return Prepared(task=task, inputs=inputs, compared=compared, unknown_fields=unknown)


async def prepare_reranking(
    processor: InputProcessor, raw: bytes, call: HttpCall, limits: ModelLimits
) -> Prepared:
    """Of a RerankBody."""
    body, unknown = _parse(RerankBody, raw, limits)
    if body.top_n is not None and body.top_n < 0:
        raise InvalidRequestError(f"top_n is {body.top_n}, must be at least 0", field="top_n")
    texts = body.texts
    pairs = [(body.query, text) for text in texts]
    task, inputs, compared = await _compare(
        processor, body, pairs, ("query", "documents"), call, limits
    )
    return Prepared(
        task=task,
        inputs=inputs,
        compared=compared,
        documents=tuple(texts),
        top_n=body.top_n or None,
        returns_documents=body.return_documents is not False,
        unknown_fields=unknown,
    )


def _parse(cls: type[B], raw: bytes, limits: ModelLimits) -> tuple[B, tuple[str, ...]]:
    if len(raw) > INLINE_BYTES:
        check_json_counts(raw, max_token_ids=max(MAX_POOLED_TOKENS, limits.max_model_len))
    values = json_object(raw)
    for name in _LISTS:
        # A list of token ids is one input.
        value = values.get(name)
        if isinstance(value, list) and value and isinstance(value[0], str | list | dict):
            check_num_entries(name, value, MAX_POOLED_INPUTS)
    unknown = check_names(cls, values)
    return validate(cls, values), unknown.names()


def _params(task: str, body: PoolingBody, dimensions: int | None = None) -> PoolingParams:
    return PoolingParams(task=task, dimensions=dimensions, use_activation=body.use_activation)


def _places(body: InputBody) -> list[Place]:
    special = {"add_special_tokens": body.add_special_tokens is not False}
    inputs = prompt_list(body.input)
    if len(inputs) == 1 and inputs[0] is body.input:
        return [("input", prompt_input(body.input, field="input") | special)]
    places = [f"input[{index}]" for index in range(len(inputs))]
    return [
        (place, prompt_input(each, field=place) | special)
        for place, each in zip(places, inputs, strict=True)
    ]


async def _compare(
    processor: InputProcessor,
    body: PoolingBody,
    pairs: Sequence[tuple[str, str]],
    fields: tuple[str, str],
    call: HttpCall,
    limits: ModelLimits,
) -> tuple[str, tuple[ProcessedInput, ...], tuple[tuple[int, int], ...] | None]:
    """Return the task, its inputs, and which are compared: pairs as one text each for a model that
    scores them, else each text by itself, to be compared by its embedding.
    """
    if not pairs:
        raise InvalidRequestError(f"{fields[1]} is empty, needs at least 1", field=fields[1])
    num_chars = sum(len(first) + len(second) for first, second in pairs)
    if num_chars > MAX_POOLED_CHARS:
        raise InvalidRequestError(
            f"{fields[0]} and {fields[1]} have {num_chars} characters in {len(pairs)} pairs, at "
            f"most {MAX_POOLED_CHARS}",
            field=fields[1],
        )
    processor.check_inline(num_chars)
    if EMBED not in limits.capabilities.tasks:
        check_task(SCORE, limits.capabilities)
        params = _params(SCORE, body)
        places = [
            (f"{fields[1]}[{index}]", {"text": first, "text_pair": second})
            for index, (first, second) in enumerate(pairs)
        ]
        return SCORE, await _process(processor, body, places, params, call, limits), None
    # A text that comes several times is computed once.
    numbers: dict[str, int] = {}
    places = []
    for index, pair in enumerate(pairs):
        for field, text in zip(fields, pair, strict=True):
            if text not in numbers:
                numbers[text] = len(numbers)
                places.append((f"{field}[{index}]", {"text": text}))
    inputs = await _process(processor, body, places, _params(EMBED, body), call, limits)
    return EMBED, inputs, tuple((numbers[first], numbers[second]) for first, second in pairs)


async def _process(
    processor: InputProcessor,
    body: PoolingBody,
    places: Sequence[Place],
    params: PoolingParams,
    call: HttpCall,
    limits: ModelLimits,
) -> tuple[ProcessedInput, ...]:
    """Check and tokenize, input by input. Refusals of one say which it is."""
    _check_size(len(places), params, limits)
    most = max(MAX_POOLED_TOKENS, limits.max_model_len)
    request_id = call.request_id_or(body.request_id)
    processed: list[ProcessedInput] = []
    num_tokens = 0
    for place, prompt in places:
        if processed:
            await asyncio.sleep(0)  # other requests go on between two inputs
        request = PoolingInput(
            request_id=request_id,
            model=body.model or "",
            pooling_params=params,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            keeps_end=body.truncation_side == "left",
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            arrival_ns=call.arrival_ns,
            trace_headers=call.trace_headers,
            tenant=call.tenant,
            address=call.address,
            session=call.session or session_of(body.user),
            **prompt,
        )
        try:
            processed.append(await processor.process_pooling(request, limits))
        except InvalidRequestError as error:
            if error.field not in _PROMPT_FIELDS:
                raise
            raise InvalidRequestError(f"{place}: {error.message}", field=place) from error
        num_tokens += len(processed[-1].core_request.prompt_token_ids)
        if num_tokens > most:
            raise InvalidRequestError(
                f"inputs up to {place} have {num_tokens} tokens together, at most {most}",
                field=place,
            )
    return tuple(processed)


def _check_size(num_inputs: int, params: PoolingParams, limits: ModelLimits) -> None:
    """Bound an answer, which is sent as a whole."""
    size = params.dimensions or limits.embedding_size
    if num_inputs > 1 and num_inputs * size > MAX_POOLED_NUMBERS:
        raise InvalidRequestError(
            f"{num_inputs} inputs have {num_inputs * size} numbers in their vectors, at most "
            f"{MAX_POOLED_NUMBERS}",
            field="input",
        )
