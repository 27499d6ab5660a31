"""READs and peers as the transfer thread of NixlTransport sees them: posted in order, polled until
nothing can land any more.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdserve_common.observability import defects
from pdserve_engine.kv_transfer.base import ReadDone, ReadResult
from pdserve_engine.kv_transfer.transport.nixl_agent import (
    NIXL_ERRORS,
    BlockDescriptors,
    BlockIds,
    NixlAgent,
    RemoteDisconnectError,
)
from pdserve_engine.kv_transfer.transport.shards import KVPeer

logger = logging.getLogger(__name__)

# Over shared memory posting IS the copy: a larger part would hold the thread up for too long.
MAX_POSTED_BYTES = 32 << 20
# After a REMOTE_DISCONNECT nothing lands any more (K5). UCX gets this long to fail the other parts
# of the READ, which it does in the same breath, but not in the same call.
SETTLE_S = 0.05
# Stalled READs keep their blocks out of the pool. So many, or one for so long, and a new process
# is cheaper than what they hold.
MAX_STALLED_READS = 64
MAX_STALLED_S = 60.0


@dataclass(slots=True)
class Pace:
    """How often to look for something: the longer it has not come, the less, so that looking adds
    an eighth at most to the time it takes anyway.
    """

    min_s: float
    max_s: float
    since: float = 0.0

    def restart(self, now: float) -> None:
        self.since = now

    def interval_s(self, now: float) -> float:
        return min(self.max_s, max(self.min_s, (now - self.since) / 8))


@dataclass(slots=True, eq=False)
class NixlRead:
    """A READ that a pull has asked for: waiting, posted in one or more parts, or stalled."""

    peer: "Peer"
    remote: BlockIds
    local: BlockIds
    timeout_s: float
    on_done: ReadDone
    on_stall: Callable[[], None]
    # Parts that have neither landed nor been dropped.
    num_left: int = 0
    started_at: float = 0.0
    progress_at: float = 0.0
    stalled_at: float | None = None
    error: str = ""


@dataclass(slots=True, eq=False)
class ReadPart:
    """The blocks of a READ, from `start` to before `stop`, that NIXL is given at once."""

    read: NixlRead
    start: int
    stop: int
    num_bytes: int
    handle: Any = None
    settled_at: float | None = None
    # Posting it failed in a way that leaves open whether it will land.
    is_unsure: bool = False


@dataclass(slots=True, eq=False)
class Peer:
    key: str
    rank: KVPeer
    on_lost: Callable[[str], None]
    # Both under the transport's lock; the rest belongs to the thread.
    is_lost: bool = False
    is_removed: bool = False
    # The transport has lost it; a link that ended says nothing about the connection.
    is_broken: bool = False
    # A READ has failed; the peer is lost as soon as that has landed.
    is_failing: bool = False
    connect_by: float = 0.0
    # "" until connected.
    transport: str = ""
    probe: Any = None
    probed_at: float = 0.0
    is_probe_over: bool = False
    num_probes: int = 0
    # Those of them that are over as soon as shared memory allows.
    num_quick: int = 0
    blocks: BlockDescriptors | None = None
    waiting: deque[ReadPart] = field(default_factory=deque)
    posted: list[ReadPart] = field(default_factory=list)
    posted_bytes: int = 0

    def pause_clock(self, seconds: float) -> None:
        """Do not count this time: nobody has polled the peer meanwhile."""
        self.connect_by += seconds
        for read in {part.read for part in self.posted}:
            read.progress_at += seconds


class Reads:
    """Posts and polls, on the transfer thread."""

    def __init__(
        self,
        agent: NixlAgent,
        *,
        on_progress: Callable[[], None],
        lose: Callable[[Peer, str], None],
        fail: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """`on_progress` is called when something moves, `lose` when a peer's READ failed or
        stalled, `fail` when the process has to be restarted.
        """
        self._agent = agent
        self._clock = clock
        self._on_progress = on_progress
        self._lose = lose
        self._fail = fail
        # Those that were given up but may still land, oldest first.
        self._stalled: list[NixlRead] = []

    def queue(self, read: NixlRead) -> None:
        """Cut a READ into parts that wait for their turn."""
        read_bytes = read.peer.rank.read_bytes
        per_part = max(1, MAX_POSTED_BYTES // read_bytes)
        for start in range(0, len(read.local), per_part):
            stop = min(start + per_part, len(read.local))
            part = ReadPart(read, start, stop, num_bytes=(stop - start) * read_bytes)
            read.peer.waiting.append(part)
            read.num_left += 1

    def progress(self, peer: Peer, now: float) -> None:
        """Poll what is posted, then post what there is room for."""
        for part in list(peer.posted):
            self._poll(peer, part, now)
        if peer.transport:
            self._post_waiting(peer)

    def drop_waiting(self, peer: Peer, error: str) -> None:
        """Fail what was not posted."""
        while peer.waiting:
            self._end_part(peer.waiting.popleft(), error)

    def check_stalled(self, now: float) -> None:
        """Have the process restarted if too much stays stalled."""
        if len(self._stalled) > MAX_STALLED_READS:
            self._fail(f"{len(self._stalled)} READs have stalled, the limit is {MAX_STALLED_READS}")
        elif self._stalled and now - (self._stalled[0].stalled_at or now) > MAX_STALLED_S:
            peer = self._stalled[0].peer.key
            self._fail(f"a READ from {peer} has been stalled for over {MAX_STALLED_S:g} s")

    # ---- posting

    def _post_waiting(self, peer: Peer) -> None:
        while peer.waiting and not peer.is_lost and not peer.is_failing:
            part = peer.waiting[0]
            if peer.posted and peer.posted_bytes + part.num_bytes > MAX_POSTED_BYTES:
                return
            peer.waiting.popleft()
            peer.posted.append(part)
            peer.posted_bytes += part.num_bytes
            self._post(peer, part)
            self._on_progress()
            self._poll(peer, part, self._clock())

    def _post(self, peer: Peer, part: ReadPart) -> None:
        read, now = part.read, self._clock()
        if not read.started_at:
            read.started_at = read.progress_at = now
        wanted = slice(part.start, part.stop)
        assert peer.blocks is not None, "what is posted goes to a peer that has answered"
        try:
            remote, local = read.remote[wanted], read.local[wanted]
            part.handle = self._agent.make_read(peer.blocks, remote, local)
            self._agent.post(part.handle)
        except RemoteDisconnectError as error:
            self._settle(part, str(error), now)
        except Exception as error:  # of NIXL, or a defect
            if not isinstance(error, NIXL_ERRORS):
                defects.record("kv_transfer", error, f"a READ from {peer.key}")
            if part.handle is None:  # it was never posted
                self._settle(part, str(error), now)
            else:
                part.is_unsure = True
                self._fail_unsure(read, str(error), now)

    # ---- polling

    def _poll(self, peer: Peer, part: ReadPart, now: float) -> None:
        if part.is_unsure:
            return
        if part.settled_at is None:
            is_over, error = self._agent.poll(part.handle)
            if not is_over:
                self._check_pending(part.read, error, now)
                return
            if not error:
                part.read.progress_at = now
                self._land(peer, part)
                return
            self._settle(part, error, now)
        self._agent.progress()
        if part.settled_at is not None and now >= part.settled_at:
            self._agent.wait_for_copies()
            self._land(peer, part)
            self._lose(peer, f"READ failed: {part.read.error}")

    def _check_pending(self, read: NixlRead, error: str, now: float) -> None:
        if error:
            self._fail_unsure(read, error, now)
        elif now - read.progress_at > read.timeout_s:
            self._give_up(read, f"no progress for {read.timeout_s:g} s", now)

    def _fail_unsure(self, read: NixlRead, error: str, now: float) -> None:
        """Nobody can say that this READ will not land: its blocks stay out of the pool for good
        (K5), and the process has to be restarted.
        """
        self._fail(f"a READ from {read.peer.key} may still land after an error: {error}")
        self._give_up(read, error, now)

    def _give_up(self, read: NixlRead, error: str, now: float) -> None:
        if read.stalled_at is not None:
            return
        read.stalled_at = now
        read.error = read.error or error
        self._stalled.append(read)
        read.on_stall()
        self._lose(read.peer, read.error)

    def _settle(self, part: ReadPart, error: str, now: float) -> None:
        part.read.error = part.read.error or error
        part.read.peer.is_failing = True
        part.settled_at = now + SETTLE_S

    def _land(self, peer: Peer, part: ReadPart) -> None:
        peer.posted.remove(part)
        peer.posted_bytes -= part.num_bytes
        if part.handle is not None:
            self._agent.release(part.handle)
        self._on_progress()
        self._end_part(part, part.read.error)

    def _end_part(self, part: ReadPart, error: str) -> None:
        """A part is over; so is its READ with the last one."""
        read = part.read
        read.error = read.error or error
        read.num_left -= 1
        if read.num_left == 0:
            self._end(read)

    def _end(self, read: NixlRead) -> None:
        if read.stalled_at is not None:
            self._stalled.remove(read)
        result = ReadResult(
            is_ok=not read.error,
            num_bytes=len(read.local) * read.peer.rank.read_bytes,
            duration_s=self._clock() - read.started_at if read.started_at else 0.0,
            transport=read.peer.transport,
            error=read.error,
        )
        read.on_done(result)
