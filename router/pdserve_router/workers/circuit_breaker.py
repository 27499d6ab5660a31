"""Keeps requests away from what fails again and again."""

import time
from collections.abc import Callable

FAILURES_TO_OPEN = 3
MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0


class CircuitBreaker:
    """Opens after FAILURES_TO_OPEN failures without a success between them, and lets nothing
    through until its owner closes it. The owner's own trials show whether the trouble is over, each
    after a backoff of 1 s that doubles to 30 s. What was under way when it opened says nothing new,
    whether it fails or not.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_open = False
        self._clock = clock
        self._num_failures = 0
        self._backoff_s = MIN_BACKOFF_S
        self._retry_at = 0.0

    @property
    def retry_in_s(self) -> float:
        """Seconds until the next trial is due; 0 if it is, or none is needed."""
        return max(0.0, self._retry_at - self._clock()) if self.is_open else 0.0

    def report_failure(self, *, may_open: bool = True) -> None:
        """Something that was let through failed. Without `may_open` it is only counted."""
        self._num_failures += 1
        if may_open and not self.is_open and self._num_failures >= FAILURES_TO_OPEN:
            self.open()

    def report_success(self) -> None:
        """Something that was let through went well."""
        if not self.is_open:
            self._num_failures = 0
            self._backoff_s = MIN_BACKOFF_S

    def open(self) -> None:
        """Let nothing through, and have a trial after the backoff, which doubles."""
        self.is_open = True
        self._retry_at = self._clock() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def close(self) -> None:
        """Let everything through; the next opening still has the longer backoff."""
        self.is_open = False
        self._num_failures = 0
