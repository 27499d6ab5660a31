"""Profiles of the model's steps, as traces for chrome://tracing and Perfetto."""

import re
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pdserve_common.errors import FailedPreconditionError


class StepProfiler:
    """At most one profile at a time. All calls come from the thread that runs the model: others'
    work on the CPU is not recorded.
    """

    def __init__(self, directory: str | None, *, name: str) -> None:
        """Write to `directory`, a new one under the system's folder for temporary files if None."""
        self._directory = directory
        self._name = re.sub(r"[^\w.-]", "_", name)  # any engine_id
        self._profile: profile | None = None
        self._path = ""

    def start(self) -> None:
        """Raises FailedPreconditionError if a profile is running or its folder cannot be had."""
        if self._profile is not None:
            raise FailedPreconditionError("a profile is running already")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        started = profile(activities=activities)
        try:
            self._path = str(self._new_path())
            started.start()
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
        stopped.stop()
        try:
            stopped.export_chrome_trace(self._path)
        except (OSError, RuntimeError) as error:  # RuntimeError: what the exporter makes of both
            raise FailedPreconditionError(f"cannot write the profile: {error}") from error
        return self._path

    def _new_path(self) -> Path:
        directory = Path(self._directory or tempfile.mkdtemp(prefix="pdserve-profile-"))
        directory.mkdir(parents=True, exist_ok=True)
        return directory / f"{self._name}-{time.time_ns()}.json.gz"
