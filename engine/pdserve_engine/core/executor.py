"""The seam between an engine and what runs its model, in however many processes."""

from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from pdserve_common.processes.calls import Call, ResultT
from pdserve_engine.kv_transfer.base import KVIdentity, RankTransport
from pdserve_engine.request.sched_output import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from pdserve_engine.kv.block_copier import BlockCopier

T_co = TypeVar("T_co", covariant=True)


class ExecutedStep(NamedTuple):
    """What a step brought, and the seconds it took where the model runs."""

    output: ModelRunnerOutput
    duration_s: float


class LoadedModel(NamedTuple):
    """What there is to know of a model that only its weights and its device tell."""

    is_row_independent: bool
    numerics_id: str
    # Name of the kernel set.
    kernels: str
    # The largest that an adapter's file of weights may be; 0: it has no adapters.
    max_adapter_file_bytes: int


class PackedAdapter(NamedTuple):
    """A LoRA adapter as the model's steps take it."""

    digest: str
    # The largest of its linears.
    rank: int
    weights: Any


class RankCall(Call[ResultT]):
    """What all ranks are asked to do: the arguments, and how a rank of `runner/rank.py` does it."""

    __slots__ = ()

    @abstractmethod
    def run(self, rank: Any) -> ResultT: ...


class Pending(Protocol[T_co]):
    """What comes of a step, or of a call behind steps: a Future, or what the thread that waits
    reads itself. Only one thread waits.
    """

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for it, and return it or raise the exception. Raises TimeoutError."""
        ...

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for it, and return the exception, if there is one. Raises TimeoutError."""
        ...


class AdapterStore(Protocol):
    """The LoRA adapters that steps can run with. Only the engine thread calls it."""

    def read(self, folder: Path) -> "Future[PackedAdapter]":
        """Read and pack a folder on a thread of its own, while steps go on; `discard` has to
        follow. The future holds LoraError if it is no adapter of the model.
        """
        ...

    def add(self, adapter: PackedAdapter) -> None:
        """Let steps that are submitted from now on run with it."""
        ...

    def discard(self, reading: "Future[PackedAdapter]") -> None:
        """Forget what `read` brings, or will have brought, unless it has been added."""
        ...

    def remove(self, digest: str) -> None:
        """Forget one that no further step runs with; those in flight may."""
        ...

    def close(self) -> None:
        """Wait for what is read, for a while."""
        ...


class Executor(Protocol):
    """The only holder of model and KV pool. The engine thread calls it, before that the one that
    loads; what gives memory back or takes it only while no step is in flight.
    """

    # ---- loading, in this order

    def load(self) -> LoadedModel:
        """Read the weights; takes seconds to minutes. Raises ModelError."""
        ...

    def determine_num_blocks(self) -> int:
        """Warm the model up with the largest step; return how many blocks the pool may have.
        Raises ValueError, with the numbers, if there is no room.
        """
        ...

    def make_pool(self, num_blocks: int, *, max_model_len: int) -> None:
        """Allocate the pool, zeroed, and what requests of that many tokens need."""
        ...

    def open_transports(self, identity: KVIdentity) -> Sequence[RankTransport]:
        """Register each rank's pool with a transport of its own, which has to prove that it moves
        bytes. Again after a sleep, when those of before are closed. Raises KVTransferError.
        """
        ...

    @property
    def adapters(self) -> AdapterStore | None:
        """None if it serves none. Not before there is a pool."""
        ...

    def open_block_copier(self) -> "BlockCopier":
        """Return what copies blocks of the pool on a thread of its own. Not before there is a pool,
        and not where several ranks have parts of each block: their config is refused.
        """
        ...

    # ---- steps

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once: one runs, others wait for it."""
        ...

    @property
    def is_pipelined(self) -> bool:
        """Do several steps run at once, each in another part of the model?"""
        ...

    def submit(self, scheduler_output: SchedulerOutput) -> Pending[ExecutedStep]:
        """Run a step behind those in flight. It is over when there is a result: its KV is written.

        The result may be any exception of the model. Steps behind one that failed fail, too, as
        the model lacks what that one would have told it; until `recover`.
        """
        ...

    def recover(self) -> None:
        """Run steps again; all that were in flight when one failed have ended."""
        ...

    def failure(self) -> str | None:
        """Why no step can run any more, or None. Any thread."""
        ...

    # ---- what all ranks do

    def collective_rpc(self, call: RankCall[ResultT]) -> list[ResultT]:
        """Have each rank carry out a call of `runner/rank_calls.py`, beside steps, and return the
        results by rank. Raises what the call raises.
        """
        ...

    def collective_rpc_behind_steps(self, call: RankCall[ResultT]) -> Pending[list[ResultT]]:
        """Do the same behind the steps in flight, and before those that follow."""
        ...

    # ---- tools for tests

    def block_checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """Return for each block one number for each KV head of the whole model, block by block, as
        `KVCache.block_checksums` and `merge_checksums`. Any thread.
        """
        ...

    # ---- the end

    def stop(self) -> bool:
        """End after the steps in flight; False if one of them hangs."""
        ...

    def abort(self) -> None:
        """End what there is: the engine cannot be loaded."""
        ...

    def close(self) -> None:
        """Give the pool's memory back. Stopped, and no transfer is under way."""
        ...
