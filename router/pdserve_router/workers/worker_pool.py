"""The workers of a router: which there are, which can be used, and who takes a request."""

import asyncio
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NoReturn

from pdserve_common.capabilities import NO_EXTRAS, Capabilities
from pdserve_common.engine_types import (
    EngineCoreRequest,
    EngineInfo,
    KVTransferStats,
    WorkerRole,
)
from pdserve_common.errors import NoWorkerError
from pdserve_common.metrics import RouterMetrics
from pdserve_common.tls import Tls
from pdserve_router.text.served_model import ServedModel
from pdserve_router.workers.attach_client import LinkTimings
from pdserve_router.workers.discovery import Discovery
from pdserve_router.workers.duplicates import Duplicates
from pdserve_router.workers.origin import Origin
from pdserve_router.workers.pairs import SETTLE_S, Pairs
from pdserve_router.workers.prefix_index import PrefixIndex
from pdserve_router.workers.route_chooser import Route, RouteChooser, RoutingRules
from pdserve_router.workers.served_weights import ServedWeights
from pdserve_router.workers.worker_client import WorkerClient, WorkerState
from pdserve_router.workers.worker_trials import WorkerTrials

logger = logging.getLogger(__name__)

# Values of a metric's label. The last two are ready and refused: other weights than those that
# serve, and an engine_id that is in use.
WORKER_STATES = (*(state.value for state in WorkerState), "mismatched", "duplicate")

# A worker, or a prefill and a decode worker together.
Failing = WorkerClient | tuple[WorkerClient, WorkerClient]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What every ready worker can take."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    # What all of them serve besides.
    capabilities: Capabilities = NO_EXTRAS


class WorkerPool:
    """The workers that are listed, each attached as long as it is; lists may change at any time."""

    def __init__(
        self,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        model: ServedModel,
        router_id: str,
        rules: RoutingRules,
        metrics: RouterMetrics,
        on_change: Callable[[], None],
        timings: LinkTimings | None = None,
        tls: Tls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prefill` and `decode` are host:port or sources as in `discovery`; `on_change` is called
        when `is_ready` may have changed. Raises ValueError for an entry that is none of these.
        """
        self._model = model
        self._router_id = router_id
        self._timings = timings
        self._tls = tls
        self._rules = rules
        self._metrics = metrics
        self._notify = on_change
        self._clock = clock
        self._pairs = Pairs(
            require_transport=rules.require_transport,
            metrics=metrics,
            on_change=self._on_change,
            clock=clock,
        )
        self._trials = WorkerTrials(self._on_change, clock=clock)
        self.prefix_index = PrefixIndex[WorkerClient](metrics=metrics.prefix_index)
        self._chooser = RouteChooser(rules, self._pairs, self.prefix_index)
        self._sources = {
            role: Discovery(
                role,
                entries,
                on_addresses=self._on_addresses,
                errors=metrics.discovery_errors,
            )
            for role, entries in ((WorkerRole.PREFILL, prefill), (WorkerRole.DECODE, decode))
        }
        self._workers = {
            role: tuple(self._client(role, address) for address in source.static)
            for role, source in self._sources.items()
        }
        self._duplicates = Duplicates()
        self._weights = ServedWeights(
            disaggregation=rules.disaggregation,
            require_exact=rules.require_determinism == "exact",
            on_change=self._on_change,
            clock=clock,
        )
        # Since when those that are listed and not ready are not.
        self._gone_since: dict[WorkerClient, float] = {}
        # No longer listed, with requests that run to their end.
        self._leaving: dict[WorkerClient, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        # Told by the timer alone: it may come a moment before its time.
        self._has_settled = False
        self._settle_timer: asyncio.TimerHandle | None = None
        # From the first time it is ready until no decode worker is: then first proofs are not
        # waited for.
        self._was_ready = False
        self.limits: ModelLimits | None = None
        self._refresh()

    @property
    def prefill(self) -> tuple[WorkerClient, ...]:
        return self._workers[WorkerRole.PREFILL]

    @property
    def decode(self) -> tuple[WorkerClient, ...]:
        return self._workers[WorkerRole.DECODE]

    @property
    def is_ready(self) -> bool:
        """True if a request could be served now as it should be. Decode workers can work alone; but
        at first the proofs of pairs are waited for, for up to 10 s, so that no request is local
        just because it came early. With `require_disaggregation` it takes a proven pair.
        """
        if not self._available(self.decode):
            return False
        if self._has_pair:
            return True
        return not self._rules.require_disaggregation and (
            self._was_ready or not self._is_settling()
        )

    def start(self) -> None:
        for worker in (*self.decode, *self.prefill):
            worker.start()
        for source in self._sources.values():
            source.start()
        self._settle_timer = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)

    async def close(self) -> None:
        if self._settle_timer is not None:
            self._settle_timer.cancel()
        await asyncio.gather(*(source.close() for source in self._sources.values()))
        await self._pairs.close()
        await self._trials.close()
        for task in self._leaving.values():
            task.cancel()
        workers = (*self.decode, *self.prefill, *self._leaving)
        await asyncio.gather(
            *self._leaving.values(),
            *self._closing,
            *(worker.close() for worker in workers),
            return_exceptions=True,
        )
        self._weights.close()

    def model_limits(self) -> ModelLimits:
        """Return what requests are checked against. Raises NoWorkerError if no decode worker is
        ready.
        """
        if self.limits is None or not self._available(self.decode):
            states = ", ".join(f"{w.address} {self._state_of(w)}" for w in self.decode)
            raise NoWorkerError(
                f"no decode worker is ready ({states or 'none is listed'})", retry_after_ms=1000
            )
        return self.limits

    def route(
        self,
        request: EngineCoreRequest,
        *,
        origins: Collection[Origin] = (),
        exclude: AbstractSet[WorkerClient] = frozenset(),
    ) -> Route:
        """Choose the workers of a request or of its next attempt, none of those in `exclude`. They
        are of the weights that serve, or of those of `origins`, which its answer has begun with.
        Raises NoWorkerError if no other decode worker is ready or, where disaggregation is
        required, no other pair; OverloadedError if there it would have to wait too long.
        """
        decode = self._available(self.decode, origins)
        if not decode:
            self._raise_no_worker(origins)
        return self._chooser.choose(
            request,
            prefill=[w for w in self._available(self.prefill, origins) if w not in exclude],
            decode=[w for w in decode if w not in exclude],
        )

    def last_served_at(self, origins: Collection[Origin]) -> float:
        """Return when (by the clock) a listed worker was last ready that could go on with an
        answer of these origins, or take a request whose answer has not begun: now if one is. One
        that has never been attached counts from when it was listed, as it may be the next.
        """
        now = self._clock()
        name = self._weights.name_for(origins) if origins else ""

        def last(worker: WorkerClient) -> float:
            is_other = worker.info is not None and self._weights.name_of(worker.origin) != name
            return -math.inf if name and is_other else self._gone_since.get(worker, now)

        roles = [WorkerRole.DECODE]
        if self._rules.require_disaggregation:
            roles.append(WorkerRole.PREFILL)
        return min(
            max(map(last, self._distinct(self._workers[role])), default=-math.inf) for role in roles
        )

    def report_transfer(
        self, prefill: WorkerClient, decode: WorkerClient, stats: KVTransferStats
    ) -> None:
        """A pair did its handoff: the KV came."""
        self._pairs.report_transfer(prefill, decode, stats)

    def report_failure(self, failing: Failing) -> None:
        """A request failed because of a worker, or of a pair (prefill, decode); see
        `RedriveQueue.blame`. Three in a row keep requests away from it until a generation of the
        router's own succeeds, unless it is the last of its role that is left.
        """
        if isinstance(failing, tuple):
            self._pairs.report_failure(*failing)
            return
        was_open = failing.breaker.is_open
        failing.breaker.report_failure(may_open=not self._is_last(failing))
        if failing.breaker.is_open and not was_open:
            logger.warning("worker %s keeps failing: it gets no requests", failing.address)
            self._on_change()

    def report_success(self, working: WorkerClient) -> None:
        """A worker did its part of a request."""
        working.breaker.report_success()

    def _is_last(self, worker: WorkerClient) -> bool:
        """True if no other worker of its role and weights is ready and not left out."""
        return not any(w is not worker and not w.breaker.is_open for w in self._peers(worker))

    def _keep_last(self) -> None:
        """Use workers again if all of a role and of their weights that are ready keep failing, as
        the others have gone: that is better than nobody.
        """
        for worker in (*self._distinct(self.decode), *self._distinct(self.prefill)):
            if worker.is_ready and worker.breaker.is_open and self._is_last(worker):
                logger.warning("worker %s keeps failing, but no other is left", worker.address)
                worker.breaker.close()

    def _peers(self, worker: WorkerClient) -> list[WorkerClient]:
        """Return the workers that are ready and could take its place, itself among them."""
        name = self._weights.name_of(worker.origin)
        return [
            other
            for other in self._distinct(self._workers[worker.role])
            if other.is_ready and self._weights.name_of(other.origin) == name
        ]

    def _available(
        self, workers: Sequence[WorkerClient], origins: Collection[Origin] = ()
    ) -> list[WorkerClient]:
        """Return those that are ready for a new request, or to go on with such an answer."""
        name = self._weights.name_for(origins)
        return [
            worker
            for worker in self._distinct(workers)
            if worker.is_ready and name and self._weights.name_of(worker.origin) == name
        ]

    def _raise_no_worker(self, origins: Collection[Origin]) -> NoReturn:
        if not any(origin.weights for origin in origins):
            self.model_limits()
        raise NoWorkerError(
            "the answer cannot be resumed here: no decode worker that is ready has the weights "
            "that began it"
        )

    @property
    def _has_pair(self) -> bool:
        decode = frozenset(w for w in self._available(self.decode) if not w.breaker.is_open)
        prefill = [w for w in self._available(self.prefill) if not w.breaker.is_open]
        usable = self._pairs.usable()
        return any(not decode.isdisjoint(usable.get(p, ())) for p in prefill)

    def _state_of(self, worker: WorkerClient) -> str:
        """Return a value of the metric's label `state`; one that is ready may be refused."""
        if worker in self._duplicates.by_engine_id:
            return "duplicate"
        is_refused = worker.is_ready and self._weights.name and not self._weights.serves(worker)
        return "mismatched" if is_refused else worker.state.value

    def _settle(self) -> None:
        self._has_settled = True
        self._on_change()

    def _is_settling(self) -> bool:
        is_connecting = any(worker.state is WorkerState.CONNECTING for worker in self.prefill)
        return self._rules.disaggregation and (
            self._pairs.is_settling or (is_connecting and not self._has_settled)
        )

    def _client(self, role: WorkerRole, address: str) -> WorkerClient:
        return WorkerClient(
            address,
            role=role,
            model=self._model,
            router_id=self._router_id,
            # Its own for each client: a worker listed under two names would otherwise take the
            # second stream for a successor, and end what runs over the first.
            router_epoch=secrets.token_hex(16),
            on_change=self._on_change,
            prefix_index=self.prefix_index,
            count_tokens=self._metrics.generation_tokens.labels(model=self._model.name).inc,
            timings=self._timings,
            tls=self._tls,
            clock=self._clock,
        )

    def _on_addresses(self, role: WorkerRole, addresses: tuple[str, ...]) -> None:
        before = {worker.address: worker for worker in self._workers[role]}
        self._workers[role] = tuple(
            before.get(address) or self._join(role, address) for address in addresses
        )
        for worker in set(before.values()) - set(self._workers[role]):
            self._leaving[worker] = asyncio.create_task(
                self._leave(worker), name=f"leave {worker.address}"
            )
        self._on_change()

    def _join(self, role: WorkerRole, address: str) -> WorkerClient:
        for worker, task in self._leaving.items():
            if (worker.role, worker.address) == (role, address):
                # Nothing needs to attach anew, and what runs there counts on.
                task.cancel()
                del self._leaving[worker]
                return worker
        worker = self._client(role, address)
        worker.start()
        return worker

    async def _leave(self, worker: WorkerClient) -> None:
        logger.info("worker %s has left the list", worker.address)
        await worker.wait_until_idle()
        task = self._leaving.pop(worker)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        await worker.close()
        # Its engine_id is free.
        self._on_change()

    def _on_change(self) -> None:
        self._refresh()
        self._notify()

    def _refresh(self) -> None:
        is_serving = bool(self._weights.name)
        workers = (*self.decode, *self.prefill)
        now = self._clock()
        gone = [worker for worker in workers if not worker.is_ready]
        self._gone_since = {worker: self._gone_since.get(worker, now) for worker in gone}
        self._duplicates.update(workers, self._leaving, keeps_owners=is_serving)
        self._keep_last()
        prefill, decode = self._distinct(self.prefill), self._distinct(self.decode)
        if self._rules.disaggregation:
            self._pairs.update(prefill, decode)
        self._weights.update(
            prefill, decode, usable=self._pairs.usable(), has_settled=self._has_settled
        )
        available = [*self._available(self.decode), *self._available(self.prefill)]
        self.limits = _limits([w.info for w in available if w.info is not None])
        self._trials.update(workers)
        has_decode = bool(self._available(self.decode))
        self._was_ready = has_decode and (self._was_ready or self.is_ready)
        self._count()

    def _distinct(self, workers: Sequence[WorkerClient]) -> list[WorkerClient]:
        return [worker for worker in workers if worker not in self._duplicates.all]

    def _count(self) -> None:
        for role, workers in self._workers.items():
            name = role.name.lower()
            counts = Counter(self._state_of(worker) for worker in workers)
            for state in WORKER_STATES:
                self._metrics.workers.labels(role=name, state=state).set(counts[state])
            num_failing = sum(worker.breaker.is_open for worker in workers)
            self._metrics.workers_failing.labels(role=name).set(num_failing)


def _limits(infos: Sequence[EngineInfo]) -> ModelLimits | None:
    if not infos:
        return None
    return ModelLimits(
        max_model_len=min(info.max_model_len for info in infos),
        vocab_size=min(info.vocab_size for info in infos),
        eos_token_ids=infos[0].eos_token_ids,
        capabilities=Capabilities.shared(map(Capabilities.of, infos)),
    )
