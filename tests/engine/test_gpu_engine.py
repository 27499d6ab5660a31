"""Models and engines on a GPU: against transformers, the CPU's kernels and themselves.

PDSERVE_TEST_DEVICE=cpu runs the same tests on the CPU, to see that they are right.
"""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve_common.types.engine import EngineCoreRequest, Generate, KVTransferParams
from pdserve_common.types.lora import LoRARequest
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_common.types.verbs import Sleep, WakeUp
from pdserve_engine.assemble import LoadedEngine
from pdserve_engine.clients.launch import WorkerEngine
from pdserve_engine.config import Role
from pdserve_engine.kv.memory import release_unused, used_bytes
from pdserve_engine.request.sched_output import SchedulerOutput
from pdserve_kernels import select
from support import engines, requests
from support.adapters import merged_greedy, write_adapter
from support.drafts import lengths_chosen_by
from support.engines import Client, linked, tokens_of
from support.model_driver import CPU, Driver, make_prompt, record_logits
from support.models import BACKEND_MODELS, NATIVE_MODELS, WINDOW
from support.steps import before_steps
from support.waiting import until

DEVICE = torch.device(os.environ.get("PDSERVE_TEST_DEVICE", "cuda"))
IS_CUDA = DEVICE.type == "cuda"
MODELS = NATIVE_MODELS | BACKEND_MODELS
MIB = 1 << 20
NUM_TOKENS = 20
# Shorter than a block, whole blocks, longer than a window, and in several chunks.
LENGTHS = (1, 15, 16, 17, WINDOW - 1, WINDOW, 90, 300)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_CUDA and not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
needs_two_gpus = pytest.mark.skipif(
    IS_CUDA and torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"
)


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    yield
    release_unused(DEVICE)


# ---- models


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_in_fp32_is_that_of_transformers(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], name: str
) -> None:
    architecture, overrides = MODELS[name]
    folder = make_model(architecture, **overrides)
    driver = Driver(folder, device=DEVICE)
    prompts = {str(n): make_prompt(n) for n in LENGTHS}
    for request_id, prompt in prompts.items():
        driver.add(request_id, prompt)
    # Chunks of 70 are cut inside blocks, and the short prompts decode beside the long one's.
    driver.run(*prompts, num_tokens=NUM_TOKENS, chunk=70)
    for request_id, prompt in prompts.items():
        expected = hf_greedy(folder, prompt, NUM_TOKENS)
        assert driver.sequences[request_id].output == expected, request_id


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_logits_are_close_to_transformers(
    make_model: Callable[..., Path], hf_model: Callable[..., Any], name: str
) -> None:
    """Of a prompt's last token and of a decode step."""
    architecture, overrides = MODELS[name]
    folder = make_model(architecture, **overrides)
    driver = Driver(folder, device=DEVICE, dtype="bfloat16")
    seen = record_logits(driver)
    driver.add("a", make_prompt(75))
    driver.run("a", num_tokens=2, chunk=40)
    token_ids = torch.tensor([driver.sequences["a"].token_ids[:-1]])
    with torch.inference_mode():
        expected = hf_model(folder)(token_ids).logits[0, -2:]
        rounded = hf_model(folder, "bfloat16")(token_ids).logits[0, -2:]

    def error(logits: torch.Tensor) -> float:
        return float((logits.cpu().float() - expected).abs().mean() / expected.std())

    # Rounding makes much of some models' logits, as where an expert was chosen by a hair.
    assert error(torch.cat(seen)) < max(0.1, 2 * error(rounded))


@pytest.mark.parametrize("name", ["qwen3", "qwen2-moe"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_greedy_text_of_quantized_weights_is_that_of_the_cpu(
    make_model: Callable[..., Path], quantization: str, name: str
) -> None:
    """There the weights are made dense and multiplied in fp32."""
    architecture, overrides = NATIVE_MODELS[name]
    folder = make_model(architecture, **overrides, hidden_size=96, intermediate_size=160)
    outputs = []
    for device in (CPU, DEVICE):
        driver = Driver(folder, device=device, quantization=quantization)
        for n in LENGTHS:
            driver.add(str(n), make_prompt(n))
        driver.run(*map(str, LENGTHS), num_tokens=NUM_TOKENS, chunk=70)
        outputs.append({name: each.output for name, each in driver.sequences.items()})
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("is_captured", [False, True])
def test_greedy_text_with_adapters_is_that_of_merged_weights(
    make_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    tmp_path: Path,
    *,
    is_captured: bool,
) -> None:
    folder = make_model("Qwen3ForCausalLM")
    adapters = [
        write_adapter(folder, tmp_path / "all", seed=1, r=24),
        write_adapter(folder, tmp_path / "few", seed=2, target_modules=["v_proj", "up_proj"]),
    ]
    driver = Driver(folder, device=DEVICE, adapters=adapters)
    if is_captured:
        driver.runner.capture_graphs()
    adapter_of = dict(zip(map(str, LENGTHS), itertools.cycle([*adapters, None]), strict=False))
    for name, adapter in adapter_of.items():
        driver.add(name, make_prompt(int(name)), adapter=adapter)
    driver.run(*adapter_of, num_tokens=NUM_TOKENS, chunk=70)
    for name, adapter in adapter_of.items():
        prompt = make_prompt(int(name))
        if adapter is None:
            expected = hf_greedy(folder, prompt, NUM_TOKENS)
        else:
            expected = merged_greedy(folder, adapter, prompt, NUM_TOKENS)
        assert driver.sequences[name].output == expected, name


@pytest.mark.skipif(not IS_CUDA, reason="steps on the CPU are over when they return")
def test_an_adapter_may_go_while_a_step_with_it_runs(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompt = make_model("Qwen3ForCausalLM"), make_prompt(20)
    first, second = (write_adapter(folder, tmp_path / str(seed), seed=seed) for seed in (1, 2))
    driver = Driver(folder, device=DEVICE, adapters=[first])
    runner = driver.runner
    runner.capture_graphs()
    driver.add("a", prompt, adapter=first)
    driver.run("a", num_tokens=NUM_TOKENS - 1)
    execute = runner.execute_model

    def replace_adapter(step: SchedulerOutput) -> Any:
        torch.cuda._sleep(1 << 30)  # the step is behind half a second of nothing
        output = execute(step)
        driver.unload_adapter(first)
        driver.load_adapter(second)
        return output

    monkeypatch.setattr(runner, "execute_model", replace_adapter)
    driver.step({"a": 1})
    monkeypatch.undo()
    assert driver.sequences["a"].output == merged_greedy(folder, first, prompt, NUM_TOKENS)
    driver.finish("a")
    driver.add("b", prompt, adapter=second)
    driver.run("b", num_tokens=NUM_TOKENS)
    assert driver.sequences["b"].output == merged_greedy(folder, second, prompt, NUM_TOKENS)


# ---- sampling


PARAMS = {
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=1.0, top_k=20),
    "top-p": SamplingParams(temperature=1.2, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05),
    "all": SamplingParams(temperature=1.5, top_k=50, top_p=0.9, min_p=0.01),
    "greedy": SamplingParams(temperature=0.0),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_samples_are_those_of_the_cpu_for_equal_logits(
    make_model: Callable[..., Path], dtype: str
) -> None:
    # A vocabulary that no power of two divides.
    driver = Driver(make_model("Qwen3ForCausalLM", vocab_size=5003), device=DEVICE, dtype=dtype)
    logits = recorded(driver.runner.model, "compute_logits")
    settings = recorded(driver.runner.input_batch.sampling, "describe")
    for seed, (name, params) in enumerate(PARAMS.items()):
        driver.add(name, make_prompt(20 + seed), params=params, seed=seed)
    num_sampled = 0
    while num_sampled < NUM_TOKENS * len(PARAMS):
        output = driver.step(dict.fromkeys(PARAMS, 16))
        tokens = [token_id for token_ids in output.sampled_token_ids for token_id in token_ids]
        if tokens:
            assert tokens == select(CPU).sample(logits[-1].cpu(), settings[-1]).tolist()
            num_sampled += len(tokens)
    assert len({tuple(driver.sequences[name].output) for name in PARAMS}) == len(PARAMS)


def recorded(owner: Any, name: str) -> list[Any]:
    """Return a list that from now on gets what a method returns, as it is then."""
    method, results = getattr(owner, name), []

    def record(*args: Any) -> Any:
        result = method(*args)
        results.append(result.clone() if isinstance(result, torch.Tensor) else result)
        return result

    setattr(owner, name, record)
    return results


# ---- engines


def settings_of(**fields: Any) -> dict[str, Any]:
    return {
        "device": DEVICE.type,
        "dtype": "float32",
        "num_threads": 0 if IS_CUDA else 1,
        "num_blocks": 256,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        **fields,
    }


def loaded(model: Path, **fields: Any) -> contextlib.AbstractContextManager[LoadedEngine]:
    return engines.loaded(model, **settings_of(**fields))


def greedy_request(name: str, prompt: Sequence[int], **fields: Any) -> EngineCoreRequest:
    return requests.make_request(name, prompt, requests.greedy(NUM_TOKENS), **fields)


def generate(
    engine: LoadedEngine,
    prompts: list[list[int]],
    params: SamplingParams | None = None,
    loras: Sequence[LoRARequest | None] = (None,),
) -> list[list[int]]:
    """Return what it says to each prompt, with these adapters in turn; without parameters
    greedily.
    """
    asked = []
    for name, (prompt, lora) in enumerate(zip(prompts, itertools.cycle(loras), strict=False)):
        request = greedy_request(str(name), prompt, lora_request=lora)
        if params is not None:
            request = dataclasses.replace(request, task=Generate(params))
        asked.append(request)
    found = engines.generate(engine.core, asked)
    return [found[request.request_id] for request in asked]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_engine_says_what_transformers_says_with_prefix_hits_and_preemptions(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], *, async_scheduling: bool
) -> None:
    folder = make_model("Qwen3ForCausalLM")
    prompts = [make_prompt(length) for length in (20, 90, 300, 5, 64, 33)]
    expected = [hf_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
    with loaded(folder, num_blocks=34, async_scheduling=async_scheduling) as engine:
        for _ in range(2):
            assert generate(engine, prompts) == expected
        assert engine.core.scheduler.kv.block_pool.num_free_blocks == 34


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_drafts_change_no_token(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], *, async_scheduling: bool
) -> None:
    folder = make_model("Qwen3ForCausalLM")
    prompts = [make_prompt(length) * 3 for length in (5, 12, 30)]
    expected = [hf_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
    num_drafts = 0

    def count(step: SchedulerOutput) -> None:
        nonlocal num_drafts
        num_drafts += sum(map(len, step.scheduled_spec_decode_tokens.values()))

    fields = {"speculation": "suffix", "async_scheduling": async_scheduling}
    with lengths_chosen_by(), loaded(folder, **fields) as engine, before_steps(count):
        assert generate(engine, prompts) == expected
    assert num_drafts


@needs_two_gpus
@pytest.mark.parametrize("name", ["llama-biases", "llama-tied-sharded", "qwen3"])
def test_two_ranks_say_what_transformers_says(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], name: str
) -> None:
    architecture, overrides = NATIVE_MODELS[name]
    folder = make_model(architecture, **overrides)
    prompts = [make_prompt(length) for length in (20, 90, 300, 5, 64, 33)]
    expected = [hf_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
    with loaded(folder, num_blocks=64, tensor_parallel_size=2) as engine:
        for _ in range(2):
            assert generate(engine, prompts) == expected


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=needs_two_gpus)])
def test_an_engine_with_adapters_says_what_merged_weights_say(
    make_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    tmp_path: Path,
    size: int,
) -> None:
    folder, adapter = make_model("Qwen3ForCausalLM"), tmp_path / "a"
    write_adapter(folder, adapter, seed=1)
    prompts = [make_prompt(length) for length in (20, 90, 300, 5)]
    with loaded(folder, tensor_parallel_size=size, lora=(f"a={adapter}",)) as engine:
        (served,) = engine.control.adapters.adapters
        lora = LoRARequest(lora_name="a", digest=served.digest)
        found = generate(engine, prompts, loras=[lora, None])
    assert found[::2] == [merged_greedy(folder, adapter, each, NUM_TOKENS) for each in prompts[::2]]
    assert found[1::2] == [hf_greedy(folder, each, NUM_TOKENS) for each in prompts[1::2]]


@needs_two_gpus
@pytest.mark.parametrize("params", [*PARAMS.values(), SamplingParams(logprobs=2, top_k=9)])
def test_two_ranks_sample_what_one_does(
    make_model: Callable[..., Path], params: SamplingParams
) -> None:
    """In fp32, where a sum's order shows in no token here."""
    folder = make_model("Qwen3ForCausalLM", vocab_size=5003)
    params = dataclasses.replace(params, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [make_prompt(length) for length in (20, 90)]
    answers = []
    for size in (1, 2):
        with loaded(folder, tensor_parallel_size=size) as engine:
            answers.append(generate(engine, prompts, params))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_that_fails_costs_nothing_but_time(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], *, async_scheduling: bool
) -> None:
    folder = make_model()
    prompts = [make_prompt(length) for length in (20, 90, 150)]
    with loaded(folder, async_scheduling=async_scheduling) as engine:
        num_shared_steps = 0

        def fail_sometimes(step: SchedulerOutput) -> None:
            nonlocal num_shared_steps
            if len(step.num_scheduled_tokens) > 1:  # one alone would be blamed
                num_shared_steps += 1
                if num_shared_steps in (2, 8):
                    raise RuntimeError("a passing fault")

        with before_steps(fail_sometimes):
            tokens = generate(engine, prompts)
        assert num_shared_steps > 8
    assert tokens == [hf_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.skipif(not IS_CUDA, reason="the CPU's pool is of another size")
def test_the_pool_leaves_room_for_the_largest_step(make_model: Callable[..., Path]) -> None:
    # Logits of 64 rows take 50 MiB in fp32, activations of 4096 tokens more.
    folder = make_model(
        vocab_size=200_000,
        hidden_size=512,
        intermediate_size=4096,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
    )
    release_unused(DEVICE)
    _, total = torch.cuda.mem_get_info(DEVICE)
    budget = used_bytes(DEVICE) + 6144 * MIB
    with loaded(
        folder,
        dtype="bfloat16",
        num_blocks=None,
        max_model_len=8192,
        max_num_batched_tokens=4096,
        max_num_seqs=64,
        gpu_memory_utilization=budget / total,
        enable_prefix_caching=False,
    ) as engine:
        rank: Any = engine.core.executor.rank  # type: ignore[attr-defined]
        assert 3072 * MIB < rank.kv_cache.num_bytes < 6144 * MIB
        torch.cuda.reset_peak_memory_stats(DEVICE)
        params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=1, max_tokens=8)
        for index in range(64):
            request = greedy_request(str(index), make_prompt(64 + index))
            engine.core.add_request(dataclasses.replace(request, task=Generate(params)))
        while engine.core.has_work():
            engine.core.step()
        # What comes after the pool was sized, as graphs of decodes, is small.
        assert used_bytes(DEVICE) < budget + 1024 * MIB


# ---- clients


def launched(
    model: Path, role: Role = "decode", **fields: Any
) -> contextlib.AbstractAsyncContextManager[WorkerEngine]:
    return engines.launched(model, role, **settings_of(**fields))


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_that_has_slept_says_the_same(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], level: int
) -> None:
    folder, prompt = make_model("Qwen3ForCausalLM"), make_prompt(90)
    # 64 MiB of KV.
    async with launched(folder, engine_process="inproc", num_blocks=5461) as engine:
        client = Client(engine)
        for attempt in range(3):
            request_id = f"r{attempt}"
            client.send(greedy_request(request_id, prompt))
            assert tokens_of(await client.answer(request_id)) == hf_greedy(
                folder, prompt, NUM_TOKENS
            )
            num_bytes = await engine.call(Sleep(level=level))
            assert num_bytes > 60 * MIB or not IS_CUDA
            await engine.call(WakeUp())


async def test_an_engine_in_its_own_process_serves(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]]
) -> None:
    folder, prompt = make_model(), make_prompt(90)
    async with launched(folder, engine_process="subprocess") as engine:
        client = Client(engine)
        client.send(greedy_request("a", prompt))
        assert tokens_of(await client.answer("a")) == hf_greedy(folder, prompt, NUM_TOKENS)


@pytest.mark.parametrize(
    ("name", "size"),
    [("qwen3", 1), ("qwen3-window", 1), pytest.param("qwen3", 2, marks=needs_two_gpus)],
)
async def test_p_hands_over_to_d_from_gpu_memory_to_gpu_memory(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], name: str, size: int
) -> None:
    """Each in a process of its own, as workers run them, or P in `size` ranks; prompts of one chunk
    and of several.
    """
    architecture, overrides = NATIVE_MODELS[name]
    folder = make_model(architecture, **overrides)
    fields = {"engine_process": "subprocess", "kv_connector": "nixl"}
    async with (
        launched(folder, "prefill", tensor_parallel_size=size, **fields) as p,
        launched(folder, "decode", **fields) as d,
        linked(p, d) as port,
    ):
        on_p, on_d = Client(p), Client(d)
        to_d = KVTransferParams(do_remote_decode=True, remote_engine_id="d0")
        to_p = KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id="p0",
            remote_host="127.0.0.1",
            remote_port=port,
        )
        prompts = {str(length): make_prompt(length) for length in (17, 64, 300)}
        for request_id, prompt in prompts.items():
            on_d.send(greedy_request(request_id, prompt, kv_transfer_params=to_p))
            on_p.send(greedy_request(request_id, prompt, kv_transfer_params=to_d))
        for request_id, prompt in prompts.items():
            expected = hf_greedy(folder, prompt, NUM_TOKENS)
            assert tokens_of(await on_p.answer(request_id)) == expected[:1]
            assert tokens_of(await on_d.answer(request_id)) == expected
        await until(lambda: not p.stats().num_open_kv_sessions)
