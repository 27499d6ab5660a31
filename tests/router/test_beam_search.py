"""The search finds what Hugging Face's beam search finds, from the same log-probabilities."""

import functools
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pdserve_common.types.engine import LogprobsLists
from pdserve_common.types.sampling_params import EarlyStopping, SamplingParams
from pdserve_router.requests.beam_search import Beam, BeamSearch
from support.beams import hf_beams

VOCAB_SIZE = 24
# Prompts behind which the values of early_stopping and min_tokens below make a difference.
PROMPTS = ([9, 3], [22, 21, 20, 0])
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@functools.cache
@torch.inference_mode()
def logprobs_behind(model: LlamaForCausalLM, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Most searches come by the same beams."""
    logits = model(torch.tensor([token_ids])).logits[0, -1]
    return torch.log_softmax(logits.float(), dim=-1)


def top_tokens(model: LlamaForCausalLM, token_ids: list[int], num: int) -> LogprobsLists:
    values, ids = logprobs_behind(model, tuple(token_ids)).topk(num)
    token_ids, logprobs = tuple(ids.tolist()), tuple(values.tolist())
    return LogprobsLists(
        logprob_token_ids=((token_ids[0], *token_ids),),
        logprobs=((logprobs[0], *logprobs),),
        sampled_token_ranks=(1,),
    )


def search_for(model, prompt, params: SamplingParams) -> BeamSearch:
    search = BeamSearch(
        params, max_tokens=params.max_tokens, stop_token_ids=frozenset(params.stop_token_ids)
    )
    while not search.is_done:
        num = search.num_top_tokens
        search.advance(
            [top_tokens(model, [*prompt, *beam.token_ids], num) for beam in search.running]
        )
    return search


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("length_penalty", [1.0, -1.5, 2.0])
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "stop_token_ids": (1, 4, 8)},
        {"n": 2, "best_of": 5, "stop_token_ids": (1,)},
        {"n": 3, "stop_token_ids": (1, 4)},
        {"n": 3, "stop_token_ids": (1, 4, 8), "min_tokens": 2},
        {"n": 3, "stop_token_ids": ()},
    ],
)
def test_beams_and_scores_are_those_of_hugging_face(
    model, fields, length_penalty, early_stopping
) -> None:
    params = SamplingParams(
        use_beam_search=True,
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        **fields,
    )
    for prompt in PROMPTS:
        search = search_for(model, prompt, params)
        best = search.finished[: params.n]
        expected = hf_beams(model, prompt, params, params.stop_token_ids)
        assert [beam.token_ids for beam in best] == [token_ids for token_ids, _ in expected]
        scores = [score for _, score in expected]
        assert [search.score(beam) for beam in best] == pytest.approx(scores, rel=1e-4)


def test_one_beam_is_the_greedy_answer(model) -> None:
    params = SamplingParams(use_beam_search=True, temperature=0.0, max_tokens=MAX_TOKENS)
    search = search_for(model, PROMPTS[0], params)
    greedy = model.generate(
        torch.tensor([PROMPTS[0]]), do_sample=False, max_new_tokens=MAX_TOKENS, eos_token_id=None
    )
    assert list(search.finished[0].token_ids) == greedy[0, len(PROMPTS[0]) :].tolist()


def test_a_beam_has_the_logprobs_of_its_own_tokens(model) -> None:
    params = SamplingParams(use_beam_search=True, n=3, max_tokens=4, logprobs=2)
    for beam in search_for(model, PROMPTS[0], params).finished:
        assert len(beam.logprobs) == len(beam.token_ids)
        chosen = [values[0] for values in beam.logprobs.logprobs]
        assert math.fsum(chosen) == pytest.approx(beam.cumulative_logprob)
        for i, token_id in enumerate(beam.token_ids):
            prefix = [*PROMPTS[0], *beam.token_ids[:i]]
            top = top_tokens(model, prefix, VOCAB_SIZE)
            rank = top.logprob_token_ids[0][1:].index(token_id)
            assert beam.logprobs.sampled_token_ranks[i] == rank + 1
            assert beam.logprobs.logprob_token_ids[i] == (
                token_id,
                *top.logprob_token_ids[0][1:3],
            )
            assert beam.logprobs.logprobs[i][0] == top.logprobs[0][1 + rank]


def test_ties_go_to_the_better_beam_and_the_earlier_token() -> None:
    top = LogprobsLists(
        logprob_token_ids=((5, 5, 6, 7, 8),), logprobs=((-1.0,) * 5,), sampled_token_ranks=(1,)
    )
    search = BeamSearch(SamplingParams(n=2), max_tokens=2, stop_token_ids=frozenset())
    search.advance([top])
    assert [beam.token_ids for beam in search.running] == [(5,), (6,)]
    search.advance([top, top])
    assert [beam.token_ids for beam in search.finished] == [(5, 5), (5, 6)]
    assert search.is_done
    assert search.running == []


def test_nothing_is_done_before_width_beams_ended() -> None:
    top = LogprobsLists(
        logprob_token_ids=((1, 1, 2, 3, 4),),
        logprobs=((-0.1, -0.1, -5.0, -6.0, -7.0),),
        sampled_token_ranks=(1,),
    )
    params = SamplingParams(n=2, early_stopping=EarlyStopping.TRUE)
    search = BeamSearch(params, max_tokens=9, stop_token_ids=frozenset({1}))
    search.advance([top])
    assert search.finished == [
        Beam(token_ids=(1,), cumulative_logprob=-0.1, logprobs=search.finished[0].logprobs)
    ]
    assert not search.is_done
    search.advance([top, top])
    assert search.is_done
