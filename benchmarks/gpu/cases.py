"""Calls that are bound by the bytes they read and write, and their records."""

from typing import NamedTuple

from gpu.bench import Bench, last_lines
from gpu.measure import Call


class Case(NamedTuple):
    """A call that is bound by the bytes it reads and writes."""

    name: str
    call: Call
    num_bytes: int
    # See Clock.measure_replays.
    captured: Call | None = None


def record_case(bench: Bench, case: Case, rows: int) -> None:
    name = f"{case.name} x {rows}"
    try:
        timing = bench.clock.measure_replays(case.call, captured=case.captured)
    except Exception as error:  # whatever a kernel may raise
        bench.record(name, error=last_lines(error))
        return
    bench.record(
        name,
        us=timing.device_s * 1e6,
        host_us=timing.host_s * 1e6,
        share_of_copy=case.num_bytes / bench.limits.copy / timing.device_s,
    )
