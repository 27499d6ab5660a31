"""The batch: requests that have a seat."""

import itertools
from collections.abc import Collection, Iterator

from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.request.request import Request


class Running(Collection[Request]):
    """Requests in the batch: probes first, then in the order in which they joined."""

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

    def __contains__(self, request: object) -> bool:
        return request in self._requests

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
        if request.is_probe:
            self._requests.insert(0, request)
        else:
            self._requests.append(request)
        self.num_common_prefix_blocks = ()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
        self.num_common_prefix_blocks = ()
