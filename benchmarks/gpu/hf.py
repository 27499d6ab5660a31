"""Tokens a second of a full batch, ours and transformers'."""

import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu.bench import Bench
from gpu.engines import BenchEngine, make_prompts
from gpu.shapes import Shape
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

# Takes a model, prompts and how many new tokens each gets; returns how many have come.
Generate = Callable[[Any, list[list[int]], int], int]


def run(bench: Bench) -> None:
    """See the module."""
    rates: list[float] = []
    bench.attempt(_ours, rates)
    ours = rates[0] if rates else math.nan
    bench.attempt(_theirs, "generate, sdpa", _generate, ours)
    bench.attempt(_theirs, "generate_batch", _generate_batch, ours)


def _ours(bench: Bench, rates: list[float]) -> None:
    """Time our engine; its tokens a second are appended to rates."""
    batch, prompt_len, num_new = bench.sizes.hf
    settings = {"max_num_seqs": batch, "max_num_batched_tokens": 8192}
    with BenchEngine(bench, bench.small, **settings) as engine:
        rate = batch * num_new / engine.time_requests(batch, prompt_len, num_new)
    what = f"{batch} x {prompt_len} + {num_new}"
    bench.record(f"{bench.small.name} {what}, pdserve", tokens_per_s=rate)
    rates.append(rate)


def _theirs(bench: Bench, name: str, generate: Generate, ours: float) -> None:
    batch, prompt_len, num_new = bench.sizes.hf
    prompts = make_prompts(batch, prompt_len, bench.small.vocab_size)
    model = _load(bench, bench.small)
    generate(model, prompts, 4)
    for _ in range(2):
        started = time.perf_counter()
        count = generate(model, prompts, num_new)
        if bench.is_cuda:
            torch.cuda.synchronize()
        rate = count / (time.perf_counter() - started)
        bench.record(f"transformers {name}", tokens_per_s=rate, ours_is_x=ours / rate)


def _load(bench: Bench, shape: Shape) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config))
        config = AutoConfig.from_pretrained(folder)
    with bench.device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.generation_config.eos_token_id = None
    return model.to(bench.device).eval()


def _generate(model: Any, prompts: list[list[int]], num_new: int) -> int:
    tokens = torch.tensor(prompts, device=model.device)
    generated = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
    )
    return int(generated[:, tokens.shape[1] :].numel())


def _generate_batch(model: Any, prompts: list[list[int]], num_new: int) -> int:
    """With its continuous batching."""
    settings = GenerationConfig(max_new_tokens=num_new, do_sample=False, pad_token_id=0)
    results = model.generate_batch(inputs=prompts, generation_config=settings)
    count = sum(len(result.generated_tokens) for result in results.values())
    if count < len(prompts) * num_new:
        raise RuntimeError(f"{count} tokens came, not {len(prompts) * num_new}")
    return count
