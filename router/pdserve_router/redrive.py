"""Requests that lost a worker: what each has lost, where it goes next, and when."""

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import Protocol

from pdserve_common.engine_types import EngineCoreRequest, EngineError, ErrorCode, WorkerRole
from pdserve_common.errors import NoWorkerError, OverloadedError
from pdserve_common.metrics import RouterMetrics
from pdserve_router.route_chooser import Route
from pdserve_router.worker_client import WorkerClient
from pdserve_router.worker_pool import WorkerPool

# D computes so few tokens itself: less than the way over a prefill worker costs.
SMALL_NUM_TOKENS = 512
# A worker that failed a request gets it again no sooner, and only if there is no other.
REUSE_DELAY_S = 0.5
# How often those that wait look at the workers' queues, which change with every step.
TICK_S = 0.05

KV_ERRORS = (ErrorCode.KV_TRANSFER_FAILED, ErrorCode.KV_EXPIRED)
# Reasons of routes without a prefill worker that is wanted but not to be had.
_DOWNGRADES = ("no_prefill_worker", "no_proven_pair", "prefill_queue")


@dataclass(slots=True)
class Recovery:
    """What one request has lost, and what it still has."""

    num_redrives: int = 0
    # Of the attempt that is lost: its route, what its workers said in that order, and when.
    route: Route | None = None
    errors: dict[WorkerClient, EngineError] = field(default_factory=dict)
    lost_at: float = 0.0
    # For metrics.
    reason: str = ""
    # D, if it may hold blocks of the request, and the tokens whose KV it has said it holds.
    holder: WorkerClient | None = None
    num_confirmed_tokens: int = 0
    # By earlier attempts.
    _failed_before: frozenset[WorkerClient] = frozenset()

    @property
    def error(self) -> EngineError:
        """What began it; the client gets it if nobody goes on. Further ones follow from it."""
        return next(iter(self.errors.values()))

    @property
    def blamed(self) -> frozenset[WorkerClient]:
        """Who failed the lost attempt: whoever said so of itself. A handoff that failed between two
        workers that live is put down to P, as D can do without it.
        """
        assert self.route is not None
        own = {worker for worker, error in self.errors.items() if error.code not in KV_ERRORS}
        return frozenset(own or {self.route.prefill or self.route.decode})

    @property
    def failed(self) -> frozenset[WorkerClient]:
        """Who failed the request in any attempt."""
        return self._failed_before | self.blamed

    @property
    def not_yet(self) -> frozenset[WorkerClient]:
        """Who failed it so recently that trying again makes no sense."""
        delay_s = max(REUSE_DELAY_S, (self.error.retry_after_ms or 0) / 1000)
        return self.blamed if time.monotonic() < self.lost_at + delay_s else frozenset()

    @property
    def good_holder(self) -> WorkerClient | None:
        """D, if it may hold blocks of the request and can go on with it."""
        holder = self.holder
        is_good = holder is not None and holder.is_ready and holder not in self.failed
        return holder if is_good else None

    def add(self, route: Route, worker: WorkerClient, error: EngineError, *, reason: str) -> None:
        """A worker of the current attempt, which is on `route`, cannot go on."""
        self.route = route
        self.reason = self.reason if self.errors else reason
        self.errors[worker] = error
        self.lost_at = time.monotonic()

    def forget(self) -> None:
        """The attempt goes on without the worker that was lost."""
        self.errors.clear()
        self.holder = None

    def begin_attempt(self) -> None:
        """The request is about to be sent again."""
        self._failed_before = self.failed
        self.num_redrives += 1
        self.num_confirmed_tokens = 0
        self.forget()


class Redrive(Protocol):
    """A request that can be sent again."""

    recovery: Recovery

    @property
    def next_request(self) -> EngineCoreRequest:
        """Its next attempt."""

    def resend(self, route: Route) -> None:
        """Begin the next attempt."""

    def give_up(self) -> None:
        """There is nobody to go on with: end with the last error."""


@dataclass(slots=True)
class _Waiting:
    redrive: Redrive
    deadline: float
    not_before: float
    # When it was first without any worker; None: it only waits for its turn.
    alone_since: float | None = None


class RedriveQueue:
    """Sends requests again, those with the oldest deadline first.

    They go ahead of new work, so they are let onto a worker only a few at a time: those that have
    not brought a token since are one request, or hold at most one step's tokens, or a quarter of
    those that wait there. So others lose a quarter of P at most when a D dies with many long
    contexts. Where no worker is left a request waits for one, for `wait_s` or until its deadline.
    """

    def __init__(
        self, pool: WorkerPool, *, metrics: RouterMetrics, max_redrives: int, wait_s: float
    ) -> None:
        self.pool = pool
        self.max_redrives = max_redrives
        self._metrics = metrics
        self._wait_s = wait_s
        self._waiting: dict[Redrive, _Waiting] = {}
        # Without a token since: the worker that computes their tokens, and how many.
        self._sent: dict[Redrive, tuple[WorkerClient, int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, redrive: Redrive) -> bool:
        return redrive in self._waiting

    def add(self, redrive: Redrive, *, delay_s: float = 0.0) -> None:
        """Send it as soon as its turn has come, not before `delay_s` has passed. One that waits
        already may become earlier. Ends in `resend`, `give_up` or `discard`.
        """
        self._sent.pop(redrive, None)
        deadline = redrive.next_request.deadline
        waiting = self._waiting.setdefault(
            redrive, _Waiting(redrive, math.inf if deadline is None else deadline, math.inf)
        )
        waiting.not_before = min(waiting.not_before, time.monotonic() + delay_s)
        self._changed(delay_s)

    def discard(self, redrive: Redrive) -> None:
        """It is over, or needs nobody else."""
        self._waiting.pop(redrive, None)
        self.on_token(redrive)
        self._changed()

    def on_token(self, redrive: Redrive) -> None:
        """Its prompt is computed: others may follow it there."""
        if self._sent.pop(redrive, None) is not None:
            self._changed()

    def _changed(self, delay_s: float = 0.0) -> None:
        """Look again soon. Never at once: several requests that are lost together are sent in the
        order of their deadlines, and nothing is sent from inside a worker's callback.
        """
        self._metrics.redrives_waiting.set(len(self._waiting))
        loop = asyncio.get_running_loop()
        if self._timer is not None and (
            not self._waiting or self._timer.when() > loop.time() + delay_s
        ):
            self._timer.cancel()
            self._timer = None
        if self._waiting and self._timer is None:
            self._timer = loop.call_later(delay_s, self._send_next)

    def _send_next(self) -> None:
        self._timer = None
        now = time.monotonic()
        for waiting in sorted(self._waiting.values(), key=lambda each: each.deadline):
            # One that is over by its deadline is ended by its own timer.
            is_due = waiting.not_before <= now < waiting.deadline
            if is_due and waiting.redrive in self._waiting and not self._try(waiting, now):
                # Nobody overtakes the one whose turn it is: small ones would keep it waiting.
                break
        self._changed(TICK_S)

    def _try(self, waiting: _Waiting, now: float) -> bool:
        """Send it, or give it up. False: it has to wait for others that were sent again."""
        redrive = waiting.redrive
        request = redrive.next_request
        try:
            route = self._route(redrive.recovery, request)
        except (NoWorkerError, OverloadedError):
            self._on_nobody(waiting, now)
            return True
        if route is None:
            waiting.alone_since = None
            return False
        del self._waiting[redrive]
        self._sent[redrive] = _load_of(redrive.recovery, request, route)
        reason = redrive.recovery.reason
        self._metrics.redrives.labels(reason=reason, path=route.path).inc()
        redrive.resend(route)
        return True

    def _on_nobody(self, waiting: _Waiting, now: float) -> None:
        if waiting.alone_since is None:
            waiting.alone_since = now
        if now - waiting.alone_since >= self._wait_s:
            del self._waiting[waiting.redrive]
            waiting.redrive.give_up()

    def _route(self, recovery: Recovery, request: EngineCoreRequest) -> Route | None:
        """Return where it goes next, None if it has to wait for others that were sent again. Raises
        NoWorkerError or OverloadedError if there is nobody.
        """
        busy = self._busy(request)
        holder = recovery.good_holder
        if holder is not None and _num_missing(recovery, request) <= SMALL_NUM_TOKENS:
            route = Route(decode=holder, reason="recovery")
        else:
            try:
                route = self._route_around(recovery, request, busy)
            except (NoWorkerError, OverloadedError):
                if busy:
                    return None
                raise
        if busy and route.prefill is None and route.reason in _DOWNGRADES:
            # D must not get what P has no room for.
            return None
        return route if self._has_room(*_load_of(recovery, request, route)) else None

    def _route_around(
        self, recovery: Recovery, request: EngineCoreRequest, busy: frozenset[WorkerClient]
    ) -> Route:
        """Let the pool choose among those that have not failed the request, if there are any."""
        if (holder := recovery.good_holder) is not None:
            others = frozenset(self.pool.decode) - {holder}
            with contextlib.suppress(NoWorkerError, OverloadedError):
                return self.pool.route(request, exclude=recovery.failed | others | busy)
        with contextlib.suppress(NoWorkerError, OverloadedError):
            return self.pool.route(request, exclude=recovery.failed | busy)
        return self.pool.route(request, exclude=recovery.not_yet | busy)

    def _busy(self, request: EngineCoreRequest) -> frozenset[WorkerClient]:
        """Return the prefill workers that have no room for it now."""
        num_tokens = _num_known(request)
        return frozenset(
            worker
            for worker, _ in self._sent.values()
            if worker.role is WorkerRole.PREFILL and not self._has_room(worker, num_tokens)
        )

    def _has_room(self, worker: WorkerClient, num_tokens: int) -> bool:
        sent = [count for other, count in self._sent.values() if other is worker]
        if not sent:
            return True
        step = worker.info.max_num_batched_tokens if worker.info is not None else 0
        quarter = worker.stats.num_waiting_tokens // 4 if worker.stats is not None else 0
        return sum(sent) + num_tokens <= max(step, quarter)


def _num_known(request: EngineCoreRequest) -> int:
    return len(request.prompt_token_ids) + len(request.resume_output_token_ids)


def _num_missing(recovery: Recovery, request: EngineCoreRequest) -> int:
    """Tokens whose KV the D that holds blocks does not have."""
    return max(0, _num_known(request) - recovery.num_confirmed_tokens)


def _load_of(
    recovery: Recovery, request: EngineCoreRequest, route: Route
) -> tuple[WorkerClient, int]:
    """Return who computes tokens on that route, and how many. P has none of what D holds."""
    if route.prefill is not None:
        return route.prefill, _num_known(request)
    is_holder = route.decode is recovery.holder
    return route.decode, _num_missing(recovery, request) if is_holder else _num_known(request)
