"""The KV pool: one tensor that holds every block, and what a block's bytes mean."""

import contextlib
import dataclasses
import math
import mmap
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve_common.types.kv import KVGroup, KVGroupKind, KVLayout, KVShard
from pdserve_engine.kv.kv_groups import KVGroupLayers, group_layers
from pdserve_engine.kv.memory import wait_for_stream
from pdserve_kernels import select

HUGE_PAGE_BYTES = 2 << 20


class AttentionShape(Protocol):
    """What a model's config says that a KV pool depends on."""

    @property
    def attention_windows(self) -> Sequence[int | None]: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def kv_dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The shape of a KV pool but for its number of blocks.

    A block belongs to the group that allocated it and holds block_size tokens of that group's
    layers: [num_kv_heads, num_slots, k|v, block_size, head_dim]. With full attention alone there is
    one group, of all layers. A rank of a model that is cut holds a part of each block, its `shard`;
    `groups` and `num_kv_heads` are the whole model's.
    """

    groups: tuple[KVGroupLayers, ...]
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    # How a [block_size, head_dim] tile lies in memory: what the kernels say by `kv_tile_format`.
    tile_format: str = "row_major"
    # What of each block the pool holds; None: all.
    shard: KVShard | None = None

    @classmethod
    def from_model(
        cls, config: AttentionShape, *, block_size: int, device: torch.device
    ) -> "KVCacheSpec":
        return cls(
            groups=group_layers(config.attention_windows),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=config.kv_dtype,
            tile_format=select(device).kv_tile_format(config.kv_dtype, block_size, config.head_dim),
        )

    @property
    def part(self) -> KVShard:
        """What of each block the pool holds."""
        if self.shard is not None:
            return self.shard
        num_slots = max(len(group.layers) for group in self.groups)
        return KVShard(
            first_kv_head=0, num_kv_heads=self.num_kv_heads, first_slot=0, num_slots=num_slots
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many positions a token sees in each group, its own included; None: all."""
        return tuple(group.window for group in self.groups)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of the part that the pool holds."""
        part = self.part
        return (part.num_kv_heads, part.num_slots, 2, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Of the part that the pool holds."""
        return math.prod(self.block_shape) * self.dtype.itemsize

    def num_blocks_for_budget(self, num_bytes: int) -> int:
        """Return how many whole blocks fit; raise ValueError when none does."""
        if num_bytes < self.block_bytes:
            raise ValueError(
                f"KV cache budget is {num_bytes} bytes, one block takes {self.block_bytes}"
            )
        return num_bytes // self.block_bytes

    def layout(self) -> KVLayout:
        """Return what a peer must agree on before it reads our blocks: the whole model's."""
        groups = (
            KVGroup(
                id=index,
                layers=group.layers,
                kind=KVGroupKind.FULL if group.window is None else KVGroupKind.SLIDING,
                window=group.window or 0,
            )
            for index, group in enumerate(self.groups)
        )
        whole = dataclasses.replace(self, shard=None)
        return KVLayout(
            groups=tuple(groups),
            block_size=self.block_size,
            block_bytes=whole.block_bytes,
            tile_format=self.tile_format,
            num_kv_heads=self.num_kv_heads,
            head_bytes=whole.block_bytes // self.num_kv_heads,
        )


class KVCache:
    """Owns the pool's memory from construction to `close`.

    On the CPU the pool is one anonymous mapping with huge pages, touched here by torch's threads so
    that its pages lie where they are used. `tensor` is zeroed.
    """

    def __init__(self, spec: KVCacheSpec, *, num_blocks: int, device: torch.device) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 1")
        self.spec = spec
        self.num_blocks = num_blocks
        self._mapping: mmap.mmap | None = None
        shape = (num_blocks, *spec.block_shape)
        if device.type == "cpu":
            self._tensor = self._map().view(spec.dtype).view(shape)
        else:
            self._tensor = torch.empty(shape, dtype=spec.dtype, device=device)
        self._zero()

    @property
    def tensor(self) -> torch.Tensor:
        """[num_blocks, num_kv_heads, num_slots, 2, block_size, head_dim], contiguous, in the dtype
        of the spec; of a rank's part of each block its heads and slots.
        """
        return self._tensor

    @property
    def data_ptr(self) -> int:
        return self._tensor.data_ptr()

    @property
    def block_bytes(self) -> int:
        return self.spec.block_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def block_checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """Return for each block one number for each KV head, block by block: shows in tests that
        they arrived intact, also between workers that are cut differently.

        It is the sum modulo 2^32 of the CRC-32s of its slots' bytes, so that those of pipeline
        stages add up. On a GPU it waits for the steps that are under way there.
        """
        part = self.spec.part
        shape = (self.num_blocks, part.num_kv_heads, part.num_slots, -1)
        slots = self._tensor.view(shape).view(torch.uint8)
        return tuple(
            sum(zlib.crc32(slot.data) for slot in head) % (1 << 32)
            for block_id in block_ids
            for head in slots[block_id].cpu().numpy()
        )

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks that are free with NaN: shows in tests that nobody uses them any more.

        On a GPU it waits for the steps that are under way there: what is read into a block later
        must not be overtaken.
        """
        self._tensor[list(block_ids)] = torch.nan
        wait_for_stream(self._tensor.device)

    def release(self) -> None:
        """Give the memory back until `restore`; what the blocks held is lost. Nothing may use the
        pool, and no transfer may be under way.

        On the CPU the addresses stay, and with them what a transport has registered.
        """
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
        else:
            self._tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the memory back, zeroed."""
        if self._mapping is None:
            self._tensor.untyped_storage().resize_(self.num_bytes)
        self._zero()

    def close(self) -> None:
        """Give the memory back. Views that are still around read zeros on the CPU, and never fault.

        No transfer may be under way into or out of the pool.
        """
        self._tensor = torch.empty(0, dtype=self.spec.dtype)
        if self._mapping is not None:
            # Not closed but emptied: tensors elsewhere may still point into it; the last unmaps it.
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._mapping = None

    def _zero(self) -> None:
        self._tensor.zero_()
        wait_for_stream(self._tensor.device)

    def _map(self) -> torch.Tensor:
        # One huge page more than needed, so that the pool can start on a huge page's border.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping = mmap.mmap(-1, self.num_bytes + HUGE_PAGE_BYTES, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Kernels built without huge pages refuse the advice; the pool works all the same.
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        mapped = torch.frombuffer(self._mapping, dtype=torch.uint8)
        offset = -mapped.data_ptr() % HUGE_PAGE_BYTES
        return mapped[offset : offset + self.num_bytes]
