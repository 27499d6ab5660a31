"""Schedulers and connectors of two P and two D together, under everything that may happen to them:
no wrong token, nothing leaks, everything ends. And without one of the rules they do go wrong.
"""

from collections.abc import Callable
from typing import Any

import pytest
from handoff_world import World

from pdserve_engine.core.handoff import decode_grants
from pdserve_engine.kv_transfer.connectors.producer import ProducerConnector
from pdserve_engine.kv_transfer.protocol.pull import Pull, Reservation
from pdserve_engine.kv_transfer.protocol.pull_machine import PullMachine
from pdserve_engine.kv_transfer.protocol.transitions import ConsumerAction
from pdserve_engine.request.request import Request
from support.scripted_engine import BLOCK_SIZE

WINDOWS: list[tuple[int | None, ...]] = [(None,), (None, 6)]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("overdue_s", [0.0, 1.0])
def test_no_wrong_token_and_no_leak(
    windows: tuple[int | None, ...], overdue_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_grants, "OVERDUE_S", overdue_s)
    for seed in range(6):
        world = World(seed, windows)
        world.run(300)
        world.settle()
        assert world.ended["finished"] > 10
        assert world.num_drafts > 10


def trust_every_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without K4: what has landed is used before P says that it is right."""
    release = PullMachine._send_release

    def trust(machine: PullMachine, pull: Pull) -> None:
        release(machine, pull)
        pull.granted.num_confirmed = pull.granted.num_released
        machine._actions[ConsumerAction.CONFIRM](pull)

    monkeypatch.setattr(PullMachine, "_send_release", trust)


def free_blocks_under_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without K5."""
    monkeypatch.setattr(Reservation, "drop_reads", lambda reservation: [])


def announce_what_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without K2: the step that writes the next block is not over."""
    announce = ProducerConnector.on_blocks_computed

    def too_early(connector: Any, request: Request, num_tokens: int, block_ids: Any) -> None:
        through = min(num_tokens // BLOCK_SIZE + 1, *map(len, block_ids))
        num_written = min(through * BLOCK_SIZE, request.num_tokens - 1)
        announce(connector, request, max(num_tokens, num_written), block_ids)

    monkeypatch.setattr(ProducerConnector, "on_blocks_computed", too_early)


@pytest.mark.parametrize(
    "fault", [trust_every_read, free_blocks_under_reads, announce_what_is_not_written]
)
def test_without_a_rule_a_step_reads_what_is_wrong(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)

    def run_until_wrong() -> None:
        for seed in range(20):
            world = World(seed, (None,))
            world.run(300)
            world.settle()

    with pytest.raises(AssertionError, match="a step reads KV that is not its own"):
        run_until_wrong()
