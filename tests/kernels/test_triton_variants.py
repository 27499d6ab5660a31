"""How often Triton would compile a kernel anew: requests wait for it, so steps of other sizes and
other layers must not.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from adapters import make_adapter
from decoder_models import Chunk, Model, Shape
from sampling_batches import make_logits, make_sampling_batch

from pdserve_kernels.lora import LoraSegment
from support.triton_variants import Variants, recorded_variants

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
    ),
]

pytest.importorskip("triton")

SHAPE = Shape(hidden=128, head_dim=64, intermediate=256, windows=(None,) * 3)


@pytest.fixture
def count() -> Iterator[Callable[[Callable[[], object]], Variants]]:
    """Have the variants counted that a function's launches need on an H100; nothing is computed."""
    with recorded_variants() as recorder:
        yield recorder.of


def test_layers_of_a_cache_share_a_kernel(count) -> None:
    from pdserve_kernels import triton

    key, value = torch.zeros(2, 5, 2, 64).unbind()
    cache, slots = torch.zeros(4, 2, 33, 2, 16, 64), torch.arange(5)
    variants = count(
        lambda: [triton.reshape_and_cache(key, value, cache, i, slots) for i in range(33)]
    )
    assert sizes_of(variants) == {"reshape_and_cache_kernel": 1}


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["triton", "triton.deterministic"])
def test_decodes_of_all_sizes_share_kernels(count, name: str, kind: str) -> None:
    """With adapters of some, whose ranks and segments differ."""
    kernels = importlib.import_module(f"pdserve_kernels.{name}")
    model = Model(SHAPE, kernels, kind=kind)
    adapters = [make_adapter(kernels, model, rank, torch.bfloat16) for rank in (8, 40)]
    batch_sizes = (1, 2, 3, 8, 16, 17, 31, 32, 33, 48, 63, 64)

    def run(sizes: Sequence[int]) -> Variants:
        return count(lambda: [decode(kernels, model, size, adapters) for size in sizes])

    # Products of quantized weights have as many rows as the next power of two.
    some, every = run([16, 32, 64]), run(batch_sizes)
    if name == "triton":
        assert len(every.pop("merge_kernel")) == 2  # of 2 parts and of 4
        assert len(every.pop("attention_kernel")) == 2  # split or not
    for kernel, variants in every.items():
        assert variants == some[kernel], kernel


def test_draws_of_all_sizes_share_kernels(count) -> None:
    from pdserve_kernels import triton

    logits = make_logits(40, 3000)

    def run(sizes: Sequence[int]) -> Variants:
        batches = [make_sampling_batch(n, top_p=0.9) for n in sizes]
        return count(
            lambda: [triton.sample(logits[: len(batch.seeds)], batch) for batch in batches]
        )

    assert run(range(1, 40)) == run([16])


def decode(kernels: Any, model: Model, size: int, adapters: Sequence[Any]) -> None:
    chunks = [Chunk(i % 4, i, i + 1) for i in range(size)]
    states, positions, metadata = model.step(chunks)
    segments = [
        LoraSegment(i, min(i + 1 + i % 20, size), adapters[i % 2]) for i in range(0, size, 21)
    ]
    packed = kernels.pack_decoder(model.decoder)
    cache = torch.zeros(model.new_cache().shape, dtype=torch.bfloat16)
    for lora in ([], segments):
        kernels.run_decoder(states, packed, positions, cache, metadata, lora)


def sizes_of(variants: Variants) -> dict[str, int]:
    return {name: len(found) for name, found in variants.items()}
