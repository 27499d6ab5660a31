"""One session as the owner sees it: which blocks the reader reads, what is announced, released and
kept of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pdserve_common.types.kv import KVLayout, KVSessionId, Release, SessionEndReason
from pdserve_engine.kv.block_pool import NULL_BLOCK_ID
from pdserve_engine.kv_transfer.base import first_read_blocks
from pdserve_engine.kv_transfer.connectors.links import KVLink
from pdserve_engine.kv_transfer.protocol.transitions import ProducerState
from pdserve_engine.request.request import Request


class SessionKey(NamedTuple):
    """Names a request to its reader."""

    engine_id: str  # of the reader
    request_id: str
    attempt: int


class Session:
    """A session on the owner. Blocks are counted from the request's start, alike in every KV group.

    All numbers of blocks grow: first_block <= num_announced <= num_blocks, and the reader has
    released num_released <= num_announced of them. Guarded by its connector's lock.
    """

    __slots__ = (
        "_first_reads",
        "_request",
        "asked_at",
        "block_ids",
        "deadline",
        "first_block",
        "id",
        "key",
        "link",
        "message",
        "num_announced",
        "num_blocks",
        "num_freed",
        "num_released",
        "num_tokens",
        "reason",
        "release",
        "state",
    )

    def __init__(
        self,
        key: SessionKey,
        state: ProducerState,
        num_tokens: int,
        layout: KVLayout,
        *,
        request: Request | None = None,
        now: float,
        deadline: float,
    ) -> None:
        """`num_tokens`: whose KV the reader pulls. Without a request for a prefix."""
        self.key = key
        self._request = request
        self.state = state
        self.asked_at = now
        self.deadline = deadline
        # Why it is over, and the same for people.
        self.reason = SessionEndReason.UNSPECIFIED
        self.message = ""
        # Both are set when the reader's link is up.
        self.link: KVLink | None = None
        self.id: KVSessionId | None = None
        self.num_tokens = num_tokens
        self.num_blocks = -(-self.num_tokens // layout.block_size)
        self._first_reads = first_read_blocks(layout, self.num_tokens)
        # The reader has those before it.
        self.first_block = 0
        # Ids of blocks that are written, per group; NULL_BLOCK_ID where the reader reads none.
        self.block_ids: list[list[int]] = [[] for _ in layout.groups]
        self.num_announced = 0
        # The reader's last release, and the furthest.
        self.release: Release | None = None
        self.num_released = 0
        # Blocks before it are the request's, or have been given back.
        self.num_freed = 0

    @property
    def request(self) -> Request:
        """Of a session that is no prefix's."""
        assert self._request is not None, "only a prefix has no request"
        return self._request

    def is_of(self, request: Request) -> bool:
        return self._request is request

    @property
    def engine_id(self) -> str:
        return self.key.engine_id

    @property
    def open_id(self) -> KVSessionId:
        assert self.id is not None, "the reader has been asked over its link"
        return self.id

    @property
    def is_exported(self) -> bool:
        """May the reader be reading?"""
        return self.num_announced > self.first_block

    def start_at(self, first_block: int) -> None:
        """The reader has the blocks before `first_block`."""
        self.first_block = self.num_announced = first_block

    def limit_to(self, num_blocks: int, block_size: int) -> None:
        """The owner has no more than the first `num_blocks` of the prefix."""
        self.num_blocks = num_blocks
        self.num_tokens = num_blocks * block_size

    def add_blocks(self, block_ids: Sequence[Sequence[int]], num_blocks: int) -> None:
        """The first `num_blocks` blocks of the request's tables are written."""
        for known, ids, first_read in zip(
            self.block_ids, block_ids, self._first_reads, strict=True
        ):
            num_unread = max(first_read, self.first_block)
            known.extend(
                ids[index] if index >= num_unread else NULL_BLOCK_ID
                for index in range(len(known), num_blocks)
            )

    def take_unannounced(self) -> list[list[int]]:
        """Return the ids, per group, of written blocks that were not announced; they are now."""
        num_written = len(self.block_ids[0])
        new = [ids[self.num_announced :] for ids in self.block_ids]
        self.num_announced = max(self.num_announced, num_written)
        return new

    def keep(self) -> frozenset[int]:
        """The request's blocks are the session's from now on: return those that it keeps."""
        self.num_freed = self.num_released
        return frozenset(self._ids_between(self.num_freed, self.num_blocks))

    def take_kept(self, through_block: int) -> tuple[int, ...]:
        """Return kept blocks before `through_block`, each once; the session keeps them no more."""
        taken = self._ids_between(self.num_freed, through_block)
        self.num_freed = max(self.num_freed, through_block)
        return tuple(taken)

    def _ids_between(self, start: int, end: int) -> list[int]:
        return [i for ids in self.block_ids for i in ids[start:end] if i != NULL_BLOCK_ID]
