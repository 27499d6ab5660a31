"""What engines pool is what transformers' states give, in any batch and with any chunks."""

import asyncio
import itertools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional as F

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.types.engine import FinishReason
from pdserve_common.types.lora import LoRARequest
from pdserve_engine.assemble import load_engine
from pdserve_engine.clients.launch import launch_engine
from pdserve_engine.config import EngineConfig
from pdserve_engine.request.sched_output import SchedulerOutput
from pdserve_worker.self_check import check_engine
from support.adapters import merged_states, write_adapter
from support.model_driver import make_prompt
from support.models import NATIVE_MODELS
from support.pooling_engines import pooling_engine, vector_of
from support.pooling_models import add_modules, hf_labels, hf_states
from support.steps import before_steps

PROMPTS = {str(n): make_prompt(n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 150)}
POOL = {
    "lasttoken": lambda states: states[-1],
    "mean_tokens": lambda states: states.mean(0),
}


def assert_close(vector: list[float], expected: torch.Tensor) -> None:
    found = torch.tensor(vector)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert F.cosine_similarity(found, expected, dim=0) > 0.9999


@pytest.mark.parametrize("mode", POOL)
@pytest.mark.parametrize(
    ("architecture", "normalizes"),
    [("Qwen3Model", True), ("LlamaModel", False), ("Qwen2ForCausalLM", True)],
)
async def test_embeddings_are_pooled_states_of_transformers(
    make_model: Callable[..., Path], tmp_path: Path, architecture: str, mode: str, normalizes: bool
) -> None:
    folder = add_modules(make_model(architecture), tmp_path, mode=mode, normalizes=normalizes)
    async with pooling_engine(folder) as engine:
        assert engine.client.info.tasks == ("embed",)
        assert engine.client.info.embedding_size == 64
        for name, prompt in PROMPTS.items():
            engine.add(name, prompt)
        for name, prompt in PROMPTS.items():
            expected = POOL[mode](hf_states(folder, prompt))
            if normalizes:
                expected = F.normalize(expected, dim=0)
            output = await engine.output(name)
            assert output.finish_reason is FinishReason.STOP
            assert output.new_token_ids == ()
            assert output.prefill_stats is not None
            assert output.prefill_stats.num_prompt_tokens == len(prompt)
            assert_close(vector_of(output), expected)


async def test_a_model_without_files_of_sentence_transformers_pools_the_last_token(
    make_model: Callable[..., Path],
) -> None:
    prompt = make_prompt(40)
    expected = hf_states(make_model("Qwen3ForCausalLM"), prompt)[-1]
    async with pooling_engine(make_model("Qwen3ForCausalLM"), runner="pooling") as engine:
        assert engine.client.info.pooling_type == "last"
        assert_close(await engine.pool("a", prompt), F.normalize(expected, dim=0))
        assert_close(await engine.pool("b", prompt, use_activation=False), expected)


@pytest.mark.parametrize("is_matryoshka", [True, False])
async def test_the_leading_dimensions_are_kept_and_scaled(
    make_model: Callable[..., Path], is_matryoshka: bool
) -> None:
    prompt = make_prompt(20)
    states = hf_states(make_model("Qwen3Model"), prompt)[-1]
    pooler_config = '{"is_matryoshka": true}' if is_matryoshka else None
    async with pooling_engine(make_model("Qwen3Model"), pooler_config=pooler_config) as engine:
        assert engine.client.info.is_matryoshka is is_matryoshka
        for size in (1, 13, 64):
            found = await engine.pool(str(size), prompt, dimensions=size)
            assert_close(found, F.normalize(states[:size], dim=0))


@pytest.mark.parametrize(
    ("num_labels", "fields", "tasks", "activation"),
    [
        (3, {}, ("classify",), lambda logits: logits.softmax(0)),
        (1, {}, ("classify", "score"), torch.sigmoid),
        (3, {"problem_type": "multi_label_classification"}, ("classify",), torch.sigmoid),
        (1, {"problem_type": "regression"}, ("classify", "score"), lambda logits: logits),
    ],
)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
async def test_classes_are_those_of_transformers(
    make_model: Callable[..., Path],
    family: str,
    num_labels: int,
    fields: dict[str, Any],
    tasks: tuple[str, ...],
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    folder = make_model(
        f"{family}ForSequenceClassification", num_labels=num_labels, pad_token_id=0, **fields
    )
    async with pooling_engine(folder) as engine:
        assert engine.client.info.tasks == tasks
        assert engine.client.info.embedding_size == num_labels
        for task in tasks:
            for name, prompt in PROMPTS.items():
                engine.add(f"{task}-{name}", prompt, task)
                engine.add(f"{task}-{name}-logits", prompt, task, use_activation=False)
        for name, prompt in PROMPTS.items():
            logits = hf_labels(folder, prompt)
            for task in tasks:
                answer = vector_of(await engine.output(f"{task}-{name}"))
                torch.testing.assert_close(torch.tensor(answer), activation(logits))
                answer = vector_of(await engine.output(f"{task}-{name}-logits"))
                torch.testing.assert_close(torch.tensor(answer), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_tied", [True, False])
async def test_a_score_of_two_tokens_is_the_share_of_the_second_in_transformers(
    make_served_model: Callable[..., Path], hf_model: Callable[..., Any], is_tied: bool
) -> None:
    folder = make_served_model("Qwen3ForCausalLM", tie_word_embeddings=is_tied)
    settings = {"runner": "pooling", "pooler_config": '{"classifier_from_token": ["n", "y"]}'}
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    async with pooling_engine(folder, **settings) as engine:
        assert engine.client.info.tasks == ("classify", "score")
        for name, prompt in PROMPTS.items():
            with torch.inference_mode():
                logits = hf_model(folder)(torch.tensor([prompt])).logits[0, -1]
            expected = logits[[vocabulary["n"], vocabulary["y"]]].softmax(0)[1:]
            found = torch.tensor(await engine.pool(name, prompt, task="score"))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", POOL)
async def test_a_vector_has_the_same_bits_alone_and_in_any_batch(
    make_model: Callable[..., Path], tmp_path: Path, mode: str, dtype: str
) -> None:
    folder = add_modules(make_model("Qwen3Model", dtype=dtype), tmp_path, mode=mode)
    found: list[dict[str, list[float]]] = []
    for settings in ({}, {"max_num_batched_tokens": 33, "max_num_partial_prefills": 3}):
        async with pooling_engine(folder, **settings) as engine:
            assert engine.client.info.determinism == "exact"
            found.append({name: await engine.pool(name, p) for name, p in PROMPTS.items()})
            for name, prompt in PROMPTS.items():
                engine.add(f"{name}-again", prompt)
            outputs = [await engine.output(f"{name}-again") for name in PROMPTS]
            found.append(dict(zip(PROMPTS, map(vector_of, outputs), strict=True)))
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("mode", POOL)
async def test_a_prefix_is_read_from_the_cache_unless_all_states_are_needed(
    make_model: Callable[..., Path], tmp_path: Path, mode: str
) -> None:
    folder = add_modules(make_model("Qwen3Model"), tmp_path, mode=mode)
    prompt = make_prompt(100)
    async with pooling_engine(folder) as engine:
        is_last = mode == "lasttoken"
        assert engine.client.info.has_prefix_caching is is_last
        first = await engine.pool("first", prompt)
        for name, salt, num_cached in (("again", None, 96), ("other", "salt", 0)):
            engine.add(name, prompt, cache_salt=salt)
            output = await engine.output(name)
            assert vector_of(output) == first
            assert output.prefill_stats is not None
            assert output.prefill_stats.num_cached_tokens == (num_cached if is_last else 0)


@pytest.mark.parametrize(("num_tokens", "num_chunks"), [(16, 1), (17, 2), (100, 7)])
async def test_steps_of_a_prompt_are_counted(
    make_model: Callable[..., Path], num_tokens: int, num_chunks: int
) -> None:
    async with pooling_engine(make_model("Qwen3Model"), max_num_batched_tokens=16) as engine:
        engine.add("a", make_prompt(num_tokens))
        output = await engine.output("a")
        assert output.prefill_stats is not None
        assert output.prefill_stats.num_chunks == num_chunks


@pytest.mark.parametrize("mode", POOL)
async def test_a_preempted_request_brings_the_same_vector(
    make_model: Callable[..., Path], tmp_path: Path, mode: str
) -> None:
    """A step that fails preempts all that run, in the midst of their prompts."""
    folder = add_modules(make_model("Qwen3Model"), tmp_path, mode=mode)
    prompts = {str(i): make_prompt(120 + i) for i in range(4)}
    settings: dict[str, Any] = {
        "max_num_partial_prefills": 4,
        "long_prefill_token_threshold": 16,
    }
    async with pooling_engine(folder, **settings) as engine:
        expected = {name: await engine.pool(name, prompt) for name, prompt in prompts.items()}
        num_steps = itertools.count()

        def fail_once(scheduled: SchedulerOutput) -> None:
            if next(num_steps) == 3:
                raise RuntimeError("a step that fails")

        with before_steps(fail_once):
            for name, prompt in prompts.items():
                engine.add(f"{name}-again", prompt, cache_salt="salt")
            for name in prompts:
                assert vector_of(await engine.output(f"{name}-again")) == expected[name]
        assert engine.client.stats().num_preemptions >= 2


@pytest.mark.parametrize("name", ["qwen3-window", "llama-tied-sharded", "llama-biases"])
async def test_all_that_our_own_code_runs_can_be_pooled(
    make_model: Callable[..., Path], name: str
) -> None:
    architecture, overrides = NATIVE_MODELS[name]
    folder = make_model(architecture, **overrides)
    prompt = make_prompt(150)
    async with pooling_engine(folder, runner="pooling") as engine:
        expected = F.normalize(hf_states(folder, prompt)[-1], dim=0)
        assert_close(await engine.pool("a", prompt), expected)


async def test_requests_are_aborted_and_expire(make_model: Callable[..., Path]) -> None:
    async with pooling_engine(make_model("Qwen3Model"), max_num_batched_tokens=16) as engine:
        loop = asyncio.get_running_loop()
        engine.add("late", make_prompt(2000), deadline=loop.time() - 1.0)
        late = await engine.output("late")
        assert late.finish_reason is FinishReason.ERROR
        engine.add("aborted", make_prompt(2000))
        engine.abort("aborted")
        assert (await engine.output("aborted")).finish_reason is FinishReason.ABORT
        assert len(await engine.pool("next", make_prompt(9))) == 64


async def test_a_prompt_may_fill_the_context(make_model: Callable[..., Path]) -> None:
    folder = make_model("Qwen3Model")
    prompt = make_prompt(64)
    async with pooling_engine(folder, max_model_len=64, num_blocks=4) as engine:
        expected = F.normalize(hf_states(folder, prompt)[-1], dim=0)
        assert_close(await engine.pool("a", prompt), expected)


async def test_adapters_change_embeddings_as_merged_weights_do(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder, prompt = make_model("Qwen3Model"), make_prompt(70)
    adapters = {
        str(seed): write_adapter(folder, tmp_path / str(seed), seed=seed, auto_class="AutoModel")
        for seed in (1, 2)
    }
    lora = tuple(f"{name}={path}" for name, path in adapters.items())
    async with pooling_engine(folder, lora=lora) as engine:
        held = {adapter.name: adapter.digest for adapter in engine.client.info.adapters}
        for name in adapters:
            request = LoRARequest(lora_name=name, digest=held[name])
            engine.add(name, prompt, lora_request=request)
        engine.add("plain", prompt)
        found = {name: vector_of(await engine.output(name)) for name in (*adapters, "plain")}
    assert_close(found["plain"], F.normalize(hf_states(folder, prompt)[-1], dim=0))
    for name, path in adapters.items():
        expected = F.normalize(merged_states(folder, path, prompt)[-1], dim=0)
        torch.testing.assert_close(torch.tensor(found[name]), expected, rtol=1e-3, atol=1e-4)
        assert F.cosine_similarity(torch.tensor(found[name]), expected, dim=0) > 0.9999
        assert F.cosine_similarity(torch.tensor(found["plain"]), expected, dim=0) < 0.99


@pytest.mark.parametrize("engine_process", ["inproc", "subprocess"])
async def test_a_worker_proves_that_its_engine_pools(
    make_model: Callable[..., Path], engine_process: str
) -> None:
    config = EngineConfig(
        model=str(make_model("LlamaForSequenceClassification", num_labels=1)),
        num_threads=1,
        num_blocks=8,
        engine_process=engine_process,  # type: ignore[arg-type]
    )
    engine = await launch_engine(
        config, role="prefill", engine_id="p", registry=CollectorRegistry()
    )
    try:
        await check_engine(engine, timeout_s=60.0)
        assert engine.info.kv_transport == "none"
        assert engine.info.served_fields == ()
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_total_blocks
    finally:
        await engine.close()


def test_a_decode_workers_model_must_generate(make_model: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="serves embed, which prefill workers do"):
        load_engine(
            EngineConfig(model=str(make_model("Qwen3Model"))),
            role="decode",
            engine_id="e",
            metrics=KVTransferMetrics(CollectorRegistry()),
        )


async def test_nan_fails_the_request_and_not_the_worker(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A token whose embedding is NaN; nothing of its prompt is cached, and others go on."""
    shutil.copytree(make_model("Qwen3Model"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["embed_tokens.weight"][7] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    async with pooling_engine(tmp_path) as engine:
        for i in range(4):
            engine.add(str(i), [5] * 40 + [7])
            output = await engine.output(str(i))
            assert output.error is not None
            assert "64 NaN values" in output.error.message
            assert output.pooling_output is None
        assert not any(map(math.isnan, await engine.pool("next", [5] * 40)))
