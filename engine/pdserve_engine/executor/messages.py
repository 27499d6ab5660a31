"""What crosses between an engine and its ranks: steps, calls, and their answers.

A message of the engine has a number; the answer refers to it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from pdserve_common.processes.calls import Answer, Call, Failed
from pdserve_common.processes.frames import FrameCodec
from pdserve_common.types.kv import KVRankEndpoint
from pdserve_engine.config import EngineConfig
from pdserve_engine.core.executor import ExecutedStep, LoadedModel
from pdserve_engine.grammar.native import CompiledGrammar
from pdserve_engine.kv_transfer.base import KVIdentity, ReadResult
from pdserve_engine.kv_transfer.transport.shards import KVPeer
from pdserve_engine.request.sched_output import SchedulerOutput
from pdserve_engine.runner.rank_calls import RANK_CALLS


@dataclass(frozen=True, slots=True)
class GroupRank:
    """Where some processes find each other: in memory that they have inherited, or by a file."""

    rank: int
    size: int
    # The descriptor of a SharedGroup's memory, and the bytes of a slot; None: there is none.
    memory_fd: int | None
    slot_bytes: int
    store_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """Which rank a process is, and the groups that it is in."""

    rank: int
    stage: int
    num_stages: int
    # The ranks of its stage; None: it is alone.
    tensor_parallel: GroupRank | None
    # It and the stage before, it and the stage behind.
    before: GroupRank | None
    after: GroupRank | None


# ---- to a rank


@dataclass(frozen=True, slots=True)
class DescribeBuild(Call[dict[str, str]]):
    """The first message: what does the rank run (`this_build`)? Another version answers, too."""


class LoadedRank(NamedTuple):
    """What a rank has loaded, and the hash of the model that it has found."""

    model: LoadedModel
    compatibility_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRank(Call[LoadedRank]):
    """The second message. `name` begins the names of traces."""

    config: EngineConfig
    name: str
    spec: RankSpec
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
class Recover:
    """As Executor.recover; there is no answer."""


@dataclass(frozen=True, slots=True)
class StopRank(Call[bool]):
    """As Executor.stop."""


@dataclass(frozen=True, slots=True)
class CloseRank:
    """The process ends; there is no answer."""


# ---- a rank's transport; `peer` is the key that the engine has for one of its peers


@dataclass(frozen=True, slots=True)
class OpenTransport(Call[KVRankEndpoint]):
    """Register the rank's pool with a transport, which has to prove that it moves bytes."""

    identity: KVIdentity


@dataclass(frozen=True, slots=True)
class CloseTransport(Call[None]):
    """As RankTransport.close."""


@dataclass(frozen=True, slots=True)
class ExpectPeer:
    """As RankTransport.expect_peer."""


@dataclass(frozen=True, slots=True)
class SetExporting:
    """As RankTransport.set_exporting."""

    is_exporting: bool


@dataclass(frozen=True, slots=True)
class PollSoon:
    """As RankTransport.poll_soon."""


@dataclass(frozen=True, slots=True)
class AddPeer:
    """As RankTransport.add_peer."""

    key: str
    peer: KVPeer


@dataclass(frozen=True, slots=True)
class RemovePeer:
    """As RankTransport.remove_peer."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """As RankTransport.read; ReadStalled and ReadEnded have its number."""

    number: int
    key: str
    remote_block_ids: tuple[int, ...]
    local_block_ids: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PeerLost:
    """What add_peer was told to call."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReadStalled:
    """What read was told to call."""

    number: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """What read was told to call."""

    number: int
    result: ReadResult


@dataclass(frozen=True, slots=True)
class TransportFailed:
    """RankTransport.failure has become this."""

    reason: str


# ---- adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAdapterResult:
    """What a rank has read: as PackedAdapter, or why it cannot be served."""

    digest: str = ""
    rank: int = 0
    failure: Failed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAdapter(Call[ReadAdapterResult]):
    """As AdapterStore.read; the commands that follow name it by its number."""

    number: int
    folder: str


@dataclass(frozen=True, slots=True)
class AddAdapter:
    """As AdapterStore.add, with what ReadAdapter of that number has brought; there is no answer."""

    number: int


@dataclass(frozen=True, slots=True)
class DiscardAdapter:
    """As AdapterStore.discard; no-op for what has been added. There is no answer."""

    number: int


@dataclass(frozen=True, slots=True)
class RemoveAdapter:
    """As AdapterStore.remove; there is no answer."""

    digest: str


# Makes a grammar of its text and first_mask_s, with the tokenizer that this end knows.
ReadGrammar = Callable[[str, float], CompiledGrammar]
TransportCommand = ExpectPeer | SetExporting | PollSoon | AddPeer | RemovePeer | Read
AdapterCommand = AddAdapter | DiscardAdapter | RemoveAdapter
TransportEvent = PeerLost | ReadStalled | ReadEnded | TransportFailed
_OneWay = (
    SchedulerOutput | Recover | CloseRank | AdapterCommand | TransportCommand
    | ExecutedStep | TransportEvent
)  # fmt: skip
Message = Answer | Failed | _OneWay | Call[Any]

# Their places are their numbers. The first three have them in all versions.
MESSAGES: tuple[type, ...] = (
    DescribeBuild, Answer, Failed, *get_args(_OneWay),
    LoadRank, DetermineNumBlocks, MakePool, ReadAdapter, OpenTransport, CloseTransport, StopRank,
    *RANK_CALLS,
)  # fmt: skip


def make_codec(read_grammar: ReadGrammar) -> "FrameCodec[Message]":
    """Return the frames' codec."""

    def decode(cls: type, value: Any) -> Any:
        if cls is CompiledGrammar:
            return read_grammar(*value)
        raise NotImplementedError(f"{cls} does not cross between processes")

    return FrameCodec(MESSAGES, enc_hook=_encode, dec_hook=decode)


def _encode(value: Any) -> Any:
    if isinstance(value, CompiledGrammar):
        return value.serialize(), value.first_mask_s
    raise NotImplementedError(f"{type(value)} does not cross between processes")
