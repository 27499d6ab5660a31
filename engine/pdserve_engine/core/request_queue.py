"""The waiting queue: first come first served, or by priority (lower number first)."""

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Literal

from pdserve_engine.core.request import Request

SchedulingPolicy = Literal["fcfs", "priority"]


class RequestQueue(ABC):
    """Waiting requests in the order in which they should be admitted."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Add a request at its place."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Put a request back in front (preempted or skipped); a priority queue puts it at its
        place.
        """

    @abstractmethod
    def peek_request(self) -> Request:
        """Return the next request. Raises IndexError if there is none."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Remove and return the next request. Raises IndexError if there is none."""

    @abstractmethod
    def remove_request(self, request: Request) -> None:
        """Remove a request that is in the queue."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        self._queue.append(request)

    def prepend_request(self, request: Request) -> None:
        self._queue.appendleft(request)

    def peek_request(self) -> Request:
        return self._queue[0]

    def pop_request(self) -> Request:
        return self._queue.popleft()

    def remove_request(self, request: Request) -> None:
        self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class PriorityRequestQueue(RequestQueue):
    """Lower priority value first, then earlier arrival (Request.__lt__)."""

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def add_request(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    def prepend_request(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    def peek_request(self) -> Request:
        return self._heap[0]

    def pop_request(self) -> Request:
        return heapq.heappop(self._heap)

    def remove_request(self, request: Request) -> None:
        self._heap.remove(request)
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._heap))


def make_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """Return an empty queue of the policy."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
