"""LoRA adapters on the Hugging Face hub: downloaded by a process of its own, which has a deadline.

The hub's library bounds neither how long a download takes nor how much it writes, and its Python
would keep the GIL from steps. A process can be killed, and has limits.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve_common.model_files.hub_path import HubPath
from pdserve_common.processes.call_thread import CallThread
from pdserve_common.processes.calls import Answer, Call, Failed
from pdserve_common.processes.child import ChildProcess, start
from pdserve_common.processes.connection import Connection
from pdserve_common.processes.frames import FrameCodec
from pdserve_engine.lora.adapter_config import LoraError

# Shorter than what a router gives a worker for an adapter.
FETCH_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Download(Call[str]):
    """Bring what an adapter consists of, and return its folder. Raises ValueError, or OSError if
    the hub may have what it does not bring.
    """

    repository: str
    revision: str
    max_weights_bytes: int


CODEC: FrameCodec[Any] = FrameCodec((Answer, Failed, Download))


class HubUnreachableError(LoraError):
    """The hub did not bring an adapter that it may have: a later try may succeed."""


class HubFetch:
    """A download under way."""

    def __init__(self, path: HubPath, *, max_weights_bytes: int) -> None:
        """The future is the folder on this machine, or raises LoraError."""
        self._path = path
        self._call = Download(path.repository, path.revision, max_weights_bytes)
        self._process: ChildProcess | None = None
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
            process = ChildProcess("a download", *start("pdserve_engine.lora.hub_download"))
        except OSError as error:
            raise self._unreachable(f"no process to download it: {error.strerror}") from error
        self._process = process
        if self._is_cancelled:
            process.kill()
        with contextlib.closing(process):
            return self._download(process)

    def _download(self, process: ChildProcess) -> Path:
        connection = Connection(process.sockets[0], CODEC)
        try:
            return Path(connection.call(self._call, FETCH_TIMEOUT_S))
        except TimeoutError as error:
            problem = f"not downloaded within {FETCH_TIMEOUT_S:g} s"
            raise self._unreachable(problem) from error
        except ConnectionError as error:
            raise self._unreachable(f"its download {process.describe_end()}") from error
        except (OSError, RuntimeError) as error:
            raise self._unreachable(str(error)) from error
        except ValueError as error:
            raise LoraError(f"adapter {self._path}: {error}") from error

    def _unreachable(self, problem: str) -> HubUnreachableError:
        return HubUnreachableError(f"adapter {self._path}: {problem}")


# Begins to download what a path names.
FetchAdapter = Callable[[HubPath], HubFetch]
