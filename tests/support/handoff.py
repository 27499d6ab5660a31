"""A P and a D without engines: real pools, transports and connectors, a link made of two queues."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.types.engine import EngineCoreRequest, Generate, KVTransferParams
from pdserve_common.types.kv import (
    PROTOCOL_VERSION,
    KVLinkWelcome,
    KVSessionId,
    SessionEnded,
    SessionEndReason,
    new_epoch,
)
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.kv.block_pool import NULL_BLOCK_ID
from pdserve_engine.kv.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.kv.kv_groups import group_layers
from pdserve_engine.kv_transfer.base import (
    Checksum,
    ConnectorContext,
    KVIdentity,
    KVTransport,
    PoolTransport,
    ReadResult,
)
from pdserve_engine.kv_transfer.connectors.consumer import ConsumerConnector
from pdserve_engine.kv_transfer.connectors.links import KVLink
from pdserve_engine.kv_transfer.connectors.producer import ProducerConnector
from pdserve_engine.kv_transfer.ports import (
    BlocksFreed,
    BlocksReturned,
    GrantRequested,
    PullFinished,
    StartAllowed,
)
from pdserve_engine.kv_transfer.transport import factory
from pdserve_engine.kv_transfer.transport.sharded_transport import ShardedTransport
from pdserve_engine.request.request import Request, RequestStatus
from support.local_transport import LocalRegistry, LocalTransport
from support.metrics import value
from support.waiting import wait_until

NUM_BLOCKS = 64
BLOCK_SIZE = 16
SPEC = KVCacheSpec(
    groups=group_layers([None, None]),
    num_kv_heads=1,
    head_dim=32,
    block_size=BLOCK_SIZE,
    dtype=torch.float32,
)


def make_pool(
    seed: int, num_blocks: int = NUM_BLOCKS, spec: KVCacheSpec = SPEC, device: str = "cpu"
) -> KVCache:
    pool = KVCache(spec, num_blocks=num_blocks, device=torch.device(device))
    fill(pool, seed)
    return pool


def fill(pool: KVCache, seed: int) -> None:
    """Again after registration, whose self-check leaves zeros."""
    pool.tensor.copy_(torch.rand(pool.tensor.shape, generator=torch.Generator().manual_seed(seed)))


def make_identity(engine_id: str, **changes: Any) -> KVIdentity:
    fields: dict[str, Any] = {
        "epoch": new_epoch(),
        "compatibility_hash": "same",
        "layout": SPEC.layout(),
        "vocab_size": 100_000,
    } | changes
    return KVIdentity(engine_id=engine_id, **fields)


def make_transport(
    kind: str, identity: KVIdentity, registry: LocalRegistry, *pools: KVCache, **options: Any
) -> KVTransport:
    """Return the transport of a worker whose ranks have these pools; options are NIXL's."""
    ranks = open_ranks(kind, identity, registry, *pools, **options)
    return ShardedTransport(ranks, layout=identity.layout)


def open_ranks(
    kind: str, identity: KVIdentity, registry: LocalRegistry, *pools: KVCache, **options: Any
) -> list[PoolTransport]:
    """Register the pools of a worker's ranks."""
    ranks: list[PoolTransport] = []
    for rank, pool in enumerate(pools):
        if kind == "local":
            ranks.append(LocalTransport(identity.agent_name(rank), registry))
        else:
            ranks.append(factory.make_transport(identity, rank=rank, **options))
        ranks[-1].register(pool)
    return ranks


def welcome_of(identity: KVIdentity, transport: KVTransport, link: int = 1) -> KVLinkWelcome:
    return KVLinkWelcome(
        protocol_version=PROTOCOL_VERSION,
        engine_id=identity.engine_id,
        epoch=identity.epoch,
        compatibility_hash=identity.compatibility_hash,
        link=link,
        endpoint=transport.endpoint(),
    )


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@dataclass
class Landed:
    """Collects the callbacks of READs."""

    results: list[ReadResult] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)

    def on_done(self, result: ReadResult) -> None:
        self.results.append(result)

    def on_stall(self) -> None:
        self.stalls.append(time.monotonic())


class FaultTransport(KVTransport):
    """Wraps a transport: holds READs back, reports stalls and errors when the test says so."""

    failure: str | None = None

    def __init__(self, inner: KVTransport) -> None:
        self.inner, self.name = inner, inner.name
        self.is_holding = False
        self.held: list[tuple[Any, ...]] = []
        self.on_lost: dict[str, Callable[[str], None]] = {}

    def read(self, *args: Any) -> None:
        if self.is_holding:
            self.held.append(args)
        else:
            self.inner.read(*args)

    def let_go(self) -> None:
        """The held READs really happen now, late."""
        held, self.held = self.held, []
        for args in held:
            self.inner.read(*args)

    def land(self, index: int = 0) -> None:
        """One held READ really happens now; returns when its `on_done` has run."""
        peer, remote, local, timeout_s, on_done, on_stall = self.held.pop(index)
        is_over = threading.Event()

        def landed(result: ReadResult) -> None:
            on_done(result)
            is_over.set()

        self.inner.read(peer, remote, local, timeout_s, landed, on_stall)
        assert is_over.wait(30.0), "the READ has not landed"

    def fail(self, error: str) -> None:
        held, self.held = self.held, []
        for peer, _, _, _, on_done, _ in held:
            on_done(
                ReadResult(is_ok=False, num_bytes=0, duration_s=0, transport="tcp", error=error)
            )
            self.on_lost[peer](error)

    def stall(self) -> None:
        for args in self.held:
            args[5]()

    def add_peer(self, peer: KVLinkWelcome, on_lost: Callable[[str], None]) -> str:
        key = self.inner.add_peer(peer, on_lost)
        self.on_lost[key] = on_lost
        return key

    def remove_peer(self, peer: str) -> None:
        if not self.is_holding:  # held READs have to find their peer
            self.inner.remove_peer(peer)

    def endpoint(self) -> Any:
        return self.inner.endpoint()

    def expect_peer(self) -> None:
        self.inner.expect_peer()

    def set_exporting(self, is_exporting: bool) -> None:
        self.inner.set_exporting(is_exporting)

    def poll_soon(self) -> None:
        self.inner.poll_soon()

    def self_check(self) -> None:
        self.inner.self_check()

    def close(self) -> None:
        self.inner.close()


@dataclass
class Blocks:
    """Which blocks of a pool are free; stands in for the BlockPool."""

    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))

    def take(self, n: int) -> list[int]:
        taken, self.free = self.free[:n], self.free[n:]
        assert len(taken) == n
        return taken

    def give(self, block_ids: Sequence[int]) -> None:
        assert not set(block_ids) & set(self.free), "freed twice"
        assert len(set(block_ids)) == len(block_ids), "freed twice at once"
        self.free.extend(block_ids)


class Wire:
    """One direction's queue under a link; nothing arrives before `pump`."""

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()
        self.closed_because = ""

    def send(self, message: Any) -> None:
        if not self.closed_because:
            self.messages.append(message)

    def close(self, reason: str) -> None:
        self.closed_because = reason


def ended(
    session: KVSessionId | None, message: str, request_id: str = "r0", attempt: int = 0
) -> SessionEnded:
    """What P says at a session's end; the message begins with the reason."""
    reason = SessionEndReason[message.partition(":")[0].upper()]
    return SessionEnded(
        session=session, request_id=request_id, attempt=attempt, reason=reason, message=message
    )


class PSide:
    """A P without an engine: pool, transport, connector, and the scheduler's part of the handoff.
    Alone, its D is the test.
    """

    def __init__(self, kind: str = "local", spec: KVCacheSpec = SPEC, **options: Any) -> None:
        self.kind, self.spec = kind, spec
        self.layout = spec.layout()
        self.registry = LocalRegistry()
        self.now = 1000.0
        self.num_wakeups = 0
        self.p_pool, self.p_blocks = self.make_pool("p"), Blocks()
        self.p_metrics = KVTransferMetrics(CollectorRegistry())
        self.p_tables: dict[Request, tuple[list[int], ...]] = {}
        self.to_d = Wire()
        self.p_link: KVLink | None = None
        self.start_p(**options)

    def _common(self) -> dict[str, Any]:
        def wake() -> None:
            self.num_wakeups += 1

        return {"wakeup": wake, "step_seq": lambda: 7, "clock": lambda: self.now}

    def make_pool(self, side: str) -> Any:
        return make_pool(1 if side == "p" else 2, spec=self.spec)

    def make_side(self, side: str, pool: Any) -> tuple[KVIdentity, KVTransport]:
        identity = make_identity(f"{side}0", layout=self.layout)
        return identity, make_transport(self.kind, identity, self.registry, pool)

    def start_p(self, **options: Any) -> None:
        identity, self.p_transport = self.make_side("p", self.p_pool)
        self.p_transport.self_check()
        self.p_identity = identity
        context = ConnectorContext(
            transport=self.p_transport,
            identity=identity,
            metrics=self.p_metrics,
            session_timeout_s=30.0,
            **options,
            **self._common(),
        )
        self.p = ProducerConnector(context)
        fill(self.p_pool, seed=1)

    def request(
        self, side: str, request_id: str = "r0", num_tokens: int = 40, **fields: Any
    ) -> Request:
        params = KVTransferParams(
            do_remote_decode=side == "p",
            do_remote_prefill=side == "d",
            remote_engine_id="d0" if side == "p" else "p0",
            remote_host="127.0.0.1",
            remote_port=1,
        )
        core = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=tuple(range(num_tokens)),
            task=Generate(SamplingParams(max_tokens=8)),
            kv_transfer_params=params,
            **fields,
        )
        return Request(core, max_model_len=512, seed=0)

    def ask(self, request_id: str = "r0", **fields: Any) -> Request:
        """The request's turn is near: P asks D for blocks."""
        request = self.request("p", request_id, **fields)
        self.p.ask(request)
        return request

    def start(self, request: Request) -> bool:
        """The request joins P's batch, if it still may."""
        if not self.p.on_started(request):
            return False
        num_blocks = -(-(request.num_tokens + 1) // BLOCK_SIZE)
        self.p_tables[request] = tuple(self.p_blocks.take(num_blocks) for _ in self.layout.groups)
        return True

    def compute(self, request: Request, num_tokens: int) -> None:
        """A step is over after which `num_tokens` tokens are computed."""
        self.p.on_blocks_computed(request, num_tokens, self.p_tables[request])

    def preempt(self, request: Request) -> None:
        self.p.on_preempted(request)
        for block_ids in self.p_tables.pop(request, ()):  # none if it had not started
            self.p_blocks.give(block_ids)

    def end_p(
        self, request: Request, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED
    ) -> frozenset[int]:
        """The request ends on P, by default with its first token; returns the kept blocks."""
        if status is RequestStatus.FINISHED_LENGTH_CAPPED:
            request.append_output_token_ids((77,))
        request.status = status
        tables = self.p_tables.pop(request, tuple([] for _ in self.layout.groups))
        kept = self.p.request_finished(request, tables)
        for block_ids in tables:
            self.p_blocks.give([i for i in block_ids if i not in kept and i != NULL_BLOCK_ID])
        return kept

    def take_p_events(self) -> list[Any]:
        """What P's scheduler takes; freed blocks are given back."""
        events = self.p.take_events()
        for item in events:
            if isinstance(item, BlocksFreed):
                self.p_blocks.give(item.block_ids)
        return events

    def late(self, side: str) -> float:
        return value(getattr(self, f"{side}_metrics").late_messages)


class Pair(PSide):
    """A P and a D, their pools, and what both schedulers do for the handoff."""

    def __init__(self, kind: str, spec: KVCacheSpec = SPEC) -> None:
        super().__init__(kind, spec)
        self.d_pool, self.d_blocks = self.make_pool("d"), Blocks()
        self.d_metrics = KVTransferMetrics(CollectorRegistry())
        self.d_tables: dict[Request, tuple[list[int], ...]] = {}
        # What D compares with the checksums that P sends, if it sends any.
        self.checksum: Checksum = self.d_pool.block_checksums
        self.dialed: list[str] = []
        d_identity, inner = self.make_side("d", self.d_pool)
        self.transport = FaultTransport(inner)
        self.transport.self_check()
        context = ConnectorContext(
            transport=self.transport,
            identity=d_identity,
            metrics=self.d_metrics,
            read_timeout_s=60.0,
            checksum=lambda block_ids: self.checksum(block_ids),
            **self._common(),
        )
        self.d = ConsumerConnector(context)
        self.d.bind_link_pool(lambda engine_id, host, port: self.dialed.append(engine_id))
        fill(self.d_pool, seed=2)
        self.to_p = Wire()
        self.d_link: KVLink | None = None
        # D's scheduler has room, and so many tokens of every prompt cached.
        self.has_room = True
        self.num_cached_tokens = 0
        # Taken by `wait_for` and not waited for yet.
        self.pending: list[Any] = []

    def connect(self) -> None:
        self.to_d, self.to_p = Wire(), Wire()
        self.p_link = self.p.accept_link(self.d.hello(), self.to_d)
        welcome = self.to_d.messages.popleft()
        self.d_link = self.d.link_up("p0", welcome, self.to_p)

    def pump(self) -> None:
        """Deliver messages until none are left."""
        while self.to_d.messages or self.to_p.messages:
            p_link, d_link = self.links()
            while self.to_p.messages:
                self.p.on_message(p_link, self.to_p.messages.popleft())
            while self.to_d.messages:
                self.d.on_message(d_link, self.to_d.messages.popleft())

    def links(self) -> tuple[KVLink, KVLink]:
        """P's and D's end, once `connect` was called."""
        assert self.p_link is not None
        assert self.d_link is not None
        return self.p_link, self.d_link

    def cut(self) -> None:
        p_link, d_link = self.links()
        self.to_d.close("cut")
        self.to_p.close("cut")
        self.to_d.messages.clear()
        self.to_p.messages.clear()
        self.p.link_lost(p_link, "cut")
        self.d.link_lost(d_link, "cut")

    def ticket(self, request_id: str = "r0", **fields: Any) -> Request:
        request = self.request("d", request_id, **fields)
        self.d.on_new_request(request)
        return request

    def reserve(self, request: Request) -> bool:
        """D's scheduler answers a claim."""
        if not self.has_room:
            self.d.defer(request)
            return False
        num_blocks = -(-(request.num_tokens + 1) // BLOCK_SIZE)
        tables = tuple(self.d_blocks.take(num_blocks) for _ in self.layout.groups)
        if self.d.grant(request, tables, self.num_cached_tokens):
            self.d_tables[request] = tables
            return True
        for block_ids in tables:
            self.d_blocks.give(block_ids)
        return False

    def take_d_events(self) -> list[Any]:
        """What D's scheduler takes: it answers claims, blocks that come back are free."""
        events = self.d.take_events()
        for item in events:
            match item:
                case GrantRequested(request=request):
                    self.reserve(request)
                case BlocksFreed(block_ids=block_ids):
                    self.d_blocks.give(block_ids)
                case BlocksReturned(request=request, kept=kept):
                    self.give_d(request, kept)
        return events

    def end_d(
        self, request: Request, status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> frozenset[int]:
        """The request ends on D; returns the blocks that D still keeps."""
        request.status = status
        tables = self.d_tables.get(request, tuple([] for _ in self.layout.groups))
        kept = self.d.request_finished(request, tables)
        self.give_d(request, kept)
        return kept

    def give_d(self, request: Request, kept: frozenset[int]) -> None:
        for block_ids in self.d_tables.pop(request, ()):
            self.d_blocks.give([i for i in block_ids if i not in kept])

    def collect(self) -> list[Any]:
        """Deliver messages and let both schedulers take their events until there are none."""
        collected: list[Any] = []
        while True:
            self.pump()
            events = [*self.take_p_events(), *self.take_d_events()]
            if not events and not self.to_d.messages and not self.to_p.messages:
                return collected
            collected += events

    def wait_for(self, wanted: type[Any], request_id: str = "r0") -> Any:
        """Run until a scheduler is told `wanted` of `request_id`; returns the event."""

        def find() -> Any:
            self.pending += self.collect()
            for item in self.pending:
                if isinstance(item, wanted) and item.request.request_id == request_id:
                    self.pending.remove(item)
                    return item
            return None

        return wait_until(find)

    def prefill(self, request_id: str = "r0", *, chunk: int = 16, **fields: Any) -> Request:
        """P asks, is granted, computes the prompt in chunks, samples a token and hands it over."""
        request = self.ask(request_id, **fields)
        self.wait_for(StartAllowed, request_id)
        assert self.start(request)
        for num_tokens in range(chunk, request.num_tokens, chunk):
            self.compute(request, num_tokens)
        self.end_p(request)
        return request

    def handoff(self, request_id: str = "r0", **fields: Any) -> tuple[Request, Request]:
        """D's and P's legs of a request that P has been allowed to start, and has."""
        request = self.ticket(request_id, **fields)
        prefill = self.ask(request_id, **fields)
        self.wait_for(StartAllowed, request_id)
        assert self.start(prefill)
        return request, prefill

    def hand_over(self, request_id: str = "r0") -> None:
        """All of a request's blocks arrive, and nothing is left of it."""
        request, prefill = self.handoff(request_id)
        ours, theirs = self.d_tables[request][0], self.p_tables[prefill][0]
        self.compute(prefill, 16)
        self.end_p(prefill)
        self.wait_for(PullFinished, request_id)
        assert torch.equal(self.d_pool.tensor[ours[:3]], self.p_pool.tensor[theirs[:3]])
        self.end_d(request)
        self.check_baseline()

    def check_baseline(self) -> None:
        """Nothing is left behind on either side, as soon as all READs have landed."""

        def is_at_rest() -> bool:
            self.collect()
            return self.d.num_open_sessions() == 0

        wait_until(is_at_rest)
        self.collect()
        assert sorted(self.p_blocks.free) == sorted(self.d_blocks.free) == list(range(NUM_BLOCKS))
        assert self.p.num_open_sessions() == 0

    def close(self) -> None:
        self.transport.is_holding = False
        self.d.shutdown()
        self.p.shutdown()
