"""A line every few seconds about what a process has to do, as long as it has."""

import asyncio
import time
from collections.abc import Callable, Mapping

INTERVAL_S = 10.0


class LoadLog:
    """Calls `report` every INTERVAL_S while something happens, and once more when nothing has. All
    on the event loop's thread.
    """

    def __init__(
        self,
        totals: Callable[[], Mapping[str, float]],
        report: Callable[[Mapping[str, float]], bool],
    ) -> None:
        """`totals` returns what counters say, by name. `report` gets by how much each of them has
        grown per second, and returns whether there is work left, which goes on without `note`.
        """
        self._totals = totals
        self._report = report
        self._timer: asyncio.TimerHandle | None = None
        self._is_noted = False
        self._began = 0.0
        self._before: Mapping[str, float] = {}

    def note(self) -> None:
        """Something happens. Call it before that is counted."""
        self._is_noted = True
        if self._timer is None:
            self._begin()

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._before = self._totals()
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        was_noted, self._is_noted = self._is_noted, False
        elapsed_s = time.monotonic() - self._began
        per_s = {
            name: (total - self._before[name]) / elapsed_s for name, total in self._totals().items()
        }
        if self._report(per_s) or was_noted:
            self._begin()
