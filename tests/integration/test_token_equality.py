"""Greedy tokens through router, P, NIXL and D are those of Hugging Face transformers."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import SamplingParams
from support.models import NATIVE_MODELS
from support.samples import sampled

MAX_MODEL_LEN = 1280
NUM_TOKENS = 8
PROMPT_LENS = (1, 15, 16, 17, 1030)
# Further ones are the model runner's: these differ in what is handed over.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-uncached": ("Qwen3ForCausalLM", {}),
    "qwen3-hybrid": (
        "Qwen3ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 60,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2-moe": NATIVE_MODELS["qwen2-moe-mixed"],
    "qwen3-moe": NATIVE_MODELS["qwen3-moe"],
}


def random_prompt(length: int, seed: int, vocab_size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(length)]


async def generate(
    client: AsyncClient, prompt: list[int], num_tokens: int = NUM_TOKENS
) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    tokens: list[int] = []
    async for output in client.generate(prompt, params, timeout_s=60):
        for completion in output.outputs:
            assert not completion.HasField("error"), completion.error
            tokens.extend(completion.token_ids)
    return tokens


# Of those that are plain other tests compare with transformers what a handoff brings.
@pytest.mark.parametrize("name", sampled(MODELS, "qwen3-hybrid"))
async def test_tokens_equal_transformers(
    name: str,
    make_served_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    start_stack: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arch, overrides = MODELS[name]
    is_caching = name != "qwen3-uncached"
    monkeypatch.setenv("PDSERVE_ENABLE_PREFIX_CACHING", str(is_caching).lower())
    model = make_served_model(arch, max_position_embeddings=MAX_MODEL_LEN, **overrides)
    prompts = [random_prompt(length, seed, 190) for seed, length in enumerate(PROMPT_LENS)]
    expected = [hf_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    with start_stack(model=model, dtype="float32", max_num_batched_tokens=256) as stack:
        client = AsyncClient(stack.grpc_address)
        try:
            for prompt, tokens in zip(prompts, expected, strict=True):
                assert await generate(client, prompt) == tokens, f"{len(prompt)} tokens"
                assert await generate(client, prompt) == tokens, f"{len(prompt)} tokens, again"
            batch = await asyncio.gather(*(generate(client, prompts[i % 5]) for i in range(16)))
            assert batch == [expected[i % 5] for i in range(16)]
        finally:
            await client.close()
        router = stack.metrics("router")
        # A prompt of one token is not worth a handoff: it was sent six times.
        assert router['pdserve_handoffs_total{outcome="completed"}'] == 20
        assert (stack.metrics("prefill-0")["pdserve_prefix_cache_hits_total"] > 0) == is_caching


async def test_disaggregated_and_aggregated_paths_agree_in_bf16(
    bf16_stack: Any, start_router: Any
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    client = AsyncClient(bf16_stack.grpc_address)
    async with start_router(bf16_stack) as without_prefill:
        for seed, length in enumerate(PROMPT_LENS):
            prompt = random_prompt(length, seed, 190)
            handed_over = await generate(client, prompt, 32)
            # Under a salt of its own: else D would find in its cache what was handed over.
            tokens, metrics = await without_prefill.ask(prompt, params, cache_salt="alone")
            assert metrics.path == "local"
            assert tokens == handed_over
    await client.close()
    bf16_stack.assert_idle()
