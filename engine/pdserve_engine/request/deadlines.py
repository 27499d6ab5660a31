"""When requests have to be over."""

import heapq
from collections.abc import Iterator

from pdserve_engine.request.request import Request

# More are looked through before the heap grows: most may be of requests that are over.
MIN_LIMIT = 64


class Deadlines:
    """The deadlines (time.monotonic) of requests that are not over."""

    def __init__(self) -> None:
        # (deadline, order of arrival, request): ids may come again, requests do not. Those that are
        # over leave it late.
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0
        self._limit = MIN_LIMIT

    def add(self, request: Request) -> None:
        """Watch the request's deadline, if it has one."""
        deadline = request.core_request.deadline
        if deadline is None:
            return
        if len(self._heap) == self._limit:
            self._heap = [entry for entry in self._heap if not entry[2].status.is_finished]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + MIN_LIMIT
        heapq.heappush(self._heap, (deadline, self._num_added, request))
        self._num_added += 1

    def next(self) -> float | None:
        """Return the earliest one."""
        while self._heap and self._heap[0][2].status.is_finished:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_passed(self, now: float) -> Iterator[Request]:
        """Yield the requests whose deadline has passed, and forget them."""
        while (deadline := self.next()) is not None and deadline <= now:
            yield heapq.heappop(self._heap)[2]
