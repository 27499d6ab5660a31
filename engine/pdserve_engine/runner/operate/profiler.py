"""Profiles of the model's steps, as traces for chrome://tracing and Perfetto."""

import gzip
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

# Not torch.profiler's: to start that imports torch's compiler first, which takes seconds.
from torch.autograd.profiler import profile

from pdserve_common.errors import FailedPreconditionError


class StepProfiler:
    """At most one profile at a time. All calls come from the thread that runs the model: others'
    work on the CPU is not recorded.
    """

    def __init__(self, directory: str | None, *, name: str) -> None:
        """Write to `directory`, a new one under the system's folder for temporary files if None."""
        self._directory = directory
        self._name = re.sub(r"[^\w.-]", "_", name)  # any engine_id
        self._profile: Any = None  # profile's methods have no types

    def start(self) -> None:
        """Raises FailedPreconditionError if a profile is running or its folder cannot be had."""
        if self._profile is not None:
            raise FailedPreconditionError("a profile is running already")
        started: Any = profile(
            use_cpu=True,
            use_device="cuda" if torch.cuda.is_available() else None,
            use_kineto=True,
        )
        try:
            if self._directory is not None:
                Path(self._directory).mkdir(parents=True, exist_ok=True)
            started.__enter__()
        except (OSError, RuntimeError) as error:  # RuntimeError: somebody else's profile is running
            raise FailedPreconditionError(f"cannot start a profile: {error}") from error
        self._profile = started

    def stop(self) -> str:
        """Write the trace and return its path. Raises FailedPreconditionError if none is running
        or it cannot be written.
        """
        if self._profile is None:
            raise FailedPreconditionError("no profile is running")
        stopped, self._profile = self._profile, None
        stopped.__exit__(None, None, None)
        try:
            return str(self._write(stopped))
        except (OSError, RuntimeError) as error:  # RuntimeError: what the exporter makes of both
            raise FailedPreconditionError(f"cannot write the profile: {error}") from error

    def _write(self, stopped: Any) -> Path:
        """Leaves nothing behind if it cannot."""
        made = None if self._directory else tempfile.mkdtemp(prefix="pdserve-profile-")
        path = Path(made or self._directory or "") / f"{self._name}-{time.time_ns()}.json.gz"
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".json") as plain:
                stopped.export_chrome_trace(plain.name)
                with open(plain.name, "rb") as trace, gzip.open(path, "wb") as packed:
                    shutil.copyfileobj(trace, packed)
        except BaseException:  # whatever it is: it goes on, and leaves no file behind
            path.unlink(missing_ok=True)
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
            raise
        return path
