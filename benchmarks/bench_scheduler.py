"""What a step costs the scheduler: planning it and taking its tokens in, without any model.

    python benchmarks/bench_scheduler.py --running 256

Every request decodes; a share of them ends and is replaced as it goes, so that admission, prefix
lookup and freeing are in it. The goal is planning 256 running requests in under 1 ms.
"""

import argparse
import statistics
import time

from pdserve_common.types.engine import EngineCoreRequest, Generate
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.scheduler import Scheduler
from pdserve_engine.kv.block_pool import BlockPool
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.request.request import Request
from pdserve_engine.request.sched_output import ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE = 16
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 256
MAX_MODEL_LEN = 1024


def main() -> None:
    args = _parse_args()
    for windows in ((None,), (None, 128)):
        plan_s, update_s = _run(args.running, args.steps, windows)
        kind = "one KV group" if len(windows) == 1 else "full and sliding groups"
        print(
            f"{args.running} running, {kind}: schedule {_ms(plan_s)}, "
            f"update_from_output {_ms(update_s)}"
        )


def _run(
    num_running: int, num_steps: int, windows: tuple[int | None, ...]
) -> tuple[list[float], list[float]]:
    scheduler = _make_scheduler(num_running, windows)
    for index in range(num_running):
        _add(scheduler, index, num_output=OUTPUT_TOKENS * (index + 1) // num_running + 1)
    num_added = num_running
    plan_s, update_s = [], []
    for step in range(num_running + num_steps):
        start = time.perf_counter()
        scheduled = scheduler.schedule()
        planned = time.perf_counter()
        scheduler.update_from_output(_decode(scheduler, scheduled), 0.0)
        updated = time.perf_counter()
        scheduler.take_outputs()
        while len(scheduler.requests) < num_running:
            _add(scheduler, num_added, num_output=OUTPUT_TOKENS)
            num_added += 1
        if step >= num_running:  # all have been admitted by now
            plan_s.append(planned - start)
            update_s.append(updated - planned)
    return plan_s, update_s


def _make_scheduler(num_running: int, windows: tuple[int | None, ...]) -> Scheduler:
    num_blocks = len(windows) * num_running * MAX_MODEL_LEN // BLOCK_SIZE
    config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=8192)
    pool = BlockPool(num_blocks, enable_caching=True)
    manager = KVCacheManager(pool, BLOCK_SIZE, windows, max_tokens_in_flight=2 * 8192)
    return Scheduler(config, manager)


def _add(scheduler: Scheduler, index: int, num_output: int) -> None:
    request = EngineCoreRequest(
        request_id=str(index),
        prompt_token_ids=(index % 1000,) * PROMPT_TOKENS,
        task=Generate(SamplingParams(max_tokens=num_output)),
    )
    scheduler.add_request(Request(request, max_model_len=MAX_MODEL_LEN, seed=0))


def _decode(scheduler: Scheduler, scheduled: SchedulerOutput) -> ModelRunnerOutput:
    """One token for whoever has no more to compute."""
    request_ids = tuple(scheduled.num_scheduled_tokens)
    return ModelRunnerOutput(
        request_ids=request_ids,
        sampled_token_ids=tuple(
            (7,) if scheduler.requests[rid].progress.num_output_placeholders else ()
            for rid in request_ids
        ),
    )


def _ms(seconds: list[float]) -> str:
    p99 = statistics.quantiles(seconds, n=100)[98]
    return f"{statistics.median(seconds) * 1e3:.3f} ms (p99 {p99 * 1e3:.3f} ms)"


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256, help="Requests in the batch.")
    parser.add_argument("--steps", type=int, default=500, help="Steps to measure.")
    return parser.parse_args()


if __name__ == "__main__":
    main()
