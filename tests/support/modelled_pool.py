"""A router's real pool over workers that exist only here: they attach and are lost when told to,
and what proves a pair is answered at once.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import EngineInfo, KVTransferStats, WorkerRole
from pdserve_router.workers.circuit_breaker import CircuitBreaker
from pdserve_router.workers.discovery import Discovery
from pdserve_router.workers.model_version import ModelVersion
from pdserve_router.workers.routing.prefix_index import PrefixIndex
from pdserve_router.workers.routing.route_chooser import RoutingRules
from pdserve_router.workers.worker import Worker, WorkerState
from pdserve_router.workers.worker_pool import WorkerPool
from support.fake_worker import KV_STATS, engine_info

RUNTIME = Runtime()


def info_of(worker: Worker, **changes: object) -> EngineInfo:
    names = {"engine_id": worker.address, "epoch": worker.address}
    return engine_info(worker.role, vocab_size=300, **{**names, **changes})


class ModelledWorker(Worker):
    """Is nowhere else, and takes no requests."""

    num_in_flight = 0

    def __init__(
        self,
        address: str,
        *,
        role: WorkerRole,
        on_change: Callable[[], None],
        prefix_index: PrefixIndex[Worker],
        **others: object,
    ) -> None:
        super().__init__(address, role=role, runtime=RUNTIME)
        self.on_change = on_change
        self._prefix_index = prefix_index

    def start(self) -> None:
        """It attaches when it is told to."""

    async def wait_until_idle(self) -> None:
        """It always is."""

    async def close(self) -> None:
        self.state = WorkerState.DOWN
        self._prefix_index.forget(self)

    def add_request(self, *args: Any, **options: Any) -> None:
        raise AssertionError("nobody answers here")

    def abort(self, request_id: str) -> None:
        """There are none."""

    def set(self, state: WorkerState) -> None:
        self.state = state
        self.on_change()


class ModelledDiscovery(Discovery):
    """Finds what it is told to."""

    def __init__(
        self,
        role: WorkerRole,
        entries: tuple[str, ...],
        *,
        on_addresses: Callable[[WorkerRole, tuple[str, ...]], None],
        **options: Any,
    ) -> None:
        super().__init__(role, entries, on_addresses=on_addresses, **options)
        self.on_addresses = on_addresses


class ModelledPool:
    """Use it within `modelled`, on an event loop."""

    def __init__(self, num_prefill: int, num_decode: int, **rules: object) -> None:
        self.registry = CollectorRegistry()
        self._sources: dict[WorkerRole, ModelledDiscovery] = {}

        def discovery(role: WorkerRole, *args: Any, **options: Any) -> ModelledDiscovery:
            return self._sources.setdefault(role, ModelledDiscovery(role, *args, **options))

        with mock.patch("pdserve_router.workers.worker_pool.Discovery", discovery):
            self.pool = self._make_pool(num_prefill, num_decode, rules)

    def _make_pool(self, num_prefill: int, num_decode: int, rules: dict[str, object]) -> WorkerPool:
        return WorkerPool(
            prefill=[f"p:{i}" for i in range(1, num_prefill + 1)],
            decode=[f"d:{i}" for i in range(1, num_decode + 1)],
            connect=ModelledWorker,
            rules=RoutingRules(**rules),  # type: ignore[arg-type]
            metrics=RouterMetrics(self.registry),
            on_change=lambda: None,
            runtime=RUNTIME,
        )

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (*self.pool.prefill, *self.pool.decode)

    def attach(self, worker: Worker, **changes: object) -> None:
        """Its Welcome has come."""
        if worker.info is None or changes:
            worker.info = info_of(worker, **changes)
            worker.model_version = ModelVersion.of(worker.info)
            worker.breaker = CircuitBreaker()
        self.set(worker, WorkerState.READY)

    def set(self, worker: Worker, state: WorkerState) -> None:
        assert isinstance(worker, ModelledWorker)
        worker.set(state)

    def list_workers(self, role: WorkerRole, addresses: Iterable[str]) -> None:
        """Discovery has found another list."""
        self._sources[role].on_addresses(role, tuple(addresses))

    async def proven(self) -> None:
        """Return once no proof is under way or due."""
        while proofs := [task for task in asyncio.all_tasks() if _is_proof(task)]:
            await asyncio.wait(proofs)
            # What has ended them begins others.
            await asyncio.sleep(0)

    def paired(self, worker: Worker) -> list[Worker]:
        """Whom requests may use it with."""
        return list(self.pool.paired(worker))

    def num_paired(self, worker: Worker) -> int:
        return len(self.paired(worker))


@contextlib.contextmanager
def modelled() -> Iterator[None]:
    """Within, all proofs go well."""
    with mock.patch("pdserve_router.workers.routing.pairs.probe", _prove):
        yield


async def _prove(*workers: Worker, **options: object) -> KVTransferStats:
    return dataclasses.replace(KV_STATS)


def _is_proof(task: "asyncio.Task[Any]") -> bool:
    return getattr(task.get_coro(), "cr_code", None) is _prove.__code__
