"""Sampling parameters and logprobs through ModelRunner, against transformers' logits."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling_reference import adjusted

from pdserve_common.errors import RequestFailedError
from pdserve_common.types.engine import LogprobsLists
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.runner.load.make_runner import make_runner
from support.model_driver import GREEDY, Driver, make_prompt

EOS = 1
# Of logprobs in fp32, beside those of transformers, whose sums have another order.
ATOL = 1e-4
assert_close = partial(torch.testing.assert_close, rtol=0, atol=ATOL)


class Reference:
    """What transformers says of a model, and greedy text under parameters."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self._model(torch.tensor([token_ids])).logits[0]

    def generate(self, prompt: list[int], params: SamplingParams, num_tokens: int) -> list[int]:
        output: list[int] = []
        for _ in range(num_tokens):
            logits = self.logits(prompt + output)[-1]
            output.append(int(adjusted(logits, params, prompt, output, (EOS,)).argmax()))
        return output

    def check_logprobs(
        self, token_ids: Sequence[int], first: int, num_top: int, lists: LogprobsLists
    ) -> None:
        """Are `lists` those of token_ids[first:]? Where two logprobs are equal but for rounding,
        either may come first.
        """
        logprobs = self.logits(token_ids)[first - 1 : -1].double().log_softmax(-1)
        assert len(lists) == len(token_ids) - first
        for position, expected in enumerate(logprobs):
            chosen = token_ids[first + position]
            first_id, *top_ids = lists.logprob_token_ids[position]
            assert first_id == chosen
            assert len(set(top_ids)) == num_top
            values = torch.tensor(lists.logprobs[position], dtype=torch.float64)
            assert_close(values, expected[[chosen, *top_ids]])
            assert_close(values[1:], expected.topk(num_top).values)
            surely, perhaps = (
                int((expected > expected[chosen] + margin).sum()) for margin in (ATOL, -ATOL)
            )
            assert surely < lists.sampled_token_ranks[position] <= perhaps


@pytest.fixture(scope="module")
def reference(make_model: Callable[..., Path], hf_model: Callable[..., Any]) -> Reference:
    return Reference(hf_model(make_model()))


@pytest.fixture
def driver(make_model: Callable[..., Path]) -> Driver:
    return Driver(make_model())


def collect(driver: Driver, *request_ids: str, num_tokens: int, chunk: int = 10_000) -> Any:
    """Run like Driver.run; return each request's (logprobs, prompt_logprobs), joined."""
    parts: dict[str, tuple[list[LogprobsLists], list[LogprobsLists]]] = {
        request_id: ([], []) for request_id in request_ids
    }
    while unfinished := [i for i in request_ids if len(driver.sequences[i].output) < num_tokens]:
        output = driver.step(dict.fromkeys(unfinished, chunk))
        for request_id in unfinished:
            for kind, lists in enumerate((output.logprobs, output.prompt_logprobs)):
                if request_id in lists:
                    parts[request_id][kind].append(lists[request_id])
    join = LogprobsLists.join
    return {i: tuple(join(p) if p else None for p in both) for i, both in parts.items()}


PARAMS = {
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.4),
    "presence-frequency": SamplingParams(
        temperature=0.0, presence_penalty=1.5, frequency_penalty=0.8
    ),
    "bias": SamplingParams(temperature=0.0, logit_bias={3: 6.0, 50: 7.5, 120: -100.0}),
    "allowed": SamplingParams(temperature=0.0, allowed_token_ids=tuple(range(40, 80))),
    "all": SamplingParams(
        temperature=0.0,
        repetition_penalty=0.9,
        frequency_penalty=1.1,
        logit_bias={1: 30.0, 3: 6.0},
        min_tokens=5,
        stop_token_ids=(9, 60),
        allowed_token_ids=(1, *range(0, 199, 2)),
    ),
}


def test_greedy_text_under_parameters_is_that_of_the_reference(
    driver: Driver, reference: Reference
) -> None:
    prompt = make_prompt(30)
    for name, params in PARAMS.items():
        driver.add(name, prompt, params=params)
    driver.add("plain", prompt)
    driver.run(*PARAMS, "plain", num_tokens=12, chunk=16)
    plain = reference.generate(prompt, GREEDY, 12)
    assert driver.sequences["plain"].output == plain
    for name, params in PARAMS.items():
        expected = reference.generate(prompt, params, 12)
        assert driver.sequences[name].output == expected, name
        assert expected != plain, f"{name} changes nothing here and proves nothing"


def test_bad_words_of_several_tokens_do_not_come(driver: Driver, reference: Reference) -> None:
    prompt = make_prompt(30)
    plain = reference.generate(prompt, GREEDY, 8)
    params = SamplingParams(temperature=0.0, bad_words_token_ids=(tuple(plain[2:5]), (plain[0],)))
    driver.add("a", prompt, params=params)
    driver.run("a", num_tokens=8)
    assert driver.sequences["a"].output == reference.generate(prompt, params, 8)
    params = SamplingParams(temperature=0.0, bad_words_token_ids=(tuple(plain[2:5]),))
    driver.add("b", prompt, params=params)
    driver.run("b", num_tokens=8)
    output = driver.sequences["b"].output
    assert output[:4] == plain[:4]
    assert output[4] != plain[4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_survive_preemption_and_a_move(driver: Driver, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, frequency_penalty=1.5, repetition_penalty=1.2, min_tokens=4
    )
    prompt = make_prompt(25)
    stayed = driver.add("stayed", prompt, params=params, seed=3)
    driver.run("stayed", num_tokens=12)
    preempted = driver.add("preempted", prompt, params=params, seed=3)
    driver.run("preempted", num_tokens=5)
    driver.preempt("preempted")
    driver.run("preempted", num_tokens=12, chunk=10)
    moved = driver.add("moved", prompt, output=stayed.output[:7], params=params, seed=3)
    driver.run("moved", num_tokens=12)
    assert preempted.output == moved.output == stayed.output


def test_logprobs_are_those_of_the_models_distribution(
    driver: Driver, reference: Reference
) -> None:
    prompt = make_prompt(40)
    wanted = {0: GREEDY, 20: SamplingParams(temperature=1.5), 3: PARAMS["all"]}
    for num_top, without in wanted.items():
        params = dataclasses.replace(without, logprobs=num_top)
        driver.add(str(num_top), prompt, params=params, seed=5)
    driver.add("none", prompt)
    results = collect(driver, "0", "20", "3", "none", num_tokens=6, chunk=16)
    assert results["none"] == (None, None)
    for num_top in wanted:
        logprobs, prompt_logprobs = results[str(num_top)]
        assert prompt_logprobs is None
        token_ids = driver.sequences[str(num_top)].token_ids
        reference.check_logprobs(token_ids, 40, num_top, logprobs)


@pytest.mark.parametrize(("length", "num_top"), [(1, 3), (2, 3), (33, 0), (300, 5)])
def test_prompt_logprobs_are_those_of_transformers(
    driver: Driver, reference: Reference, length: int, num_top: int
) -> None:
    prompt = make_prompt(length)
    driver.add("a", prompt, params=SamplingParams(temperature=0.0, prompt_logprobs=num_top))
    driver.add("b", make_prompt(50))
    logprobs, lists = collect(driver, "a", "b", num_tokens=3, chunk=70)["a"]
    assert logprobs is None
    if length == 1:
        assert lists is None
    else:
        reference.check_logprobs(prompt, 1, num_top, lists)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("chunk", [5, 16, 37, 150])
def test_chunks_give_prompt_logprobs_of_the_same_bits(
    make_model: Callable[..., Path], chunk: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(chunk: int) -> LogprobsLists:
        driver = Driver(make_model("Qwen3ForCausalLM"), dtype=dtype)
        params = SamplingParams(temperature=0.0, prompt_logprobs=4)
        driver.add("a", make_prompt(150), params=params)
        driver.add("b", make_prompt(20))
        return collect(driver, "a", "b", num_tokens=1, chunk=chunk)["a"][1]

    whole = score(10_000)
    monkeypatch.setattr("pdserve_engine.runner.sample.sampler.MAX_PROMPT_LOGITS_ROWS", 23)
    assert score(chunk) == whole


def test_a_preempted_prompt_is_scored_again_and_its_output_is_not(driver: Driver) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    driver.add("a", make_prompt(30), params=params)
    first = collect(driver, "a", num_tokens=4, chunk=16)["a"][1]
    driver.preempt("a")
    again = collect(driver, "a", num_tokens=6, chunk=20)["a"][1]
    assert len(first) == len(again) == 29
    assert again.logprob_token_ids == first.logprob_token_ids


def test_only_prompts_that_ask_have_their_logits_computed_and_not_all_at_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_logits, num_rows = driver.runner.model.compute_logits, []

    def record(hidden_rows: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden_rows))
        return compute_logits(hidden_rows)

    driver.runner.model.compute_logits = record
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    driver.add("a", make_prompt(300))
    driver.add("b", make_prompt(290), params=params)
    driver.step({"a": 10_000, "b": 10_000})
    assert num_rows == [256, 33]
    num_rows.clear()
    monkeypatch.setattr("pdserve_engine.runner.sample.sampler.MAX_PROMPT_LOGITS", 100 * 199)
    driver.add("c", make_prompt(250), params=params)
    driver.step({"c": 10_000})
    assert num_rows == [100, 100, 49]


class FailsLater:
    """A logits processor for which one token is as good as a third of the vocabulary."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self._banned = torch.arange(0, vocab_size, 3)

    def __call__(self, output_token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_token_ids) == 2:
            raise RuntimeError("two is enough")
        return logits.index_fill(0, self._banned, -torch.inf)


def test_a_failing_logits_processor_leaves_others_alone(driver: Driver) -> None:
    driver.runner = make_runner(
        driver.runner.model,
        driver.cache,
        max_num_seqs=8,
        max_model_len=driver.runner.model.config.max_model_len,
        logits_processors={"fails-later": FailsLater},
    )
    alone = driver.add("alone", make_prompt(20))
    driver.run("alone", num_tokens=6)
    params = SamplingParams(temperature=0.0, logits_processors=("fails-later",), logprobs=1)
    bad = driver.add("bad", make_prompt(20), params=params)
    good = driver.add("good", make_prompt(20))
    driver.run("bad", "good", num_tokens=2)
    output = driver.step({"good": 1, "bad": 1})
    message = "logits processor fails-later: RuntimeError('two is enough')"
    assert output.errors == {"bad": RequestFailedError(message).to_engine_error()}
    assert output.logprobs == {}
    assert bad.output[2] == 0
    assert all(token_id % 3 for token_id in bad.output[:2])
    driver.finish("bad")
    driver.run("good", num_tokens=6)
    assert good.output == alone.output
