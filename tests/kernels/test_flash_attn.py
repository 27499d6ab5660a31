"""Attention by FlashAttention 3: the call by a stand-in, and what is installed on a GPU."""

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pdserve_kernels import KernelSet, name_of, reference, select, use_on_cuda
from pdserve_kernels.kv_scales import FP8
from support.flash_attn import RECORDED, SIGNATURE, installed, make_flash_attn, signature_of
from support.samples import seeds

pytest.importorskip("triton")

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
Batch = Any  # conftest's
MakeBatch = Callable[..., Batch]
Attend = Callable[..., torch.Tensor]


@pytest.fixture
def kernels() -> KernelSet:
    from pdserve_kernels.triton import flash_attn

    return flash_attn


@pytest.fixture
def stand_in() -> Iterator[None]:
    with installed(make_flash_attn()):
        yield


def random_case(
    make_batch: MakeBatch, dense_attention: Attend, seed: int, dtype: torch.dtype
) -> tuple[Batch, torch.Tensor]:
    """Decodes, then chunks; blocks before a window are stale. Returns the dense answer with it."""
    draw = random.Random(seed)
    num_decodes, num_chunks = draw.choice([(1, 0), (3, 0), (0, 1), (2, 2), (4, 1)])
    query_lens = [1] * num_decodes + [draw.randrange(1, 70) for _ in range(num_chunks)]
    seq_lens = [length + draw.choice([0, 1, 63, draw.randrange(600)]) for length in query_lens]
    num_kv_heads = draw.choice([1, 2, 3])
    window = draw.choice([None, 1, 2, 16, 64, draw.randrange(1, 700)])
    block_size = draw.choice([1, 4, 16, 64])
    batch = make_batch(
        query_lens,
        seq_lens,
        num_decodes=num_decodes,
        dtype=dtype,
        num_heads=num_kv_heads * draw.choice([1, 2, 7]),
        num_kv_heads=num_kv_heads,
        head_dim=draw.choice([8, 64, 80, 128]),
        block_size=block_size,
        window=window,
        softcap=draw.choice([0.0, 0.0, 5.0]),
    )
    expected = dense_attention(batch).to(dtype)
    if window is not None:
        for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            num_stale = max(0, seq_len - query_len + 1 - window) // block_size
            batch.metadata.block_table[row, :num_stale] = 0
    return batch, expected


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_the_installed_function_has_the_parameters_that_were_recorded() -> None:
    spec = importlib.util.find_spec("flash_attn_interface")
    found = spec is not None and spec.origin
    assert signature_of(Path(found).read_text() if found else RECORDED) == SIGNATURE


def test_it_is_imported_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdserve_kernels.triton.flash_attn import _flash_attn_with_kvcache

    module = ModuleType("flash_attn_interface")
    monkeypatch.setattr(module, "flash_attn_with_kvcache", len, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    _flash_attn_with_kvcache.cache_clear()
    assert _flash_attn_with_kvcache() is len
    _flash_attn_with_kvcache.cache_clear()


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("seed", seeds(40))
def test_attention_of_any_batch_agrees_with_dense_attention_and_the_reference(
    kernels: KernelSet, make_batch: MakeBatch, dense_attention: Attend, seed: int
) -> None:
    batch, expected = random_case(make_batch, dense_attention, seed, torch.float16)
    assert_close(batch.attend(kernels.paged_attention), expected)
    assert_close(batch.attend(reference.paged_attention), expected)


@pytest.mark.usefixtures("stand_in")
def test_rows_that_pad_a_batch_are_zeros(kernels: KernelSet, make_batch: MakeBatch) -> None:
    batch = make_batch([1, 5], [9, 20], num_decodes=1, dtype=torch.bfloat16)
    padded = replace(batch, query=torch.nn.functional.pad(batch.query, (0, 0, 0, 0, 0, 3)))
    output = padded.attend(kernels.paged_attention)
    assert torch.equal(output[:6], batch.attend(kernels.paged_attention))
    assert not output[6:].any()


def swapped(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"k_cache": arguments["v_cache"], "v_cache": arguments["k_cache"]}


# Mistakes of a call, by what they change in its arguments.
MISTAKES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another slot's keys": lambda a: {"k_cache": a["k_cache"].roll(1, 0)},
    "keys and values swapped": swapped,
    "heads in another order": lambda a: {"k_cache": a["k_cache"].flip(2)},
    "tokens in another order": lambda a: {"v_cache": a["v_cache"].flip(1)},
    "no scale": lambda a: {"softmax_scale": None},
    "a token more": lambda a: {"window_size": (a["window_size"][0] + 1, 0)},
    "a token less": lambda a: {"window_size": (a["window_size"][0] - 1, 0)},
    "no window": lambda a: {"window_size": (-1, -1)},
    "no softcap": lambda a: {"softcap": 0.0},
    "a softcap of the scaled score": lambda a: {"softcap": a["softcap"] * a["softmax_scale"]},
    "not causal": lambda a: {"causal": False, "window_size": (a["window_size"][0], -1)},
    "a shorter cache": lambda a: {"cache_seqlens": a["cache_seqlens"] - 1},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_call_is_noticed(
    kernels: KernelSet, make_batch: MakeBatch, dense_attention: Attend, mistake: str
) -> None:
    batch = make_batch(
        [1, 1, 20], [17, 90, 60], num_decodes=2, dtype=torch.float16, window=7, softcap=5.0
    )
    batch = replace(batch, scale=0.2)  # not what the vendor takes by default
    correct = make_flash_attn()

    def mistaken(*args: Any, **kwargs: Any) -> torch.Tensor:
        arguments = SIGNATURE.bind(*args, **kwargs).arguments
        return correct(**{**arguments, **MISTAKES[mistake](arguments)})

    expected = dense_attention(batch).half()
    with installed(correct):
        assert_close(batch.attend(kernels.paged_attention), expected)
    with installed(mistaken):
        output = batch.attend(kernels.paged_attention)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(output, expected)


@pytest.mark.usefixtures("stand_in")
def test_what_it_does_not_take_is_refused(kernels: KernelSet, make_batch: MakeBatch) -> None:
    batch = make_batch([1], [9], num_decodes=1, dtype=torch.bfloat16)
    in_fp8 = replace(batch, kv_cache=batch.kv_cache.to(FP8))
    with pytest.raises(ValueError, match=r"kv_cache is torch\.float8_e4m3fn, must be"):
        in_fp8.attend(kernels.paged_attention)
    with pytest.raises(ValueError, match="window must be >= 1"):
        replace(batch, window=0).attend(kernels.paged_attention)


def test_a_start_without_it_or_on_another_gpu_is_refused() -> None:
    from pdserve_kernels.triton.flash_attn import check_support

    if importlib.util.find_spec("flash_attn_interface") is None:
        with pytest.raises(ValueError, match=r"cannot be imported.*install flash_attn_3"):
            check_support((9, 0), torch.bfloat16, 128)
    with installed(make_flash_attn()):
        for head_dim in (8, 64, 80, 96, 128, 192, 256):
            check_support((9, 0), torch.bfloat16, head_dim)
        with pytest.raises(ValueError, match=r"capability 10\.0, must have 9\.0"):
            check_support((10, 0), torch.bfloat16, 128)
        with pytest.raises(ValueError, match=r"dtype is torch\.float32"):
            check_support((9, 0), torch.float32, 128)
        for head_dim in (20, 264):
            with pytest.raises(ValueError, match=f"head_dim is {head_dim}, must be a multiple"):
                check_support((9, 0), torch.bfloat16, head_dim)


@pytest.mark.usefixtures("stand_in")
def test_a_process_may_ask_for_it_and_its_version_is_in_the_set_s_name(kernels: KernelSet) -> None:
    use_on_cuda("triton.flash_attn")
    try:
        assert select(torch.device("cuda")) is kernels
    finally:
        use_on_cuda("triton")
    assert name_of(kernels) == "triton.flash_attn/3.0.0"
    assert not kernels.is_row_independent(torch.bfloat16)


needs_it = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("flash_attn_interface") is None or not torch.cuda.is_available(),
        reason="needs an NVIDIA GPU and flash_attn_3",
    ),
]


@pytest.mark.parametrize("seed", seeds(16))
class TestInstalled:
    pytestmark = needs_it

    @pytest.fixture
    def case(
        self, make_batch: MakeBatch, dense_attention: Attend, seed: int
    ) -> tuple[Batch, torch.Tensor]:
        batch, expected = random_case(make_batch, dense_attention, seed, torch.bfloat16)
        if batch.window is not None:
            batch.kv_cache.nan_to_num_(nan=7.0)  # stale blocks have to be finite
        return batch, expected

    def test_it_agrees_with_dense_attention(
        self, kernels: KernelSet, case: tuple[Batch, torch.Tensor]
    ) -> None:
        batch, expected = case
        assert_close(batch.on("cuda").attend(kernels.paged_attention), expected)

    def test_a_graph_replays_it_for_other_lengths(
        self, kernels: KernelSet, case: tuple[Batch, torch.Tensor]
    ) -> None:
        """Recorded of requests without tokens, as the runner does."""
        batch, expected = case
        there = batch.on("cuda")
        metadata = there.metadata
        lengths = (metadata.seq_lens, metadata.query_start_loc)
        actual = [length.clone() for length in lengths]
        for length in lengths:
            length.zero_()
        there.attend(kernels.paged_attention)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = there.attend(kernels.paged_attention)
        for length, value in zip(lengths, actual, strict=True):
            length.copy_(value)
        graph.replay()
        assert_close(output, expected)
