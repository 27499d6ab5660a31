"""The router's core, the same for every API: admission, dispatch, drain."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import get_args

from pdserve_common.engine_types import ErrorCode
from pdserve_common.errors import DrainingError, NoWorkerError, OverloadedError, PdserveError
from pdserve_common.load_log import LoadLog
from pdserve_common.logging import request_id_var
from pdserve_common.metrics import FINISH_REASONS, RouterMetrics, begin, total
from pdserve_router.requests.attempt import HandoffOutcome
from pdserve_router.requests.beam_search_request import BeamSearchRequest
from pdserve_router.requests.input_processor import InputProcessor, ProcessedInput
from pdserve_router.requests.live_request import LiveRequest
from pdserve_router.requests.parent_request import ParentRequest
from pdserve_router.requests.redrive import REDRIVE_REASONS, RedriveQueue
from pdserve_router.requests.request_limits import max_request_bytes
from pdserve_router.requests.request_log import note_taken
from pdserve_router.requests.request_metrics import (
    RequestMetrics,
    Timeline,
    observe_end,
    observe_first_token,
)
from pdserve_router.requests.single_completion import SingleCompletion
from pdserve_router.text.tokenizer import Tokenizer
from pdserve_router.workers.adapter_rollout import AdapterRollout
from pdserve_router.workers.adapter_scale_out import AdapterScaleOut
from pdserve_router.workers.model_limits import ModelLimits
from pdserve_router.workers.route_chooser import LocalReason, Route, RoutePath
from pdserve_router.workers.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

# How many requests begin in one turn of the event loop: streams go on between many that come at
# once.
_BEGIN_TOGETHER = 2
# Outcomes of requests that no worker got.
_NOT_TAKEN = ("refused", "rejected")
OVERLOADED_RETRY_AFTER_MS = 1000
# Of a request that would have been served at another time.
_REFUSALS = (ErrorCode.OVERLOADED, ErrorCode.NO_WORKER, ErrorCode.DRAINING)
# Their text is needed again, which takes about 3 us each; that of more is made in a thread.
INLINE_RESUMED_TOKENS = 2048

# Makes tokens of a request, or of several in one, within what the model can take.
Prepare = Callable[[ModelLimits], Awaitable[Sequence[ProcessedInput]]]


class Router:
    """Takes requests and hands each to its workers."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        adapters: AdapterRollout,
        scale_out: AdapterScaleOut,
        tokenizer: Tokenizer,
        input_processor: InputProcessor,
        metrics: RouterMetrics,
        model_name: str,
        max_num_queued_requests: int,
        max_redrives: int,
        redrive_wait_s: float,
    ) -> None:
        self.pool = pool
        self.adapters = adapters
        self._scale_out = scale_out
        self.tokenizer = tokenizer
        self.input_processor = input_processor
        self.model_name = model_name
        self.is_draining = False
        self._metrics = metrics
        self._redrives = RedriveQueue(
            pool, metrics=metrics, max_redrives=max_redrives, wait_s=redrive_wait_s
        )
        self._max_num_queued_requests = max_num_queued_requests
        self._generation_tokens = metrics.generation_tokens.labels(model=model_name)
        _begin_series(metrics, model_name)
        # Requests without a token: those not sent yet, and those that were.
        self._num_arriving = 0
        self._beginning = asyncio.Semaphore(_BEGIN_TOGETHER)
        self._waiting: set[LiveRequest] = set()
        self._live: set[LiveRequest] = set()
        # Of those, the ones whose time to the first token is not exported yet.
        self._unobserved: set[LiveRequest] = set()
        # The drain is over: what arrives yet does not begin.
        self._is_cut = False
        # Until their answers are sent, or they are refused.
        self._num_answering = 0
        # Nothing arrives, nothing is live and no answer is still being sent.
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._load_log = LoadLog(self._totals, self._report)

    @property
    def is_ready(self) -> bool:
        """True if a request could be served now."""
        return self.pool.is_ready and not self.is_draining

    @property
    def max_request_bytes(self) -> int | None:
        """How many bytes a request can use; None if nobody knows."""
        if (limits := self.pool.limits) is None:
            return None
        return max_request_bytes(
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            max_token_bytes=self.tokenizer.max_token_bytes,
        )

    @property
    def num_in_flight(self) -> int:
        return len(self._live)

    @property
    def num_queued(self) -> int:
        """Requests that wait for their first token."""
        return self._num_arriving + len(self._waiting)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """An API takes a request and sends its whole answer within: draining waits for that."""
        self._num_answering += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_answering -= 1
            self._note_idle()

    async def submit(self, prepare: Prepare) -> list[LiveRequest]:
        """Have requests that came as one parsed, checked and tokenized, and dispatch them. Raises a
        PdserveError if they cannot be taken, all of them; once taken each ends with exactly one
        finished output.
        """
        self._load_log.note()
        try:
            self._admit(1)
        except PdserveError as error:
            self._count_not_taken(error)
            raise
        self._num_arriving += 1
        self._is_idle.clear()
        try:
            async with self._beginning:
                await asyncio.sleep(0)
            requests = await prepare(self.pool.model_limits())
            request_id_var.set(requests[0].core_request.external_req_id)
            if len(requests) > 1:
                self._admit(len(requests) - 1)
            lives = await self._dispatch_all(requests)
            note_taken(lives)
            return lives
        except PdserveError as error:
            self._count_not_taken(error)
            raise
        finally:
            self._num_arriving -= 1
            self._note_idle()

    async def drain(self, timeout_s: float) -> None:
        """Let finish what runs, what is still under way over connections that the servers have not
        closed yet, and answers that are being sent; end the rest at the timeout, and take nothing
        any more.
        """
        self.is_draining = True
        num_taken = self.num_in_flight + self._num_arriving
        logger.info("draining, %d requests are running", num_taken)
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            num_left = max(self._num_answering, self.num_in_flight + self._num_arriving)
            logger.warning("drain timeout, %d requests are cut", num_left)
        self._is_cut = True
        for live in list(self._live):
            live.fail(DrainingError("the router shut down before the answer was complete"))

    def _admit(self, num_more: int) -> None:
        if self._is_cut:
            raise DrainingError("the router is shutting down", retry_after_ms=1000)
        if self.num_queued + num_more > self._max_num_queued_requests:
            wanted = f", {num_more} more arrive" if num_more > 1 else ""
            raise OverloadedError(
                f"{self.num_queued} requests wait for their first token{wanted}, "
                f"at most {self._max_num_queued_requests} may",
                retry_after_ms=OVERLOADED_RETRY_AFTER_MS,
            )

    async def _dispatch_all(self, requests: Sequence[ProcessedInput]) -> list[LiveRequest]:
        taken: list[LiveRequest] = []
        try:
            for request in requests:
                if taken:
                    await asyncio.sleep(0)  # other streams go on between two of many
                taken.append(await self._dispatch(request))
        except BaseException:
            for live in taken:
                live.abort()
            raise
        return taken

    async def _dispatch(self, processed: ProcessedInput) -> LiveRequest:
        route = self._route(processed)
        timeline = Timeline(
            arrival_ns=processed.arrival_ns,
            tokenize_start_ns=processed.tokenize_start_ns,
            tokenize_end_ns=processed.tokenize_end_ns,
        )
        if sum(len(each.token_ids) for each in processed.resume) <= INLINE_RESUMED_TOKENS:
            live = self._make(processed, route, timeline)
        else:
            epochs = route.epochs
            live = await asyncio.to_thread(self._make, processed, route, timeline)
            if route.epochs != epochs:
                # Perhaps with other weights.
                raise NoWorkerError("a worker of the request was restarted", retry_after_ms=1000)
        if self._is_cut:
            raise DrainingError("the router shut down before the request was sent")
        self._live.add(live)
        self._waiting.add(live)
        self._unobserved.add(live)
        self._metrics.requests_in_flight.inc()
        self._metrics.requests_routed.labels(path=route.path, reason=route.reason).inc()
        if (lora := processed.core_request.lora_request) is not None:
            self._metrics.lora.requests.inc(lora.lora_name)
            self._scale_out.on_request(lora)
        num_prompt_tokens = len(processed.core_request.prompt_token_ids)
        self._metrics.prompt_tokens.labels(model=self.model_name).inc(num_prompt_tokens)
        # The last, as it may end at once.
        try:
            live.start()
        except Exception:
            # A defect, which the API reports: nobody reads the request, so it must not stay.
            live.on_defect()
            raise
        return live

    def _route(self, processed: ProcessedInput) -> Route:
        """Choose workers; an answer that has begun is for those of the same weights."""
        begun = {
            each.origin for each in processed.resume if each.token_ids and not each.is_finished
        }
        return self.pool.route(
            processed.core_request,
            origins=begun,
            session=processed.session,
            hashes=processed.prefix_hashes,
        )

    def _make(self, processed: ProcessedInput, route: Route, timeline: Timeline) -> LiveRequest:
        params = processed.core_request.sampling_params
        assert params is not None
        if params.use_beam_search:
            return BeamSearchRequest(
                processed.core_request,
                route,
                tokenizer=self.tokenizer,
                timeline=timeline,
                metrics=self._metrics,
                redrives=self._redrives,
                on_tokens=self._on_tokens,
                on_end=self._on_end,
                parsing=processed.parsing,
                session=processed.session,
            )
        kind = SingleCompletion if params.n == 1 and params.best_of is None else ParentRequest
        return kind(
            processed.core_request,
            route,
            tokenizer=self.tokenizer,
            timeline=timeline,
            metrics=self._metrics,
            redrives=self._redrives,
            on_tokens=self._on_tokens,
            on_end=self._on_end,
            resume=processed.resume,
            parsing=processed.parsing,
            session=processed.session,
        )

    def _on_tokens(self, live: LiveRequest, num_new: int) -> None:
        self._waiting.discard(live)
        self._generation_tokens.inc(num_new)
        if live in self._unobserved:
            metrics = live.measure()
            # D's first message may overtake P's, which says what the prompt took.
            if metrics.prefill_ns:
                self._observe_first_token(live, metrics)

    def _on_end(self, live: LiveRequest) -> None:
        self._waiting.discard(live)
        self._live.discard(live)
        self._note_idle()
        assert live.ending is not None
        metrics = live.ending.metrics
        self._metrics.requests_in_flight.dec()
        self._count(str(live.ending.finish_reason))
        if live in self._unobserved and metrics.ttft_ns:
            self._observe_first_token(live, metrics)
        self._unobserved.discard(live)
        observe_end(self._metrics, metrics, model=self.model_name)

    def _observe_first_token(self, live: LiveRequest, metrics: RequestMetrics) -> None:
        self._unobserved.discard(live)
        observe_first_token(self._metrics, metrics, model=self.model_name)

    def _totals(self) -> Mapping[str, float]:
        def num_requests(outcomes: Sequence[str]) -> float:
            return sum(total(self._metrics.requests, outcome=outcome) for outcome in outcomes)

        return {
            "ended": num_requests(FINISH_REASONS),
            "not_taken": num_requests(_NOT_TAKEN),
            "prompt_tokens": total(self._metrics.prompt_tokens),
            "generation_tokens": total(self._metrics.generation_tokens),
        }

    def _report(self, per_s: Mapping[str, float]) -> bool:
        ready = {
            role: total(self._metrics.workers, role=role, state="ready")
            for role in ("prefill", "decode")
        }
        logger.info(
            "load: %(num_in_flight)d requests in flight, of which %(num_queued)d have no token; "
            "per second %(ended_per_s).1f ended, %(not_taken_per_s).1f not taken, "
            "%(prompt_tokens_per_s).1f prompt tokens, %(generation_tokens_per_s).1f generated; "
            "ready workers: %(num_ready_prefill)d prefill, %(num_ready_decode)d decode",
            {
                "num_in_flight": self.num_in_flight,
                "num_queued": self.num_queued,
                **{f"{name}_per_s": round(rate, 3) for name, rate in per_s.items()},
                **{f"num_ready_{role}": int(number) for role, number in ready.items()},
            },
        )
        return bool(self.num_in_flight or self.num_queued)

    def _note_idle(self) -> None:
        if not self._live and not self._num_arriving and not self._num_answering:
            self._is_idle.set()

    def _count_not_taken(self, error: PdserveError) -> None:
        self._count("refused" if error.code in _REFUSALS else "rejected")

    def _count(self, outcome: str) -> None:
        self._metrics.requests.labels(model=self.model_name, outcome=outcome).inc()


def _begin_series(metrics: RouterMetrics, model: str) -> None:
    begin(metrics.requests, model=(model,), outcome=(*FINISH_REASONS, *_NOT_TAKEN))
    begin(metrics.prompt_tokens, model=(model,))
    begin(metrics.requests_routed, path=("disaggregated",), reason=("",))
    begin(metrics.requests_routed, path=("local",), reason=get_args(LocalReason))
    begin(metrics.handoffs, outcome=get_args(HandoffOutcome))
    begin(metrics.redrives, reason=REDRIVE_REASONS, path=get_args(RoutePath))
