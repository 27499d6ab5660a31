"""One request's KV session: one P, one D, two chunks, and all that can go wrong between them.

P and D decide by the production tables; this model gives their actions a world: messages on a link
of two directions, the contents of both pools, and a NIC that carries a READ out whenever it likes,
also after P has freed the blocks or was started anew at the same addresses. A connection may
outlive P's process (as through a proxy), so that identity (K1) has work to do.

Blocks that P gives back are overwritten at once. They may be later, but then a READ finds right
content that it would have found earlier: nothing worse can come of it. For the same reason a block
that D gives back counts as another request's from then on. After a preemption P computes the
request anew in the same two blocks, swapped: the worst reuse there is.

A transfer that nothing interferes with (`Scope.is_harmless`) has to end in an accepted request.
Deadlines and fences of P and of D are scopes of their own, so that one side's end is seen to
reach the other one without them.

What is left out: D's restart (to P it is a lost link, and the new D does not know the request);
further links between the two (sessions are not resumed); the time between a connector's news and
its scheduler, as schedulers ask the connector again before they act on news.
"""

from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property

from session_consumer import ConsumerSide, ConsumerTable, ReadTable
from session_producer import ProducerSide, ProducerTable
from session_world import PROMPT, Scope, Steps, World, put

from pdserve_engine.kv_transfer.protocol import (
    CONSUMER,
    PRODUCER,
    READ,
    ConsumerState,
)


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
    # K4: no token leaves D before P's word.
    holds_back: bool = True

    @cached_property
    def _p(self) -> ProducerSide:
        return ProducerSide(
            scope=self.scope,
            table=self.producer,
            checks_identity=self.checks_identity,
            announces_after_step=self.announces_after_step,
        )

    @cached_property
    def _d(self) -> ConsumerSide:
        return ConsumerSide(
            scope=self.scope,
            table=self.consumer,
            read_table=self.read,
            checks_identity=self.checks_identity,
            holds_back=self.holds_back,
        )

    def initial(self) -> World:
        return World()

    def steps(self, world: World) -> Steps:
        yield from self._p.steps(world)
        yield from self._p.take(world)
        yield from self._d.steps(world)
        yield from self._d.take(world)
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
        is_served = d.was_accepted or not self.scope.is_harmless
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
