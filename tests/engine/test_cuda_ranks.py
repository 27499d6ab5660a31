"""A model over several ranks with the code of CUDA, interpreted, and gloo in NCCL's place.

It brings the tokens that one rank brings on the CPU.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cuda_rank_bodies
import numpy as np
import pytest

from support.adapters import write_adapter
from support.model_driver import Driver
from support.models import NATIVE_MODELS
from support.ranks import Devices, run_ranks
from support.samples import sampled
from support.triton_kernels import in_the_interpreter

pytest.importorskip("triton")

# Of NATIVE_MODELS, with its quantization, the ranks, and if there are adapters. Four ranks have
# copies of two KV heads.
CASES: tuple[tuple[str, str | None, int, bool], ...] = (
    ("llama-biases", None, 2, False),
    ("llama-biases", None, 2, True),
    ("llama-tied-sharded", "int8", 2, True),
    ("qwen3", None, 4, True),
    ("qwen3", "int4", 2, False),
    ("qwen3", "fp8", 2, False),
)
# Integers are cut between groups of 32 inputs.
FOR_INT4 = {"intermediate_size": 128}
# Fewer than elsewhere: each is interpreted, on each rank.
FEW_LAYERS = {"num_hidden_layers": 2}


def adapters_of(folder: Path, parent: Path) -> list[Path]:
    """Write one with all linears, and one with few."""
    few = {"r": 5, "target_modules": ["k_proj", "up_proj", "o_proj"]}
    return [
        write_adapter(folder, parent / "all", seed=1),
        write_adapter(folder, parent / "few", seed=2, **few),
    ]


@in_the_interpreter
@pytest.mark.parametrize(
    ("quantization", "has_lora"),
    sampled([(None, True), ("int8", False), ("fp8", False)], (None, True), ("fp8", False)),
)
def test_deterministic_kernels_bring_the_bits_of_one_rank(
    make_model: Callable[..., Path], tmp_path: Path, quantization: str | None, *, has_lora: bool
) -> None:
    architecture, overrides = NATIVE_MODELS["llama-biases"]
    folder = make_model(architecture, **overrides | FEW_LAYERS)
    body = partial(cuda_rank_bodies.answers_of_rank, deterministic=True)
    options: dict[str, Any] = {"quantization": quantization}
    if has_lora:
        options |= {"adapters": adapters_of(folder, tmp_path), "max_lora_rank": 8}
    expected = body(None, folder, options)
    assert run_ranks(Devices(2), body, folder, options)[0] == expected


@in_the_interpreter
@pytest.mark.parametrize(("name", "quantization", "size", "has_lora"), sampled(CASES, *CASES[2:4]))
def test_tokens_are_those_of_one_rank(
    make_model: Callable[..., Path],
    name: str,
    quantization: str | None,
    size: int,
    tmp_path: Path,
    *,
    has_lora: bool,
) -> None:
    architecture, overrides = NATIVE_MODELS[name]
    more = FOR_INT4 if quantization == "int4" else {}
    folder = make_model(architecture, **overrides | FEW_LAYERS | more)
    options: dict[str, Any] = {"quantization": quantization}
    if has_lora:
        options |= {"adapters": adapters_of(folder, tmp_path), "max_lora_rank": 8}
    if quantization is None:
        expected = cuda_rank_bodies.answers_of(Driver(folder, **options))
    else:  # the CPU's kernels make them dense, and round elsewhere
        expected = cuda_rank_bodies.answers_of_rank(None, folder, options)
    found = run_ranks(Devices(size), cuda_rank_bodies.answers_of_rank, folder, options)
    tokens = {request: tokens for request, (tokens, _) in expected.items()}
    assert all(tokens.values())
    for answers in found:
        assert {request: tokens for request, (tokens, _) in answers.items()} == tokens
    for request, (_, lists) in expected.items():
        ranked = found[0][request][1]
        assert len(ranked) == len(lists)
        for ours, theirs in zip(ranked, lists, strict=True):
            assert np.array_equal(ours.logprob_token_ids, theirs.logprob_token_ids)
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)
