"""Schedulers and connectors of two P and two D together, under everything that may happen to them:
no wrong token, nothing leaks, everything ends.
"""

import pytest
from handoff_world import World

from pdserve_engine.core import remote_prefill

WINDOWS: list[tuple[int | None, ...]] = [(None,), (None, 6)]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("overdue_s", [0.0, 1.0])
def test_no_wrong_token_and_no_leak(
    windows: tuple[int | None, ...], overdue_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_prefill, "OVERDUE_S", overdue_s)
    for seed in range(4):
        world = World(seed, windows)
        world.run(300)
        world.settle()
        assert world.ended["finished"] > 10
        assert world.num_drafts > 10
