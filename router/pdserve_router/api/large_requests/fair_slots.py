"""A number of slots that clients share fairly."""

import asyncio
from collections import Counter, OrderedDict, deque


class FairSlots:
    """Slots that are given in turn to the clients that wait, to each in the order in which it
    asked. One client never has all of them, so that another one's first waits for no other.
    """

    def __init__(self, num_slots: int, *, num_per_client: int) -> None:
        self._num_free = num_slots
        self._num_per_client = num_per_client
        self._num_held: Counter[str] = Counter()
        # By client, the one whose turn is next first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def acquire(self, client: str) -> None:
        """Wait for a slot, which has to be given back with `release`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(client)
            else:
                self._forget(client, turn)
            raise

    def release(self, client: str) -> None:
        self._num_free += 1
        self._num_held[client] -= 1
        if not self._num_held[client]:
            del self._num_held[client]
        self._give()

    def _give(self) -> None:
        while self._num_free and (client := self._next()) is not None:
            self._num_free -= 1
            self._num_held[client] += 1
            turn = self._waiting[client][0]
            self._forget(client, turn)
            if client in self._waiting:
                self._waiting.move_to_end(client)
            turn.set_result(None)

    def _next(self) -> str | None:
        free = (c for c in self._waiting if self._num_held[c] < self._num_per_client)
        return next(free, None)

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting[client]
        turns.remove(turn)
        if not turns:
            del self._waiting[client]
