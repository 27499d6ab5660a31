"""LoRA adapters on the Hugging Face hub: downloaded by a process of its own, which has a deadline.

The hub's library bounds neither how long a download takes nor how much it writes, and its Python
would keep the GIL from steps. A process can be killed, and has limits.
"""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from pdserve_common.call_thread import CallThread
from pdserve_common.hub_path import HubPath
from pdserve_engine.lora.adapter_config import LoraError

# Shorter than what a router gives a worker for an adapter.
FETCH_TIMEOUT_S = 240.0
# Exit statuses of the download.
REFUSED, UNREACHABLE = 3, 4


class HubUnreachableError(LoraError):
    """The hub did not bring an adapter that it may have: a later try may succeed."""


class HubFetch:
    """A download under way."""

    def __init__(self, path: HubPath, *, max_weights_bytes: int) -> None:
        """The future is the folder on this machine, or raises LoraError."""
        self._path = path
        self._command = [sys.executable, "-m", "pdserve_engine.lora.hub_download"]
        self._command += [path.repository, path.revision, str(max_weights_bytes)]
        self._process: subprocess.Popen[str] | None = None
        self._is_cancelled = False
        # The process ends with the thread that has started it.
        thread = CallThread("lora-hub")
        self.future: Future[Path] = thread.submit(self._run)
        thread.close(0)

    def cancel(self) -> None:
        """End it, if it is still under way."""
        self._is_cancelled = True
        if self._process is not None:
            self._process.kill()

    def _run(self) -> Path:
        try:
            status, answer = self._download()
        except OSError as error:
            raise self._unreachable(f"no process to download it: {error.strerror}") from error
        if status == 0:
            return Path(answer)
        if status == REFUSED:
            raise LoraError(f"adapter {self._path}: {answer}")
        raise self._unreachable(
            answer if status == UNREACHABLE else f"its download ended with status {status}"
        )

    def _download(self) -> tuple[int, str]:
        """Return the process's exit status and what it said."""
        with subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        ) as process:
            self._process = process
            if self._is_cancelled:
                process.kill()
            try:
                output, _ = process.communicate(timeout=FETCH_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                process.kill()
                problem = f"not downloaded within {FETCH_TIMEOUT_S:g} s"
                raise self._unreachable(problem) from error
        return process.returncode, output.strip()

    def _unreachable(self, problem: str) -> HubUnreachableError:
        return HubUnreachableError(f"adapter {self._path}: {problem}")


# Begins to download what a path names.
FetchAdapter = Callable[[HubPath], HubFetch]
