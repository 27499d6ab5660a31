"""D's transport with a P in another network namespace that it cannot reach, and one that it can."""

from collections.abc import Iterator

import pytest

from pdserve_engine.kv_transfer.transport.nixl_agent import MAX_LEFT_OPEN
from support.network import Network, missing_for_partitions
from support.transport_worker import TransportWorker
from support.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(bool(missing_for_partitions()), reason=missing_for_partitions()),
]


class Neighbours:
    """D, connected to a P that is near: in its process. The other one is `far`."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.far, self.d = (
            TransportWorker(name, command=network.command(name)) for name in ("far", "d")
        )
        self.far.start()
        self.d.start()
        self.near = self.d.ask("add_near")

    def add_far(self) -> str:
        return str(self.d.ask("add", self.far.welcome))

    def read_near(self) -> None:
        assert self.d.ask("read", self.near) == ""


@pytest.fixture
def neighbours() -> Iterator[Neighbours]:
    with Network(["far", "d"]) as network:
        neighbours = Neighbours(network)
        yield neighbours
        neighbours.far.kill()
        neighbours.d.kill()


def test_a_peer_that_cannot_be_reached_costs_nobody_else_anything(neighbours: Neighbours) -> None:
    d = neighbours.d
    # It refuses connections.
    neighbours.far.kill()
    num_fds, _ = d.ask("state")
    for _ in range(MAX_LEFT_OPEN + 2):
        assert "cannot connect" in d.ask("lose", neighbours.add_far())
    wait_until(lambda: d.ask("state")[0] <= num_fds)
    assert d.ask("state")[1] is None
    neighbours.read_near()
    # It drops what comes.
    neighbours.network.partition("d", "far")
    peer = neighbours.add_far()
    neighbours.read_near()
    assert d.ask("lose", peer) == "cannot connect within 0.5 s"
    neighbours.read_near()
    assert d.ask("close") is None
    assert "have not landed" not in d.kill()
