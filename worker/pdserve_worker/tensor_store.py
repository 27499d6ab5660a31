"""The tensors that a worker holds for requests to come, by their content hashes."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import NoReturn

from pdserve_common.errors import OverloadedError
from pdserve_common.metrics.tensors import TensorMetrics
from pdserve_common.types.engine import TensorRef
from pdserve_common.types.tensors import TensorNotHeldError, num_bytes

# A request comes within it behind the last of its tensors, or puts them again.
LEASE_S = 10.0
RETRY_AFTER_MS = 1000
# What a tiny one counts: it has a place in tables, too.
_MIN_BYTES = 4096


@dataclass(slots=True)
class _Held:
    data: bytes
    # The connection that put it last.
    client: str
    leased_until: float


class TensorStore:
    """A bounded cache. What was put or used within the last LEASE_S stays; of the rest the least
    recently used makes room. A connection's leases take at most half of it, so that the other half
    is there for others. Used on the event loop's thread only.
    """

    def __init__(
        self,
        max_bytes: int,
        metrics: TensorMetrics,
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self.lease_s = lease_s
        self._max_bytes = max_bytes
        self._clock = clock
        # In the order of their leases' ends.
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._num_held_bytes = 0
        # The connections and sizes of uploads under way.
        self._uploads: list[tuple[str, int]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are held or about to be."""
        return self._num_held_bytes + sum(size for _, size in self._uploads)

    def renew(self, ref: TensorRef, client: str) -> bool:
        """Hold it LEASE_S from now on, for `client`; False if it is not held."""
        held = self._held.get(ref.content_hash)
        if held is None:
            return False
        held.client = client
        self._lease(ref.content_hash, held)
        return True

    @contextmanager
    def reserve(self, ref: TensorRef, client: str) -> Iterator[Callable[[bytes], None]]:
        """Keep room for a valid tensor while it arrives from `client`; the function that this gives
        stores it, once its bytes are what they should be. Raises OverloadedError.
        """
        size = _size_of(num_bytes(ref))
        self._make_room(size, client)
        upload = (client, size)
        self._uploads.append(upload)
        self._tell()
        try:
            yield lambda data: self._put(ref.content_hash, data, client)
        finally:
            self._uploads.remove(upload)
            self._tell()

    def get_all(self, refs: Sequence[TensorRef]) -> dict[bytes, bytes]:
        """Return the bytes of all of them; each is held LEASE_S longer, for what its request
        shares. Raises TensorNotHeldError.
        """
        found = {}
        for ref in refs:
            held = self._held.get(ref.content_hash)
            if held is None:
                self.metrics.on_missing()
                raise tensor_not_held(ref)
            self._lease(ref.content_hash, held)
            found[ref.content_hash] = held.data
        return found

    def _put(self, content_hash: bytes, data: bytes, client: str) -> None:
        if (held := self._held.get(content_hash)) is None:
            held = self._held[content_hash] = _Held(data, client, 0.0)
            self._num_held_bytes += _size_of(len(data))
        self._lease(content_hash, held)

    def _lease(self, content_hash: bytes, held: _Held) -> None:
        held.leased_until = self._clock() + self.lease_s
        self._held.move_to_end(content_hash)

    def _make_room(self, size: int, client: str) -> None:
        self._check_share(size, client)
        now = self._clock()
        while self.num_bytes + size > self._max_bytes:
            name, oldest = next(iter(self._held.items()), (b"", None))
            if oldest is None or oldest.leased_until > now:
                self._refuse(f"{self.num_bytes} of {self._max_bytes} bytes for tensors are in use")
            del self._held[name]
            self._num_held_bytes -= _size_of(len(oldest.data))
            self.metrics.on_evicted()

    def _check_share(self, size: int, client: str) -> None:
        now = self._clock()
        # The newest first.
        leased = takewhile(lambda held: held.leased_until > now, reversed(self._held.values()))
        taken = sum(_size_of(len(held.data)) for held in leased if held.client == client)
        taken += sum(size for owner, size in self._uploads if owner == client)
        if taken + size > self._max_bytes // 2:
            self._refuse(
                f"the router's tensors take {taken} bytes for requests to come, at most half of "
                f"{self._max_bytes} (tensor_cache_bytes)"
            )

    def _refuse(self, why: str) -> NoReturn:
        raise OverloadedError(why, retry_after_ms=RETRY_AFTER_MS)

    def _tell(self) -> None:
        self.metrics.set_held_bytes(self.num_bytes)


def tensor_not_held(ref: TensorRef) -> TensorNotHeldError:
    """Return the refusal of a request that names what is not held."""
    name = ref.content_hash.hex()[:16]
    return TensorNotHeldError(f"the tensor {name} is not held here: it has to be put first")


def _size_of(size: int) -> int:
    return max(size, _MIN_BYTES)
