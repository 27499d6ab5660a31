"""A request's life on its workers: from dispatch, over as many attempts as it takes, to exactly one
end.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdserve_common.errors import KVTransferError, PdserveError
from pdserve_common.observability.logging import log_request
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    ErrorFault,
    FinishReason,
    Generate,
    KVTransferStats,
    PrefillStats,
)
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.requests.attempt import Attempt, HandoffOutcome
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.live_request import LiveRequest, Services
from pdserve_router.requests.output.output_processor import RequestState
from pdserve_router.requests.output.outputs import (
    Ending,
    RequestOutput,
    RequestOutputCollector,
    Usage,
)
from pdserve_router.requests.records.request_events import RequestEvents
from pdserve_router.requests.records.request_metrics import RequestMetrics, Timeline, measure
from pdserve_router.requests.records.request_spans import add_stages
from pdserve_router.requests.redrive import Recovery
from pdserve_router.workers.model_version import ModelVersion, joined
from pdserve_router.workers.routing.route_chooser import AnyRoute, Route
from pdserve_router.workers.worker import Worker

if TYPE_CHECKING:
    from pdserve_common.observability.tracing import Span

logger = logging.getLogger(__name__)

# When prefill is lost decode mostly knows more: what it has, or that it has all. This is how long
# we wait for its report; nothing depends on whether it comes in time.
_VERDICT_S = 0.25


class SingleCompletion(LiveRequest):
    """A request for one completion. When a worker fails it the request is sent again, with the
    tokens so far (rule K6): what was delivered stays, and the client sees one stream.
    """

    def __init__(
        self,
        processed: ProcessedInput,
        params: SamplingParams,
        route: Route,
        services: Services,
        span: "Span | None" = None,
        *,
        index: int = 0,
        wake: asyncio.Event | None = None,
        siblings: Sequence["SingleCompletion"] | None = None,
    ) -> None:
        """`siblings` are all completions of a request that has several, this one among them."""
        super().__init__(processed, services, span)
        self._is_first = index == 0
        resumed = next((each for each in processed.resume if each.index == index), None)
        self.state = RequestState(
            processed.core_request,
            params,
            tokenizer=services.tokenizer,
            timeline=processed.begin_timeline(),
            metrics=services.metrics,
            index=index,
            wake=wake,
            resumed=resumed,
            parsing=processed.parsing,
        )
        self._params = params
        self.recovery = Recovery()
        # Of every worker that took part in the answer, also before it was resumed.
        self.versions: set[ModelVersion] = set()
        if resumed is not None and resumed.is_begun:
            self.versions.add(resumed.model_version)
        self._siblings = siblings if siblings is not None else (self,)
        self._attempt = Attempt(self._at_attempt(0), route, self)
        # Tokens that `recovery` knows of.
        self._num_noted = len(self.state.token_ids)
        self._prefill_stats: PrefillStats | None = None
        # The same as decode tells them, where decode is faster than prefill.
        self._told_prefill_stats: PrefillStats | None = None
        # By whether they are from the prediction: tokens, and those that count.
        self._num_drafts = {True: [0, 0], False: [0, 0]}
        self._transfer_stats: KVTransferStats | None = None
        # None: nobody asks for them.
        self._events = RequestEvents() if processed.include_events else None

    @property
    def ending(self) -> Ending | None:
        return self.state.ending

    @property
    def route(self) -> Route:
        return self._attempt.route

    @property
    def collector(self) -> RequestOutputCollector:
        return self.state.collector

    @property
    def has_begun(self) -> bool:
        """True if some of its answer has come, and not all of it before it was resumed."""
        return bool(self.state.token_ids) and self.state.resumed_end is None

    @property
    def begun_versions(self) -> set[ModelVersion]:
        begun = (each.versions for each in self._siblings if each.has_begun)
        return {model_version for versions in begun for model_version in versions}

    @property
    def next_request(self) -> EngineCoreRequest:
        return self._at_attempt(self.recovery.num_redrives + 1)

    async def _next_output(self) -> RequestOutput:
        return await self.state.collector.get()

    def start(self) -> None:
        if self.ending is not None:
            # With another completion of its request, which could not begin.
            return
        self.state.timeline.dispatched_ns = self._runtime.now_ns()
        if (end := self.state.resumed_end) is not None:
            self._end(end.finish_reason, stop_reason=end.stop_reason, outcome=None)
            return
        self._watch_deadline()
        self._send()
        self.state.timeline.dispatched_ns = self._runtime.now_ns()

    def cut(self, finish_reason: FinishReason, error: EngineError) -> None:
        self._end(finish_reason, error=error, outcome="aborted")

    def resend(self, route: AnyRoute) -> None:
        """Begin the next attempt. Workers that have the last one and not this one end it."""
        assert isinstance(route, Route), "of a request that generates"
        if not self.state.token_ids:
            # Nothing of the answer is theirs.
            self.versions.clear()
        lost, self._attempt = self._attempt, Attempt(self.next_request, route, self)
        self._count_handoff(lost, self._outcome)
        if self.span is not None:
            lost_ns = round(self.recovery.lost_at * 1e9)
            lost.end_span(self.recovery.error, lost_ns, redrive_reason=self.recovery.reason)
        self.recovery.begin_attempt()
        self.state.begin_attempt(self._attempt.request.attempt)
        lost.abort(but=frozenset(route.workers))
        addresses = ", ".join(worker.address for worker in route.workers)
        num_tokens = len(self.state.token_ids)
        self._log(logging.INFO, "it goes on after %d tokens at %s", num_tokens, addresses)
        self._send()

    def give_up(self, error: EngineError | None = None) -> None:
        self._log(logging.WARNING, "nobody is left to go on with: it fails")
        self._end(FinishReason.ERROR, error=error or self.recovery.error, outcome=self._outcome)

    def accept(self, output: EngineCoreOutput, worker: Worker) -> bool:
        """Take the tokens; False if that ended the request."""
        self._take_stats(output, worker)
        num_before = len(self.state.token_ids)
        try:
            stop_string = self.state.accept(output, self._runtime.now_ns())
        except PdserveError as problem:
            error = problem.to_engine_error()
            self._redrives.blame(self.route, worker, error)
            self._fail(worker, error, level=logging.ERROR)
            return False
        num_new = len(self.state.token_ids) - num_before
        if num_new:
            self._on_progress(worker)
            self._note_tokens()
            self._on_tokens(self, num_new)
            self.state.takes_tokens = self._is_settled(worker)
        if stop_string is not None:
            self._end(FinishReason.STOP, stop_reason=stop_string, outcome="completed")
        return stop_string is None

    def on_done(self, output: EngineCoreOutput, *, outcome: HandoffOutcome) -> None:
        assert output.finish_reason is not None
        for worker in self.route.workers:
            self._redrives.pool.report_success(worker)
        self._end(output.finish_reason, stop_reason=output.stop_reason, outcome=outcome)

    def on_failed(self, worker: Worker, error: EngineError) -> None:
        """Send the request again if that may help."""
        if not self.recovery.errors:
            self._redrives.blame(self.route, worker, error)
        # What follows from an earlier loss of the attempt changes nothing.
        is_final = not error.is_retryable and self not in self._redrives
        if is_final or error.fault is ErrorFault.REQUEST:
            self._fail(worker, error)
        else:
            self._lose(worker, error, reason=error.code.name.lower())

    def on_kv_lost(self, output: EngineCoreOutput) -> None:
        """Decode holds what it has until it is told how to go on (rule K6)."""
        lost = output.kv_lost
        assert lost is not None
        self._take_stats(output, self.route.decode)
        error = KVTransferError(lost.message).to_engine_error()
        if not self.recovery.errors:
            self._redrives.blame(self.route, self.route.decode, error)
        self.recovery.num_confirmed_tokens = lost.num_confirmed_tokens
        self._lose(self.route.decode, error, reason="kv_lost")

    def _at_attempt(self, attempt: int) -> EngineCoreRequest:
        token_ids = tuple(self.state.token_ids)
        if not token_ids and not attempt:
            return self.core_request
        params = self._params
        if token_ids:
            # They are out with the first token.
            params = dataclasses.replace(params, prompt_logprobs=None)
        return dataclasses.replace(
            self.core_request,
            task=Generate(params),
            attempt=attempt,
            resume_output_token_ids=token_ids,
            # Its source may be elsewhere, or behind other tokens.
            fork_of=None,
        )

    def _send(self) -> None:
        lora = self.core_request.lora_request
        self.versions.update(each.model_version.with_adapter(lora) for each in self.route.workers)
        self.state.collector.model_version = str(joined(self.versions))
        if self.span is not None:
            self._attempt.begin_span(self.span, self._runtime.now_ns())
        self._attempt.send()

    def _take_stats(self, output: EngineCoreOutput, worker: Worker) -> None:
        """Keep what the stages of the first and the second token took, of the attempts that brought
        them. The prompt's are those of the worker that computed it.
        """
        if self._events is not None:
            self._events.take(output, worker.engine_id)
        for drafts in output.draft_stats:
            counts = self._num_drafts[drafts.source == "prediction"]
            counts[0] += drafts.num_draft_tokens
            counts[1] += drafts.num_accepted_tokens
        num_before = self._attempt.num_tokens_before
        if num_before == 0 and worker is self.route.prompt_worker:
            self._prefill_stats = output.prefill_stats or self._prefill_stats
        transfer = output.kv_transfer_stats
        if transfer is None:
            return
        if num_before == 0:
            self._told_prefill_stats = transfer.prefill_stats
        if num_before < 2:
            self._transfer_stats = transfer
        prefill, decode = self.route.prefill, self.route.decode
        if prefill is not None:
            self._redrives.pool.report_transfer(prefill, decode, transfer)

    def _on_progress(self, worker: Worker) -> None:
        self._redrives.on_answer(self, self.route, worker)
        if self not in self._redrives:
            self._redrives.on_token(self)
        elif worker is self.route.decode and worker not in self.recovery.errors:
            # Decode had everything from the prefill worker that was lost.
            self._redrives.discard(self)
            self.recovery.forget()

    def _is_settled(self, worker: Worker) -> bool:
        """From now on a token changes nothing but the answer: decode goes on alone, what the stages
        of the first two took is known, and no worker is lost.
        """
        has_stages = self.state.num_new_tokens >= 2 and self._prefill_stats is not None
        return has_stages and worker is self.route.decode and self not in self._redrives

    def _note_tokens(self) -> None:
        num_new = len(self.state.token_ids) - self._num_noted
        if num_new:
            self._num_noted += num_new
            self.recovery.note_tokens(num_new)

    def _fail(self, worker: Worker, error: EngineError, *, level: int = logging.WARNING) -> None:
        self._log(level, "%s: %s; it fails", worker.address, error.message)
        outcome = _failure_of(worker, self.route)
        self._end(FinishReason.ERROR, error=error, outcome=outcome)

    def _lose(self, worker: Worker, error: EngineError, *, reason: str) -> None:
        if self.ending is not None:
            return
        self.state.takes_tokens = False
        self._note_tokens()
        self._redrives.lose(self, self.route, worker, error, reason=reason)
        decode = self.route.decode
        has_decode = decode in self._attempt.running
        self.recovery.holder = decode if has_decode else None
        is_undecided = has_decode and decode not in self.recovery.errors
        if self._redrives.is_spent(self) and not (is_undecided or self.recovery.is_by_death):
            self.give_up()
            return
        self._redrives.add(self, delay_s=_VERDICT_S if is_undecided else 0.0)

    def _log(self, level: int, text: str, *args: object) -> None:
        attempt = self._attempt.request.attempt
        log_request(logger, level, self.core_request.request_id, attempt, text, *args)

    @property
    def _outcome(self) -> HandoffOutcome:
        """Of an attempt that is lost."""
        assert isinstance(self.recovery.route, Route)
        return _failure_of(next(iter(self.recovery.errors)), self.recovery.route)

    def _end(
        self,
        finish_reason: FinishReason,
        *,
        outcome: HandoffOutcome | None,
        stop_reason: int | str | None = None,
        error: EngineError | None = None,
    ) -> None:
        if self.state.ending is not None:
            return
        self._stop_deadline()
        self._redrives.discard(self)
        self._attempt.abort()
        self.state.timeline.finished_ns = self._runtime.now_ns()
        self.state.finish(
            Ending(
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                error=error,
                usage=self._usage(),
                num_resumed_tokens=self.state.num_resumed,
                metrics=self.measure(),
                events=tuple(self._events.events) if self._events is not None else (),
            )
        )
        self._count_handoff(self._attempt, outcome)
        if self.recovery.num_redrives:
            self._metrics.recovered_requests.labels(outcome=str(finish_reason)).inc()
        self._on_end(self)
        if self.span is not None:
            self._attempt.end_span(error, self.state.timeline.finished_ns)
            if self._is_first:
                add_stages(self.span, self.state.timeline)

    def _count_handoff(self, attempt: Attempt, outcome: HandoffOutcome | None) -> None:
        if attempt.route.prefill is not None and outcome is not None:
            self._metrics.handoffs.labels(outcome=outcome).inc()

    def _usage(self) -> Usage:
        stats = self._prefill_stats or self._told_prefill_stats
        return Usage(
            num_prompt_tokens=len(self.core_request.prompt_token_ids),
            num_cached_tokens=stats.num_cached_tokens if stats is not None else 0,
            num_output_tokens=len(self.state.token_ids),
            num_reasoning_tokens=self.state.num_reasoning_tokens,
            num_draft_tokens=sum(count for count, _ in self._num_drafts.values()),
            num_accepted_tokens=sum(count for _, count in self._num_drafts.values()),
            num_prediction_draft_tokens=self._num_drafts[True][0],
            num_accepted_prediction_tokens=self._num_drafts[True][1],
        )

    def measure(
        self, timeline: Timeline | None = None, *, siblings: Sequence["SingleCompletion"] = ()
    ) -> RequestMetrics:
        """Return where a request's time went so far: this one's, or that of one on another timeline
        whose prompt was this one's. `siblings` are what else took part in it.
        """
        prefill, decode = self.route.prefill, self.route.decode
        completions = (self, *siblings)
        return measure(
            timeline or self.state.timeline,
            num_tokens=self.state.num_new_tokens,
            prefill=self._prefill_stats or self._told_prefill_stats,
            transfer=self._transfer_stats,
            path=self.route.path,
            route_reason=self.route.reason,
            prefill_engine_id=prefill.engine_id if prefill is not None else "",
            decode_engine_id=decode.engine_id,
            determinism=joined(o for each in completions for o in each.versions).determinism,
            num_redrives=sum(each.recovery.num_redrives for each in completions),
        )


def _failure_of(worker: Worker, route: Route) -> HandoffOutcome:
    return "prefill_failed" if worker is route.prefill else "decode_failed"
