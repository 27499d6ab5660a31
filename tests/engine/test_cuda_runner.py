"""The runner on CUDA: on a GPU, or with interpreted kernels and events that are over at once.

What it launches ahead must bring the tokens that the plain runner brings, whatever comes between.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve_common.types.pooling_params import PoolingParams
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.request.sched_output import AsyncModelRunnerOutput
from support.adapters import write_adapter
from support.flash_attn import installed, make_flash_attn
from support.interpreted import (
    convert_fp8_as_gpus_do,
    interpreted_kernels,
    prompt_events,
)
from support.model_driver import Driver, make_prompt
from support.models import LLAVA, NATIVE_MODELS
from support.pictures import Picture, Prompt, hf_greedy
from support.recorded_graphs import have_few_graphs, recorded_graphs
from support.samples import sampled
from support.triton_kernels import in_the_interpreter

pytest.importorskip("triton")

NUM_STEPS = 8
# Each is interpreted.
FEW_LAYERS = {"num_hidden_layers": 2}
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.9),
    # Looks back at its tokens: a step with it waits for those before.
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
)


@pytest.fixture
def make_driver(make_model: Callable[..., Path]) -> Iterator[Callable[..., Driver]]:
    """Make a driver of the runner for CUDA, with a Driver's options and, if not Triton's, a set of
    kernels.
    """

    def make(kernels: Any = None, folder: Path | None = None, **options: Any) -> Driver:
        with interpreted_kernels(kernels):
            return Driver(folder or make_model("Qwen3ForCausalLM", **FEW_LAYERS), **options)

    with prompt_events():
        yield make


def outputs_of(
    driver: Driver, params: Sequence[SamplingParams] = PARAMS, *, num_tokens: int = 6
) -> dict[str, list[int]]:
    """Return what a request with each of the params brings, by its index."""
    for i, each in enumerate(params):
        driver.add(str(i), make_prompt(5 + 9 * i), params=each, seed=i)
    driver.run(*map(str, range(len(params))), num_tokens=num_tokens, chunk=12)
    return {name: sequence.output for name, sequence in driver.sequences.items()}


@in_the_interpreter
def test_steps_that_are_launched_ahead_bring_the_same_tokens(
    make_model: Callable[..., Path], make_driver: Callable[..., Driver]
) -> None:
    """Each step is launched before anybody has looked at the one before; requests come and go."""
    plain, ahead = Driver(make_model("Qwen3ForCausalLM", **FEW_LAYERS)), make_driver()
    for driver in (plain, ahead):
        for i, params in enumerate(PARAMS[:2]):
            driver.add(str(i), make_prompt(5 + 9 * i), params=params, seed=i)
    for step in range(NUM_STEPS):
        if step == 3:
            for driver in (plain, ahead):
                driver.add("late", make_prompt(20), params=PARAMS[2], seed=9)
        if step == 5:
            for driver in (plain, ahead):
                driver.preempt("1")
        if step == 6:
            for driver in (plain, ahead):
                driver.finish("0")
        chunks = dict.fromkeys(plain.sequences, 12)
        plain.step(chunks)
        ahead.step(chunks)
        outputs = {name: sequence.output for name, sequence in plain.sequences.items()}
        assert {name: s.output for name, s in ahead.sequences.items()} == outputs
    assert all(outputs.values())


@in_the_interpreter
@pytest.mark.parametrize("quantization", sampled([None, "int8", "int4", "fp8"], "int4"))
def test_adapters_and_quantized_weights_bring_the_same_tokens(
    make_model: Callable[..., Path],
    make_driver: Callable[..., Driver],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantization: str | None,
) -> None:
    convert_fp8_as_gpus_do(monkeypatch)
    folder = make_model("Qwen3ForCausalLM", **FEW_LAYERS)
    adapters = [write_adapter(folder, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    options: dict[str, Any] = {"adapters": adapters, "quantization": quantization}
    outputs = []
    for driver in (Driver(folder, **options), make_driver(**options)):
        for i, adapter in enumerate((adapters[0], None, adapters[1], adapters[1])):
            driver.add(str(i), make_prompt(5 + 4 * i), adapter=adapter)
        driver.run("0", "1", "2", "3", num_tokens=4, chunk=12)
        outputs.append({name: sequence.output for name, sequence in driver.sequences.items()})
    assert outputs[1] == outputs[0]
    assert len({tuple(output) for output in outputs[0].values()}) == 4


@in_the_interpreter
@pytest.mark.parametrize("quantization", sampled([None, "int8", "int4", "fp8"], "int4"))
def test_experts_bring_the_same_tokens(
    make_model: Callable[..., Path],
    make_driver: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
    quantization: str | None,
) -> None:
    convert_fp8_as_gpus_do(monkeypatch)
    architecture, overrides = NATIVE_MODELS["qwen2-moe"]
    folder = make_model(architecture, **overrides | FEW_LAYERS)
    plain = Driver(folder, quantization=quantization)
    ahead = make_driver(folder=folder, quantization=quantization)
    assert outputs_of(ahead) == outputs_of(plain)


@in_the_interpreter
def test_pictures_bring_the_same_tokens(
    make_served_model: Callable[..., Path],
    make_driver: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where steps without one replay graphs."""
    have_few_graphs(monkeypatch, 4)
    folder = make_served_model(LLAVA)
    prompts = {
        "a": Prompt([5, 6, 7], Picture(1), [8], Picture(2)),
        "b": Prompt(Picture(2), [9]),
        "text": Prompt([5, 6, 7, 8]),
    }
    outputs = []
    for driver in (Driver(folder), make_driver(folder=folder)):
        with recorded_graphs():
            driver.runner.capture_graphs()
        for name, prompt in prompts.items():
            params = PARAMS[2] if name == "b" else PARAMS[0]
            driver.add(name, prompt.token_ids, params=params, pictures=prompt.pixels)
        driver.run(*prompts, num_tokens=4, chunk=11)
        outputs.append({name: sequence.output for name, sequence in driver.sequences.items()})
    assert outputs[1] == outputs[0]
    assert outputs[0]["a"] == hf_greedy(folder, prompts["a"], 4)


@in_the_interpreter
@pytest.mark.parametrize("pooling_type", ["LAST", "MEAN"])
@pytest.mark.parametrize("architecture", ["Qwen3Model", "LlamaForSequenceClassification"])
def test_it_pools_what_the_plain_runner_pools(
    make_model: Callable[..., Path],
    make_driver: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    pooling_type: str,
) -> None:
    # A start takes few sizes here.
    have_few_graphs(monkeypatch, 4)
    folder = make_model(architecture, **FEW_LAYERS)
    options = {"pooler_config": f'{{"pooling_type": "{pooling_type}"}}'}
    found: list[dict[str, tuple[float, ...]]] = []
    for driver in (Driver(folder, **options), make_driver(folder=folder, **options)):
        with recorded_graphs():
            driver.runner.warm_up()
            driver.runner.capture_graphs()
        assert driver.config.pooler is not None
        params = PoolingParams(task=driver.config.pooler.tasks[0])
        for length in (1, 12, 30):
            driver.add(str(length), make_prompt(length), pooling=params)
        outputs: dict[str, tuple[float, ...]] = {}
        while unfinished := [name for name in driver.sequences if name not in outputs]:
            outputs |= driver.step(dict.fromkeys(unfinished, 12)).pooler_outputs
        found.append(outputs)
    assert found[1].keys() == found[0].keys()
    for name, vector in found[0].items():
        torch.testing.assert_close(
            torch.tensor(found[1][name]), torch.tensor(vector), rtol=1e-4, atol=1e-5
        )


@in_the_interpreter
def test_kv_in_fp8_brings_the_tokens_of_the_plain_runner(
    make_model: Callable[..., Path],
    make_driver: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    convert_fp8_as_gpus_do(monkeypatch)
    plain = Driver(make_model("Qwen3ForCausalLM", **FEW_LAYERS), kv_cache_dtype="fp8")
    on_cuda = make_driver(kv_cache_dtype="fp8")
    assert plain.cache.tensor.dtype == on_cuda.cache.tensor.dtype == torch.float8_e4m3fn
    assert outputs_of(on_cuda) == outputs_of(plain)


@in_the_interpreter
def test_deterministic_kernels_bring_the_same_tokens(
    make_model: Callable[..., Path], make_driver: Callable[..., Driver]
) -> None:
    from pdserve_kernels.triton import deterministic

    plain = Driver(make_model("Qwen3ForCausalLM", **FEW_LAYERS))
    on_cuda = make_driver(deterministic)
    assert plain.runner.model.is_row_independent
    assert on_cuda.runner.model.is_row_independent
    found, expected = (outputs_of(each, PARAMS[:2], num_tokens=4) for each in (on_cuda, plain))
    assert found == expected


@in_the_interpreter
@pytest.mark.parametrize(
    "architecture", sampled(["Qwen3ForCausalLM", "MistralForCausalLM"], "MistralForCausalLM")
)
def test_a_vendor_s_attention_brings_the_same_tokens(
    make_model: Callable[..., Path], make_driver: Callable[..., Driver], architecture: str
) -> None:
    """A stand-in, which takes fp32 besides: the interpreter has no bf16."""
    from pdserve_kernels.triton import flash_attn

    folder = make_model(architecture, **FEW_LAYERS)
    with installed(make_flash_attn((torch.float32,))):
        assert outputs_of(make_driver(flash_attn, folder=folder)) == outputs_of(Driver(folder))


@in_the_interpreter
def test_a_token_that_the_host_has_not_seen_is_the_next_step_s_input(
    make_driver: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, unseen = make_driver(), make_driver()
    launched: list[AsyncModelRunnerOutput] = []
    for driver in (seen, unseen):
        driver.add("a", make_prompt(7))
    seen.run("a", num_tokens=4)
    runner: Any = unseen.runner
    monkeypatch.setattr(runner.stepper, "apply_launched", lambda *, wait: None)
    execute = runner.execute_model

    def launch(scheduled: Any) -> AsyncModelRunnerOutput:
        output = execute(scheduled)
        launched.append(output)
        return output

    monkeypatch.setattr(runner, "execute_model", launch)
    unseen.run("a", num_tokens=4)
    assert unseen.sequences["a"].output == seen.sequences["a"].output
    assert len(launched) == 4
