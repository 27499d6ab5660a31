"""The batch, and those who are next to join it."""

import itertools
from collections import deque
from collections.abc import Iterator

from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.request.request import Request, RequestContainer, RequestStatus


class Running(RequestContainer):
    """Requests in the batch: probes first, then in the order in which they joined."""

    statuses = (RequestStatus.RUNNING,)

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._kv = kv_cache_manager
        self._requests: list[Request] = []
        # Leading blocks that all share, per KV group; empty if the batch has changed since the last
        # count.
        self.num_common_prefix_blocks: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def num_probes(self) -> int:
        return len(self.probes())

    def probes(self) -> list[Request]:
        return list(itertools.takewhile(lambda r: r.is_probe, self._requests))

    def count_common_prefix_blocks(self) -> tuple[int, ...]:
        """Return num_common_prefix_blocks, counted once per batch: running requests never change
        the blocks they have.
        """
        if not self.num_common_prefix_blocks:
            self.num_common_prefix_blocks = self._kv.num_common_prefix_blocks(self._requests)
        return self.num_common_prefix_blocks

    def add(self, request: Request) -> None:
        request.entered(self)
        if request.is_probe:
            self._requests.insert(0, request)
        else:
            self._requests.append(request)
        self.num_common_prefix_blocks = ()

    def remove_request(self, request: Request) -> None:
        self._requests.remove(request)
        request.left()
        self.num_common_prefix_blocks = ()


class KVReady(RequestContainer):
    """Requests that own blocks with KV, pulled or shared by a fork's source, and for which there
    was no slot in the batch yet: probes first, then in the order in which they came.
    """

    statuses = (RequestStatus.WAITING,)

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def peek(self) -> Request:
        """Return the first one. Raises IndexError if there is none."""
        return self._requests[0]

    def add(self, request: Request) -> None:
        request.entered(self)
        if request.is_probe:
            self._requests.appendleft(request)
        else:
            self._requests.append(request)

    def remove_request(self, request: Request) -> None:
        self._requests.remove(request)
        request.left()
