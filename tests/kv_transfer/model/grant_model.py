"""Two Ps and two Ds that share requests and have few blocks: nobody waits for ever.

A request needs its prompt's blocks on P until D has read them, and on D from the grant on; there
one more for the first token that D computes, and another one later on. Sessions and messages are
session_model's: here a step is what two schedulers have agreed on. What is revoked although P had
started it is given up and comes again as another attempt.

Who is the next to get blocks is not a table of states but a comparison of ages and room, so that
the production code cannot be the model's. Two tests bind them: test_grant_tables.py has each move
here be one of the production tables', and tests/engine/test_handoff_engines.py has the real
schedulers and connectors share few blocks at random.

Without a clock a claim may be overdue at any time, and is so at the latest when it has been
overtaken MAX_PATIENCE times. Where requests come again and again (`recurs`) somebody may starve
while all others are served. That shows as a number: how often others got blocks of the D that it
waits for. With all rules it stays below a bound; without one of them it has none.

Grants are bounded by room and by D's slots, the places in its batch, of which `num_in_sight` get
free in time; that they do is not sure. pdserve also limits the share of a pool that grants may
hold, which only takes choices away.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cached_property
from typing import NamedTuple, TypeAlias

MAX_PATIENCE = 1


class Stage(IntEnum):
    """Where a request is. (An Enum's own hash is not C's, and would take a third of the time.)"""

    QUEUED = auto()
    # P has asked D, and waits.
    CLAIMED = auto()
    GRANTED = auto()
    # P computes and has announced nothing.
    STARTED = auto()
    # Only where P starts before it has a grant: P computes, and waits for D.
    UNGRANTED = auto()
    PULLED = auto()
    # All is on D, P holds nothing any more. D has not had room for its next token.
    READY = auto()
    DECODING = auto()
    # It has needed another block.
    GROWN = auto()
    # D has taken its blocks for another running request; it holds nothing.
    PREEMPTED = auto()
    DONE = auto()


ON_P = {Stage.STARTED, Stage.UNGRANTED, Stage.PULLED}
# Blocks on D beyond the prompt's.
ON_D = {
    Stage.GRANTED: 0,
    Stage.STARTED: 0,
    Stage.PULLED: 0,
    Stage.READY: 0,
    Stage.DECODING: 1,
    Stage.GROWN: 2,
}
# They hold what they will need for the next token, or are owed it.
ADMITTED = {Stage.GRANTED, Stage.STARTED, Stage.PULLED, Stage.READY}
REVOCABLE = {Stage.GRANTED, Stage.STARTED}
RUNNING = {Stage.DECODING, Stage.GROWN}
# Who has a slot or has been promised one.
PROMISED = ADMITTED | RUNNING
WAITS_FOR_D = {Stage.CLAIMED, Stage.UNGRANTED, Stage.PREEMPTED}


class Request(NamedTuple):
    p: int
    d: int
    num_blocks: int


class Item(NamedTuple):
    """What becomes of a request."""

    stage: Stage = Stage.QUEUED
    # How often its claim was overtaken; MAX_PATIENCE: it is overdue.
    age: int = 0
    # How often others got blocks of its D since it began to wait for them.
    num_overtaken: int = 0


class World(NamedTuple):
    items: tuple[Item, ...]
    # By D, as neither knows of the other's: requests that wait for its blocks, the oldest claim
    # first, and those that it could take blocks back from, the oldest grant first.
    claims: tuple[int, ...] = ()
    grants: tuple[int, ...] = ()


Steps: TypeAlias = Iterator[tuple[str, World]]


@dataclass(frozen=True, kw_only=True)
class GrantModel:
    """Pools in blocks and who shares them; each flag that is true is a rule."""

    requests: tuple[Request, ...]
    p_blocks: tuple[int, ...]
    d_blocks: tuple[int, ...]
    # None: as many as there are requests.
    d_slots: tuple[int, ...] | None = None
    num_in_sight: int = 0
    # Nobody whose first token is out may find all slots taken.
    wants_slot_at_once: bool = False
    # A request that is done is followed by another one like it. Nobody may be overtaken more often.
    recurs: bool = False
    max_overtaken: int = 3
    # D's blocks before P's.
    grants_first: bool = True
    # No grant without a slot in sight.
    slots_first: bool = True
    # A claim that finds no room stays, and once it is overdue nobody overtakes it.
    keeps_claims: bool = True
    # A grant leaves room for the first token of everybody who was admitted.
    reserves_next_block: bool = True
    # Before a running request is preempted, grants of which nothing is announced are taken back.
    revokes: bool = True
    # Who was preempted on D is the next to get blocks there.
    resumes_first: bool = True

    def initial(self) -> World:
        return World((Item(),) * len(self.requests))

    def bad(self, world: World) -> str:
        for number, item in enumerate(world.items):
            if item.num_overtaken > self.max_overtaken:
                return f"request {number} starves: {item.num_overtaken} others have overtaken it"
            is_ready = self.wants_slot_at_once and item.stage is Stage.READY
            if is_ready and not self._has_slot(world, number):
                return f"request {number} waits behind its first token"
        return ""

    def is_good_end(self, world: World) -> bool:
        return self.recurs or all(item.stage is Stage.DONE for item in world.items)

    def show(self, world: World) -> str:
        stages = " ".join(f"{n}:{item.stage.name}" for n, item in enumerate(world.items))
        free_p = [self._free_on_p(world, p) for p in range(len(self.p_blocks))]
        free_d = [self._free_on_d(world, d) for d in range(len(self.d_blocks))]
        return f"{stages}  free on P {free_p}, on D {free_d}"

    def steps(self, world: World) -> Steps:
        for number, item in enumerate(world.items):
            moves = _MOVES.get(item.stage)
            if moves is not None:
                for label, after in moves(self, world, number):
                    yield f"{label} {number}", after

    # ---- pools

    @cached_property
    def _at_p(self) -> Sequence[list[int]]:
        return [
            [number for number, request in enumerate(self.requests) if request.p == p]
            for p in range(len(self.p_blocks))
        ]

    @cached_property
    def _at_d(self) -> Sequence[list[int]]:
        return [
            [number for number, request in enumerate(self.requests) if request.d == d]
            for d in range(len(self.d_blocks))
        ]

    def _free_on_p(self, world: World, p: int) -> int:
        free = self.p_blocks[p]
        for number in self._at_p[p]:
            if world.items[number].stage in ON_P:
                free -= self.requests[number].num_blocks
        return free

    def _free_on_d(self, world: World, d: int) -> int:
        free = self.d_blocks[d]
        for number in self._at_d[d]:
            num_more = ON_D.get(world.items[number].stage)
            if num_more is not None:
                free -= self.requests[number].num_blocks + num_more
        return free

    def _by_d(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(numbers, key=lambda number: self.requests[number].d))

    def _has_room(self, world: World, number: int, *, num_more: int = 1) -> bool:
        """For the prompt and `num_more` blocks, besides what D owes to others."""
        request = self.requests[number]
        num_owed = 0
        if self.reserves_next_block:
            stages = [world.items[other].stage for other in self._at_d[request.d]]
            num_owed = num_more + sum(stage in ADMITTED for stage in stages)
        return self._free_on_d(world, request.d) >= request.num_blocks + num_owed

    def _has_slot(self, world: World, number: int, taken: Container[Stage] = RUNNING) -> bool:
        """Have others of its D left it one?"""
        if self.d_slots is None:
            return True
        d = self.requests[number].d
        others = (world.items[other].stage in taken for other in self._at_d[d] if other != number)
        num_slots = self.d_slots[d] + (self.num_in_sight if taken is PROMISED else 0)
        return sum(others) < num_slots

    def _has_slot_in_sight(self, world: World, number: int) -> bool:
        return not self.slots_first or self._has_slot(world, number, PROMISED)

    def _is_blocked(self, world: World, number: int) -> bool:
        """Whether somebody else is the next to get blocks of this request's D."""
        d = self.requests[number].d
        stages = [world.items[other].stage for other in self._at_d[d]]
        if self.resumes_first and Stage.PREEMPTED in stages:
            return True
        for other in world.claims:
            if other == number:
                return False
            if self.requests[other].d == d and world.items[other].age == MAX_PATIENCE:
                return True
        return False

    # ---- P

    def _queued(self, world: World, number: int) -> Steps:
        world = world._replace(claims=self._by_d((*world.claims, number)))
        yield "P asks D for", _put(world, number, Stage.CLAIMED)

    def _claimed(self, world: World, number: int) -> Steps:
        yield from self._wait(world, number, Stage.GRANTED)
        if not self.grants_first and self._fits_p(world, number):
            yield "P starts without a grant", _put(world, number, Stage.UNGRANTED)

    def _granted(self, world: World, number: int) -> Steps:
        if self._fits_p(world, number):
            yield "P starts", _put(world, number, Stage.STARTED)

    def _started(self, world: World, number: int) -> Steps:
        world = world._replace(grants=_without(world.grants, number))
        yield "P announces blocks of", _put(world, number, Stage.PULLED)

    def _ungranted(self, world: World, number: int) -> Steps:
        yield from self._wait(world, number, Stage.STARTED)

    def _fits_p(self, world: World, number: int) -> bool:
        request = self.requests[number]
        return self._free_on_p(world, request.p) >= request.num_blocks

    # ---- D

    def _wait(self, world: World, number: int, granted: Stage) -> Steps:
        if self._has_room(world, number) and self._has_slot_in_sight(world, number):
            if not self._is_blocked(world, number):
                yield "D grants", self._grant(world, number, granted)
        elif not self.keeps_claims:
            if world.items[number].stage is Stage.CLAIMED:
                yield "D has no room and forgets", _refused(world, number)
        elif world.items[number].age < MAX_PATIENCE:
            yield "there is no room for long for", _age(world, number)

    def _grant(self, world: World, number: int, stage: Stage) -> World:
        world = self._overtake(world, number)
        world = world._replace(
            claims=_without(world.claims, number), grants=self._by_d((*world.grants, number))
        )
        return _put(world, number, stage)

    def _overtake(self, world: World, number: int) -> World:
        """Count it for all who wait for the same D's blocks."""
        if not self.recurs:
            return world
        items = []
        for other, item in enumerate(world.items):
            is_waiting = self.requests[other].d == self.requests[number].d and (
                item.stage in WAITS_FOR_D or item.num_overtaken > 0
            )
            if is_waiting and other != number:
                item = item._replace(num_overtaken=item.num_overtaken + 1)
                if other in world.claims and _is_older(world, other, number):
                    item = item._replace(age=min(item.age + 1, MAX_PATIENCE))
            items.append(item)
        return world._replace(items=tuple(items))

    def _pulled(self, world: World, number: int) -> Steps:
        yield "D has all of", _put(world, number, Stage.READY)

    def _ready(self, world: World, number: int) -> Steps:
        has_block = self._free_on_d(world, self.requests[number].d) >= 1
        if has_block and self._has_slot(world, number):
            yield "D decodes", _put(world, number, Stage.DECODING)

    def _decoding(self, world: World, number: int) -> Steps:
        yield "D finishes", self._done(world, number)
        d = self.requests[number].d
        if self._free_on_d(world, d) >= 1:
            yield "D has another block for", _put(world, number, Stage.GROWN)
            return
        revocable = [other for other in world.grants if self.requests[other].d == d]
        if self.revokes and revocable:
            yield f"D takes {revocable[-1]}'s grant back for", self._revoke(world, revocable[-1])
            return
        for other, item in enumerate(world.items):
            if self.requests[other].d == d and item.stage in RUNNING:
                yield f"D preempts {other} for", _put(world, other, Stage.PREEMPTED)

    def _revoke(self, world: World, number: int) -> World:
        """A claim again, and the oldest; what P had started comes as another attempt."""
        world = world._replace(grants=_without(world.grants, number))
        if world.items[number].stage is Stage.STARTED:
            return _put(world, number, Stage.QUEUED)
        world = world._replace(claims=self._by_d((number, *world.claims)))
        return _put(world, number, Stage.CLAIMED)

    def _grown(self, world: World, number: int) -> Steps:
        yield "D finishes", self._done(world, number)

    def _preempted(self, world: World, number: int) -> Steps:
        # What it has known by then takes one block more than its prompt.
        is_blocked = not self.resumes_first and self._is_blocked(world, number)
        has_room = self._has_room(world, number, num_more=2) and self._has_slot(world, number)
        if has_room and not is_blocked:
            yield "D resumes", _put(world, number, Stage.DECODING)

    def _done(self, world: World, number: int) -> World:
        return _put(world, number, Stage.QUEUED if self.recurs else Stage.DONE)


def _put(world: World, number: int, stage: Stage) -> World:
    """Whoever gets what it waits for has not been overtaken any more."""
    item = world.items[number]
    is_served = stage in ADMITTED or stage in RUNNING or stage is Stage.DONE
    item = Item(stage) if is_served else item._replace(stage=stage)
    return world._replace(items=(*world.items[:number], item, *world.items[number + 1 :]))


def _without(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
    return tuple(other for other in numbers if other != number)


def _is_older(world: World, other: int, number: int) -> bool:
    return world.claims.index(other) < world.claims.index(number)


def _age(world: World, number: int) -> World:
    item = world.items[number]._replace(age=MAX_PATIENCE)
    items = (*world.items[:number], item, *world.items[number + 1 :])
    return world._replace(items=items)


def _refused(world: World, number: int) -> World:
    """P has to ask again, behind everybody who asks meanwhile."""
    items = list(world.items)
    items[number] = items[number]._replace(stage=Stage.QUEUED, age=0)
    return world._replace(items=tuple(items), claims=_without(world.claims, number))


_MOVES: Mapping[Stage, Callable[[GrantModel, World, int], Steps]] = {
    Stage.QUEUED: GrantModel._queued,
    Stage.CLAIMED: GrantModel._claimed,
    Stage.GRANTED: GrantModel._granted,
    Stage.STARTED: GrantModel._started,
    Stage.UNGRANTED: GrantModel._ungranted,
    Stage.PULLED: GrantModel._pulled,
    Stage.READY: GrantModel._ready,
    Stage.DECODING: GrantModel._decoding,
    Stage.GROWN: GrantModel._grown,
    Stage.PREEMPTED: GrantModel._preempted,
}
