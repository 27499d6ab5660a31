"""A plugin of workers under test: barriers at stages, faults of NIXL, and a socket that rules them.

One JSON object a line, one connection a command: {"command": name, ...arguments}. The answer is
{"result": ...} or {"error": message}.
"""

import json
import os
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SOCKET = "FAULTS_SOCKET"


def start() -> None:
    """Wrap the production code and serve the socket that $FAULTS_SOCKET names. Not in a rank of a
    worker: the faults are those of its engine.
    """
    main = sys.modules["__main__"].__spec__
    if main is not None and main.name.startswith("pdserve_engine.executor"):
        return
    # Not before: the test imports this package too, without an engine.
    from pdserve_faults import lies, reads, slowness
    from pdserve_faults.barriers import Barriers
    from pdserve_faults.stages import STAGES

    barriers, faults, liar = Barriers(STAGES), reads.install(), lies.install()
    slow = slowness.install()

    def reset() -> None:
        barriers.reset()
        faults.reset()
        liar.reset()
        slow.reset()

    commands: Mapping[str, Callable[..., Any]] = {
        "arm": barriers.arm,
        "wait_reached": barriers.wait_reached,
        "go": barriers.go,
        "inject": faults.inject,
        "lie": liar.lie,
        "slow_down": slow.down,
        "hang_step": slow.hang,
        "counts": lambda: faults.counts,
        "reset": reset,
    }
    _serve(Path(os.environ[SOCKET]), commands)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    commands: Mapping[str, Callable[..., Any]]


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        arguments = json.loads(self.rfile.readline())
        try:
            answer = {"result": self.server.commands[arguments.pop("command")](**arguments)}
        except (KeyError, TypeError, ValueError, TimeoutError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.wfile.write(json.dumps(answer).encode() + b"\n")


def _serve(path: Path, commands: Mapping[str, Callable[..., Any]]) -> None:
    path.unlink(missing_ok=True)  # of the process before us
    server = _Server(str(path), _Handler)
    server.commands = commands
    threading.Thread(target=server.serve_forever, name="faults", daemon=True).start()
