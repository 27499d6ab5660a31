"""What an index of cached blocks knows of a prompt."""

from collections.abc import Sequence

from pdserve_router.workers.routing.prefix_index import PrefixIndex, WorkerT


def num_cached(index: PrefixIndex[WorkerT], hashes: Sequence[int]) -> dict[WorkerT, int]:
    """Return how many leading blocks of it workers have; those with none are left out."""
    match = index.match(hashes)
    holders = index.workers(index.mask(hashes[0]) if hashes else 0)
    return {worker: num for worker in holders if (num := match.num_tokens(worker))}
