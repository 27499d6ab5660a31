"""When a service that has ended is started again."""

import time
from collections import deque
from collections.abc import Callable

# A service that ends more often within the window is given up.
MAX_RESTARTS = 5
WINDOW_S = 600.0
# Doubled with each restart that is still within the window.
FIRST_PAUSE_S = 1.0


class Restarts:
    """The restarts of one service. `clock` gives seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque()
        self._start_at: float | None = None

    @property
    def is_planned(self) -> bool:
        """Has an end been told that no start has followed yet?"""
        return self._start_at is not None

    @property
    def is_due(self) -> bool:
        """Is the pause over?"""
        return self._start_at is not None and self._clock() >= self._start_at

    @property
    def num_in_window(self) -> int:
        """How many ends, the newest included, are within the window."""
        return len(self._ends)

    def plan(self) -> float | None:
        """Tell of an end; return the pause before the next start in seconds, None for no start."""
        now = self._clock()
        while self._ends and now - self._ends[0] > WINDOW_S:
            self._ends.popleft()
        self._ends.append(now)
        if len(self._ends) > MAX_RESTARTS:
            return None
        pause_s = FIRST_PAUSE_S * 2.0 ** (len(self._ends) - 1)
        self._start_at = now + pause_s
        return pause_s

    def started(self) -> None:
        """Tell of the start."""
        self._start_at = None
