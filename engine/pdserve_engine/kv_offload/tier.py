"""What a tier of KV blocks besides the pool has to do."""

from collections.abc import Callable
from typing import Literal, Protocol

from pdserve_engine.kv.block_copier import BlockBytes

# Why a block that a tier should have is not used: it is gone, it cannot be read, or it is not what
# was stored.
BadReason = Literal["missing", "unreadable", "mismatch"]
BAD_REASONS: tuple[BadReason, ...] = ("missing", "unreadable", "mismatch")
# Called with why, on any thread.
OnBad = Callable[[BadReason], None]


class KVTier(Protocol):
    """Blocks by hash, at most so many bytes of them: LRU, the ends of prefixes first. Any thread
    may call it.
    """

    @property
    def name(self) -> str:
        """Its label in metrics."""
        ...

    @property
    def is_writable(self) -> bool:
        """False, once and for all, after it could not store a block; what it has is still read."""
        ...

    @property
    def used_bytes(self) -> int: ...

    def __contains__(self, block_hash: object) -> bool:
        """Is it here, as far as is known without reading it?"""
        ...

    def put(
        self,
        block_hash: bytes,
        parent: bytes,
        content: BlockBytes,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Store a block, uint8 [block_bytes], that comes behind block `parent`; evict others for
        it. False if it is here already, cannot be stored, or is not wanted any more: after
        `is_wanted` has become false, and then `discard` or `clear` has returned, it is not here.
        """
        ...

    def get(self, block_hash: bytes) -> BlockBytes | None:
        """Return exactly what was stored, uint8 [block_bytes], as the last used; None, and the
        block is not here any more, if it cannot be read or is not that.
        """
        ...

    def discard(self, block_hash: bytes) -> None:
        """Nobody is to find the block."""
        ...

    def clear(self) -> None:
        """Nobody is to find any block, after a restart neither."""
        ...

    def close(self) -> None:
        """Leave what a restart can find."""
        ...
