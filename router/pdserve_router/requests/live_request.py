"""What an API holds of a request that was accepted: its outputs, and the means to end it early."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from pdserve_common.errors import DeadlineExceededError, PdserveError, RequestAbortedError
from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import EngineError, FinishReason
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.output.outputs import Ending, RequestOutput, RequestOutputCollector
from pdserve_router.requests.records.request_metrics import RequestMetrics
from pdserve_router.requests.redrive import RedriveQueue
from pdserve_router.text.tokenizer import Tokenizer
from pdserve_router.workers.model_version import ModelVersion
from pdserve_router.workers.routing.route_chooser import AnyRoute

if TYPE_CHECKING:
    from pdserve_common.observability.tracing import Span


class LiveRequest(ABC):
    """A request on its workers. Iterate over it for its outputs, of which exactly one, the last,
    is `finished`. Use it as a context manager: leaving ends the request. One reader.
    """

    def __init__(
        self, processed: ProcessedInput, services: "Services", span: "Span | None" = None
    ) -> None:
        self.core_request = processed.core_request
        # That its attempts' are below; None: it is not traced.
        self.span = span
        # As RoutingPolicy has it.
        self.session = processed.session
        self._metrics = services.metrics
        self._redrives = services.redrives
        self._runtime = services.runtime
        self._on_tokens = services.on_tokens
        self._on_end = services.on_end
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._is_read = False

    def __enter__(self) -> "LiveRequest":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def __aiter__(self) -> "LiveRequest":
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for what is new."""
        if self._is_read:
            raise StopAsyncIteration
        output = await self._next_output()
        self._is_read = output.finished
        return output

    def abort(self) -> None:
        """The client is gone: end it on every worker. Does nothing after the end."""
        error = RequestAbortedError("the client cancelled the request")
        self.cut(FinishReason.ABORT, error.to_engine_error())

    def fail(self, error: PdserveError) -> None:
        """End it with an error on every worker. Does nothing after the end."""
        self.cut(FinishReason.ERROR, error.to_engine_error())

    def on_defect(self) -> None:
        """End it with an error that is this process's fault."""
        self.fail(PdserveError("internal error of the router, see its log"))

    @property
    @abstractmethod
    def ending(self) -> Ending | None:
        """How it ended; None while it runs."""

    @property
    @abstractmethod
    def route(self) -> AnyRoute:
        """Of the last attempt, and of the first completion."""

    @property
    def collector(self) -> RequestOutputCollector | None:
        """What is read, if that is one completion."""
        return None

    def share_version(self) -> Collection[ModelVersion]:
        """Return where the other parts of its call have to come from, and come from there itself
        if it is sent again: vectors are compared, so one call's are of the same weights. Empty: any
        will do.
        """
        return ()

    @abstractmethod
    def start(self) -> None:
        """Send it to its workers. It may end at once."""

    @abstractmethod
    def cut(self, finish_reason: FinishReason, error: EngineError) -> None:
        """End it early on every worker. Does nothing after the end."""

    @abstractmethod
    def measure(self) -> RequestMetrics:
        """Return where its time went so far."""

    @abstractmethod
    async def _next_output(self) -> RequestOutput:
        """Wait for output and return all of it."""

    def _watch_deadline(self) -> None:
        """Fail at the deadline, if there is one, unless the timer is stopped before."""
        if self.core_request.deadline is not None:
            self._deadline_timer = self._runtime.call_later(
                max(0.0, self.core_request.deadline - self._runtime.now()), self._on_deadline
            )

    def _stop_deadline(self) -> None:
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()

    def _on_deadline(self) -> None:
        age = self._runtime.now() - self.core_request.arrival_time
        self.fail(DeadlineExceededError(f"the deadline passed {age:.3f} s after the arrival"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What live requests share. `on_tokens` is called with the number of new tokens, `on_end`
    once.
    """

    tokenizer: Tokenizer
    metrics: RouterMetrics
    redrives: RedriveQueue
    runtime: Runtime
    on_tokens: Callable[[LiveRequest, int], None]
    on_end: Callable[[LiveRequest], None]
