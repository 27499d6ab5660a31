"""Random schemas: what their grammars allow is valid by jsonschema, what is valid they allow."""

import json
import random
import re
from collections import Counter
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import patterns
from pdserve_common.types.sampling_params import StructuredOutputsParams
from support.samples import sampled, seeds
from support.schemas import Judge, RandomSchemas, closed, dump

NUM_SCHEMAS = 60
NUM_VALUES = 12
NUM_ANSWERS = 3
SEEDS = sampled(range(10), 0, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_schema_is_enforced_or_refused(seed: int) -> None:
    schemas, seen = RandomSchemas(seed), Counter[str]()
    for n in range(NUM_SCHEMAS):
        schema = schemas.schema()
        try:
            judge = Judge.of_schema(schema)
        except InvalidRequestError:
            seen["refused"] += 1
            continue
        for _ in range(NUM_VALUES):
            seen[_check_value(judge, schema, schemas.value(schema))] += 1
        rng = random.Random(seed * NUM_SCHEMAS + n)
        for _ in range(NUM_ANSWERS):
            seen[_check_answer(judge, schema, rng)] += 1
    assert seen["refused"] < NUM_SCHEMAS / 2
    assert min(seen[kind] for kind in ("allowed", "invalid", "answered")) >= NUM_SCHEMAS


CHARACTERS = "abfz09 -_.,!/^]{}\\\t'é"
NUM_PATTERNS = 40


@pytest.mark.parametrize("seed", seeds(5))
def test_a_pattern_is_enforced_character_by_character(seed: int) -> None:
    rng, seen = random.Random(seed), Counter[bool]()
    for _ in range(NUM_PATTERNS):
        pattern = "".join(_atom(rng) for _ in range(rng.randint(1, 3)))
        judge = Judge(StructuredOutputsParams(regex=pattern))
        for _ in range(NUM_VALUES):
            text = "".join(rng.choices(CHARACTERS, k=rng.randint(0, 4)))
            is_match = re.fullmatch(pattern, text) is not None
            assert judge.allows(text) == is_match, (pattern, text)
            seen[is_match] += 1
    assert min(seen[True], seen[False]) > NUM_PATTERNS / 4


@pytest.mark.parametrize("seed", seeds(20))
def test_a_pattern_is_found_in_a_text_as_python_finds_it(seed: int) -> None:
    rng, seen = random.Random(seed), Counter[bool]()
    while seen.total() < 500:
        pattern = _pattern(rng, 3)
        text = "".join(rng.choices("abc", k=rng.randint(0, 8)))
        try:
            tree = patterns.found_in(patterns.parse(pattern))
        except patterns.PatternError:
            continue
        is_match, _ = patterns.match(tree, text, max_steps=100_000)
        assert is_match == (re.search(pattern, text) is not None), (pattern, text)
        seen[is_match] += 1
    assert min(seen.values()) > 50


@pytest.mark.parametrize("pattern", ["^(a|aa)+$", "((a+b?)+c?)+d", "^(a{1,9}){1,9}$"])
def test_a_match_goes_back_no_step(pattern: str) -> None:
    tree = patterns.found_in(patterns.parse(pattern))
    is_match, num_steps = patterns.match(tree, "a" * 200 + "b", max_steps=10**9)
    assert is_match is False
    assert num_steps < 200_000
    is_match, num_steps = patterns.match(tree, "a" * 200 + "b", max_steps=100)
    assert is_match is None
    assert num_steps < 1000


def _pattern(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["a", "b", "c", "[ab]", "[^a]", "."])
    parts = "".join(_pattern(rng, depth - 1) for _ in range(rng.randint(1, 2)))
    kind = rng.choice(["", "", "|", "^", "$", *("*", "+", "?", "{2}", "{1,2}", "{2,}")])
    if kind == "|":
        return f"({parts}|{_pattern(rng, depth - 1)})"
    if kind in ("^", "$"):
        return f"^{parts}" if kind == "^" else f"{parts}$"
    return f"({parts}){kind}" if kind else parts


def _atom(rng: random.Random) -> str:
    chars = "".join(map(_escape, rng.sample(CHARACTERS, rng.randint(1, 5))))
    ranges = "".join(rng.sample(["a-z", "0-9", "b-f", " -/"], rng.randint(0, 2)))
    part = f"[{rng.choice(['', '', '^'])}{chars}{ranges}]"
    return part + rng.choice(["", "", "*", "?", "{1,3}"])


def _escape(char: str) -> str:
    return f"\\{char}" if char in "-^]\\" else char


def _check_value(judge: Judge, schema: Any, value: Any) -> str:
    text = dump(value)
    is_allowed = judge.allows(text)
    if is_allowed:
        assert Draft202012Validator(schema).is_valid(value), f"{dump(schema)} allows {text}"
        return "allowed"
    if not Draft202012Validator(closed(schema)).is_valid(value):
        return "invalid"
    assert _is_spelled_otherwise(schema, text), f"{dump(schema)} does not allow {text}"
    return "narrower"


def _is_spelled_otherwise(schema: Any, text: str) -> bool:
    """Strings with a pattern have no escapes, and \\d, \\w, \\D and \\W are of ASCII."""
    return "\\" in text or (not text.isascii() and "\\" in dump(schema))


def _check_answer(judge: Judge, schema: Any, rng: random.Random) -> str:
    answer = judge.answer(rng)
    if answer is None:
        return "long"
    try:
        text = answer.decode()
    except UnicodeDecodeError:
        # Strings of any kind take halves of surrogate pairs, which no text has.
        assert b"\xed" in answer, f"{dump(schema)} allows {answer!r}"
        return "surrogates"
    assert Draft202012Validator(schema).is_valid(json.loads(text)), f"{dump(schema)} allows {text}"
    return "answered"
