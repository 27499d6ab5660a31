"""How a worker process ends."""

import asyncio
from typing import cast

import pytest

from pdserve_common.engine_client import EngineClient
from pdserve_worker.process import close_engine


class ClosingEngine:
    """Closes at once, or never."""

    def __init__(self, *, hangs: bool, failure: str | None = None) -> None:
        self._hangs = hangs
        self._failure = failure
        self.is_closed = False

    async def close(self) -> None:
        if self._hangs:
            await asyncio.Event().wait()
        self.is_closed = True

    def problem(self) -> str | None:
        return self._failure if self.is_closed else None


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (ClosingEngine(hangs=False), None),
        (ClosingEngine(hangs=False, failure="a step hangs"), "a step hangs"),
        (ClosingEngine(hangs=True), "the engine has not closed within 0.05 s"),
    ],
)
async def test_an_engine_that_does_not_close_is_left_to_the_system(
    engine: ClosingEngine, problem: str | None
) -> None:
    assert await close_engine(cast("EngineClient", engine), timeout_s=0.05) == problem
