"""What planning the next step while one runs is worth: the same engine with and without, in turns.

    python benchmarks/bench_async.py [--model models/pdserve-tiny] [--threads N]

Prints the median time per decode step of both, for several batch sizes, and their ratio.
"""

import argparse
import statistics
import sys
import time

from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.types.engine import EngineCoreRequest, Generate
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.assemble import load_engine
from pdserve_engine.clients.inproc import SWITCH_INTERVAL_S
from pdserve_engine.config import EngineConfig
from pdserve_engine.core.engine_core import EngineCore

BATCHES = (1, 8, 32, 64)
PROMPT_TOKENS = 32
NUM_STEPS = 300
NUM_ROUNDS = 5


def main() -> None:
    args = _parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a worker
    engines = {is_async: _load(args, is_async) for is_async in (False, True)}
    for batch in BATCHES:
        step_ms: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(NUM_ROUNDS):
            for is_async, engine in engines.items():
                step_ms[is_async].append(_measure(engine, batch))
        off, on = statistics.median(step_ms[False]), statistics.median(step_ms[True])
        print(f"batch {batch:3}: {off:.3f} ms a step, async {on:.3f} ms, {off / on:.3f}x")


def _load(args: argparse.Namespace, is_async: bool) -> EngineCore:
    config = EngineConfig(
        model=args.model,
        num_threads=args.threads,
        kv_connector="none",
        async_scheduling=is_async,
        kv_cache_memory_mib=args.kv_cache_memory_mib,
    )
    metrics = KVTransferMetrics(CollectorRegistry())
    return load_engine(config, role="decode", engine_id="bench", metrics=metrics).core


def _measure(core: EngineCore, batch: int) -> float:
    """Milliseconds per step of `batch` requests that all decode."""
    for index in range(batch):
        core.add_request(
            EngineCoreRequest(
                request_id=str(index),
                prompt_token_ids=tuple(2 + (index + i) % 200 for i in range(PROMPT_TOKENS)),
                task=Generate(
                    SamplingParams(temperature=0.0, max_tokens=NUM_STEPS + 8, ignore_eos=True)
                ),
            )
        )
    first = core.step_seq
    while core.step_seq < first + 8:  # the prompts, and the first decodes
        core.step()
    start, first = time.perf_counter(), core.step_seq
    while core.step_seq < first + NUM_STEPS - PROMPT_TOKENS:
        core.step()
    step_s = (time.perf_counter() - start) / (core.step_seq - first)
    while core.has_work():
        core.step()
    return step_s * 1e3


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/pdserve-tiny", help="Folder of the model.")
    parser.add_argument("--threads", type=int, default=1, help="Compute threads.")
    parser.add_argument("--kv-cache-memory-mib", type=int, default=256, help="Size of each pool.")
    return parser.parse_args()


if __name__ == "__main__":
    main()
