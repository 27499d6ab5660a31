"""A model over two ranks against the same model in one process, on the same two cores, in turns.

    python benchmarks/bench_parallel.py [--model DIR] [--rounds N]

One process computes with a thread for each core; the ranks (tensor parallelism) have a thread each.
Prints milliseconds of a decode step and of prompts for both, and the ratio: the median of the
rounds'. Then what ranks cost by themselves: a step's way to two ranks, which compute nothing, and
back; and the sum of their rows.
"""

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from machine import describe
from make_model import DEFAULT_MODEL, make_model
from offline_system import Command, OfflineSystem
from peers.offline import Case, Times
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.processes.cores import format_cores, usable_cores
from pdserve_engine.assemble import load_engine
from pdserve_engine.config import EngineConfig
from pdserve_engine.request.sched_output import CachedRequestData, SchedulerOutput
from pdserve_kernels.cpu.shared_group import SharedGroup

HERE = Path(__file__).parent
LOG_DIR = Path(".bench/parallel")
TINY = Path("models/pdserve-tiny")
CORES = format_cores(sorted(usable_cores())[:2])
ONE = "one process"
# Tensor parallel sizes.
SIZES = {ONE: 1, "two ranks": 2}
CASES = (Case(1, 512, 48), Case(8, 128, 24), Case(1, 2048, 8))
NUM_CALLS = 2000
# Rows and columns of partial sums.
SUMS = ((1, 1024), (64, 1024))
SLOT_BYTES = 1 << 20


def main() -> None:
    args = _parse_args()
    if args.rank is not None:
        _sum_rows(*args.rank)
        return
    if args.model == DEFAULT_MODEL:
        make_model(args.model)
    LOG_DIR.mkdir(parents=True, exist_ok=True)
    print(describe("torch"))
    _time_models(args.model, args.rounds)
    _time_steps()
    _time_sums()


def _time_models(model: Path, rounds: int) -> None:
    with ExitStack() as stack:
        systems = {
            name: stack.enter_context(OfflineSystem(_command(model, size), LOG_DIR / f"{size}.log"))
            for name, size in SIZES.items()
        }
        for case in CASES:
            times: dict[str, list[Times]] = {name: [] for name in SIZES}
            for _ in range(rounds):
                for name, system in systems.items():
                    times[name].append(system.run(case))
            what = f"{case.batch}x{case.prompt_len}"
            _print_ratios(f"decode {what}", times, lambda t: statistics.median(t.step_s))
            _print_ratios(f"prefill {what}", times, lambda t: t.prefill_s)


def _print_ratios(
    what: str, times: dict[str, list[Times]], seconds_of: Callable[[Times], float]
) -> None:
    base = list(map(seconds_of, times[ONE]))
    for name, rounds in times.items():
        seconds = list(map(seconds_of, rounds))
        ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds, base, strict=True))
        print(f"{what:>16} {name:>12}: {1e3 * statistics.median(seconds):8.2f} ms, {ratio:.3f}x")


def _command(model: Path, size: int) -> Command:
    words = [sys.executable, HERE / "pdserve_offline.py", model, CORES, size]
    return Command(words, {"OMP_WAIT_POLICY": "active"})


def _time_steps() -> None:
    """A step that has nothing but an ended request in it."""
    config = EngineConfig(
        model=str(TINY), kv_connector="none", tensor_parallel_size=2, num_threads=2, num_blocks=256
    )
    metrics = KVTransferMetrics(CollectorRegistry())
    engine = load_engine(config, role="decode", engine_id="bench", metrics=metrics)
    step = SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        finished_req_ids=frozenset(("nobody",)),
        preempted_req_ids=frozenset(),
    )
    submit = engine.core.executor.submit
    times = _times(lambda: submit(step).result())
    p99 = statistics.quantiles(times, n=100)[-1]
    print(f"a step to two ranks and back: {statistics.median(times):.0f} us, p99 {p99:.0f} us")
    engine.close()


def _time_sums() -> None:
    memory_fd = SharedGroup.create_memory(2, SLOT_BYTES)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), str(memory_fd)], pass_fds=[memory_fd]
        )
        for rank in range(2)
    ]
    os.close(memory_fd)
    for rank in ranks:
        rank.wait()


def _sum_rows(rank: int, memory_fd: int) -> None:
    torch.set_num_threads(1)
    group = SharedGroup(memory_fd, rank=rank, size=2, slot_bytes=SLOT_BYTES)
    for shape in SUMS:
        partial = torch.randn(shape)
        microseconds = statistics.median(_times(functools.partial(group.sum_rows, partial)))
        if rank == 0:
            print(f"the sum of two ranks' {list(shape)}: {microseconds:.1f} us")


def _times(function: Callable[[], object]) -> list[float]:
    """The microseconds of NUM_CALLS calls."""
    times = []
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        function()
        times.append(1e6 * (time.perf_counter() - start))
    return times


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", nargs=2, type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
