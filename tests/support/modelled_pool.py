"""A router's real pool over workers that exist only here: they attach and are lost when told to,
and what proves a pair is answered at once.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from unittest import mock

from prometheus_client import CollectorRegistry

from pdserve_common.engine_types import EngineInfo, KVTransferStats, WorkerRole
from pdserve_common.metrics import RouterMetrics
from pdserve_router.workers.circuit_breaker import CircuitBreaker
from pdserve_router.workers.origin import Origin
from pdserve_router.workers.route_chooser import RoutingRules
from pdserve_router.workers.worker_client import WorkerClient, WorkerState
from pdserve_router.workers.worker_pool import WorkerPool
from support.fake_worker import KV_STATS, MODEL, engine_info


def info_of(worker: WorkerClient, **changes: object) -> EngineInfo:
    names = {"engine_id": worker.address, "epoch": worker.address}
    return engine_info(worker.role, vocab_size=300, **{**names, **changes})


class ModelledPool:
    """Use it within `modelled`, on an event loop."""

    def __init__(self, num_prefill: int, num_decode: int, **rules: object) -> None:
        self.registry = CollectorRegistry()
        self.pool = WorkerPool(
            prefill=[f"p:{i}" for i in range(1, num_prefill + 1)],
            decode=[f"d:{i}" for i in range(1, num_decode + 1)],
            model=MODEL,
            router_id="r",
            rules=RoutingRules(**rules),  # type: ignore[arg-type]
            metrics=RouterMetrics(self.registry),
            on_change=lambda: None,
        )

    @property
    def workers(self) -> tuple[WorkerClient, ...]:
        return (*self.pool.prefill, *self.pool.decode)

    def attach(self, worker: WorkerClient, **changes: object) -> None:
        """Its Welcome has come."""
        if worker.info is None or changes:
            worker.info = info_of(worker, **changes)
            worker.origin = Origin.of(worker.info)
            worker.breaker = CircuitBreaker()
        self.set(worker, WorkerState.READY)

    def set(self, worker: WorkerClient, state: WorkerState) -> None:
        worker.state = state
        worker._on_change()

    def list_workers(self, role: WorkerRole, addresses: Iterable[str]) -> None:
        """Discovery has found another list."""
        self.pool._on_addresses(role, tuple(addresses))

    async def proven(self) -> None:
        """Return once no proof is under way or due."""
        pairs = self.pool._pairs
        while pairs._probes:
            await asyncio.wait(pairs._probes)
            # What has ended them begins others.
            await asyncio.sleep(0)

    def num_partners(self, worker: WorkerClient) -> int:
        return len(self.pool._table.partners(worker))


@contextlib.contextmanager
def modelled() -> Iterator[None]:
    """Within, no pool dials anybody, and all proofs go well."""

    async def prove(*workers: WorkerClient, **options: object) -> KVTransferStats:
        return dataclasses.replace(KV_STATS)

    with (
        mock.patch("pdserve_router.workers.pairs.probe", prove),
        mock.patch.object(WorkerClient, "start"),
    ):
        yield
