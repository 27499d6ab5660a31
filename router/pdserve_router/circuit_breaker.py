"""Keeps requests away from what fails again and again."""

import time
from collections.abc import Callable

FAILURES_TO_OPEN = 3
MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0


class CircuitBreaker:
    """Opens after FAILURES_TO_OPEN failures without a success between them. After a backoff, 1 s
    doubling to 30 s, one trial may show that the trouble is over; a trial that never reports is
    followed by another after the same time. Failures of requests that were under way when it opened
    say nothing new and do not count.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_open = False
        self._clock = clock
        self._num_failures = 0
        self._backoff_s = MIN_BACKOFF_S
        self._retry_at = 0.0
        self._is_trying = False

    @property
    def retry_in_s(self) -> float:
        """Seconds until it lets something through; 0 if it does now."""
        return max(0.0, self._retry_at - self._clock()) if self.is_open else 0.0

    def on_use(self) -> None:
        """Something was let through. If it is open that is the trial."""
        if self.is_open:
            self._is_trying = True
            self._retry_at = self._clock() + self._backoff_s

    def report_failure(self) -> None:
        self._num_failures += 1
        if self._is_trying or (not self.is_open and self._num_failures >= FAILURES_TO_OPEN):
            self.open()

    def report_success(self) -> None:
        self.close()
        self._backoff_s = MIN_BACKOFF_S

    def open(self) -> None:
        """Let nothing through for the backoff, which doubles."""
        self.is_open = True
        self._is_trying = False
        self._retry_at = self._clock() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def close(self) -> None:
        """Let everything through; the next opening still has the longer backoff."""
        self.is_open = self._is_trying = False
        self._num_failures = 0
