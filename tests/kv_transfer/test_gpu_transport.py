"""Blocks that move from one process's GPU memory to another one's.

PDSERVE_TEST_DEVICE=cpu runs the same tests on the CPU, to see that they are right.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from support.transport_worker import TransportWorker

DEVICE = os.environ.get("PDSERVE_TEST_DEVICE", "cuda")
# 16 MiB: a probe reads less.
NUM_BLOCKS = "2048"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
    ),
]


@pytest.fixture
def required(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def workers(required: str) -> Iterator[tuple[TransportWorker, TransportWorker]]:
    p, d = (TransportWorker(name, required, DEVICE, NUM_BLOCKS) for name in ("p", "d"))
    p.start()
    d.start()
    yield p, d
    for worker in (d, p):
        print(worker.kill())


@pytest.mark.parametrize(
    ("required", "transport"),
    [("any", "shm"), ("shm", "shm"), ("tcp", "tcp")],
    indirect=["required"],
)
def test_blocks_move_the_required_way_and_arrive_intact(
    workers: tuple[TransportWorker, TransportWorker], transport: str
) -> None:
    p, d = workers
    p.ask("export")
    expected = p.ask("checksums")[::-1]
    assert len(set(expected)) == int(NUM_BLOCKS)
    assert d.ask("checksums") != expected
    peer = d.ask("add", p.welcome)
    assert d.ask("read_all", peer) == [transport, ""]
    assert d.ask("checksums") == expected
    assert d.ask("close") is None
    assert p.ask("close") is None


@pytest.mark.parametrize("required", ["any"], indirect=True)
def test_a_p_that_dies_leaves_d_whole(workers: tuple[TransportWorker, TransportWorker]) -> None:
    p, d = workers
    p.ask("export")
    peer = d.ask("add", p.welcome)
    assert d.ask("read_all", peer)[1] == ""
    p.kill()
    before = d.ask("checksums")
    assert d.ask("state")[1] is None
    assert d.ask("checksums") == before
    assert d.ask("close") is None
