"""Prefill and decode speed of one engine against Hugging Face transformers, in one run.

    python benchmarks/bench_engine.py [--model DIR] [--threads N]

Prints, for each batch x prompt, prefill tokens/s and the median decode step of both, and ratios.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
from make_model import make_model
from prometheus_client import CollectorRegistry

from pdserve_common.engine_types import EngineCoreRequest, SamplingParams
from pdserve_common.metrics import KVTransferMetrics
from pdserve_engine.config import EngineConfig
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.loading import load_engine

DEFAULT_MODEL = Path(".bench/qwen3-0.6b-random")
# Batch x prompt tokens, as in the published tables of CPU peers.
SHAPES = ((1, 64), (1, 512), (8, 128), (32, 128))


def measure_engine(
    core: EngineCore, batch: int, prompt_len: int, num_steps: int
) -> tuple[float, float]:
    """Return (prefill tokens/s, median decode step in ms)."""
    for index in range(batch):
        prompt = tuple((7 * i + 13 * index) % 1_000 + 2 for i in range(prompt_len))
        params = SamplingParams(temperature=0.0, max_tokens=num_steps + 8, ignore_eos=True)
        core.add_request(
            EngineCoreRequest(
                request_id=str(index), prompt_token_ids=prompt, sampling_params=params
            )
        )
    started = time.perf_counter()
    while len(core.scheduler.waiting) or any(
        request.num_output_tokens == 0 for request in core.scheduler.running
    ):
        core.step()
    prefill_s = time.perf_counter() - started
    steps = [_timed(core.step) for _ in range(num_steps)]
    core.abort_requests([str(index) for index in range(batch)])
    core.step()
    core.scheduler.kv.block_pool.reset_prefix_cache()
    return batch * prompt_len / prefill_s, statistics.median(steps) * 1e3


def measure_transformers(
    model: torch.nn.Module, batch: int, prompt_len: int, num_steps: int
) -> tuple[float, float]:
    """The same for transformers with its default (sdpa) attention and dynamic cache."""
    rows = [[(7 * i + 13 * b) % 1_000 + 2 for i in range(prompt_len)] for b in range(batch)]
    with torch.inference_mode():
        started = time.perf_counter()
        output = model(torch.tensor(rows), use_cache=True, logits_to_keep=1)
        prefill_s = time.perf_counter() - started
        steps = []
        for _ in range(num_steps):
            started = time.perf_counter()
            tokens = output.logits[:, -1].argmax(-1, keepdim=True)
            output = model(tokens, past_key_values=output.past_key_values, use_cache=True)
            steps.append(time.perf_counter() - started)
    return batch * prompt_len / prefill_s, statistics.median(steps) * 1e3


def main() -> None:
    """Run all shapes and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="made if it is missing")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="for both")
    parser.add_argument("--steps", type=int, default=24, help="decode steps timed (%(default)s)")
    args = parser.parse_args()
    make_model(args.model)
    torch.set_num_threads(args.threads)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    config = EngineConfig(
        model=str(args.model),
        num_threads=args.threads,
        kv_connector="none",
        kv_cache_memory_mib=1536,
        max_model_len=4096,
    )
    metrics = KVTransferMetrics(CollectorRegistry())
    loaded = load_engine(config, role="decode", engine_id="bench", metrics=metrics)
    print(f"{args.threads} threads, bf16, {args.steps} decode steps, medians")
    print("| B x P | transformers tok/s, ms | pdserve tok/s, ms | prefill ratio | decode ratio |")
    print("|---|---|---|---|---|")
    for batch, prompt_len in SHAPES:
        hf_rate, hf_ms = measure_transformers(theirs, batch, prompt_len, args.steps)
        rate, ms = measure_engine(loaded.core, batch, prompt_len, args.steps)
        print(
            f"| {batch} x {prompt_len} | {hf_rate:.0f}, {hf_ms:.1f} | {rate:.0f}, {ms:.1f} "
            f"| {rate / hf_rate:.2f} | {hf_ms / ms:.2f} |",
            flush=True,
        )
    loaded.close()


def _timed(function: object) -> float:
    started = time.perf_counter()
    function()  # type: ignore[operator]
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
