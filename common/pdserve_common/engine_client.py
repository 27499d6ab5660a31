"""What a service needs of an engine. The engine package implements it; services only see this."""

from collections.abc import Callable, Sequence
from typing import Protocol

from pdserve_common.engine_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    SchedulerStats,
)

OutputsCallback = Callable[[EngineCoreOutputs], None]


class EngineClient(Protocol):
    """The front side of one engine. All methods are called on the event loop's thread and return
    at once.

    Requests are FIFO per client. Every accepted request gets exactly one terminal output, also
    when it is aborted or the engine dies.
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

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a validated request. Raises DrainingError or EngineDeadError if the engine takes
        no more.
        """

    def has_request(self, request_id: str) -> bool:
        """Is a request of this id, of any client, not finished?"""

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

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, wait for requests and KV sessions to end; False if some were aborted
        at the timeout.
        """

    async def close(self) -> None:
        """Stop the engine."""
