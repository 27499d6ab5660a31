"""Stops threads of a worker at stages, and tells when they get there."""

import functools
import importlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve_faults.stages import Point


@dataclass(slots=True, eq=False)
class _Barrier:
    skip: int
    is_holding: bool
    hold_s: float
    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)


class Barriers:
    """One barrier for each armed stage. Each lets a thread pass, or holds it, once."""

    def __init__(self, stages: Mapping[str, Point]) -> None:
        """Wrap the methods of all stages. Raises AttributeError if one is gone."""
        self._lock = threading.Lock()
        self._armed: dict[str, _Barrier] = {}
        for stage, point in stages.items():
            _wrap(point, functools.partial(self._pass, stage))

    def arm(self, stage: str, skip: int, is_holding: bool, hold_s: float) -> None:
        """Watch for the call after the next `skip`; hold it for at most `hold_s`, if asked to."""
        with self._lock:
            if stage in self._armed:
                raise ValueError(f"stage {stage} is armed already")
            self._armed[stage] = _Barrier(skip, is_holding, hold_s)

    def wait_reached(self, stage: str, timeout_s: float) -> None:
        """Raises TimeoutError."""
        if not self._armed[stage].reached.wait(timeout_s):
            raise TimeoutError(f"stage {stage} was not reached within {timeout_s:g} s")

    def go(self, stage: str) -> None:
        """Let the held thread go on."""
        self._armed[stage].go.set()

    def reset(self) -> None:
        """Disarm all and let everybody go on."""
        with self._lock:
            armed, self._armed = self._armed, {}
        for barrier in armed.values():
            barrier.go.set()

    def _pass(self, stage: str) -> None:
        with self._lock:
            barrier = self._armed.get(stage)
            if barrier is None or barrier.reached.is_set():
                return
            barrier.skip -= 1
            if barrier.skip >= 0:
                return
            barrier.reached.set()
        if barrier.is_holding:
            barrier.go.wait(barrier.hold_s)


def _wrap(point: Point, tell: Callable[[], None]) -> None:
    owner = getattr(importlib.import_module(point.module), point.cls)
    method = getattr(owner, point.method)

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if point.when == "before":
            tell()
        result = method(*args, **kwargs)
        if point.when == "after":
            tell()
        return result

    setattr(owner, point.method, wrapper)
