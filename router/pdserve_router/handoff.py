"""A request's life on its workers: from dispatch on one or two legs to exactly one end."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from types import TracebackType

from pdserve_common.engine_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    ErrorCode,
    FinishReason,
    KVTransferParams,
    KVTransferStats,
    PrefillStats,
)
from pdserve_common.errors import DeadlineExceededError, PdserveError, RequestAbortedError
from pdserve_common.metrics import RouterMetrics
from pdserve_router.output_processor import Ending, RequestOutput, RequestState, Usage
from pdserve_router.request_metrics import RequestMetrics, measure
from pdserve_router.worker_client import OutputCallback, WorkerClient
from pdserve_router.worker_pool import Route

logger = logging.getLogger(__name__)


class Handoff:
    """One accepted request. Both legs get it at once: P computes the prompt and the first token, D
    pulls the KV blocks and goes on. Use it as a context manager: leaving ends the request.
    """

    def __init__(
        self,
        state: RequestState,
        route: Route,
        *,
        metrics: RouterMetrics,
        on_tokens: Callable[[int, int], None],
        on_end: Callable[["Handoff"], None],
    ) -> None:
        self.state = state
        self.route = route
        self._metrics = metrics
        self._on_tokens = on_tokens
        self._on_end = on_end
        self._running: set[WorkerClient] = set()
        self._prefill_stats: PrefillStats | None = None
        self._transfer_stats: KVTransferStats | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._is_read = False

    def __enter__(self) -> "Handoff":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    @property
    def request(self) -> EngineCoreRequest:
        return self.state.request

    def __aiter__(self) -> "Handoff":
        return self

    async def __anext__(self) -> RequestOutput:
        """Return what is new; exactly one output is `finished`, the last. One reader."""
        if self._is_read:
            raise StopAsyncIteration
        output = await self.state.collector.get()
        self._is_read = output.finished
        return output

    def start(self) -> None:
        """Send the legs. Raises NoWorkerError if a worker is gone."""
        prefill, decode = self.route.prefill, self.route.decode
        if prefill is None:
            self._send(decode, self.request, self._on_decode_output)
        else:
            to_decode = dataclasses.replace(_remote(decode), do_remote_decode=True)
            to_prefill = dataclasses.replace(_remote(prefill), do_remote_prefill=True)
            prefill_leg = dataclasses.replace(self.request, kv_transfer_params=to_decode)
            decode_leg = dataclasses.replace(self.request, kv_transfer_params=to_prefill)
            self._send(prefill, prefill_leg, self._on_prefill_output)
            self._send(decode, decode_leg, self._on_decode_output)
        self.state.timeline.dispatched_ns = time.monotonic_ns()
        if self.request.deadline is not None:
            self._deadline_timer = asyncio.get_running_loop().call_later(
                max(0.0, self.request.deadline - time.monotonic()), self._on_deadline
            )

    def abort(self) -> None:
        """The client is gone: end the request on every worker. Does nothing after the end."""
        error = RequestAbortedError("the client cancelled the request").to_engine_error()
        self._end(FinishReason.ABORT, error=error, outcome="aborted")

    def fail(self, error: PdserveError) -> None:
        """End the request with an error. Does nothing after the end."""
        self._end(FinishReason.ERROR, error=error.to_engine_error(), outcome="aborted")

    def _send(
        self, worker: WorkerClient, request: EngineCoreRequest, on_output: OutputCallback
    ) -> None:
        worker.add_request(request, on_output, self._on_defect)
        self._running.add(worker)

    def _on_defect(self) -> None:
        self.fail(PdserveError("internal error of the router, see its log"))

    def _on_deadline(self) -> None:
        age = time.monotonic() - self.request.arrival_time
        self.fail(DeadlineExceededError(f"the deadline passed {age:.3f} s after the arrival"))

    def _on_prefill_output(self, output: EngineCoreOutput) -> None:
        assert self.route.prefill is not None
        self._prefill_stats = output.prefill_stats or self._prefill_stats
        if not self._accept(output) or not output.finished:
            return
        if _has_failed(output):
            self._fail_leg(self.route.prefill, output, outcome="prefill_failed")
        elif output.kv_transfer_params is None:
            # The first token was the last: D's ticket is void.
            self._running.discard(self.route.prefill)
            self._end_as(output, outcome="ended_at_prefill")

    def _on_decode_output(self, output: EngineCoreOutput) -> None:
        if self.route.prefill is None:
            self._prefill_stats = output.prefill_stats or self._prefill_stats
        self._transfer_stats = output.kv_transfer_stats or self._transfer_stats
        if not self._accept(output) or not output.finished:
            return
        if self._is_void_ticket(output):
            self._running.discard(self.route.decode)
        elif _has_failed(output):
            self._fail_leg(self.route.decode, output, outcome="decode_failed")
        else:
            # D is done, so P has nothing left to do either.
            self._running.clear()
            self._end_as(output, outcome="completed")

    def _is_void_ticket(self, output: EngineCoreOutput) -> bool:
        """D heard from P that the request ends there; P's own word of it is still on its way."""
        is_cancelled = output.error is not None and output.error.code is ErrorCode.CANCELLED
        return is_cancelled and self.route.prefill in self._running

    def _accept(self, output: EngineCoreOutput) -> bool:
        """Take the tokens; False if that ended the request."""
        num_before = len(self.state.token_ids)
        try:
            stop_string = self.state.accept(output)
        except PdserveError as error:
            logger.error("request %s: %s", output.request_id, error.message)
            self._end(FinishReason.ERROR, error=error.to_engine_error(), outcome="decode_failed")
            return False
        num_new = len(self.state.token_ids) - num_before
        if num_new:
            self._on_tokens(num_before, num_new)
        if stop_string is not None:
            self._end(FinishReason.STOP, stop_reason=stop_string, outcome="completed")
        return stop_string is None

    def _fail_leg(self, worker: WorkerClient, output: EngineCoreOutput, *, outcome: str) -> None:
        self._running.discard(worker)
        error = output.error or EngineError(
            code=ErrorCode.ENGINE_DEAD,
            message=f"worker {worker.address} ended the request: {output.finish_reason!s}",
            is_retryable=True,
        )
        logger.warning("request %s failed: %s", output.request_id, error.message)
        self._end(FinishReason.ERROR, error=error, outcome=outcome)

    def _end_as(self, output: EngineCoreOutput, *, outcome: str) -> None:
        assert output.finish_reason is not None
        self._end(output.finish_reason, stop_reason=output.stop_reason, outcome=outcome)

    def _end(
        self,
        finish_reason: FinishReason,
        *,
        outcome: str,
        stop_reason: int | str | None = None,
        error: EngineError | None = None,
    ) -> None:
        if self.state.ending is not None:
            return
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        # P stays in `running` after it handed the request off: it may still hold the blocks.
        for worker in self._running:
            worker.abort(self.request.request_id)
        self._running.clear()
        self.state.timeline.finished_ns = time.monotonic_ns()
        self.state.finish(
            Ending(
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                error=error,
                usage=self._usage(),
                metrics=self._measure(),
            )
        )
        if self.route.prefill is not None:
            self._metrics.handoffs.labels(outcome=outcome).inc()
        self._on_end(self)

    def _usage(self) -> Usage:
        stats = self._prefill_stats
        return Usage(
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=stats.num_cached_tokens if stats is not None else 0,
            num_output_tokens=len(self.state.token_ids),
        )

    def _measure(self) -> RequestMetrics:
        prefill, decode = self.route.prefill, self.route.decode
        return measure(
            self.state.timeline,
            num_tokens=len(self.state.token_ids),
            prefill=self._prefill_stats,
            transfer=self._transfer_stats,
            path=self.route.path,
            prefill_engine_id=_engine_id(prefill) if prefill is not None else "",
            decode_engine_id=_engine_id(decode),
        )


def _has_failed(output: EngineCoreOutput) -> bool:
    # An abort we did not ask for is the worker's failure.
    return output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)


def _remote(worker: WorkerClient) -> KVTransferParams:
    host, _, port = worker.address.rpartition(":")
    return KVTransferParams(
        remote_engine_id=_engine_id(worker), remote_host=host, remote_port=int(port)
    )


def _engine_id(worker: WorkerClient) -> str:
    return worker.info.engine_id if worker.info is not None else ""
