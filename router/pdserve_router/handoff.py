"""A request's life on its workers: from dispatch on one or two legs to exactly one end."""

import asyncio
import dataclasses
import logging
import time

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
from pdserve_common.errors import PdserveError
from pdserve_common.metrics import RouterMetrics
from pdserve_router.live_request import LiveRequest, OnEnd, OnTokens
from pdserve_router.output_processor import Ending, RequestOutput, RequestState, Usage
from pdserve_router.request_metrics import RequestMetrics, Timeline, measure
from pdserve_router.tokenizer import Tokenizer
from pdserve_router.worker_client import OutputCallback, WorkerClient
from pdserve_router.worker_pool import Route

logger = logging.getLogger(__name__)


class Handoff(LiveRequest):
    """A request for one completion. Both legs get it at once: P computes the prompt and the first
    token, D pulls the KV blocks and goes on.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        route: Route,
        *,
        tokenizer: Tokenizer,
        timeline: Timeline,
        metrics: RouterMetrics,
        on_tokens: OnTokens,
        on_end: OnEnd,
        index: int = 0,
        wake: asyncio.Event | None = None,
    ) -> None:
        super().__init__(request, on_tokens=on_tokens, on_end=on_end)
        self.state = RequestState(
            request,
            tokenizer=tokenizer,
            timeline=timeline,
            metrics=metrics,
            index=index,
            wake=wake,
        )
        self.route = route
        self._metrics = metrics
        self._running: set[WorkerClient] = set()
        # Of D, until P has said what only P knows.
        self._early: list[EngineCoreOutput] = []
        self._prefill_stats: PrefillStats | None = None
        self._transfer_stats: KVTransferStats | None = None

    @property
    def ending(self) -> Ending | None:
        return self.state.ending

    async def _next_output(self) -> RequestOutput:
        return await self.state.collector.get()

    def start(self) -> None:
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
        self._watch_deadline()

    def cut(self, finish_reason: FinishReason, error: EngineError) -> None:
        self._end(finish_reason, error=error, outcome="aborted")

    def _send(
        self, worker: WorkerClient, request: EngineCoreRequest, on_output: OutputCallback
    ) -> None:
        worker.add_request(request, on_output, self._on_defect)
        self._running.add(worker)

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
        else:
            early, self._early = self._early, []
            for held in early:
                if self.ending is None:
                    self._on_decode_output(held)

    def _on_decode_output(self, output: EngineCoreOutput) -> None:
        if self._is_early(output):
            self._early.append(output)
            return
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

    def _is_early(self, output: EngineCoreOutput) -> bool:
        """Only P has the logprobs of the prompt and of the first token, which D repeats."""
        is_first = bool(output.new_token_ids) and not self.state.token_ids
        return is_first and self.route.prefill in self._running and self.state.wants_logprobs

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
            self._on_tokens(self, num_new)
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
        self._stop_deadline()
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
                metrics=self.measure(self.state.timeline),
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

    def measure(self, timeline: Timeline) -> RequestMetrics:
        """Return the metrics of a request whose prompt was this one's, on its own timeline."""
        prefill, decode = self.route.prefill, self.route.decode
        return measure(
            timeline,
            num_tokens=len(self.state.token_ids),
            prefill=self._prefill_stats,
            transfer=self._transfer_stats,
            path=self.route.path,
            prefill_engine_id=prefill.engine_id if prefill is not None else "",
            decode_engine_id=decode.engine_id,
        )


def _has_failed(output: EngineCoreOutput) -> bool:
    # An abort we did not ask for is the worker's failure.
    return output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)


def _remote(worker: WorkerClient) -> KVTransferParams:
    host, _, port = worker.address.rpartition(":")
    return KVTransferParams(
        remote_engine_id=worker.engine_id, remote_host=host, remote_port=int(port)
    )
