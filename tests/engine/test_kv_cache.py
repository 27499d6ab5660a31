"""The KV pool's memory."""

import dataclasses
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve_common.types.kv import KVGroup, KVGroupKind
from pdserve_engine.kv.kv_cache import HUGE_PAGE_BYTES, KVCache, KVCacheSpec
from pdserve_engine.kv.kv_groups import group_layers
from pdserve_engine.models.registry import read_model_config
from pdserve_kernels import select
from support.shards import CutPool, Cuts

SPEC = KVCacheSpec(
    groups=group_layers([None] * 3),
    num_kv_heads=2,
    head_dim=16,
    block_size=16,
    dtype=torch.bfloat16,
)


def test_the_pool_is_zeroed_contiguous_and_page_aligned() -> None:
    cache = KVCache(SPEC, num_blocks=5, device=torch.device("cpu"))
    assert cache.tensor.shape == (5, 2, 3, 2, 16, 16)
    assert cache.tensor.is_contiguous()
    assert not cache.tensor.any()
    assert cache.data_ptr == cache.tensor.data_ptr()
    assert cache.data_ptr % HUGE_PAGE_BYTES == 0
    assert cache.block_bytes == cache.tensor[0].nbytes
    assert cache.num_bytes == cache.tensor.nbytes


def test_views_outlive_close_without_fault() -> None:
    cache = KVCache(SPEC, num_blocks=5, device=torch.device("cpu"))
    view = cache.tensor[2]
    view.fill_(1.0)
    cache.close()
    cache.close()
    assert not view.any()
    assert cache.tensor.numel() == 0


def test_checksums_tell_blocks_apart_by_every_byte() -> None:
    cache = KVCache(SPEC, num_blocks=4, device=torch.device("cpu"))
    cache.tensor[1:].fill_(1.5)
    cache.tensor[3, -1, -1, -1, -1, -1] = 2.0
    sums = cache.block_checksums(range(4))
    zeros, same, equal, other = zip(sums[::2], sums[1::2], strict=True)  # of two heads each
    slot = zlib.crc32(cache.tensor[1, 0, 0].view(torch.uint8).numpy())
    assert same == equal == (3 * slot % 2**32,) * 2
    assert other[0] == same[0]
    assert len({*zeros, *same, *other}) == 3
    assert cache.block_checksums([3, 0]) == (*other, *zeros)


@given(st.data())
def test_the_checksums_of_ranks_make_those_of_whole_blocks(data: st.DataObject) -> None:
    num_heads, num_slots = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 5))
    tp_size = data.draw(st.sampled_from([1, 2, 4, 8]))
    pp_size = data.draw(st.integers(1, min(2, num_slots)))
    cuts = Cuts(num_heads, (tp_size, pp_size), (1, 1), num_slots)
    ranks = CutPool(cuts, "p", num_blocks=3)
    whole = KVCache(cuts.spec, num_blocks=3, device=torch.device("cpu"))
    whole.tensor.copy_(ranks.tensor)
    assert ranks.block_checksums([2, 0]) == whole.block_checksums([2, 0])
    assert {pool.spec.layout() for pool in ranks.pools} == {cuts.spec.layout()}


def test_poison_fills_the_named_blocks_alone() -> None:
    cache = KVCache(SPEC, num_blocks=4, device=torch.device("cpu"))
    cache.poison([3, 1])
    assert cache.tensor[[1, 3]].isnan().all()
    assert not cache.tensor[[0, 2]].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_a_gpus_pool_was_filled_with_is_there_when_the_call_returns() -> None:
    cache = KVCache(SPEC, num_blocks=4, device=torch.device("cuda"))
    # It waits for no other stream, as NIXL's.
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def is_all(expected: float) -> bool:
        with torch.cuda.stream(stream):
            return bool(cache.tensor[1].nan_to_num(nan=7.0).eq(expected).all())

    for _ in range(2):
        torch.cuda._sleep(100_000_000)
        cache.poison([1])
        assert is_all(7.0)
        cache.release()
        torch.cuda._sleep(100_000_000)
        cache.restore()
        assert is_all(0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_blocks_have_the_checksums_of_their_bytes() -> None:
    caches = [KVCache(SPEC, num_blocks=4, device=torch.device(name)) for name in ("cpu", "cuda")]
    caches[0].tensor.copy_(torch.rand(caches[0].tensor.shape))
    caches[1].tensor.copy_(caches[0].tensor)
    assert caches[0].block_checksums(range(4)) == caches[1].block_checksums(range(4))


def test_the_budget_is_cut_into_whole_blocks() -> None:
    assert SPEC.num_blocks_for_budget(SPEC.block_bytes * 7 + 5) == 7
    with pytest.raises(ValueError, match=f"one block takes {SPEC.block_bytes}"):
        SPEC.num_blocks_for_budget(SPEC.block_bytes - 1)
    with pytest.raises(ValueError, match="num_blocks is 0"):
        KVCache(SPEC, num_blocks=0, device=torch.device("cpu"))


def test_the_layout_tells_a_peer_what_a_block_holds(make_model: Callable[..., Path]) -> None:
    config = read_model_config(make_model())
    spec = KVCacheSpec.from_model(config, block_size=16, device=torch.device("cpu"))
    assert spec.block_bytes == 16 * 3 * 2 * 2 * 16 * 4  # layers, heads, K and V, head_dim, fp32
    layout = spec.layout()
    assert layout.block_bytes == spec.block_bytes
    assert layout.groups == (KVGroup(id=0, layers=(0, 1, 2), kind=KVGroupKind.FULL),)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_layout_has_the_tile_format_of_the_kernels(
    make_model: Callable[..., Path], dtype: str
) -> None:
    device = torch.device("cpu")
    config = read_model_config(make_model(), dtype=dtype)
    kernels = select(device)
    for block_size in (8, 16):
        spec = KVCacheSpec.from_model(config, block_size=block_size, device=device)
        expected = kernels.kv_tile_format(config.dtype, block_size, config.head_dim)
        assert spec.layout().tile_format == expected


def test_a_block_of_a_hybrid_model_has_room_for_one_groups_layers() -> None:
    spec = dataclasses.replace(SPEC, groups=group_layers([8, 8, None, 8, 8, 8, None]))
    cache = KVCache(spec, num_blocks=5, device=torch.device("cpu"))
    assert cache.tensor.shape == (5, 2, 2, 2, 16, 16)
    assert cache.block_bytes == cache.tensor[0].nbytes
    assert spec.windows == (None, 8, 8, 8)
    sliding = KVGroupKind.SLIDING
    assert spec.layout().groups == (
        KVGroup(id=0, layers=(2, 6), kind=KVGroupKind.FULL),
        KVGroup(id=1, layers=(0, 1), kind=sliding, window=8),
        KVGroup(id=2, layers=(3, 4), kind=sliding, window=8),
        KVGroup(id=3, layers=(5,), kind=sliding, window=8),
    )
