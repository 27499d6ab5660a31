"""What goes wrong in a simulation, drawn from its seed before it begins."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.simulation.world import World

ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong, and lasts for a while."""

    at_s: float
    kind: str
    # A worker, or two sides of a connection.
    whom: tuple[str, ...]
    duration_s: float

    @property
    def costs_a_worker(self) -> bool:
        """May the router take a worker for dead, be it for good or for a while?"""
        is_cut_off = self.kind in BETWEEN_TWO and ROUTER in self.whom
        return is_cut_off or self.kind in ("kill", "freeze")

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(self.whom)} for {self.duration_s:.3f} s"


def draw(chance: random.Random, names: Sequence[str], span_s: float, num: int) -> list[Fault]:
    """Draw faults of workers and connections, in order."""
    found = []
    for _ in range(num):
        kind = chance.choice(list(KINDS))
        whom: tuple[str, ...] = (chance.choice(names),)
        if kind in BETWEEN_TWO:
            whom = tuple(chance.choice(_sides(names)))
            whom = whom if chance.random() < 0.5 else (whom[1], whom[0])
        longest_s = chance.choice([0.5, 3.0, 12.0])
        found.append(
            Fault(chance.uniform(0.0, span_s), kind, whom, chance.uniform(0.01, longest_s))
        )
    return sorted(found, key=lambda fault: fault.at_s)


async def happen(world: "World", fault: Fault) -> None:
    """Let it happen at its time, and end."""
    await asyncio.sleep(fault.at_s)
    world.journal.note(f"FAULT {fault}", "world")
    end = KINDS[fault.kind](world, *fault.whom, fault.duration_s)
    await asyncio.sleep(fault.duration_s)
    end()


def _sides(names: Sequence[str]) -> list[tuple[str, str]]:
    p, d = ([name for name in names if name[0] == role] for role in "pd")
    return [(ROUTER, name) for name in names] + [(one, other) for one in p for other in d]


def _nothing() -> None:
    pass


def _kill(world: "World", name: str, duration_s: float) -> Callable[[], None]:
    worker = world.workers[name]
    if not worker.is_gone:
        worker.kill()
    return lambda: world.start_worker(name)


def _drain(world: "World", name: str, duration_s: float) -> Callable[[], None]:
    worker = world.workers[name]
    worker.stop()

    def restart() -> None:
        # Its grace is over as well.
        if not worker.is_gone:
            worker.kill()
        world.start_worker(name)

    return restart


def _freeze(world: "World", name: str, duration_s: float) -> Callable[[], None]:
    process = world.workers[name].process
    process.freeze()
    return process.thaw


def _slow(world: "World", name: str, duration_s: float) -> Callable[[], None]:
    executor = world.workers[name].executor
    executor.slowness = world.random.uniform(2.0, 30.0)

    def end() -> None:
        executor.slowness = 1.0

    return end


def _hurt_nic(world: "World", name: str, duration_s: float) -> Callable[[], None]:
    nic = world.workers[name].nic
    nic.is_faulty = True

    def end() -> None:
        nic.is_faulty = False

    return end


def _reset(world: "World", one: str, other: str, duration_s: float) -> Callable[[], None]:
    world.network.reset(one, other, late_s=world.random.choice([0.0, 1.0]))
    return _nothing


def _stall(world: "World", one: str, other: str, duration_s: float) -> Callable[[], None]:
    world.network.stall(one, other, duration_s)
    return _nothing


def _block(world: "World", one: str, other: str, duration_s: float) -> Callable[[], None]:
    world.network.block(one, other)
    return lambda: world.network.unblock(one, other)


KINDS: dict[str, Callable[..., Callable[[], None]]] = {
    "kill": _kill,
    "drain": _drain,
    "freeze": _freeze,
    "slow": _slow,
    "hurt_nic": _hurt_nic,
    "reset": _reset,
    "stall": _stall,
    "block": _block,
}
BETWEEN_TWO = {"reset", "stall", "block"}
