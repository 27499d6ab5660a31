"""What all ranks of an executor can be asked to do, wherever they are: one class for each call, in
one table, RANK_CALLS.
"""

from dataclasses import dataclass
from typing import Any

from pdserve_engine.core.executor import RankCall
from pdserve_engine.runner.rank import Rank


@dataclass(frozen=True, slots=True)
class SleepRank(RankCall[int]):
    """Give back what a sleep level says, but not the KV pool's memory with `keeps_pool`; the result
    is how many bytes there are more of. No step may be in flight.
    """

    level: int
    keeps_pool: bool = False

    def run(self, rank: Rank) -> int:
        return rank.sleep(self.level, keeps_pool=self.keeps_pool)


@dataclass(frozen=True, slots=True)
class RestoreWeights(RankCall[None]):
    """Take the weights back; no-op if they are there. Raises OSError or ValueError if they cannot
    be read or have changed, RuntimeError for want of memory. No step may be in flight.
    """

    def run(self, rank: Rank) -> None:
        rank.restore_weights()


@dataclass(frozen=True, slots=True)
class RestoreKVCache(RankCall[None]):
    """Take the pool's memory back, zeroed; no-op if it is there. Raises RuntimeError for want of
    memory. No step may be in flight.
    """

    def run(self, rank: Rank) -> None:
        rank.restore_kv_cache()


@dataclass(frozen=True, slots=True)
class StartProfile(RankCall[None]):
    """Record what the model does from now on. Raises FailedPreconditionError."""

    def run(self, rank: Rank) -> None:
        rank.profiler.start()


@dataclass(frozen=True, slots=True)
class StopProfile(RankCall[str]):
    """The result is the trace's path. Raises FailedPreconditionError."""

    def run(self, rank: Rank) -> str:
        return rank.profiler.stop()


@dataclass(frozen=True, slots=True)
class BlockChecksums(RankCall[tuple[int, ...]]):
    """The result is one number for each KV head of the rank, block by block."""

    block_ids: tuple[int, ...]

    def run(self, rank: Rank) -> tuple[int, ...]:
        return rank.kv_cache.block_checksums(self.block_ids)


@dataclass(frozen=True, slots=True)
class Poison(RankCall[None]):
    """Fill free blocks with NaN, for tests: steps may be in flight."""

    block_ids: tuple[int, ...]

    def run(self, rank: Rank) -> None:
        rank.kv_cache.poison(self.block_ids)


RANK_CALLS: tuple[type[RankCall[Any]], ...] = (
    SleepRank, RestoreWeights, RestoreKVCache, StartProfile, StopProfile, BlockChecksums, Poison,
)  # fmt: skip
