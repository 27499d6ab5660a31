"""How many bytes of large requests a router holds, of all clients and of each."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve_common.errors import OverloadedError

RETRY_AFTER_MS = 1000


class HeldBytes:
    """Counts the bytes of large requests from their arrival until they are tokens."""

    def __init__(self, *, max_bytes: int, max_client_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_client_bytes = max_client_bytes
        self._by_client: Counter[str] = Counter()
        self.num_bytes = 0

    @contextmanager
    def hold(self, client: str) -> Iterator["Held"]:
        """Count what `grow` of the value is told until the end of the block."""
        held = Held(self, client)
        try:
            yield held
        finally:
            self._add(client, -held.num_bytes)

    def add(self, client: str, num_bytes: int) -> None:
        """Raises OverloadedError if that were too many."""
        for who, now, limit in (
            ("one client", self._by_client[client], self._max_client_bytes),
            ("all clients", self.num_bytes, self._max_bytes),
        ):
            if now + num_bytes > limit:
                raise OverloadedError(
                    f"large requests of {who} have {now + num_bytes} bytes, at most {limit} are "
                    "taken at a time",
                    retry_after_ms=RETRY_AFTER_MS,
                )
        self._add(client, num_bytes)

    def _add(self, client: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._by_client[client] += num_bytes
        if not self._by_client[client]:
            del self._by_client[client]


class Held:
    """What is held of one request."""

    def __init__(self, all_held: HeldBytes, client: str) -> None:
        self._all = all_held
        self._client = client
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """It has at least this many bytes in all. Raises OverloadedError if there is no room."""
        if num_bytes > self.num_bytes:
            self._all.add(self._client, num_bytes - self.num_bytes)
            self.num_bytes = num_bytes
