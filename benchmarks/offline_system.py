"""A system that `bench_cpu.py` times, in a process group that runs only while it is asked."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from peers.offline import Case, Times

START_S = 900.0
CASE_S = 300.0


class Command(NamedTuple):
    """How a system is started; its script serves `peers/offline.py`'s protocol."""

    words: Sequence[object]
    variables: Mapping[str, str]


class OfflineSystem:
    """A running system; use as a context manager. Its log has what it prints."""

    def __init__(self, command: Command, log: Path) -> None:
        """Start it and wait for its first token; raises RuntimeError or TimeoutError."""
        self._log = log
        started = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(word) for word in command.words],
                env=os.environ | command.variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        try:
            self._read(START_S)
        except BaseException:  # it goes on, and leaves no process behind
            self._kill()
            raise
        self.startup_s = time.perf_counter() - started
        self._signal(signal.SIGSTOP)

    def run(self, case: Case) -> Times:
        """Let it time a case. Raises RuntimeError or TimeoutError."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        times = Times(*self._read(CASE_S))  # type: ignore[misc]
        self._signal(signal.SIGSTOP)
        return times

    def __enter__(self) -> "OfflineSystem":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kill()

    def _read(self, timeout_s: float) -> object:
        """Return its next answer; one line is all there ever is to read."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError(f"no answer within {timeout_s:g} s, see {self._log}")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"it has ended, see {self._log}")
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _kill(self) -> None:
        """Nothing in it has to be kept; its workers are in the same group."""
        with suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()
