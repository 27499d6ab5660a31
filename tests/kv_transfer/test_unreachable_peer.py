"""D's transport with a P in another network namespace that it cannot reach, and one that it can."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve_engine.kv_transfer.nixl import MAX_LEFT_OPEN
from support.network import Network, missing_for_partitions
from support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_for_partitions()), reason=missing_for_partitions()),
]


class Worker:
    """transport_process.py, started."""

    def __init__(self, network: Network, name: str) -> None:
        script = Path(__file__).parent / "transport_process.py"
        self.process = subprocess.Popen(
            [*network.command(name), sys.executable, str(script), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        watchdog = threading.Timer(60.0, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline()
        watchdog.cancel()
        assert line, "the worker has ended, or hung"
        return line

    def ask(self, *words: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.line())

    def kill(self) -> str:
        """Return what it has printed to stderr."""
        self.process.kill()
        return self.process.communicate()[1]


class Neighbours:
    """D, connected to a P that is near: in its process. The other one is `far`."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.far, self.d = (Worker(network, name) for name in ("far", "d"))
        self.far_welcome = self.far.line().strip()
        self.d.line()
        self.near = self.d.ask("add_near")

    def add_far(self) -> str:
        return str(self.d.ask("add", self.far_welcome))

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
