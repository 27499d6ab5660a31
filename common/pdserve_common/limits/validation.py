"""Checks on what clients send: every refusal names the field, the value and the limit."""

import math
from collections.abc import Sequence

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import validate_structured_outputs
from pdserve_common.types.capabilities import NO_EXTRAS, Capabilities, check_served, check_task
from pdserve_common.types.pooling_params import EMBED, GENERATE, PoolingParams
from pdserve_common.types.sampling_params import (
    EarlyStopping,
    RepetitionDetectionParams,
    SamplingParams,
)

MAX_REQUEST_ID_CHARS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_SEED = 2**64 - 1
# A seed that is drawn, because none was given, has so many bits.
DRAWN_SEED_BITS = 63
# Clients' priorities are between plus and minus this.
PRIORITY_LIMIT = 2**31 - 2
# Routers' own tiny requests, which show whether workers can be used, have this priority. Workers
# compute these before all others, and beside a full batch, so no other may look like one.
PROBE_PRIORITY = -PRIORITY_LIMIT - 1
MAX_PROBE_BLOCKS = 2
MAX_PROBE_TOKENS = 2
# Logits are divided or multiplied by it, in fp32: within these bounds none becomes infinite or NaN.
MIN_REPETITION_PENALTY = 1 / 64
MAX_REPETITION_PENALTY = 100.0
MAX_N = 64
MAX_LOGPROBS = 20
# Workers have their own limit, which is lower.
MAX_DRAFT_TOKENS = 1024
# All logprobs of a prompt are in one message of at most 16 MiB: an entry has a token id, a float
# and a short text, 20 bytes on average and 64 at the very most.
MAX_PROMPT_LOGPROB_ENTRIES = 2**18
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_TOKENS = 256
MAX_LOGIT_BIAS = 1024
# One request has at most so many; routers have a limit of their own, which is lower.
MAX_MM_FEATURES = 256
MAX_LOGITS_PROCESSORS = 16
MAX_PATTERN_SIZE = 1024
# No answer is that long; integers of this size fit into every field of the wire.
MAX_COUNT = 2**31 - 1
MAX_TIMEOUT_S = 7 * 24 * 3600
# A router gives up long before.
MAX_ATTEMPT = 1000
MAX_TRACE_HEADERS = 8
# A name or a value has at most so many characters; W3C's tracestate has room for 512.
MAX_TRACE_HEADER_CHARS = 512


def validate_sampling_params(
    params: SamplingParams, *, vocab_size: int, capabilities: Capabilities = NO_EXTRAS
) -> None:
    """Raise InvalidRequestError for the first field out of range or not served by a worker of these
    capabilities.
    """
    if params.structured_outputs is not None:
        validate_structured_outputs(params)
    check_served(params, capabilities)
    _validate_branches(params)
    _check_range("presence_penalty", params.presence_penalty, low=-2.0, high=2.0)
    _check_range("frequency_penalty", params.frequency_penalty, low=-2.0, high=2.0)
    _check_range(
        "repetition_penalty",
        params.repetition_penalty,
        low=MIN_REPETITION_PENALTY,
        high=MAX_REPETITION_PENALTY,
    )
    _check_range("temperature", params.temperature, low=0.0, high=100.0)
    _check_range("top_p", params.top_p, low=0.0, high=1.0, is_low_open=True)
    _check_range("min_p", params.min_p, low=0.0, high=1.0)
    if params.top_k < -1:
        raise InvalidRequestError(
            f"top_k is {params.top_k}, must be -1 or 0 (all) or at least 1", field="top_k"
        )
    if params.seed is not None and not 0 <= params.seed <= MAX_SEED:
        raise InvalidRequestError(f"seed is {params.seed}, must be 0 to {MAX_SEED}", field="seed")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise InvalidRequestError(f"{name} is {value}, must be 0 to {MAX_LOGPROBS}", field=name)
    draft = params.max_draft_tokens
    if draft is not None and not 0 <= draft <= MAX_DRAFT_TOKENS:
        raise InvalidRequestError(
            f"max_draft_tokens is {draft}, must be 0 to {MAX_DRAFT_TOKENS}",
            field="max_draft_tokens",
        )
    _validate_lengths(params)
    _validate_stops(params, vocab_size)
    _validate_token_choice(params, vocab_size)
    _validate_logits_processors(params.logits_processors, capabilities.logits_processors)
    if params.repetition_detection is not None:
        _validate_repetition_detection(params.repetition_detection)


def validate_pooling_params(params: PoolingParams, capabilities: Capabilities) -> None:
    """Raise InvalidRequestError for a task or dimensions that workers of these capabilities do not
    serve.
    """
    if params.task == GENERATE:  # SamplingParams ask for that
        raise InvalidRequestError("task is 'generate', must be a pooling task", field="task")
    check_task(params.task, capabilities)
    if (dimensions := params.dimensions) is None:
        return
    field, allowed = "dimensions", capabilities.dimensions
    if params.task != EMBED:
        raise InvalidRequestError(
            f"{field} is {dimensions}, must be unset if task is {params.task!r}", field=field
        )
    if not allowed:
        raise InvalidRequestError(
            f"{field} is {dimensions}, must be unset: the model has no Matryoshka embeddings",
            field=field,
        )
    if dimensions not in allowed:
        served = (
            f"{allowed[0]} to {allowed[-1]}"
            if isinstance(allowed, range)
            else f"one of {', '.join(map(str, allowed))}"
        )
        raise InvalidRequestError(f"{field} is {dimensions}, must be {served}", field=field)


def validate_prediction(
    field: str, token_ids: Sequence[int], max_model_len: int, vocab_size: int
) -> None:
    """Raise InvalidRequestError for one that is longer than any answer, or of unknown tokens."""
    check_count(field, len(token_ids), "tokens", max_model_len)
    validate_token_ids(field, token_ids, vocab_size)


def _validate_branches(params: SamplingParams) -> None:
    """n, best_of and beam search."""
    if not 1 <= params.n <= MAX_N:
        raise InvalidRequestError(f"n is {params.n}, must be 1 to {MAX_N}", field="n")
    if params.best_of is not None and not params.n <= params.best_of <= MAX_N:
        raise InvalidRequestError(
            f"best_of is {params.best_of}, must be n ({params.n}) to {MAX_N}", field="best_of"
        )
    if not math.isfinite(params.length_penalty):
        raise InvalidRequestError(
            f"length_penalty is {params.length_penalty}, must be finite", field="length_penalty"
        )
    if params.use_beam_search:
        if params.temperature != 0.0:
            raise InvalidRequestError(
                f"temperature is {params.temperature:g}, must be 0 with use_beam_search",
                field="temperature",
            )
        return
    if params.length_penalty != 1.0:
        raise InvalidRequestError("length_penalty needs use_beam_search", field="length_penalty")
    if params.early_stopping is not EarlyStopping.FALSE:
        raise InvalidRequestError("early_stopping needs use_beam_search", field="early_stopping")


def _validate_token_choice(params: SamplingParams, vocab_size: int) -> None:
    """bad_words, logit_bias and allowed_token_ids."""
    check_count("bad_words", len(params.bad_words), "words", MAX_BAD_WORDS)
    for word in params.bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
            raise InvalidRequestError(
                f"bad_words has a word of {len(word)} characters, must be 1 to "
                f"{MAX_BAD_WORD_CHARS}",
                field="bad_words",
            )
    # Each word in at most two forms: with and without a space before it.
    check_count(
        "bad_words_token_ids", len(params.bad_words_token_ids), "sequences", 2 * MAX_BAD_WORDS
    )
    for token_ids in params.bad_words_token_ids:
        if not 1 <= len(token_ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"bad_words_token_ids has a sequence of {len(token_ids)} tokens, must be 1 to "
                f"{MAX_BAD_WORD_TOKENS}",
                field="bad_words_token_ids",
            )
        validate_token_ids("bad_words_token_ids", token_ids, vocab_size)
    check_count("logit_bias", len(params.logit_bias), "tokens", MAX_LOGIT_BIAS)
    validate_token_ids("logit_bias", tuple(params.logit_bias), vocab_size)
    for token_id, bias in params.logit_bias.items():
        _check_range(f"logit_bias[{token_id}]", bias, low=-100.0, high=100.0)
    if len(params.allowed_token_ids) > vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids has {len(params.allowed_token_ids)} ids, the vocabulary has "
            f"{vocab_size}",
            field="allowed_token_ids",
        )
    validate_token_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)


def validate_choice(params: SamplingParams, *, eos_token_id: int | None, vocab_size: int) -> None:
    """Raise InvalidRequestError if the first step would have no token to choose: all that are
    allowed are bad words of one token, or end the answer before min_tokens. What longer bad words
    and logits processors ban is seen only when it happens.

    `params` are as a worker gets them, with all ids in the vocabulary.
    """
    bad = {token_ids[0] for token_ids in params.bad_words_token_ids if len(token_ids) == 1}
    ends = {*params.stop_token_ids} if params.min_tokens else set()
    if params.min_tokens and eos_token_id is not None:
        ends.add(eos_token_id)
    allowed = params.allowed_token_ids or range(vocab_size)
    if any(token_id not in bad and token_id not in ends for token_id in allowed):
        return
    reasons = []
    if ends:
        reasons.append(f"min_tokens ({params.min_tokens}) bans {len(ends)}, which would end it")
    if bad:
        reasons.append(f"bad_words bans {len(bad)}")
    choice = "allowed_token_ids" if params.allowed_token_ids else "the vocabulary"
    field = "bad_words" if bad else "stop_token_ids"
    raise InvalidRequestError(
        f"of the {len(allowed)} tokens in {choice} none is left to choose, must be at least 1: "
        f"{', '.join(reasons)}",
        field="allowed_token_ids" if params.allowed_token_ids else field,
    )


def _validate_logits_processors(names: Sequence[str], registered: Sequence[str]) -> None:
    check_count("logits_processors", len(names), "names", MAX_LOGITS_PROCESSORS)
    for name in names:
        if name not in registered:
            raise InvalidRequestError(
                f"logits_processors has {name[:MAX_REQUEST_ID_CHARS]!r}, registered are "
                f"{', '.join(registered) or 'none'}",
                field="logits_processors",
            )


def _validate_repetition_detection(params: RepetitionDetectionParams) -> None:
    field = "repetition_detection"
    if not 1 <= params.max_pattern_size <= MAX_PATTERN_SIZE:
        raise InvalidRequestError(
            f"{field}.max_pattern_size is {params.max_pattern_size}, must be 1 to "
            f"{MAX_PATTERN_SIZE}",
            field=field,
        )
    if not 1 <= params.min_pattern_size <= params.max_pattern_size:
        raise InvalidRequestError(
            f"{field}.min_pattern_size is {params.min_pattern_size}, must be 1 to "
            f"max_pattern_size ({params.max_pattern_size})",
            field=field,
        )
    if not 2 <= params.min_count <= MAX_COUNT:
        raise InvalidRequestError(
            f"{field}.min_count is {params.min_count}, must be 2 to {MAX_COUNT}", field=field
        )


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
    check_count("stop", len(params.stop), "strings", MAX_STOP_STRINGS)
    for text in params.stop:
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                f"stop has a string of {len(text)} characters, "
                f"must be 1 to {MAX_STOP_STRING_CHARS}",
                field="stop",
            )
    if params.stop and not params.detokenize:
        raise InvalidRequestError("stop needs detokenize, which is false", field="stop")
    check_count("stop_token_ids", len(params.stop_token_ids), "ids", MAX_STOP_TOKEN_IDS)
    validate_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def validate_prompt(
    token_ids: Sequence[int], *, max_model_len: int, vocab_size: int, is_pooling: bool = False
) -> None:
    """Raise InvalidRequestError for an empty or too long prompt or an unknown token."""
    if not token_ids:
        raise InvalidRequestError("prompt is empty, needs at least 1 token", field="prompt")
    if is_pooling:
        if len(token_ids) > max_model_len:
            raise InvalidRequestError(
                f"prompt has {len(token_ids)} tokens, at most {max_model_len} fit (max_model_len)",
                field="prompt",
            )
        validate_token_ids("prompt_token_ids", token_ids, vocab_size)
        return
    if len(token_ids) >= max_model_len:
        raise InvalidRequestError(
            f"prompt has {len(token_ids)} tokens, at most {max_model_len - 1} fit "
            f"(max_model_len is {max_model_len}, one is for the answer)",
            field="prompt",
        )
    validate_token_ids("prompt_token_ids", token_ids, vocab_size)


def validate_prompt_logprobs(params: SamplingParams, num_prompt_tokens: int) -> None:
    """Raise InvalidRequestError if the logprobs of the prompt would not fit into a message."""
    if params.prompt_logprobs is None:
        return
    num_entries = (1 + params.prompt_logprobs) * num_prompt_tokens
    if num_entries > MAX_PROMPT_LOGPROB_ENTRIES:
        raise InvalidRequestError(
            f"prompt_logprobs is {params.prompt_logprobs} for a prompt of {num_prompt_tokens} "
            f"tokens: {num_entries} log-probabilities, at most {MAX_PROMPT_LOGPROB_ENTRIES}",
            field="prompt_logprobs",
        )


def validate_request_id(request_id: str) -> None:
    """Raise InvalidRequestError for an id that is empty, too long or not printable ASCII."""
    if (problem := id_problem("request_id", request_id)) is not None:
        raise InvalidRequestError(problem, field="request_id")


def id_problem(field: str, value: str) -> str | None:
    """Return why this id cannot be in HTTP headers and gRPC's metadata; None if it can."""
    if not 1 <= len(value) <= MAX_REQUEST_ID_CHARS:
        return f"{field} has {len(value)} characters, must be 1 to {MAX_REQUEST_ID_CHARS}"
    if not (value.isascii() and value.isprintable()):
        return f"{field} must be printable ASCII"
    return None


def validate_priority(priority: int) -> None:
    """Raise InvalidRequestError for a priority that no client's request may have."""
    if abs(priority) > PRIORITY_LIMIT:
        raise InvalidRequestError(
            f"priority is {priority}, must be -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}",
            field="priority",
        )


def validate_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequestError for the first token id outside the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"{field} has {wrong}, token ids are 0 to {vocab_size - 1}", field=field
        )


def check_count(field: str, count: int, noun: str, limit: int) -> None:
    if count > limit:
        raise InvalidRequestError(f"{field} has {count} {noun}, at most {limit}", field=field)


def _check_range(
    field: str, value: float, *, low: float, high: float, is_low_open: bool = False
) -> None:
    is_in = math.isfinite(value) and low <= value <= high and not (is_low_open and value == low)
    if not is_in:
        bracket = "above" if is_low_open else "at least"
        raise InvalidRequestError(
            f"{field} is {value}, must be {bracket} {low:g} and at most {high:g}", field=field
        )
