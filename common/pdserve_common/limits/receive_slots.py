"""Who may receive a message now. What has come of messages before their last byte takes memory that
nobody has looked at: how many there are is bounded here, how large they are where they are read.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from pdserve_common.errors import OverloadedError
from pdserve_common.limits.names import MADE_ROOM, TOO_MANY_MESSAGES

RETRY_AFTER_MS = 1000
# Between two that have to make room: each takes a moment.
_REVOKE_INTERVAL_S = 0.01

Turn = asyncio.Future["ReceiveSlot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveLimits:
    """How many messages are received at a time. One that has come already takes its slot for less
    than a millisecond, so few slots serve many.
    """

    num_slots: int = 12
    # The rest is for other addresses.
    num_per_address: int = 8
    num_per_connection: int = 4
    num_waiting: int = 1024
    # For the slot, and again for the message.
    timeout_s: float = 10.0
    # A message that takes longer has to make room when others wait.
    grace_s: float = 0.5


class ReceiveSlot:
    """One message may be received, until `give_back`."""

    def __init__(self, connection: str, end: Callable[["ReceiveSlot"], None]) -> None:
        loop = asyncio.get_running_loop()
        self.connection = connection
        self.since = loop.time()
        # Done when somebody else needs the slot: stop receiving and give it back.
        self.revoked: asyncio.Future[None] = loop.create_future()
        self._end = end
        self._is_over = False

    def give_back(self) -> None:
        """A second time does nothing."""
        if not self._is_over:
            self._is_over = True
            self._end(self)


class ReceiveSlots:
    """The slots of one server. They go round among connections, so that one with many messages
    makes no other wait long. If none is given back, the oldest has to make room.
    """

    def __init__(self, limits: ReceiveLimits, on_limit: Callable[[str], None]) -> None:
        """`on_limit` gets TOO_MANY_MESSAGES or MADE_ROOM whenever that happens."""
        self.limits = limits
        self._on_limit = on_limit
        self._taken: dict[ReceiveSlot, None] = {}  # the oldest first
        self._by_connection: Counter[str] = Counter()
        self._by_address: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[Turn]] = OrderedDict()
        self._num_waiting = 0
        self._room_timer: asyncio.TimerHandle | None = None

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    async def take(self, connection: str) -> ReceiveSlot:
        """Wait for a slot for a message from `connection`: an address, and a port behind the last
        colon. Raises OverloadedError if too many wait, or no slot came free in time.
        """
        if not self._queues and self._has_room(connection):
            return self._grant(connection)
        if self._num_waiting >= self.limits.num_waiting:
            raise self._refusal()
        turn = self._enqueue(connection)
        try:
            await asyncio.wait((turn,), timeout=self.limits.timeout_s)
        except asyncio.CancelledError:
            self._leave(connection, turn)
            raise
        if not turn.done():
            self._leave(connection, turn)
            raise self._refusal()
        return turn.result()

    def _grant(self, connection: str) -> ReceiveSlot:
        slot = ReceiveSlot(connection, self._release)
        self._taken[slot] = None
        self._by_connection[connection] += 1
        self._by_address[_address(connection)] += 1
        return slot

    def _release(self, slot: ReceiveSlot) -> None:
        del self._taken[slot]
        for counts, key in (
            (self._by_connection, slot.connection),
            (self._by_address, _address(slot.connection)),
        ):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
        self._serve()

    def _has_room(self, connection: str) -> bool:
        return (
            len(self._taken) < self.limits.num_slots
            and self._by_connection[connection] < self.limits.num_per_connection
            and self._by_address[_address(connection)] < self.limits.num_per_address
        )

    def _enqueue(self, connection: str) -> Turn:
        turn: Turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(connection, deque()).append(turn)
        self._num_waiting += 1
        self._serve()
        return turn

    def _leave(self, connection: str, turn: Turn) -> None:
        """Wait no longer; a slot that came at the last moment goes back."""
        if turn.done():
            turn.result().give_back()
            return
        self._queues[connection].remove(turn)
        self._num_waiting -= 1
        if not self._queues[connection]:
            del self._queues[connection]

    def _serve(self) -> None:
        """Give slots to those who wait; if none is left, have the oldest make room in time."""
        while (connection := next(filter(self._has_room, self._queues), None)) is not None:
            queue = self._queues.pop(connection)
            queue.popleft().set_result(self._grant(connection))
            self._num_waiting -= 1
            if queue:
                self._queues[connection] = queue
        self._watch()

    def _watch(self) -> None:
        if self._room_timer is None and (slot := self._slot_to_revoke()) is not None:
            loop = asyncio.get_running_loop()
            due = max(slot.since + self.limits.grace_s, loop.time() + _REVOKE_INTERVAL_S)
            self._room_timer = loop.call_at(due, self._make_room)

    def _make_room(self) -> None:
        self._room_timer = None
        slot = self._slot_to_revoke()
        if slot is not None and _age_s(slot) >= self.limits.grace_s:
            slot.revoked.set_result(None)
            self._on_limit(MADE_ROOM)
        self._watch()

    def _slot_to_revoke(self) -> ReceiveSlot | None:
        """The oldest slot that another connection waits for."""
        limits = self.limits
        for connection in self._queues:
            if self._by_connection[connection] >= limits.num_per_connection:
                continue
            is_full = len(self._taken) >= limits.num_slots
            address = None if is_full else _address(connection)
            for slot in self._taken:
                if address in (None, _address(slot.connection)) and not slot.revoked.done():
                    return slot
        return None

    def _refusal(self) -> OverloadedError:
        self._on_limit(TOO_MANY_MESSAGES)
        return OverloadedError(
            f"{len(self._taken)} messages are being received and {self._num_waiting} wait, at most "
            f"{self.limits.num_slots} and {self.limits.num_waiting}",
            retry_after_ms=RETRY_AFTER_MS,
        )


def _address(connection: str) -> str:
    return connection.rpartition(":")[0]


def _age_s(slot: ReceiveSlot) -> float:
    return asyncio.get_running_loop().time() - slot.since
