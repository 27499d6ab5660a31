"""The seams of KV transfer: the connector that the scheduler sees, and the transport under it.

After vLLM's KVConnectorBase_V1, with one difference: P announces blocks while it computes the next
ones, so reading them is not part of any step. A connector's scheduler side is called on the engine
thread; the KvLink's messages arrive on the event loop's thread, at the methods of endpoint.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from pdserve_common.engine_types import EngineCoreRequest, EngineError, KVLost, KVTransferStats
from pdserve_common.errors import KVTransferError
from pdserve_common.kv_types import KVEndpoint, KVLayout, KVLinkWelcome
from pdserve_engine.kv.kv_groups import num_skipped_blocks

if TYPE_CHECKING:
    from pdserve_engine.kv.kv_cache import KVCache
    from pdserve_engine.request.request import Request


# ---- what the connector tells the scheduler, in the order in which it happened. News of a request
# that has ended meanwhile, or was superseded by another attempt, are the scheduler's to ignore.


@dataclass(frozen=True, slots=True)
class StartAllowed:
    """P: D has reserved blocks for the request."""

    request: "Request"
    # When D's answer came, by the connector's clock.
    granted_time: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class StartForbidden:
    """P: D has taken them back; the request waits for StartAllowed again."""

    request: "Request"


@dataclass(frozen=True, slots=True)
class StartDeferred:
    """P: D has no room or no seat for the request yet. StartAllowed follows unasked."""

    request: "Request"


@dataclass(frozen=True, slots=True)
class BlocksClaimed:
    """D: P asks for blocks. The scheduler answers with `grant`, or `defer` and later `grant`."""

    request: "Request"
    # When P asked, by the connector's clock; the scheduler may hear of it a step later.
    claimed_time: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class BlocksConfirmed:
    """D: the KV of the first `num_tokens` tokens is here and right (rule K4)."""

    request: "Request"
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlocksReturned:
    """D: P has preempted the request and withdrawn its claim; it will ask again. What was reserved
    for it, if anything, is the scheduler's again, but for the `kept` blocks, which come in
    BlocksFreed.
    """

    request: "Request"
    kept: frozenset[int]


@dataclass(frozen=True, slots=True)
class BlocksLanded:
    """D: all KV is here, though not confirmed: the request may run after the tokens that P has
    sampled, but nothing of it may get out before TransferFinished (rule K4).
    """

    request: "Request"
    output_token_ids: tuple[int, ...]
    # By the connector's clock; the scheduler may hear of it a step later.
    landed_time: float


@dataclass(frozen=True, slots=True)
class TransferFinished:
    """D: what has landed is confirmed; the request goes on. Comes after BlocksLanded."""

    request: "Request"
    stats: KVTransferStats


@dataclass(frozen=True, slots=True)
class TransferLost:
    """D: the rest will not come, or what has landed was wrong. The request waits for the router's
    decision (rule K6).
    """

    request: "Request"
    lost: KVLost


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The request ends on this worker with this error. CANCELLED: P has ended it, it is nobody's
    fault.
    """

    request: "Request"
    error: EngineError


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """Blocks that the connector kept and that nothing reads or writes any more."""

    block_ids: tuple[int, ...]


KVEvent = (
    StartAllowed
    | StartForbidden
    | StartDeferred
    | BlocksClaimed
    | BlocksConfirmed
    | BlocksReturned
    | BlocksLanded
    | TransferFinished
    | TransferLost
    | TransferFailed
    | BlocksFreed
)


class KVConnector(ABC):
    """One worker's side of the handoff. P and D differ by subclass; what concerns only one of them
    does nothing on the other.
    """

    # ---- the event loop's thread

    @abstractmethod
    def on_dispatched(self, request: EngineCoreRequest) -> None:
        """A request has come and waits until the engine thread is between two steps, which may take
        long. D dials its P meanwhile, who does not wait for ever for a link, and goes on holding
        what it has of an earlier attempt (rule K6). P: nothing.
        """

    # ---- the engine thread

    @abstractmethod
    def on_new_request(self, request: "Request") -> None:
        """D: the request's ticket; P may have asked for it already. P: nothing."""

    @abstractmethod
    def ask(self, request: "Request") -> None:
        """P: the request is among the next to start: have D reserve blocks for it. Answered by
        StartAllowed, maybe after StartDeferred, or TransferFailed.
        """

    @abstractmethod
    def on_started(self, request: "Request") -> bool:
        """P: the request is about to join the batch, as it was allowed to. False: D has just taken
        its blocks back, or the session is over; it must not start.
        """

    @abstractmethod
    def on_blocks_computed(
        self, request: "Request", num_tokens: int, block_ids: tuple[list[int], ...]
    ) -> None:
        """P: the KV of the first `num_tokens` tokens is written and the step that wrote it is over
        (rule K2): announce what is new and whole. `block_ids` are all blocks of the request, per
        KV group in logical order, with NULL_BLOCK_ID where a sliding group has none any more.
        """

    @abstractmethod
    def on_preempted(self, request: "Request") -> None:
        """P: the request is about to lose its blocks (rule K3), or its turn, and D may have back
        what it has reserved for it. It has to `ask` again.
        """

    @abstractmethod
    def grant(
        self, request: "Request", block_ids: tuple[list[int], ...], num_cached_tokens: int
    ) -> bool:
        """D: blocks for all known tokens are reserved; those of the first `num_cached_tokens` hold
        their KV already. False: P has withdrawn its claim; the blocks stay the scheduler's.

        After True the scheduler frees them through `reclaim`, BlocksReturned or
        `request_finished` only.
        """

    @abstractmethod
    def defer(self, request: "Request") -> None:
        """D: there is no room for a claim yet."""

    @abstractmethod
    def reclaim(self) -> "Request | None":
        """D: take the youngest grant back of which P has announced nothing. Its request's blocks
        are the scheduler's again, its claim stands. None: there is no such grant.
        """

    @abstractmethod
    def request_finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> frozenset[int]:
        """The request has ended on this worker. Return which of its blocks the connector keeps;
        they come back in BlocksFreed.

        On P a request that is_handed_off keeps what D has not released (rule K2: the step is
        over). Any other end is told to D and fences. On D open work is cancelled; blocks are kept
        only while a READ may still land in them (rule K5).
        """

    @abstractmethod
    def abort_session(self, request_id: str) -> None:
        """P: end the session of a request that was handed off. Unknown ids are ignored."""

    @abstractmethod
    def fence_all(self, reason: str) -> None:
        """End every session before blocks change hands (cache reset, sleep, weight change,
        shutdown; rule K3).
        """

    @abstractmethod
    def take_events(self) -> list[KVEvent]:
        """Return what has happened since the last call."""

    @abstractmethod
    def num_open_sessions(self) -> int:
        """Sessions (on D: tickets, pulls and zombie READs) that are not over."""

    @abstractmethod
    def failure(self) -> str | None:
        """Why this worker cannot hand KV over any more and has to be restarted, or None."""

    @abstractmethod
    def shutdown(self) -> None:
        """Fence everything, wait (bounded) for posted READs to land, release the transport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVIdentity:
    """Who a worker is to its peers, and what must be equal on both sides."""

    engine_id: str
    epoch: str
    compatibility_hash: str
    layout: KVLayout
    # Token ids are below this.
    vocab_size: int

    @property
    def agent_name(self) -> str:
        """Names this start of this worker to transports (rule K1)."""
        return f"{self.engine_id}.{self.epoch}"


MessageT_contra = TypeVar("MessageT_contra", contravariant=True)


class KVLinkHandle(Protocol[MessageT_contra]):
    """The stream under one KvLink. Any thread may call it; it neither blocks nor calls back."""

    def send(self, message: MessageT_contra) -> None:
        """Queue a message, in order."""

    def close(self, reason: str) -> None:
        """End the stream; its owner still reports link_lost, which is then ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """How a READ ended. After it no byte lands in its local blocks any more (rule K5)."""

    is_ok: bool
    num_bytes: int
    # From posting the first piece.
    duration_s: float
    # How the peer is reached: "shm", "tcp" or "rdma".
    transport: str
    error: str = ""


ReadDone = Callable[[ReadResult], None]


class KVTransport(ABC):
    """Moves blocks between the KV pools of two workers. Thread-safe; callbacks run on its own
    thread, never inside a call.
    """

    name: str

    @property
    def failure(self) -> str | None:
        """Why nothing can be moved safely any more: the process has to be restarted. None: all is
        well. To be looked at twice in two seconds or more often, by one thread.
        """
        return None

    @abstractmethod
    def register(self, kv_cache: "KVCache") -> None:
        """Register the whole pool, once, before any other call."""

    @abstractmethod
    def endpoint(self) -> KVEndpoint:
        """What a peer needs to read from this pool."""

    @abstractmethod
    def self_check(self) -> None:
        """Prove that bytes move, within seconds: once, after `register` and before anything uses
        the pool, which is zeroed again after it.

        Raises KVTransferError that says what to do; the process must then end.
        """

    @abstractmethod
    def expect_peer(self) -> None:
        """P: a peer is about to connect to this pool, so help it along for a while."""

    @abstractmethod
    def set_exporting(self, is_exporting: bool) -> None:
        """P: blocks are announced, so keep progressing for peers that read them."""

    @abstractmethod
    def poke(self) -> None:
        """P: a peer is about to read (blocks were announced, it sent a message), so be quick to
        answer for a while. Only while exporting; cheap.
        """

    @abstractmethod
    def add_peer(self, welcome: KVLinkWelcome, on_lost: Callable[[str], None]) -> str:
        """Start to connect to the pool behind `welcome` and return the peer's key.

        READs may follow at once. `on_lost(reason)` runs at most once, when the peer cannot be
        reached or a READ failed or stalled: READs that were not posted fail, later ones are
        refused, and only remove_peer and a new add_peer mend it. Raises KVTransferError if
        `welcome` makes no sense.
        """

    @abstractmethod
    def remove_peer(self, peer: str) -> None:
        """Forget a peer; READs that were not posted fail, posted ones are polled until they land.
        Unknown keys are ignored.
        """

    @abstractmethod
    def read(
        self,
        peer: str,
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
        timeout_s: float,
        on_done: ReadDone,
        on_stall: Callable[[], None],
    ) -> None:
        """Read whole blocks. `on_done` runs exactly once, when nothing can land any more (rule K5).

        `on_stall` runs at most once, when `timeout_s` passed without progress of a posted READ:
        the caller gives the request up but keeps its blocks until `on_done`. Raises
        KVTransferError, and then calls neither, on an unknown or lost peer or bad block ids.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the transfer thread and deregister, after posted READs landed or 5 s.

        A READ that has not landed by then never gets its `on_done`: the process must end. So it
        must if the thread hangs: after 10 s it is left behind, and `failure` says so.
        """


def first_read_blocks(layout: KVLayout, num_tokens: int) -> list[int]:
    """Return, per KV group, the first logical block that the token after a prompt of `num_tokens`
    sees: D needs no earlier one.
    """
    return [
        num_skipped_blocks(group.window or None, num_tokens, layout.block_size)
        for group in layout.groups
    ]


def check_block_ids(block_ids: Sequence[int], num_blocks: int, whose: str) -> None:
    """Raise KVTransferError unless all ids lie in a pool of `num_blocks`."""
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise KVTransferError(
            f"{whose} block ids {min(block_ids)} to {max(block_ids)} leave a pool of {num_blocks}"
        )


def num_region_blocks(welcome: KVLinkWelcome, block_bytes: int) -> int:
    """Return the size of a peer's pool. Raises KVTransferError unless its regions follow on one
    another and hold addresses.
    """
    num_blocks = 0
    for region in welcome.endpoint.regions:
        end = region.base_address + region.num_blocks * block_bytes
        if region.first_block != num_blocks or region.num_blocks < 1 or not 0 < end < 1 << 64:
            raise KVTransferError(f"P {welcome.engine_id} sent a memory region that is not one")
        num_blocks += region.num_blocks
    if num_blocks == 0:
        raise KVTransferError(f"P {welcome.engine_id} sent no memory region")
    return num_blocks
