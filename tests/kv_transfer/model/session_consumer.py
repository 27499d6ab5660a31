"""D in `session_model`: scheduler and router at random, connector and READs by the tables."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from session_world import (
    FOREIGN,
    NUM_CHUNKS,
    NUM_D_BLOCKS,
    BlocksReady,
    CancelRequest,
    Consumer,
    Copy,
    Granted,
    GrantRequest,
    Later,
    PrefillDone,
    PrefixReady,
    PrefixRequest,
    Read,
    Release,
    ReleaseAck,
    Revoke,
    Scope,
    SessionEnded,
    SessionId,
    Steps,
    ToD,
    World,
    describe,
    put,
)

from pdserve_engine.kv_transfer.protocol.transitions import (
    ConsumerAction,
    ConsumerEvent,
    ConsumerState,
    ConsumerStep,
    ReadAction,
    ReadEvent,
    ReadState,
    ReadStep,
)

ConsumerTable: TypeAlias = Mapping[ConsumerState, Mapping[ConsumerEvent, ConsumerStep]]
ReadTable: TypeAlias = Mapping[ReadState, Mapping[ReadEvent, ReadStep]]

_D, _DE, _DA = ConsumerState, ConsumerEvent, ConsumerAction
_R, _RE = ReadState, ReadEvent

_SESSION_STATES = (_D.EARLY, _D.AWAITING_GRANT, _D.GRANTED, _D.PULLING, _D.LANDED, _D.FETCHING)

MAX_DEFERRED = 1
MAX_RECLAIMED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSide:
    """D's moves."""

    scope: Scope
    table: ConsumerTable
    read_table: ReadTable
    checks_identity: bool
    holds_back: bool

    def on(
        self,
        world: World,
        event: ConsumerEvent,
        *,
        through: int = 0,
        announced: Sequence[BlocksReady] = (),
    ) -> World:
        """Carry out a transition of the table, if there is one. `through`: chunks it is about, from
        the start.
        """
        step = None if world.d.state is None else self.table[world.d.state].get(event)
        if step is None:
            return world
        world = world._replace(d=world.d._replace(state=step.next))
        for action in step.actions:
            world = self._do(world, action, through, announced)
        return world if step.next in _SESSION_STATES else _forget_session(world)

    def _do(
        self, world: World, action: ConsumerAction, through: int, announced: Sequence[BlocksReady]
    ) -> World:
        match action:
            case _DA.SEND_RELEASE:
                return _send_release(world, through)
            case _DA.CONFIRM:
                return self._confirm(world, through)
            case _DA.POST_READ:
                return functools.reduce(_post_read, announced, world)
            case _DA.GIVE_BACK:
                return self._give_back(world)
            case _DA.ACCEPT:
                return _accept(world)
            case _:
                return _SENDS[action](world)

    # ---- the scheduler, the router and the worker

    def steps(self, world: World) -> Steps:
        """Yield what D may do of its own accord."""
        d = world.d
        if d.is_ticket_due:
            yield "D gets the router's ticket", self._ticket(world)
        if d.has_request and (self.scope.d_gives_up or d.state in (_D.ACCEPTED, _D.LOST, _D.ENDED)):
            yield "D's request ends", self._end_request(world)
        if d.state is _D.TICKET and world.p.is_over:
            # P's answer may have come before the ticket; the router has heard it from P as well.
            yield "the router ends D's request", self._end_request(world)
        if self.scope.prefix and d.has_request and d.state is None:
            yield "D asks for the prefix", self._request_prefix(world)
        if d.state is _D.FETCHING and d.num_confirmed == d.num_announced:
            yield "D has every ReleaseAck", self.on(world, _DE.COMPLETED)
        if d.state is _D.AWAITING_GRANT:
            yield from self._answer_claim(world)
        if self.scope.scarcity and d.state is _D.GRANTED and d.num_reclaimed < MAX_RECLAIMED:
            counted = world._replace(d=d._replace(num_reclaimed=d.num_reclaimed + 1))
            yield "D takes its grant back", self.on(counted, _DE.RECLAIMED)
        if d.state is _D.PULLING and d.is_prefill_done and _num_landed(world) == NUM_CHUNKS:
            yield "D has all", self.on(world, _DE.ALL_LANDED)
        if d.state is _D.LANDED and not d.first_step_read:
            yield "D runs its first step", self._run_first_step(world)
        if d.state is _D.LANDED and d.num_confirmed == NUM_CHUNKS:
            yield "D has every ReleaseAck", self.on(world, _DE.COMPLETED)
        if self.scope.d_gives_up:
            yield from self._give_up(world)
        if world.is_cut:
            yield "D notices the cut", self.on(world, _DE.SESSION_LOST).drop_link()
        yield from self._watch_reads(world)

    def _ticket(self, world: World) -> World:
        d = world.d._replace(is_ticket_due=False, has_request=True)
        if d.state is _D.EARLY:
            return self.on(world._replace(d=d), _DE.TICKETED)
        return world._replace(d=d._replace(state=_D.TICKET))

    def _request_prefix(self, world: World) -> World:
        world = _reserve(world, self.scope.num_cached)
        return self.on(world._replace(d=world.d._replace(state=_D.REQUESTED)), _DE.LINKED)

    def _end_request(self, world: World) -> World:
        """Whoever has the blocks of an accepted request, it is not the connector any more."""
        was_accepted = world.d.state is _D.ACCEPTED
        world = self.on(world, _DE.REQUEST_ENDED)
        if was_accepted:
            world = _return_blocks(world)
        return world._replace(d=world.d._replace(has_request=False))

    def _answer_claim(self, world: World) -> Steps:
        d = world.d
        yield "D reserves blocks", self.on(_reserve(world, self.scope.num_cached), _DE.RESERVED)
        if self.scope.scarcity and d.num_deferred < MAX_DEFERRED:
            counted = world._replace(d=d._replace(num_deferred=d.num_deferred + 1))
            yield "D has no room", self.on(counted, _DE.NO_ROOM)

    def _run_first_step(self, world: World) -> World:
        read = "".join(world.d.memory[block] for block in world.d.blocks)
        sent = "" if self.holds_back else read
        return world._replace(d=world.d._replace(first_step_read=read, sent=sent))

    def _give_up(self, world: World) -> Steps:
        yield "D's pull expires", self.on(world, _DE.GIVEN_UP)
        yield "D fences all", self.on(world, _DE.FENCED)
        if any(read.state is _R.POSTED for read in world.reads):
            # Failed or stalled: in either case it may land until the transport says otherwise.
            yield "D's READ stalls", self.on(world, _DE.READ_FAILED)
        if world.d.state is _D.LOST:
            yield "D has held long enough", self.on(world, _DE.HOLD_EXPIRED)

    def _watch_reads(self, world: World) -> Steps:
        pending = {copy.block for copy in world.copies}
        for number, read in enumerate(world.reads):
            if read.state in (_R.POSTED, _R.UNLANDED) and read.block not in pending:
                yield f"D sees chunk {read.chunk} landed", self._on_landed(world, number)

    def _on_landed(self, world: World, number: int) -> World:
        was_posted = world.reads[number].state is _R.POSTED
        world = self._advance_reads(world, _RE.LANDED, {number})
        if not was_posted:
            return world
        return self.on(world, _DE.READ_LANDED, through=_num_landed(world))

    # ---- the link

    def take(self, world: World) -> Steps:
        """Yield the oldest message's effect."""
        if world.to_d:
            message, *rest = world.to_d
            world = world._replace(to_d=tuple(rest))
            yield f"D takes {describe(message)}", self._on_message(world, message)

    def _on_message(self, world: World, message: ToD) -> World:
        if isinstance(message, GrantRequest):
            return self._on_grant_request(world, message)
        if isinstance(message, PrefixReady):
            return self._on_prefix_ready(world, message)
        if not self._is_known(world.d, message.session):
            return world
        match message:
            case BlocksReady():
                return self._on_blocks_ready(world, message)
            case PrefillDone():
                return self._on_prefill_done(world)
            case ReleaseAck(is_valid=True):
                return self.on(world, _DE.CONFIRMED, through=message.through)
            case ReleaseAck():
                return self.on(world, _DE.SESSION_LOST)
            case SessionEnded():
                return self.on(world, message.event)

    def _is_known(self, d: Consumer, session: SessionId | None) -> bool:
        # Without a session a message names a request for which there is none.
        return session == d.session or not self.checks_identity

    def _on_grant_request(self, world: World, message: GrantRequest) -> World:
        if world.d.state is _D.ENDED and not world.d.is_ticket_due:
            return world.send_to_p(CancelRequest())  # the request is over here
        if world.d.state in (None, _D.ENDED):
            d = world.d._replace(state=_D.EARLY, session=message.session)
            return world._replace(d=d)
        if world.d.state is _D.TICKET:
            world = world._replace(d=world.d._replace(session=message.session))
        return self.on(world, _DE.ASKED)

    def _on_prefix_ready(self, world: World, message: PrefixReady) -> World:
        if world.d.state is not _D.REQUESTED:
            return world
        num_chunks = len(message.blocks)
        d = world.d._replace(session=message.session, num_announced=num_chunks)
        chunks = [BlocksReady(message.session, *chunk) for chunk in enumerate(message.blocks)]
        return self.on(world._replace(d=d), _DE.PREFIX_READY, through=num_chunks, announced=chunks)

    def _on_blocks_ready(self, world: World, message: BlocksReady) -> World:
        if world.d.state not in (_D.GRANTED, _D.PULLING):
            return world
        if message.chunk != world.d.num_announced:
            return self.on(world, _DE.GIVEN_UP)  # P broke the protocol
        world = world._replace(d=world.d._replace(num_announced=message.chunk + 1))
        return self.on(world, _DE.ANNOUNCED, through=message.chunk + 1, announced=[message])

    def _on_prefill_done(self, world: World) -> World:
        if world.d.state not in (_D.GRANTED, _D.PULLING):
            return world
        if world.d.num_announced != NUM_CHUNKS:
            return self.on(world, _DE.GIVEN_UP)  # P broke the protocol
        world = world._replace(d=world.d._replace(is_prefill_done=True))
        return self.on(world, _DE.PREFILL_DONE)

    # ---- the tables' actions on READs

    def _confirm(self, world: World, through: int) -> World:
        world = world._replace(d=world.d._replace(num_confirmed=through))
        confirmed = {
            number
            for number, read in enumerate(world.reads)
            if read.state is not _R.UNLANDED and read.chunk < through
        }
        return self._advance_reads(world, _RE.CONFIRMED, confirmed)

    def _give_back(self, world: World) -> World:
        world = _return_blocks(world)
        return self._advance_reads(world, _RE.DROPPED, set(range(len(world.reads))))

    def _advance_reads(self, world: World, event: ReadEvent, numbers: set[int]) -> World:
        """Carry out transitions of READs. One that is OVER is forgotten: its blocks are free, and
        somebody else's at once.
        """
        reads, memory = [], world.d.memory
        for number, read in enumerate(world.reads):
            step = self.read_table[read.state].get(event) if number in numbers else None
            if step is not None:
                assert (step.next is _R.OVER) == (ReadAction.FREE_BLOCKS in step.actions)
                read = read._replace(state=step.next)
            if read.state is _R.OVER:
                memory = put(memory, read.block, FOREIGN)
            else:
                reads.append(read)
        return world._replace(reads=tuple(reads), d=world.d._replace(memory=memory))


def _num_landed(world: World) -> int:
    """Return how many leading chunks need no READ any more."""
    missing = [read.chunk for read in world.reads if read.state is _R.POSTED]
    return min(missing, default=world.d.num_announced)


def _reserve(world: World, num_cached: int) -> World:
    kept = {read.block for read in world.reads}
    blocks = tuple(block for block in range(NUM_D_BLOCKS) if block not in kept)[:NUM_CHUNKS]
    memory = world.d.memory
    for chunk in range(num_cached):
        memory = put(memory, blocks[chunk], str(chunk))
    d = world.d._replace(
        blocks=blocks,
        memory=memory,
        num_announced=num_cached,
        num_released=num_cached,
        num_confirmed=num_cached,
    )
    return world._replace(d=d)


def _return_blocks(world: World) -> World:
    memory = world.d.memory
    for block in world.d.blocks:
        memory = put(memory, block, FOREIGN)
    return world._replace(d=world.d._replace(blocks=(), memory=memory))


def _accept(world: World) -> World:
    """Its READs are over, the blocks are the request's. Unlanded ones were another's."""
    unlanded = tuple(read for read in world.reads if read.state is _R.UNLANDED)
    d = world.d._replace(was_accepted=True, sent=world.d.first_step_read)
    return world._replace(reads=unlanded, d=d)


def _forget_session(world: World) -> World:
    """Messages of it are unknown from now on. What is confirmed stays so with its blocks; a
    first step is rolled back.
    """
    num_confirmed = world.d.num_confirmed if world.d.blocks else 0
    d = world.d._replace(
        session=None,
        num_announced=0,
        num_released=0,
        num_confirmed=num_confirmed,
        is_prefill_done=False,
        first_step_read="",
    )
    return world._replace(d=d)


def _post_read(world: World, announced: BlocksReady) -> World:
    block = world.d.blocks[announced.chunk]
    read = Read(announced.chunk, block, _R.POSTED)
    copy = Copy(announced.block, block)
    return world._replace(reads=(*world.reads, read), copies=(*world.copies, copy))


def _send_release(world: World, through: int) -> World:
    d = world.d
    if through <= d.num_released:
        return world
    assert d.session is not None
    world = world._replace(d=d._replace(num_released=through))
    return world.send_to_p(Release(d.session, through))


def _send_granted(world: World) -> World:
    assert world.d.session is not None
    return world.send_to_p(Granted(world.d.session, world.d.num_announced))


def _send_later(world: World) -> World:
    assert world.d.session is not None
    return world.send_to_p(Later(world.d.session))


def _send_revoke(world: World) -> World:
    assert world.d.session is not None
    return world.send_to_p(Revoke(world.d.session))


def _nothing(world: World) -> World:
    return world


_SENDS: Mapping[ConsumerAction, Callable[[World], World]] = {
    _DA.SEND_PREFIX_REQUEST: lambda world: world.send_to_p(PrefixRequest()),
    _DA.SEND_GRANTED: _send_granted,
    _DA.SEND_LATER: _send_later,
    _DA.SEND_REVOKE: _send_revoke,
    _DA.SEND_CANCEL: lambda world: world.send_to_p(CancelRequest()),
    # The scheduler and the router answer at random, see `steps`.
    _DA.REQUEST_GRANT: _nothing,
    _DA.START_FIRST_STEP: _nothing,
    _DA.REPORT_LOST: _nothing,
    _DA.FAIL_REQUEST: _nothing,
    _DA.VOID_REQUEST: _nothing,
}
