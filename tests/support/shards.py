"""Workers whose models are cut over several ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pdserve_common.types.kv import KVShard
from pdserve_engine.kv.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.kv.kv_groups import group_layers
from pdserve_engine.kv_transfer.base import KVIdentity, KVTransport
from pdserve_engine.kv_transfer.transport.shards import merge_checksums
from support.handoff import BLOCK_SIZE, NUM_BLOCKS, Pair, make_identity, make_transport
from support.local_transport import LocalRegistry


def cut(num_heads: int, num_slots: int, tp_size: int, pp_size: int = 1) -> list[KVShard]:
    """Return what the ranks of a model hold of a block; stages may differ by a slot. With more
    ranks than heads neighbours have the same one.
    """
    slots = [stage * num_slots // pp_size for stage in range(pp_size + 1)]
    count = max(1, num_heads // tp_size)
    return [
        KVShard(
            first_kv_head=rank * num_heads // tp_size,
            num_kv_heads=count,
            first_slot=first,
            num_slots=end - first,
        )
        for first, end in itertools.pairwise(slots)
        for rank in range(tp_size)
    ]


class Cuts(NamedTuple):
    """How P's model and D's, which is the same, are cut: tensor and pipeline parallel sizes."""

    num_heads: int
    p: tuple[int, int]
    d: tuple[int, int]
    num_slots: int = 3

    @property
    def spec(self) -> KVCacheSpec:
        return KVCacheSpec(
            groups=group_layers([None] * self.num_slots),
            num_kv_heads=self.num_heads,
            head_dim=32,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
        )

    def shards(self, side: str) -> list[KVShard]:
        return cut(self.num_heads, self.num_slots, *(self.p if side == "p" else self.d))


CUTS = {
    "1:1": Cuts(1, (1, 1), (1, 1)),
    "tp 2:1": Cuts(4, (2, 1), (1, 1)),
    "tp 1:2": Cuts(4, (1, 1), (2, 1)),
    "tp 4:1": Cuts(4, (4, 1), (1, 1)),
    # Of two heads, so that ranks are copies.
    "tp 4:2": Cuts(2, (4, 1), (2, 1)),
    "tp 2:4": Cuts(2, (2, 1), (4, 1)),
    "tp 4:4": Cuts(2, (4, 1), (4, 1)),
    "pp 2:1": Cuts(2, (1, 2), (1, 1)),
    "pp 1:2": Cuts(2, (1, 1), (1, 2)),
    "tp 2:1, pp 1:2": Cuts(2, (2, 1), (1, 2)),
}


class CutPool:
    """The pools of a worker's ranks."""

    def __init__(self, cuts: Cuts, side: str, num_blocks: int = NUM_BLOCKS) -> None:
        self.spec, self.side, self.num_blocks = cuts.spec, side, num_blocks
        self.shards = cuts.shards(side)
        self.pools = [
            KVCache(
                replace(self.spec, shard=shard), num_blocks=num_blocks, device=torch.device("cpu")
            )
            for shard in self.shards
        ]
        self.fill(ord(side))

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Not the shape of `tensor`: a self-check of one rank leaves copies that differ.
        whole = torch.rand((self.num_blocks, *self.spec.block_shape), generator=generator)
        for pool, shard in zip(self.pools, self.shards, strict=True):
            pool.tensor.copy_(part_of(whole, shard))

    @property
    def tensor(self) -> torch.Tensor:
        """A copy of what they hold of the whole model, which copies must hold alike."""
        whole = torch.zeros((self.num_blocks, *self.spec.block_shape), dtype=self.spec.dtype)
        for pool, shard in zip(self.pools, self.shards, strict=True):
            part_of(whole, shard).copy_(pool.tensor)
        for pool, shard in zip(self.pools, self.shards, strict=True):
            assert torch.equal(part_of(whole, shard), pool.tensor), f"{shard} differs in a copy"
        return whole

    @property
    def block_bytes(self) -> int:
        """Of all ranks, copies too."""
        return sum(pool.block_bytes for pool in self.pools)

    def block_checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        sums = [pool.block_checksums(block_ids) for pool in self.pools]
        return merge_checksums(self.shards, sums, self.spec.num_kv_heads)


def make_cut_side(
    kind: str, pool: CutPool, registry: LocalRegistry, **options: Any
) -> tuple[KVIdentity, KVTransport]:
    """Return a worker with these pools; options are NIXL's."""
    num_ranks = len(pool.pools)
    layout = pool.spec.layout()
    identity = make_identity(f"{pool.side}0", layout=layout, num_ranks=num_ranks)
    return identity, make_transport(kind, identity, registry, *pool.pools, **options)


class CutPair(Pair):
    """A P and a D over several ranks each."""

    def __init__(self, kind: str, cuts: Cuts) -> None:
        self._cuts = cuts
        super().__init__(kind, cuts.spec)

    def make_pool(self, side: str) -> CutPool:
        return CutPool(self._cuts, side)

    def make_side(self, side: str, pool: CutPool) -> tuple[KVIdentity, KVTransport]:
        return make_cut_side(self.kind, pool, self.registry)


def part_of(whole: torch.Tensor, shard: KVShard) -> torch.Tensor:
    """Return a view of a rank's part of blocks of the whole model."""
    heads = slice(shard.first_kv_head, shard.first_kv_head + shard.num_kv_heads)
    slots = slice(shard.first_slot, shard.first_slot + shard.num_slots)
    return whole[:, heads, slots]
