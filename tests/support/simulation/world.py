"""A router, prefill and decode workers and clients on one virtual clock, under a schedule of faults
drawn from a seed. Everything that happens follows from the seed.
"""

import asyncio
import collections
import contextlib
import functools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve_common.runtime import Runtime
from pdserve_router.router import Router
from pdserve_router.text.tokenizer import Tokenizer
from support.simulation import faults
from support.simulation.client import Ask, ask
from support.simulation.journal import Journal
from support.simulation.loop import Process, VirtualLoop, current_name, run, virtual_machine
from support.simulation.network import Network
from support.simulation.router import make_router
from support.simulation.worker import SimulatedWorker

NAMES = ("p0", "p1", "d0", "d1")
MODEL = Path(__file__).parents[3] / "models/pdserve-tiny"
NUM_REQUESTS = 20
SPAN_S = 5.0
# For sessions that nobody ends but their deadline.
SETTLE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a seed."""

    seed: int
    problems: list[str]
    outcomes: "collections.Counter[str]"
    num_redrives: int
    digest: str
    lines: list[str]

    def __str__(self) -> str:
        replay = f"python -m support.simulation --seed {self.seed}"
        problems = "\n  ".join(self.problems)
        return f"seed {self.seed}: {dict(self.outcomes)}\n  {problems}\n  replay it: {replay}"


class World:
    """All processes, and what is wrong with them."""

    names = NAMES

    def __init__(
        self, loop: VirtualLoop, seed: int, schedule: Sequence[faults.Fault] | None
    ) -> None:
        self.loop, self.random = loop, random.Random(seed)
        self.runtime = Runtime(now=loop.time, rng=random.Random(f"policy {seed}"))
        self.journal = Journal(loop.time, lambda: current_name("world"))
        self.network = Network(loop, self.random, self.journal)
        self.has_prefix_caching = self.random.random() < 0.7
        drawn = faults.draw(self.random, NAMES, SPAN_S, self.random.choice([3, 6, 10, 16]))
        self._schedule = drawn if schedule is None else schedule
        self._asks = [self._draw(number) for number in range(NUM_REQUESTS)]
        self.workers: dict[str, SimulatedWorker] = {}
        self._starts: list[SimulatedWorker] = []
        # When clients and faults began.
        self._began_s = loop.time()
        self.problems: list[str] = []
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.num_redrives = 0

    def blame(self, problem: str) -> None:
        """Note what must not be."""
        self.problems.append(problem)
        self.journal.note(f"WRONG {problem}", "world")

    def num_lost_workers(self, since_s: float) -> int:
        """Return how many faults have cost a worker that were not over at `since_s`."""
        return sum(
            each.costs_a_worker
            and each.at_s + each.duration_s >= since_s - self._began_s
            and each.at_s <= self.loop.time() - self._began_s
            for each in self._schedule
        )

    def start_worker(self, name: str) -> None:
        """Start a process, unless one of that name lives."""
        if name in self.workers and not self.workers[name].is_gone:
            return
        worker = self.workers[name] = SimulatedWorker(self, name)
        self._starts.append(worker)

    def worker_of(self, engine_id: str, epoch: str) -> SimulatedWorker | None:
        """Return the start of a worker, if it is not over."""
        worker = self.workers[engine_id]
        return worker if worker.epoch == epoch and not worker.is_gone else None

    async def run(self, tokenizer: Tokenizer) -> None:
        """Run the schedule, and see that all comes to its end."""
        for name in NAMES:
            self.start_worker(name)
        process = Process(self.loop, faults.ROUTER)
        await process.create_task(self._route(process, tokenizer))
        for worker in self.workers.values():
            worker.stop()
        await asyncio.gather(*(each.task for each in self._starts), return_exceptions=True)

    async def _route(self, process: Process, tokenizer: Tokenizer) -> None:
        """The router's process, and the clients beside it."""
        router = make_router(self, process, tokenizer)
        router.pool.start()
        await self._until(lambda: [] if router.is_ready else ["the router is not ready"])
        self._began_s = self.loop.time()
        clients = [asyncio.create_task(ask(self, router, each)) for each in self._asks]
        happenings = [asyncio.create_task(faults.happen(self, each)) for each in self._schedule]
        await asyncio.gather(*clients, *happenings)
        self.journal.note("all clients have their ends", "world")
        await self._until(lambda: self._left_over(router))
        await router.drain(1.0)
        await router.pool.close()

    async def _until(self, left: Callable[[], list[str]]) -> None:
        """Wait until nothing is left, or blame what is."""
        deadline = self.loop.time() + SETTLE_TIMEOUT_S
        while found := left():
            if self.loop.time() > deadline:
                self.blame(f"after {SETTLE_TIMEOUT_S:g} s {', '.join(found)}")
                return
            await asyncio.sleep(0.25)

    def _left_over(self, router: Router) -> list[str]:
        found = [line for worker in self.workers.values() for line in worker.left_over()]
        clients = (*router.pool.prefill, *router.pool.decode)
        in_flight = {"router": router.num_in_flight} | {
            f"client of {client}": client.num_in_flight for client in clients
        }
        return found + [f"{who} has {n} requests" for who, n in in_flight.items() if n]

    def _draw(self, number: int) -> Ask:
        chance = self.random
        num_kinds = chance.choice([1, 3, 500])
        prompt = tuple(chance.choices(range(num_kinds), k=chance.randint(1, 40)))
        return Ask(
            request_id=f"r{number}",
            at_s=chance.uniform(0.0, SPAN_S),
            prompt=prompt,
            num_tokens=chance.randint(1, 23),
            deadline_s=chance.choice([3.0, 30.0, 50.0]),
            patience_s=chance.uniform(0.01, 2.0) if chance.random() < 0.1 else None,
        )


def simulate(seed: int, schedule: Sequence[faults.Fault] | None = None) -> Report:
    """Run one seed, with `schedule` instead of the faults that it draws."""
    tokenizer = _tokenizer()
    loop = VirtualLoop()
    with virtual_machine(loop, seed):
        world = World(loop, seed, schedule)
        with _logged(world.journal):
            try:
                run(loop, world.run(tokenizer))
            except Exception as error:  # a defect of whatever runs: the report says which
                world.blame(f"{type(error).__name__}: {error}")
    return Report(
        seed,
        world.problems,
        world.outcomes,
        world.num_redrives,
        world.journal.digest,
        world.journal.lines,
    )


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(str(MODEL))


@contextlib.contextmanager
def _logged(journal: Journal) -> Iterator[None]:
    """Have the journal take what the product logs, and nobody else."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = [journal]
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)
