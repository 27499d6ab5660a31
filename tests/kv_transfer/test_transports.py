"""The contract of KVTransport, kept by all of them."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from pdserve_common.errors import KVTransferError
from pdserve_common.types.kv import KVEndpoint, KVLinkWelcome
from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.kv_transfer.base import KVTransport, ReadResult
from support.handoff import (
    NUM_BLOCKS,
    SPEC,
    Landed,
    make_identity,
    make_transport,
    num_fds,
    welcome_of,
)
from support.local_transport import LocalRegistry
from support.shards import CUTS, CutPool, Cuts, make_cut_side
from support.waiting import wait_until

# Nothing stalls here; a machine with much else to do may be slow.
TIMEOUT_S = 30.0


@dataclass
class Two:
    """P's transport and D's, connected."""

    p: KVTransport
    d: KVTransport
    p_pool: CutPool
    d_pool: CutPool
    welcome: KVLinkWelcome
    peer: str
    lost: list[str]

    def read(self, remote: list[int], local: list[int]) -> ReadResult:
        landed = Landed()
        self.d.read(self.peer, remote, local, TIMEOUT_S, landed.on_done, landed.on_stall)
        wait_until(lambda: landed.results)
        assert len(landed.results) == 1
        return landed.results[0]


@pytest.fixture(params=CUTS)
def cuts(request: pytest.FixtureRequest) -> Cuts:
    """P's ranks and D's."""
    return CUTS[request.param]


@pytest.fixture
def two(kind: str, cuts: Cuts) -> Iterator[Two]:
    registry = LocalRegistry()
    p_pool, d_pool = CutPool(cuts, "p"), CutPool(cuts, "d")
    identity, p = make_cut_side(kind, p_pool, registry)
    _, d = make_cut_side(kind, d_pool, registry)
    welcome = welcome_of(identity, p)
    lost: list[str] = []
    p.expect_peer()
    yield Two(p, d, p_pool, d_pool, welcome, d.add_peer(welcome, lost.append), lost)
    d.close()
    p.close()


def block_sets(n: int) -> list[tuple[list[int], list[int]]]:
    rng = random.Random(3)
    return [
        ([5], [9]),
        (list(range(8, 24)), list(range(30, 46))),  # neighbours, which may be merged
        (list(range(24, 8, -1)), list(range(40, 24, -1))),
        (rng.sample(range(n), 17), rng.sample(range(n), 17)),
        ([7, 7, 7], [1, 3, 5]),
        (list(range(n)), rng.sample(range(n), n)),  # the full pool
    ]


def test_a_read_lands_exactly_the_named_blocks(two: Two) -> None:
    for remote, local in block_sets(NUM_BLOCKS):
        expected = two.d_pool.tensor
        expected[local] = two.p_pool.tensor[remote]
        result = two.read(remote, local)
        assert result.is_ok, result.error
        assert result.num_bytes == len(remote) * two.d_pool.block_bytes
        assert result.transport in ("local", "shm"), result
        assert torch.equal(two.d_pool.tensor, expected)
    assert two.lost == []


def test_a_self_check_leaves_the_pool_as_new(kind: str) -> None:
    pool = KVCache(SPEC, num_blocks=3, device=torch.device("cpu"))
    transport = make_transport(kind, make_identity("p0"), LocalRegistry(), pool)
    transport.self_check()
    transport.close()
    assert not pool.tensor.any()


def test_many_reads_at_once_all_land_once(two: Two) -> None:
    landed = Landed()
    for i in range(NUM_BLOCKS):
        two.d.read(two.peer, [i], [i], TIMEOUT_S, landed.on_done, landed.on_stall)
    wait_until(lambda: len(landed.results) == NUM_BLOCKS)
    assert all(result.is_ok for result in landed.results)
    assert torch.equal(two.d_pool.tensor, two.p_pool.tensor)
    assert landed.stalls == []


@pytest.mark.parametrize(
    ("remote", "local"), [([64], [0]), ([0], [64]), ([-1], [0]), ([0], [-1]), ([0, 1], [0])]
)
def test_block_ids_that_are_not_in_the_pools_are_refused(
    two: Two, remote: list[int], local: list[int]
) -> None:
    landed = Landed()
    with pytest.raises(KVTransferError, match="block ids"):
        two.d.read(two.peer, remote, local, TIMEOUT_S, landed.on_done, landed.on_stall)
    assert two.read([3], [4]).is_ok


def test_unknown_and_removed_peers_are_refused(two: Two) -> None:
    landed = Landed()
    two.d.remove_peer("nobody")
    two.d.remove_peer(two.peer)
    for peer in ("nobody", two.peer):
        with pytest.raises(KVTransferError, match="no connection"):
            two.d.read(peer, [0], [0], TIMEOUT_S, landed.on_done, landed.on_stall)


def test_removing_a_peer_ends_its_reads_once_each(two: Two) -> None:
    landed = Landed()
    everything = list(range(NUM_BLOCKS))
    for _ in range(20):
        two.d.read(two.peer, everything, everything, TIMEOUT_S, landed.on_done, landed.on_stall)
    two.d.remove_peer(two.peer)
    wait_until(lambda: len(landed.results) == 20)
    assert all(result.is_ok or "closed" in result.error for result in landed.results)


def test_a_peer_can_come_back(two: Two) -> None:
    assert two.read([1], [2]).is_ok
    two.d.remove_peer(two.peer)
    two.p.expect_peer()
    two.peer = two.d.add_peer(two.welcome, two.lost.append)
    assert two.read([3], [4]).is_ok
    assert torch.equal(two.d_pool.tensor[4], two.p_pool.tensor[3])


def test_close_lands_or_fails_what_is_pending(two: Two) -> None:
    landed = Landed()
    everything = list(range(NUM_BLOCKS))
    for _ in range(20):
        two.d.read(two.peer, everything, everything, TIMEOUT_S, landed.on_done, landed.on_stall)
    two.d.close()
    assert len(landed.results) == 20
    with pytest.raises(KVTransferError):
        two.d.read(two.peer, [0], [0], TIMEOUT_S, landed.on_done, landed.on_stall)


def test_a_closed_p_fails_the_read_and_the_peer(two: Two, kind: str) -> None:
    if kind == "nixl":
        pytest.skip("a P in this process keeps its memory; see test_kv_link.py for a killed one")
    two.p.close()
    assert not two.read([1], [2]).is_ok
    (reason,) = wait_until(lambda: two.lost)
    assert reason.startswith(two.peer.split("#")[0])
    assert reason.endswith("is gone")


def with_rank(endpoint: KVEndpoint, **fields: Any) -> KVEndpoint:
    """The same endpoint with other fields of its only rank."""
    (rank,) = endpoint.ranks
    return replace(endpoint, ranks=(replace(rank, **fields),))


@pytest.mark.parametrize("cuts", [CUTS["1:1"]])
@pytest.mark.parametrize("kind", ["nixl"])
def test_a_peer_that_does_not_answer_is_lost(two: Two) -> None:
    endpoint = with_rank(two.welcome.endpoint, nixl_metadata=b"garbage")
    lost: list[str] = []
    landed = Landed()
    peer = two.d.add_peer(replace(two.welcome, epoch="other", endpoint=endpoint), lost.append)
    wait_until(lambda: lost)
    assert "cannot connect" in lost[0]
    with pytest.raises(KVTransferError):
        two.d.read(peer, [0], [0], TIMEOUT_S, landed.on_done, landed.on_stall)
    assert two.read([1], [2]).is_ok


@pytest.mark.parametrize("cuts", [CUTS["1:1"]])
@pytest.mark.parametrize(
    "change",
    [
        lambda region: replace(region, num_blocks=0),
        lambda region: replace(region, first_block=1),
        lambda region: replace(region, base_address=(1 << 64) - 1),
    ],
)
def test_regions_that_make_no_sense_are_refused(two: Two, change: Callable[[Any], Any]) -> None:
    (rank,) = two.welcome.endpoint.ranks
    endpoint = with_rank(two.welcome.endpoint, regions=tuple(map(change, rank.regions)))
    with pytest.raises(KVTransferError, match="memory region"):
        two.d.add_peer(replace(two.welcome, endpoint=endpoint), two.lost.append)


def test_a_transport_gives_back_its_descriptors_and_threads(kind: str, cuts: Cuts) -> None:
    def use() -> None:
        registry = LocalRegistry()
        identity, p = make_cut_side(kind, CutPool(cuts, "p"), registry)
        _, d = make_cut_side(kind, CutPool(cuts, "d"), registry)
        p.expect_peer()
        peer = d.add_peer(welcome_of(identity, p), lambda reason: None)
        landed = Landed()
        d.read(peer, [0], [0], TIMEOUT_S, landed.on_done, landed.on_stall)
        wait_until(lambda: landed.results)
        d.close()
        p.close()

    use()
    before = num_fds()
    use()
    wait_until(lambda: num_fds() <= before)


def test_a_peer_that_comes_and_goes_leaves_no_connection_behind(two: Two) -> None:
    """As when a link breaks and is dialed again, while both processes live."""
    two.read([1], [2])
    before = num_fds()
    for _ in range(4):
        two.d.remove_peer(two.peer)
        two.p.expect_peer()
        two.peer = two.d.add_peer(two.welcome, two.lost.append)
        assert two.read([1], [2]).is_ok
    wait_until(lambda: num_fds() <= before)
