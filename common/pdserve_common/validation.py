"""Checks on what clients send: every refusal names the field, the value and the limit."""

import math
import time
from collections.abc import Sequence

from pdserve_common.engine_types import (
    EarlyStopping,
    EngineCoreRequest,
    EngineInfo,
    KVTransferParams,
    SamplingParams,
    WorkerRole,
)
from pdserve_common.errors import InvalidRequestError

MAX_REQUEST_ID_CHARS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_SEED = 2**64 - 1
PRIORITY_LIMIT = 2**31 - 1
MAX_TIMEOUT_S = 7 * 24 * 3600

# Fields that are part of the API and not served yet: (name, value that means unused).
_UNSERVED_SAMPLING_FIELDS: tuple[tuple[str, object], ...] = (
    ("best_of", None),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("use_beam_search", False),
    ("length_penalty", 1.0),
    ("early_stopping", EarlyStopping.FALSE),
    ("logprobs", None),
    ("prompt_logprobs", None),
    ("logits_processors", ()),
    ("bad_words", ()),
    ("logit_bias", {}),
    ("allowed_token_ids", ()),
    ("structured_outputs", None),
    ("repetition_detection", None),
)
_UNSERVED_REQUEST_FIELDS: tuple[tuple[str, object], ...] = (
    ("pooling_params", None),
    ("mm_features", ()),
    ("lora_request", None),
    ("data_parallel_rank", None),
    ("prompt_embeds", None),
    ("prompt_is_token_ids", ()),
    ("resumable", False),
    ("reasoning_parser_kwargs", {}),
    ("resume_output_token_ids", ()),
)


def validate_sampling_params(params: SamplingParams, *, vocab_size: int) -> None:
    """Raise InvalidRequestError for the first field out of range or not served yet."""
    for name, unused in _UNSERVED_SAMPLING_FIELDS:
        value = getattr(params, name)
        if value != unused:
            raise InvalidRequestError(
                f"{name} is {value!r}: not served yet, leave it unset", field=name
            )
    if params.n < 1:
        raise InvalidRequestError(f"n is {params.n}, must be at least 1", field="n")
    if params.n > 1:
        raise InvalidRequestError(f"n is {params.n}: more than 1 is not served yet", field="n")
    _check_range("temperature", params.temperature, low=0.0, high=100.0)
    _check_range("top_p", params.top_p, low=0.0, high=1.0, is_low_open=True)
    _check_range("min_p", params.min_p, low=0.0, high=1.0)
    if params.top_k < -1:
        raise InvalidRequestError(
            f"top_k is {params.top_k}, must be -1 or 0 (all) or at least 1", field="top_k"
        )
    if params.seed is not None and not 0 <= params.seed <= MAX_SEED:
        raise InvalidRequestError(f"seed is {params.seed}, must be 0 to {MAX_SEED}", field="seed")
    _validate_lengths(params)
    _validate_stops(params, vocab_size)


def _validate_lengths(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens is {params.max_tokens}, must be at least 1", field="max_tokens"
        )
    if params.min_tokens < 0:
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}, must be at least 0", field="min_tokens"
        )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}, must be at most max_tokens ({params.max_tokens})",
            field="min_tokens",
        )


def _validate_stops(params: SamplingParams, vocab_size: int) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop has {len(params.stop)} strings, at most {MAX_STOP_STRINGS}", field="stop"
        )
    for text in params.stop:
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                f"stop has a string of {len(text)} characters, "
                f"must be 1 to {MAX_STOP_STRING_CHARS}",
                field="stop",
            )
    if params.stop and not params.detokenize:
        raise InvalidRequestError("stop needs detokenize, which is false", field="stop")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(params.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS}",
            field="stop_token_ids",
        )
    validate_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def validate_prompt(token_ids: Sequence[int], *, max_model_len: int, vocab_size: int) -> None:
    """Raise InvalidRequestError for an empty or too long prompt or an unknown token."""
    if not token_ids:
        raise InvalidRequestError("prompt is empty, needs at least 1 token", field="prompt")
    if len(token_ids) >= max_model_len:
        raise InvalidRequestError(
            f"prompt has {len(token_ids)} tokens, at most {max_model_len - 1} fit "
            f"(max_model_len is {max_model_len}, one is for the answer)",
            field="prompt",
        )
    validate_token_ids("prompt_token_ids", token_ids, vocab_size)


def validate_request_id(request_id: str) -> None:
    """Raise InvalidRequestError for an id that is empty, too long or not printable ASCII."""
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(
            f"request_id has {len(request_id)} characters, must be 1 to {MAX_REQUEST_ID_CHARS}",
            field="request_id",
        )
    if not (request_id.isascii() and request_id.isprintable()):
        raise InvalidRequestError("request_id must be printable ASCII", field="request_id")


def validate_engine_core_request(request: EngineCoreRequest, info: EngineInfo) -> None:
    """The worker's own check: a router is not trusted to have validated."""
    validate_request_id(request.request_id)
    for name, unused in _UNSERVED_REQUEST_FIELDS:
        value = getattr(request, name)
        if value != unused:
            raise InvalidRequestError(f"{name} is set: not served yet, leave it unset", field=name)
    if request.sampling_params is None:
        raise InvalidRequestError("sampling_params is unset", field="sampling_params")
    if abs(request.priority) > PRIORITY_LIMIT:
        raise InvalidRequestError(f"priority is {request.priority}", field="priority")
    validate_prompt(
        request.prompt_token_ids, max_model_len=info.max_model_len, vocab_size=info.vocab_size
    )
    validate_sampling_params(request.sampling_params, vocab_size=info.vocab_size)
    if request.eos_token_id is not None:
        validate_token_ids("eos_token_id", (request.eos_token_id,), info.vocab_size)
    if request.kv_transfer_params is not None:
        _validate_kv_transfer_params(request.kv_transfer_params, info)
    if request.deadline is not None:
        timeout_s = request.deadline - time.monotonic()
        if timeout_s > MAX_TIMEOUT_S:
            raise InvalidRequestError(
                f"timeout is {timeout_s:.0f} s, must be at most {MAX_TIMEOUT_S} s",
                field="timeout_ns",
            )


def validate_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequestError for the first token id outside the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"{field} has {wrong}, token ids are 0 to {vocab_size - 1}", field=field
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


def _check_range(
    field: str, value: float, *, low: float, high: float, is_low_open: bool = False
) -> None:
    is_in = math.isfinite(value) and low <= value <= high and not (is_low_open and value == low)
    if not is_in:
        bracket = "above" if is_low_open else "at least"
        raise InvalidRequestError(
            f"{field} is {value}, must be {bracket} {low:g} and at most {high:g}", field=field
        )
