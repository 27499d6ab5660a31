"""The waiting queue: first come first served, or by priority (lower number first). Probes come
before all others, and requests that their front end has sent again after a failure before new ones.
"""

import heapq
import itertools
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal

from pdserve_engine.request.request import Request, RequestContainer, RequestStatus

SchedulingPolicy = Literal["fcfs", "priority"]


class RequestQueue(RequestContainer):
    """Waiting requests in the order in which they should be admitted."""

    statuses = (RequestStatus.WAITING, RequestStatus.PREEMPTED)

    def __init__(self, owner: RequestContainer | None = None) -> None:
        """`owner`: the container of its requests, if the queue is a part of one."""
        self._owner = self if owner is None else owner
        # Known tokens of all its requests: nothing of a waiting request is computed.
        self.num_tokens = 0

    def add_request(self, request: Request) -> None:
        """Add a request where its turn is."""
        self._enter(request)
        self._add(request)

    def insert_request(self, request: Request) -> None:
        """Add a new request where it would be if nothing had held it up since it came."""
        self._enter(request)
        self._insert(request)

    def prepend_request(self, request: Request) -> None:
        """Put a request back in front (preempted or skipped); a priority queue puts it where its
        turn is.
        """
        self._enter(request)
        self._prepend(request)

    def pop_request(self) -> Request:
        """Remove and return the next request. Raises IndexError if there is none."""
        request = self._pop()
        self._leave(request)
        return request

    def remove_request(self, request: Request) -> None:
        """Remove a request that is in the queue."""
        self._remove(request)
        self._leave(request)

    def _enter(self, request: Request) -> None:
        request.entered(self._owner)
        self.num_tokens += request.num_waiting_tokens

    def _leave(self, request: Request) -> None:
        request.left()
        self.num_tokens -= request.num_waiting_tokens

    @abstractmethod
    def peek_request(self) -> Request:
        """Return the next request. Raises IndexError if there is none."""

    @abstractmethod
    def _add(self, request: Request) -> None: ...

    @abstractmethod
    def _insert(self, request: Request) -> None: ...

    @abstractmethod
    def _prepend(self, request: Request) -> None: ...

    @abstractmethod
    def _pop(self) -> Request: ...

    @abstractmethod
    def _remove(self, request: Request) -> None: ...


class FCFSRequestQueue(RequestQueue):
    """First come, first served."""

    def __init__(self, owner: RequestContainer | None = None) -> None:
        super().__init__(owner)
        self._queue: deque[Request] = deque()
        # No request in the queue came after this.
        self._latest_time = -math.inf

    def _enter(self, request: Request) -> None:
        super()._enter(request)
        self._latest_time = max(self._latest_time, request.queued_time)

    def _add(self, request: Request) -> None:
        if request.is_probe:
            self._queue.insert(self._num_probes(), request)
        elif request.is_redrive:
            self._queue.insert(self._num_ahead(), request)
        else:
            self._queue.append(request)

    def _insert(self, request: Request) -> None:
        if request.is_probe or request.is_redrive:
            self._add(request)
        elif request.queued_time >= self._latest_time:
            self._queue.append(request)
        else:
            self._queue.insert(self._num_before(request), request)

    def _num_before(self, request: Request) -> int:
        """Return how many come before a new request: all that are in front of the first new one
        that came later. Others have been held up themselves, and came earlier than their places
        say.
        """
        return _num_leading(
            other.is_probe or other.has_begun or other.queued_time <= request.queued_time
            for other in self._queue
        )

    def _num_probes(self) -> int:
        return _num_leading(request.is_probe for request in self._queue)

    def _num_ahead(self) -> int:
        """Return how many in front have been admitted or sent before, and so come first."""
        return _num_leading(request.is_probe or request.has_begun for request in self._queue)

    def _prepend(self, request: Request) -> None:
        self._queue.insert(0 if request.is_probe else self._num_probes(), request)

    def peek_request(self) -> Request:
        return self._queue[0]

    def _pop(self) -> Request:
        return self._queue.popleft()

    def _remove(self, request: Request) -> None:
        self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


def _num_leading(values: Iterable[bool]) -> int:
    return sum(1 for _ in itertools.takewhile(bool, values))


class _Entry:
    """A request in the heap; one that was removed stays for a while."""

    __slots__ = ("is_removed", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.is_removed = False

    def __lt__(self, other: "_Entry") -> bool:
        return self.request < other.request


class PriorityRequestQueue(RequestQueue):
    """Lower priority value first, then earlier arrival (Request.__lt__)."""

    def __init__(self, owner: RequestContainer | None = None) -> None:
        super().__init__(owner)
        self._heap: list[_Entry] = []
        self._entries: dict[Request, _Entry] = {}

    def _add(self, request: Request) -> None:
        entry = self._entries[request] = _Entry(request)
        heapq.heappush(self._heap, entry)

    def _insert(self, request: Request) -> None:
        self._add(request)

    def _prepend(self, request: Request) -> None:
        self._add(request)

    def peek_request(self) -> Request:
        while self._heap[0].is_removed:
            heapq.heappop(self._heap)
        return self._heap[0].request

    def _pop(self) -> Request:
        request = self.peek_request()
        heapq.heappop(self._heap)
        del self._entries[request]
        return request

    def _remove(self, request: Request) -> None:
        self._entries.pop(request).is_removed = True
        if len(self._heap) > 2 * len(self._entries) + 64:  # most are removed
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._entries))


def make_request_queue(
    policy: SchedulingPolicy, owner: RequestContainer | None = None
) -> RequestQueue:
    """Return an empty queue of the policy, which may be a part of another container."""
    return PriorityRequestQueue(owner) if policy == "priority" else FCFSRequestQueue(owner)
