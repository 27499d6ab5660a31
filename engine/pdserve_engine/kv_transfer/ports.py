"""What the scheduler asks of a producer (prefill) and of a consumer (decode), and what they tell
it.

After vLLM's KVConnectorBase_V1, with two differences: each role has an interface of its own, and
prefill announces blocks while it computes the next ones, so reading them is not part of any step.
Ports are called on the engine thread; the KvLink's messages arrive on the event loop's thread, at
the methods of endpoint.py.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from pdserve_common.types.engine import (
    EngineCoreRequest,
    EngineError,
    KVLost,
    KVTransferStats,
)

if TYPE_CHECKING:
    from pdserve_engine.kv_transfer.protocol.session import SessionKey
    from pdserve_engine.request.request import Request


# ---- what a connector tells the scheduler, in the order in which it happened. Events of a
# request that has ended meanwhile, or was superseded, are the scheduler's to ignore.


@dataclass(frozen=True, slots=True)
class StartAllowed:
    """Prefill: decode has reserved blocks for the request."""

    request: "Request"
    # When decode's answer came, by the connector's clock.
    granted_time: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class StartForbidden:
    """Prefill: decode has taken them back; the request waits for StartAllowed again."""

    request: "Request"


@dataclass(frozen=True, slots=True)
class StartDeferred:
    """Prefill: decode has no room or no slot for the request yet. StartAllowed follows unasked."""

    request: "Request"


@dataclass(frozen=True, slots=True)
class GrantRequested:
    """Decode: prefill asks for blocks. The scheduler answers with `grant`, or `defer` and later
    `grant`.
    """

    request: "Request"
    # When prefill asked, by the connector's clock; the scheduler may hear of it a step later.
    requested_time: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class BlocksConfirmed:
    """Decode: the KV of the first `num_tokens` tokens is here and right (rule K4)."""

    request: "Request"
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlocksReturned:
    """Decode: prefill has preempted the request and withdrawn its grant request; it will ask again.
    What was reserved for it, if anything, is the scheduler's again, but for the `kept` blocks,
    which come in BlocksFreed.
    """

    request: "Request"
    kept: frozenset[int]


@dataclass(frozen=True, slots=True)
class BlocksLanded:
    """Decode: all KV is here, though not confirmed: the request may run after the tokens that
    prefill has sampled, but nothing of it may get out before PullFinished (rule K4).
    """

    request: "Request"
    output_token_ids: tuple[int, ...]
    # By the connector's clock; the scheduler may hear of it a step later.
    landed_time: float


@dataclass(frozen=True, slots=True)
class PullFinished:
    """Decode: what has landed is confirmed; the request goes on. Comes after BlocksLanded."""

    request: "Request"
    stats: KVTransferStats


@dataclass(frozen=True, slots=True)
class PullLost:
    """Decode: the rest will not come, or what has landed was wrong. The request waits for the
    router's decision (rule K6).
    """

    request: "Request"
    lost: KVLost


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ends on this worker with this error. CANCELLED: prefill has ended it, it is
    nobody's fault.
    """

    request: "Request"
    error: EngineError


@dataclass(frozen=True, slots=True)
class PrefixWanted:
    """Another worker asks for cached blocks: those with these hashes, the first of which is the
    `first_block` of its request. Answered by `lend`.
    """

    key: "SessionKey"
    first_block: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PrefixEnded:
    """Nothing more of the request's prefix comes; what has come is confirmed."""

    request: "Request"


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """Blocks that the connector kept and that nothing reads or writes any more."""

    block_ids: tuple[int, ...]


KVEvent = (
    StartAllowed
    | StartForbidden
    | StartDeferred
    | GrantRequested
    | BlocksConfirmed
    | BlocksReturned
    | BlocksLanded
    | PullFinished
    | PullLost
    | RequestFailed
    | PrefixWanted
    | PrefixEnded
    | BlocksFreed
)


class KVConnector(Protocol):
    """One worker's side of the handoff as its owner sees it; it is a port too."""

    def on_dispatched(self, request: EngineCoreRequest) -> None:
        """A request has come and waits until the engine thread is between two steps, which may take
        long. Decode dials its prefill meanwhile, who does not wait for ever for a link, and goes on
        holding what it has of an earlier attempt (rule K6). Prefill: nothing. Called on the event
        loop's thread.
        """

    def failure(self) -> str | None:
        """Why this worker cannot hand KV over any more and has to be restarted, or None."""

    def disconnect(self) -> None:
        """Fence everything; the transport goes on."""

    def shutdown(self) -> None:
        """Fence everything, wait (bounded) for posted READs to land, release the transport."""


class KVPort(Protocol):
    """What the scheduler asks of every role."""

    def fence_all(self, reason: str) -> None:
        """End every session or pull before blocks change hands (cache reset, sleep, weight change,
        shutdown; rule K3).
        """

    def take_events(self) -> list[KVEvent]:
        """Return what has happened since the last call."""

    def num_open_sessions(self) -> int:
        """Prefill: sessions that are not over. Decode: pulls, and READs of pulls that are over."""


class RequestPort(KVPort, Protocol):
    """What it asks of roles that requests have here."""

    def request_finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> frozenset[int]:
        """A request of this role has ended on this worker. Return which of its blocks the connector
        keeps; they come back in BlocksFreed.

        On prefill a request that is_handed_off keeps what decode has not released (rule K2: the
        step is over). Any other end is told to decode and fences. On decode open work is cancelled;
        blocks are kept only while a READ may still land in them (rule K5).
        """


class ProducerPort(RequestPort, Protocol):
    """What the scheduler asks of prefill's connector."""

    def ask(self, request: "Request") -> None:
        """The request is among the next to start: have decode reserve blocks for it. Answered by
        StartAllowed, maybe after StartDeferred, or RequestFailed.
        """

    def on_started(self, request: "Request") -> bool:
        """The request is about to join the batch, as it was allowed to. False: decode has just
        taken its blocks back, or the session is over; it must not start.
        """

    def on_blocks_computed(
        self, request: "Request", num_tokens: int, block_ids: tuple[list[int], ...]
    ) -> None:
        """The KV of the first `num_tokens` tokens is written and the step that wrote it is over
        (rule K2): announce what is new and whole. `block_ids` are all blocks of the request, per
        KV group in logical order, with NULL_BLOCK_ID where a sliding group has none any more.
        """

    def on_preempted(self, request: "Request") -> None:
        """The request is about to lose its blocks (rule K3), or its turn, and decode may have back
        what it has reserved for it. It has to `ask` again.
        """

    def abort_session(self, request_id: str) -> None:
        """End the session of a request that was handed off. Unknown ids are ignored."""


class ConsumerPort(RequestPort, Protocol):
    """What the scheduler asks of decode's connector."""

    def on_new_request(self, request: "Request") -> None:
        """The request's ticket has come; prefill may have asked for it already."""

    def grant(
        self, request: "Request", block_ids: tuple[list[int], ...], num_cached_tokens: int
    ) -> bool:
        """Blocks for all known tokens are reserved; those of the first `num_cached_tokens` hold
        their KV already. False: prefill has withdrawn its grant request; the blocks stay the
        scheduler's.

        After True the scheduler frees them through `reclaim`, BlocksReturned or
        `request_finished` only.
        """

    def defer(self, request: "Request") -> None:
        """There is no room for a grant request yet."""

    def reclaim(self) -> "Request | None":
        """Take the youngest grant back of which prefill has announced nothing. Its request's blocks
        are the scheduler's again, its grant request stands. None: there is no such grant.
        """


class PrefixProducerPort(KVPort, Protocol):
    """What the scheduler asks of the connector that lends cached blocks."""

    def lend(self, wanted: PrefixWanted, block_ids: tuple[list[int], ...]) -> bool:
        """Answer PrefixWanted: these blocks are cached, per KV group in logical order from the
        request's start, NULL_BLOCK_ID where none is wanted or needed; all others are held once
        more, and come back in BlocksFreed. Empty lists: there are none.

        False: nobody waits for them any more; the hold stays the scheduler's.
        """


class PrefixConsumerPort(RequestPort, Protocol):
    """What the scheduler asks of whatever has KV of prompts that the pool has not: the connector
    that reads cached blocks of others, and the tiers.
    """

    def find_prefix(self, request: "Request", num_cached_tokens: int) -> int:
        """Return of how many of the request's first tokens there is KV, of which the pool has
        `num_cached_tokens`, whole blocks. `block_hashes` are those of all its full blocks.
        """

    def fetch(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],
        num_tokens: int,
        num_cached_tokens: int,
    ) -> float:
        """Read the KV of the first `num_tokens` tokens, whole blocks that `find_prefix` has found,
        into these reserved blocks; those of the first `num_cached_tokens` hold theirs already.
        Answered by PullFinished, PrefixEnded, PullLost or RequestFailed: in any case the request is
        computed from what BlocksConfirmed has told. The scheduler ends it with `request_finished`,
        whenever it likes, and after the seconds that this returns.
        """


class OffloadPort(PrefixConsumerPort, Protocol):
    """What the scheduler asks of the tiers besides."""

    def cancel_stores(self) -> tuple[int, ...]:
        """Copy no more blocks of the pool; return those that are held for it no longer."""

    def clear(self) -> None:
        """Forget all that is stored. No block of the pool is held."""


class NoConnector:
    """The port of a role that a worker does not have. The scheduler refuses the role's requests."""

    def request_finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> frozenset[int]:
        return frozenset()

    def fence_all(self, reason: str) -> None:
        """There is no session."""

    def take_events(self) -> list[KVEvent]:
        return []

    def num_open_sessions(self) -> int:
        return 0

    def abort_session(self, request_id: str) -> None:
        """There is no session."""

    def reclaim(self) -> "Request | None":
        return None

    def find_prefix(self, request: "Request", num_cached_tokens: int) -> int:
        return 0

    def cancel_stores(self) -> tuple[int, ...]:
        return ()

    def clear(self) -> None:
        """Nothing is stored."""

    def _no_request(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("a request of this role was accepted without a connector")

    ask = on_started = on_blocks_computed = on_preempted = _no_request
    on_new_request = grant = defer = _no_request
    lend = fetch = _no_request
