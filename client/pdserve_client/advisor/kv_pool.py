"""A worker's KV blocks: who holds how many, and which beginnings of prompts are cached."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Holding:
    """What one request holds: cached beginnings that others may hold too, and blocks of its own."""

    keys: list[int] = field(default_factory=list)
    num_own: int = 0


class KVPool:
    """Counts blocks. A key stands for `key_blocks` blocks of a prompt's beginning. What nobody
    holds stays cached until its blocks are needed, the one used last the longest.
    """

    def __init__(self, num_blocks: int, block_size: int, unit_tokens: int) -> None:
        """`unit_tokens`: what an entry of a trace's prefixes stands for. Raises ValueError."""
        larger, smaller = max(block_size, unit_tokens), min(block_size, unit_tokens)
        if larger % smaller:
            raise ValueError(
                f"the trace's prefixes have units of {unit_tokens} tokens, the workers blocks of "
                f"{block_size}: one must be a multiple of the other"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._units_in_key = max(1, block_size // unit_tokens)
        self._key_tokens = larger
        self._key_blocks = larger // block_size
        self._num_own = 0
        # How many hold each key, and the keys that nobody holds, the one used last at the end.
        self._num_holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_held(self) -> int:
        return self._num_own + len(self._num_holders) * self._key_blocks

    @property
    def num_cached(self) -> int:
        return len(self._cached) * self._key_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones among them."""
        return self.num_blocks - self.num_held

    def keys(self, prefix: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Return the keys of a prompt's whole blocks that others may have too."""
        num_units = num_tokens // self._key_tokens * self._units_in_key
        return tuple(prefix[self._units_in_key - 1 : num_units : self._units_in_key])

    def num_cached_keys(self, keys: Sequence[int], max_tokens: int) -> int:
        """Return how many leading keys are here, of at most `max_tokens` tokens."""
        num = 0
        for key in keys[: max_tokens // self._key_tokens]:
            if key not in self._num_holders and key not in self._cached:
                break
            num += 1
        return num

    def num_cached_tokens(self, keys: Sequence[int], max_tokens: int) -> int:
        """The same in tokens."""
        return self.num_cached_keys(keys, max_tokens) * self._key_tokens

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def blocks_of(self, holding: Holding) -> int:
        return len(holding.keys) * self._key_blocks + holding.num_own

    def num_needed(self, num_tokens: int, cached: Sequence[int]) -> int:
        """Return how many free blocks a new request takes that finds `cached` keys."""
        num_held = sum(key in self._num_holders for key in cached)
        return self.blocks_for(num_tokens) - num_held * self._key_blocks

    def take_cached(self, holding: Holding, cached: Sequence[int]) -> None:
        """Hold keys that are here."""
        for key in cached:
            self._cached.pop(key, None)
            self._num_holders[key] = self._num_holders.get(key, 0) + 1
            holding.keys.append(key)

    def grow(self, holding: Holding, num_tokens: int) -> bool:
        """Hold blocks for the first `num_tokens` tokens; False if there are too few."""
        num_new = self.blocks_for(num_tokens) - self.blocks_of(holding)
        if num_new > self.num_free:
            return False
        if num_new > 0:
            holding.num_own += num_new
            self._num_own += num_new
            self._evict()
        return True

    def publish(self, holding: Holding, keys: Sequence[int]) -> None:
        """A prompt is here: others find its beginning. Who computed what is here already keeps
        blocks of its own.
        """
        for key in keys[len(holding.keys) :]:
            if key in self._num_holders or key in self._cached:
                continue
            self._num_holders[key] = 1
            holding.keys.append(key)
            holding.num_own -= self._key_blocks
            self._num_own -= self._key_blocks

    def free(self, holding: Holding) -> None:
        """Give all back. Ends of prompts are forgotten before their beginnings."""
        self._num_own -= holding.num_own
        for key in reversed(holding.keys):
            self._num_holders[key] -= 1
            if not self._num_holders[key]:
                del self._num_holders[key]
                self._cached[key] = None
        holding.keys.clear()
        holding.num_own = 0

    def _evict(self) -> None:
        while self.num_held + self.num_cached > self.num_blocks:
            self._cached.popitem(last=False)
