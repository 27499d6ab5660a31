"""The transfer thread against an agent that fails and stalls when the test says so."""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pdserve_common.errors import KVTransferError
from pdserve_common.observability.defects import DEFECTS
from pdserve_common.types.kv import KVMemoryRegion, KVRankEndpoint
from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.kv_transfer.transport import nixl_reads as reads
from pdserve_engine.kv_transfer.transport import nixl_transport
from pdserve_engine.kv_transfer.transport.nixl_agent import (
    MAX_LEFT_OPEN,
    NixlAgent,
    RemoteDisconnectError,
)
from pdserve_engine.kv_transfer.transport.nixl_transport import HANG_S, MAX_POLL_S, MAX_PUMP_S
from pdserve_engine.kv_transfer.transport.pool_check import check_own_pool
from pdserve_engine.kv_transfer.transport.shards import KVPeer, KVSlice
from pdserve_engine.request.watchdog import MAX_LOOK_S
from support.call_sites import CallSite, call_sites, each_site, fault_at
from support.handoff import SPEC, Landed, make_pool
from support.metrics import value
from support.waiting import wait_until

BLOCK_BYTES = 1 << 20


class Handle:
    """A READ; over when `end` is set: "" or what went wrong."""

    def __init__(self, remote: Any, local: Any, end: str | None) -> None:
        self.remote, self.local, self.end = remote, local, end


class FakeAgent:
    """READs stay posted until the test ends them; probes are done at once."""

    # A transport makes its own.
    newest: "FakeAgent"

    def __init__(self, name: str, kv_cache: Any) -> None:
        FakeAgent.newest = self
        region = KVMemoryRegion(base_address=4096, first_block=0, num_blocks=kv_cache.num_blocks)
        self.endpoint = KVRankEndpoint(memory_type="DRAM", regions=(region,), nixl_metadata=b"")
        self.posted: list[Handle] = []
        self.own_read_end: str | None = ""
        self.probe_end: str | None = ""
        self.is_synchronous = True
        self.quick_probe_s = 0.0
        self.num_waits = 0
        self.is_ending = False
        self.num_posts = 0
        self.num_polls = 0
        self.post_error: Exception | None = None
        self.peers: list[str] = []
        self.connected: set[str] = set()
        self.num_left_open = 0
        self.progressed_at: list[float] = []
        self.is_closed = False
        self.num_added = 0
        # Runs while a READ is posted.
        self.on_post: Callable[[Handle], None] = lambda handle: None

    def add_peer(self, peer: KVPeer) -> str:
        self.peers.append(peer.agent_name)
        self.num_added += 1
        return peer.agent_name

    def mark_connected(self, name: str) -> None:
        self.connected.add(name)

    def remove_peer(self, name: str, blocks: str, *, is_broken: bool) -> None:
        assert not self.posted, "a READ is still outstanding"
        self.peers.remove(name)

    def prep_own_pool(self) -> SimpleNamespace:
        return SimpleNamespace(release=lambda: None)

    def make_read(self, blocks: Any, remote: Any, local: Any) -> Handle:
        return Handle(remote, local, None if isinstance(blocks, str) else self.own_read_end)

    def make_probe(self, peer: KVPeer) -> Handle:
        return Handle([], [], self.probe_end)

    def post(self, handle: Handle) -> bool:
        if handle.end is None and self.post_error is not None:
            raise self.post_error
        if handle.end is None and len(handle.local):
            self.posted.append(handle)
            self.on_post(handle)
        self.num_posts += 1
        is_odd_one = self.num_posts % 6 == 1  # now and then one is not, or is by luck
        return handle.end is not None and self.is_synchronous != is_odd_one

    def poll(self, handle: Handle) -> tuple[bool, str]:
        self.num_polls += 1
        is_over = self.is_ending or handle.end in ("", "REMOTE_DISCONNECT")
        return is_over, handle.end or ""

    def release(self, handle: Handle) -> None:
        if handle in self.posted:
            self.posted.remove(handle)

    def progress(self) -> None:
        """Nothing moves by itself."""
        self.progressed_at.append(time.monotonic())

    def wait_for_copies(self) -> None:
        self.num_waits += 1

    def close(self) -> None:
        self.is_closed = True


class Rig:
    """A NixlTransport over a FakeAgent, with one peer."""

    def __init__(self, require_transport: str = "any") -> None:
        # By how much its clock is ahead.
        self.skew_s = 0.0
        self.transport = nixl_transport.NixlTransport(
            "d0.x",
            require_transport=require_transport,
            clock=lambda: time.monotonic() + self.skew_s,
        )
        pool = SimpleNamespace(block_bytes=BLOCK_BYTES, num_blocks=256)
        self.transport.register(pool)  # type: ignore[arg-type]
        self.agent = FakeAgent.newest
        # What the transfer thread calls next.
        self.commands = self.transport._commands
        self.landed = Landed()
        self.lost: list[str] = []

    def connect(self) -> None:
        rank = KVPeer(
            engine_id="p0",
            epoch="x",
            agent_name="p0.x",
            endpoint=self.transport.endpoint(),
            num_blocks=256,
            block_bytes=BLOCK_BYTES,
            slices=(KVSlice(0, 0, BLOCK_BYTES),),
        )
        self.peer = self.transport.add_peer(rank, self.lost.append)

    def read(self, num_blocks: int, timeout_s: float = 60.0) -> None:
        ids = list(range(num_blocks))
        self.transport.read(
            self.peer, ids, ids, timeout_s, self.landed.on_done, self.landed.on_stall
        )

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """What is asked of the transfer thread meanwhile, it takes together afterwards."""
        has_begun, is_over = threading.Event(), threading.Event()

        def take_all() -> None:
            has_begun.set()
            is_over.wait()
            with contextlib.suppress(queue.Empty):
                while True:
                    self.commands.get_nowait()()

        self.commands.put(take_all)
        assert has_begun.wait(30.0)
        try:
            yield
        finally:
            is_over.set()

    def settle(self) -> None:
        """Return when the transfer thread has taken what it was asked for."""
        is_taken = threading.Event()
        self.commands.put(is_taken.set)
        assert is_taken.wait(30.0)

    def end_posted(self) -> None:
        for handle in list(self.agent.posted):
            handle.end = ""

    def wait_posted(self, num_parts: int) -> None:
        wait_until(lambda: len(self.agent.posted) == num_parts)


@pytest.fixture(autouse=True)
def fake_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transports here run on."""
    monkeypatch.setattr(nixl_transport, "NixlAgent", FakeAgent)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.connect()
    yield rig
    rig.agent.is_ending = True
    rig.transport.close()
    assert rig.agent.is_closed
    assert rig.agent.peers == []


def test_at_most_32_mib_are_posted_at_a_time(rig: Rig) -> None:
    rig.read(80)
    sizes = []
    for _ in range(3):
        rig.wait_posted(1)
        (handle,) = rig.agent.posted
        sizes.append(len(handle.local))
        assert np.array_equal(handle.local, handle.remote)
        handle.end = ""
        wait_until(lambda handle=handle: handle not in rig.agent.posted)
    assert sizes == [32, 32, 16]
    wait_until(lambda: rig.landed.results)
    assert rig.landed.results[0].is_ok
    assert rig.landed.results[0].num_bytes == 80 * BLOCK_BYTES


def test_small_reads_are_posted_side_by_side(rig: Rig) -> None:
    for _ in range(5):
        rig.read(8)
    rig.wait_posted(4)


def test_a_stalled_read_is_polled_on_and_lands_later(rig: Rig) -> None:
    with rig.at_once():
        rig.read(40, timeout_s=0.05)
        rig.read(8)
    rig.wait_posted(1)
    wait_until(lambda: rig.lost)
    assert len(rig.landed.stalls) == 1
    assert [result.is_ok for result in rig.landed.results] == [False], "the other was not posted"
    with pytest.raises(KVTransferError):
        rig.read(1)
    rig.transport.remove_peer(rig.peer)
    assert len(rig.landed.results) == 1
    rig.agent.posted[0].end = ""
    wait_until(lambda: len(rig.landed.results) == 2)
    assert not rig.landed.results[1].is_ok, "half of it was never posted"
    wait_until(lambda: not rig.agent.peers)


def test_a_failed_part_fails_the_read_once_it_has_settled(rig: Rig) -> None:
    rig.read(16)
    rig.read(16)
    rig.wait_posted(2)
    rig.agent.posted[0].end = "REMOTE_DISCONNECT"
    wait_until(lambda: rig.landed.results)
    assert rig.landed.results[0].error == "REMOTE_DISCONNECT"
    assert rig.agent.num_waits == 1, "a GPU may have been at it"
    wait_until(lambda: rig.lost)
    assert len(rig.landed.results) == 1, "the other READ may still land"
    rig.agent.posted[0].end = ""
    wait_until(lambda: len(rig.landed.results) == 2)
    assert rig.landed.results[1].is_ok


def test_a_read_that_finds_its_peer_gone_when_posted_fails(rig: Rig) -> None:
    rig.agent.post_error = RemoteDisconnectError("gone")
    rig.read(80)
    wait_until(lambda: rig.landed.results)
    assert rig.landed.results[0].error == "gone"
    assert "gone" in wait_until(lambda: rig.lost)[0]
    assert rig.transport.failure is None
    rig.agent.post_error = None


def test_a_read_that_may_still_land_keeps_its_blocks_and_fails_the_worker(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "CLOSE_S", 0.1)
    rig.read(1)
    rig.wait_posted(1)
    rig.agent.posted[0].end = "BACKEND_ERROR"
    wait_until(lambda: rig.landed.stalls)
    assert "may still land" in wait_until(lambda: rig.transport.failure)
    assert "BACKEND_ERROR" in wait_until(lambda: rig.lost)[0]
    assert rig.landed.results == [], "no clock makes its blocks safe"
    rig.transport.close()
    assert rig.landed.results == []
    rig.agent.is_closed, rig.agent.peers = True, []


@pytest.mark.parametrize(
    ("limit", "value", "failure"),
    [("MAX_STALLED_READS", 1, "2 READs have stalled"), ("MAX_STALLED_S", 0.05, "stalled for over")],
)
def test_what_stays_stalled_beyond_the_limits_fails_the_worker(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: float,
    failure: str,
) -> None:
    monkeypatch.setattr(reads, limit, value)
    with rig.at_once():
        rig.read(8, timeout_s=0.02)
        rig.read(8, timeout_s=0.02)
    assert failure in wait_until(lambda: rig.transport.failure)
    wait_until(lambda: len(rig.landed.stalls) == 2)
    rig.end_posted()
    wait_until(lambda: len(rig.landed.results) == 2)


def test_a_stalled_read_that_lands_in_time_is_forgotten(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "MAX_STALLED_READS", 1)
    for number in (1, 2):
        rig.read(8, timeout_s=0.02)
        wait_until(lambda number=number: len(rig.landed.stalls) == number)
        rig.settle()
        rig.end_posted()
        wait_until(lambda number=number: len(rig.landed.results) == number)
        rig.transport.remove_peer(rig.peer)
        rig.connect()
    assert rig.transport.failure is None


def test_a_link_that_ended_before_its_turn_came_is_not_connected(rig: Rig) -> None:
    rig.settle()
    rig.transport.remove_peer(rig.peer)
    wait_until(lambda: not rig.agent.peers)
    num_added, num_posts = rig.agent.num_added, rig.agent.num_posts
    with rig.at_once():
        rig.connect()
        rig.read(1)
        rig.transport.remove_peer(rig.peer)
    rig.settle()
    assert rig.agent.num_posts == num_posts
    assert rig.agent.num_added == num_added
    assert [result.error for result in rig.landed.results] == ["connection was closed"]
    assert rig.lost == [], "who removes a peer knows"


def test_reads_are_polled_between_commands_that_take_long(rig: Rig) -> None:
    rig.read(1)
    rig.wait_posted(1)
    are_queued = threading.Event()
    num_landed: list[int] = []

    def take_long() -> None:
        are_queued.wait()
        time.sleep(2 * MAX_POLL_S)

    rig.commands.put(take_long)
    rig.commands.put(lambda: num_landed.append(len(rig.landed.results)))
    rig.end_posted()
    are_queued.set()
    rig.settle()
    assert num_landed == [1]


def test_what_a_command_takes_is_not_counted_as_the_delay_of_peers(rig: Rig) -> None:
    rig.read(1)
    rig.wait_posted(1)
    rig.agent.probe_end = None
    rig.connect()
    rig.settle()

    def take_long() -> None:
        rig.skew_s = 100.0
        rig.agent.num_polls = 0

    rig.commands.put(take_long)
    wait_until(lambda: rig.skew_s and rig.agent.num_polls > 4)
    assert rig.lost == [], "neither the one that is read from nor the one that connects"
    assert rig.landed.stalls == []


def test_neighbours_are_posted_in_ascending_order(rig: Rig) -> None:
    on_done, on_stall = rig.landed.on_done, rig.landed.on_stall
    rig.transport.read(rig.peer, [9, 8, 7], [5, 4, 3], 60.0, on_done, on_stall)
    rig.wait_posted(1)
    assert list(rig.agent.posted[0].local) == [3, 4, 5]
    assert list(rig.agent.posted[0].remote) == [7, 8, 9]


def test_p_answers_quickly_after_poll_soon_and_rarely_when_it_is_quiet(rig: Rig) -> None:
    def pauses() -> list[float]:
        return [after - before for before, after in itertools.pairwise(rig.agent.progressed_at)]

    def answers_nobody() -> bool:
        rig.settle()
        rig.agent.progressed_at.clear()
        time.sleep(0.02)
        return not rig.agent.progressed_at

    assert answers_nobody()
    rig.transport.set_exporting(True)
    # A machine with much else to do may make any pause longer, but none shorter.
    wait_until(lambda: len(pauses()) > 5 and min(pauses()[-5:]) >= MAX_PUMP_S)
    rig.agent.progressed_at.clear()
    rig.transport.poll_soon()
    wait_until(lambda: min(pauses(), default=1.0) < MAX_PUMP_S / 4)
    rig.transport.set_exporting(False)
    assert answers_nobody()


def test_a_self_check_that_fails_says_what_to_do(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RemoteDisconnectError("gone")

    monkeypatch.setattr(nixl_transport, "check_own_pool", fail)
    with pytest.raises(KVTransferError, match=r"UCX_TLS.*gone.*require_transport"):
        rig.transport.self_check()


@pytest.mark.parametrize(
    ("end", "error", "match"),
    [
        ("", ValueError, "differs"),
        ("BACKEND_ERROR", ValueError, "BACKEND_ERROR"),
        (None, TimeoutError, "longer than"),
    ],
)
def test_a_self_check_sees_bytes_that_do_not_arrive(
    end: str | None, error: type[Exception], match: str
) -> None:
    pool = KVCache(SPEC, num_blocks=3, device=torch.device("cpu"))
    agent = FakeAgent("d0.x", pool)
    agent.own_read_end = end
    with pytest.raises(error, match=match):
        check_own_pool(agent, pool, 0.05 if end is None else 30.0)  # type: ignore[arg-type]


def test_a_read_that_never_lands_does_not_hold_up_close_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "CLOSE_S", 0.1)
    rig.read(1)
    rig.wait_posted(1)
    rig.transport.close()
    assert rig.landed.results == [], "its blocks may still be written to"
    assert not rig.agent.is_closed
    rig.agent.is_closed, rig.agent.peers = True, []


def test_a_probe_that_nobody_answers_does_not_hold_up_close(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.agent.probe_end = None
    rig.transport.remove_peer(rig.peer)
    rig.connect()
    rig.read(1)
    rig.settle()
    rig.transport.close()
    assert [result.error for result in rig.landed.results] == ["transport is closing"]
    assert rig.agent.is_closed
    assert "have not landed" not in caplog.text
    assert rig.transport.failure is None


def test_only_peers_that_have_answered_may_leave_a_connection_open() -> None:
    rig = Rig("shm")
    rig.agent.probe_end = "REMOTE_DISCONNECT"
    rig.connect()
    wait_until(lambda: rig.lost)
    assert rig.agent.connected == set()
    rig.agent.probe_end, rig.agent.is_synchronous = "", False
    rig.connect()
    wait_until(lambda: len(rig.lost) == 2)
    assert "require_transport is shm" in rig.lost[1]
    assert rig.agent.connected == {rig.peer.split("#")[0]}
    rig.transport.close()


def test_a_thread_that_hangs_fails_the_worker(rig: Rig) -> None:
    seen: list[str | None] = []

    def look() -> str | None:
        rig.skew_s += MAX_LOOK_S
        seen.append(rig.transport.failure)
        return seen[-1]

    def end_part(handle: Handle) -> None:
        handle.end = ""
        look()

    rig.agent.on_post = end_part
    rig.read(256, timeout_s=1000.0)
    wait_until(lambda: rig.landed.results)
    # Its parts come one after another, in one turn of the thread.
    assert seen == [None] * 8
    assert len(seen) * MAX_LOOK_S > HANG_S
    rig.transport.remove_peer(rig.peer)
    wait_until(lambda: not rig.agent.peers)
    for _ in range(20):
        assert look() is None, "it sleeps"
    with rig.at_once():
        assert wait_until(look) == "the KV transfer thread has hung for 10 s"


def test_a_thread_that_hangs_does_not_hold_up_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_transport, "CLOSE_S", 0.05)
    monkeypatch.setattr(nixl_transport, "CLOSE_MARGIN_S", 0.05)
    rig = Rig()
    with rig.at_once():
        rig.transport.close()
        assert rig.transport.failure == "the KV transfer thread hangs and cannot be closed"


def test_a_start_that_hangs_fails_the_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def hang(*args: Any, **kwargs: Any) -> FakeAgent:
        is_over.wait()
        return FakeAgent(*args, **kwargs)

    monkeypatch.setattr(nixl_transport, "NixlAgent", hang)
    monkeypatch.setattr(nixl_transport, "REGISTER_S", 0.05)
    transport = nixl_transport.NixlTransport("d0.x")
    with pytest.raises(KVTransferError, match="does not start within"):
        transport.register(SimpleNamespace(block_bytes=BLOCK_BYTES, num_blocks=2))  # type: ignore[arg-type]
    is_over.set()
    transport.close()


def test_p_answers_over_shared_memory_too() -> None:
    rig = Rig("shm")
    rig.transport.set_exporting(True)
    wait_until(lambda: len(rig.agent.progressed_at) > 2)
    rig.transport.close()


@pytest.mark.parametrize(
    ("required", "has_rdma", "is_synchronous", "quick_probe_s", "label"),
    [
        ("any", False, True, 0.0, "shm"),
        ("shm", False, True, 0.0, "shm"),
        ("any", False, False, 0.0, "tcp"),
        ("tcp", False, False, 0.0, "tcp"),
        # On a GPU it goes by how long a probe takes.
        ("any", False, False, 1000.0, "shm"),
        ("any", False, False, 1e-9, "tcp"),
        ("any", True, False, 1000.0, "rdma"),
        ("shm", True, False, 1000.0, "shm"),
        ("tcp", False, False, 1e-9, "tcp"),
        ("rdma", True, False, 1000.0, "rdma"),
    ],
)
def test_the_label_says_how_the_peer_is_reached(
    monkeypatch: pytest.MonkeyPatch,
    required: str,
    has_rdma: bool,
    is_synchronous: bool,
    quick_probe_s: float,
    label: str,
) -> None:
    monkeypatch.setattr(nixl_transport, "has_rdma_device", lambda: has_rdma)
    rig = Rig(required)
    rig.agent.is_synchronous, rig.agent.quick_probe_s = is_synchronous, quick_probe_s
    rig.connect()
    rig.read(1)
    rig.wait_posted(1)
    rig.end_posted()
    wait_until(lambda: rig.landed.results)
    assert rig.landed.results[0].transport == label
    rig.transport.close()


def test_connections_that_cannot_be_closed_fail_the_worker_in_the_end(rig: Rig) -> None:
    def come_back(num_left_open: int) -> None:
        rig.agent.num_left_open = num_left_open
        rig.transport.remove_peer(rig.peer)
        rig.connect()
        rig.read(1)
        rig.wait_posted(1)
        rig.end_posted()
        wait_until(lambda: not rig.agent.posted)

    come_back(MAX_LEFT_OPEN)
    assert rig.transport.failure is None
    come_back(MAX_LEFT_OPEN + 1)
    assert rig.transport.failure == "more than 64 broken connections cannot be closed"


THREAD = (
    *call_sites(
        nixl_transport.NixlTransport,
        "_run",
        "_work",
        "_take_commands",
        "_begin_turn",
        "_on_progress",
        "_wait_s",
        "_has_posted",
        "_start_connect",
        "_check_own_pool",
        "_start_close",
        "_progress",
        "_pump",
        "_connect",
        "_post_probe",
        "_poll_probe",
        "_drop_probe",
        "_label",
        "_lose",
        "_forget",
        "_queue_read",
    ),
    *call_sites(
        reads.Reads,
        "queue",
        "progress",
        "drop_waiting",
        "check_stalled",
        "_post_waiting",
        "_post",
        "_poll",
        "_settle",
        "_land",
        "_end_part",
        "_end",
    ),
)


@each_site(THREAD)
def test_a_defect_at_any_call_of_the_thread_costs_one_peer_or_the_worker(
    site: CallSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for a READ or a connection hears of its end, or the worker is to end."""
    monkeypatch.setattr(nixl_transport, "SELF_CHECK_S", 0.1)
    num_defects = value(DEFECTS)
    with fault_at(site) as fault:
        try:
            rig = Rig()
        except KVTransferError:
            assert fault.has_raised
            return
        with contextlib.suppress(KVTransferError):  # that is the end of the worker
            rig.transport.self_check()
        rig.transport.expect_peer()
        for _ in range(2):
            rig.connect()
            with contextlib.suppress(KVTransferError):
                rig.read(40)
                wait_until(lambda: rig.end_posted() or rig.landed.results or rig.transport.failure)
            rig.landed.results.clear()
            rig.transport.remove_peer(rig.peer)
        rig.transport.close()
    assert rig.agent.is_closed or rig.transport.failure
    if fault.has_raised and site.method != "_check_own_pool":
        assert value(DEFECTS) > num_defects


def peer_of(agent: NixlAgent) -> KVPeer:
    return KVPeer(
        engine_id="p0",
        epoch="x",
        agent_name="p0.x",
        endpoint=agent.endpoint,
        num_blocks=agent.endpoint.regions[0].num_blocks,
        block_bytes=SPEC.block_bytes,
        slices=(KVSlice(0, 0, SPEC.block_bytes),),
    )


def test_a_peer_that_has_slept_is_loaded_anew_when_no_read_goes_on() -> None:
    p, d = (NixlAgent(name, make_pool(1)) for name in ("p0.x", "d0.x"))
    blocks = d.add_peer(peer_of(p))
    d.mark_connected("p0.x")
    p.close()
    p = NixlAgent("p0.x", make_pool(1))
    with pytest.raises(ValueError, match=r"p0\.x has registered its pool anew"):
        d.add_peer(peer_of(p))
    d.remove_peer("p0.x", blocks, is_broken=False)
    blocks = d.add_peer(peer_of(p))
    assert d.num_left_open == 0, "they went with the agent"
    d.remove_peer("p0.x", blocks, is_broken=False)
    d.close()
    p.close()


def test_a_peer_that_comes_back_after_it_was_removed_has_left_a_connection_open() -> None:
    p, d = (NixlAgent(name, make_pool(1)) for name in ("p0.x", "d0.x"))
    peer = peer_of(p)

    def come_and_go(*, is_broken: bool, has_answered: bool = True) -> None:
        blocks = d.add_peer(peer)
        if has_answered:
            d.mark_connected("p0.x")
        d.remove_peer("p0.x", blocks, is_broken=is_broken)

    come_and_go(is_broken=True, has_answered=False)
    come_and_go(is_broken=False)
    come_and_go(is_broken=True, has_answered=False)
    assert d.num_left_open == 0, "it was kept the first time, and may be dead the second"
    come_and_go(is_broken=True)
    come_and_go(is_broken=False)
    come_and_go(is_broken=False)
    assert d.num_left_open == 2
    come_and_go(is_broken=True)
    for _ in range(3):
        come_and_go(is_broken=True, has_answered=False)
    assert d.num_left_open == 3, "nobody answered any more"
    d.close()
    p.close()
