"""Tries workers whose circuit breaker is open, with generations of the router's own."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from pdserve_common.runtime import Runtime
from pdserve_router.workers.circuit_breaker import CircuitBreaker
from pdserve_router.workers.routing.pair_probe import ProbeFailedError, probe_alone
from pdserve_router.workers.worker import Worker

logger = logging.getLogger(__name__)

TRIAL_TIMEOUT_S = 10.0


class WorkerTrials:
    """The trials of a pool's workers: no client's request is spent on one that keeps failing. A
    trial that goes well closes the breaker, one that fails is followed by another after the
    breaker's backoff.
    """

    def __init__(
        self,
        on_change: Callable[[Worker], None],
        *,
        runtime: Runtime,
    ) -> None:
        """`on_change` is called with a worker whose breaker has closed, and has to call
        `update`.
        """
        self._on_change = on_change
        self._runtime = runtime
        self._workers: tuple[Worker, ...] = ()
        self._trials: dict[CircuitBreaker, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def update(self, workers: Iterable[Worker]) -> None:
        """Take those whose breaker is open."""
        self._workers = tuple(workers)
        self._advance()

    async def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for trial in self._trials.values():
            trial.cancel()
        await asyncio.gather(*self._trials.values(), return_exceptions=True)

    def _advance(self) -> None:
        """Start the trials that are due, and come back for those that will be."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_closed:
            return
        waits = []
        for worker in self._workers:
            # The breaker of a worker that is started anew is another one.
            breaker = worker.breaker
            if not worker.is_ready or not breaker.is_open or breaker in self._trials:
                continue
            if (wait_s := breaker.retry_in_s) > 0:
                waits.append(wait_s)
            else:
                self._start(worker, breaker)
        if waits:
            self._timer = self._runtime.call_later(min(waits), self._advance)

    def _start(self, worker: Worker, breaker: CircuitBreaker) -> None:
        trial = self._runtime.spawn(
            probe_alone(worker, timeout_s=TRIAL_TIMEOUT_S, runtime=self._runtime),
            name=f"trial of {worker.address}",
        )
        self._trials[breaker] = trial
        trial.add_done_callback(lambda done: self._on_tried(worker, breaker, done))

    def _on_tried(
        self, worker: Worker, breaker: CircuitBreaker, trial: "asyncio.Task[None]"
    ) -> None:
        del self._trials[breaker]
        if trial.cancelled() or not breaker.is_open:
            self._advance()
            return
        if (error := trial.exception()) is None:
            logger.info("worker %s works again", worker.address)
            breaker.close()
            self._on_change(worker)
            return
        is_expected = isinstance(error, ProbeFailedError)
        logger.warning(
            "worker %s still gets no requests: %s",
            worker.address,
            error,
            exc_info=None if is_expected else error,
        )
        breaker.open()
        self._advance()
