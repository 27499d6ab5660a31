"""One request's pull on D: its state, and what the announcements of P must look like."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve_common.engine_types import EngineError, ErrorCode, KVTransferStats
from pdserve_common.kv_types import (
    BlocksReady,
    KVLayout,
    KVLinkWelcome,
    KVSessionId,
    PrefillDone,
    SessionEnded,
)
from pdserve_engine.core.block_pool import NULL_BLOCK_ID
from pdserve_engine.kv_transfer.base import KVLoad, ReadResult
from pdserve_engine.kv_transfer.links import KVLink


class PullState(enum.Enum):
    """See the table in pull_table.py."""

    WAITING = enum.auto()
    READY = enum.auto()
    ALLOCATED = enum.auto()
    LOADING = enum.auto()
    RELEASING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


OPEN_STATES = frozenset(PullState) - {PullState.DONE, PullState.FAILED}


@dataclass(slots=True, eq=False)
class Pull:
    """Guarded by the connector's lock."""

    request_id: str
    attempt: int
    engine_id: str  # of P
    deadline: float
    # False: P's announcement came before the router's ticket.
    has_ticket: bool = False
    # Tokens the request brought; 0 while there is no ticket.
    num_tokens: int = 0
    state: PullState = PullState.WAITING
    link: KVLink | None = None
    session: KVSessionId | None = None
    # For each KV group, P's block ids announced so far.
    remote_block_ids: list[list[int]] = field(default_factory=list)
    num_announced_tokens: int = 0
    output_token_ids: tuple[int, ...] = ()
    is_prefill_done: bool = False
    # What is read, parallel; set when blocks are allocated.
    load_remote: tuple[int, ...] = ()
    load_local: tuple[int, ...] = ()
    # The READ may still write into load_local (rule K5).
    is_reading: bool = False
    result: ReadResult | None = None
    # The request has ended under the READ: its blocks, given back when it has landed.
    kept_block_ids: list[int] | None = None
    error: EngineError | None = None
    # When P ends the session unless it hears of us.
    session_deadline: float = 0.0
    announced_at: float = 0.0
    allocated_at: float = 0.0
    landed_at: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.state in OPEN_STATES

    @property
    def num_remote_blocks(self) -> int:
        return len(self.remote_block_ids[0]) if self.remote_block_ids else 0

    def is_about(self, link: KVLink, message: BlocksReady | PrefillDone | SessionEnded) -> bool:
        """Does a message of P concern this very pull, and in time?"""
        return (
            self.is_open
            and self.attempt == message.attempt
            and self.engine_id == link.engine_id
            and (self.session is None or self.session == message.session)
        )

    def set_load(self, block_ids: tuple[list[int], ...], first_blocks: Sequence[int]) -> None:
        """Read, in each KV group, from its logical block in `first_blocks` on, into the same blocks
        of `block_ids`.
        """
        remote: list[int] = []
        local: list[int] = []
        for first, theirs, ours in zip(first_blocks, self.remote_block_ids, block_ids, strict=True):
            wanted = slice(first, self.num_remote_blocks)
            remote += theirs[wanted]
            local += ours[wanted]
        self.load_remote, self.load_local = tuple(remote), tuple(local)
        assert len(remote) == len(local), "too few blocks were allocated"
        assert NULL_BLOCK_ID not in local, "a block that is needed was not allocated"

    def load(self) -> KVLoad:
        """What the transfer thread is to do."""
        assert self.session is not None, "an announced pull has a session"
        return KVLoad(
            request_id=self.request_id,
            session=self.session,
            remote_block_ids=self.load_remote,
            local_block_ids=self.load_local,
        )

    def stats(self, now: float) -> KVTransferStats:
        """What the pull has cost when P confirmed it at `now`."""
        result = self.result
        return KVTransferStats(
            num_bytes=result.num_bytes if result else 0,
            num_blocks=len(self.load_remote),
            transport=result.transport if result else "",
            admit_s=self.allocated_at - self.announced_at,
            transfer_s=result.duration_s if result else 0.0,
            release_ack_s=now - self.landed_at if result else 0.0,
            exposed_s=now - self.announced_at,
        )

    def add_blocks(self, message: BlocksReady) -> bool:
        """Append an announcement. False: it is a repetition, or leaves a hole."""
        if self.is_prefill_done or message.first_block != self.num_remote_blocks:
            return False
        if not self.remote_block_ids:
            self.remote_block_ids = [[] for _ in message.block_ids]
        for mine, ids in zip(self.remote_block_ids, message.block_ids, strict=True):
            mine.extend(ids)
        return True


def code_of_end(reason: str) -> ErrorCode:
    """How a session that P ended for `reason` looks to the request."""
    if reason in ("finished", "aborted", "superseded"):
        return ErrorCode.CANCELLED  # nobody's fault: the router knows of it from P's own output
    return ErrorCode.KV_TRANSFER_FAILED if reason == "error" else ErrorCode.KV_EXPIRED


def find_bad_blocks(message: BlocksReady, layout: KVLayout, welcome: KVLinkWelcome) -> str | None:
    """Say what is wrong with announced block ids, or return None."""
    if len(message.block_ids) != len(layout.groups):
        return f"announces {len(message.block_ids)} KV groups, the layout has {len(layout.groups)}"
    if len({len(ids) for ids in message.block_ids}) != 1:
        return "announces unequal numbers of blocks in its KV groups"
    num_blocks = sum(region.num_blocks for region in welcome.endpoint.regions)
    for ids in message.block_ids:
        if ids and not 0 <= min(ids) <= max(ids) < num_blocks:
            return f"announces block {max(ids)} of a pool of {num_blocks}"
    return None


def find_bad_end(pull: Pull, message: PrefillDone, layout: KVLayout, vocab_size: int) -> str | None:
    """Say why a PrefillDone does not fit the blocks announced before it, or return None."""
    num_needed = -(-message.num_tokens // layout.block_size)
    if message.num_tokens < 1 or pull.num_remote_blocks != num_needed:
        return f"announced {pull.num_remote_blocks} blocks for {message.num_tokens} tokens"
    if not message.output_token_ids:
        return "sent no token"
    if max(message.output_token_ids) >= vocab_size:
        return f"sent token {max(message.output_token_ids)} of a vocabulary of {vocab_size}"
    return None
