"""A rate per minute, with bursts."""

import math
from collections.abc import Callable

MINUTE_S = 60.0
# Below this nothing is missing, but for rounding.
_EPSILON = 1e-6


class TokenBucket:
    """A token bucket that fills within a minute: as much as it holds at once, and that much per
    minute for as long as it goes on. Without a size it is always full.
    """

    __slots__ = ("_clock", "_missing", "_updated_s", "size")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.size: float | None = None
        self._missing = 0.0
        self._updated_s = 0.0

    def resize(self, size: float | None) -> None:
        """Hold and gain so much per minute from now on; what is missing stays so."""
        self.missing()
        self.size = size

    def missing(self) -> float:
        """Return how much is missing from it; more than its size: it is in debt."""
        now_s = self._clock()
        if self.size is None:
            self._missing = 0.0
        elif self._missing:
            filled = (now_s - self._updated_s) * self.size / MINUTE_S
            self._missing = max(0.0, self._missing - filled)
        self._updated_s = now_s
        return self._missing

    def left(self) -> float:
        """Return what is in it; infinite without a size."""
        return max(0.0, self.size - self.missing()) if self.size is not None else math.inf

    def fill_s(self) -> float:
        """Return in how many seconds it is full."""
        return self.missing() * MINUTE_S / self.size if self.size is not None else 0.0

    def wait_s(self, amount: float) -> float:
        """Return in how many seconds it has `amount`; for more than it holds, in how many it is
        full.
        """
        if self.size is None or amount <= 0:
            return 0.0
        lacking = self.missing() + min(amount, self.size) - self.size
        return lacking * MINUTE_S / self.size if lacking > _EPSILON else 0.0

    def take(self, amount: float) -> None:
        """Take an amount, even if it has less; one below 0 is given back."""
        self._missing = max(0.0, self.missing() + amount)
