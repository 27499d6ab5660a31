"""P in `session_model`: its scheduler at random, its connector by the table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from session_world import (
    FOREIGN,
    HALF,
    NUM_CHUNKS,
    BlocksReady,
    CancelRequest,
    Granted,
    GrantRequest,
    Later,
    PrefillDone,
    PrefixReady,
    PrefixRequest,
    Producer,
    Release,
    ReleaseAck,
    Revoke,
    Scope,
    SessionEnded,
    SessionId,
    Steps,
    ToP,
    World,
    describe,
)

from pdserve_engine.kv_transfer.protocol.transitions import (
    ConsumerEvent,
    ProducerAction,
    ProducerEvent,
    ProducerState,
    ProducerStep,
)

ProducerTable: TypeAlias = Mapping[ProducerState, Mapping[ProducerEvent, ProducerStep]]

_P, _PE, _PA = ProducerState, ProducerEvent, ProducerAction

# SessionEnded's reason, as D understands it. Anything else is a loss.
_REASONS = {
    _PE.PREEMPTED: ConsumerEvent.SESSION_PREEMPTED,
    _PE.FINISHED: ConsumerEvent.SESSION_VOID,
    _PE.NOT_FOUND: ConsumerEvent.SESSION_VOID,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSide:
    """P's moves."""

    scope: Scope
    table: ProducerTable
    checks_identity: bool
    announces_after_step: bool

    def on(self, world: World, event: ProducerEvent) -> World:
        """Carry out a transition of the table, if there is one."""
        before = world.p.state
        step = None if before is None else self.table[before].get(event)
        if before is None or step is None:
            return world
        world = world._replace(p=world.p._replace(state=step.next))
        for action in step.actions:
            if action is _PA.SEND_SESSION_ENDED:
                world = _send_session_ended(world, event, before)
            else:
                world = _ACTIONS[action](world)
        return _forget_ended(world)

    # ---- the scheduler

    def steps(self, world: World) -> Steps:
        """Yield what P may do of its own accord."""
        p = world.p
        if p.is_queued and p.state in (None, _P.ENDED):
            yield "P asks for D's blocks", self._ask(world)
        # Whatever the scheduler has heard by now: the table has the last word.
        if p.is_queued and p.state is not None and _PE.STARTED in self.table[p.state]:
            yield "P starts the request", self._start(world)
        if p.is_running:
            yield from self._compute(world)
        if p.state is _P.LOOKING_UP:
            yield from self._look_up(world)
        if self.scope.prefix and p.state in (None, _P.LOOKING_UP, _P.ENDED):
            yield "P needs the cached blocks", world._replace(p=p.give_back(0, NUM_CHUNKS))
        if p.epoch:
            yield "P ends the other request", self.on(world, _PE.FINISHED)
        elif self.scope.p_gives_up:
            yield from self._give_up(world)
        if self.scope.restart and not p.epoch:
            yield "P is started anew", world._replace(p=_restarted())
        if world.is_cut:
            yield "P notices the cut", self.on(world, _PE.LINK_LOST).drop_link()

    def _ask(self, world: World) -> World:
        p = world.p
        p = p._replace(seq=p.seq + (p.state is not None), state=_P.ASKING)
        if p.is_cancelled:
            return self.on(world._replace(p=p), _PE.CANCELLED)
        return world._replace(p=p).send_to_d(GrantRequest(p.session))

    def _start(self, world: World) -> World:
        p = world.p._replace(is_queued=False, is_running=True)
        return self.on(world._replace(p=p), _PE.STARTED)

    def _look_up(self, world: World) -> Steps:
        p = world.p
        if p.memory == (FOREIGN,) * NUM_CHUNKS:
            yield "P has none of the prefix", self.on(world, _PE.NOT_FOUND)
            return
        for num_found in range(1, NUM_CHUNKS + 1):
            found = world._replace(p=p._replace(num_announced=num_found))
            yield f"P finds {num_found} chunks", self.on(found, _PE.FOUND)

    def _compute(self, world: World) -> Steps:
        p = world.p
        if p.is_writing:
            yield f"P has computed chunk {p.num_computed}", self._end_step(world)
            return
        if p.num_computed < NUM_CHUNKS:
            yield f"P computes chunk {p.num_computed}", self._begin_step(world)
        else:
            yield "P has the first token", self._finish_prefill(world)
        if self.scope.preemption and not p.seq:
            yield "P preempts the request", _preempted(self.on(world, _PE.PREEMPTED))

    def _begin_step(self, world: World) -> World:
        p = world.p.write(world.p.num_computed, HALF)._replace(is_writing=True)
        world = world._replace(p=p)
        return world if self.announces_after_step else self.on(world, _PE.COMPUTED)

    def _end_step(self, world: World) -> World:
        p = world.p.write(world.p.num_computed, str(world.p.num_computed))
        p = p._replace(is_writing=False, num_computed=p.num_computed + 1)
        # The last chunk waits for the handoff.
        is_last = p.num_computed == NUM_CHUNKS
        return world._replace(p=p) if is_last else self.on(world._replace(p=p), _PE.COMPUTED)

    def _finish_prefill(self, world: World) -> World:
        """The request leaves P; what D still needs the session keeps, if there is one."""
        p = world.p._replace(is_running=False)
        is_cached = p.first_chunk == NUM_CHUNKS
        event = _PE.PREFILLED_ALL_CACHED if is_cached else _PE.PREFILLED
        world = self.on(world._replace(p=p), event)
        is_kept = world.p.state is _P.HANDED_OFF
        through = max(p.num_released, p.first_chunk) if is_kept else NUM_CHUNKS
        return world._replace(p=world.p.give_back(0, through))

    def _give_up(self, world: World) -> Steps:
        p = world.p
        if p.is_queued or p.is_running or p.state is _P.HANDED_OFF:
            yield "P ends the request", self._finish(world)
        if p.state not in (None, _P.ENDED):
            yield "P's session expires", self.on(world, _PE.EXPIRED)
            yield "P fences all", self.on(world, _PE.FENCED)

    def _finish(self, world: World) -> World:
        if world.p.state in (None, _P.ENDED):
            world = world.send_to_d(SessionEnded(None, ConsumerEvent.SESSION_VOID))
        else:
            world = self.on(world, _PE.FINISHED)
        return _over(world)

    # ---- the link

    def take(self, world: World) -> Steps:
        """Yield the oldest message's effect."""
        if world.to_p:
            message, *rest = world.to_p
            yield (
                f"P takes {describe(message)}",
                self._on_message(world._replace(to_p=tuple(rest)), message),
            )

    def _on_message(self, world: World, message: ToP) -> World:
        match message:
            case CancelRequest():
                return self._on_cancel(world)
            case Release():
                return self._on_release(world, message)
            case PrefixRequest():
                return self._on_prefix_request(world)
            case _ if not self._is_known(world.p, message.session):
                return world
            case Granted():
                return self._on_granted(world, message)
            case Later():
                return self.on(world, _PE.LATER)
            case Revoke():
                return self.on(world, _PE.REVOKED)

    def _on_cancel(self, world: World) -> World:
        """It names the request, which a P that was started anew does not know."""
        if world.p.epoch:
            return world
        if world.p.state in (None, _P.ENDED):
            return world._replace(p=world.p._replace(is_cancelled=True))
        return self.on(world, _PE.CANCELLED)

    def _on_prefix_request(self, world: World) -> World:
        """A P that was started anew has nothing cached yet."""
        if world.p.epoch:
            return world.send_to_d(SessionEnded(None, ConsumerEvent.SESSION_VOID))
        return world._replace(p=world.p._replace(state=_P.LOOKING_UP))

    def _on_granted(self, world: World, message: Granted) -> World:
        if world.p.state is _P.ASKING:
            p = world.p._replace(first_chunk=message.first_chunk, num_announced=message.first_chunk)
            world = world._replace(p=p)
        return self.on(world, _PE.GRANTED)

    def _on_release(self, world: World, message: Release) -> World:
        if not self._is_known(world.p, message.session):
            # Ended, and not in any map any more: the table's last row.
            assert self.table[_P.ENDED][_PE.RELEASED].actions == (_PA.SEND_INVALID_ACK,)
            return world.send_to_d(ReleaseAck(message.session, message.through, is_valid=False))
        if message.through > world.p.num_announced:
            return world
        world = world._replace(p=world.p._replace(num_released=message.through))
        is_last = message.through == world.p.num_announced and world.p.state is _P.HANDED_OFF
        return self.on(world, _PE.RELEASED_ALL if is_last else _PE.RELEASED)

    def _is_known(self, p: Producer, session: SessionId) -> bool:
        is_open = p.state not in (None, _P.ENDED)
        return is_open and (session == p.session or not self.checks_identity)


def _preempted(world: World) -> World:
    p = world.p.give_back(0, NUM_CHUNKS)
    return world._replace(p=p._replace(is_running=False, is_queued=True, num_computed=0))


def _over(world: World) -> World:
    """The request is over for P's scheduler, and so are the blocks it had, if it had any."""
    p = world.p
    if p.is_running:
        p = p.give_back(0, NUM_CHUNKS)
    return world._replace(p=p._replace(is_queued=False, is_running=False, is_writing=False))


def _restarted() -> Producer:
    """A new process at the same addresses, whose counters start at 0 as well. It serves another
    request, all of whose blocks it has announced.
    """
    return Producer(epoch=1, state=_P.SENDING, is_queued=False, num_announced=NUM_CHUNKS)


def _forget_ended(world: World) -> World:
    if world.p.state is not _P.ENDED:
        return world
    return world._replace(p=world.p._replace(first_chunk=0, num_announced=0, num_released=0))


# ---- the table's actions


def _announce(world: World) -> World:
    p = world.p
    # A step that is under way counts only where the rule against it is taken away.
    for chunk in range(p.num_announced, p.num_computed + p.is_writing):
        world = world.send_to_d(BlocksReady(p.session, chunk, p.block_of(chunk)))
    num_announced = max(p.num_announced, p.num_computed + p.is_writing)
    return world._replace(p=p._replace(num_announced=num_announced))


def _send_ack(world: World, *, is_valid: bool) -> World:
    p = world.p
    return world.send_to_d(ReleaseAck(p.session, p.num_released, is_valid))


def _free(world: World, first_chunk: int, through: int) -> World:
    return world._replace(p=world.p.give_back(first_chunk, through))


def _send_session_ended(world: World, event: ProducerEvent, before: ProducerState) -> World:
    reason = _REASONS.get(event, ConsumerEvent.SESSION_LOST)
    session = None if before is _P.LOOKING_UP else world.p.session
    return world.send_to_d(SessionEnded(session, reason))


def _announce_prefix(world: World) -> World:
    blocks = tuple(map(world.p.block_of, range(world.p.num_announced)))
    return world.send_to_d(PrefixReady(world.p.session, blocks))


_ACTIONS: Mapping[ProducerAction, Callable[[World], World]] = {
    # Said to a scheduler that asks before it starts the request anyway.
    _PA.ALLOW_START: lambda world: world,
    _PA.FORBID_START: lambda world: world,
    _PA.DEFER_START: lambda world: world,
    _PA.ANNOUNCE: _announce,
    _PA.ANNOUNCE_PREFIX: _announce_prefix,
    _PA.SEND_PREFILL_DONE: lambda world: world.send_to_d(PrefillDone(world.p.session)),
    _PA.SEND_VALID_ACK: lambda world: _send_ack(world, is_valid=True),
    _PA.SEND_INVALID_ACK: lambda world: _send_ack(world, is_valid=False),
    # The new state is the fence: nothing but ENDED is known to anybody who looks a session up.
    _PA.FENCE: lambda world: world,
    _PA.FREE: lambda world: _free(world, world.p.num_released, NUM_CHUNKS),
    _PA.FREE_RELEASED: lambda world: _free(world, 0, world.p.num_released),
    _PA.FAIL_REQUEST: _over,
}
