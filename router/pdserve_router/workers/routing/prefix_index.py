"""Which workers have which blocks cached: one index of block hashes for all of them."""

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry

from pdserve_common.metrics.prefix_index import PrefixIndexMetrics
from pdserve_common.runtime import Runtime
from pdserve_common.tokens.block_hash import extend_block_hashes, truncated_hashes
from pdserve_common.types.engine import EngineCoreRequest

# Some 90 MB.
MAX_BLOCKS = 1 << 20
# Parts of the index. What has to look at all blocks looks at one part at a time, some 50 us.
NUM_SHARDS = 4096

# So many workers are looked at if the first ones cannot take a request.
MAX_LOOKED_AT = 64

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
        runtime: Runtime,
        role_of: Callable[[WorkerT], Hashable] = lambda worker: None,
        max_blocks: int = MAX_BLOCKS,
        num_shards: int = NUM_SHARDS,
        metrics: PrefixIndexMetrics | None = None,
    ) -> None:
        """`num_shards` is a power of two, at most `max_blocks`."""
        self.metrics = metrics or PrefixIndexMetrics(CollectorRegistry())
        self.metrics.blocks.set_function(self.__len__)
        self.clock = runtime.now
        self.rng = runtime.rng
        self._role_of = role_of
        self._shards: list[dict[int, int]] = [{} for _ in range(num_shards)]
        self._which = num_shards - 1
        self._max_in_shard = max_blocks // num_shards
        self._bits: dict[WorkerT, int] = {}
        # By the number of their bit; a forgotten worker's place is taken by another one in time.
        self._workers: list[WorkerT] = []
        # All bits in use, and those of each role.
        self._live = 0
        self._roles: dict[Hashable, int] = {}
        # Bits that masks may still have of workers that are forgotten, those that the sweep under
        # way takes away, and the shards that it still has to look at.
        self._dead = 0
        self._sweeping = 0
        self._unswept: list[dict[int, int]] = []

    def __len__(self) -> int:
        """Blocks, at whatever worker."""
        return sum(map(len, self._shards))

    # ---- what is cached

    def match(self, hashes: Sequence[int], block_size: int = 1) -> "PrefixMatch[WorkerT]":
        """Return what workers have cached of the prompt of these blocks of `block_size` tokens."""
        return PrefixMatch(self, hashes, block_size)

    def mask(self, block: int) -> int:
        """Return the bits of the workers that have the block, and of some that are forgotten."""
        return self._shards[block & self._which].get(block, 0)

    def bit(self, worker: WorkerT) -> int:
        """Return 0 if it has no blocks."""
        return self._bits.get(worker, 0)

    @property
    def bits(self) -> int:
        """The bits of all workers."""
        return self._live

    def bits_of(self, role: Hashable) -> int:
        """Return the bits of all workers of a role."""
        return self._roles.get(role, 0)

    def workers(self, mask: int) -> Iterator[WorkerT]:
        """Yield those of the mask's bits, from the lowest one."""
        while mask:
            bit = mask & -mask
            yield self._workers[bit.bit_length() - 1]
            mask ^= bit

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
            self._roles[self._role_of(worker)] ^= bit
            self._dead |= bit

    # ---- inside

    def _new_bit(self, worker: WorkerT) -> int:
        used = self._live | self._dead
        bit = ~used & (used + 1)
        number = bit.bit_length() - 1
        self._workers[number : number + 1] = [worker]
        self._bits[worker] = bit
        self._live |= bit
        role = self._role_of(worker)
        self._roles[role] = self._roles.get(role, 0) | bit
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


class PrefixMatch(Generic[WorkerT]):
    """How much of one prompt workers have cached, looked up as far as it is asked for. What is
    stored or removed meanwhile may not be seen.

    A worker that has two blocks of a chain is taken to have those between them, as pools evict
    chains from their end. So few blocks are looked up.
    """

    __slots__ = ("_block_size", "_first", "_found", "_hashes", "_index", "_num_blocks", "_rest")

    def __init__(self, index: PrefixIndex[WorkerT], hashes: Sequence[int], block_size: int) -> None:
        self._index = index
        self._hashes = hashes
        self._block_size = block_size
        # The workers that have the first block.
        self._first = index.mask(hashes[0]) & index.bits if hashes else 0
        # Numbers of leading blocks and the bits of workers that have as many, the longest first:
        # those found by now, and the rest.
        self._found: list[tuple[int, int]] = []
        self._rest = self._longest_first(self._first)
        # By a worker's bit, of those that were asked for before they were found.
        self._num_blocks: dict[int, int] = {}

    def num_tokens(self, worker: WorkerT) -> int:
        """Return how many leading tokens the worker has."""
        bit = self._index.bit(worker) & self._first
        if not bit:
            return 0
        for num, mask in self._found:
            if mask & bit:
                return num * self._block_size
        if bit not in self._num_blocks:
            self._num_blocks[bit], _ = next(self._longest_first(bit), (0, 0))
        return self._num_blocks[bit] * self._block_size

    def longest(
        self, role: Hashable, num: int, accepts: Callable[[WorkerT], bool], *, above: int = 0
    ) -> list[WorkerT]:
        """Return the `num` of a role that are accepted and have most, most first, of equal ones
        any; fewer if no more have more than `above` tokens, or many are not accepted.
        """
        began = self._index.clock()
        asked = islice(self._holders(role, above), MAX_LOOKED_AT)
        chosen = list(islice(filter(accepts, asked), num))
        self._index.metrics.lookup.observe(self._index.clock() - began)
        return chosen

    def _holders(self, role: Hashable, above: int) -> Iterator[WorkerT]:
        of_role = self._index.bits_of(role)
        for num, workers in self._groups():
            if num * self._block_size <= above:
                return
            if mask := workers & of_role:
                begin = -_random_bit(mask, self._index.rng)
                yield from self._index.workers(mask & begin)
                yield from self._index.workers(mask & ~begin)

    def _groups(self) -> Iterator[tuple[int, int]]:
        """Yield all of `_found`, and find more as long as they are asked for."""
        yield from self._found
        for group in self._rest:
            self._found.append(group)
            yield group

    def _longest_first(self, workers: int) -> Iterator[tuple[int, int]]:
        """Yield numbers of leading blocks, and the bits of those of `workers` that have as many."""
        hashes, mask_of = self._hashes, self._index.mask
        end = len(hashes)
        # Blocks and who has them, each farther on than those before. Nobody is left that has `end`.
        stack = [(0, workers)]
        while stack:
            block, holders = stack[-1]
            holders &= workers
            if not holders:
                stack.pop()
            elif end - block == 1:
                yield end, holders
                workers ^= holders
                end = block
            else:
                middle = (block + end) // 2
                if some := holders & mask_of(hashes[middle]):
                    stack.append((middle, some))
                else:
                    end = middle


def _random_bit(mask: int, rng: random.Random) -> int:
    """Return one bit of the mask, each as likely."""
    while mask & (mask - 1):
        mask = mask & rng.getrandbits(mask.bit_length()) or mask
    return mask


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
