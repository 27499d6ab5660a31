"""The adapters of workers that exist only here: what their ControlService would do with them."""

import asyncio
from collections import defaultdict

from pdserve_common.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    NoWorkerError,
    PdserveError,
)
from pdserve_common.types.lora import LoRAAdapter, LoRAAdapters, LoRARequest
from pdserve_router.workers.worker import Worker, WorkerState
from support.modelled_pool import ModelledPool

NEW = "c" * 64


class ModelledAdapters:
    """The controls of a pool's workers, which tell the pool at once."""

    def __init__(self, stage: ModelledPool) -> None:
        self.stage = stage
        # What is in a worker's folder, whom it refuses, and how many adapters it may have.
        self.contents: dict[str, str] = {}
        self.refusals: dict[str, PdserveError] = {}
        self.max_loras = 16
        # Of each worker, by name, what it stands for, last.
        self.digests: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
        self.paths: dict[str, str] = {}
        # Addresses of those that were asked, and of those that take for ever to load.
        self.calls: list[str] = []
        self.hanging: set[str] = set()
        # Of those that load it when their caller does not wait any more.
        self.late: set[str] = set()

    async def add_lora(
        self, address: str, lora: LoRARequest, *, keep_others: bool = False
    ) -> LoRAAdapter:
        self.calls.append(address)
        await asyncio.sleep(0)
        if address in self.hanging:
            await asyncio.Event().wait()
        if address in self.refusals:
            raise self.refusals[address]
        digest = self.contents.get(address, NEW)
        if lora.digest not in ("", digest):
            raise InvalidRequestError(f"digest is {lora.digest}")
        if keep_others and self.num_held(address) >= self.max_loras:
            raise FailedPreconditionError("no room")
        before = self.digests[address].get(lora.lora_name, [])
        self.digests[address][lora.lora_name] = [*(d for d in before if d != digest), digest]
        self.paths[digest] = lora.lora_path or lora.lora_name
        self._tell(address)
        if address in self.late:
            raise NoWorkerError(f"worker {address}: (DEADLINE_EXCEEDED)")
        return LoRAAdapter(name=lora.lora_name, digest=digest, rank=8)

    async def remove_lora(self, address: str, name: str, digest: str = "") -> None:
        self.calls.append(address)
        await asyncio.sleep(0)
        left = [d for d in self.digests[address].pop(name, []) if digest not in ("", d)]
        if left:
            self.digests[address][name] = left
        self._tell(address)

    def num_held(self, address: str) -> int:
        return len({d for digests in self.digests[address].values() for d in digests})

    def holders(self, digest: str) -> list[Worker]:
        """Return the workers that have said that they hold it."""
        return [
            worker
            for worker in self.stage.workers
            if worker.info and any(each.digest == digest for each in worker.info.adapters)
        ]

    def _tell(self, address: str) -> None:
        (worker,) = [w for w in self.stage.workers if w.address == address]
        assert worker.info is not None
        adapters = [
            LoRAAdapter(
                name=name if d is digests[-1] else "", digest=d, rank=8, path=self.paths.get(d, "")
            )
            for name, digests in self.digests[address].items()
            for d in digests
        ]
        held = LoRAAdapters(version=len(self.calls), adapters=tuple(adapters))
        worker.info = worker.info.with_adapters(held)
        self.stage.set(worker, WorkerState.READY)
