"""Which tensors an engine process has from its worker: those of live requests, each once."""

from collections import Counter

from pdserve_common.types.engine_client import Tensors


class SentTensors:
    """Counts the requests that need a tensor, by its content hash. Used on the event loop's
    thread.
    """

    def __init__(self) -> None:
        self._of_requests: dict[str, tuple[bytes, ...]] = {}
        self._num_requests: Counter[bytes] = Counter()

    def add(
        self, request_id: str, tensors: Tensors
    ) -> tuple[dict[bytes, bytes], tuple[bytes, ...]]:
        """Note a request, or its next attempt; return the tensors that the process lacks, and the
        hashes of those that only an attempt before needed.
        """
        new = {key: data for key, data in tensors.items() if key not in self._num_requests}
        self._num_requests.update(tensors.keys())
        unused = self.release(request_id)
        if tensors:
            self._of_requests[request_id] = tuple(tensors)
        return new, unused

    def release(self, request_id: str) -> tuple[bytes, ...]:
        """The request has ended; return the hashes of tensors that no other needs."""
        unused = []
        for key in self._of_requests.pop(request_id, ()):
            self._num_requests[key] -= 1
            if not self._num_requests[key]:
                del self._num_requests[key]
                unused.append(key)
        return tuple(unused)
