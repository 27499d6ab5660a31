"""One request's pull on the reader: its state, the blocks reserved for it, the reads into them, and
what the owner's announcements must look like. All of it is guarded by the connector's lock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from pdserve_common.types.engine import KVTransferStats, PrefillStats
from pdserve_common.types.kv import (
    RANKS_PROTOCOL_VERSION,
    BlocksReady,
    KVLayout,
    KVSessionId,
    PrefillDone,
)
from pdserve_engine.kv.block_pool import NULL_BLOCK_ID
from pdserve_engine.kv_transfer.base import ReadResult, first_read_blocks
from pdserve_engine.kv_transfer.connectors.links import KVLink
from pdserve_engine.kv_transfer.protocol.machine import take_step
from pdserve_engine.kv_transfer.protocol.transitions import (
    READ,
    ConsumerState,
    ReadAction,
    ReadEvent,
    ReadState,
)
from pdserve_engine.request.request import Request

# (engine id of the owner, request id, attempt): one owner cannot touch what another one computes.
PullKey = tuple[str, str, int]

# Why a pull was given up; all but the last are values of a metric's label.
LossReason = Literal[
    "checksum", "expired", "fenced", "link_lost", "no_link", "not_valid", "protocol", "read_error",
    "session_ended", "stall", "aborted",
]  # fmt: skip
FAILURE_REASONS = tuple(reason for reason in get_args(LossReason) if reason != "aborted")


# The owner may owe an answer to a release.
READING_STATES = (ConsumerState.PULLING, ConsumerState.LANDED, ConsumerState.FETCHING)


@dataclass(slots=True, eq=False)
class Read:
    """The READ of one announced chunk: what the reader lacks of it, of all KV groups."""

    pull: "Pull"
    reservation: "Reservation"
    # The chunk's blocks are those before this logical one that were not announced before.
    end_block: int
    remote_block_ids: tuple[int, ...]
    local_block_ids: tuple[int, ...]
    # One for each of them and KV head, block by block, or empty.
    checksums: tuple[int, ...]
    state: ReadState = ReadState.POSTED

    def advance(self, event: ReadEvent) -> tuple[ReadAction, ...]:
        """Take the step of the READ table and return what is to be done; none: no such step."""
        return take_step(READ, self, event) or ()


@dataclass(slots=True, eq=False)
class Reservation:
    """What is reserved for a granted pull, and how much of it has come. Blocks are counted from the
    request's first one; those before first_block are cached on the reader.
    """

    # Per KV group, all blocks of the request on the reader, some null.
    block_ids: tuple[tuple[int, ...], ...]
    first_block: int
    # Grants are taken back in the opposite order.
    number: int
    num_announced: int
    num_released: int
    num_confirmed: int
    reads: list[Read] = field(default_factory=list)
    # The owner owes an answer to a release until then.
    ack_deadline: float = math.inf
    output_token_ids: tuple[int, ...] = ()
    prefill_stats: PrefillStats | None = None
    prefill_done_at: float = math.inf
    landed_at: float = -math.inf
    num_posted: int = 0
    # Since when num_posted is not 0, and for how long it was before that.
    busy_since: float = 0.0
    busy_s: float = 0.0
    num_bytes: int = 0
    transport: str = ""

    @property
    def num_landed(self) -> int:
        """Blocks that are here, without a hole."""
        landed = self.first_block
        for read in self.reads:
            if read.state is ReadState.POSTED:
                break
            landed = read.end_block
        return landed

    def count_posted(self, now: float) -> None:
        if self.num_posted == 0:
            self.busy_since = now
        self.num_posted += 1

    def count_landed(self, result: ReadResult, now: float) -> None:
        self.num_posted -= 1
        if self.num_posted == 0:
            self.busy_s += now - self.busy_since
        self.landed_at = now
        self.num_bytes += result.num_bytes if result.is_ok else 0
        self.transport = result.transport

    def drop_reads(self) -> list[Read]:
        """The reservation ends. Return the READs that may still write into its blocks (K5)."""
        return [
            read
            for read in self.reads
            if ReadAction.FREE_BLOCKS not in read.advance(ReadEvent.DROPPED)
        ]

    def stats(self, now: float) -> KVTransferStats:
        """What it has cost when the owner's last message, an acknowledgement or PrefillDone, came
        at `now`.

        release_ack_s is the whole wait for it, hidden or not.
        """
        landed_at = max(self.landed_at, self.prefill_done_at)
        posted = [read for read in self.reads if read.local_block_ids]
        return KVTransferStats(
            num_bytes=self.num_bytes,
            num_blocks=sum(len(read.local_block_ids) for read in posted),
            num_reads=len(posted),
            transport=self.transport,
            transfer_s=self.busy_s,
            exposed_s=landed_at - self.prefill_done_at,
            release_ack_s=now - landed_at,
            prefill_stats=self.prefill_stats,
        )


@dataclass(slots=True, eq=False)
class Pull:
    """A request whose KV another worker computes."""

    key: PullKey
    state: ConsumerState
    # When it began.
    since: float
    # It waits so long from its last event, and so until then.
    timeout_s: float
    deadline: float
    # The tokens whose KV the owner is to send: as the owner says while EARLY, then as the request
    # has.
    num_tokens: int = 0
    # None while EARLY.
    request: Request | None = None
    # The owner's session and the link it came over, from the owner's asking on, and when that was,
    # for the scheduler.
    session: KVSessionId | None = None
    link: KVLink | None = None
    asked_time: float = 0.0
    # While GRANTED, REQUESTED, PULLING, FETCHING, LANDED, or LOST after that.
    reservation: Reservation | None = None
    # The blocks of a prefix that are asked for.
    block_hashes: tuple[bytes, ...] = ()
    # The owner has ended it, and nothing has gone wrong.
    is_void: bool = False
    # Blocks of the reservation that was given back last, under READs that had not landed by then.
    kept: frozenset[int] = frozenset()
    # The reader's own blocks are about to change hands. The owner's fences say nothing about what
    # the reader has confirmed.
    is_fenced: bool = False
    # Why it was given up, once it is lost.
    reason: LossReason = "aborted"
    message: str = ""

    @property
    def engine_id(self) -> str:
        return self.key[0]

    @property
    def request_id(self) -> str:
        return self.key[1]

    @property
    def attempt(self) -> int:
        return self.key[2]

    @property
    def ticket(self) -> Request:
        """The request of a pull that is not EARLY."""
        assert self.request is not None, "only EARLY pulls have no request"
        return self.request

    @property
    def granted(self) -> Reservation:
        """The reservation of a pull that has one."""
        assert self.reservation is not None, "granted, pulling and landed pulls have a reservation"
        return self.reservation

    @property
    def due(self) -> float:
        """When something that it waits for is overdue (K8)."""
        if self.state not in READING_STATES:
            return self.deadline
        return min(self.deadline, self.granted.ack_deadline)

    def postpone(self, seconds: float) -> None:
        """Wait so much longer for whatever it waits for."""
        self.deadline += seconds
        if self.reservation is not None:
            self.reservation.ack_deadline += seconds

    def num_confirmed_tokens(self, block_size: int) -> int:
        """Tokens from the request's start whose KV is on the reader and right, and stays."""
        if self.reservation is None or self.is_fenced:
            return 0
        return min(self.reservation.num_confirmed * block_size, self.num_tokens)


def make_reservation(
    block_ids: Sequence[Sequence[int]], num_cached_tokens: int, number: int, layout: KVLayout
) -> Reservation:
    """Return what a grant reserves; `block_ids` are the request's per KV group."""
    first = num_cached_tokens // layout.block_size
    return Reservation(
        block_ids=tuple(tuple(ids) for ids in block_ids),
        first_block=first,
        number=number,
        num_announced=first,
        num_released=first,
        num_confirmed=first,
    )


def make_read(pull: Pull, message: BlocksReady, layout: KVLayout) -> Read:
    """Return the READ of an announced chunk into the same logical blocks of the reader, without
    those that the token after the prompt does not see. `message` has passed find_bad_blocks.
    """
    reservation = pull.granted
    start = message.first_block
    end = start + len(message.block_ids[0])
    remote: list[int] = []
    local: list[int] = []
    checksums: list[int] = []
    for group, needed in enumerate(first_read_blocks(layout, pull.num_tokens)):
        first = min(max(needed, start), end)
        remote += message.block_ids[group][first - start :]
        local += reservation.block_ids[group][first:end]
        if _has_checksums(pull, message):
            checksums += message.checksums[group][(first - start) * layout.num_kv_heads :]
    assert len(local) == len(remote), "the scheduler reserves blocks for all tokens"
    assert NULL_BLOCK_ID not in local, "a block that is needed was not reserved"
    return Read(pull, reservation, end, tuple(remote), tuple(local), tuple(checksums))


def _has_checksums(pull: Pull, message: BlocksReady) -> bool:
    """Older peers send others."""
    assert pull.link is not None, "a granted pull has a session"
    return bool(message.checksums) and pull.link.protocol_version >= RANKS_PROTOCOL_VERSION


def num_blocks_of(num_tokens: int, layout: KVLayout) -> int:
    return -(-num_tokens // layout.block_size)


def find_bad_blocks(pull: Pull, message: BlocksReady, layout: KVLayout) -> str | None:
    """Say what is wrong with an announcement for a granted pull, or return None."""
    reservation, link = pull.granted, pull.link
    assert link is not None, "a granted pull has a session"
    if reservation.prefill_done_at < math.inf:
        return "announced blocks after PrefillDone"
    if message.first_block != reservation.num_announced:
        expected = reservation.num_announced
        return f"announced block {message.first_block} when {expected} was the next"
    if len(message.block_ids) != len(layout.groups):
        return f"announced {len(message.block_ids)} KV groups, the layout has {len(layout.groups)}"
    sizes = {len(ids) for ids in message.block_ids}
    if len(sizes) != 1 or 0 in sizes:
        return "announced no blocks, or unequal numbers of them in its KV groups"
    end, num_blocks = message.first_block + sizes.pop(), num_blocks_of(pull.num_tokens, layout)
    if end > num_blocks:
        return f"announced {end} blocks, {pull.num_tokens} tokens have {num_blocks}"
    for ids in message.block_ids:
        if not 0 <= min(ids) <= max(ids) < link.num_blocks:
            return f"announced block id {max(ids)} of a pool of {link.num_blocks}"
    if _has_checksums(pull, message) and [len(sums) for sums in message.checksums] != [
        len(ids) * layout.num_kv_heads for ids in message.block_ids
    ]:
        return "sent checksums of other blocks than it announced"
    return None


def find_bad_prefix(pull: Pull, message: BlocksReady, layout: KVLayout) -> str | None:
    """Say what is wrong with the announcement of a prefix, or return None."""
    bad = find_bad_blocks(pull, message, layout)
    if bad is not None:
        return bad
    end = message.first_block + len(message.block_ids[0])
    if end != num_blocks_of(pull.num_tokens, layout) and any(g.window for g in layout.groups):
        return f"announced {end} blocks of a prefix, of which windows need the end"
    return None


def find_bad_end(pull: Pull, message: PrefillDone, layout: KVLayout, vocab_size: int) -> str | None:
    """Say why a PrefillDone does not fit the granted pull, or return None."""
    reservation = pull.granted
    if reservation.prefill_done_at < math.inf:
        return "said twice that its prefill is done"
    if message.num_tokens != pull.num_tokens:
        return f"computed {message.num_tokens} tokens, the request has {pull.num_tokens}"
    num_blocks = num_blocks_of(pull.num_tokens, layout)
    if reservation.num_announced != num_blocks:
        return f"announced {reservation.num_announced} blocks of {num_blocks}"
    if not message.output_token_ids:
        return "sent no token"
    if not 0 <= min(message.output_token_ids) <= max(message.output_token_ids) < vocab_size:
        return f"sent token {max(message.output_token_ids)} of a vocabulary of {vocab_size}"
    return None
