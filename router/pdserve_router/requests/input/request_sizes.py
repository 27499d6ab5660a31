"""How many tokens of a prompt count and an answer may have, beside what a client leaves unset."""

import dataclasses
import secrets

from pdserve_common.errors import InvalidRequestError
from pdserve_common.limits.validation import DRAWN_SEED_BITS, MAX_STOP_TOKEN_IDS
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.requests.input.generation_request import GenerationRequest
from pdserve_router.requests.input.logprob_limits import most_tokens_with_logprobs
from pdserve_router.workers.model_limits import ModelLimits


def most_prompt_tokens(request: GenerationRequest, limits: ModelLimits) -> int | None:
    """Return how many of the prompt's last tokens count; None: all."""
    most = request.truncate_prompt_tokens
    # One token is for the answer.
    if most is None or 1 <= most < limits.max_model_len:
        return most
    if most != -1:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {most}, must be -1 or 1 to {limits.max_model_len - 1} "
            f"(max_model_len is {limits.max_model_len}, one is for the answer)",
            field="truncate_prompt_tokens",
        )
    return max(1, limits.max_model_len - (request.sampling_params.max_tokens or 1))


def complete_params(
    params: SamplingParams,
    num_prompt_tokens: int,
    limits: ModelLimits,
    *,
    max_logprob_entries: int,
) -> SamplingParams:
    """Draw a missing seed, bound max_tokens by the model's length, make every EOS token stop. A
    missing max_tokens is what fits, of the logprobs into one message too.
    """
    room = limits.max_model_len - num_prompt_tokens
    if params.min_tokens > room:
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}, at most {room} fit behind the prompt "
            f"({num_prompt_tokens} tokens, max_model_len is {limits.max_model_len})",
            field="min_tokens",
        )
    max_tokens = params.max_tokens
    if max_tokens is None:
        most = most_tokens_with_logprobs(params, num_prompt_tokens, limit=max_logprob_entries)
        max_tokens = room if most is None else max(1, params.min_tokens, most)
    return dataclasses.replace(
        params,
        stop_token_ids=params.stop_token_ids if params.ignore_eos else _with_eos(params, limits),
        top_k=min(params.top_k, limits.vocab_size),
        max_tokens=min(max_tokens, room),
        seed=secrets.randbits(DRAWN_SEED_BITS) if params.seed is None else params.seed,
    )


def _with_eos(params: SamplingParams, limits: ModelLimits) -> tuple[int, ...]:
    """A request has one EOS; a model may have more, which stop it like any stop token."""
    asked = params.stop_token_ids
    more = [i for i in limits.eos_token_ids[1:] if i not in asked]
    most = MAX_STOP_TOKEN_IDS - len(more)
    if len(asked) > most:
        raise InvalidRequestError(
            f"stop_token_ids has {len(asked)} ids, at most {most} beside the model's "
            f"{len(limits.eos_token_ids)} EOS tokens",
            field="stop_token_ids",
        )
    return (*asked, *more)
