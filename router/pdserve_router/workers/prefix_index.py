"""Which workers have which blocks cached: one index of block hashes for all of them."""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry

from pdserve_common.block_hash import extend_block_hashes, truncated_hashes
from pdserve_common.engine_types import EngineCoreRequest
from pdserve_common.prefix_index_metrics import PrefixIndexMetrics

# Some 90 MB.
MAX_BLOCKS = 1 << 20
# Parts of the index. What has to look at all blocks looks at one part at a time, some 50 us.
NUM_SHARDS = 4096

_BITS = bytes.maketrans(b"01", b"\0\1")

WorkerT = TypeVar("WorkerT", bound=Hashable)


class PrefixIndex(Generic[WorkerT]):
    """From block hash (`truncated_hashes`) to a mask of workers, each of which has a bit.

    A worker that is forgotten loses its bit at once; the masks are rid of it bit by bit, a shard
    for each call that stores, and only then another worker gets it. Of more blocks than
    fit those go first that were stored longest ago.
    """

    def __init__(
        self,
        *,
        max_blocks: int = MAX_BLOCKS,
        num_shards: int = NUM_SHARDS,
        metrics: PrefixIndexMetrics | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`num_shards` is a power of two, at most `max_blocks`."""
        self.metrics = metrics or PrefixIndexMetrics(CollectorRegistry())
        self.metrics.blocks.set_function(self.__len__)
        self._clock = clock
        self._shards: list[dict[int, int]] = [{} for _ in range(num_shards)]
        self._which = num_shards - 1
        self._max_in_shard = max_blocks // num_shards
        self._bits: dict[WorkerT, int] = {}
        # By the number of their bit; a forgotten worker's place is taken by another one in time.
        self._workers: list[WorkerT] = []
        # All bits in use.
        self._live = 0
        # Bits that masks may still have of workers that are forgotten, those that the sweep under
        # way takes away, and the shards that it still has to look at.
        self._dead = 0
        self._sweeping = 0
        self._unswept: list[dict[int, int]] = []

    def __len__(self) -> int:
        """Blocks, at whatever worker."""
        return sum(map(len, self._shards))

    # ---- what is cached

    def num_cached(self, hashes: Sequence[int]) -> Mapping[WorkerT, int]:
        """Return how many leading blocks of the prompt each worker has; those with none are left
        out.

        A worker that has two blocks of a chain is taken to have those between them, as pools evict
        chains from their end. So a few blocks are looked up for each length that occurs.
        """
        began = self._clock()
        lengths = self._lengths(hashes) if hashes else {}
        self.metrics.lookup.observe(self._clock() - began)
        return lengths

    def _lengths(self, hashes: Sequence[int]) -> dict[WorkerT, int]:
        shards, which = self._shards, self._which
        lengths: dict[WorkerT, int] = {}
        alive = self._mask(hashes[0]) & self._live
        known = 0  # The last block that all in `alive` have.
        end = len(hashes) - 1
        mask = self._mask(hashes[end])
        # Further ones that were looked up, and their masks.
        ends: list[tuple[int, int]] = []
        while alive:
            lost = alive & ~mask
            if lost and end > known + 1:
                ends.append((end, mask))
                end = (known + end) // 2
                block = hashes[end]
                mask = shards[block & which].get(block, 0)
                continue
            if lost:
                lengths.update(dict.fromkeys(self._of(lost), end))
                alive ^= lost
            known = end
            if not ends:
                break
            end, mask = ends.pop()
        lengths.update(dict.fromkeys(self._of(alive), len(hashes)))
        return lengths

    # ---- what workers say

    def stored(self, worker: WorkerT, hashes: Iterable[int]) -> None:
        """The worker has these blocks now."""
        bit = self._bits.get(worker) or self._new_bit(worker)
        for block in hashes:
            shard = self._shards[block & self._which]
            # At the end, as the last to be evicted.
            shard[block] = shard.pop(block, 0) | bit
            if len(shard) > self._max_in_shard:
                del shard[next(iter(shard))]
                self.metrics.evictions.inc()
        self._sweep()

    def removed(self, worker: WorkerT, hashes: Iterable[int]) -> None:
        """The worker does not have these blocks any more."""
        bit = self._bits.get(worker, 0)
        for block in hashes:
            shard = self._shards[block & self._which]
            mask = shard.get(block, 0)
            if mask & bit:
                _set(shard, block, mask & self._live & ~bit)

    def cleared(self, worker: WorkerT) -> None:
        """The worker has no blocks any more."""
        self.forget(worker)

    def forget(self, worker: WorkerT) -> None:
        """Nothing is known of the worker any more. Takes no longer with more blocks."""
        bit = self._bits.pop(worker, 0)
        if bit:
            self._live ^= bit
            self._dead |= bit

    # ---- inside

    def _mask(self, block: int) -> int:
        return self._shards[block & self._which].get(block, 0)

    def _of(self, mask: int) -> Iterable[WorkerT]:
        bits = f"{mask:b}".encode().translate(_BITS)
        return compress(self._workers, reversed(bits))

    def _new_bit(self, worker: WorkerT) -> int:
        used = self._live | self._dead
        bit = ~used & (used + 1)
        number = bit.bit_length() - 1
        self._workers[number : number + 1] = [worker]
        self._bits[worker] = bit
        self._live |= bit
        return bit

    def _sweep(self) -> None:
        """Take the bits of forgotten workers out of another shard."""
        if not self._dead:
            return
        if not self._unswept:
            self._dead &= ~self._sweeping
            self._sweeping = self._dead
            self._unswept = list(self._shards) if self._dead else []
            return
        shard = self._unswept.pop()
        for block, mask in list(shard.items()):
            if mask & self._sweeping:
                _set(shard, block, mask & ~self._sweeping)


def _set(shard: dict[int, int], block: int, mask: int) -> None:
    if mask:
        shard[block] = mask
    else:
        del shard[block]


def prefix_hashes(request: EngineCoreRequest, block_size: int) -> tuple[int, ...]:
    """Return the hashes of the full blocks of the request's known tokens, as workers name them;
    none of blocks of size 0.
    """
    if not block_size:
        return ()
    hashes: list[bytes] = []
    extend_block_hashes(hashes, request, known_token_ids(request), block_size)
    return truncated_hashes(hashes)


def known_token_ids(request: EngineCoreRequest) -> tuple[int, ...]:
    """Return the tokens whose KV a worker needs before it can go on."""
    return request.prompt_token_ids + request.resume_output_token_ids


def num_known_tokens(request: EngineCoreRequest) -> int:
    """Return how many they are, without a copy."""
    return len(request.prompt_token_ids) + len(request.resume_output_token_ids)
