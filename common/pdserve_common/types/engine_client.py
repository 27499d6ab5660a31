"""What a service needs of an engine. The engine package implements it; services only see this."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from pdserve_common.processes.calls import Call, ResultT
from pdserve_common.types.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    SchedulerStats,
)
from pdserve_common.types.kv import KVCacheEvents

OutputsCallback = Callable[[EngineCoreOutputs], None]
KVCacheEventsCallback = Callable[[KVCacheEvents], None]
# The bytes of tensors, row by row, by their content hash.
Tensors = Mapping[bytes, bytes]
NO_TENSORS: Tensors = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What its operator has asked of an engine."""

    # Requests are taken and wait; asleep includes paused.
    is_paused: bool = False
    # None: awake.
    sleep_level: int | None = None


class EngineClient(Protocol):
    """The front side of one engine. All methods are called on the event loop's thread; those that
    are not async return at once.

    Requests are FIFO per client. Every accepted request gets exactly one terminal output, also
    when it is aborted, but for one that is superseded by a higher attempt of its own client, of
    which no output comes any more, and all that are left when the engine dies.
    """

    @property
    def info(self) -> EngineInfo:
        """What the engine is and can take."""

    def register_client(self, on_outputs: OutputsCallback) -> int:
        """Add a front end and return its client_index. `on_outputs` runs on the event loop's
        thread.
        """

    def unregister_client(self, client_index: int) -> None:
        """Abort the client's requests and forget it; `on_outputs` is not called any more."""

    def record_kv_cache_events(self, on_events: KVCacheEventsCallback) -> None:
        """Call `on_events` on the event loop's thread, before the outputs of a step, with what has
        changed in what the pool has cached; at first with all of it. A later call supersedes it.
        """

    def add_request(self, request: EngineCoreRequest, tensors: Tensors = NO_TENSORS) -> None:
        """Queue a validated request, which owns the `tensors` it refers to until it ends. One of
        the same client and id, at a lower attempt, is superseded. Raises InvalidRequestError if
        the id is in use otherwise, DrainingError or EngineDeadError if the engine takes no more.
        """

    def abort_requests(self, client_index: int, request_ids: Sequence[str]) -> None:
        """End requests of a client; unknown ids are ignored."""

    def stats(self) -> SchedulerStats:
        """The load after the last step."""

    def step_seq(self) -> int:
        """Number of engine steps so far: proof of life for heartbeats."""

    def is_alive(self) -> bool:
        """False once the engine has died."""

    def problem(self) -> str | None:
        """Why the process has to be restarted (a dead engine, a broken transport), or None."""

    def state(self) -> EngineState:
        """What the last verb has left."""

    async def call(self, verb: Call[ResultT]) -> ResultT:
        """Carry out one of VERBS between two steps; never hangs.

        Raises FailedPreconditionError when the engine's state does not allow it, which includes
        another verb under way and a drain, DeadlineExceededError when it takes too long, and
        EngineDeadError. A verb that fails or is cancelled leaves the engine as it was, but for what
        it has aborted; one that is being carried out when its caller gives up comes to its end:
        `state` tells.
        """

    async def drain(self, timeout_s: float) -> int:
        """Take nothing new, wait for requests and KV sessions to end. Return how many requests were
        handed back because that took longer: they have ended with a retryable DrainingError, or
        their KV session has; their tokens so far are delivered. A pause ends; an engine that sleeps
        hands back what waits. May be called again meanwhile.
        """

    async def close(self) -> None:
        """Stop the engine. `problem` says afterwards if that was not possible."""
