"""Requests with grammars in whole engines: the same tokens however late masks are, and answers that
are what was asked for.
"""

import itertools
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from jsonschema import Draft202012Validator

from pdserve_common.types.engine import (
    EngineCoreOutput,
    ErrorCode,
    FinishReason,
)
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_engine.core import engine_core
from pdserve_engine.grammar import manager
from pdserve_engine.grammar.manager import StructuredOutputManager
from support.engines import load
from support.grammars import EOS, MODEL, hold_masks
from support.requests import make_request
from support.schemas import Judge, accepted_schemas, answer_bytes
from support.steps import batch_of

NUM_ROWS = 8
MAX_STEPS = 50_000
CONSTRAINTS = (
    StructuredOutputsParams(regex="(Mia|Theo) [a-z]{3,9}( and [a-z]{2,9}){0,2}[.!]"),
    StructuredOutputsParams(choice=("a kite", "a boat", "two cats")),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(json_schema='{"type": "array", "items": {"type": "integer"}}'),
    StructuredOutputsParams(grammar='root ::= "(" root ")" | [a-z]*'),
)
REASONING = {"reasoning_ended": False, "reasoning_parser_kwargs": {"reasoning_end_str": "."}}


class Engine:
    """An engine of the bundled model that is stepped by hand."""

    def __init__(self, **overrides: Any) -> None:
        self._wakeup = threading.Event()
        settings = {"max_num_seqs": NUM_ROWS, "num_blocks": 256}
        self.loaded = load(MODEL, wakeup=self._wakeup.set, **{**settings, **overrides})
        self.core = self.loaded.core
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EngineCoreOutput] = {}

    @property
    def masks(self) -> StructuredOutputManager:
        return batch_of(self.core.executor).sampling.grammars

    def add(self, name: str, prompt: list[int], params: SamplingParams, **fields: Any) -> None:
        self.tokens[name] = []
        self.core.add_request(make_request(name, prompt, params, eos_token_id=EOS, **fields))

    def run(self, between: Callable[[], None] = lambda: None) -> None:
        """Step until each request has ended; `between` runs before each step."""
        self.run_until(lambda: not self.core.scheduler.has_requests(), between)

    def run_until(
        self, condition: Callable[[], bool], between: Callable[[], None] = lambda: None
    ) -> None:
        for _ in range(MAX_STEPS):
            if condition():
                return
            between()
            self._step()
        raise AssertionError("it does not happen")

    def _step(self) -> None:
        if not self.core.has_work():  # grammars are being compiled
            self._wakeup.wait(0.01)
            self._wakeup.clear()
        result = self.core.step() if self.core.has_work() else self.core.poll()
        for output in (each for outputs in result.outputs.values() for each in outputs):
            self.tokens[output.request_id] += output.new_token_ids
            if output.finished:
                self.ends[output.request_id] = output


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**overrides: Any) -> Engine:
        engines.append(Engine(**overrides))
        return engines[-1]

    yield make
    for engine in engines:
        engine.loaded.close()


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture
def looks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "MAX_LOOKAHEAD_STEP_S", float("inf"))


class Hold:
    """Keeps the threads that make masks from it."""

    def __init__(self, engine: Engine) -> None:
        self._masks, self._is_over = engine.masks, threading.Event()
        self._is_over.set()

    def begin(self) -> None:
        self._is_over = threading.Event()
        hold_masks(self._masks, self._is_over)

    def end(self) -> None:
        self._is_over.set()

    def toggle(self, rng: random.Random) -> None:
        """Begin or end, sometimes."""
        if not self._is_over.is_set() and rng.random() < 0.5:
            self.end()
        elif self._is_over.is_set() and rng.random() < 0.3:
            self.begin()


def ask_all(engine: Engine) -> None:
    """Two long requests without a constraint, one for each, and one that reasons before it."""
    for number, constraint in enumerate((None, None, *CONSTRAINTS, CONSTRAINTS[0])):
        params = SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=80,
            repetition_penalty=1.1,
            logprobs=number % 2 or None,
            ignore_eos=constraint is None,
            structured_outputs=constraint,
        )
        fields = REASONING if number > len(CONSTRAINTS) + 1 else {}
        engine.add(f"{number}", [10 + number] * 40, params, **fields)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.usefixtures("looks_ahead")
def test_rows_whose_masks_are_late_go_on_with_the_same_tokens(
    make_engine: Callable[..., Engine], tokenizer: tokenizers.Tokenizer, async_scheduling: bool
) -> None:
    calm = make_engine()
    ask_all(calm)
    calm.run()
    # So few blocks that some are preempted as well.
    engine = make_engine(async_scheduling=async_scheduling, num_blocks=10, max_model_len=128)
    hold, rng = Hold(engine), random.Random(0)
    ask_all(engine)
    engine.run(lambda: hold.toggle(rng))
    hold.end()
    assert engine.tokens == calm.tokens
    assert not [end for end in engine.ends.values() if end.error is not None]
    reasoned = tokenizer.decode(engine.tokens[f"{len(CONSTRAINTS) + 2}"])
    assert re.fullmatch(r"[^.]{9,}\.\n{0,2}(Mia|Theo) [a-z ]+[.!]", reasoned), reasoned
    assert engine.core.scheduler.containers.num_late_masks
    assert engine.core.scheduler.num_preemptions


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.usefixtures("looks_ahead")
def test_a_mask_that_never_comes_ends_its_request_alone(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, async_scheduling: bool
) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    hold = Hold(engine)
    params = SamplingParams(temperature=1.0, max_tokens=30)
    engine.add("late", [10], replace(params, structured_outputs=CONSTRAINTS[0]))
    engine.add("other", [10], params)
    engine.run_until(lambda: bool(engine.tokens["late"]))
    hold.begin()
    engine.run_until(lambda: engine.core.scheduler.containers.num_late_masks > 0)
    monkeypatch.setattr(manager, "MAX_LATE_S", 0.0)
    engine.run()
    hold.end()
    error = engine.ends["late"].error
    assert error is not None
    assert error.code is ErrorCode.INTERNAL
    assert "structured_outputs took" in error.message
    assert engine.ends["other"].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_tokens_of_an_attempt_before_that_do_not_fit_are_an_error(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=30, structured_outputs=CONSTRAINTS[0])
    engine.add("a", [10], params, attempt=1, resume_output_token_ids=(20, 21))
    engine.run()
    error = engine.ends["a"].error
    assert error is not None
    assert error.code is ErrorCode.INTERNAL
    assert "output token 0 (20) does not fit" in error.message
    assert not engine.tokens["a"]


# ---- random schemas


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.soak)])
def test_answers_to_random_schemas_are_valid(
    make_engine: Callable[..., Engine], tokenizer: tokenizers.Tokenizer, count: int
) -> None:
    engine = make_engine(async_scheduling=True)
    found = itertools.islice(accepted_schemas(seed=count), count)
    schemas = {f"{number}": schema for number, schema in enumerate(found)}
    asked = iter(schemas.items())

    def ask() -> None:
        for name, schema in itertools.islice(asked, NUM_ROWS - len(engine.core.scheduler.requests)):
            constraint = StructuredOutputsParams(json_schema=json.dumps(schema))
            params = SamplingParams(seed=int(name), max_tokens=80, structured_outputs=constraint)
            engine.add(name, tokenizer.encode("Once upon a time").ids, params)

    ask()
    engine.run(ask)
    seen = Counter(check_answer(schemas[name], engine, name) for name in schemas)
    assert seen["valid"] > count / 2
    assert seen["prefix"]


def check_answer(schema: Any, engine: Engine, name: str) -> str:
    end, text = engine.ends[name], answer_bytes(engine.tokens[name])
    assert end.error is None, (schema, end.error)
    if end.finish_reason is FinishReason.LENGTH:
        assert Judge.of_schema(schema).allows_prefix(text), (schema, text)
        return "prefix"
    assert end.finish_reason is FinishReason.STOP
    try:
        value = json.loads(text.decode())
    except UnicodeDecodeError:  # halves of surrogate pairs, which grammars of strings take
        assert b"\xed" in text, (schema, text)
        return "surrogates"
    assert Draft202012Validator(schema).is_valid(value), (schema, text)
    return "valid"
