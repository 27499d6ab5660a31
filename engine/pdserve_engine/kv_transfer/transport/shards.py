"""Which rank of the reader reads which bytes of which rank of the owner.

All ranks of a worker have the same block ids, and each has a pool with its own part of every block:
some KV heads (tensor parallelism), of these some slots (pipeline stages). The owner and the reader
may be cut differently. A rank of the reader reads what its part has in common with those of the
owner's ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdserve_common.errors import KVTransferError
from pdserve_common.types.kv import KVLayout, KVLinkWelcome, KVRankEndpoint, KVShard

MAX_RANKS = 64


class KVSlice(NamedTuple):
    """Bytes that are the same in a block of the owner's rank and in one of the reader's."""

    remote_offset: int
    local_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPeer:
    """A rank of the owner as a rank of the reader reads from it. The endpoint's regions hold
    `num_blocks`.
    """

    # The owner's, and its start.
    engine_id: str
    epoch: str
    # The rank's to transports.
    agent_name: str
    endpoint: KVRankEndpoint
    num_blocks: int
    # Bytes in a block of the rank.
    block_bytes: int
    # What is read of each block, equally large pieces.
    slices: tuple[KVSlice, ...]

    @property
    def read_bytes(self) -> int:
        """Bytes that are read of each block."""
        return sum(piece.num_bytes for piece in self.slices)


def agent_name(engine_id: str, epoch: str, rank: int = 0, num_ranks: int = 1) -> str:
    """Name a rank of one start of a worker to transports (rule K1)."""
    name = f"{engine_id}.{epoch}"
    return name if num_ranks == 1 else f"{name}.{rank}"


def whole_shard(layout: KVLayout) -> KVShard:
    """Return the part that an only rank has: all."""
    return KVShard(
        first_kv_head=0,
        num_kv_heads=layout.num_kv_heads,
        first_slot=0,
        num_slots=layout.num_slots,
    )


def slices_of(p: KVShard, d: KVShard, *, slot_bytes: int) -> tuple[KVSlice, ...]:
    """Return what a rank of the owner and one of the reader have in common of a block, where in
    both: one piece if both have the same slots, else one a head.
    """
    first_head = max(p.first_kv_head, d.first_kv_head)
    num_heads = min(p.first_kv_head + p.num_kv_heads, d.first_kv_head + d.num_kv_heads) - first_head
    first_slot = max(p.first_slot, d.first_slot)
    num_slots = min(p.first_slot + p.num_slots, d.first_slot + d.num_slots) - first_slot
    if num_heads <= 0 or num_slots <= 0:
        return ()
    heads_each = num_heads if num_slots == p.num_slots == d.num_slots else 1

    def offset_in(side: KVShard, head: int) -> int:
        slot = (head - side.first_kv_head) * side.num_slots + first_slot - side.first_slot
        return slot * slot_bytes

    return tuple(
        KVSlice(offset_in(p, head), offset_in(d, head), heads_each * num_slots * slot_bytes)
        for head in range(first_head, first_head + num_heads, heads_each)
    )


def plan_reads(
    welcome: KVLinkWelcome, d_shards: Sequence[KVShard], layout: KVLayout
) -> tuple[tuple[KVPeer, ...], ...]:
    """Return for each rank of the reader the ranks of the owner that it reads from; `layout` is
    what both have.

    Raises KVTransferError that names what in the owner's ranks makes no sense, before anybody looks
    at their NIXL metadata.
    """
    p_shards, num_blocks = _check_ranks(welcome, layout)
    ranks = welcome.endpoint.ranks

    def peer_of(p: int, d_shard: KVShard) -> KVPeer:
        p_shard = p_shards[p]
        return KVPeer(
            engine_id=welcome.engine_id,
            epoch=welcome.epoch,
            agent_name=agent_name(welcome.engine_id, welcome.epoch, p, len(ranks)),
            endpoint=ranks[p],
            num_blocks=num_blocks,
            block_bytes=part_bytes(p_shard, layout),
            slices=slices_of(p_shard, d_shard, slot_bytes=layout.slot_bytes),
        )

    plan = (
        (peer_of(p, d_shard) for p in _sources(d, p_shards)) for d, d_shard in enumerate(d_shards)
    )
    return tuple(tuple(peer for peer in peers if peer.slices) for peers in plan)


def part_bytes(shard: KVShard, layout: KVLayout) -> int:
    """Return the bytes of a rank's part of a block."""
    return shard.num_kv_heads * shard.num_slots * layout.slot_bytes


def check_cover(shards: Sequence[KVShard], layout: KVLayout, whose: str) -> None:
    """Raise KVTransferError unless the parts, copies apart, are every slot of every head once."""
    covered = [0] * layout.num_kv_heads  # bits are slots
    for shard in dict.fromkeys(shards):
        slots = ((1 << shard.num_slots) - 1) << shard.first_slot
        for head in range(shard.first_kv_head, shard.first_kv_head + shard.num_kv_heads):
            if twice := covered[head] & slots:
                raise KVTransferError(
                    f"{whose} has slot {_first_bit(twice)} of KV head {head} in ranks that are no "
                    "copies of each other"
                )
            covered[head] |= slots
    for head, slots in enumerate(covered):
        if missing := ((1 << layout.num_slots) - 1) & ~slots:
            raise KVTransferError(
                f"{whose} has slot {_first_bit(missing)} of KV head {head} in no rank"
            )


def merge_checksums(
    shards: Sequence[KVShard], checksums: Sequence[Sequence[int]], num_kv_heads: int
) -> tuple[int, ...]:
    """Return the checksums of whole blocks from those that each rank has of its parts, as
    `KVCache.block_checksums` makes them: heads side by side, copies once, stages added up.
    """
    num_blocks = len(checksums[0]) // shards[0].num_kv_heads
    merged = [0] * (num_blocks * num_kv_heads)
    for shard, sums in dict(zip(shards, checksums, strict=True)).items():
        for index, checksum in enumerate(sums):
            block, head = divmod(index, shard.num_kv_heads)
            place = block * num_kv_heads + shard.first_kv_head + head
            merged[place] = (merged[place] + checksum) % (1 << 32)
    return tuple(merged)


def _sources(d: int, p_shards: Sequence[KVShard]) -> list[int]:
    """Return the ranks of the owner that rank `d` reads: of those that are copies one, in turns."""
    copies: dict[KVShard, list[int]] = {}
    for rank, shard in enumerate(p_shards):
        copies.setdefault(shard, []).append(rank)
    return [ranks[d % len(ranks)] for ranks in copies.values()]


def _check_ranks(welcome: KVLinkWelcome, layout: KVLayout) -> tuple[list[KVShard], int]:
    """Return the owner's parts, and of how many blocks. Raises KVTransferError as plan_reads."""
    ranks, whose = welcome.endpoint.ranks, welcome.engine_id
    if not 1 <= len(ranks) <= MAX_RANKS:
        raise KVTransferError(f"{whose} has {len(ranks)} ranks, must be 1 to {MAX_RANKS}")
    numbers = [rank.rank for rank in ranks]
    if numbers != list(range(len(ranks))):
        raise KVTransferError(f"{whose} numbers its ranks {numbers}, not from 0 on")
    shards, sizes = [], []
    for rank in ranks:
        shard = rank.shard or whole_shard(layout)
        _check_shard(shard, layout, f"{whose}, rank {rank.rank}")
        shards.append(shard)
        sizes.append(_check_memory(rank, part_bytes(shard, layout), f"{whose}, rank {rank.rank}"))
        if sizes[-1] * layout.num_kv_heads >= 1 << 31:  # transports number pieces with 31 bits
            raise KVTransferError(f"{whose} has num_blocks {sizes[-1]}, too many to be read from")
    if len(set(sizes)) > 1:
        raise KVTransferError(f"{whose} has num_blocks {sizes} in its ranks, must be equal")
    check_cover(shards, layout, whose)
    return shards, sizes[0]


def _check_shard(shard: KVShard, layout: KVLayout, whose: str) -> None:
    for first, number, size in (
        ("first_kv_head", "num_kv_heads", layout.num_kv_heads),
        ("first_slot", "num_slots", layout.num_slots),
    ):
        start, count = getattr(shard, first), getattr(shard, number)
        if not 0 <= start < start + count <= size:
            raise KVTransferError(
                f"{whose}: {first} {start} and {number} {count} do not fit, the model has {size}"
            )


def _check_memory(rank: KVRankEndpoint, block_bytes: int, whose: str) -> int:
    """Return how many blocks there are in regions that follow on one another and have addresses."""
    if rank.memory_type not in ("DRAM", "VRAM"):
        raise KVTransferError(f"{whose}: memory_type is {rank.memory_type!r}")
    num_blocks = 0
    for region in rank.regions:
        end = region.base_address + region.num_blocks * block_bytes
        if region.first_block != num_blocks or region.num_blocks < 1 or not 0 < end < 1 << 64:
            raise KVTransferError(f"{whose}: a memory region is not one: {region}")
        num_blocks += region.num_blocks
    if num_blocks == 0:
        raise KVTransferError(f"{whose}: there is no memory region")
    return num_blocks


def _first_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
