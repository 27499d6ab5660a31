"""A request's life on the one worker that pools its prompt, or on several one after the other."""

import asyncio
import dataclasses
import logging
import math
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from pdserve_common.errors import NoWorkerError, PdserveError
from pdserve_common.observability.logging import log_request
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    ErrorFault,
    FinishReason,
    PrefillStats,
)
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.live_request import LiveRequest, Services
from pdserve_router.requests.output.outputs import CompletionOutput, Ending, RequestOutput, Usage
from pdserve_router.requests.records.request_metrics import RequestMetrics, measure
from pdserve_router.requests.records.request_spans import add_stages, begin_attempt, end_attempt
from pdserve_router.requests.redrive import Recovery
from pdserve_router.workers.clients.legs import failure_of, has_failed
from pdserve_router.workers.model_version import ModelVersion
from pdserve_router.workers.routing.route_chooser import AnyRoute
from pdserve_router.workers.worker import Worker

if TYPE_CHECKING:
    from pdserve_common.observability.tracing import Span

logger = logging.getLogger(__name__)


class PoolingRequest(LiveRequest):
    """A request for one vector. Nothing of it comes before its end, so that when its worker fails
    all of it is sent to another. There is one output, the last.
    """

    def __init__(
        self,
        processed: ProcessedInput,
        route: AnyRoute,
        services: Services,
        span: "Span | None" = None,
        *,
        versions: Collection[ModelVersion],
    ) -> None:
        """`origins` are of the call's parts that are begun: it is pooled by the same weights."""
        super().__init__(processed, services, span)
        self.recovery = Recovery()
        self._route = route
        self._versions = versions
        # The model version of the worker that has it, or had it last; a restarted worker may have
        # another one.
        self._version = route.prompt_worker.model_version
        self._timeline = processed.begin_timeline()
        # It has the request.
        self._is_sent = False
        self._prefill_stats: PrefillStats | None = None
        self._pooled: tuple[float, ...] | None = None
        self._ending: Ending | None = None
        self._is_over = asyncio.Event()
        # The span of the attempt.
        self._attempt_span: Span | None = None

    @property
    def ending(self) -> Ending | None:
        return self._ending

    @property
    def route(self) -> AnyRoute:
        return self._route

    @property
    def begun_versions(self) -> Collection[ModelVersion]:
        return self._versions

    @property
    def next_request(self) -> EngineCoreRequest:
        return dataclasses.replace(self.core_request, attempt=self.recovery.num_redrives + 1)

    @property
    def _worker(self) -> Worker:
        return self._route.prompt_worker

    def share_version(self) -> Collection[ModelVersion]:
        self._versions = self._versions or (self._version,)
        return self._versions

    def start(self) -> None:
        self._timeline.dispatched_ns = self._runtime.now_ns()
        self._watch_deadline()
        self._send(self.core_request)

    def cut(self, finish_reason: FinishReason, error: EngineError) -> None:
        self._end(finish_reason, error=error)

    def resend(self, route: AnyRoute) -> None:
        """Begin the next attempt."""
        request = self.next_request
        self.recovery.begin_attempt()
        self._route = route
        self._log(logging.INFO, "it is sent again, to %s", self._worker.address)
        self._send(request)

    def give_up(self, error: EngineError | None = None) -> None:
        self._log(logging.WARNING, "nobody is left to pool it: it fails")
        self._end(FinishReason.ERROR, error=error or self.recovery.error)

    def measure(self) -> RequestMetrics:
        """Return where its time went so far; the vector counts as the first token."""
        model_version = self._worker.model_version.with_adapter(self.core_request.lora_request)
        return measure(
            self._timeline,
            num_tokens=1,
            prefill=self._prefill_stats,
            transfer=None,
            path=self._route.path,
            route_reason=self._route.reason,
            prefill_engine_id=self._worker.engine_id,
            decode_engine_id="",
            determinism=model_version.determinism,
            num_redrives=self.recovery.num_redrives,
        )

    async def _next_output(self) -> RequestOutput:
        await self._is_over.wait()
        assert self._ending is not None
        # It may have thousands of numbers, and the request's line in the log waits for others.
        pooled, self._pooled = self._pooled, None
        completion = CompletionOutput(
            finish_reason=self._ending.finish_reason, error=self._ending.error
        )
        return RequestOutput(
            request_id=self.core_request.external_req_id or self.core_request.request_id,
            outputs=(completion,),
            seed=0,
            finished=True,
            pooling_output=pooled,
            usage=self._ending.usage,
            metrics=self._ending.metrics,
        )

    def _send(self, request: EngineCoreRequest) -> None:
        worker = self._worker
        self._version = worker.model_version
        if self.span is not None:
            now_ns = self._runtime.now_ns()
            span = begin_attempt(self.span, request, self._route, num_tokens=0, now_ns=now_ns)
            request = dataclasses.replace(request, trace_headers=span.headers)
            self._attempt_span = span
        try:
            worker.add_request(request, partial(self._on_output, worker), self.on_defect)
        except NoWorkerError as error:
            self._on_failed(worker, error.to_engine_error())
        else:
            self._is_sent = True

    def _on_output(self, worker: Worker, output: EngineCoreOutput) -> None:
        self._prefill_stats = output.prefill_stats or self._prefill_stats
        if not output.finished:
            return
        self._is_sent = False
        if has_failed(output):
            self._on_failed(worker, failure_of(output, worker))
        elif (problem := _problem_of(output.pooling_output)) is not None:
            error = PdserveError(f"worker {worker.address} sent {problem}").to_engine_error()
            self._on_failed(worker, error, level=logging.ERROR)
        else:
            self._redrives.pool.report_success(worker)
            self._pooled = output.pooling_output
            self._timeline.first_token_ns = self._runtime.now_ns()
            self._end(FinishReason.STOP)

    def _on_failed(
        self, worker: Worker, error: EngineError, *, level: int = logging.WARNING
    ) -> None:
        """Send the request again if that may help."""
        self._redrives.blame(self._route, worker, error)
        if not error.is_retryable or error.fault is ErrorFault.REQUEST:
            self._log(level, "%s: %s; it fails", worker.address, error.message)
            self._end(FinishReason.ERROR, error=error)
            return
        reason = error.code.name.lower()
        self._redrives.lose(self, self._route, worker, error, reason=reason)
        if self._redrives.is_spent(self) and not self.recovery.is_by_death:
            self.give_up()
        else:
            self._end_attempt_span(error, redrive_reason=self.recovery.reason)
            self._redrives.add(self)

    def _end_attempt_span(self, error: EngineError | None, *, redrive_reason: str = "") -> None:
        """Does nothing if there is none, or it has ended."""
        span, self._attempt_span = self._attempt_span, None
        if span is not None:
            end_attempt(span, error, self._runtime.now_ns(), redrive_reason=redrive_reason)

    def _log(self, level: int, text: str, *args: object) -> None:
        attempt = self.recovery.num_redrives
        log_request(logger, level, self.core_request.request_id, attempt, text, *args)

    def _end(self, finish_reason: FinishReason, *, error: EngineError | None = None) -> None:
        if self._ending is not None:
            return
        self._stop_deadline()
        self._redrives.discard(self)
        if self._is_sent:
            self._worker.abort(self.core_request.request_id)
        self._timeline.finished_ns = self._runtime.now_ns()
        stats = self._prefill_stats
        usage = Usage(
            num_prompt_tokens=len(self.core_request.prompt_token_ids),
            num_cached_tokens=stats.num_cached_tokens if stats is not None else 0,
            num_output_tokens=0,
        )
        self._ending = Ending(
            finish_reason=finish_reason, error=error, usage=usage, metrics=self.measure()
        )
        self._end_attempt_span(error)
        if self.span is not None:
            add_stages(self.span, self._timeline)
        if self.recovery.num_redrives:
            self._metrics.recovered_requests.labels(outcome=str(finish_reason)).inc()
        self._is_over.set()
        self._on_end(self)


def _problem_of(pooled: tuple[float, ...] | None) -> str | None:
    """Return what is wrong with a vector; None if nothing is."""
    if not pooled:
        return "no vector"
    # A sum of fp32 in fp64 is finite unless a part is not.
    return None if math.isfinite(sum(pooled)) else "a vector with numbers that are not finite"
