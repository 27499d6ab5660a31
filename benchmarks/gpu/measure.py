"""How long a call takes, on the device and on the host, and what the device does at best."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from gpu.shapes import Sizes

# Larger than any GPU's L2 cache. To clear it takes longer than to launch what is timed after it.
FLUSH_BYTES = 512 << 20

Call = Callable[[], object]


class Timing(NamedTuple):
    """Medians, in seconds: of the device, and of the host until it has launched everything."""

    device_s: float
    host_s: float


class Clock:
    """Times calls on a device, each for about so many seconds."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device, self._seconds = device, seconds
        self._is_cuda = device.type == "cuda"

    def measure(self, call: Call) -> Timing:
        """Time a call, on CUDA with cold caches. Of launches that take the host longer than the
        device takes to clear its caches, `device_s` is the host's time.
        """
        for _ in range(2):
            call()
        return self._measure_cuda(call) if self._is_cuda else self._measure_cpu(call)

    def measure_replays(
        self, call: Call, *, num_calls: int = 1, captured: Call | None = None
    ) -> Timing:
        """Time a call as a CUDA graph replays it, where the device waits for no launches; `host_s`
        is still that of the plain call.

        `num_calls` go into one graph, for calls that take something else each time: caches are cold
        for the first one only. `captured` is what of the call a graph can have, if it is not all.
        What cannot be captured, and all on a CPU, is timed as `measure` does it.
        """
        timing = self.measure(call)
        graph = _capture(captured or call, num_calls) if self._is_cuda else None
        if graph is None:
            return timing
        return timing._replace(device_s=self.measure(graph.replay).device_s / num_calls)

    def _measure_cpu(self, call: Call) -> Timing:
        times: list[float] = []
        end = time.perf_counter() + self._seconds
        while not times or time.perf_counter() < end:
            times.append(seconds(call))
        return Timing(statistics.median(times), statistics.median(times))

    def _measure_cuda(self, call: Call) -> Timing:
        torch.cuda.synchronize()
        once_s = seconds(lambda: (call(), torch.cuda.synchronize()))
        count = max(5, min(100, round(self._seconds / max(once_s, 1e-6))))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        host_s = []
        for start, end in events:
            self._flush.zero_()
            start.record()
            host_s.append(seconds(call))
            end.record()
        torch.cuda.synchronize()
        device_ms = [start.elapsed_time(end) for start, end in events]
        return Timing(statistics.median(device_ms) / 1e3, statistics.median(host_s))

    @functools.cached_property
    def _flush(self) -> torch.Tensor:
        return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self._device)


def _capture(call: Call, num_calls: int) -> torch.cuda.CUDAGraph | None:
    """Return a graph of so many calls; None, and a line that says why, if there can be none."""
    for _ in range(num_calls):
        call()  # what compiles or initialises cannot be captured
    graph = torch.cuda.CUDAGraph()
    try:
        # The outer context brings the stream back, which a capture that fails does not.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            for _ in range(num_calls):
                call()
    except Exception as error:  # whatever a kernel may raise
        print(f"  next: not captured, so it may be the host's time: {error!r:.200}", flush=True)
        return None
    return graph


class Limits(NamedTuple):
    """What the device does at best, as measured: bytes and FLOPs a second."""

    copy: float
    read: float
    matrix: float


def measure_limits(clock: Clock, sizes: Sizes, device: torch.device) -> Limits:
    """Copy, read and multiply what is far larger than the caches."""
    source = torch.ones(sizes.copy_bytes // 4, dtype=torch.float32, device=device)
    copy_s = clock.measure(functools.partial(torch.empty_like(source).copy_, source)).device_s
    read_s = clock.measure(source.sum).device_s
    shape = (sizes.matrix, sizes.matrix)
    a, b = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    matrix_s = clock.measure(lambda: a @ b).device_s
    return Limits(
        copy=2 * sizes.copy_bytes / copy_s,
        read=sizes.copy_bytes / read_s,
        matrix=2 * sizes.matrix**3 / matrix_s,
    )


def seconds(call: Call) -> float:
    """How long the host takes for a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
