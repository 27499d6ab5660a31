"""The worker's own check of a request: a router is not trusted to have validated."""

import time
from collections.abc import Mapping, Sequence

from pdserve_common.errors import InvalidRequestError
from pdserve_common.limits.validation import (
    MAX_ATTEMPT,
    MAX_MM_FEATURES,
    MAX_PROBE_BLOCKS,
    MAX_PROBE_TOKENS,
    MAX_TIMEOUT_S,
    MAX_TRACE_HEADER_CHARS,
    MAX_TRACE_HEADERS,
    PROBE_PRIORITY,
    check_count,
    id_problem,
    validate_choice,
    validate_pooling_params,
    validate_prediction,
    validate_priority,
    validate_prompt,
    validate_prompt_logprobs,
    validate_request_id,
    validate_sampling_params,
    validate_token_ids,
)
from pdserve_common.structured.reasoning import reasoning_of
from pdserve_common.types.capabilities import Capabilities, check_served
from pdserve_common.types.engine import (
    EngineCoreRequest,
    EngineInfo,
    Generate,
    KVTransferParams,
    MultiModalFeatureSpec,
    Pool,
    WorkerRole,
)
from pdserve_common.types.pooling_params import PoolingParams
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_common.types.tensors import validate_tensor_ref

# What the router does with several requests; a worker's request is one sequence without text.
_ROUTER_SAMPLING_FIELDS: tuple[tuple[str, object], ...] = (
    ("n", 1),
    ("best_of", None),
    ("use_beam_search", False),
)
# Fields of EngineCoreRequest that only a request with output tokens can have.
_GENERATION_FIELDS: tuple[tuple[str, object], ...] = (
    ("mm_features", ()),
    ("kv_transfer_params", None),
    ("resume_output_token_ids", ()),
    ("fork_of", None),
    ("prediction_token_ids", ()),
    ("reasoning_ended", None),
    ("reasoning_parser_kwargs", {}),
)


def validate_engine_core_request(request: EngineCoreRequest, info: EngineInfo) -> None:
    """Raise InvalidRequestError for the first field that this worker cannot take, and
    AdapterNotHeldError for an adapter that others may have.
    """
    validate_request_id(request.request_id)
    capabilities = Capabilities.of(info)
    check_served(request, capabilities)
    _validate_rank(request.data_parallel_rank, info)
    if request.priority == PROBE_PRIORITY:
        _validate_probe(request, info)
    else:
        validate_priority(request.priority)
    _validate_trace_headers(request.trace_headers)
    if request.client_id and (problem := id_problem("client_id", request.client_id)) is not None:
        raise InvalidRequestError(problem, field="client_id")
    validate_prompt(
        request.prompt_token_ids,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        is_pooling=isinstance(request.task, Pool),
    )
    if request.mm_features:
        _validate_mm_features(request.mm_features, len(request.prompt_token_ids))
    if request.attempt > MAX_ATTEMPT:
        raise InvalidRequestError(
            f"attempt is {request.attempt}, must be at most {MAX_ATTEMPT}", field="attempt"
        )
    match request.task:
        case Pool(pooling_params):
            _validate_pooling(request, pooling_params, capabilities)
        case Generate(sampling_params):
            _validate_generation(request, sampling_params, info, capabilities)
    if request.eos_token_id is not None:
        validate_token_ids("eos_token_id", (request.eos_token_id,), info.vocab_size)
    _validate_times(request)


def _validate_rank(rank: int | None, info: EngineInfo) -> None:
    if rank is not None and rank != info.data_parallel_rank:
        raise InvalidRequestError(
            f"data_parallel_rank is {rank}, this is rank {info.data_parallel_rank} of "
            f"{info.data_parallel_size}",
            field="data_parallel_rank",
        )


def _validate_pooling(
    request: EngineCoreRequest, params: PoolingParams, capabilities: Capabilities
) -> None:
    """It has no output tokens and stays on its worker."""
    validate_pooling_params(params, capabilities)
    for name, unused in _GENERATION_FIELDS:
        if getattr(request, name) != unused:
            raise InvalidRequestError(
                f"{name} and pooling_params are both set: a pooling request generates nothing on "
                "one worker, leave it unset",
                field=name,
            )


def _validate_generation(
    request: EngineCoreRequest,
    params: SamplingParams,
    info: EngineInfo,
    capabilities: Capabilities,
) -> None:
    validate_sampling_params(params, vocab_size=info.vocab_size, capabilities=capabilities)
    prediction = request.prediction_token_ids
    validate_prediction("prediction_token_ids", prediction, info.max_model_len, info.vocab_size)
    reasoning_of(request, params)
    _validate_one_sequence(params)
    validate_prompt_logprobs(params, len(request.prompt_token_ids))
    _validate_resume(request, params, info)
    if request.fork_of is not None:
        _validate_fork(request, request.fork_of)
    if request.kv_transfer_params is not None:
        _validate_kv_transfer_params(request.kv_transfer_params, info)
    validate_choice(params, eos_token_id=request.eos_token_id, vocab_size=info.vocab_size)
    if params.structured_outputs is not None:
        _validate_end(request, params, info)


def _validate_end(request: EngineCoreRequest, params: SamplingParams, info: EngineInfo) -> None:
    """A grammar ends with any EOS of the model, and allows nothing behind it."""
    ends = {request.eos_token_id, *params.stop_token_ids}
    if missing := [token_id for token_id in info.eos_token_ids if token_id not in ends]:
        raise InvalidRequestError(
            f"structured_outputs may end with token {missing[0]}, which is neither eos_token_id "
            "nor in stop_token_ids",
            field="eos_token_id",
        )


def _validate_mm_features(
    features: Sequence[MultiModalFeatureSpec], num_prompt_tokens: int
) -> None:
    """They stand in the prompt one behind the other, and each is what its name says."""
    check_count("mm_features", len(features), "items", MAX_MM_FEATURES)
    start = 0
    for index, feature in enumerate(features):
        field = f"mm_features[{index}]"
        end = feature.position + feature.length
        if not (feature.length and start <= feature.position and end <= num_prompt_tokens):
            raise InvalidRequestError(
                f"{field} has the positions {feature.position} to {end}, must have one at least, "
                f"{start} to {num_prompt_tokens}",
                field="mm_features",
            )
        start = end
        if feature.data is None:
            raise InvalidRequestError(f"{field}.data is missing", field="mm_features")
        validate_tensor_ref(f"{field}.data", feature.data)
        shape = feature.data.shape
        if len(shape) != 3 or shape[-1] != 3:
            raise InvalidRequestError(
                f"{field}.data.shape is {list(shape)}, must be [height, width, 3]",
                field="mm_features",
            )
        # Another content under this name would be found in the prefix cache.
        if feature.identifier != feature.data.content_hash.hex():
            raise InvalidRequestError(
                f"{field}.identifier is {feature.identifier[:64]!r}, must be its content_hash",
                field="mm_features",
            )


def _validate_fork(request: EngineCoreRequest, fork_of: str) -> None:
    validate_request_id(fork_of)
    if request.kv_transfer_params is not None:
        raise InvalidRequestError(
            "fork_of and kv_transfer_params are both set: a fork shares blocks of its worker",
            field="fork_of",
        )
    if request.attempt > 0:  # two requests could wait for each other
        raise InvalidRequestError(
            f"fork_of is set, attempt is {request.attempt}, must be 0: a fork that is sent "
            "again is a request of its own",
            field="fork_of",
        )


def _validate_times(request: EngineCoreRequest) -> None:
    age_s = time.monotonic() - request.arrival_time
    if age_s > MAX_TIMEOUT_S:  # older ones would go before all others of their priority
        raise InvalidRequestError(
            f"age is {age_s:.0f} s, must be at most {MAX_TIMEOUT_S} s", field="age_ns"
        )
    if request.deadline is not None:
        timeout_s = request.deadline - time.monotonic()
        if timeout_s > MAX_TIMEOUT_S:
            raise InvalidRequestError(
                f"timeout is {timeout_s:.0f} s, must be at most {MAX_TIMEOUT_S} s",
                field="timeout_ns",
            )


def _validate_probe(request: EngineCoreRequest, info: EngineInfo) -> None:
    """It goes ahead of clients' requests, so it has to be tiny."""
    why = f"priority is {PROBE_PRIORITY}, which is for probes"
    limit = MAX_PROBE_BLOCKS * info.block_size
    if len(request.prompt_token_ids) > limit:
        raise InvalidRequestError(
            f"{why}: the prompt has {len(request.prompt_token_ids)} tokens, at most {limit}",
            field="priority",
        )
    if isinstance(request.task, Generate):
        most = request.task.sampling_params.max_tokens
        if most is None or most > MAX_PROBE_TOKENS:
            raise InvalidRequestError(
                f"{why}: max_tokens is {most}, at most {MAX_PROBE_TOKENS}", field="priority"
            )
    if request.fork_of is not None:
        raise InvalidRequestError(f"{why}: fork_of is set, leave it unset", field="priority")


def _validate_resume(request: EngineCoreRequest, params: SamplingParams, info: EngineInfo) -> None:
    """Something must be left to generate behind what was delivered before."""
    token_ids = request.resume_output_token_ids
    if not token_ids:
        return
    field = "resume_output_token_ids"
    validate_token_ids(field, token_ids, info.vocab_size)
    room = info.max_model_len - len(request.prompt_token_ids)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    if len(token_ids) >= limit:
        raise InvalidRequestError(
            f"{field} has {len(token_ids)} tokens, the request ends after {limit}", field=field
        )


def _validate_trace_headers(headers: Mapping[str, str]) -> None:
    """They come back with the request's end."""
    field = "trace_headers"
    check_count(field, len(headers), "headers", MAX_TRACE_HEADERS)
    longest = max(map(len, (*headers, *headers.values())), default=0)
    if longest > MAX_TRACE_HEADER_CHARS:
        raise InvalidRequestError(
            f"{field} has a text of {longest} characters, at most {MAX_TRACE_HEADER_CHARS}",
            field=field,
        )


def _validate_one_sequence(params: SamplingParams) -> None:
    for name, unused in _ROUTER_SAMPLING_FIELDS:
        value = getattr(params, name)
        if value != unused:
            raise InvalidRequestError(
                f"{name} is {value}: a worker generates one sequence, routers make several of it",
                field=name,
            )
    if params.bad_words and not params.bad_words_token_ids:
        raise InvalidRequestError(
            "bad_words is set without bad_words_token_ids: workers know no text",
            field="bad_words",
        )


def _validate_kv_transfer_params(params: KVTransferParams, info: EngineInfo) -> None:
    """A leg must suit its worker, or nobody would ever finish it."""
    field = "kv_transfer_params"
    if params.do_remote_decode == params.do_remote_prefill:
        raise InvalidRequestError(
            f"{field} needs exactly one of do_remote_decode and do_remote_prefill", field=field
        )
    role = WorkerRole.PREFILL if params.do_remote_decode else WorkerRole.DECODE
    if info.role is not role:
        raise InvalidRequestError(
            f"{field} is for a {role.name.lower()} worker, "
            f"this is a {info.role.name.lower()} worker",
            field=field,
        )
    if not params.remote_engine_id:
        raise InvalidRequestError(f"{field}.remote_engine_id is empty", field=field)
    if params.do_remote_prefill and not (params.remote_host and 0 < params.remote_port < 65536):
        raise InvalidRequestError(
            f"{field} has no address to pull from: host {params.remote_host!r}, "
            f"port {params.remote_port}",
            field=field,
        )
    source = params.prefix_source
    if source is not None and not (
        params.do_remote_decode
        and source.engine_id
        and source.host
        and 0 < source.port < 65536
        and source.num_tokens > 0
    ):
        raise InvalidRequestError(f"{field}.prefix_source makes no sense: {source}", field=field)
