"""The seams under a connector: the transport that moves blocks, and the stream of a KvLink."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pdserve_common.errors import KVTransferError
from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.types.kv import KVEndpoint, KVLayout, KVLinkWelcome, KVRankEndpoint
from pdserve_engine.kv.kv_groups import num_skipped_blocks
from pdserve_engine.kv_transfer.transport import shards
from pdserve_engine.kv_transfer.transport.shards import KVPeer

if TYPE_CHECKING:
    from pdserve_engine.kv.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class KVIdentity:
    """Who a worker is to its peers, and what must be equal on both sides."""

    engine_id: str
    epoch: str
    compatibility_hash: str
    layout: KVLayout
    # Token ids are below this.
    vocab_size: int
    # Processes that the worker's model is cut over.
    num_ranks: int = 1

    def agent_name(self, rank: int = 0) -> str:
        """Names a rank of this start of this worker to transports (rule K1)."""
        return shards.agent_name(self.engine_id, self.epoch, rank, self.num_ranks)


# Does what `Executor.block_checksums` does.
Checksum = Callable[[Sequence[int]], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorContext:
    """What a connector works with."""

    transport: "KVTransport"
    identity: KVIdentity
    metrics: KVTransferMetrics
    # Makes the engine thread call take_events soon. Neither blocks nor calls back.
    wakeup: Callable[[], None]
    # The engine's last step, which heartbeats tell.
    step_seq: Callable[[], int]
    # A session to which nothing happens for so long is over, whatever it waits for.
    session_timeout_s: float = 600.0
    # A READ without progress for so long is given up.
    read_timeout_s: float = 5.0
    # An owner of blocks sends checksums with it, and a reader compares them. None: neither.
    checksum: Checksum | None = None
    clock: Callable[[], float] = time.monotonic


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
    # From posting the first part.
    duration_s: float
    # How the peer is reached: "shm", which is CUDA IPC between GPUs, "tcp" or "rdma".
    transport: str
    error: str = ""


ReadDone = Callable[[ReadResult], None]

# What a transport reads from, and what it says of its own side.
PeerT = TypeVar("PeerT")
EndpointT = TypeVar("EndpointT")


class Transport(ABC, Generic[PeerT, EndpointT]):
    """Moves blocks from peers to here. Thread-safe; calls return at once unless they say otherwise;
    callbacks run on a thread of its own, never inside a call.
    """

    name: str

    @property
    def failure(self) -> str | None:
        """Why nothing can be moved safely any more: the process has to be restarted. None: all is
        well. To be looked at twice in two seconds or more often, by one thread.
        """
        return None

    @abstractmethod
    def endpoint(self) -> EndpointT:
        """What a peer needs to read from here."""

    @abstractmethod
    def self_check(self) -> None:
        """Prove that bytes move, within seconds: once, before anything uses the pool, which is
        zeroed again after it.

        Raises KVTransferError that says what to do; the process must then end.
        """

    @abstractmethod
    def expect_peer(self) -> None:
        """The owner: a peer is about to connect to this pool, so help it along for a while."""

    @abstractmethod
    def set_exporting(self, is_exporting: bool) -> None:
        """The owner: blocks are announced, so keep progressing for peers that read them."""

    @abstractmethod
    def poll_soon(self) -> None:
        """The owner: a peer is about to read (blocks were announced, it sent a message), so be
        quick to answer for a while. Only while exporting; cheap.
        """

    @abstractmethod
    def add_peer(self, peer: PeerT, on_lost: Callable[[str], None]) -> str:
        """Start to connect to a peer and return its key.

        READs may follow at once. `on_lost(reason)` runs at most once, when the peer cannot be
        reached or a READ failed or stalled: READs that were not posted fail, later ones are
        refused, and only remove_peer and a new add_peer mend it. Raises KVTransferError if
        what `peer` says makes no sense.
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
        """Read blocks. `on_done` runs exactly once, when nothing can land any more (rule K5).

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


class RankTransport(Transport[KVPeer, KVRankEndpoint]):
    """Moves what two ranks have in common of blocks between their pools. The rank may be in another
    process.
    """


class PoolTransport(RankTransport):
    """A RankTransport in the process of its pool."""

    @abstractmethod
    def register(self, kv_cache: "KVCache") -> None:
        """Register the whole pool, once, before any other call. May take minutes. Raises
        KVTransferError.
        """


class KVTransport(Transport[KVLinkWelcome, KVEndpoint]):
    """Moves whole blocks between two workers, over however many ranks each has."""


def first_read_blocks(layout: KVLayout, num_tokens: int) -> list[int]:
    """Return, per KV group, the first logical block that the token after a prompt of `num_tokens`
    sees: the reader needs no earlier one.
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
