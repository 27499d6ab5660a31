"""A worker's transport in a process of its own, by default kv_transfer/transport_process.py."""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "kv_transfer" / "transport_process.py"
# Of its start and of an answer, however busy the machine is.
TIMEOUT_S = 300.0


class TransportWorker:
    """Its `welcome` is what a peer is given."""

    def __init__(self, *arguments: str, command: Sequence[str] = (), script: Path = SCRIPT) -> None:
        """`arguments` are the script's; `command` comes before it all."""
        self.process = subprocess.Popen(
            [*command, sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        watchdog = threading.Timer(TIMEOUT_S, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline()
        watchdog.cancel()
        assert line, "the worker has ended, or hung"
        return line

    def start(self) -> None:
        """Wait until it has started; others may start meanwhile."""
        self.welcome = self.line().strip()

    def ask(self, *words: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.line())

    def kill(self) -> str:
        """Return what it has printed to stderr."""
        self.process.kill()
        return self.process.communicate()[1]
