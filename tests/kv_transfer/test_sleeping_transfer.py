"""Pools that are deregistered while a worker sleeps, and given back meanwhile."""

from collections.abc import Iterator

import pytest

from pdserve_common.errors import KVTransferError
from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.kv_transfer.base import PoolTransport
from pdserve_engine.kv_transfer.ports import PullFinished
from pdserve_engine.kv_transfer.sleep import SleepingTransfer
from pdserve_engine.kv_transfer.transport import nixl_transport
from pdserve_engine.kv_transfer.transport.sharded_transport import ShardedTransport
from support.handoff import Pair, num_fds, open_ranks
from support.shards import CUTS, CutPair, CutPool


class Side:
    """A worker of a pair, as its engine puts it to sleep."""

    def __init__(self, pair: Pair, side: str, *, shares_memory: bool = False) -> None:
        pool = pair.p_pool if side == "p" else pair.d_pool
        self._pools: list[KVCache] = pool.pools if isinstance(pool, CutPool) else [pool]
        self.connector = pair.p if side == "p" else pair.d
        self.transport = pair.p_transport if side == "p" else pair.transport.inner
        assert isinstance(self.transport, ShardedTransport)
        self.num_opened = 0
        self.error: KVTransferError | None = None

        def reopen() -> list[PoolTransport]:
            if self.error is not None:
                raise self.error
            self.num_opened += 1
            return open_ranks(pair.kind, self.connector.identity, pair.registry, *self._pools)

        self._transfer = SleepingTransfer(
            self.transport, [self.connector], open_ranks=reopen, shares_memory=shares_memory
        )

    def sleep(self) -> bool:
        is_suspended = self._transfer.suspend()
        if is_suspended:
            for pool in self._pools:
                pool.release()
        return is_suspended

    def wake_up(self) -> None:
        for pool in self._pools:
            pool.restore()
        self._transfer.resume()


@pytest.fixture(params=["1:1", "tp 2:1", "tp 2:4"])
def cut_pair(kind: str, request: pytest.FixtureRequest) -> Iterator[CutPair]:
    pair = CutPair(kind, CUTS[request.param])
    yield pair
    pair.close()


def hand_over(pair: CutPair, request_id: str) -> None:
    """With other bytes than the request before had."""
    pair.p_pool.fill(sum(request_id.encode()))
    pair.hand_over(request_id)


def test_workers_that_slept_hand_over_again(cut_pair: CutPair) -> None:
    """P, D, or both; its peer hears of it by the end of the link alone."""
    pair = cut_pair
    sides = {side: Side(pair, side) for side in "pd"}
    pair.connect()
    hand_over(pair, "before")
    for number, asleep in enumerate(("p", "d", "pd", "p")):
        for side in asleep:
            assert sides[side].sleep()
        assert pair.to_d.closed_because or "p" not in asleep
        assert pair.to_p.closed_because or "d" not in asleep
        pair.cut()
        for side in asleep:
            sides[side].wake_up()
        pair.connect()
        hand_over(pair, f"after {number}")
    assert [sides[side].num_opened for side in "pd"] == [3, 2]
    assert pair.transport.inner.failure is None
    assert pair.p.failure() is None


def test_a_worker_that_sleeps_has_no_links(pair: Pair) -> None:
    p, d = Side(pair, "p"), Side(pair, "d")
    pair.connect()
    p.sleep()
    assert pair.to_d.closed_because == "asleep"
    with pytest.raises(KVTransferError, match="p0 is asleep"):
        pair.connect()
    p.wake_up()
    pair.connect()
    d.sleep()
    assert pair.to_p.closed_because == "asleep"
    with pytest.raises(KVTransferError, match="d0 is asleep"):
        pair.connect()
    d.wake_up()


def test_links_that_are_wanted_meanwhile_are_dialed_after_it(pair: Pair) -> None:
    d = Side(pair, "d")
    d.sleep()
    pair.ticket("r0")
    assert pair.dialed == []
    d.wake_up()
    assert pair.dialed == ["p0"]
    pair.connect()
    pair.prefill("r0")
    pair.wait_for(PullFinished, "r0")


@pytest.mark.parametrize("side", ["p", "d"])
def test_memory_that_a_peer_may_have_open_stays(pair: Pair, side: str) -> None:
    """D's is nobody's to read."""
    worker = Side(pair, side, shares_memory=True)
    assert worker.sleep(), "nobody has come"
    worker.wake_up()
    pair.connect()
    assert worker.sleep() is (side == "d")
    if side == "p":
        hand_over_as_before(pair)


def hand_over_as_before(pair: Pair) -> None:
    pair.ticket("r0")
    pair.prefill("r0")
    pair.wait_for(PullFinished, "r0")


def test_a_pool_that_cannot_be_registered_again_is_the_end(pair: Pair) -> None:
    p = Side(pair, "p")
    p.sleep()
    p.error = KVTransferError("NIXL moves no bytes")
    with pytest.raises(KVTransferError, match="moves no bytes"):
        p.wake_up()
    assert pair.p.failure() == "the KV pool cannot be registered again: NIXL moves no bytes"


def test_sleeping_often_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than D may leave connections behind."""
    monkeypatch.setattr(nixl_transport, "MAX_LEFT_OPEN", 3)
    pair = CutPair("nixl", CUTS["1:1"])
    p = Side(pair, "p")
    num_before = 0
    for number in range(10):
        pair.connect()
        hand_over(pair, f"r{number}")
        p.sleep()
        pair.cut()
        p.wake_up()
        if number == 2:
            num_before = num_fds()
    assert pair.transport.inner.failure is None
    assert num_fds() < num_before + 4
    pair.close()
