"""What the decode workers may have cached of a prompt, as far as this router had them answer it."""

import itertools
from collections import OrderedDict
from collections.abc import Container, Sequence

from pdserve_common.engine_types import EngineCoreRequest
from pdserve_router.workers.worker_client import WorkerClient

# Of each worker; also bounded by the size of its pool.
MAX_BLOCKS = 1 << 16


class PrefixEstimate:
    """Remembers for each decode worker the chained hashes of the blocks of tokens that it had when
    it answered requests, the least recent ones go first. It is an estimate: the worker may have
    evicted them, or have more from other routers. Too high a one has the worker compute a long
    prompt itself, beside its decodes; then it says so, and `forget` corrects it. Too low a one
    costs a handoff that was not needed. Tokens are right either way.
    """

    def __init__(self) -> None:
        self._computed: dict[tuple[WorkerClient, str], OrderedDict[int, None]] = {}

    def num_cached_tokens(
        self, workers: Sequence[WorkerClient], request: EngineCoreRequest
    ) -> dict[WorkerClient, int]:
        """Return how many of the request's known tokens each worker should have, in whole blocks;
        workers that were never attached, or cache nothing, are left out.
        """
        sizes = {
            worker: worker.info.block_size
            for worker in workers
            if worker.info is not None and worker.info.has_prefix_caching
        }
        hashes = {size: _block_hashes(request, size) for size in set(sizes.values())}
        return {
            worker: size
            * _num_leading(hashes[size], self._computed.get((worker, worker.epoch), ()))
            for worker, size in sizes.items()
        }

    def on_computed(self, worker: WorkerClient, request: EngineCoreRequest) -> None:
        """The request's known tokens have been on the worker."""
        if worker.info is None:
            return
        computed = self._computed.setdefault((worker, worker.epoch), OrderedDict())
        # The first block last: without it the others are worth nothing.
        for block in reversed(_block_hashes(request, worker.info.block_size)):
            computed[block] = None
            computed.move_to_end(block)
        while len(computed) > min(worker.info.num_blocks, MAX_BLOCKS):
            computed.popitem(last=False)

    def forget(self, worker: WorkerClient) -> None:
        """The worker had less than it should. What it has dropped is not known: where blocks are
        evicted, those of others that are as old are gone as well.
        """
        self._computed.pop((worker, worker.epoch), None)

    def keep(self, workers: Sequence[WorkerClient]) -> None:
        """Forget all other workers, and what these held before they were restarted."""
        kept = {(worker, worker.epoch) for worker in workers}
        self._computed = {key: each for key, each in self._computed.items() if key in kept}


def known_token_ids(request: EngineCoreRequest) -> tuple[int, ...]:
    """Return the tokens whose KV a worker needs before it can go on."""
    return request.prompt_token_ids + request.resume_output_token_ids


def num_known_tokens(request: EngineCoreRequest) -> int:
    """Return how many they are, without a copy."""
    return len(request.prompt_token_ids) + len(request.resume_output_token_ids)


def _num_leading(hashes: Sequence[int], known: Container[int]) -> int:
    """Return how many of `hashes` are known before the first that is not."""
    return sum(1 for _ in itertools.takewhile(known.__contains__, hashes))


def _block_hashes(request: EngineCoreRequest, block_size: int) -> list[int]:
    """Of each full block, with all before it. Python's hashes do: a collision costs what a wrong
    estimate costs.
    """
    token_ids = known_token_ids(request)
    hashes = []
    parent = hash((request.cache_salt, request.lora_request))
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hash((parent, token_ids[end - block_size : end]))
        hashes.append(parent)
    return hashes
