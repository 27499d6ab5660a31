"""How many log-probabilities fit into one message of an answer."""

from pdserve_common.errors import InvalidRequestError
from pdserve_common.types.sampling_params import RequestOutputKind, SamplingParams


def check_message(params: SamplingParams, num_prompt_tokens: int, *, limit: int) -> None:
    """Refuse logprobs of a whole answer, and of its prompt, that may not fit into one message."""
    most = most_tokens_with_logprobs(params, num_prompt_tokens, limit=limit)
    assert params.max_tokens is not None, "complete_params sets it"
    if most is None or params.max_tokens <= most:
        return
    num_entries = _num_entries_per_token(params) * params.max_tokens
    num_entries += _num_prompt_entries(params, num_prompt_tokens)
    raise InvalidRequestError(
        f"logprobs is {params.logprobs} with max_tokens {params.max_tokens} and n {params.n}: "
        f"one message may get {num_entries} log-probabilities, at most {limit}",
        field="logprobs",
    )


def most_tokens_with_logprobs(
    params: SamplingParams, num_prompt_tokens: int, *, limit: int
) -> int | None:
    """Return how many tokens an answer that comes as a whole may have, so that one message holds
    their logprobs and those of the prompt. None: they do not have to fit into one.
    """
    is_streamed = params.output_kind is RequestOutputKind.DELTA and not (
        params.use_beam_search or params.is_ranked
    )
    if params.logprobs is None or is_streamed:
        return None
    left = limit - _num_prompt_entries(params, num_prompt_tokens)
    return left // _num_entries_per_token(params)


def _num_entries_per_token(params: SamplingParams) -> int:
    assert params.logprobs is not None
    return (1 + params.logprobs) * params.n


def _num_prompt_entries(params: SamplingParams, num_prompt_tokens: int) -> int:
    return 0 if params.prompt_logprobs is None else (1 + params.prompt_logprobs) * num_prompt_tokens
