"""Requests with grammars in a model runner: their answers fit, and nobody else notices."""

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import regex
import tokenizers

from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.grammar.manager import SLOW_NUM_TOKENS
from support.grammars import EOS, MODEL, Compile, hold_masks
from support.model_driver import Driver
from support.samples import seeds

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Mia", "Theo", "Oscar"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON: dict[str, Any] = {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 2}
PATTERN = "(Mia|Theo) [a-z]{3,9}( and [a-z]{2,9}){0,2}[.!]"
REGEX = {"type": "regex", "pattern": PATTERN}
RANDOM = SamplingParams(temperature=1.0)
MAX_STEPS = 300


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver(MODEL)
    yield driver
    driver.runner.close()
    driver.cache.close()


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def finish(driver: Driver, *names: str, chunk: int = 10_000) -> None:
    """Step until each has ended by EOS."""
    for _ in range(MAX_STEPS):
        going = [name for name in names if driver.sequences[name].token_ids[-1] != EOS]
        if not going:
            return
        output = driver.step(dict.fromkeys(going, chunk))
        assert not output.errors
    raise AssertionError(f"{going} do not end")


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), RANDOM], ids=["greedy", "any"])
def test_answers_fit_their_grammars(
    driver: Driver, compile_format: Compile, tokenizer: tokenizers.Tokenizer, params: SamplingParams
) -> None:
    for seed in range(4):
        prompt = tokenizer.encode(f"Tell a story, {seed}:").ids
        for kind, format in (("json", JSON), ("regex", REGEX)):
            grammar = compile_format(format)
            driver.add(f"{kind}{seed}", prompt, params=params, seed=seed, grammar=grammar)
    finish(driver, *driver.sequences, chunk=5)
    for name, sequence in driver.sequences.items():
        text = tokenizer.decode(sequence.output)
        if name.startswith("json"):
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert regex.fullmatch(PATTERN, text), text


def test_greedy_answers_need_no_logits_and_are_those_of_the_logits(
    driver: Driver, compile_format: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, model = compile_format(JSON), driver.runner.model
    greedy = SamplingParams(temperature=0.0)
    driver.add("logits", [10, 20, 30], params=replace(greedy, logprobs=1), grammar=grammar)
    finish(driver, "logits")
    for name in ("plain", "fused"):
        driver.add(name, [10, 20, 30], params=greedy, grammar=grammar if name == "fused" else None)
    monkeypatch.delattr(type(model), "compute_logits")
    while driver.sequences["fused"].token_ids[-1] != EOS:
        driver.step({"fused": 100, "plain": 100})
    assert driver.sequences["fused"].output == driver.sequences["logits"].output
    assert driver.sequences["fused"].output[:5] != driver.sequences["plain"].output[:5]


def test_rows_without_a_grammar_have_the_tokens_that_they_have_alone(
    driver: Driver, compile_format: Compile
) -> None:
    for name in ("alone", "beside"):
        driver.add(name, [10, 20, 30], params=RANDOM, seed=3)
    driver.run("alone", num_tokens=20)
    driver.add("json", [10, 20, 30], params=RANDOM, grammar=compile_format(JSON))
    for _ in range(100):
        if len(driver.sequences["beside"].output) >= 20:
            break
        driver.step({"beside": 100, "json": 100})
    assert driver.sequences["beside"].output[:20] == driver.sequences["alone"].output


def grammars_of(driver: Driver) -> Any:
    return driver.runner.input_batch.sampling.grammars


@pytest.mark.parametrize("seed", seeds(3))
def test_preemptions_and_late_masks_change_no_token(
    driver: Driver, compile_format: Compile, seed: int
) -> None:
    grammar, rng = compile_format(JSON), random.Random(seed)
    for name in ("calm", "moved"):
        driver.add(name, [10, 20, 30], params=RANDOM, seed=seed, grammar=grammar)
    finish(driver, "calm")
    manager = grammars_of(driver)
    while driver.sequences["moved"].token_ids[-1] != EOS:
        blocked = threading.Event()
        if rng.random() < 0.3:
            driver.preempt("moved")
        if rng.random() < 0.3:
            hold_masks(manager, blocked)
            driver.preempt("moved")
            assert driver.step({"moved": 100}).sampled_token_ids == ((),)
        blocked.set()
        driver.step({"moved": 100})
    assert driver.sequences["moved"].output == driver.sequences["calm"].output


def test_a_late_row_is_left_out_beside_one_that_is_not(
    driver: Driver, compile_format: Compile
) -> None:
    a_lot = compile_format({"type": "regex", "pattern": "[^\\x00]*"})
    letter = 40
    blocked = threading.Event()
    hold_masks(grammars_of(driver), blocked, slow_only=True)
    output = [letter] * (SLOW_NUM_TOKENS + 1)
    driver.add("late", [10], output=output, params=RANDOM, grammar=a_lot)
    driver.add("other", [10], params=RANDOM)
    before = len(driver.sequences["late"].output)
    for _ in range(3):
        driver.step({"late": 10_000, "other": 10_000})
    assert len(driver.sequences["other"].output) == 3
    assert len(driver.sequences["late"].output) == before
    blocked.set()
    for _ in range(MAX_STEPS):
        driver.step({"late": 10_000, "other": 10_000})
        if len(driver.sequences["late"].output) > before:
            return
    raise AssertionError("its mask never comes")


def test_tokens_that_do_not_fit_end_their_request_alone(
    driver: Driver, compile_format: Compile
) -> None:
    driver.add("wrong", [10], output=[20, 21], params=RANDOM, grammar=compile_format(JSON))
    driver.add("other", [10], params=RANDOM)
    for _ in range(MAX_STEPS):
        output = driver.step({"wrong": 100, "other": 100})
        if output.errors:
            break
    assert list(output.errors) == ["wrong"]
    assert "output token 0 (20) does not fit" in output.errors["wrong"].message


def test_what_a_request_bans_besides_may_leave_nothing(
    driver: Driver, compile_format: Compile, tokenizer: tokenizers.Tokenizer
) -> None:
    grammar = compile_format({"type": "regex", "pattern": "x+"})
    ids = [i for i in range(tokenizer.get_vocab_size()) if set(tokenizer.decode([i])) == {"x"}]
    bias = SamplingParams(temperature=1.0, bad_words_token_ids=tuple((i,) for i in ids))
    driver.add("a", [10], params=bias, grammar=grammar)
    for _ in range(MAX_STEPS):
        if errors := driver.step({"a": 100}).errors:
            break
    assert "no token is left to choose" in errors["a"].message


def test_a_row_that_another_request_gets_is_as_new(driver: Driver, compile_format: Compile) -> None:
    driver.add("a", [10], params=RANDOM, grammar=compile_format(JSON))
    driver.step({"a": 100})
    driver.finish("a")
    driver.add("b", [10], params=RANDOM)
    driver.step({"b": 100})
    assert not grammars_of(driver).num_rows
