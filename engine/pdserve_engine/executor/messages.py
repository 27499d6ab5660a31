"""What crosses between an engine and its ranks: steps, calls, and their answers.

A message of the engine has a number; the answer refers to it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pdserve_common.engine_types import EngineError
from pdserve_common.errors import PdserveError, error_from_engine
from pdserve_common.verbs import Call
from pdserve_engine.config import EngineConfig
from pdserve_engine.core.executor import ExecutedStep, LoadedModel
from pdserve_engine.frames import Answer, FrameCodec
from pdserve_engine.grammar.native import CompiledGrammar
from pdserve_engine.request.sched_output import SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Where a rank finds the others: in memory that it has inherited, or by a file."""

    rank: int
    size: int
    # The descriptor of a SharedGroup's memory, and the bytes of a slot; None: there is none.
    memory_fd: int | None = None
    slot_bytes: int = 0
    store_path: str = ""


# ---- to a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRank(Call[LoadedModel]):
    """The first message. `name` begins the names of traces."""

    config: EngineConfig
    name: str
    place: GroupPlace
    log_level: str


@dataclass(frozen=True, slots=True)
class DetermineNumBlocks(Call[int]):
    """As Executor.determine_num_blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePool(Call[None]):
    """As Executor.make_pool."""

    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class SleepRank(Call[int]):
    """As Executor.sleep."""

    level: int


@dataclass(frozen=True, slots=True)
class RestoreWeights(Call[None]):
    """As Executor.restore_weights."""


@dataclass(frozen=True, slots=True)
class RestoreKVCache(Call[None]):
    """As Executor.restore_kv_cache."""


@dataclass(frozen=True, slots=True)
class StartProfile(Call[None]):
    """As Executor.start_profile."""


@dataclass(frozen=True, slots=True)
class StopProfile(Call[str]):
    """As Executor.stop_profile."""


@dataclass(frozen=True, slots=True)
class BlockChecksums(Call[tuple[int, ...]]):
    """As Executor.block_checksums."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Poison:
    """As Executor.poison; there is no answer."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recover:
    """As Executor.recover; there is no answer."""


@dataclass(frozen=True, slots=True)
class StopRank(Call[bool]):
    """As Executor.stop and, if that is True, Executor.close. The process ends behind the answer."""


# ---- from a rank


@dataclass(frozen=True, slots=True)
class Failed:
    """What was asked for has raised: which kind of exception, and what it says."""

    kind: Literal["value", "os", "pdserve", "other"]
    error: EngineError

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        if isinstance(error, PdserveError):
            return cls("pdserve", error.to_engine_error())
        plain = PdserveError(str(error)).to_engine_error()
        if isinstance(error, ValueError):
            return cls("value", plain)
        if isinstance(error, OSError):
            return cls("os", plain)
        return cls("other", plain)

    def to_exception(self) -> Exception:
        if self.kind == "pdserve":
            return error_from_engine(self.error)
        kinds: dict[str, Callable[[str], Exception]] = {"value": ValueError, "os": OSError}
        return kinds.get(self.kind, RuntimeError)(self.error.message)


RankCall = (
    LoadRank | DetermineNumBlocks | MakePool | SleepRank | RestoreWeights | RestoreKVCache
    | StartProfile | StopProfile | BlockChecksums | StopRank
)  # fmt: skip
Message = Call[Any] | SchedulerOutput | Poison | Recover | ExecutedStep | Answer | Failed

MESSAGES: tuple[type, ...] = (
    LoadRank, DetermineNumBlocks, MakePool, SleepRank, RestoreWeights, RestoreKVCache,
    StartProfile, StopProfile, BlockChecksums, StopRank,
    SchedulerOutput, Poison, Recover, ExecutedStep, Answer, Failed,
)  # fmt: skip


def make_codec(read_grammar: Callable[[str], CompiledGrammar]) -> "FrameCodec[Message]":
    """Return the frames' codec; `read_grammar` makes a grammar of its text, with the tokenizer that
    this end knows.
    """

    def decode(cls: type, value: Any) -> Any:
        if cls is CompiledGrammar:
            return read_grammar(value)
        raise NotImplementedError(f"{cls} does not cross between processes")

    return FrameCodec(MESSAGES, enc_hook=_encode, dec_hook=decode)


def _encode(value: Any) -> Any:
    if isinstance(value, CompiledGrammar):
        return value.serialize()
    raise NotImplementedError(f"{type(value)} does not cross between processes")
