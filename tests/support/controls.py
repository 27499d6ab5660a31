"""The test's end of the socket by which a worker's faults are ruled (tests/faults/plugin)."""

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_S = 60.0


class ControlError(Exception):
    """The worker refused a command, or did not answer."""


@dataclass(frozen=True, slots=True)
class Controls:
    """Commands to one worker. All raise ControlError, also if it does not answer in time."""

    path: Path

    def arm(self, stage: str, *, skip: int = 0, hold: bool = False, hold_s: float = 30.0) -> None:
        """Watch a stage, from the call after the next `skip` on; with `hold` the thread that gets
        there waits for `go`, at most `hold_s`.
        """
        self._command("arm", stage=stage, skip=skip, is_holding=hold, hold_s=hold_s)

    def wait_reached(self, stage: str, timeout_s: float = 30.0) -> None:
        """Wait until a thread has got to an armed stage."""
        self._command("wait_reached", _timeout_s=timeout_s, stage=stage, timeout_s=timeout_s)

    def go(self, stage: str) -> None:
        """Let the thread held at a stage go on."""
        self._command("go", stage=stage)

    def inject(self, fault: str, *, count: int = 1, delay_s: float = 0.0) -> None:
        """Let the next `count` READs of this worker suffer a ReadFault, named by its value."""
        self._command("inject", fault=fault, count=count, delay_s=delay_s)

    def lie(self, *, count: int = 1) -> None:
        """Let this decode worker repeat P's token wrongly for its next `count` requests."""
        self._command("lie", count=count)

    def slow_down(self, step_s: float) -> None:
        """Let every step of this worker's engine take so much longer."""
        self._command("slow_down", step_s=step_s)

    def hang_step(self) -> None:
        """Let the next step of this worker's engine hang, until `reset`."""
        self._command("hang_step")

    def reset(self) -> None:
        """Disarm all stages, forget all faults, let everybody go on."""
        self._command("reset")

    def counts(self) -> dict[str, int]:
        """Return what NIXL holds for the worker (registered_bytes, peers, handles), how many READs
        have suffered a fault so far (faulty_reads), and how many of these one after which the
        worker has to be restarted (fatal_reads).
        """
        counts: dict[str, int] = self._command("counts")
        return counts

    def _command(self, command: str, *, _timeout_s: float = 0.0, **arguments: Any) -> Any:
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(_timeout_s + ANSWER_TIMEOUT_S)
                sock.connect(str(self.path))
                sock.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
                answer = json.loads(sock.makefile().readline())
        except (OSError, ValueError) as error:
            raise ControlError(f"{command}: no answer at {self.path}: {error!r}") from error
        if "error" in answer:
            raise ControlError(f"{command}: {answer['error']}")
        return answer["result"]
