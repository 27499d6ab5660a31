"""The KV session as tables: what its two ends do, and in which order.

SessionMachine (prefill) and PullMachine (decode) carry out these transitions and no others, and the
protocol model in tests/kv_transfer/model explores the same tables exhaustively: with them no byte
of a freed block reaches a token, nothing leaks and nothing waits for ever. The rules K1 to K8 are
in docs/architecture.md.

For a cached prefix the roles are turned round: a decode worker has the end that is called prefill
here, and a prefill worker the one called decode. Such a session begins in LOOKING_UP and such a
pull in REQUESTED; from the announcement on they go by the same rules as any other.

An event that a state has no entry for comes too late, or makes no sense: it is counted and ignored
(K8). Actions are carried out in the order given, all under the connector's lock.
"""

import enum
from collections.abc import Mapping
from typing import NamedTuple

# ---- prefill: a session, from the question for blocks to the fence


class ProducerState(enum.Enum):
    """A session on prefill."""

    # Decode is asked to reserve blocks, or will be once its link is up. Prefill holds none for it.
    ASKING = enum.auto()
    # Decode has reserved: the scheduler may start the request.
    GRANTED = enum.auto()
    # The request runs; its finished blocks are announced.
    SENDING = enum.auto()
    # The prefill is over; the session keeps the blocks.
    HANDED_OFF = enum.auto()
    # Decode has asked for a prefix, and the scheduler looks for its blocks. The session keeps one
    # hold of each that it finds: it is HANDED_OFF then.
    LOOKING_UP = enum.auto()
    # Fenced.
    ENDED = enum.auto()


class ProducerEvent(enum.Enum):
    """What may happen to it."""

    # Decode says so.
    GRANTED = enum.auto()
    LATER = enum.auto()
    REVOKED = enum.auto()
    RELEASED = enum.auto()
    # The last block is released.
    RELEASED_ALL = enum.auto()
    CANCELLED = enum.auto()
    LINK_LOST = enum.auto()
    # The scheduler says so.
    STARTED = enum.auto()
    # A step that wrote blocks is over (K2).
    COMPUTED = enum.auto()
    PREFILLED = enum.auto()
    # As PREFILLED, and decode has all blocks itself: there is nothing to announce or to keep.
    PREFILLED_ALL_CACHED = enum.auto()
    # The request loses its blocks, or its turn.
    PREEMPTED = enum.auto()
    # The request ended on prefill: at its first token, by an abort, by an error.
    FINISHED = enum.auto()
    # Blocks of the prefix are cached, and held.
    FOUND = enum.auto()
    NOT_FOUND = enum.auto()
    # The worker says so.
    EXPIRED = enum.auto()
    FENCED = enum.auto()


class ProducerAction(enum.Enum):
    """What prefill does about it."""

    ALLOW_START = enum.auto()
    FORBID_START = enum.auto()
    DEFER_START = enum.auto()
    # BlocksReady for what is new.
    ANNOUNCE = enum.auto()
    SEND_PREFILL_DONE = enum.auto()
    # PrefixReady for all that was found.
    ANNOUNCE_PREFIX = enum.auto()
    SEND_VALID_ACK = enum.auto()
    SEND_INVALID_ACK = enum.auto()
    # From here on no release is valid (K3).
    FENCE = enum.auto()
    # Gives what the session still keeps back to the pool. The request's own blocks are the
    # scheduler's.
    FREE = enum.auto()
    FREE_RELEASED = enum.auto()
    SEND_SESSION_ENDED = enum.auto()
    # The request ends on prefill with an error.
    FAIL_REQUEST = enum.auto()


class ProducerStep(NamedTuple):
    next: ProducerState
    actions: tuple[ProducerAction, ...] = ()


_P, _PE, _PA = ProducerState, ProducerEvent, ProducerAction

# K3 on every path: FENCE is the first action of whatever ends a session. Decode hears of it unless
# it is decode's own wish, or the link is gone.
_GIVEN_UP = ProducerStep(_P.ENDED, (_PA.FENCE, _PA.FAIL_REQUEST))
_WITHDRAWN = ProducerStep(_P.ENDED, (_PA.FENCE, _PA.SEND_SESSION_ENDED, _PA.FAIL_REQUEST))
_OVER = ProducerStep(_P.ENDED, (_PA.FENCE, _PA.SEND_SESSION_ENDED))
_OVER_FREE = ProducerStep(_P.ENDED, (_PA.FENCE, _PA.SEND_SESSION_ENDED, _PA.FREE))
_DROPPED = ProducerStep(_P.ENDED, (_PA.FENCE,))
_DROPPED_FREE = ProducerStep(_P.ENDED, (_PA.FENCE, _PA.FREE))

_BEFORE_HANDOFF: Mapping[ProducerEvent, ProducerStep] = {
    _PE.FINISHED: _OVER,
    # It waits again and gets a session of its own for that.
    _PE.PREEMPTED: _OVER,
    _PE.CANCELLED: _GIVEN_UP,
    _PE.LINK_LOST: _GIVEN_UP,
    _PE.EXPIRED: _WITHDRAWN,
    _PE.FENCED: _WITHDRAWN,
}

PRODUCER: Mapping[ProducerState, Mapping[ProducerEvent, ProducerStep]] = {
    _P.ASKING: {
        **_BEFORE_HANDOFF,
        _PE.GRANTED: ProducerStep(_P.GRANTED, (_PA.ALLOW_START,)),
        _PE.LATER: ProducerStep(_P.ASKING, (_PA.DEFER_START,)),
    },
    _P.GRANTED: {
        **_BEFORE_HANDOFF,
        _PE.REVOKED: ProducerStep(_P.ASKING, (_PA.FORBID_START,)),
        _PE.STARTED: ProducerStep(_P.SENDING),
    },
    _P.SENDING: {
        **_BEFORE_HANDOFF,
        _PE.COMPUTED: ProducerStep(_P.SENDING, (_PA.ANNOUNCE,)),
        _PE.RELEASED: ProducerStep(_P.SENDING, (_PA.SEND_VALID_ACK,)),
        _PE.PREFILLED: ProducerStep(_P.HANDED_OFF, (_PA.ANNOUNCE, _PA.SEND_PREFILL_DONE)),
        # No release will come that could end the session.
        _PE.PREFILLED_ALL_CACHED: ProducerStep(_P.ENDED, (_PA.FENCE, _PA.SEND_PREFILL_DONE)),
        # It had started before decode's message came. It must not hold prefill's blocks and wait
        # for decode's.
        _PE.REVOKED: _WITHDRAWN,
    },
    _P.HANDED_OFF: {
        _PE.RELEASED: ProducerStep(_P.HANDED_OFF, (_PA.SEND_VALID_ACK, _PA.FREE_RELEASED)),
        # The answer is given while the session is open, then nothing of it is left.
        _PE.RELEASED_ALL: ProducerStep(
            _P.ENDED, (_PA.SEND_VALID_ACK, _PA.FENCE, _PA.FREE_RELEASED)
        ),
        _PE.REVOKED: _OVER_FREE,
        _PE.FINISHED: _OVER_FREE,
        _PE.EXPIRED: _OVER_FREE,
        _PE.FENCED: _OVER_FREE,
        _PE.CANCELLED: _DROPPED_FREE,
        _PE.LINK_LOST: _DROPPED_FREE,
    },
    _P.LOOKING_UP: {
        _PE.FOUND: ProducerStep(_P.HANDED_OFF, (_PA.ANNOUNCE_PREFIX,)),
        _PE.NOT_FOUND: _OVER,
        _PE.FINISHED: _OVER,
        _PE.EXPIRED: _OVER,
        _PE.FENCED: _OVER,
        _PE.CANCELLED: _DROPPED,
        _PE.LINK_LOST: _DROPPED,
    },
    _P.ENDED: {
        _PE.RELEASED: ProducerStep(_P.ENDED, (_PA.SEND_INVALID_ACK,)),
    },
}

# ---- decode: a pull, from the router's ticket to the accepted blocks


class ConsumerState(enum.Enum):
    """A pull on decode."""

    # Prefill has asked for blocks, the router's ticket is still on its way.
    EARLY = enum.auto()
    # The router has announced the request, prefill has not asked yet.
    TICKET = enum.auto()
    # Both: the scheduler looks for room.
    AWAITING_GRANT = enum.auto()
    # Blocks are reserved, prefill may start.
    GRANTED = enum.auto()
    # Blocks are announced and read.
    PULLING = enum.auto()
    # All is here, prefill's tokens too, but the last release is not acknowledged: the first step
    # may run, and nothing of it gets out.
    LANDED = enum.auto()
    # Blocks are reserved for a prefix, and prefill is asked, or will be once its link is up.
    REQUESTED = enum.auto()
    # The blocks of a prefix are announced and read. No step runs before all is confirmed: what it
    # computes would go to others at once.
    FETCHING = enum.auto()
    # All is confirmed as well: the request goes on.
    ACCEPTED = enum.auto()
    # The rest will not come. What is confirmed stays until the router has decided (K6).
    LOST = enum.auto()
    ENDED = enum.auto()


class ConsumerEvent(enum.Enum):
    """What may happen to it."""

    # The router says so: the request is here.
    TICKETED = enum.auto()
    # Prefill says so.
    ASKED = enum.auto()
    ANNOUNCED = enum.auto()
    CONFIRMED = enum.auto()
    # Prefill has cached blocks of a prefix, and keeps them. No others follow.
    PREFIX_READY = enum.auto()
    # All blocks are announced and prefill's tokens are known.
    PREFILL_DONE = enum.auto()
    # Prefill preempted the request and will ask again.
    SESSION_PREEMPTED = enum.auto()
    # Prefill needs no decode: the first token was the last, or the request was aborted.
    SESSION_VOID = enum.auto()
    # Prefill fenced it, said that a release is not valid, or its link is gone.
    SESSION_LOST = enum.auto()
    # The link says so: it is up.
    LINKED = enum.auto()
    # The scheduler says so.
    RESERVED = enum.auto()
    NO_ROOM = enum.auto()
    RECLAIMED = enum.auto()
    # The request is over on decode: finished, aborted or superseded by another attempt.
    REQUEST_ENDED = enum.auto()
    # The transfer thread says so.
    READ_LANDED = enum.auto()
    READ_FAILED = enum.auto()
    # Everything announced has landed, and prefill is done.
    ALL_LANDED = enum.auto()
    # And all of it is confirmed.
    COMPLETED = enum.auto()
    # Decode gives it up: a deadline passed, or prefill broke the protocol.
    GIVEN_UP = enum.auto()
    # Blocks are about to change hands.
    FENCED = enum.auto()
    # The router has not decided in time.
    HOLD_EXPIRED = enum.auto()


class ConsumerAction(enum.Enum):
    """What decode does about it."""

    # Has the scheduler reserve blocks.
    REQUEST_GRANT = enum.auto()
    SEND_PREFIX_REQUEST = enum.auto()
    SEND_GRANTED = enum.auto()
    SEND_LATER = enum.auto()
    SEND_REVOKE = enum.auto()
    POST_READ = enum.auto()
    # Only after the READ is DONE (K4).
    SEND_RELEASE = enum.auto()
    # Blocks become usable, and only here (K4).
    CONFIRM = enum.auto()
    # The request's first step is speculative: what it brings is held back (K4).
    START_FIRST_STEP = enum.auto()
    # What was held back counts, and the request goes on.
    ACCEPT = enum.auto()
    # Reserved blocks go back, those under a posted READ when it has landed (K5).
    GIVE_BACK = enum.auto()
    SEND_CANCEL = enum.auto()
    # Tells the router, who alone decides what happens next (K6).
    REPORT_LOST = enum.auto()
    FAIL_REQUEST = enum.auto()
    # Prefill has ended it: no error.
    VOID_REQUEST = enum.auto()


class ConsumerStep(NamedTuple):
    next: ConsumerState
    actions: tuple[ConsumerAction, ...] = ()


_D, _DE, _DA = ConsumerState, ConsumerEvent, ConsumerAction

_LOST = ConsumerStep(_D.LOST, (_DA.REPORT_LOST,))
_LOST_CANCEL = ConsumerStep(_D.LOST, (_DA.SEND_CANCEL, _DA.REPORT_LOST))

_WAITING: Mapping[ConsumerEvent, ConsumerStep] = {
    # The scheduler ends the request, and only with that its blocks come back.
    _DE.SESSION_VOID: ConsumerStep(_D.LOST, (_DA.VOID_REQUEST,)),
    _DE.SESSION_LOST: _LOST,
    _DE.GIVEN_UP: _LOST_CANCEL,
    _DE.FENCED: _LOST_CANCEL,
    _DE.REQUEST_ENDED: ConsumerStep(_D.ENDED, (_DA.SEND_CANCEL, _DA.GIVE_BACK)),
}
_ASK_AGAIN = ConsumerStep(_D.TICKET, (_DA.GIVE_BACK,))

CONSUMER: Mapping[ConsumerState, Mapping[ConsumerEvent, ConsumerStep]] = {
    _D.EARLY: {
        _DE.TICKETED: ConsumerStep(_D.AWAITING_GRANT, (_DA.REQUEST_GRANT,)),
        # The ticket may still come: then prefill asks again, or the router hears of prefill's end
        # from prefill.
        _DE.SESSION_PREEMPTED: ConsumerStep(_D.ENDED),
        _DE.SESSION_VOID: ConsumerStep(_D.ENDED),
        _DE.SESSION_LOST: ConsumerStep(_D.ENDED),
        _DE.GIVEN_UP: ConsumerStep(_D.ENDED, (_DA.SEND_CANCEL,)),
        _DE.FENCED: ConsumerStep(_D.ENDED, (_DA.SEND_CANCEL,)),
    },
    _D.TICKET: {
        **_WAITING,
        _DE.ASKED: ConsumerStep(_D.AWAITING_GRANT, (_DA.REQUEST_GRANT,)),
    },
    _D.AWAITING_GRANT: {
        **_WAITING,
        _DE.SESSION_PREEMPTED: ConsumerStep(_D.TICKET),
        _DE.RESERVED: ConsumerStep(_D.GRANTED, (_DA.SEND_GRANTED,)),
        _DE.NO_ROOM: ConsumerStep(_D.AWAITING_GRANT, (_DA.SEND_LATER,)),
    },
    _D.GRANTED: {
        **_WAITING,
        _DE.SESSION_PREEMPTED: _ASK_AGAIN,
        _DE.RECLAIMED: ConsumerStep(_D.AWAITING_GRANT, (_DA.SEND_REVOKE, _DA.GIVE_BACK)),
        _DE.ANNOUNCED: ConsumerStep(_D.PULLING, (_DA.POST_READ,)),
        # All of the prompt is cached here.
        _DE.PREFILL_DONE: ConsumerStep(_D.PULLING),
    },
    _D.PULLING: {
        **_WAITING,
        _DE.SESSION_PREEMPTED: _ASK_AGAIN,
        _DE.ANNOUNCED: ConsumerStep(_D.PULLING, (_DA.POST_READ,)),
        _DE.READ_LANDED: ConsumerStep(_D.PULLING, (_DA.SEND_RELEASE,)),
        _DE.READ_FAILED: _LOST_CANCEL,
        _DE.CONFIRMED: ConsumerStep(_D.PULLING, (_DA.CONFIRM,)),
        _DE.PREFILL_DONE: ConsumerStep(_D.PULLING),
        _DE.ALL_LANDED: ConsumerStep(_D.LANDED, (_DA.START_FIRST_STEP,)),
    },
    _D.LANDED: {
        **_WAITING,
        _DE.CONFIRMED: ConsumerStep(_D.LANDED, (_DA.CONFIRM,)),
        _DE.COMPLETED: ConsumerStep(_D.ACCEPTED, (_DA.ACCEPT,)),
    },
    _D.REQUESTED: {
        **_WAITING,
        _DE.LINKED: ConsumerStep(_D.REQUESTED, (_DA.SEND_PREFIX_REQUEST,)),
        _DE.PREFIX_READY: ConsumerStep(_D.FETCHING, (_DA.POST_READ,)),
    },
    _D.FETCHING: {
        **_WAITING,
        _DE.READ_LANDED: ConsumerStep(_D.FETCHING, (_DA.SEND_RELEASE,)),
        _DE.READ_FAILED: _LOST_CANCEL,
        _DE.CONFIRMED: ConsumerStep(_D.FETCHING, (_DA.CONFIRM,)),
        _DE.COMPLETED: ConsumerStep(_D.ACCEPTED, (_DA.ACCEPT,)),
    },
    _D.ACCEPTED: {
        _DE.REQUEST_ENDED: ConsumerStep(_D.ENDED),
    },
    _D.LOST: {
        _DE.HOLD_EXPIRED: ConsumerStep(_D.LOST, (_DA.FAIL_REQUEST,)),
        _DE.REQUEST_ENDED: ConsumerStep(_D.ENDED, (_DA.GIVE_BACK,)),
    },
    _D.ENDED: {},
}

# ---- decode: one READ of a chunk of blocks


class ReadState(enum.Enum):
    """A posted READ and the blocks it writes."""

    # The transport may write into the blocks at any time (K5).
    POSTED = enum.auto()
    LANDED = enum.auto()
    # Prefill has said that it had kept the blocks until they had been read (K4).
    CONFIRMED = enum.auto()
    # Its pull is over and it has not landed: polled on, its blocks belong to nobody.
    UNLANDED = enum.auto()
    OVER = enum.auto()


class ReadEvent(enum.Enum):
    # DONE or REMOTE_DISCONNECT: nothing lands any more.
    LANDED = enum.auto()
    CONFIRMED = enum.auto()
    # The pull gives its blocks back.
    DROPPED = enum.auto()


class ReadAction(enum.Enum):
    # Its blocks may be anybody's.
    FREE_BLOCKS = enum.auto()


class ReadStep(NamedTuple):
    next: ReadState
    actions: tuple[ReadAction, ...] = ()


_R, _RE = ReadState, ReadEvent

READ: Mapping[ReadState, Mapping[ReadEvent, ReadStep]] = {
    _R.POSTED: {
        _RE.LANDED: ReadStep(_R.LANDED),
        _RE.DROPPED: ReadStep(_R.UNLANDED),
    },
    _R.LANDED: {
        _RE.CONFIRMED: ReadStep(_R.CONFIRMED),
        _RE.DROPPED: ReadStep(_R.OVER, (ReadAction.FREE_BLOCKS,)),
    },
    _R.CONFIRMED: {
        _RE.DROPPED: ReadStep(_R.OVER, (ReadAction.FREE_BLOCKS,)),
    },
    _R.UNLANDED: {
        _RE.LANDED: ReadStep(_R.OVER, (ReadAction.FREE_BLOCKS,)),
    },
    _R.OVER: {},
}
