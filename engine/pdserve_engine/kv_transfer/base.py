"""The seams of KV transfer: the connector that the scheduler and the runner see, and the transport
under it.

The split follows vLLM's KVConnectorBase_V1: scheduler-side methods decide, worker-side methods
move bytes. Both run on the engine thread. The KvLink's messages arrive on the event loop's thread,
at methods that ProducerConnector and ConsumerConnector have besides.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from pdserve_common.engine_types import EngineError, KVTransferStats
from pdserve_common.errors import KVTransferError
from pdserve_common.kv_types import (
    KVEndpoint,
    KVLayout,
    KVLinkWelcome,
    KVSessionId,
)
from pdserve_engine.kv_groups import num_skipped_blocks

if TYPE_CHECKING:
    from pdserve_engine.core.request import Request
    from pdserve_engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLoad:
    """One request's pull: read these blocks of the peer into these of ours (parallel lists)."""

    request_id: str
    session: KVSessionId
    remote_block_ids: tuple[int, ...]
    local_block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorMetadata:
    """What the scheduler side hands to the worker side in a step."""

    loads: tuple[KVLoad, ...] = ()


@dataclass(slots=True, kw_only=True)
class KVConnectorOutput:
    """What changed since the scheduler last asked. Every list is handed over once."""

    # D: announced requests, whose blocks can now be allocated.
    ready_to_load: list[str] = field(default_factory=list)
    # D: requests whose blocks are read and whose release was acknowledged as valid (rule K4).
    finished_recving: dict[str, KVTransferStats] = field(default_factory=dict)
    # D: requests that will not get their blocks; the scheduler ends them with request_finished.
    failed_recving: dict[str, EngineError] = field(default_factory=dict)
    # D: block ids of abandoned pulls whose READ has landed by now (rule K5): free them.
    landed_block_ids: list[int] = field(default_factory=list)
    # P: block ids whose session has ended or released them (rule K3: already fenced): free them.
    released_block_ids: list[int] = field(default_factory=list)


class KVConnector(ABC):
    """One worker's side of the handoff. P and D differ by subclass."""

    # ---- scheduler side
    # ----------------------------------------------------------------------------------

    @abstractmethod
    def on_new_request(self, request: "Request") -> None:
        """Take note of a request that entered the waiting queue (on D: its ticket)."""

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return (tokens that can be loaded beyond `num_computed_tokens`, whether loading is
        asynchronous).

        None means: not known yet, ask again after `ready_to_load` named the request.
        """

    @abstractmethod
    def transferred_output_token_ids(self, request_id: str) -> tuple[int, ...]:
        """D: the tokens P sampled; the request goes on after them. Valid from its naming in
        finished_recving until request_finished.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: "Request", block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """Blocks for the load are allocated; `block_ids` are all blocks of the request, per KV
        group in logical order, with NULL_BLOCK_ID where a sliding group needs none.

        The request is then named once in finished_recving or failed_recving, also when there are
        no external tokens. The blocks stay the scheduler's; it does not free them but through
        request_finished.
        """

    @abstractmethod
    def build_connector_meta(self) -> KVConnectorMetadata:
        """Return this step's work for the worker side and reset it."""

    @abstractmethod
    def request_finished(self, request: "Request", block_ids: tuple[list[int], ...]) -> bool:
        """The request has ended on this worker. True: the connector keeps the blocks and returns
        them later.

        On P a request that is_handed_off opens a KV session and announces its blocks (rule K2: the
        step is over): True, they come back in released_block_ids. For any other end the peer is
        told: False. On D open work is cancelled; True only while a READ may still land in the
        blocks (rule K5): they come back in landed_block_ids.
        """

    @abstractmethod
    def failure(self) -> str | None:
        """Why this worker cannot hand KV over any more and has to be restarted, or None."""

    @abstractmethod
    def abort_session(self, request_id: str) -> None:
        """P: end the session of a request that was handed off. Unknown ids are ignored."""

    @abstractmethod
    def fence_all(self, reason: str) -> None:
        """End every session before blocks change hands (cache reset, sleep, weight change,
        shutdown; rule K3).
        """

    @abstractmethod
    def take_output(self) -> KVConnectorOutput:
        """Return what changed since the last call."""

    @abstractmethod
    def num_open_sessions(self) -> int:
        """Sessions (on D: tickets and pulls) that are not over."""

    # ---- worker side
    # -------------------------------------------------------------------------------------

    @abstractmethod
    def register_kv_cache(self, kv_cache: "KVCache") -> None:
        """Register the pool's memory with the transport, once, before anything else."""

    @abstractmethod
    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Start the step's pulls; they run on the transfer thread and end in `take_output`."""

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
    # How the peer is reached: "shm", "tcp", "rdma" or "local".
    transport: str
    error: str = ""


ReadDone = Callable[[ReadResult], None]


class KVTransport(ABC):
    """Moves blocks between the KV pools of two workers. Thread-safe; callbacks run on its own
    thread, never inside a call.
    """

    name: str
    # Why nothing can be moved safely any more: the process has to be restarted. None: all is well.
    failure: str | None = None

    @abstractmethod
    def register(self, kv_cache: "KVCache") -> None:
        """Register the whole pool, once, before any other call."""

    @abstractmethod
    def endpoint(self) -> KVEndpoint:
        """What a peer needs to read from this pool."""

    @abstractmethod
    def expect_peer(self) -> None:
        """P: a peer is about to connect to this pool, so help it along for a while."""

    @abstractmethod
    def set_exporting(self, is_exporting: bool) -> None:
        """P: blocks are announced, so keep progressing for peers that read them."""

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
    def num_pending_reads(self) -> int:
        """READs whose `on_done` has not run."""

    @abstractmethod
    def close(self) -> None:
        """Stop the transfer thread and deregister, after posted READs landed or 5 s.

        A READ that has not landed by then never gets its `on_done`: the process must end.
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
