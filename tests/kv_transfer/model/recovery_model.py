"""A request whose workers fail: the router, one P at a time, two Ds, rules K6 and K7.

Every worker that samples a token samples its own: tokens of different attempts, or of P and D, are
never alike. That is the worst case of CONSISTENT; at EXACT a mix-up would go unseen. An output
carries its sender's whole history beside what is on the wire, so that the model can tell whether
what the client has is one story or two.

The two Ds are alike, so that only which of them has the current attempt is told apart: that one is
"D". When the router turns to "the other D" they change names.

A stopped process is one that takes no step for a while: every step may come arbitrarily late, so a
D that is stopped, given up and continued is among the cases, and so are slow ones. For the same
reason the router may decide at any moment; what made it (an error, silence, kv_lost) is the same
to safety. P dies with what it has sent to the router, and what it has sent to D may be lost or not.
A link to a D loses nothing: what a router does not get back of a broken one, it gives up.

How KV travels is session_model's: here it arrives at D, with P's token, or D finds that it is lost.

The router keeps no table: what it knows of a request is its tokens and its attempt's number, and
each rule is one comparison of these. tests/router/test_recovery_walk.py binds them to this model:
the code that serves takes the same steps at random, and has to keep the same promises.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import NamedTuple, TypeAlias

# Tokens are named after who sampled them in which attempt: "P0", "D2". An attempt has one D.
History: TypeAlias = tuple[str, ...]

ANSWER_LENGTH = 3
D_NAMES = ("D", "the other D")


class LegState(IntEnum):
    """D's leg of an attempt. (An Enum's own hash is not C's.)"""

    # Its KV is under way.
    WAITING = auto()
    # D has reported it lost and holds on.
    HELD = auto()
    RUNNING = auto()


class Leg(NamedTuple):
    attempt: int
    state: LegState
    tokens: History
    # How many of the tokens D has sent, or the router had already.
    num_sent: int


class PLeg(NamedTuple):
    """What P is to compute for the current attempt's D."""

    attempt: int
    tokens: History


# Of messages on the same way none has as many fields as another: no tuple is equal to another's.


class AddRequest(NamedTuple):
    attempt: int
    tokens: History
    is_remote: bool


class Abort(NamedTuple):
    attempt: int


class Output(NamedTuple):
    attempt: int
    first_index: int
    # All tokens of the sender; those from first_index on are on the wire.
    history: History


class Failed(NamedTuple):
    """D's leg has ended with a retryable error, or waits for a decision (`is_kv_lost`)."""

    attempt: int
    is_kv_lost: bool


class Kv(NamedTuple):
    """An attempt's KV and P's token, at a D."""

    attempt: int
    token: str


class D(NamedTuple):
    inbox: tuple[AddRequest | Abort, ...] = ()
    kv: frozenset[Kv] = frozenset()
    leg: Leg | None = None
    outbox: tuple[Output | Failed, ...] = ()


class Router(NamedTuple):
    attempt: int = 0
    delivered: History = ()
    # The current attempt is known to have failed.
    needs_redrive: bool = False
    is_over: bool = False
    # What must not have happened.
    fault: str = ""


class World(NamedTuple):
    router: Router = Router()
    # The first has the current attempt.
    ds: tuple[D, ...] = (D(), D())
    # P's leg, and what it has sent to the router.
    p: PLeg | None = None
    from_p: tuple[Output, ...] = ()
    has_p_died: bool = False


Steps: TypeAlias = Iterator[tuple[str, World]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryModel:
    """Each flag that is true is a rule."""

    max_redrives: int = 2
    # Without one D computes prompts itself.
    has_p: bool = True
    # Once, with all that it has sent to the router.
    p_dies: bool = True

    # K6: D reports a loss and waits. Else it computes the rest by itself.
    reports_loss: bool = True
    # K7: outputs of other attempts are dropped.
    checks_attempt: bool = True
    # K7: tokens are taken only in order, and known ones are compared.
    checks_index: bool = True
    # D's first output repeats P's token.
    repeats_first_token: bool = True
    # D takes a higher attempt in the place of the one it has.
    supersedes: bool = True

    def initial(self) -> World:
        return _send_attempt(World(), is_remote=self.has_p)

    def bad(self, world: World) -> str:
        return world.router.fault

    def is_good_end(self, world: World) -> bool:
        is_idle = world.p is None and all(not d.inbox and d.leg is None for d in world.ds)
        return world.router.is_over and is_idle

    def show(self, world: World) -> str:
        router = world.router
        legs = [
            f"{name} {d.leg.attempt} {d.leg.state.name} {' '.join(d.leg.tokens) or '-'}"
            for name, d in zip(D_NAMES, world.ds, strict=True)
            if d.leg is not None
        ]
        client = " ".join(router.delivered) or "-"
        return f"attempt {router.attempt}, client has {client}  {';  '.join(legs)}"

    def steps(self, world: World) -> Steps:
        yield from self._p_steps(world)
        for number, name in enumerate(D_NAMES):
            yield from self._d_steps(world, number, name)
        if not world.router.is_over:
            yield from self._router_steps(world)

    # ---- P

    def _p_steps(self, world: World) -> Steps:
        leg = world.p
        if leg is not None:
            token = f"P{leg.attempt}"
            output = Output(leg.attempt, len(leg.tokens), (*leg.tokens, token))
            d = world.ds[0]
            after = _put_d(world, 0, d._replace(kv=d.kv | {Kv(leg.attempt, token)}))
            yield f"P samples {token}", after._replace(p=None, from_p=(*world.from_p, output))
        if self.p_dies and not world.has_p_died:
            yield "P dies", world._replace(p=None, from_p=(), has_p_died=True)

    # ---- D

    def _d_steps(self, world: World, number: int, name: str) -> Steps:
        d = world.ds[number]
        if d.inbox:
            message, *rest = d.inbox
            after = self._take(d._replace(inbox=tuple(rest)), message)
            yield f"{name} takes {_describe(message)}", _put_d(world, number, after)
        if d.leg is None:
            return
        if d.leg.state is LegState.WAITING:
            yield from self._wait(world, number, name, d.leg)
        elif d.leg.state is LegState.HELD:
            failed = Failed(d.leg.attempt, is_kv_lost=False)
            after = d._replace(leg=None, outbox=(*d.outbox, failed))
            yield f"{name} has held long enough", _put_d(world, number, after)
        else:
            yield f"{name} samples a token", _put_d(world, number, _decode(d, d.leg))

    def _take(self, d: D, message: AddRequest | Abort) -> D:
        attempt = -1 if d.leg is None else d.leg.attempt
        if isinstance(message, Abort):
            return d._replace(leg=None) if attempt == message.attempt else d
        if attempt >= message.attempt or (d.leg is not None and not self.supersedes):
            return d
        state = LegState.WAITING if message.is_remote else LegState.RUNNING
        leg = Leg(message.attempt, state, message.tokens, len(message.tokens))
        kv = frozenset(kv for kv in d.kv if kv.attempt >= message.attempt)
        return d._replace(leg=leg, kv=kv)

    def _wait(self, world: World, number: int, name: str, leg: Leg) -> Steps:
        d = world.ds[number]
        for kv in d.kv:
            if kv.attempt == leg.attempt:
                tokens = (*leg.tokens, kv.token)
                # The count says where the next output begins.
                num_sent = leg.num_sent if self.repeats_first_token else len(tokens)
                running = Leg(leg.attempt, LegState.RUNNING, tokens, num_sent)
                after = d._replace(kv=d.kv - {kv}, leg=running)
                yield f"{name} accepts P's KV", _put_d(world, number, after)
        if self.reports_loss:
            lost = Failed(leg.attempt, is_kv_lost=True)
            after = d._replace(
                kv=frozenset(),
                leg=leg._replace(state=LegState.HELD),
                outbox=(*d.outbox, lost),
            )
            yield f"{name} reports the KV lost", _put_d(world, number, after)
        else:
            after = d._replace(kv=frozenset(), leg=leg._replace(state=LegState.RUNNING))
            yield f"{name} falls back alone", _put_d(world, number, after)

    # ---- the router

    def _router_steps(self, world: World) -> Steps:
        if world.from_p:
            output, *rest = world.from_p
            after = self._accept(world._replace(from_p=tuple(rest)), output)
            yield f"the router takes {_describe(output)} of P", after
        for number, name in enumerate(D_NAMES):
            d = world.ds[number]
            if d.outbox:
                message, *others = d.outbox
                after = _put_d(world, number, d._replace(outbox=tuple(others)))
                yield (
                    f"the router takes {_describe(message)} of {name}",
                    self._hear(after, message),
                )
        yield from self._decide(world)

    def _hear(self, world: World, message: Output | Failed) -> World:
        if isinstance(message, Output):
            return self._accept(world, message)
        if message.attempt != world.router.attempt:
            return world
        return world._replace(router=world.router._replace(needs_redrive=True))

    def _accept(self, world: World, output: Output) -> World:
        """K7."""
        router = world.router
        if self.checks_attempt and output.attempt != router.attempt:
            return world
        known, first = router.delivered, output.first_index
        new = output.history[first:]
        if self.checks_index:
            if first > len(known):
                return _fault(world, f"token {len(known)} of the answer is missing")
            if known[first : first + len(new)] != new[: len(known) - first]:
                return _fault(world, "a known token came again, and differently")
            new = new[len(known) - first :]
        delivered = known + new
        if new and output.history[: len(delivered)] != delivered:
            return _fault(world, f"the client has {' '.join(delivered)}: not one answer")
        if new and output.attempt != router.attempt:
            return _fault(world, f"the client has a token of the old attempt {output.attempt}")
        world = world._replace(router=router._replace(delivered=delivered))
        return _end(world) if len(delivered) == ANSWER_LENGTH else world

    def _decide(self, world: World) -> Steps:
        """Another attempt, on either D, with P or without; or the end, if there were too many."""
        router = world.router
        if router.attempt < self.max_redrives:
            # On the same D it is superseded: an abort would throw away what D has of the prompt.
            same = world._replace(p=None)
            aborted = _abort(world)
            other = aborted._replace(ds=aborted.ds[::-1])
            for name, after in (("the same D", same), ("the other D", other)):
                yield f"the router retries on {name}", _retry(after, is_remote=False)
                # The last token is not worth a P: D would have nothing left to do.
                if self.has_p and len(router.delivered) < ANSWER_LENGTH - 1:
                    yield f"the router retries on {name} and P", _retry(after, is_remote=True)
        elif router.needs_redrive:
            yield "the router gives up", _end(world)


# ---- D


def _put_d(world: World, number: int, d: D) -> World:
    if world.router.is_over:
        d = d._replace(outbox=())  # nobody reads it
    return world._replace(ds=(*world.ds[:number], d, *world.ds[number + 1 :]))


def _decode(d: D, leg: Leg) -> D:
    tokens = (*leg.tokens, f"D{leg.attempt}")
    output = Output(leg.attempt, leg.num_sent, tokens)
    is_over = len(tokens) == ANSWER_LENGTH
    after = leg._replace(tokens=tokens, num_sent=len(tokens))
    return d._replace(leg=None if is_over else after, outbox=(*d.outbox, output))


# ---- the router


def _retry(world: World, *, is_remote: bool) -> World:
    router = world.router
    router = router._replace(attempt=router.attempt + 1, needs_redrive=False)
    return _send_attempt(world._replace(router=router), is_remote=is_remote)


def _send_attempt(world: World, *, is_remote: bool) -> World:
    attempt, tokens = world.router.attempt, world.router.delivered
    world = _send(world, AddRequest(attempt, tokens, is_remote))
    return world._replace(p=PLeg(attempt, tokens)) if is_remote else world


def _send(world: World, message: AddRequest | Abort) -> World:
    d = world.ds[0]
    return _put_d(world, 0, d._replace(inbox=(*d.inbox, message)))


def _abort(world: World) -> World:
    """P's leg ends at once, D's when D hears of it."""
    return _send(world._replace(p=None), Abort(world.router.attempt))


def _end(world: World) -> World:
    world = _abort(world)
    ds = tuple(d._replace(outbox=()) for d in world.ds)
    router = world.router._replace(is_over=True, needs_redrive=False)
    return world._replace(router=router, ds=ds, from_p=())


def _fault(world: World, what: str) -> World:
    return world._replace(router=world.router._replace(fault=what))


def _describe(message: AddRequest | Abort | Output | Failed) -> str:
    match message:
        case AddRequest():
            return f"attempt {message.attempt}"
        case Abort():
            return f"abort of attempt {message.attempt}"
        case Output():
            sent = " ".join(message.history[message.first_index :])
            return f"output {sent} at {message.first_index}"
        case Failed(is_kv_lost=True):
            return f"kv_lost of attempt {message.attempt}"
        case Failed():
            return f"error of attempt {message.attempt}"
