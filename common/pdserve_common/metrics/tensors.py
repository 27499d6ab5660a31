"""Pictures of requests, and the tensors that are made of them: where they are held, and what became
of those that were put.
"""

from collections.abc import Callable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

# How a PutTensor ends.
PutOutcome = Literal["stored", "held", "no_room", "refused"]


class PictureMetrics:
    """Of a router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pictures = Counter(
            "pdserve_pictures_total", "Pictures of accepted requests", registry=registry
        )
        self._held_bytes = Gauge(
            "pdserve_router_tensor_bytes",
            "Bytes of the tensors of requests that are not finished",
            registry=registry,
        )

    def on_taken(self, number: int) -> None:
        """A request with pictures is about to be sent."""
        self._pictures.inc(number)

    def follow(self, num_bytes: Callable[[], int]) -> None:
        """Tell what is held whenever it is asked for."""
        self._held_bytes.set_function(num_bytes)


class TensorMetrics:
    """Of a worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._held_bytes = Gauge(
            "pdserve_tensor_cache_bytes",
            "Bytes of tensors that are held for requests, and of those that arrive",
            registry=registry,
        )
        self._puts = Counter(
            "pdserve_tensor_puts_total",
            "Tensors put by routers: stored, held (already there), no_room, refused (cut off, "
            "slow, or other than named)",
            ["outcome"],
            registry=registry,
        )
        self._put_bytes = Counter(
            "pdserve_tensor_put_bytes_total", "Bytes of tensors that were stored", registry=registry
        )
        self._evictions = Counter(
            "pdserve_tensor_evictions_total",
            "Tensors that made room for others, none of them needed then",
            registry=registry,
        )
        self._missing = Counter(
            "pdserve_tensors_missing_total",
            "Requests that named a tensor which was not held: their router puts it again",
            registry=registry,
        )
        for outcome in get_args(PutOutcome):
            self._puts.labels(outcome=outcome)

    def on_put(self, outcome: PutOutcome, num_bytes: int = 0) -> None:
        """A PutTensor has ended; `num_bytes` were stored."""
        self._puts.labels(outcome=outcome).inc()
        self._put_bytes.inc(num_bytes)

    def on_evicted(self) -> None:
        """A tensor has made room."""
        self._evictions.inc()

    def on_missing(self) -> None:
        """A request names a tensor that is not held."""
        self._missing.inc()

    def set_held_bytes(self, num_bytes: int) -> None:
        """What is taken of the cache."""
        self._held_bytes.set(num_bytes)
