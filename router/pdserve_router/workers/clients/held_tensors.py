"""The tensors of live requests: their bytes are here for every worker that a request may come to,
until it ends.
"""

from collections import Counter

from pdserve_common.errors import OverloadedError
from pdserve_common.types.engine import EngineCoreRequest
from pdserve_common.types.engine_client import Tensors

DEFAULT_MAX_BYTES = 512 << 20
RETRY_AFTER_MS = 1000


class HeldTensors:
    """By their content hashes; one that several requests name is here once."""

    def __init__(self, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._data: dict[bytes, bytes] = {}
        self._num_holders: Counter[bytes] = Counter()
        # The bytes of all of them.
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._data)

    def hold(self, tensors: Tensors) -> None:
        """Keep those of a request, until `release`. Raises OverloadedError if they are too large
        beside those of others.
        """
        num_new = sum(len(data) for name, data in tensors.items() if name not in self._data)
        if self.num_bytes + num_new > self._max_bytes:
            raise OverloadedError(
                f"pictures of {num_new} bytes do not fit beside {self.num_bytes} bytes of other "
                f"requests', at most {self._max_bytes} (max_held_tensor_bytes)",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self.num_bytes += num_new
        for name, data in tensors.items():
            self._data.setdefault(name, data)
            self._num_holders[name] += 1

    def release(self, request: EngineCoreRequest) -> None:
        """A request whose tensors were held has ended."""
        refs = [feature.data for feature in request.mm_features if feature.data is not None]
        for name in {ref.content_hash for ref in refs}:
            self._num_holders[name] -= 1
            if not self._num_holders[name]:
                self.num_bytes -= len(self._data[name])
                del self._num_holders[name], self._data[name]

    def get(self, name: bytes) -> bytes | None:
        """Return its bytes; None: the request that named it has ended."""
        return self._data.get(name)
