"""Which bytes of P's ranks D's ranks read, and which ranks D refuses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdserve_common.errors import KVTransferError
from pdserve_common.types.kv import (
    KVEndpoint,
    KVGroup,
    KVGroupKind,
    KVLayout,
    KVLinkWelcome,
    KVMemoryRegion,
    KVRankEndpoint,
    KVShard,
)
from pdserve_engine.kv_transfer.transport.shards import (
    MAX_RANKS,
    check_cover,
    part_bytes,
    plan_reads,
    slices_of,
    whole_shard,
)
from support.shards import cut

SLOT_BYTES = 8
NUM_BLOCKS = 9


def layout_of(num_heads: int, num_slots: int) -> KVLayout:
    group = KVGroup(id=0, layers=tuple(range(num_slots)), kind=KVGroupKind.FULL)
    head_bytes = num_slots * SLOT_BYTES
    return KVLayout(
        groups=(group,),
        block_size=16,
        block_bytes=num_heads * head_bytes,
        num_kv_heads=num_heads,
        head_bytes=head_bytes,
    )


def welcome_of(shards: Sequence[KVShard | None], layout: KVLayout, **fields: Any) -> KVLinkWelcome:
    """What a P with these ranks says; fields are the welcome's."""
    region = KVMemoryRegion(base_address=1 << 30, first_block=0, num_blocks=NUM_BLOCKS)
    ranks = (
        KVRankEndpoint(
            rank=rank, shard=shard, memory_type="DRAM", regions=(region,), nixl_metadata=b"m"
        )
        for rank, shard in enumerate(shards)
    )
    known = {
        "protocol_version": 4,
        "engine_id": "p0",
        "epoch": "e",
        "compatibility_hash": "h",
        "link": 1,
        "endpoint": KVEndpoint(ranks=tuple(ranks), transport="any"),
    }
    return KVLinkWelcome(**(known | fields))


@st.composite
def cut_twice(draw: st.DrawFn) -> tuple[KVLayout, list[KVShard], list[KVShard]]:
    """A model, and how P and D have cut it."""
    num_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    num_slots = draw(st.integers(1, 6))
    sides = []
    for _ in range(2):
        sizes = [n for n in (1, 2, 3, 4, 8) if num_heads % n == 0 or n % num_heads == 0]
        tp_size, pp_size = draw(st.sampled_from(sizes)), draw(st.integers(1, num_slots))
        sides.append(cut(num_heads, num_slots, tp_size, pp_size))
    return layout_of(num_heads, num_slots), sides[0], sides[1]


def bytes_of(shard: KVShard, layout: KVLayout) -> NDArray[np.int64]:
    """A rank's part of a block in memory: each byte's number in the block of the whole model."""
    shape = (layout.num_kv_heads, layout.num_slots, SLOT_BYTES)
    whole = np.arange(layout.block_bytes).reshape(shape)
    heads = slice(shard.first_kv_head, shard.first_kv_head + shard.num_kv_heads)
    slots = slice(shard.first_slot, shard.first_slot + shard.num_slots)
    return whole[heads, slots].ravel()


@given(cut_twice())
def test_every_byte_of_d_comes_from_its_place_on_p_and_once(
    cuts: tuple[KVLayout, list[KVShard], list[KVShard]],
) -> None:
    layout, p_shards, d_shards = cuts
    plan = plan_reads(welcome_of(p_shards, layout), d_shards, layout)
    assert len(plan) == len(d_shards)
    for d_shard, peers in zip(d_shards, plan, strict=True):
        expected = bytes_of(d_shard, layout)
        landed = np.full_like(expected, -1)
        for peer in peers:
            source = bytes_of(p_shards[peer.endpoint.rank], layout)
            assert peer.block_bytes == len(source)
            assert len({piece.num_bytes for piece in peer.slices}) == 1, "of one size"
            for remote, local, num_bytes in peer.slices:
                assert (landed[local : local + num_bytes] == -1).all(), "it is read twice"
                landed[local : local + num_bytes] = source[remote : remote + num_bytes]
        assert (landed == expected).all()
        assert sum(peer.read_bytes for peer in peers) == len(expected)


@given(cut_twice())
def test_a_range_of_heads_is_one_piece_where_both_have_the_same_slots(
    cuts: tuple[KVLayout, list[KVShard], list[KVShard]],
) -> None:
    _, p_shards, d_shards = cuts
    for p in p_shards:
        for d in d_shards:
            pieces = slices_of(p, d, slot_bytes=SLOT_BYTES)
            same_slots = (p.first_slot, p.num_slots) == (d.first_slot, d.num_slots)
            assert len(pieces) <= (1 if same_slots else min(p.num_kv_heads, d.num_kv_heads))


def sources(p_sizes: tuple[int, int], d_sizes: tuple[int, int]) -> list[list[int]]:
    """For each rank of D the ranks of P that it reads from; the model has two heads and slots."""
    layout = layout_of(2, 2)
    p_shards, d_shards = cut(2, 2, *p_sizes), cut(2, 2, *d_sizes)
    plan = plan_reads(welcome_of(p_shards, layout), d_shards, layout)
    return [[peer.endpoint.rank for peer in peers] for peers in plan]


@pytest.mark.parametrize(
    ("p_sizes", "d_sizes", "expected"),
    [
        ((1, 1), (1, 1), [[0]]),
        ((2, 1), (1, 1), [[0, 1]]),
        ((1, 1), (2, 1), [[0], [0]]),
        # Copies, in turns.
        ((4, 1), (1, 1), [[0, 2]]),
        ((4, 1), (2, 1), [[0], [3]]),
        ((4, 1), (4, 1), [[0], [1], [2], [3]]),
        ((8, 1), (2, 1), [[0], [5]]),
        ((2, 1), (8, 1), [[0]] * 4 + [[1]] * 4),
        ((1, 2), (1, 1), [[0, 1]]),
        ((2, 2), (1, 2), [[0, 1], [2, 3]]),
        ((2, 1), (1, 2), [[0, 1], [0, 1]]),
    ],
)
def test_each_rank_of_d_reads_from_the_ranks_that_have_what_it_lacks(
    p_sizes: tuple[int, int], d_sizes: tuple[int, int], expected: list[list[int]]
) -> None:
    assert sources(p_sizes, d_sizes) == expected


def test_peers_are_called_by_their_ranks_names() -> None:
    layout = layout_of(2, 2)
    for p_sizes, names in ((1, ["p0.e"]), (2, ["p0.e.0", "p0.e.1"])):
        (peers,) = plan_reads(welcome_of(cut(2, 2, p_sizes), layout), [whole_shard(layout)], layout)
        assert [peer.agent_name for peer in peers] == names
        assert {(peer.engine_id, peer.epoch, peer.num_blocks) for peer in peers} == {
            ("p0", "e", NUM_BLOCKS)
        }


def test_a_rank_that_says_nothing_of_its_part_has_all() -> None:
    layout = layout_of(2, 2)
    (peers,) = plan_reads(welcome_of([None], layout), [whole_shard(layout)], layout)
    assert [tuple(peer.slices[0]) for peer in peers] == [(0, 0, layout.block_bytes)]


# ---- what makes no sense


class Wrong(NamedTuple):
    """Fields of a P's second rank, of two; of its part, if they begin so; and what D says."""

    fields: dict[str, Any]
    says: str


def region(**fields: Any) -> tuple[KVMemoryRegion, ...]:
    known = {"base_address": 1 << 30, "first_block": 0, "num_blocks": NUM_BLOCKS}
    return (KVMemoryRegion(**(known | fields)),)


SHARD_FIELDS = set(KVShard.__slots__)
# Of four heads and two slots, two heads each.
WRONG = {
    "rank twice": Wrong({"rank": 0}, r"p0 numbers its ranks \[0, 0\], not from 0 on"),
    "rank gap": Wrong({"rank": 2}, r"p0 numbers its ranks \[0, 2\], not from 0 on"),
    "first_kv_head beyond": Wrong(
        {"first_kv_head": 3}, "rank 1: first_kv_head 3 and num_kv_heads 2 do not fit, the .* has 4"
    ),
    "first_kv_head twice": Wrong(
        {"first_kv_head": 1}, "p0 has slot 0 of KV head 1 in ranks that are no copies"
    ),
    "first_kv_head of rank 0": Wrong({"first_kv_head": 0}, "p0 has slot 0 of KV head 2 in no rank"),
    "num_kv_heads zero": Wrong(
        {"num_kv_heads": 0}, "rank 1: first_kv_head 2 and num_kv_heads 0 do not fit, the .* has 4"
    ),
    "num_kv_heads few": Wrong({"num_kv_heads": 1}, "p0 has slot 0 of KV head 3 in no rank"),
    "num_kv_heads huge": Wrong(
        {"num_kv_heads": 2**32 - 1}, "rank 1: first_kv_head 2 and num_kv_heads 4294967295 do not"
    ),
    "first_slot beyond": Wrong(
        {"first_slot": 1}, "rank 1: first_slot 1 and num_slots 2 do not fit, the model has 2"
    ),
    "num_slots zero": Wrong(
        {"num_slots": 0}, "rank 1: first_slot 0 and num_slots 0 do not fit, the model has 2"
    ),
    "num_slots few": Wrong({"num_slots": 1}, "p0 has slot 1 of KV head 2 in no rank"),
    "memory_type": Wrong({"memory_type": "DISK"}, "p0, rank 1: memory_type is 'DISK'"),
    "regions none": Wrong({"regions": ()}, "p0, rank 1: there is no memory region"),
    "regions num_blocks": Wrong(
        {"regions": region(num_blocks=8)}, r"p0 has num_blocks \[9, 8\] in its ranks"
    ),
    "regions no blocks": Wrong(
        {"regions": region(num_blocks=0)}, "rank 1: a memory region is not one: .*num_blocks=0"
    ),
    "regions first_block": Wrong(
        {"regions": region(first_block=1)}, "rank 1: a memory region is not one: .*first_block=1"
    ),
    "regions base_address": Wrong(
        {"regions": region(base_address=2**64 - 1)}, "rank 1: a memory region is not one: "
    ),
    "regions too many": Wrong(
        {"regions": region(num_blocks=2**29)}, "p0 has num_blocks 536870912, too many"
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rank_that_makes_no_sense_is_refused_by_name(name: str) -> None:
    layout = layout_of(4, 2)
    welcome = welcome_of(cut(4, 2, 2), layout)
    assert plan_reads(welcome, [whole_shard(layout)], layout)
    fields, says = WRONG[name]
    first, second = welcome.endpoint.ranks
    part = {key: value for key, value in fields.items() if key in SHARD_FIELDS}
    others = {key: value for key, value in fields.items() if key not in SHARD_FIELDS}
    assert second.shard is not None
    second = replace(second, shard=replace(second.shard, **part), **others)
    endpoint = replace(welcome.endpoint, ranks=(first, second))
    with pytest.raises(KVTransferError, match=says):
        plan_reads(replace(welcome, endpoint=endpoint), [whole_shard(layout)], layout)


@pytest.mark.parametrize("num_ranks", [0, MAX_RANKS + 1])
def test_too_many_ranks_or_none_are_refused(num_ranks: int) -> None:
    layout = layout_of(1, 1)
    welcome = welcome_of([whole_shard(layout)] * num_ranks, layout)
    with pytest.raises(KVTransferError, match=f"p0 has {num_ranks} ranks, must be 1 to 64"):
        plan_reads(welcome, [whole_shard(layout)], layout)


def test_a_worker_sees_that_its_own_ranks_lack_a_part() -> None:
    layout = layout_of(4, 2)
    with pytest.raises(KVTransferError, match="this worker has slot 0 of KV head 2 in no rank"):
        check_cover(cut(4, 2, 2)[:1], layout, "this worker")
    assert sum(part_bytes(shard, layout) for shard in cut(4, 2, 2)) == layout.block_bytes
