"""Requests that share the prompt of another one (n > 1): they wait until it is computed, or pulled,
and then hold its blocks together with it.
"""

import itertools
from collections.abc import Iterator, Mapping

from pdserve_common.tokens.block_hash import has_same_prompt
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.request.request import Request, RequestContainer, RequestStatus


class Forks(RequestContainer):
    """Forks whose source's prompt is not computed yet."""

    statuses = (RequestStatus.WAITING,)

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._kv = kv_cache_manager
        self._by_source: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_source.values()))

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(self._by_source.values())

    def num_of(self, source: Request) -> int:
        return len(self._by_source.get(source.request_id, ()))

    def add(self, source: Request, fork: Request) -> None:
        fork.entered(self)
        self._by_source.setdefault(source.request_id, []).append(fork)

    def remove_request(self, request: Request) -> None:
        self._by_source[request.core_request.fork_of or ""].remove(request)
        request.left()

    def take(self, source: Request) -> list[Request]:
        """Return the source's forks, which are not forks any more."""
        forks = self._by_source.pop(source.request_id, [])
        for fork in forks:
            fork.left()
        return forks

    def share(self, source: Request, fork: Request) -> bool:
        """Let the fork hold the full blocks of the source's prompt; False if there are none."""
        # The last token is computed once more, for its logits.
        num_shared = self._kv.fork(source, fork, source.num_prompt_tokens - 1)
        if num_shared:
            fork.progress.found(num_shared)
            fork.num_cached_tokens = num_shared
        return num_shared > 0


def find_source(fork: Request, requests: Mapping[str, Request]) -> Request | None:
    """Return the request whose prompt this one may share, if it is here and really the same."""
    source = requests.get(fork.core_request.fork_of or "")
    if source is None or source is fork or not fork.reads_prefix_cache:
        return None
    is_same_client = source.core_request.client_index == fork.core_request.client_index
    is_same = is_same_client and has_same_prompt(source.core_request, fork.core_request)
    return source if is_same else None
