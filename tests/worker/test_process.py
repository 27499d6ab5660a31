"""How a worker process ends."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from pdserve_common.types.engine_client import EngineClient
from pdserve_worker.process import close_engine
from support.waiting import wait_until


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
        # The system ends it: a busy machine is nobody's fault.
        (ClosingEngine(hangs=True), None),
    ],
)
async def test_only_an_engine_with_a_problem_is_to_be_restarted(
    engine: ClosingEngine, problem: str | None
) -> None:
    assert await close_engine(cast("EngineClient", engine), timeout_s=0.05) == problem


WORKER = """
import asyncio, threading
from pdserve_common.types.engine_client import EngineState
from pdserve_worker import process
from pdserve_worker.config import WorkerConfig
from support.engine_double import EngineDouble

class Engine(EngineDouble):
    def problem(self):
        return None

    def state(self):
        return EngineState()

    async def drain(self, timeout_s):
        return 0

    async def close(self):
        await asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)

async def build(context):
    return process.Worker(engine=Engine())

async def check_nothing(engine, *, timeout_s):
    pass

process.check_engine = check_nothing
process.ENGINE_CLOSE_TIMEOUT_S = 0.05
process.run_worker(WorkerConfig(), role="decode", build=build)
"""


def test_a_worker_whose_engine_hangs_as_it_closes_ends_as_it_was_asked_to(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with (
        log.open("w") as file,
        subprocess.Popen(
            [sys.executable, "-c", WORKER], env=environment, stdout=file, stderr=file
        ) as process,
    ):
        try:
            wait_until(lambda: "ready on" in log.read_text() or process.poll() is not None)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0, log.read_text()
        finally:
            process.kill()
    assert "the engine has not closed within 0.05 s: the system ends it" in log.read_text()
