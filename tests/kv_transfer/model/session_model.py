"""One request's KV session: one P, one D, two chunks, and all that can go wrong between them.

P and D decide by the production tables; this model gives their actions a world: messages on a link
of two directions, the contents of both pools, and a NIC that carries a READ out whenever it likes,
also after P has freed the blocks or was started anew at the same addresses. A connection may
outlive P's process (as through a proxy), so that identity (K1) has work to do.

Blocks that P gives back are overwritten at once. They may be later, but then a READ finds right
content that it would have found earlier: nothing worse can come of it. For the same reason a block
that D gives back counts as another request's from then on. After a preemption P computes the
request anew in the same two blocks, swapped: the worst reuse there is.

A pull that nothing interferes with (`Scope.is_harmless`) has to end in an accepted request.
Deadlines and fences of P and of D are scopes of their own, so that one side's end is seen to
reach the other one without them.

With `Scope.prefix` D asks for what P has cached, and P may need the blocks for others at any time
that no session holds them. Nothing is owed to D then: P may have nothing, and D computes.

What is left out: D's restart (to P it is a lost link, and the new D does not know the request);
further links between the two (sessions are not resumed); the time between a connector's event and
its scheduler, as schedulers ask the connector again before they act on an event.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, cached_property
from typing import TypeAlias

from session_consumer import ConsumerSide, ConsumerTable, ReadTable
from session_producer import ProducerSide, ProducerTable
from session_world import (
    PROMPT,
    Consumer,
    Copy,
    Producer,
    Read,
    Scope,
    Steps,
    ToD,
    ToP,
    World,
    put,
)

from pdserve_engine.kv_transfer.protocol.transitions import (
    CONSUMER,
    PRODUCER,
    READ,
    ConsumerState,
)

# Labels, and a world of which the rest has been left out.
Moves: TypeAlias = list[tuple[str, World]]


@dataclass(frozen=True)
class SessionModel:
    """P and D by these tables, and the rules that are guards in the code around them."""

    scope: Scope
    _: KW_ONLY
    producer: ProducerTable = field(default_factory=lambda: PRODUCER)
    consumer: ConsumerTable = field(default_factory=lambda: CONSUMER)
    read: ReadTable = field(default_factory=lambda: READ)
    # K1: both sides compare the sessions of messages with their own.
    checks_identity: bool = True
    # K2: a chunk is announced when the step that writes it is over.
    announces_after_step: bool = True
    # K4: no token leaves D before the ReleaseAck.
    holds_back: bool = True

    @cached_property
    def _p_moves(self) -> Callable[..., Moves]:
        """What P may do by what it sees, each of which is worked out once: many worlds differ
        elsewhere. Of messages it sees the oldest.
        """
        side = ProducerSide(
            scope=self.scope,
            table=self.producer,
            checks_identity=self.checks_identity,
            announces_after_step=self.announces_after_step,
        )

        @cache
        def moves(p: Producer, to_p: tuple[ToP, ...], *is_cut: bool) -> Moves:
            world = World(p, to_p=to_p, is_to_d_cut=is_cut[0], is_to_p_cut=is_cut[1])
            return [*side.steps(world), *side.take(world)]

        return moves

    @cached_property
    def _d_moves(self) -> Callable[..., Moves]:
        """The same for D."""
        side = ConsumerSide(
            scope=self.scope,
            table=self.consumer,
            read_table=self.read,
            checks_identity=self.checks_identity,
            holds_back=self.holds_back,
        )

        @cache
        def moves(
            is_p_over: bool,
            d: Consumer,
            reads: tuple[Read, ...],
            copies: tuple[Copy, ...],
            to_d: tuple[ToD, ...],
            *is_cut: bool,
        ) -> Moves:
            # All that the router tells it of P.
            p = Producer(is_queued=not is_p_over)
            world = World(p, d, reads, copies, to_d, (), *is_cut)
            return [*side.steps(world), *side.take(world)]

        return moves

    def initial(self) -> World:
        if not self.scope.prefix:
            return World()
        p = Producer(is_queued=False, memory=tuple(PROMPT))
        return World(p, Consumer(is_ticket_due=False, has_request=True))

    def steps(self, world: World) -> Steps:
        p, d, reads, copies, to_d, to_p, *is_cut = world
        for label, after in self._p_moves(p, to_p[:1], *is_cut):
            to_d_after = () if after.is_to_d_cut else to_d + after.to_d
            to_p_after = () if after.is_to_p_cut else to_p[1 - len(after.to_p) :]
            yield label, World(after.p, d, reads, copies, to_d_after, to_p_after, *after[6:])
        for label, after in self._d_moves(p.is_over, d, reads, copies, to_d[:1], *is_cut):
            to_d_after = () if after.is_to_d_cut else to_d[1 - len(after.to_d) :]
            to_p_after = () if after.is_to_p_cut else to_p + after.to_p
            yield label, World(p, *after[1:4], to_d_after, to_p_after, *after[6:])
        for number, copy in enumerate(world.copies):
            yield f"the NIC copies block {copy.source} to {copy.block}", _copy(world, number)
        if self.scope.cuts:
            yield from _cut(world)

    def bad(self, world: World) -> str:
        owned = {*world.d.blocks, *(read.block for read in world.reads)}
        for copy in world.copies:
            if copy.block not in owned:
                return f"a READ is posted on D's block {copy.block}, which is another request's"
        for chunk in range(world.d.num_confirmed if world.d.blocks else 0):
            content = world.d.memory[world.d.blocks[chunk]]
            if content != str(chunk):
                return f"D uses chunk {chunk}, whose block holds {content!r}"
        if world.d.sent not in ("", PROMPT):
            return f"a token of D is out that was made of {world.d.sent!r}"
        return ""

    def is_good_end(self, world: World) -> bool:
        """Nobody holds anything for the request; where nothing can go wrong, it was also served."""
        p, d = world.p, world.d
        is_over_on_d = d.state in (None, ConsumerState.ENDED) and not (d.has_request or d.blocks)
        is_served = d.was_accepted or self.scope.prefix or not self.scope.is_harmless
        return p.is_over and is_over_on_d and not world.reads and is_served

    def show(self, world: World) -> str:
        p, d = world.p, world.d
        reads = " ".join(f"{read.chunk}:{read.state.name}" for read in world.reads)
        return (
            f"P {p.session.p_epoch}.{p.session.seq} {p.state.name if p.state else '-'}"
            f" [{' '.join(p.memory)}]  D {d.state.name if d.state else '-'}"
            f" [{' '.join(d.memory)}] {reads}"
        )


def _copy(world: World, number: int) -> World:
    copy = world.copies[number]
    d = world.d._replace(memory=put(world.d.memory, copy.block, world.p.memory[copy.source]))
    copies = (*world.copies[:number], *world.copies[number + 1 :])
    return world._replace(d=d, copies=copies)


def _cut(world: World) -> Steps:
    if not world.is_to_d_cut:
        yield "the link to D breaks", world.cut_to_d()
    if not world.is_to_p_cut:
        yield "the link to P breaks", world.cut_to_p()
