"""A request on CUDA waits for no compiler: what random traffic launches has been launched before
the first request.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_rank_bodies
import pytest

from pdserve_engine.grammar.native import CompiledGrammar
from pdserve_engine.models.config import FAMILIES
from support.adapters import ALL_PROJECTIONS, write_adapter
from support.cuda_traffic import any_text, launches_of, recorded_launches
from support.grammars import VOCAB_SIZE
from support.interpreted import interpreted_kernels
from support.model_driver import Driver
from support.models import BACKEND_MODELS, NATIVE_MODELS
from support.ranks import Devices, run_ranks
from support.triton_variants import Recorder

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
    ),
]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recorded_launches() as recorder:
        yield recorder


@pytest.fixture(scope="module")
def grammar() -> Iterator[CompiledGrammar]:
    with any_text() as grammar:
        yield grammar


# Else the traffic has missed what this is about.
OF_SOME_REQUESTS = {"argmax_kernel", "penalize_kernel", "terms_kernel", "search_kernel"}
# Of NATIVE_MODELS, with its dtype, its quantization, and if kernels are the deterministic ones.
CASES = (
    ("llama", "bfloat16", None, False),
    ("qwen3-window", "bfloat16", None, False),
    ("llama-tied-sharded", "float32", None, False),
    ("qwen3", "bfloat16", "int8", False),
    ("qwen3", "bfloat16", "int4", False),
    ("qwen3", "bfloat16", "fp8", False),
    ("llama", "bfloat16", None, True),
    ("qwen3", "bfloat16", "int4", True),
    ("qwen3-moe-mixed", "bfloat16", None, False),
    ("mixtral", "bfloat16", None, True),
    ("qwen2-moe", "bfloat16", None, False),
    ("qwen2-moe", "bfloat16", "int4", False),
)


@pytest.mark.parametrize(("name", "dtype", "quantization", "is_deterministic"), CASES)
def test_traffic_launches_nothing_that_is_not_warm(
    make_model: Callable[..., Path],
    recorder: Recorder,
    grammar: CompiledGrammar,
    tmp_path: Path,
    name: str,
    dtype: str,
    quantization: str | None,
    *,
    is_deterministic: bool,
) -> None:
    from pdserve_kernels.triton import deterministic

    architecture, overrides = NATIVE_MODELS[name]
    sizes = {"vocab_size": VOCAB_SIZE, "intermediate_size": 128}
    folder = make_model(architecture, **overrides | sizes)
    has_experts = FAMILIES[architecture].experts is not None
    targets = ["q_proj", "o_proj"] if has_experts else [*ALL_PROJECTIONS]
    adapters = [
        write_adapter(folder, tmp_path / str(rank), r=rank, target_modules=targets)
        for rank in (4, 8)
    ]
    with interpreted_kernels(deterministic if is_deterministic else None):
        driver = Driver(
            folder,
            dtype=dtype,
            quantization=quantization,
            adapters=adapters,
            max_lora_rank=8,
            num_blocks=2048,
        )
    launches = launches_of(recorder, driver, grammar)
    assert launches.cold() == {}
    assert launches.served.keys() >= OF_SOME_REQUESTS


@pytest.mark.parametrize("name", ["granite", "gemma3"])
def test_models_without_graphs_are_warm_too(
    make_model: Callable[..., Path], recorder: Recorder, grammar: CompiledGrammar, name: str
) -> None:
    architecture, overrides = BACKEND_MODELS[name]
    folder = make_model(architecture, **overrides | {"vocab_size": VOCAB_SIZE})
    with interpreted_kernels():
        driver = Driver(folder, dtype="bfloat16", num_blocks=2048)
    assert not driver.runner.model.can_be_captured
    launches = launches_of(recorder, driver, grammar)
    assert launches.cold() == {}
    assert launches.served.keys() >= OF_SOME_REQUESTS


@pytest.mark.parametrize("kernels", ["triton", "triton.deterministic"])
def test_ranks_are_warm_too(make_model: Callable[..., Path], tmp_path: Path, kernels: str) -> None:
    architecture, overrides = NATIVE_MODELS["llama-biases"]
    sizes = {"vocab_size": VOCAB_SIZE, "intermediate_size": 128}
    folder = make_model(architecture, **overrides | sizes)
    options: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 2048, "max_lora_rank": 8}
    options["adapters"] = [write_adapter(folder, tmp_path / str(rank), r=rank) for rank in (4, 8)]
    body = cuda_rank_bodies.cold_launches_of_rank
    assert run_ranks(Devices(2), body, folder, options, kernels) == [{}, {}]
