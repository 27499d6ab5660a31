"""The workers of a router: which there are, which can be used, and who takes a request."""

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import NoReturn, Protocol

from pdserve_common.errors import NoWorkerError
from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.observability import defects
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import EngineCoreRequest, KVTransferStats, WorkerRole
from pdserve_common.types.lora import LoRAAdapter
from pdserve_router.workers.cells import Cell
from pdserve_router.workers.clients.held_tensors import DEFAULT_MAX_BYTES, HeldTensors
from pdserve_router.workers.discovery import Discovery
from pdserve_router.workers.duplicates import Duplicates
from pdserve_router.workers.model_limits import ModelLimits, SharedLimits
from pdserve_router.workers.model_version import ModelVersion
from pdserve_router.workers.routing.pairs import SETTLE_S, Pairs
from pdserve_router.workers.routing.prefix_index import PrefixIndex
from pdserve_router.workers.routing.route_chooser import AnyRoute, RouteChooser, RoutingRules
from pdserve_router.workers.routing.route_table import RouteTable, name_with_adapter
from pdserve_router.workers.served_weights import ServedWeights
from pdserve_router.workers.worker import Worker, WorkerState
from pdserve_router.workers.worker_states import WorkerStates
from pdserve_router.workers.worker_trials import WorkerTrials

logger = logging.getLogger(__name__)

# A worker, or a prefill and a decode worker together.
Failing = Worker | tuple[Worker, Worker]


class Connect(Protocol):
    """Makes a worker of an address, which attaches when it is started."""

    def __call__(
        self,
        address: str,
        *,
        role: WorkerRole,
        on_change: Callable[[], None],
        prefix_index: PrefixIndex[Worker],
        tensors: HeldTensors,
    ) -> Worker: ...


class WorkerPool:
    """The workers that are listed, each attached as long as it is; lists may change at any time."""

    def __init__(
        self,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        connect: Connect,
        rules: RoutingRules,
        metrics: RouterMetrics,
        on_change: Callable[[], None],
        runtime: Runtime,
        cell: Cell | None = None,
        max_held_tensor_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        """`prefill` and `decode` are host:port or sources as in `discovery`, of which the workers
        of `cell` are used; `on_change` is called when `is_ready` may have changed. Raises
        ValueError for an entry that is none of these.
        """
        self._connect = connect
        self._rules = rules
        self._metrics = metrics
        self._notify = on_change
        self._runtime = runtime
        self._clock = runtime.now
        self._table = RouteTable()
        self._pairs = Pairs(
            require_transport=rules.require_transport,
            metrics=metrics,
            table=self._table,
            on_change=self._on_change,
            runtime=runtime,
        )
        self._trials = WorkerTrials(self._on_worker, runtime=runtime)
        self.prefix_index = PrefixIndex[Worker](
            runtime=runtime, role_of=attrgetter("role"), metrics=metrics.prefix_index
        )
        # What live requests name.
        self.tensors = HeldTensors(max_bytes=max_held_tensor_bytes)
        metrics.pictures.follow(lambda: self.tensors.num_bytes)
        self._chooser = RouteChooser(rules, self._table, self.prefix_index, runtime)
        self._sources = {
            role: Discovery(
                role,
                entries,
                on_addresses=self._on_addresses,
                errors=metrics.discovery_errors,
            )
            for role, entries in ((WorkerRole.PREFILL, prefill), (WorkerRole.DECODE, decode))
        }
        self._cell = cell or Cell("", 0)
        # What the sources list, of all cells.
        self._lists = {role: source.static for role, source in self._sources.items()}
        self._workers = {
            role: tuple(self._client(role, address) for address in addresses)
            for role, addresses in self._cell.members(self._lists).items()
        }
        # Places in the list.
        self._listed: dict[Worker, int] = {}
        self._duplicates = Duplicates(self._listed)
        self._weights = ServedWeights(
            disaggregation=rules.disaggregation,
            require_exact=rules.require_determinism == "exact",
            has_pair=lambda name: bool(self._table.paired(WorkerRole.PREFILL, name)),
            on_change=self._on_change,
            runtime=runtime,
        )
        self.shared_limits = SharedLimits()
        # Since when those that are listed and not ready are not.
        self._gone_since: dict[Worker, float] = {}
        # Listed ones that keep failing.
        self._failing: dict[Worker, None] = {}
        # Workers that have changed since they were last taken as they are.
        self._changed: dict[Worker, None] = {}
        self._states = WorkerStates(metrics)
        # No longer listed, with requests that run to their end.
        self._leaving: dict[Worker, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        # Told by the timer alone: it may come a moment before its time.
        self._has_settled = False
        self._settle_timer: asyncio.TimerHandle | None = None
        # From the first time it is ready until no worker is that ends requests: then first proofs
        # are not waited for.
        self._was_ready = False
        self.limits: ModelLimits | None = None
        self._list_workers()
        self._refresh(self._listed)

    @property
    def prefill(self) -> tuple[Worker, ...]:
        return self._workers[WorkerRole.PREFILL]

    @property
    def decode(self) -> tuple[Worker, ...]:
        return self._workers[WorkerRole.DECODE]

    @property
    def answering_role(self) -> WorkerRole:
        """Whose workers end requests; before any has told, it is of whom there are."""
        is_known = self._weights.name or self.decode
        return self._weights.role if is_known else WorkerRole.PREFILL

    @property
    def answering_name(self) -> str:
        """What a worker is called that ends requests."""
        is_pooling = self.answering_role is WorkerRole.PREFILL
        return "prefill worker with a model that pools" if is_pooling else "decode worker"

    @property
    def answering(self) -> tuple[Worker, ...]:
        """The listed workers of that role."""
        return self._workers[self.answering_role]

    @property
    def is_ready(self) -> bool:
        """True if a request could be served now as it should be. Decode workers can work alone; but
        at first the proofs of pairs are waited for, for up to 10 s, so that no request is local
        just because it came early. With `require_disaggregation` it takes a proven pair. A model
        that pools takes a prefill worker and nothing else.
        """
        if not self._available():
            return False
        if self.answering_role is WorkerRole.PREFILL:
            return True
        if self._table.paired(WorkerRole.PREFILL, self._weights.name):
            return True
        return not self._rules.require_disaggregation and (
            self._was_ready or not self._is_settling()
        )

    def start(self) -> None:
        for worker in (*self.decode, *self.prefill):
            worker.start()
        for source in self._sources.values():
            source.start()
        self._settle_timer = self._runtime.call_later(SETTLE_S, self._settle)

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
        """Return what requests are checked against. Raises NoWorkerError if no worker is ready that
        could end one.
        """
        if self.limits is None or not self._available():
            states = ", ".join(f"{w.address} {self._state_of(w)}" for w in self.answering)
            raise NoWorkerError(
                f"no {self.answering_name} is ready ({states or 'none is listed'})",
                retry_after_ms=1000,
            )
        return self.limits

    def route(
        self,
        request: EngineCoreRequest,
        *,
        versions: Collection[ModelVersion] = (),
        exclude: AbstractSet[Worker] = frozenset(),
        decode: Worker | None = None,
        session: str = "",
        hashes: Sequence[int] = (),
    ) -> AnyRoute:
        """Choose the workers of a request or of its next attempt, none of those in `exclude`, and
        no decode worker but `decode` if there is one; `session` is as RoutingPolicy has it, and
        `hashes` are the request's `prefix_hashes` if they are known. They
        are of the weights that serve, or of those of `origins`, which its answer has begun with.
        Raises NoWorkerError if no other decode worker is ready (of a pooling request: prefill
        worker) or, where disaggregation is required, no other pair; OverloadedError if there it
        would have to wait too long.
        """
        if not self._available(versions):
            self._raise_no_worker(versions)
        name = self._weights.name_for(versions)
        if request.lora_request is not None:
            name = name_with_adapter(name, request.lora_request.digest)
        return self._chooser.choose(
            request, name=name, exclude=exclude, decode=decode, session=session, hashes=hashes
        )

    def may_serve_adapter(self, digest: str) -> bool:
        """True if a listed worker that ends requests holds it, or did before it was lost."""
        infos = (worker.info for worker in self.answering)
        return any(info is not None and digest in info.adapter_digests for info in infos)

    def listed_adapters(self) -> tuple[LoRAAdapter, ...]:
        """Return the adapters that requests can use as they should: with a proven pair, if there
        are prefill workers.
        """
        name, adapters = self._weights.name, self.limits.adapters if self.limits else ()
        has_prefill = bool(self._table.workers(WorkerRole.PREFILL, name))
        is_paired = has_prefill and self.answering_role is WorkerRole.DECODE
        if not is_paired or not self._rules.disaggregation:
            return adapters
        return tuple(
            each
            for each in adapters
            if self._table.paired(WorkerRole.PREFILL, name_with_adapter(name, each.digest))
        )

    def serves(self, worker: Worker) -> bool:
        """True if it is listed and ready, with the weights that serve."""
        return worker.is_ready and self._weights.serves(worker)

    def holders(self, role: WorkerRole, digest: str) -> Collection[Worker]:
        """Return those that new requests with an adapter may go to."""
        return self._table.workers(role, name_with_adapter(self._weights.name, digest)).items

    def paired(self, worker: Worker) -> Collection[Worker]:
        """Return those that it is proven to work with."""
        return self._table.paired_with(worker, self._weights.name).items

    def last_served_at(self, versions: Collection[ModelVersion], *, adapter: str = "") -> float:
        """Return when (by the clock) a listed worker was last ready that could go on with an
        answer of these versions, or take a request whose answer has not begun: now if one is. One
        that has never been attached counts from when it was listed, as it may be the next. With
        the digest of an `adapter` only those count that hold it, or held it when they were lost.
        """
        now = self._clock()
        name = self._weights.name_for(versions) if versions else ""

        def last(role: WorkerRole) -> float:
            if self._has_ready(role, name, adapter):
                return now
            return max(
                (
                    since
                    for worker, since in self._gone_since.items()
                    if worker.role is role and not self._is_other(worker, name, adapter)
                ),
                default=-math.inf,
            )

        roles = {self.answering_role}
        if self._rules.require_disaggregation:
            roles.add(WorkerRole.PREFILL)
        return min(map(last, roles))

    def _has_ready(self, role: WorkerRole, name: str, adapter: str) -> bool:
        """True if a worker of a set of weights is ready, and holds the adapter; empty: of any."""
        if adapter:
            return any(
                worker.is_ready and not self._is_other(worker, name, adapter)
                for worker in self._workers[role]
            )
        if name:
            return bool(self._weights.ready(role, name))
        return self._states.count(role, WorkerState.READY.value, "mismatched") > 0

    def _is_other(self, worker: Worker, name: str, adapter: str) -> bool:
        if worker.info is None:
            return False
        if adapter and adapter not in worker.info.adapter_digests:
            return True
        return bool(name) and self._weights.name_of(worker.model_version) != name

    def report_transfer(self, prefill: Worker, decode: Worker, stats: KVTransferStats) -> None:
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
            self._on_worker(failing)

    def report_success(self, working: Worker) -> None:
        """A worker did its part of a request."""
        working.breaker.report_success()

    def _is_last(self, worker: Worker) -> bool:
        """True if no other worker of its role and weights is ready and not left out."""
        name = self._weights.name_of(worker.model_version)
        working = self._table.workers(worker.role, name)
        return len(working) == (worker in working)

    def _keep_last(self) -> None:
        """Use workers again if all of a role and of their weights that are ready keep failing, as
        the others have gone: that is better than nobody.
        """
        for worker in tuple(self._failing):
            if worker.is_ready and worker not in self._duplicates and self._is_last(worker):
                logger.warning("worker %s keeps failing, but no other is left", worker.address)
                worker.breaker.close()
                self._note_breaker(worker)

    def _available(self, versions: Collection[ModelVersion] = ()) -> Collection[Worker]:
        """Return those that are ready to end a new request, or to go on with such an answer."""
        return self._weights.ready(self._weights.role, self._weights.name_for(versions))

    def _raise_no_worker(self, versions: Collection[ModelVersion]) -> NoReturn:
        if not any(model_version.weights for model_version in versions):
            self.model_limits()
        if self.answering_role is WorkerRole.PREFILL:
            raise NoWorkerError(
                "no prefill worker that is ready has the weights that the call began with",
                retry_after_ms=1000,
            )
        raise NoWorkerError(
            "the answer cannot be resumed here: no decode worker that is ready has the weights "
            "that began it"
        )

    def _state_of(self, worker: Worker) -> str:
        """Return a value of the metric's label `state`; one that is ready may be refused."""
        if worker in self._duplicates.by_engine_id:
            return "duplicate"
        is_refused = worker.is_ready and self._weights.name and not self._weights.serves(worker)
        return "mismatched" if is_refused else worker.state.value

    def _settle(self) -> None:
        self._has_settled = True
        self._on_change()

    def _is_settling(self) -> bool:
        is_connecting = self._states.count(WorkerRole.PREFILL, WorkerState.CONNECTING.value) > 0
        return self._rules.disaggregation and (
            self._pairs.is_settling or (is_connecting and not self._has_settled)
        )

    def _client(self, role: WorkerRole, address: str) -> Worker:
        worker = self._connect(
            address,
            role=role,
            on_change=lambda: self._on_worker(worker),
            prefix_index=self.prefix_index,
            tensors=self.tensors,
        )
        return worker

    def _on_addresses(self, role: WorkerRole, addresses: tuple[str, ...]) -> None:
        self._lists[role] = addresses
        # How many cells there are depends on both roles.
        for each, members in self._cell.members(self._lists).items():
            if members != tuple(worker.address for worker in self._workers[each]):
                self._set_members(each, members)

    def _set_members(self, role: WorkerRole, addresses: tuple[str, ...]) -> None:
        before = {worker.address: worker for worker in self._workers[role]}
        self._workers[role] = tuple(
            before.get(address) or self._join(role, address) for address in addresses
        )
        gone = set(before.values()) - set(self._workers[role])
        joined = set(self._workers[role]) - set(before.values())
        self._list_workers()
        for worker in gone:
            self._leaving[worker] = self._runtime.spawn(
                self._leave(worker), name=f"leave {worker.address}"
            )
        self._refresh((*gone, *joined))
        self._notify()

    def _list_workers(self) -> None:
        self._listed.clear()
        self._listed.update((w, place) for place, w in enumerate((*self.decode, *self.prefill)))

    def _join(self, role: WorkerRole, address: str) -> Worker:
        for worker, task in self._leaving.items():
            if (worker.role, worker.address) == (role, address):
                # Nothing needs to attach anew, and what runs there counts on.
                task.cancel()
                del self._leaving[worker]
                return worker
        worker = self._client(role, address)
        worker.start()
        return worker

    async def _leave(self, worker: Worker) -> None:
        logger.info("worker %s has left the list", worker.address)
        with defects.contained("workers", f"the leave of worker {worker.address}"):
            await worker.wait_until_idle()
            task = self._leaving.pop(worker)
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            await worker.close()
            # Its engine_id is free, and it is not taken again.
            self._changed.pop(worker, None)
            self._refresh(self._duplicates.forget(worker))
            self._notify()

    def _on_worker(self, worker: Worker) -> None:
        self._refresh((worker,))
        self._notify()

    def _on_change(self) -> None:
        """No worker has changed, but time has passed, or a pair is used or not any more."""
        self._refresh(())
        self._notify()

    def _refresh(self, changed: Iterable[Worker]) -> None:
        """Take the workers that have changed as they are now; what it costs depends on them and on
        whom they work with, not on how many there are. Those that a defect keeps from it are taken
        the next time.
        """
        is_serving = bool(self._weights.name)
        self._changed.update(dict.fromkeys(changed))
        touched = self._changed.copy()
        for worker in tuple(touched):
            touched.update(dict.fromkeys(self._duplicates.update(worker, keeps_owners=is_serving)))
        for worker in touched:
            self._note(worker)
            self._count(worker)
        self._pairs.advance()
        num_dialed = self._states.count(self.answering_role, WorkerState.CONNECTING.value)
        if self._weights.decide(num_dialed=num_dialed, has_settled=self._has_settled):
            for worker in self._listed:
                self._count(worker)
        self._keep_last()
        self.limits = self.shared_limits.of(self._weights.name)
        self._trials.update(self._failing)
        is_able = bool(self._available())
        self._was_ready = is_able and (self._was_ready or self.is_ready)
        self._states.show(self._failing)
        self._changed.clear()
        for adapter in self.limits.adapters if self.limits is not None else ():
            self._metrics.lora.requests.begin(adapter.name)

    def _note(self, worker: Worker) -> None:
        is_listed = worker in self._listed
        if is_listed and not worker.is_ready:
            self._gone_since.setdefault(worker, self._clock())
        else:
            self._gone_since.pop(worker, None)
        is_distinct = is_listed and worker not in self._duplicates
        self._weights.note(worker, is_listed=is_distinct)
        name = (
            self._weights.name_of(worker.model_version) if is_distinct and worker.is_ready else ""
        )
        self.shared_limits.set(worker, name)
        self._note_breaker(worker)
        if self._rules.disaggregation:
            self._pairs.update(worker, is_listed=is_distinct)

    def _note_breaker(self, worker: Worker) -> None:
        """It may take requests, or may not, as it keeps failing."""
        is_listed, is_failing = worker in self._listed, worker.breaker.is_open
        if is_listed and is_failing:
            self._failing[worker] = None
        else:
            self._failing.pop(worker, None)
        is_used = is_listed and worker.is_ready and worker not in self._duplicates
        self._table.place(worker, *(self._names_of(worker) if is_used and not is_failing else ()))

    def _names_of(self, worker: Worker) -> tuple[str, ...]:
        """Return the names in the table of a worker that has been attached."""
        name = self._weights.name_of(worker.model_version)
        digests = worker.info.adapter_digests if worker.info is not None else ()
        return name, *(name_with_adapter(name, digest) for digest in digests)

    def _count(self, worker: Worker) -> None:
        self._states.note(worker, self._state_of(worker) if worker in self._listed else None)
