"""Scheduler, block manager and model runner together on models with sliding windows: the text is
that of transformers, however blocks are shared, given back early, reused and preempted.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.core.scheduler import Scheduler
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.kv.block_pool import BlockPool
from pdserve_engine.kv.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.models.registry import load_model, read_model_config
from pdserve_engine.runner.load.make_runner import make_runner
from support.engines import generate
from support.model_driver import make_prompt
from support.requests import greedy, make_request

CPU = torch.device("cpu")
BLOCK_SIZE = 8
CHUNK = 50
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all sliding": ("MistralForCausalLM", {"sliding_window": 20}),
    "two sliding groups and a full one": (
        "Qwen3ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 30,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


class Engine:
    def __init__(self, model_dir: Path, *, num_blocks: int, async_scheduling: bool) -> None:
        config = read_model_config(model_dir)
        spec = KVCacheSpec.from_model(config, block_size=BLOCK_SIZE, device=CPU)
        self.cache = KVCache(spec, num_blocks=num_blocks, device=CPU)
        # What no test may read: memory that nobody has written.
        self.cache.tensor.fill_(torch.nan)
        runner = make_runner(
            load_model(model_dir, config, device=CPU),
            self.cache,
            max_num_seqs=4,
            max_model_len=config.max_model_len,
        )
        executor = UniprocExecutor(runner, async_scheduling=async_scheduling)  # type: ignore[arg-type]
        self.kv = KVCacheManager(
            BlockPool(num_blocks, enable_caching=True),
            BLOCK_SIZE,
            spec.windows,
            max_tokens_in_flight=executor.max_concurrent_batches * CHUNK,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=CHUNK), self.kv
        )
        self.core = EngineCore(
            scheduler=self.scheduler, executor=executor, max_model_len=config.max_model_len
        )
        self.peak = 0

    def generate(self, prompts: dict[str, list[int]], num_tokens: int) -> dict[str, list[int]]:
        asked = [make_request(name, ids, greedy(num_tokens)) for name, ids in prompts.items()]
        tokens = generate(self.core, asked, between=self._measure)
        self.kv.check_integrity()
        assert self.kv.block_pool.num_free_blocks == self.kv.block_pool.num_blocks
        return tokens

    def _measure(self) -> None:
        pool = self.kv.block_pool
        self.peak = max(self.peak, pool.num_blocks - pool.num_free_blocks)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_transformers(
    make_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    name: str,
    async_scheduling: bool,
) -> None:
    architecture, overrides = MODELS[name]
    folder = make_model(architecture, **overrides)
    engine = Engine(folder, num_blocks=70, async_scheduling=async_scheduling)
    shared = make_prompt(100)
    prompts = {str(n): shared + make_prompt(n) for n in (1, 13, 40)}
    prompts |= {"short": make_prompt(5), "cut": shared[:70] + make_prompt(33)}
    expected = {name: hf_greedy(folder, prompt, 12) for name, prompt in prompts.items()}
    for _ in range(2):  # the second time many prefixes are cached
        assert engine.generate(prompts, 12) == expected
    assert engine.kv.prefix_cache_hits > 200
    engine.cache.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_sliding_model_needs_its_window_not_its_length(
    make_model: Callable[..., Path], async_scheduling: bool
) -> None:
    architecture, overrides = MODELS["all sliding"]
    folder = make_model(architecture, **overrides)
    engine = Engine(folder, num_blocks=100, async_scheduling=async_scheduling)
    engine.generate({"long": make_prompt(700)}, 30)
    num_blocks = engine.kv.num_blocks_needed(700 + 30)
    assert engine.peak <= num_blocks < -(-700 // BLOCK_SIZE) / 4
    engine.cache.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_preempted_hybrid_request_comes_to_the_same_text(
    make_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    async_scheduling: bool,
) -> None:
    architecture, overrides = MODELS["two sliding groups and a full one"]
    folder = make_model(architecture, **overrides)
    engine = Engine(folder, num_blocks=36, async_scheduling=async_scheduling)
    prompts = {str(n): make_prompt(n) for n in (30, 31, 32)}
    expected = {name: hf_greedy(folder, prompt, 60) for name, prompt in prompts.items()}
    assert engine.generate(prompts, 60) == expected
    assert engine.scheduler.num_preemptions > 0
    engine.cache.close()
