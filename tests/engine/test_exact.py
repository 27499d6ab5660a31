"""The EXACT level: a request's tokens depend on the weights, its own tokens and its parameters.

Greedy and sampled, bf16 and fp32, each way of running a request must give the very same tokens as
running it alone, in one step after the other, with its prompt whole.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from pdserve_common.types.engine import EngineCoreRequest
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_kernels import name_of, select
from support.engines import load, run_to_end, tokens_of
from support.requests import make_request
from support.samples import sampled

MAX_MODEL_LEN = 192
BLOCK_SIZE = 16
SMALL_BLOCK_SIZE = 4
NUM_BLOCKS = 96
VOCAB_SIZE = 512
NUM_OUTPUT = 12
SEED = 2**64 - 2  # so that derived seeds wrap
PROMPT_LENS = (1, 16, 17, 70, 100)
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01),
    "penalized": SamplingParams(
        temperature=0.7,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={3: 2.0, 5: -3.0},
        min_tokens=4,
    ),
}
# Name of the way, and what is different from the baseline.
WAYS: dict[str, dict[str, object]] = {
    "in a batch": {},
    "async": {"async_scheduling": True},
    "v0": {"scheduling_mode": "v0"},
    "v0 async": {"scheduling_mode": "v0", "async_scheduling": True},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "chunks of 33": {"max_num_batched_tokens": 33},
    "long prompts in pieces of 16": {
        "long_prefill_token_threshold": 16,
        "max_num_partial_prefills": 4,
    },
    "without prefix cache": {"enable_prefix_caching": False},
    "preempted": {"block_size": SMALL_BLOCK_SIZE, "num_blocks": 48},
    "preempted, async": {
        "block_size": SMALL_BLOCK_SIZE,
        "num_blocks": 48,
        "async_scheduling": True,
        "enable_prefix_caching": False,
    },
    "with drafts": {"speculation": "suffix"},
    "with drafts, async, preempted": {
        "speculation": "suffix",
        "block_size": SMALL_BLOCK_SIZE,
        "num_blocks": 48,
        "async_scheduling": True,
    },
    "blocks of 32": {"block_size": 32, "num_blocks": NUM_BLOCKS // 2},
}
# Each of what makes ways differ is in one of these; the others are soaked.
BF16_WAYS = (
    "in a batch",
    "v0 async",
    "chunks of 7",
    "long prompts in pieces of 16",
    "without prefix cache",
    "preempted",
    "with drafts, async, preempted",
    "blocks of 32",
)
# Of rows of fp32, which have other kernels than those of bf16.
FP32_WAYS = ("chunks of 7", "with drafts, async, preempted")


class Runner:
    """One engine over the model."""

    def __init__(self, model_dir: Path, dtype: str, **overrides: object) -> None:
        settings: dict[str, object] = {
            "num_blocks": NUM_BLOCKS,
            "max_num_batched_tokens": MAX_MODEL_LEN,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 8,
            "async_scheduling": False,
            **overrides,
        }
        self.engine = load(model_dir, dtype=dtype, **settings)
        self.core = self.engine.core
        # Of drafts.
        self.num_accepted_tokens = 0

    def run(self, requests: Iterable[EngineCoreRequest]) -> dict[str, list[int]]:
        """Return the tokens of all, which come at once."""
        found = run_to_end(self.core, requests)
        for output in (each for outputs in found.values() for each in outputs):
            for drafts in output.draft_stats:
                self.num_accepted_tokens += drafts.num_accepted_tokens
        return {name: tokens_of(outputs) for name, outputs in found.items()}


def make_prompt(length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist())


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return dataclasses.replace(params, seed=seed % 2**64, max_tokens=NUM_OUTPUT, ignore_eos=True)


def requests() -> list[EngineCoreRequest]:
    return [
        make_request(f"{length}-{kind}", make_prompt(length), with_seed(params, SEED + length))
        for length in PROMPT_LENS
        for kind, params in PARAMS.items()
    ]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def start(
    dtype: str, make_model: Callable[..., Path], request: pytest.FixtureRequest
) -> Callable[..., Runner]:
    model_dir = make_model(
        "Qwen3ForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=208,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    return functools.partial(Runner, model_dir, dtype)


@pytest.fixture(scope="module")
def alone(start: Callable[..., Runner]) -> Callable[[int], dict[str, list[int]]]:
    """Every request on its own, on an engine that has forgotten the ones before, with blocks of a
    size: small ones have other kernels.
    """

    @functools.cache
    def run(block_size: int) -> dict[str, list[int]]:
        runner = start(
            enable_prefix_caching=False,
            block_size=block_size,
            num_blocks=NUM_BLOCKS * BLOCK_SIZE // block_size,
        )
        tokens: dict[str, list[int]] = {}
        for request in requests():
            tokens |= runner.run([request])
        runner.engine.close()
        assert all(len(ids) == NUM_OUTPUT for ids in tokens.values())
        assert tokens["70-greedy"] != tokens["70-sampled"] != tokens["70-penalized"]
        return tokens

    return run


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        pytest.param(dtype, way, marks=() if way in ways else pytest.mark.soak)
        for dtype, ways in (("bfloat16", BF16_WAYS), ("float32", FP32_WAYS))
        for way in WAYS
    ],
    scope="module",
)
def test_tokens_are_bit_identical(
    dtype: str, way: str, start: Callable[..., Runner], alone: Callable[[int], dict[str, list[int]]]
) -> None:
    is_tight = "preempted" in way
    expected = alone(SMALL_BLOCK_SIZE if is_tight else BLOCK_SIZE)
    runner = start(**WAYS[way])
    predicted = []
    for request in requests():
        tokens = expected[request.request_id]
        # Of use with drafts alone.
        prediction = (*tokens[:4], 7, *tokens[5:])
        predicted.append(dataclasses.replace(request, prediction_token_ids=prediction))
    assert runner.run(predicted) == expected
    assert (runner.num_accepted_tokens > 0) == ("drafts" in way)
    # Again, in other company; prompts are cached now, where there is a cache.
    assert runner.run(reversed(requests())) == expected
    assert (runner.core.scheduler.num_preemptions > 0) == is_tight
    runner.engine.close()


@pytest.mark.skipif(
    not name_of(select(torch.device("cpu"))).startswith("cpu/"), reason="needs compiled kernels"
)
@pytest.mark.parametrize("dtype", ["bfloat16"], scope="module")  # fp32 has no kernels of its own
def test_tokens_of_bf16_do_not_depend_on_the_number_of_threads(
    dtype: str, start: Callable[..., Runner], alone: Callable[..., object]
) -> None:
    expected, before = alone(BLOCK_SIZE), torch.get_num_threads()
    try:
        runner = start(num_threads=2)
        assert runner.run(requests()) == expected
        runner.engine.close()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "enable_prefix_caching"),
    sampled(itertools.product(PARAMS, (True, False)), ("sampled", True), ("penalized", False)),
)
def test_branches_are_requests_with_the_derived_seeds(
    kind: str, enable_prefix_caching: bool, start: Callable[..., Runner]
) -> None:
    prompt = make_prompt(70)
    branches = [with_seed(PARAMS[kind], SEED + index) for index in range(4)]
    runner = start(enable_prefix_caching=enable_prefix_caching, async_scheduling=True)
    asked = [make_request(str(index), prompt, params) for index, params in enumerate(branches)]
    forks = [dataclasses.replace(request, fork_of="0") for request in asked[1:]]
    forked = runner.run([asked[0], *forks])
    separate: dict[str, list[int]] = {}
    for request in asked:
        separate |= runner.run([request])
    assert forked == separate
    assert len({tuple(ids) for ids in forked.values()}) == (1 if kind == "greedy" else 4)
    runner.engine.close()
