"""Virtual time: events in order, the earlier scheduled first of those at one moment."""

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Runs events one after another; `now` is the moment of the one that runs, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(moment, self.now), next(self._numbers), act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now + seconds, act)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
