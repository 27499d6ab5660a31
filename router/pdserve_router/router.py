"""The router's core, the same for every API: admission, dispatch, drain."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import get_args

from pdserve_common.errors import DrainingError, NoWorkerError, OverloadedError, PdserveError
from pdserve_common.metrics.services import FINISH_REASONS, RouterMetrics, begin, total
from pdserve_common.observability.load_log import LoadLog
from pdserve_common.observability.logging import request_id_var
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import ErrorCode, Generate, Pool
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.requests.attempt import HandoffOutcome
from pdserve_router.requests.beam_search_request import BeamSearchRequest
from pdserve_router.requests.input.input_processor import InputProcessor, ProcessedInput
from pdserve_router.requests.input.request_limits import max_request_bytes
from pdserve_router.requests.live_request import LiveRequest, Services
from pdserve_router.requests.output.outputs import Ending
from pdserve_router.requests.parent_request import ParentRequest
from pdserve_router.requests.pooling_request import PoolingRequest
from pdserve_router.requests.records.request_log import note_taken, put_in_trace
from pdserve_router.requests.records.request_metrics import (
    RequestMetrics,
    observe_end,
    observe_first_token,
)
from pdserve_router.requests.redrive import REDRIVE_REASONS, TICK_S, RedriveQueue
from pdserve_router.requests.single_completion import SingleCompletion
from pdserve_router.requests.tenants.part_slots import PartSlots
from pdserve_router.requests.tenants.quotas import Admission, Quotas, Reservation
from pdserve_router.requests.tenants.tenant import tenant_var
from pdserve_router.requests.tenants.tenant_account import RateLimitError
from pdserve_router.text.tokenizer import Tokenizer
from pdserve_router.workers.adapter_rollout import AdapterRollout
from pdserve_router.workers.adapter_scale_out import AdapterScaleOut
from pdserve_router.workers.model_limits import ModelLimits
from pdserve_router.workers.model_version import ModelVersion
from pdserve_router.workers.routing.route_chooser import (
    AnyRoute,
    LocalReason,
    Route,
    RoutePath,
)
from pdserve_router.workers.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

# How many requests begin in one turn of the event loop: streams go on between many that come at
# once.
_BEGIN_TOGETHER = 2
# Outcomes of requests that no worker got.
_NOT_TAKEN = ("refused", "rejected")
OVERLOADED_RETRY_AFTER_MS = 1000
# Errors of a request that would have been served at another time.
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
        quotas: Quotas,
        model_name: str,
        max_num_queued_requests: int,
        max_redrives: int,
        redrive_wait_s: float,
        runtime: Runtime,
    ) -> None:
        self.pool = pool
        self.adapters = adapters
        self._scale_out = scale_out
        self.tokenizer = tokenizer
        self.input_processor = input_processor
        self.model_name = model_name
        self.is_draining = False
        self._metrics = metrics
        self._quotas = quotas
        self._runtime = runtime
        self._redrives = RedriveQueue(
            pool, metrics=metrics, max_redrives=max_redrives, wait_s=redrive_wait_s, runtime=runtime
        )
        self._services = Services(
            tokenizer=tokenizer,
            metrics=metrics,
            redrives=self._redrives,
            runtime=runtime,
            on_tokens=self._on_tokens,
            on_end=self._on_end,
        )
        self._redrive_wait_s = redrive_wait_s
        self._max_num_queued_requests = max_num_queued_requests
        self._generation_tokens = metrics.generation_tokens.labels(model=model_name)
        _begin_series(metrics, model_name)
        # Requests without a token: those not sent yet, and those that were.
        self._num_arriving = 0
        self._beginning = asyncio.Semaphore(_BEGIN_TOGETHER)
        self._waiting: set[LiveRequest] = set()
        # Those that run, with what each holds of its tenant's limits.
        self._live: dict[LiveRequest, Reservation] = {}
        # The part of those whose time to the first token is not exported yet.
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
        limits = self.pool.limits
        # Pictures may have any number of bytes.
        if limits is None or limits.capabilities.modalities:
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

    @property
    def _num_free_slots(self) -> int:
        """How many more requests may wait for their first token."""
        return self._max_num_queued_requests - self.num_queued

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

    async def submit(self, prepare: Prepare, slots: PartSlots | None = None) -> list[LiveRequest]:
        """Have requests that came as one parsed, checked and tokenized, and dispatch them. Raises a
        PdserveError if they cannot be taken, all of them; once taken each ends with exactly one
        finished output. `slots` are for parts that `follow`.
        """
        self._load_log.note()
        try:
            self._admit(1)
            admission = self._quotas.admit(tenant_var.get(), num_slots=self._num_free_slots)
        except PdserveError as error:
            self._count_not_taken(error)
            raise
        self._num_arriving += 1
        self._is_idle.clear()
        try:
            with admission:
                async with self._beginning:
                    await asyncio.sleep(0)
                requests = await prepare(self.pool.model_limits())
                request_id_var.set(requests[0].core_request.external_req_id)
                if len(requests) > 1:
                    self._admit(len(requests) - 1)
                admission.reserve(requests, num_slots=self._num_free_slots, slots=slots)
                lives = await self._dispatch_all(requests, admission)
            note_taken(lives)
            return lives
        except PdserveError as error:
            self._count_not_taken(error)
            raise
        finally:
            self._num_arriving -= 1
            self._note_idle()

    def num_at_once(self, num_parts: int) -> int:
        """Return how many parts of a call, which is being prepared, may begin at once; `follow` is
        for the others.
        """
        return self._quotas.num_at_once(tenant_var.get(), num_parts, num_slots=self._num_free_slots)

    async def follow(
        self, processed: ProcessedInput, begun: LiveRequest, slots: PartSlots
    ) -> LiveRequest:
        """Dispatch one more part of a request that was taken, in the slot of a part that has
        ended; `begun` is the first one. Waits for a worker as long as what is sent again does.
        Raises as `submit` does, but for the queue's length.
        """
        try:
            with self._quotas.admit_part(tenant_var.get(), slots) as admission:
                admission.reserve_part(processed, slots)
                reservation = await admission.turn(0, processed)
                part = admission.with_priority(processed)
                live = await self._dispatch_later(part, reservation, begun.share_version())
            note_taken([live])
            return live
        except PdserveError as error:
            self._count_not_taken(error)
            raise

    async def drain(self, timeout_s: float) -> None:
        """Let finish what runs, what is still under way over connections that the servers have not
        closed yet, and answers that are being sent; end the rest at the timeout, and take nothing
        any more.
        """
        self.is_draining = True
        num_taken = self.num_in_flight + self._num_arriving
        logger.info("draining, %d requests are running", num_taken)
        timer = self._runtime.call_later(timeout_s, self._is_idle.set)
        await self._is_idle.wait()
        timer.cancel()
        if num_left := max(self._num_answering, self.num_in_flight + self._num_arriving):
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

    async def _dispatch_all(
        self, requests: Sequence[ProcessedInput], admission: Admission
    ) -> list[LiveRequest]:
        taken: list[LiveRequest] = []
        versions: Collection[ModelVersion] = ()
        try:
            for index, request in enumerate(requests):
                if taken:
                    await asyncio.sleep(0)  # other streams go on between two of many
                    versions = taken[0].share_version()
                reservation = await admission.turn(index, request)
                processed = admission.with_priority(request)
                taken.append(await self._dispatch(processed, reservation, versions))
        except BaseException:
            for live in taken:
                live.abort()
            raise
        return taken

    async def _dispatch_later(
        self,
        processed: ProcessedInput,
        reservation: Reservation,
        versions: Collection[ModelVersion],
    ) -> LiveRequest:
        """Dispatch it when there is a worker for it, as parts before it would be in vain. Raises as
        `_dispatch` after `redrive_wait_s` or at the deadline.
        """
        clock = self._runtime.now
        until = clock() + self._redrive_wait_s
        if (deadline := processed.core_request.deadline) is not None:
            until = min(until, deadline)
        while True:
            if self._is_cut:
                raise DrainingError("the router shut down before all of the request was sent")
            try:
                return await self._dispatch(processed, reservation, versions)
            except (NoWorkerError, OverloadedError):
                if clock() >= until:
                    raise
            await self._runtime.sleep(TICK_S)

    async def _dispatch(
        self,
        processed: ProcessedInput,
        reservation: Reservation,
        versions: Collection[ModelVersion],
    ) -> LiveRequest:
        """Send it to workers of `origins`, or if there are none to those that serve."""
        route = self._route(processed, versions)
        if sum(len(each.token_ids) for each in processed.resume) <= INLINE_RESUMED_TOKENS:
            live = self._make(processed, route, versions)
        else:
            epochs = route.epochs
            live = await asyncio.to_thread(self._make, processed, route, versions)
            if route.epochs != epochs:
                # Perhaps with other weights.
                raise NoWorkerError("a worker of the request was restarted", retry_after_ms=1000)
        if self._is_cut:
            raise DrainingError("the router shut down before the request was sent")
        if processed.tensors:
            self.pool.tensors.hold(processed.tensors)
            self._metrics.pictures.on_taken(len(processed.core_request.mm_features))
        self._live[live] = reservation
        self._waiting.add(live)
        self._unobserved.add(live)
        self._metrics.requests_in_flight.inc()
        self._metrics.requests_routed.labels(path=route.path, reason=route.reason).inc()
        if (lora := processed.core_request.lora_request) is not None:
            self._metrics.lora.requests.inc(lora.lora_name)
            self._scale_out.on_request(lora)
        num_prompt_tokens = len(processed.core_request.prompt_token_ids)
        self._metrics.prompt_tokens.labels(model=self.model_name).inc(num_prompt_tokens)
        if isinstance(task := processed.core_request.task, Pool):
            self._metrics.pooling.on_taken(task.pooling_params.task, num_prompt_tokens)
        # The last, as it may end at once.
        try:
            live.start()
        except Exception:
            # A defect, which the API reports: nobody reads the request, so it must not stay.
            live.on_defect()
            raise
        return live

    def _route(self, processed: ProcessedInput, versions: Collection[ModelVersion]) -> AnyRoute:
        """Choose workers; an answer that has begun is for those of the same weights."""
        begun = {
            each.model_version
            for each in processed.resume
            if each.token_ids and not each.is_finished
        }
        return self.pool.route(
            processed.core_request,
            versions=begun.union(versions),
            session=processed.session,
            hashes=processed.prefix_hashes,
        )

    def _make(
        self,
        processed: ProcessedInput,
        route: AnyRoute,
        versions: Collection[ModelVersion],
    ) -> LiveRequest:
        processed, span = put_in_trace(processed)
        match processed.core_request.task:
            case Pool():
                return PoolingRequest(processed, route, self._services, span, versions=versions)
            case Generate(params):
                assert isinstance(route, Route), "of a request that generates"
                return _kind_of(params)(processed, params, route, self._services, span)

    def _on_tokens(self, live: LiveRequest, num_new: int) -> None:
        if live in self._waiting:
            self._waiting.discard(live)
            self._live[live].note_token()
        self._generation_tokens.inc(num_new)
        if live in self._unobserved:
            metrics = live.measure()
            # Decode's first message may overtake prefill's, which says what the prompt took.
            if metrics.prefill_ns:
                self._observe_first_token(live, metrics)

    def _on_end(self, live: LiveRequest) -> None:
        self._waiting.discard(live)
        reservation = self._live.pop(live)
        if live.core_request.mm_features:
            self.pool.tensors.release(live.core_request)
        self._note_idle()
        assert live.ending is not None
        _settle(reservation, live.ending)
        metrics = live.ending.metrics
        self._metrics.requests_in_flight.dec()
        outcome = str(live.ending.finish_reason)
        self._count(outcome)
        if isinstance(task := live.core_request.task, Pool):
            self._metrics.pooling.on_end(task.pooling_params.task, outcome)
        if live in self._unobserved and metrics.ttft_ns:
            self._observe_first_token(live, metrics)
        self._unobserved.discard(live)
        observe_end(self._metrics, metrics, model=self.model_name, exemplar=_exemplar(live))

    def _observe_first_token(self, live: LiveRequest, metrics: RequestMetrics) -> None:
        self._unobserved.discard(live)
        observe_first_token(self._metrics, metrics, model=self.model_name, exemplar=_exemplar(live))

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
        # What a tenant has used up is there for others: no overload.
        is_refused = error.code in _REFUSALS and not isinstance(error, RateLimitError)
        self._count("refused" if is_refused else "rejected")

    def _count(self, outcome: str) -> None:
        self._metrics.requests.labels(model=self.model_name, outcome=outcome).inc()


def _kind_of(
    params: SamplingParams,
) -> type[SingleCompletion] | type[ParentRequest] | type[BeamSearchRequest]:
    if params.use_beam_search:
        return BeamSearchRequest
    return SingleCompletion if params.n == 1 and params.best_of is None else ParentRequest


def _settle(reservation: Reservation, ending: Ending) -> None:
    """What no worker took costs nothing; what failed later costs what it had used. What another
    stream had brought was paid for by that one.
    """
    usage, error = ending.usage, ending.error
    num_new = usage.num_output_tokens - ending.num_resumed_tokens
    if error is not None and error.code in _REFUSALS and not num_new:
        reservation.settle()
        return
    reservation.settle(num_prompt_tokens=usage.num_prompt_tokens, num_output_tokens=num_new)


def _exemplar(live: LiveRequest) -> dict[str, str] | None:
    return {"trace_id": live.span.trace_id} if live.span is not None else None


def _begin_series(metrics: RouterMetrics, model: str) -> None:
    begin(metrics.requests, model=(model,), outcome=(*FINISH_REASONS, *_NOT_TAKEN))
    begin(metrics.prompt_tokens, model=(model,))
    begin(metrics.requests_routed, path=("disaggregated", "pooling"), reason=("",))
    begin(metrics.requests_routed, path=("local",), reason=get_args(LocalReason))
    begin(metrics.handoffs, outcome=get_args(HandoffOutcome))
    begin(metrics.redrives, reason=REDRIVE_REASONS, path=get_args(RoutePath))
