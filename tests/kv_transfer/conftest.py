"""A P and a D without engines: real pools, transports and connectors, a link made of two queues."""

import gc
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from pdserve_common.engine_types import EngineCoreRequest, KVTransferParams, SamplingParams
from pdserve_common.kv_types import KVLinkWelcome, new_epoch
from pdserve_common.metrics import KVTransferMetrics
from pdserve_engine.core.request import Request, RequestStatus
from pdserve_engine.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.kv_groups import group_layers
from pdserve_engine.kv_transfer.base import KVIdentity, KVTransport, ReadResult
from pdserve_engine.kv_transfer.consumer import ConsumerConnector
from pdserve_engine.kv_transfer.factory import make_transport
from pdserve_engine.kv_transfer.links import KVLink
from pdserve_engine.kv_transfer.local import LocalRegistry
from pdserve_engine.kv_transfer.producer import ProducerConnector

NUM_BLOCKS = 64
BLOCK_SIZE = 16
SPEC = KVCacheSpec(
    groups=group_layers([None, None]),
    num_kv_heads=1,
    head_dim=32,
    block_size=BLOCK_SIZE,
    dtype=torch.float32,
)


def wait_until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.001)
    return value


def make_pool(seed: int, num_blocks: int = NUM_BLOCKS, spec: KVCacheSpec = SPEC) -> KVCache:
    pool = KVCache(spec, num_blocks=num_blocks, device=torch.device("cpu"))
    pool.tensor.copy_(torch.rand(pool.tensor.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def make_identity(engine_id: str, **changes: Any) -> KVIdentity:
    fields = {
        "epoch": new_epoch(),
        "compatibility_hash": "same",
        "layout": SPEC.layout(),
        "vocab_size": 100_000,
    } | changes
    return KVIdentity(engine_id=engine_id, **fields)


def welcome_of(identity: KVIdentity, transport: KVTransport, link: int = 1) -> KVLinkWelcome:
    return KVLinkWelcome(
        protocol_version=1,
        engine_id=identity.engine_id,
        epoch=identity.epoch,
        compatibility_hash=identity.compatibility_hash,
        link=link,
        endpoint=transport.endpoint(),
    )


@pytest.fixture(params=["local", pytest.param("nixl", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def leaks_nothing() -> Iterator[None]:
    """No test leaves a thread behind."""
    yield
    gc.collect()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "kv-transfer"])


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

    def add_peer(self, welcome: KVLinkWelcome, on_lost: Callable[[str], None]) -> str:
        peer = self.inner.add_peer(welcome, on_lost)
        self.on_lost[peer] = on_lost
        return peer

    def remove_peer(self, peer: str) -> None:
        if not self.is_holding:  # held READs have to find their peer
            self.inner.remove_peer(peer)

    def register(self, kv_cache: KVCache) -> None:
        self.inner.register(kv_cache)

    def endpoint(self) -> Any:
        return self.inner.endpoint()

    def expect_peer(self) -> None:
        self.inner.expect_peer()

    def set_exporting(self, is_exporting: bool) -> None:
        self.inner.set_exporting(is_exporting)

    def num_pending_reads(self) -> int:
        return len(self.held) + self.inner.num_pending_reads()

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


class Pair:
    """A P and a D, their pools, and the scheduler's part of the handoff."""

    def __init__(self, kind: str, spec: KVCacheSpec = SPEC) -> None:
        self.kind = kind
        self.layout = spec.layout()
        self.registry = LocalRegistry()
        self.now = 1000.0
        self.num_wakeups = 0
        self.p_seed = 1
        self.p_pool, self.d_pool = make_pool(1, spec=spec), make_pool(2, spec=spec)
        self.p_blocks, self.d_blocks = Blocks(), Blocks()
        self.p_metrics, self.d_metrics = (KVTransferMetrics(CollectorRegistry()) for _ in range(2))
        self.dialed: list[str] = []
        d_identity = make_identity("d0", layout=self.layout)
        self.transport = FaultTransport(make_transport(kind, d_identity, registry=self.registry))
        self.d = ConsumerConnector(
            self.transport, identity=d_identity, metrics=self.d_metrics, **self._common()
        )
        self.d.bind_link_pool(lambda engine_id, host, port: self.dialed.append(engine_id))
        self.d.register_kv_cache(self.d_pool)
        self.start_p()
        self.to_d = self.to_p = Wire()
        self.p_link: KVLink | None = None
        self.d_link: KVLink | None = None

    def _common(self) -> dict[str, Any]:
        def wake() -> None:
            self.num_wakeups += 1

        return {"wakeup": wake, "step_seq": lambda: 7, "clock": lambda: self.now}

    def start_p(self) -> None:
        identity = make_identity("p0", layout=self.layout)
        transport = make_transport(self.kind, identity, registry=self.registry)
        self.p_identity = identity
        self.p = ProducerConnector(
            transport,
            identity=identity,
            metrics=self.p_metrics,
            session_timeout_s=30.0,
            **self._common(),
        )
        self.p.register_kv_cache(self.p_pool)

    def connect(self) -> None:
        self.to_d, self.to_p = Wire(), Wire()
        self.p_link = self.p.accept_link(self.d.hello(), self.to_d)
        welcome = self.to_d.messages.popleft()
        self.d_link = self.d.link_up("p0", welcome, self.to_p)

    def pump(self) -> None:
        """Deliver messages until none are left."""
        while self.to_d.messages or self.to_p.messages:
            while self.to_p.messages:
                self.p.on_message(self.p_link, self.to_p.messages.popleft())
            while self.to_d.messages:
                self.d.on_message(self.d_link, self.to_d.messages.popleft())

    def cut(self) -> None:
        self.to_d.close("cut")
        self.to_p.close("cut")
        self.to_d.messages.clear()
        self.to_p.messages.clear()
        self.p.link_lost(self.p_link, "cut")
        self.d.link_lost(self.d_link, "cut")

    def request(
        self, side: str, request_id: str = "r0", num_tokens: int = 40, **fields: Any
    ) -> Any:
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
            sampling_params=SamplingParams(max_tokens=8),
            kv_transfer_params=params,
            **fields,
        )
        return Request(core, max_model_len=512, seed=0)

    def ticket(self, request_id: str = "r0", **fields: Any) -> Request:
        request = self.request("d", request_id, **fields)
        self.d.on_new_request(request)
        return request

    def prefill(
        self,
        request_id: str = "r0",
        status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED,
        **fields: Any,
    ) -> tuple[Request, list[int]]:
        """P computes the prompt, samples a token and ends the request."""
        request = self.request("p", request_id, **fields)
        self.p.on_new_request(request)
        block_ids = self.p_blocks.take(-(-(request.num_tokens + 1) // BLOCK_SIZE))
        request.append_output_token_ids((77,))
        request.status = status
        if not self.p.request_finished(request, (block_ids,)):
            self.p_blocks.give(block_ids)
        return request, block_ids

    def allocate(self, request: Request, num_hit_tokens: int = 0) -> list[int]:
        """D's scheduler admits an announced request and starts its load."""
        num_external, _ = self.d.get_num_new_matched_tokens(request, num_hit_tokens)
        assert num_external is not None
        block_ids = self.d_blocks.take(-(-request.num_tokens // BLOCK_SIZE))
        self.d.update_state_after_alloc(request, (block_ids,), num_external)
        self.d.start_load_kv(self.d.build_connector_meta())
        return block_ids

    def end_d(
        self, request: Request, block_ids: list[int], status: RequestStatus | None = None
    ) -> bool:
        request.status = status or RequestStatus.FINISHED_ABORTED
        is_kept = self.d.request_finished(request, (block_ids,))
        if not is_kept:
            self.d_blocks.give(block_ids)
        return is_kept

    def collect(self) -> Any:
        """What the schedulers take: blocks are given back, D's news is returned."""
        self.p_blocks.give(self.p.take_output().released_block_ids)
        news = self.d.take_output()
        self.d_blocks.give(news.landed_block_ids)
        return news

    def finish(self, request_id: str = "r0") -> Any:
        """Run until D has the blocks of `request_id`, or has lost them; returns the news."""

        def is_over() -> Any:
            self.pump()
            news = self.collect()
            over = request_id in news.finished_recving or request_id in news.failed_recving
            return news if over else None

        return wait_until(is_over)

    def check_baseline(self) -> None:
        """Nothing is left behind on either side."""
        wait_until(lambda: self.transport.num_pending_reads() == 0)
        self.pump()
        self.collect()
        assert sorted(self.p_blocks.free) == sorted(self.d_blocks.free) == list(range(NUM_BLOCKS))
        assert self.p.num_open_sessions() == self.d.num_open_sessions() == 0

    def late(self, side: str) -> float:
        metrics = self.p_metrics if side == "p" else self.d_metrics
        return float(metrics.late_messages._value.get())

    def close(self) -> None:
        self.transport.is_holding = False
        self.d.shutdown()
        self.p.shutdown()


@pytest.fixture
def pair(kind: str) -> Iterator[Pair]:
    pair = Pair(kind)
    yield pair
    pair.close()


@pytest.fixture
def kit() -> SimpleNamespace:
    """The helpers above, for tests: conftest cannot be imported."""
    return SimpleNamespace(
        wait_until=wait_until,
        make_pool=make_pool,
        make_identity=make_identity,
        welcome_of=welcome_of,
        num_fds=num_fds,
        Landed=Landed,
        Pair=Pair,
        NUM_BLOCKS=NUM_BLOCKS,
        SPEC=SPEC,
    )
