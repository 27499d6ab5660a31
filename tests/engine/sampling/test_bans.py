"""Which parameters leave a token to choose, against a brute-force search of a tiny vocabulary."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve_common.errors import InvalidRequestError
from pdserve_common.limits.validation import validate_choice
from pdserve_common.types.engine import ErrorCode, ErrorFault
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.request.sched_output import NewRequestData
from pdserve_engine.sampling.logits_rows import LogitsRows
from pdserve_engine.sampling.processors import NO_PROCESSORS
from pdserve_engine.sampling.rules import TokenRules
from pdserve_engine.sampling.state import SamplingState

VOCAB_SIZE = 4
TOKENS = st.integers(0, VOCAB_SIZE - 1)
# Longer answers see no ban that these do not.
NUM_STEPS = 3
CPU = torch.device("cpu")


def words(longest: int) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    word = st.lists(TOKENS, min_size=1, max_size=longest).map(tuple)
    return st.lists(word, max_size=5).map(tuple)


def parameters(longest_word: int) -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.just(0.0),
        allowed_token_ids=st.lists(TOKENS, max_size=3).map(tuple),
        bad_words_token_ids=words(longest_word),
        stop_token_ids=st.lists(TOKENS, max_size=3).map(tuple),
        min_tokens=st.integers(0, NUM_STEPS),
        ignore_eos=st.booleans(),
        logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=2),
    )


EOS = st.none() | TOKENS


def choices(params: SamplingParams, eos: int | None, answer: Sequence[int]) -> set[int]:
    """Return the tokens that may follow, by the words of the API: one by one."""
    left = set()
    for token_id in range(VOCAB_SIZE):
        grown = [*answer, token_id]
        is_allowed = not params.allowed_token_ids or token_id in params.allowed_token_ids
        is_bad = any(grown[-len(word) :] == list(word) for word in params.bad_words_token_ids)
        would_end = token_id == eos or token_id in params.stop_token_ids
        if is_allowed and not is_bad and not (would_end and len(answer) < params.min_tokens):
            left.add(token_id)
    return left


def is_accepted(params: SamplingParams, eos: int | None) -> bool:
    try:
        validate_choice(params, eos_token_id=eos, vocab_size=VOCAB_SIZE)
    except InvalidRequestError:
        return False
    return True


@given(params=parameters(longest_word=1), eos=EOS)
def test_what_is_accepted_has_a_token_at_every_step(
    params: SamplingParams, eos: int | None
) -> None:
    """Without bad words of several tokens nothing can be banned later that was not at first."""
    answers = itertools.chain.from_iterable(
        itertools.product(range(VOCAB_SIZE), repeat=length) for length in range(NUM_STEPS + 1)
    )
    has_token = all(choices(params, eos, answer) for answer in answers)
    assert is_accepted(params, eos) == has_token


@given(params=parameters(longest_word=3), eos=EOS, answer=st.lists(TOKENS, max_size=NUM_STEPS))
def test_the_engine_bans_what_the_api_says(
    params: SamplingParams, eos: int | None, answer: list[int]
) -> None:
    ends = params.stop_token_ids if eos is None else (*params.stop_token_ids, eos)
    rules = TokenRules(params, ends, vocab_size=VOCAB_SIZE, device=CPU, factories=NO_PROCESSORS)
    logits = torch.zeros(VOCAB_SIZE)
    rules.apply(logits, np.array(answer, dtype=np.int64))
    left = {i for i, value in enumerate(logits.tolist()) if value != -math.inf}
    assert left == choices(params, eos, answer)
    if not answer:
        assert is_accepted(params, eos) == bool(left)


@given(params=parameters(longest_word=3), eos=EOS, answer=st.lists(TOKENS, max_size=NUM_STEPS))
def test_a_ban_at_run_time_is_the_requests_own_and_leaves_other_rows_alone(
    params: SamplingParams, eos: int | None, answer: list[int]
) -> None:
    state = SamplingState(max_num_seqs=3, vocab_size=VOCAB_SIZE, device=CPU)
    plain = SamplingParams(temperature=0.0)
    for row, each in enumerate((plain, params, plain)):
        state.add(
            row,
            NewRequestData(
                request_id=str(row),
                all_token_ids=(1, *answer),
                num_prompt_tokens=1,
                sampling_params=each,
                seed=0,
                eos_token_id=eos,
                block_ids=([],),
                num_computed_tokens=0,
            ),
        )
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(3, 1)
    outputs = np.array(answer, dtype=np.int64)
    rows = LogitsRows(np.arange(3), np.full(3, len(answer)))
    sampled = state.sample(logits, rows, lambda row: outputs)
    assert [int(sampled.token_ids[row]) for row in (0, 2)] == [3, 3]
    left = choices(params, eos, answer)
    if left:
        assert not sampled.errors
        assert int(sampled.token_ids[1]) in left
    else:
        (error,) = sampled.errors.values()
        assert list(sampled.errors) == [1]
        assert (error.code, error.fault) == (ErrorCode.INVALID_ARGUMENT, ErrorFault.REQUEST)
