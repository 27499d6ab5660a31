"""READs in parts, one for each rank that has something of a block."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdserve_common.errors import KVTransferError
from pdserve_common.types.kv import KVMemoryRegion, KVRankEndpoint, KVShard, new_epoch
from pdserve_engine.kv_transfer.base import RankTransport, ReadResult
from pdserve_engine.kv_transfer.transport.sharded_transport import ShardedTransport
from pdserve_engine.kv_transfer.transport.shards import KVPeer
from support.handoff import NUM_BLOCKS, Landed, make_identity, welcome_of
from support.shards import CUTS, cut
from support.transport_worker import TransportWorker
from support.waiting import stop_process, wait_until

SPEC = CUTS["tp 2:1"].spec
TIMEOUT_S = 30.0


@dataclass(eq=False)
class ScriptedRank(RankTransport):
    """Does what the test says, on the test's thread."""

    shard: KVShard
    failure: str | None = None
    refuses: str = ""
    peers: dict[str, tuple[KVPeer, Callable[[str], None]]] = field(default_factory=dict)
    reads: list[tuple[Any, ...]] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    name: str = "scripted"

    def endpoint(self) -> KVRankEndpoint:
        region = KVMemoryRegion(base_address=4096, first_block=0, num_blocks=NUM_BLOCKS)
        return KVRankEndpoint(
            shard=self.shard, memory_type="DRAM", regions=(region,), nixl_metadata=b""
        )

    def self_check(self) -> None:
        self.calls.append("self_check")

    def expect_peer(self) -> None:
        self.calls.append("expect_peer")

    def set_exporting(self, is_exporting: bool) -> None:
        self.calls.append(is_exporting)

    def poll_soon(self) -> None:
        self.calls.append("poll_soon")

    def add_peer(self, peer: KVPeer, on_lost: Callable[[str], None]) -> str:
        if self.refuses:
            raise KVTransferError(self.refuses)
        key = f"{peer.agent_name}#{len(self.peers)}"
        self.peers[key] = (peer, on_lost)
        return key

    def remove_peer(self, peer: str) -> None:
        self.peers.pop(peer, None)

    def read(
        self,
        peer: str,
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
        timeout_s: float,
        on_done: Callable[[ReadResult], None],
        on_stall: Callable[[], None],
    ) -> None:
        if self.refuses or peer not in self.peers:
            raise KVTransferError(self.refuses or "no connection")
        self.reads.append((remote_block_ids, local_block_ids, timeout_s, on_done, on_stall))

    def end(self, error: str = "", duration_s: float = 1.0, transport: str = "shm") -> None:
        """End the oldest READ."""
        self.reads.pop(0)[3](
            ReadResult(
                is_ok=not error,
                num_bytes=100,
                duration_s=duration_s,
                transport=transport,
                error=error,
            )
        )

    def close(self) -> None:
        self.calls.append("close")


class World:
    """A D of two ranks that reads from a P of one, or the other way round."""

    def __init__(self, num_d: int = 2, num_p: int = 1) -> None:
        layout = SPEC.layout()
        self.ranks = [ScriptedRank(shard) for shard in cut(4, 3, num_d)]
        self.d = ShardedTransport(self.ranks, layout=layout)
        p = ShardedTransport([ScriptedRank(shard) for shard in cut(4, 3, num_p)], layout=layout)
        identity = make_identity("p0", layout=layout, num_ranks=num_p)
        self.welcome = welcome_of(identity, p)
        self.lost: list[str] = []
        self.landed = Landed()
        self.peer = self.d.add_peer(self.welcome, self.lost.append)

    def read(self) -> None:
        landed = self.landed
        self.d.read(self.peer, [3], [4], TIMEOUT_S, landed.on_done, landed.on_stall)


def test_a_read_is_over_with_its_last_part() -> None:
    world = World()
    world.read()
    first, second = world.ranks
    assert first.reads[0][:3] == second.reads[0][:3] == ([3], [4], TIMEOUT_S)
    second.end(duration_s=3.0, transport="tcp")
    assert world.landed.results == []
    first.end(duration_s=2.0)
    assert world.landed.results == [
        ReadResult(is_ok=True, num_bytes=200, duration_s=3.0, transport="tcp")
    ]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_read_of_which_a_part_failed_has_failed_when_all_are_over(failing: int) -> None:
    world = World()
    world.read()
    world.ranks[failing].end("gone")
    assert world.landed.results == [], "the other one may still land (K5)"
    world.ranks[1 - failing].end()
    (result,) = world.landed.results
    assert (result.is_ok, result.error) == (False, "gone")


def test_a_read_stalls_once_and_ends_when_nothing_can_land() -> None:
    world = World()
    world.read()
    first, second = world.ranks
    for rank in (second, first):
        rank.reads[0][4]()
    assert len(world.landed.stalls) == 1
    first.end("no progress")
    assert world.landed.results == []
    second.end()
    assert [result.error for result in world.landed.results] == ["no progress"]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_a_peer_that_one_rank_loses_is_lost_on_all_and_once(sizes: tuple[int, int]) -> None:
    world = World(*sizes)
    world.read()
    on_lost = [on_lost for rank in world.ranks for _, on_lost in rank.peers.values()]
    on_lost[-1]("disconnected")
    assert world.lost == ["disconnected"]
    assert not any(rank.peers for rank in world.ranks), "what was not posted fails there"
    for also_lost in on_lost:
        also_lost("disconnected as well")
    assert world.lost == ["disconnected"]
    with pytest.raises(KVTransferError, match="no connection to p0"):
        world.read()
    world.d.remove_peer(world.peer)


def test_a_rank_that_has_lost_the_peer_first_refuses_the_whole_read() -> None:
    world = World()
    world.ranks[0].refuses = "no connection"
    with pytest.raises(KVTransferError, match="no connection"):
        world.read()
    assert not world.ranks[1].reads
    assert not world.landed.results


def test_a_rank_that_refuses_behind_others_fails_the_read_and_calls_nobody_inside_the_call() -> (
    None
):
    world = World()
    first, second = world.ranks
    second.refuses = "no connection to it"
    caller = threading.Lock()

    def on_done(result: ReadResult) -> None:
        with caller:
            world.landed.on_done(result)

    def end_at_once(*args: Any) -> None:
        args[4](ReadResult(is_ok=True, num_bytes=100, duration_s=1.0, transport="shm"))

    first.read = end_at_once  # type: ignore[method-assign]
    with caller:  # as connectors do
        world.d.read(world.peer, [3], [4], TIMEOUT_S, on_done, world.landed.on_stall)
    (result,) = wait_until(lambda: world.landed.results)
    assert (result.is_ok, result.error) == (False, "no connection to it")


def test_a_peer_that_one_rank_does_not_take_is_none() -> None:
    world = World()
    world.d.remove_peer(world.peer)
    world.ranks[1].refuses = "no room"
    with pytest.raises(KVTransferError, match="no room"):
        world.d.add_peer(world.welcome, world.lost.append)
    assert not world.ranks[0].peers


def test_a_peer_that_is_lost_before_all_of_its_ranks_are_added_is_removed_from_all() -> None:
    world = World()
    world.d.remove_peer(world.peer)
    first, second = world.ranks
    add_peer = second.add_peer

    def lose_first(peer: KVPeer, on_lost: Callable[[str], None]) -> str:
        ((_, lose),) = first.peers.values()
        lose("gone")
        return add_peer(peer, on_lost)

    second.add_peer = lose_first  # type: ignore[method-assign]
    world.peer = world.d.add_peer(world.welcome, world.lost.append)
    assert world.lost == ["gone"]
    assert not first.peers
    assert not second.peers
    with pytest.raises(KVTransferError, match="no connection"):
        world.read()


def test_what_p_does_it_does_on_all_ranks() -> None:
    world = World()
    world.d.self_check()
    world.d.expect_peer()
    world.d.set_exporting(True)
    world.d.poll_soon()
    world.d.close()
    for rank in world.ranks:
        assert rank.calls == ["self_check", "expect_peer", True, "poll_soon", "close"]
    assert [endpoint.rank for endpoint in world.d.endpoint().ranks] == [0, 1]


def test_the_failure_of_a_rank_is_the_transports() -> None:
    world = World()
    assert world.d.failure is None
    world.ranks[1].failure = "64 READs have stalled"
    assert world.d.failure == "64 READs have stalled"


def test_ranks_are_closed_at_the_same_time() -> None:
    world = World()
    both = threading.Barrier(2)

    def wait_for_the_other() -> None:
        both.wait(TIMEOUT_S)

    for rank in world.ranks:
        rank.close = wait_for_the_other  # type: ignore[method-assign]
    world.d.close()


# ---- processes


class Processes:
    """Each rank of P a process, D another one."""

    def __init__(self, cuts: str, required: str) -> None:
        script = Path(__file__).parent / "rank_process.py"
        epoch = new_epoch()
        self.p = [
            TransportWorker("p", cuts, required, epoch, str(rank), script=script)
            for rank in range(len(CUTS[cuts].shards("p")))
        ]
        self.d = TransportWorker("d", cuts, required, script=script)

    def start(self) -> None:
        for worker in (*self.p, self.d):
            worker.start()

    def connect(self) -> str:
        return str(self.d.ask("add", *(worker.welcome for worker in self.p)))

    def wait_for_state(self, **expected: Any) -> dict[str, Any]:
        state: dict[str, Any] = {}

        def has_come() -> bool:
            state.update(self.d.ask("state"))
            return all(state[name] == value for name, value in expected.items())

        try:
            wait_until(has_come)
        except AssertionError:
            raise AssertionError(f"{state} has not become {expected}") from None
        return state

    def kill(self) -> None:
        for worker in (self.d, *self.p):
            print(worker.kill())


@pytest.fixture
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    processes = Processes(*request.param)
    try:
        processes.start()
        yield processes
    finally:
        processes.kill()


# `test_transports.py` reads over each cut within one process.
SAMPLE = (("tp 4:2", "any"), ("tp 2:1", "tcp"))
CUT_IN_PROCESSES = ("tp 2:1", "tp 1:2", "tp 4:1", "tp 4:2", "pp 2:1", "pp 1:2")


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param(each, marks=() if each in SAMPLE else pytest.mark.soak)
        for each in (*((cuts, "any") for cuts in CUT_IN_PROCESSES), ("tp 2:1", "tcp"))
    ],
    indirect=True,
    ids=str,
)
def test_blocks_arrive_intact_from_ranks_in_other_processes(processes: Processes) -> None:
    num_heads = len(processes.d.ask("checksums")) // NUM_BLOCKS
    sums = processes.p[0].ask("checksums")
    blocks = [sums[i : i + num_heads] for i in range(0, len(sums), num_heads)]
    assert len({str(block) for block in blocks}) == NUM_BLOCKS
    peer = processes.connect()
    num_bytes, transport, error = processes.d.ask("read", peer)
    assert error == ""
    assert num_bytes > 0
    assert transport in ("shm", "tcp")
    assert processes.d.ask("checksums") == [s for block in blocks[::-1] for s in block]
    assert processes.d.ask("state") == {"ended": [""], "stalls": 0, "lost": 0}
    for worker in (processes.d, *processes.p):
        assert worker.ask("close") is None


@pytest.mark.parametrize("processes", [("tp 2:1", "tcp")], indirect=True)
def test_a_rank_of_p_that_dies_under_a_read_fails_it_once(processes: Processes) -> None:
    peer = processes.connect()
    assert processes.d.ask("read", peer)[2] == ""
    # Over TCP nothing comes of a process that is stopped.
    stop_process(processes.p[1].process.pid)
    processes.d.ask("start_read", peer, "60")
    time.sleep(0.5)  # for the other rank's part
    assert processes.d.ask("state") == {"ended": [""], "stalls": 0, "lost": 0}
    processes.p[1].process.kill()
    processes.wait_for_state(lost=1)
    state = processes.d.ask("state")
    assert len(state["ended"]) == 2
    assert state["ended"][1]
    time.sleep(0.5)
    assert processes.d.ask("state") == state, "once"
    assert processes.d.ask("failure") is None


@pytest.mark.parametrize("processes", [("tp 2:1", "tcp")], indirect=True)
def test_a_rank_of_p_that_stops_stalls_a_read_which_ends_when_it_has_landed(
    processes: Processes,
) -> None:
    peer = processes.connect()
    assert processes.d.ask("read", peer)[2] == ""
    stop_process(processes.p[0].process.pid)
    # Long enough for the rank that goes on, however busy the machine is.
    processes.d.ask("start_read", peer, "4.0")
    processes.wait_for_state(stalls=1, lost=1)
    assert processes.d.ask("state")["ended"] == [""], "it may still land (K5)"
    processes.p[0].process.send_signal(signal.SIGCONT)
    state = processes.wait_for_state(stalls=1, lost=1, ended=["", "no progress for 4 s"])
    assert state["stalls"] == 1
