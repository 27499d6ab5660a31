"""What P, D, the network and the NIC remember in `session_model`: plain values, all hashable."""

import enum
import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeAlias

from pdserve_engine.kv_transfer.protocol.transitions import (
    ConsumerEvent,
    ConsumerState,
    ProducerState,
    ReadState,
)

NUM_CHUNKS = 2
# Enough for a second session while both READs of the first are in flight.
NUM_D_BLOCKS = 2 * NUM_CHUNKS
# What a block holds that was never written, or by somebody else. Chunk i's KV is str(i).
FOREIGN = "x"
# What it holds while a step writes it.
HALF = "~"
# What a token is to be made of.
PROMPT = "".join(map(str, range(NUM_CHUNKS)))


class SessionId(NamedTuple):
    p_epoch: int
    seq: int


# ---- the KvLink's messages, named as in types/kv.py


# No tuples: one is equal to another of a different class.


@dataclass(frozen=True, slots=True)
class GrantRequest:
    session: SessionId


@dataclass(frozen=True, slots=True)
class BlocksReady:
    session: SessionId
    chunk: int
    block: int


@dataclass(frozen=True, slots=True)
class PrefixReady:
    """Opens the session."""

    session: SessionId
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillDone:
    session: SessionId


@dataclass(frozen=True, slots=True)
class ReleaseAck:
    session: SessionId
    through: int
    is_valid: bool


@dataclass(frozen=True, slots=True)
class SessionEnded:
    # None: there never was one.
    session: SessionId | None
    event: ConsumerEvent


@dataclass(frozen=True, slots=True)
class Granted:
    session: SessionId
    first_chunk: int


@dataclass(frozen=True, slots=True)
class Later:
    session: SessionId


@dataclass(frozen=True, slots=True)
class Revoke:
    session: SessionId


@dataclass(frozen=True, slots=True)
class Release:
    session: SessionId
    through: int


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Names the request, not a session: D may give up before it knows of one."""


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """Names the request as well: it is P that opens the session."""


ToD: TypeAlias = GrantRequest | BlocksReady | PrefixReady | PrefillDone | ReleaseAck | SessionEnded
ToP: TypeAlias = Granted | Later | Revoke | Release | CancelRequest | PrefixRequest


# ---- the state


class Producer(NamedTuple):
    epoch: int = 0
    # Of the newest session.
    seq: int = 0
    # None: there is no session yet.
    state: ProducerState | None = None
    # The request waits to be asked for and to start, or it runs. Neither: it is over on P.
    is_queued: bool = True
    is_running: bool = False
    # D has given it up between two sessions.
    is_cancelled: bool = False
    is_writing: bool = False
    # Each counts chunks from the request's start; D has those before first_chunk in its cache.
    first_chunk: int = 0
    num_computed: int = 0
    num_announced: int = 0
    num_released: int = 0
    memory: tuple[str, ...] = (FOREIGN,) * NUM_CHUNKS

    @property
    def session(self) -> SessionId:
        return SessionId(self.epoch, self.seq)

    @property
    def is_over(self) -> bool:
        """Whether P has nothing to do with the request any more."""
        has_session = self.state not in (None, ProducerState.ENDED)
        return not (self.is_queued or self.is_running or has_session)

    def block_of(self, chunk: int) -> int:
        return (chunk + self.seq) % NUM_CHUNKS

    def write(self, chunk: int, content: str) -> "Producer":
        return self._replace(memory=put(self.memory, self.block_of(chunk), content))

    def give_back(self, first_chunk: int, through: int) -> "Producer":
        """Return these chunks' blocks to the pool: they are somebody else's at once."""
        p = self
        for chunk in range(first_chunk, through):
            p = p.write(chunk, FOREIGN)
        return p


class Consumer(NamedTuple):
    # The router's ticket is still under way; the request is here and not over.
    is_ticket_due: bool = True
    has_request: bool = False
    # None: there is no pull yet.
    state: ConsumerState | None = None
    session: SessionId | None = None
    # Reserved for the request, one per chunk; or none.
    blocks: tuple[int, ...] = ()
    # Each counts chunks from the request's start, those that are cached among them.
    num_announced: int = 0
    num_released: int = 0
    num_confirmed: int = 0
    is_prefill_done: bool = False
    was_accepted: bool = False
    # What D's speculative first step has read, and what a token that is out was made of.
    first_step_read: str = ""
    sent: str = ""
    memory: tuple[str, ...] = (FOREIGN,) * NUM_D_BLOCKS
    # How often the scheduler had no room, and took a grant back.
    num_deferred: int = 0
    num_reclaimed: int = 0


class Read(NamedTuple):
    """What D knows of a READ that is not over."""

    chunk: int
    block: int
    state: ReadState


class Copy(NamedTuple):
    """What the NIC has yet to do, whatever D thinks of it."""

    source: int
    block: int


class World(NamedTuple):
    p: Producer = Producer()
    d: Consumer = Consumer()
    reads: tuple[Read, ...] = ()
    copies: tuple[Copy, ...] = ()
    # Messages under way, oldest first.
    to_d: tuple[ToD, ...] = ()
    to_p: tuple[ToP, ...] = ()
    is_to_d_cut: bool = False
    is_to_p_cut: bool = False

    @property
    def is_cut(self) -> bool:
        return self.is_to_d_cut or self.is_to_p_cut

    def send_to_d(self, message: ToD) -> "World":
        return self if self.is_to_d_cut else self._replace(to_d=(*self.to_d, message))

    def send_to_p(self, message: ToP) -> "World":
        return self if self.is_to_p_cut else self._replace(to_p=(*self.to_p, message))

    def cut_to_d(self) -> "World":
        return self._replace(is_to_d_cut=True, to_d=())

    def cut_to_p(self) -> "World":
        return self._replace(is_to_p_cut=True, to_p=())

    def drop_link(self) -> "World":
        """One end has noticed: it sends and takes nothing any more."""
        return self.cut_to_d().cut_to_p()


Steps: TypeAlias = Iterator[tuple[str, World]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What may happen in an exploration."""

    # D wants what P has cached: a decode worker is P, and a prefill worker D.
    prefix: bool = False
    # Leading chunks that D has in its prefix cache.
    num_cached: int = 0
    # P's scheduler preempts the request, once.
    preemption: bool = False
    # P's process starts anew, once.
    restart: bool = False
    # The link breaks, in either direction.
    cuts: bool = False
    # P gives up: a deadline, an abort, a fence. Without it only D's messages end what P holds.
    p_gives_up: bool = False
    # D does: a deadline, an abort, a fence, a failed READ. Without it only P's messages end a pull.
    d_gives_up: bool = False
    # D has no room at first, or takes a grant back.
    scarcity: bool = False

    @property
    def is_harmless(self) -> bool:
        """Whether nothing in it explains the loss of the pull."""
        gives_up = self.p_gives_up or self.d_gives_up
        return not (self.restart or self.cuts or gives_up or self.scarcity)


def put(items: tuple[str, ...], index: int, item: str) -> tuple[str, ...]:
    return (*items[:index], item, *items[index + 1 :])


@functools.cache
def describe(message: ToD | ToP) -> str:
    """Return for example "Release 0.1 2": what it is, its session, the rest."""
    return " ".join([type(message).__name__, *(_word(value) for value in _values(message))])


def _values(message: ToD | ToP) -> list[object]:
    return [getattr(message, field.name) for field in fields(message)]


def _word(value: object) -> str:
    if isinstance(value, SessionId):
        return f"{value.p_epoch}.{value.seq}"
    return value.name if isinstance(value, enum.Enum) else str(value)
