"""Adds an adapter to more workers when all that hold it have much to do, and to those that had it
before they started again.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve_common.errors import PdserveError
from pdserve_common.metrics.lora import ScaleOuts
from pdserve_common.observability import defects
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import WorkerRole
from pdserve_common.types.lora import LoRAAdapter, LoRARequest
from pdserve_router.workers.adapter_rollout import AdapterRollout
from pdserve_router.workers.routing.routing_policy import load
from pdserve_router.workers.worker import Worker
from pdserve_router.workers.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

# How often requests with an adapter have the load looked at.
LOOK_S = 1.0
# After an adapter was added: requests have to come to its new workers before these count.
SETTLE_S = 10.0
# After a worker refused an adapter; each time twice as long.
BACKOFF_S = 10.0
MAX_BACKOFF_S = 600.0
# Adapters come and go for ever.
MAX_REMEMBERED = 1024


@dataclass(slots=True)
class _Turn:
    """When an adapter is looked at next, by the clock, and what a refusal adds to that."""

    due: float = 0.0
    backoff_s: float = BACKOFF_S


class AdapterScaleOut:
    """Looks as requests come; one adapter is added at a time."""

    def __init__(
        self,
        pool: WorkerPool,
        rollout: AdapterRollout,
        *,
        max_requests: int,
        outcomes: ScaleOuts,
        runtime: Runtime,
    ) -> None:
        """A worker with more than `max_requests` requests has much to do; 0: nothing is added."""
        self._pool = pool
        self._rollout = rollout
        self._max_requests = max_requests
        self._outcomes = outcomes
        self._runtime = runtime
        self._clock = runtime.now
        # By digest.
        self._turns: dict[str, _Turn] = {}
        self._task: asyncio.Task[None] | None = None

    def on_request(self, lora: LoRARequest) -> None:
        """A request with an adapter has been sent to its workers."""
        now = self._clock()
        if not self._max_requests or self._task is not None:
            return
        turn = self._turns.get(lora.digest)
        if turn is None:
            self._forget_old()
            turn = self._turns[lora.digest] = _Turn()
        if now < turn.due:
            return
        turn.due = now + LOOK_S
        limits = self._pool.limits
        adapter = limits.adapter(lora.lora_name) if limits is not None else None
        if adapter is None or adapter.digest != lora.digest or not adapter.path:
            return
        if workers := self._forgetful(adapter) or self._choose(adapter):
            self._task = self._runtime.spawn(self._add(adapter, workers, turn))

    async def close(self) -> None:
        """Give up what is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _add(self, adapter: LoRAAdapter, workers: Sequence[Worker], turn: _Turn) -> None:
        addresses = ", ".join(worker.address for worker in workers)
        try:
            if await self._rollout.extend(adapter, workers):
                _note_asked(adapter, workers)
                logger.info("the adapter %s is on %s too", adapter.name, addresses)
                self._outcomes.added.inc()
                turn.backoff_s = BACKOFF_S
            turn.due = self._clock() + SETTLE_S
        except PdserveError as error:
            _note_asked(adapter, workers)
            logger.info("the adapter %s is not on %s: %s", adapter.name, addresses, error.message)
            self._refused(turn)
        except Exception as error:
            defects.record("adapters", error, f"{addresses} the adapter {adapter.name}")
            self._refused(turn)
        finally:
            self._task = None

    def _refused(self, turn: _Turn) -> None:
        self._outcomes.refused.inc()
        turn.due = self._clock() + turn.backoff_s
        turn.backoff_s = min(2 * turn.backoff_s, MAX_BACKOFF_S)

    # ---- whom to add it to

    def _forgetful(self, adapter: LoRAAdapter) -> list[Worker]:
        """Return one worker that had it before it started again, if there is one. It is asked once:
        if it refuses, its folders may be others now.
        """
        for worker in (*self._pool.decode, *self._pool.prefill):
            if adapter.digest in worker.forgotten and self._lacks(worker, adapter):
                return [worker]
        return []

    def _choose(self, adapter: LoRAAdapter) -> list[Worker]:
        """Return who is to get it: none, or the pair with the least load, as far as it lacks it."""
        for role in (WorkerRole.DECODE, WorkerRole.PREFILL):
            holders = self._pool.holders(role, adapter.digest)
            if holders and all(map(self._is_busy, holders)):
                return self._pair_of(role, adapter)
        return []

    def _pair_of(self, role: WorkerRole, adapter: LoRAAdapter) -> list[Worker]:
        """Return the worker of a role with the least load that lacks it, and one paired with it
        unless one with little to do has it.
        """
        is_decode = role is WorkerRole.DECODE
        listed = self._pool.decode if is_decode else self._pool.prefill
        other = WorkerRole.PREFILL if is_decode else WorkerRole.DECODE
        holders = self._pool.holders(other, adapter.digest)
        takers = [w for w in listed if not self._is_busy(w) and self._lacks(w, adapter)]
        for worker in sorted(takers, key=load):
            paired = self._pool.paired(worker)
            holding = [each for each in paired if each in holders]
            if any(not self._is_busy(each) for each in holding):
                return [worker]
            if lacking := [each for each in paired if self._lacks(each, adapter)]:
                return [worker, min(lacking, key=load)]
            # Decode workers can work alone where there is no prefill.
            if holding or (is_decode and not self._pool.prefill):
                return [worker]
        return []

    def _lacks(self, worker: Worker, adapter: LoRAAdapter) -> bool:
        return self._rollout.may_extend(adapter, [worker])

    def _is_busy(self, worker: Worker) -> bool:
        return load(worker) > self._max_requests

    def _forget_old(self) -> None:
        """Make room for one more: forget those that were not looked at for longest."""
        if len(self._turns) >= MAX_REMEMBERED:
            by_age = sorted(self._turns, key=lambda digest: self._turns[digest].due)
            for digest in by_age[: MAX_REMEMBERED // 2]:
                del self._turns[digest]


def _note_asked(adapter: LoRAAdapter, workers: Sequence[Worker]) -> None:
    """They have it, or have refused it."""
    for worker in workers:
        worker.forgotten -= {adapter.digest}
