"""Which router gets a call next, and when."""

import time

import grpc

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


class Attempts:
    """One call, which is sent to the next router when one is lost: its status is UNAVAILABLE (the
    router is gone, hangs, shuts down or has no workers), or it came at the moment of a shutdown.
    Every other status is the call's end.
    """

    def __init__(
        self, *, num_routers: int, router: int, max_resumes: int, timeout_s: float | None
    ) -> None:
        """Routers are counted from 0; `router` is the first to be asked."""
        self.router = router
        self._num_routers = num_routers
        self._num_resumes_left = max_resumes
        self._num_resumes = 0
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float | None:
        """Until the call's deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def on_loss(self, error: grpc.RpcError) -> float:
        """An attempt failed. Returns in how many seconds the next one is to begin; raises `error`
        if there is to be none.
        """
        is_lost = error.code() is grpc.StatusCode.UNAVAILABLE or _came_too_late(error)
        delay_s = self.turn_to_next() if is_lost else None
        if delay_s is None:
            raise error
        return delay_s

    def turn_to_next(self) -> float | None:
        """Return in how many seconds the next attempt is to begin; None if there is to be none."""
        if not self._num_resumes_left:
            return None
        self._num_resumes += 1
        self._num_resumes_left -= 1
        delay_s = self._delay_s()
        remaining_s = self.remaining_s
        if remaining_s is not None and delay_s >= remaining_s:
            return None
        self.router = (self.router + 1) % self._num_routers
        return delay_s

    def _delay_s(self) -> float:
        """The next router is asked at once; before the first one's turn comes again, longer with
        every round.
        """
        num_rounds, num_asked = divmod(self._num_resumes, self._num_routers)
        # This many doublings are far beyond the maximum.
        delay_s = MIN_BACKOFF_S * 2 ** min(num_rounds - 1, 10)
        return 0.0 if num_asked else min(MAX_BACKOFF_S, delay_s)


def _came_too_late(error: grpc.RpcError) -> bool:
    """gRPC's servers end so what was on its way as they said that they take nothing more. A status
    of our routers, and that of a call which this process cancels, has other words.
    """
    return error.code() is grpc.StatusCode.CANCELLED and error.details() == "CANCELLED"
