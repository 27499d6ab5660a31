"""Requests that lost a worker: what each has lost, where it goes next, and when."""

import asyncio
import contextlib
import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from pdserve_common.errors import (
    RETRYABLE_CODES,
    NoWorkerError,
    OverloadedError,
    RequestFailedError,
)
from pdserve_common.limits.validation import MAX_ATTEMPT
from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.observability import defects
from pdserve_common.observability.logging import log_request
from pdserve_common.runtime import Runtime
from pdserve_common.types.capabilities import adapter_not_held
from pdserve_common.types.engine import (
    EngineCoreRequest,
    EngineError,
    ErrorCode,
    ErrorFault,
    WorkerRole,
)
from pdserve_router.requests.poison_requests import (
    epoch_of,
    find_at_fault,
    is_death,
    is_to_be_judged,
    num_deaths,
)
from pdserve_router.workers.model_version import ModelVersion
from pdserve_router.workers.routing.prefix_index import num_known_tokens
from pdserve_router.workers.routing.route_chooser import AnyRoute, Route
from pdserve_router.workers.worker import Worker, WorkerState
from pdserve_router.workers.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

# Decode computes so few tokens itself: less than the way over a prefill worker costs.
SMALL_NUM_TOKENS = 512
# A worker that failed a request gets it again no sooner, and only if there is no other. Twice as
# long for each attempt in a row that brought no token, up to sixteen times.
REUSE_DELAY_S = 0.5
MAX_REUSE_DOUBLINGS = 4
# So many new tokens without another loss give one redrive back. At 10 to 50 tokens a second that is
# 10 to 50 s, about what a lost worker takes to come back: a stream survives any number of losses
# that come no faster. One that fails its workers where it stands brings none, and ends.
TOKENS_PER_REDRIVE = 512
# So many new tokens say that a request does not end its workers, and that there is room for it.
CLEARING_TOKENS = 32
# Deaths that are remembered for requests that run on: more than workers die while one does.
MAX_EXPLAINED = 1024
# How often those that wait look at the workers' queues, which change with every step; and when all
# who lost a worker have been told.
TICK_S = 0.05

KV_ERRORS = (ErrorCode.KV_TRANSFER_FAILED, ErrorCode.KV_EXPIRED)
# What the worker's link, state and load say already.
_STATE_ERRORS = (
    ErrorCode.ENGINE_DEAD,
    ErrorCode.DRAINING,
    ErrorCode.OVERLOADED,
    ErrorCode.NO_WORKER,
    ErrorCode.FAILED_PRECONDITION,
)
# Why requests are sent again; values of a metric's label.
REDRIVE_REASONS = (
    "kv_lost",
    *(code.name.lower() for code in (*RETRYABLE_CODES, ErrorCode.FAILED_PRECONDITION)),
)
# Reasons of routes without a prefill worker that is wanted but not to be had.
_DOWNGRADES = ("no_prefill_worker", "no_proven_pair", "prefill_queue")


@dataclass(slots=True)
class Recovery:
    """What one request has lost, and what it still has."""

    num_redrives: int = 0
    # Those of them that count against `max_redrives`: of losses that were not planned, and that
    # progress has not given back.
    num_spent: int = 0
    # The lost attempt was taken from a worker that drains.
    is_planned: bool = False
    # It was lost with a worker that died under another request, or perhaps did.
    is_excused: bool = False
    # When a worker first had no room for it, since it last brought more than a few tokens.
    overloaded_at: float | None = None
    # As in LostRequest.
    ended: list[tuple[Worker, str]] = field(default_factory=list)
    is_tried_alone: bool = False
    died_at: Worker | None = None
    # Those of its current attempt that have brought tokens.
    answering: set[Worker] = field(default_factory=set)
    # Of the attempt that is lost: its route, what its workers said in that order, and when.
    route: AnyRoute | None = None
    errors: dict[Worker, EngineError] = field(default_factory=dict)
    lost_at: float = 0.0
    # For metrics.
    reason: str = ""
    # Decode, if it may hold blocks of the request, and the tokens whose KV it has said it holds.
    holder: Worker | None = None
    num_confirmed_tokens: int = 0
    # Who failed earlier attempts, and when they may get it again.
    _retry_at_before: dict[Worker, float] = field(default_factory=dict)
    # Attempts since the last token, and tokens since a redrive was spent or given back.
    _num_idle: int = 0
    _num_new_tokens: int = 0
    _num_since_death: int = 0
    # Since a worker first had no room.
    _num_since_overload: int = 0

    @property
    def error(self) -> EngineError:
        """What began it; the client gets it if nobody goes on. Further ones follow from it."""
        return next(iter(self.errors.values()))

    @property
    def is_overloaded(self) -> bool:
        """Is it lost only as workers have no room?"""
        errors = self.errors.values()
        return bool(errors) and all(each.code is ErrorCode.OVERLOADED for each in errors)

    @property
    def is_by_death(self) -> bool:
        """Did a worker of the lost attempt die? Another request may be at fault."""
        return any(map(is_death, self.errors.values()))

    @property
    def is_free(self) -> bool:
        """Does this loss say nothing against the request?"""
        return self.is_planned or self.is_excused or self.is_overloaded

    @property
    def blamed(self) -> frozenset[Worker]:
        """Who failed the lost attempt: whoever said so of itself. A handoff that failed between two
        workers that live is put down to prefill, as decode can do without it.
        """
        assert self.route is not None
        own = {worker for worker, error in self.errors.items() if error.code not in KV_ERRORS}
        return frozenset(own or {self.route.prompt_worker})

    @property
    def failed(self) -> frozenset[Worker]:
        """Who failed the request in any attempt."""
        return frozenset(self._retry_at)

    def not_yet(self, now: float) -> frozenset[Worker]:
        """Who failed it so recently that trying again makes no sense."""
        return frozenset(worker for worker, at in self._retry_at.items() if now < at)

    @property
    def _retry_at(self) -> dict[Worker, float]:
        delay_s = REUSE_DELAY_S * 2 ** min(self._num_idle, MAX_REUSE_DOUBLINGS)
        delay_s = max(delay_s, (self.error.retry_after_ms or 0) / 1000)
        return self._retry_at_before | dict.fromkeys(self.blamed, self.lost_at + delay_s)

    @property
    def good_holder(self) -> Worker | None:
        """Decode, if it may hold blocks of the request and can go on with it."""
        holder = self.holder
        is_good = holder is not None and holder.is_ready and holder not in self.failed
        return holder if is_good else None

    def add(
        self, route: AnyRoute, worker: Worker, error: EngineError, *, reason: str, now: float
    ) -> None:
        """A worker of the current attempt, which is on `route`, cannot go on."""
        self.route = route
        self.reason = self.reason if self.errors else reason
        self.errors[worker] = error
        self.lost_at = now
        is_draining = any(each.state is WorkerState.DRAINING for each in route.workers)
        self.is_planned |= is_draining or error.code is ErrorCode.DRAINING
        if error.code is ErrorCode.OVERLOADED and self.overloaded_at is None:
            self.overloaded_at = now
            self._num_since_overload = 0
        if is_death(error) and not is_draining:
            self.ended.append((worker, epoch_of(worker)))
            self.died_at = worker if worker not in self.answering else None
            self._num_since_death = 0

    def note_tokens(self, num_new: int) -> None:
        """The answer goes on."""
        self._num_idle = 0
        self._num_since_overload += num_new
        if self._num_since_overload >= CLEARING_TOKENS:
            # They may come when decode has said already that it has no room.
            self.overloaded_at = self.lost_at if self.is_overloaded else None
        self._num_since_death += num_new
        if self._num_since_death >= CLEARING_TOKENS:
            self.ended.clear()
        self._num_new_tokens += num_new
        while self.num_spent and self._num_new_tokens >= TOKENS_PER_REDRIVE:
            self.num_spent -= 1
            self._num_new_tokens -= TOKENS_PER_REDRIVE

    def forget(self) -> None:
        """The attempt goes on without the worker that was lost."""
        self.errors.clear()
        self.holder = self.died_at = None
        self.is_planned = self.is_excused = False

    def begin_attempt(self) -> None:
        """The request is about to be sent again."""
        self._retry_at_before = self._retry_at
        self.num_redrives += 1
        self._num_idle += 1
        if not self.is_free:
            self.num_spent += 1
            self._num_new_tokens = 0
        self.num_confirmed_tokens = 0
        self.answering.clear()
        self.forget()


class Redrive(Protocol):
    """A request that can be sent again."""

    recovery: Recovery
    # Its first attempt.
    core_request: EngineCoreRequest
    # As RoutingPolicy has it.
    session: str

    @property
    def begun_versions(self) -> Collection[ModelVersion]:
        """Of the workers that its answer has come from so far; none if nothing has come."""

    @property
    def next_request(self) -> EngineCoreRequest:
        """Its next attempt."""

    def resend(self, route: AnyRoute) -> None:
        """Begin the next attempt."""

    def give_up(self, error: EngineError | None = None) -> None:
        """There is nobody to go on with: end with `error`, or with what began the last loss."""

    def on_defect(self) -> None:
        """End with an error that is this process's fault."""


@dataclass(slots=True)
class _Waiting:
    redrive: Redrive
    deadline: float
    not_before: float
    # When it was first without any worker; None: it only waits for its turn.
    no_worker_since: float | None = None


class RedriveQueue:
    """Sends requests again, those with the oldest deadline first.

    They go ahead of new work, so they are let onto a worker only a few at a time: those that have
    not brought a token since are one request, or hold at most one step's tokens, or a quarter of
    those that wait there, of which this router takes its share. So others lose a quarter of prefill
    at most when a decode worker dies with many long contexts. A request waits for a worker until
    its deadline, unless nobody has been ready for `wait_s` of those that could go on with it.
    """

    def __init__(
        self,
        pool: WorkerPool,
        *,
        metrics: RouterMetrics,
        max_redrives: int,
        wait_s: float,
        runtime: Runtime,
    ) -> None:
        self.pool = pool
        self._runtime = runtime
        self._clock = runtime.now
        self._max_redrives = max_redrives
        self._metrics = metrics
        self._wait_s = wait_s
        self._waiting: dict[Redrive, _Waiting] = {}
        # Without a token since: the worker that computes their tokens, and how many.
        self._sent: dict[Redrive, tuple[Worker, int]] = {}
        # The request that is tried alone.
        self._tried: Redrive | None = None
        # Deaths for which a request was ended: they say nothing against others.
        self._explained: OrderedDict[tuple[Worker, str], None] = OrderedDict()
        # What was lost by requests that ended before the verdict on them.
        self._over: deque[Recovery] = deque(maxlen=MAX_EXPLAINED)
        # Their sums.
        self._num_sent_tokens: Counter[Worker] = Counter()
        self._timer: asyncio.Handle | None = None
        # When it is due; uvloop's handles do not all tell.
        self._timer_at = 0.0

    def __contains__(self, redrive: Redrive) -> bool:
        return redrive in self._waiting

    def is_spent(self, redrive: Redrive) -> bool:
        """True if it has been sent again as often as it may. Planned losses, and those to workers
        that died under another request, are free, but within its deadline and what the wire holds;
        those to workers without room for as long as one is waited for. Of one that may have ended
        its workers that is found out first.
        """
        return not is_to_be_judged(redrive.recovery) and not self._has_attempt(redrive.recovery)

    def _has_attempt(self, recovery: Recovery) -> bool:
        """False if it has been sent again as often as it may, as far as is known."""
        if recovery.num_redrives >= MAX_ATTEMPT:
            return False
        if recovery.is_planned or recovery.is_excused:
            return True
        if recovery.is_overloaded and self._max_redrives:
            assert recovery.overloaded_at is not None
            return self._clock() - recovery.overloaded_at < self._wait_s
        return recovery.num_spent < self._max_redrives

    def blame(self, route: AnyRoute, worker: Worker, error: EngineError) -> None:
        """Tell the pool who is at fault for a request's failure. Never for what the request or its
        client has caused: it would fail anywhere, and must cost others nothing.
        """
        if error.fault is ErrorFault.PEER:
            if isinstance(route, Route) and route.prefill is not None:
                self.pool.report_failure((route.prefill, route.decode))
        elif error.fault is ErrorFault.WORKER and error.code not in _STATE_ERRORS:
            self.pool.report_failure(worker)

    def lose(
        self,
        redrive: Redrive,
        route: AnyRoute,
        worker: Worker,
        error: EngineError,
        *,
        reason: str,
    ) -> None:
        """Note that a worker cannot go on with the request's current attempt."""
        attempt = redrive.recovery.num_redrives
        redrive.recovery.add(route, worker, error, reason=reason, now=self._clock())
        what_next = "it is sent again when a worker has room"
        if not self._has_attempt(redrive.recovery):
            what_next = "no attempt is left"
        text = "lost %s: %s: %s; %s"
        args = (worker.address, reason, error.message, what_next)
        log_request(logger, logging.WARNING, redrive.core_request.request_id, attempt, text, *args)

    def add(self, redrive: Redrive, *, delay_s: float = 0.0) -> None:
        """Send it as soon as its turn has come, not before `delay_s` has passed. One that waits
        already may become earlier. Ends in `resend`, `give_up` or `discard`; one that is spent only
        waits for what `discard`s it, or for the verdict that another request is at fault.
        """
        self._forget_sent(redrive)
        self._forget_tried(redrive)
        self._forget_explained(redrive.recovery)
        if redrive.recovery.is_by_death and self.is_spent(redrive):
            # All that the worker had are judged first.
            delay_s = max(delay_s, 2 * TICK_S)
        deadline = redrive.core_request.deadline
        waiting = self._waiting.setdefault(
            redrive, _Waiting(redrive, math.inf if deadline is None else deadline, math.inf)
        )
        waiting.not_before = min(waiting.not_before, self._clock() + delay_s)
        self._changed(delay_s)

    def discard(self, redrive: Redrive) -> None:
        """It is over, or needs nobody else."""
        if self._waiting.pop(redrive, None) is not None and is_to_be_judged(redrive.recovery):
            # Else its deaths would be put down to others.
            self._over.append(redrive.recovery)
        self.on_token(redrive)
        self._forget_tried(redrive)
        self._changed()

    def on_token(self, redrive: Redrive) -> None:
        """Its prompt is computed: others may follow it there."""
        if self._forget_sent(redrive):
            self._changed()

    def on_answer(self, redrive: Redrive, route: AnyRoute, worker: Worker) -> None:
        """A worker of its attempt, which is on `route`, has brought a token. The last worker brings
        none before the others have done their part, whoever's message comes first.
        """
        recovery = redrive.recovery
        is_last = worker is route.workers[-1]
        recovery.answering.update(route.workers if is_last else (worker,))
        if recovery.is_tried_alone and is_last:
            recovery.is_tried_alone = False
            self._forget_tried(redrive)

    def _forget_tried(self, redrive: Redrive) -> None:
        if self._tried is redrive:
            self._tried = None
            self._changed()

    def _note_sent(self, redrive: Redrive, worker: Worker, num_tokens: int) -> None:
        self._sent[redrive] = (worker, num_tokens)
        self._num_sent_tokens[worker] += num_tokens

    def _forget_sent(self, redrive: Redrive) -> bool:
        """False if it was not noted."""
        if (sent := self._sent.pop(redrive, None)) is None:
            return False
        worker, num_tokens = sent
        self._num_sent_tokens[worker] -= num_tokens
        if not self._num_sent_tokens[worker]:
            del self._num_sent_tokens[worker]
        return True

    def _changed(self, delay_s: float = 0.0) -> None:
        """Look again soon. Never at once: several requests that are lost together are sent in the
        order of their deadlines, and nothing is sent from inside a worker's callback.
        """
        self._metrics.redrives_waiting.set(len(self._waiting))
        due = self._clock() + delay_s
        if self._timer is not None and (not self._waiting or self._timer_at > due):
            self._timer.cancel()
            self._timer = None
        if self._waiting and self._timer is None:
            self._timer, self._timer_at = self._runtime.call_later(delay_s, self._send_next), due

    def _send_next(self) -> None:
        self._timer = None
        now = self._clock()
        try:
            with defects.contained("requests", "the look for requests that end workers"):
                self._end_those_at_fault(now)
            self._send_those_due(now)
        finally:
            self._changed(TICK_S)

    def _send_those_due(self, now: float) -> None:
        is_unanswered = not any(worker.is_ready for worker in self.pool.answering)
        is_blocked = False
        for waiting in sorted(self._waiting.values(), key=lambda each: each.deadline):
            # One that is over by its deadline is ended by its own timer.
            is_due = waiting.not_before <= now < waiting.deadline
            if not is_due or waiting.redrive not in self._waiting:
                continue
            with self._contained(waiting.redrive):
                is_blocked |= self._must_wait(
                    waiting, now, is_unanswered=is_unanswered, is_blocked=is_blocked
                )

    @contextlib.contextmanager
    def _contained(self, redrive: Redrive) -> Iterator[None]:
        """A defect with one request must neither leave it without an end nor stop the others."""
        try:
            yield
        except Exception as error:
            defects.record("requests", error, f"request {redrive.core_request.request_id}")
            with defects.contained("requests", "the end of a request with a defect"):
                self.discard(redrive)
                redrive.on_defect()

    def _must_wait(
        self, waiting: _Waiting, now: float, *, is_unanswered: bool, is_blocked: bool
    ) -> bool:
        """Send one that is due, give it up or have it wait. True: those behind it have to wait as
        well.
        """
        recovery = waiting.redrive.recovery
        if self.is_spent(waiting.redrive):
            self._give_up(waiting.redrive)
            return False
        if is_to_be_judged(recovery) or (recovery.is_tried_alone and self._tried is not None):
            return False
        # Without anybody who could end it, making the next attempt of each takes long for
        # nothing. But decode may have left the list and still hold the blocks of what runs there.
        if is_unanswered and not _is_nearly_computed(waiting.redrive):
            self._wait_or_give_up(waiting, now)
            return False
        # Nobody overtakes the one whose turn it is: small ones would keep it waiting. But what
        # decode holds blocks of it does not hold for long, and it needs nobody's queue.
        if is_blocked and not _is_nearly_computed(waiting.redrive):
            return True
        return not self._try(waiting, now)

    def _end_those_at_fault(self, now: float) -> None:
        """End requests under which workers die, and have that cost the others nothing."""
        waiting = {id(each.recovery): each for each in self._waiting}
        lost = [(each.redrive.recovery, each.not_before) for each in self._waiting.values()]
        over = [each for each in self._over if is_to_be_judged(each) and id(each) not in waiting]
        self._over.clear()
        self._over.extend(over)
        lost += [(each, now) for each in over]
        to_be_sent = (
            each
            for each in self._waiting
            if not is_to_be_judged(each.recovery) and not self.is_spent(each)
        )
        rivals = [each.recovery for each in (*self._sent, *to_be_sent)]
        for recovery, worker in find_at_fault(lost, now, settle_s=TICK_S, rivals=rivals):
            error = RequestFailedError(
                f"{num_deaths(recovery)} workers were lost under this request: no other one gets it"
            )
            if (redrive := waiting.get(id(recovery))) is not None:
                with self._contained(redrive):
                    self._give_up(redrive, error.to_engine_error())
            self._explained.update(dict.fromkeys(recovery.ended))
            while len(self._explained) > MAX_EXPLAINED:
                self._explained.popitem(last=False)
            for each in self._waiting:
                each.recovery.is_excused |= worker in each.recovery.errors
                self._forget_explained(each.recovery)

    def _forget_explained(self, recovery: Recovery) -> None:
        recovery.ended = [each for each in recovery.ended if each not in self._explained]

    def _try(self, waiting: _Waiting, now: float) -> bool:
        """Send it, or give it up. False: it has to wait for others that were sent again."""
        redrive = waiting.redrive
        request = redrive.next_request
        try:
            route = self._route(redrive, request)
        except (NoWorkerError, OverloadedError):
            self._wait_or_give_up(waiting, now)
            return True
        if route is None:
            waiting.no_worker_since = None
            return False
        del self._waiting[redrive]
        self._note_sent(redrive, *_load_of(redrive.recovery, request, route))
        if redrive.recovery.is_tried_alone:
            self._tried = redrive
        reason = redrive.recovery.reason
        self._metrics.redrives.labels(reason=reason, path=route.path).inc()
        redrive.resend(route)
        return True

    def _wait_or_give_up(self, waiting: _Waiting, now: float) -> None:
        lora = waiting.redrive.core_request.lora_request
        if lora is not None and not self.pool.may_serve_adapter(lora.digest):
            # It is removed: who comes back or joins has it no more than others.
            self._give_up(waiting.redrive, adapter_not_held(lora).to_engine_error())
            return
        if waiting.no_worker_since is None:
            waiting.no_worker_since = now
        served_at = self.pool.last_served_at(
            waiting.redrive.begun_versions, adapter=lora.digest if lora is not None else ""
        )
        if now - max(waiting.no_worker_since, served_at) >= self._wait_s:
            self._give_up(waiting.redrive)

    def _give_up(self, redrive: Redrive, error: EngineError | None = None) -> None:
        del self._waiting[redrive]
        redrive.give_up(error)

    def _route(self, redrive: Redrive, request: EngineCoreRequest) -> AnyRoute | None:
        """Return where it goes next, None if it has to wait for others that were sent again. Raises
        NoWorkerError or OverloadedError if there is nobody.
        """
        busy = self._busy(request)
        recovery = redrive.recovery
        holder = recovery.good_holder
        route: AnyRoute
        if holder is not None and _is_nearly_computed(redrive):
            route = Route(decode=holder, reason="recovery")
        else:
            try:
                route = self._route_around(redrive, request, busy)
            except (NoWorkerError, OverloadedError):
                if busy:
                    return None
                raise
        if busy and route.reason in _DOWNGRADES:
            # Decode must not get what prefill has no room for.
            return None
        return route if self._has_room(*_load_of(recovery, request, route)) else None

    def _route_around(
        self, redrive: Redrive, request: EngineCoreRequest, busy: frozenset[Worker]
    ) -> AnyRoute:
        """Let the pool choose among those that have not failed the request, if there are any."""
        recovery = redrive.recovery
        route = partial(
            self.pool.route, request, versions=redrive.begun_versions, session=redrive.session
        )
        if (holder := recovery.good_holder) is not None:
            with contextlib.suppress(NoWorkerError, OverloadedError):
                return route(exclude=recovery.failed | busy, decode=holder)
        with contextlib.suppress(NoWorkerError, OverloadedError):
            return route(exclude=recovery.failed | busy)
        return route(exclude=recovery.not_yet(self._clock()) | busy)

    def _busy(self, request: EngineCoreRequest) -> frozenset[Worker]:
        """Return the prefill workers that have no room for it now."""
        num_tokens = num_known_tokens(request)
        return frozenset(
            worker
            for worker in self._num_sent_tokens
            if worker.role is WorkerRole.PREFILL and not self._has_room(worker, num_tokens)
        )

    def _has_room(self, worker: Worker, num_tokens: int) -> bool:
        num_sent_tokens = self._num_sent_tokens[worker]
        if not num_sent_tokens:
            return True
        step = worker.info.max_num_batched_tokens if worker.info is not None else 0
        quarter = worker.stats.num_waiting_tokens // 4 if worker.stats is not None else 0
        return num_sent_tokens + num_tokens <= max(step, quarter) // worker.num_routers


def _is_nearly_computed(redrive: Redrive) -> bool:
    """True if decode holds blocks of it and can soon compute what is missing."""
    recovery = redrive.recovery
    # The prompt first: making the next attempt takes long.
    if (
        recovery.good_holder is None
        or _num_missing(recovery, redrive.core_request) > SMALL_NUM_TOKENS
    ):
        return False
    return _num_missing(recovery, redrive.next_request) <= SMALL_NUM_TOKENS


def _num_missing(recovery: Recovery, request: EngineCoreRequest) -> int:
    """Tokens whose KV the decode worker that holds blocks does not have."""
    return max(0, num_known_tokens(request) - recovery.num_confirmed_tokens)


def _load_of(recovery: Recovery, request: EngineCoreRequest, route: AnyRoute) -> tuple[Worker, int]:
    """Return who computes tokens on that route, and how many. Prefill has none of what decode
    holds.
    """
    worker = route.prompt_worker
    is_holder = worker is recovery.holder
    num_tokens = _num_missing(recovery, request) if is_holder else num_known_tokens(request)
    return worker, num_tokens
