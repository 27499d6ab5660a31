"""Fake workers of two sets of weights, and the lists by which a router finds them."""

import itertools
from pathlib import Path

from pdserve_common.types.engine import WorkerRole
from support.fake_worker import FakeWorker

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
A, B = "a" * 64, "b" * 64
numbers = itertools.count(1)
# Who has other weights answers with other tokens.
ANSWERS = {A: tuple(range(10, 30)), B: tuple(range(110, 130))}


class Crew:
    """Fake workers and the lists that a router reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers: list[FakeWorker] = []
        self.listed: list[FakeWorker] = []
        for role in (P, D):
            self.path(role).write_text("")

    def path(self, role: WorkerRole) -> Path:
        return self.folder / role.name.lower()

    @property
    def sources(self) -> dict[str, tuple[str]]:
        return {role.name.lower(): (f"file://{self.path(role)}",) for role in (P, D)}

    async def join(self, role: WorkerRole, weights: str = A, **info: object) -> FakeWorker:
        number = next(numbers)
        worker = FakeWorker(
            role,
            vocab_size=300,
            answer=ANSWERS[weights],
            **{
                "engine_id": f"{role.name.lower()}-{number}",
                "epoch": f"{number:032x}",
                "weights_digest": weights,
                "kv_compatibility_hash": weights,
                "started_at_ms": number,
                **info,
            },
        )
        await worker.start()
        self.workers.append(worker)
        self.listed.append(worker)
        self.write()
        return worker

    def leave(self, worker: FakeWorker) -> None:
        worker.is_draining = True
        self.listed.remove(worker)
        self.write()

    def write(self) -> None:
        for role in (P, D):
            addresses = [w.address for w in self.listed if w.info.role is role]
            new = self.folder / "new"
            new.write_text("\n".join(addresses) + "\n")
            new.replace(self.path(role))

    def of(self, weights: str) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.info.weights_digest == weights]

    def num_requests(self, weights: str) -> int:
        return sum(len(worker.requests) for worker in self.of(weights))
