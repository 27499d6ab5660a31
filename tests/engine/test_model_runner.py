"""ModelRunner against transformers, driven by a small scheduler of the tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve_common.types.sampling_params import SamplingParams
from support.model_driver import Driver, make_prompt, record_logits
from support.models import NATIVE_MODELS


@pytest.fixture
def driver(make_model: Callable[..., Path]) -> Iterator[Driver]:
    driver = Driver(make_model())
    yield driver
    driver.cache.close()


@pytest.mark.parametrize("name", NATIVE_MODELS)
def test_greedy_text_is_that_of_transformers(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], name: str
) -> None:
    architecture, overrides = NATIVE_MODELS[name]
    folder = make_model(architecture, **overrides)
    driver = Driver(folder)
    prompts = {str(n): make_prompt(n) for n in (1, 15, 16, 17, 300)}
    for request_id, prompt in prompts.items():
        driver.add(request_id, prompt)
    # Chunks of 70 are cut inside blocks, and the short prompts decode beside the long one's.
    driver.run(*prompts, num_tokens=20, chunk=70)
    for request_id, prompt in prompts.items():
        expected = hf_greedy(folder, prompt, 20)
        assert driver.sequences[request_id].output == expected, request_id
        assert len(set(expected)) > 5, "degenerate text proves nothing"


@pytest.mark.parametrize("chunk", [10_000, 256, 100])
def test_a_long_prompt_in_any_chunks_is_that_of_transformers(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], chunk: int
) -> None:
    folder = make_model("Qwen3ForCausalLM")
    driver = Driver(folder)
    prompt = make_prompt(1100)
    driver.add("long", prompt)
    driver.run("long", num_tokens=8, chunk=chunk)
    assert driver.sequences["long"].output == hf_greedy(folder, prompt, 8)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("bfloat16", 0.5)])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "qwen3-moe"])
def test_logits_are_close_to_transformers(
    make_model: Callable[..., Path],
    hf_model: Callable[..., Any],
    name: str,
    dtype: str,
    atol: float,
) -> None:
    architecture, overrides = NATIVE_MODELS[name]
    folder = make_model(architecture, **overrides)
    driver = Driver(folder, dtype=dtype)
    seen = record_logits(driver)
    prompt = make_prompt(75)
    driver.add("a", prompt)
    driver.run("a", num_tokens=2, chunk=40)
    token_ids = torch.tensor([driver.sequences["a"].token_ids[:-1]])
    with torch.inference_mode():
        expected = hf_model(folder)(token_ids).logits[0, -2:]
    assert [tuple(logits.shape) for logits in seen] == [(1, 199)] * 2
    assert seen[0].dtype == torch.float32
    scale = expected.std() if dtype == "bfloat16" else 1.0
    assert float((torch.cat(seen) - expected).abs().max() / scale) < atol


@pytest.mark.parametrize("chunk", [10_000, 96, 50])
def test_bfloat16_logits_have_the_same_bits_in_any_batch_and_chunking(
    make_model: Callable[..., Path], chunk: int
) -> None:
    def last_logits(*neighbours: int, chunk: int) -> torch.Tensor:
        driver = Driver(make_model("Qwen3ForCausalLM"), dtype="bfloat16")
        driver.add("a", make_prompt(150))
        for length in neighbours:
            driver.add(str(length), make_prompt(length))
        driver.run("a", *map(str, neighbours), num_tokens=4, chunk=chunk)
        seen = record_logits(driver)
        output = driver.step(dict.fromkeys(driver.sequences, 1))
        return seen[0][output.request_ids.index("a")]

    alone = last_logits(chunk=10_000)
    assert torch.equal(last_logits(3, 65, 140, chunk=chunk), alone)


def test_requests_may_come_and_go_and_share_steps(
    driver: Driver, make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]]
) -> None:
    expected = {n: hf_greedy(make_model(), make_prompt(n), 12) for n in (5, 40, 33, 64)}
    for request_id in (5, 40):
        driver.add(str(request_id), make_prompt(request_id))
    driver.run("5", "40", num_tokens=6, chunk=16)
    driver.add("33", make_prompt(33))
    driver.run("33", "5", num_tokens=12, chunk=7)
    assert driver.sequences["5"].output == expected[5]
    driver.finish("5")
    driver.add("64", make_prompt(64))
    driver.run("40", "64", num_tokens=12, chunk=30)
    for request_id in (40, 33, 64):
        assert driver.sequences[str(request_id)].output == expected[request_id]


def test_a_preempted_request_continues_where_it_was(
    driver: Driver, make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]]
) -> None:
    driver.add("a", make_prompt(30))
    driver.add("b", make_prompt(20))
    driver.run("a", "b", num_tokens=5)
    driver.preempt("a")
    driver.run("b", num_tokens=9)
    driver.run("a", num_tokens=12, chunk=16)
    assert driver.sequences["a"].output == hf_greedy(make_model(), make_prompt(30), 12)
    assert driver.sequences["b"].output == hf_greedy(make_model(), make_prompt(20), 9)


def test_a_request_preempted_and_scheduled_in_one_step_starts_over(
    driver: Driver, make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]]
) -> None:
    driver.add("a", make_prompt(30))
    driver.run("a", num_tokens=3)
    driver.preempt("a")
    driver.run("a", num_tokens=6)
    assert driver.sequences["a"].output == hf_greedy(make_model(), make_prompt(30), 6)


def test_a_request_that_arrives_with_output_tokens_and_kv_goes_on(
    driver: Driver, make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]]
) -> None:
    expected = hf_greedy(make_model(), make_prompt(50), 10)
    donor = driver.add("donor", make_prompt(50))
    driver.run("donor", num_tokens=4)
    moved = driver.add("moved", make_prompt(50), output=expected[:4])
    moved.block_ids, moved.num_computed_tokens = donor.block_ids, donor.num_computed_tokens
    driver.run("moved", num_tokens=10)
    assert moved.output == expected


def test_chunks_before_the_last_sample_nothing_and_decodes_come_first(driver: Driver) -> None:
    driver.add("decode", make_prompt(4))
    driver.run("decode", num_tokens=1)
    driver.add("prefill", make_prompt(60))
    output = driver.step({"prefill": 20, "decode": 1})
    assert output.request_ids == ("decode", "prefill")
    assert len(output.sampled_token_ids[0]) == 1
    assert output.sampled_token_ids[1] == ()
    assert driver.step({"prefill": 20}).sampled_token_ids == ((),)
    assert output.num_nans_in_logits == {}


def test_a_step_without_tokens_only_forgets(driver: Driver) -> None:
    driver.add("a", make_prompt(4))
    driver.run("a", num_tokens=1)
    driver.finish("a")
    assert driver.step({}).request_ids == ()
    driver.add("a", make_prompt(5))
    driver.run("a", num_tokens=1)


def test_random_tokens_depend_on_the_seed_not_on_the_company(driver: Driver) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95)
    alone = driver.add("alone", make_prompt(20), params=params, seed=7)
    driver.run("alone", num_tokens=15)
    again = driver.add("again", make_prompt(20), params=params, seed=7)
    other = driver.add("other", make_prompt(20), params=params, seed=8)
    driver.add("greedy", make_prompt(33))
    driver.run("other", "greedy", "again", num_tokens=15, chunk=12)
    assert again.output == alone.output
    assert other.output != alone.output
    # A worker that takes over in mid-text draws on from the same position.
    resumed = driver.add("resumed", make_prompt(20), output=alone.output[:6], params=params, seed=7)
    driver.run("resumed", num_tokens=15)
    assert resumed.output == alone.output


def test_min_tokens_keeps_end_tokens_away(
    driver: Driver, make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]]
) -> None:
    first, second, *_ = hf_greedy(make_model(), make_prompt(9), 4)
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(first, second))
    sequence = driver.add("a", make_prompt(9), params=params)
    driver.run("a", num_tokens=2)
    assert not {first, second, driver.config.eos_token_ids[0]} & set(sequence.output)


def test_nans_are_counted_for_the_request_they_are_in(driver: Driver) -> None:
    driver.add("good", make_prompt(20))
    bad = driver.add("bad", make_prompt(20))
    driver.run("good", "bad", num_tokens=1)
    driver.cache.tensor[bad.block_ids[0][0]] = torch.nan
    output = driver.step({"good": 1, "bad": 1})
    assert output.num_nans_in_logits == {"bad": 199}
    assert all(0 <= tokens[0] < 199 for tokens in output.sampled_token_ids)
