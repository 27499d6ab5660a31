"""Masks: each bit is right by another library's word, and however a row came to its tokens."""

import json
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import jsonschema
import pytest
import regex
import tokenizers

from pdserve_engine.grammar import manager as manager_module
from pdserve_engine.grammar.manager import (
    ALL_ALLOWED,
    MAX_LATE_S,
    SLOW_NICENESS,
    SLOW_NUM_TOKENS,
)
from pdserve_engine.grammar.native import CompiledGrammar, Matcher, TokenizerInfo
from pdserve_engine.grammar.vocabulary import SPECIAL
from support.clock import Clock
from support.grammars import EOS, MODEL, VOCAB_SIZE, Compile, Manager, allowed_ids, hold_masks
from support.samples import seeds

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMATS: tuple[dict[str, Any], ...] = (
    {"type": "json_schema", "json_schema": SCHEMA},
    {"type": "json_schema", "json_schema": {}},
    {"type": "grammar", "grammar": 'root ::= "a" root "b" | "c" [0-9]{2,5}'},
    {"type": "regex", "pattern": "(the|a) [a-z]+( [a-z]+)*\\."},
    {"type": "any_text"},
)
# In ASCII, so that both libraries read them alike, and no token is a part of a character.
PATTERNS = (
    "[0-9]+",
    "(yes|no|maybe) [a-z]{2,9}",
    "[A-Z][a-z]*( [A-Z][a-z]*){0,3}[.!]",
    "(a|b|ab)*c?",
    '\\{"x": -?[0-9]{1,3}(, "y": "[ -!#-~]*")?\\}',
    "([0-9]{1,3}\\.){3}[0-9]{1,3}",
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def manager(clock: Clock) -> Iterator[Manager]:
    manager = Manager(VOCAB_SIZE, clock=clock)
    yield manager
    assert manager.close()


def walk(manager: Manager, row: int, rng: random.Random, num_tokens: int) -> list[int]:
    """Go on by random tokens, but EOS; return them and leave the row behind them."""
    token_ids: list[int] = []
    for _ in range(num_tokens):
        choices = sorted(manager.allowed(row) - {EOS})
        if not choices:
            break
        token_ids.append(rng.choice(choices))
        manager.accept({row: [token_ids[-1]]})
    return token_ids


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", seeds(3))
def test_a_mask_is_what_a_regex_library_says(
    compile_format: Compile, manager: Manager, vocabulary: list[bytes], pattern: str, seed: int
) -> None:
    manager.add(0, compile_format({"type": "regex", "pattern": pattern}), ())
    fits = regex.compile(pattern).fullmatch
    rng, text = random.Random(seed), ""
    for _ in range(12):
        allowed = manager.allowed(0)
        for token_id, token in enumerate(vocabulary):
            may = token.isascii() and token and fits(text + token.decode(), partial=True)
            assert (token_id in allowed - {EOS}) == bool(may), (text, token)
        assert (EOS in allowed) == bool(fits(text))
        if not (choices := sorted(allowed - {EOS})):
            break
        token_id = rng.choice(choices)
        manager.accept({0: [token_id]})
        text += vocabulary[token_id].decode()


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format["type"])
def test_a_bit_is_set_if_the_token_is_accepted(
    compile_format: Compile, manager: Manager, format: dict[str, Any]
) -> None:
    grammar, rng = compile_format(format), random.Random(1)
    manager.add(0, grammar, ())
    token_ids = walk(manager, 0, rng, 8)
    for count in {0, 1, len(token_ids) // 2, len(token_ids)}:
        manager.add(1, grammar, token_ids[:count])
        allowed = manager.allowed(1)
        manager.remove(1)
        for token_id in range(VOCAB_SIZE):
            matcher = Matcher(grammar)
            assert all(map(matcher.accept, token_ids[:count]))
            assert matcher.accept(token_id) == (token_id in allowed)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format["type"])
@pytest.mark.parametrize("seed", seeds(5))
def test_a_row_made_anew_is_where_the_one_that_went_on_is(
    compile_format: Compile, manager: Manager, format: dict[str, Any], seed: int
) -> None:
    grammar, rng = compile_format(format), random.Random(seed)
    manager.add(0, grammar, ())
    token_ids: list[int] = []
    for _ in range(30):
        manager.add(1, grammar, token_ids)
        masks = manager.masks(0, 1)
        assert not masks.errors
        assert (masks.bitmask[0] == masks.bitmask[1]).all()
        manager.remove(1)
        if not (choices := sorted(allowed_ids(masks.bitmask[0]) - {EOS})):
            break
        token_ids.append(rng.choice(choices))
        manager.accept({0: [token_ids[-1]]})


@pytest.mark.parametrize("seed", seeds(20))
def test_answers_that_end_are_valid(compile_format: Compile, manager: Manager, seed: int) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    manager.add(0, compile_format({"type": "json_schema", "json_schema": SCHEMA}), ())
    rng, token_ids = random.Random(seed), []
    # Ends strings and numbers as soon as may be, or the answer would never end.
    quote, brace = tokenizer.token_to_id('"'), tokenizer.token_to_id("}")
    while True:
        allowed = manager.allowed(0)
        ending = [token_id for token_id in (EOS, brace, quote) if token_id in allowed]
        if ending and rng.random() < 0.5:
            token_ids.append(ending[0])
        else:
            token_ids.append(rng.choice(sorted(allowed)))
        manager.accept({0: [token_ids[-1]]})
        if token_ids[-1] == EOS:
            break
    jsonschema.validate(json.loads(tokenizer.decode(token_ids)), SCHEMA)


def test_the_end_allows_eos_alone_and_nothing_follows_it(
    compile_format: Compile, manager: Manager, vocabulary: list[bytes]
) -> None:
    manager.add(0, compile_format({"type": "regex", "pattern": "a"}), ())
    manager.accept({0: [vocabulary.index(b"a")]})
    assert manager.allowed(0) == {EOS}
    manager.accept({0: [EOS]})
    assert "no token behind EOS" in manager.error(0)
    manager.add(1, compile_format({"type": "regex", "pattern": "a"}), ())
    manager.accept({1: [EOS]})
    assert "output token 0 (2) does not fit" in manager.error(1)


def test_special_tokens_are_reached_by_their_ids_alone(
    compile_format: Compile, manager: Manager, vocabulary: list[bytes]
) -> None:
    special = {i for i, token in enumerate(vocabulary) if token.startswith(SPECIAL + b"<|")} - {EOS}
    assert len(special) == 5
    text = {"type": "const_string", "value": vocabulary[4].removeprefix(SPECIAL).decode()}
    for format in (*FORMATS, text):
        manager.add(0, compile_format(format), ())
        assert not special & manager.allowed(0)
        manager.remove(0)
    manager.add(0, compile_format({"type": "token", "token": 4}), ())
    assert manager.allowed(0) == {4}


def test_rows_without_a_grammar_may_have_any_token(
    compile_format: Compile, manager: Manager
) -> None:
    assert manager.take([0, 1]) is None
    manager.add(1, compile_format({"type": "regex", "pattern": "a"}), ())
    masks = manager.masks(0, 1, 2)
    assert (masks.bitmask[[0, 2]] == ALL_ALLOWED).all()
    assert len(allowed_ids(masks.bitmask[1])) == 1
    manager.accept({0: [7]})
    manager.remove(0)
    manager.remove(1)
    assert manager.take([0, 1, 2]) is None


def test_what_does_not_fit_ends_that_row_alone(
    compile_format: Compile, manager: Manager, vocabulary: list[bytes]
) -> None:
    grammar = compile_format({"type": "regex", "pattern": "[a-z]+"})
    a, one = vocabulary.index(b"a"), vocabulary.index(b"1")
    manager.add(0, grammar, (a, a))
    manager.add(1, grammar, (a, one, a))
    manager.add(2, grammar, (a,))
    manager.masks(0, 1, 2)
    manager.accept({2: [one]})
    masks = manager.masks(0, 1, 2)
    assert list(masks.errors) == [1, 2]
    assert all("output token 1" in error.message for error in masks.errors.values())
    assert allowed_ids(masks.bitmask[0])
    # What the step made of them all the same changes nothing.
    manager.accept({1: [a]})
    assert "output token 1" in manager.error(1)


def test_a_text_that_no_token_continues_is_an_error(
    compile_format: Compile, manager: Manager, vocabulary: list[bytes]
) -> None:
    """Of those that end at once the compiler tells."""
    ends_dead = compile_format({"type": "regex", "pattern": "a[^\\x00-\\U0010ffff]"})
    manager.add(0, ends_dead, [vocabulary.index(b"a")])
    assert "no token continues the 1 so far" in manager.error(0)


def test_a_late_row_is_left_out_and_nobody_waits_for_it(
    compile_format: Compile, manager: Manager, clock: Clock, vocabulary: list[bytes]
) -> None:
    grammar, a = compile_format({"type": "regex", "pattern": "a+"}), vocabulary.index(b"a")
    blocked = threading.Event()
    hold_masks(manager, blocked, slow_only=True)
    manager.add(0, grammar, [a] * (SLOW_NUM_TOKENS + 1))
    manager.add(1, grammar, ())
    manager.row(1).ready.result(60)
    masks = manager.take([0, 1])
    assert masks is not None
    assert masks.late == (0,)
    assert allowed_ids(masks.bitmask[1])
    blocked.set()
    assert manager.allowed(0) == manager.allowed(1) | {EOS}


def test_behind_a_late_row_no_draft_of_its_request_has_a_mask(
    compile_format: Compile, manager: Manager, clock: Clock, vocabulary: list[bytes]
) -> None:
    grammar, a = compile_format({"type": "regex", "pattern": "a+"}), vocabulary.index(b"a")
    for row in range(2):
        manager.add(row, grammar, ())
        manager.look_ahead(row, (a, a))
        manager.row(row).ahead.result(60)
    manager.row(0).ready = Future()  # those behind it come between two looks
    masks = manager.take([0, 0, 0, 1, 1, 1], {1: (a,), 2: (a, a), 4: (a,), 5: (a, a)})
    assert masks is not None
    assert masks.late == (0, 1, 2)
    assert all(allowed_ids(masks.bitmask[index]) for index in (3, 4, 5))


def test_a_row_that_stays_late_is_an_error(
    compile_format: Compile, manager: Manager, clock: Clock, vocabulary: list[bytes]
) -> None:
    grammar, a = compile_format({"type": "regex", "pattern": "a+"}), vocabulary.index(b"a")
    blocked = threading.Event()
    hold_masks(manager, blocked, slow_only=True)
    manager.add(0, grammar, [a] * (SLOW_NUM_TOKENS + 1))
    clock.now_s += MAX_LATE_S + 1
    masks = manager.take([0])
    assert masks is not None
    assert not masks.late
    assert "6.0 s for a token" in masks.errors[0].message
    blocked.set()
    assert "6.0 s for a token" in manager.error(0)


def test_a_row_whose_masks_are_slow_leaves_the_others_alone(
    compile_format: Compile, vocabulary: list[bytes]
) -> None:
    costs = iter([0.0, 1.0])  # of the row's first turn
    manager = Manager(VOCAB_SIZE, cpu_clock=lambda: next(costs, 1.0))
    grammar, a = compile_format({"type": "regex", "pattern": "a+"}), vocabulary.index(b"a")
    manager.add(0, grammar, ())
    manager.masks(0)
    blocked = threading.Event()
    hold_masks(manager, blocked, slow_only=True)
    manager.accept({0: [a]})
    assert not manager.row(0).ready.done()
    blocked.set()
    manager.masks(0)
    # That turn was quick.
    blocked.clear()
    hold_masks(manager, blocked, slow_only=True)
    manager.accept({0: [a]})
    manager.masks(0)
    blocked.set()
    assert manager.close()


def test_a_grammar_whose_first_mask_is_slow_begins_where_it_delays_nobody(
    tokenizer_info: TokenizerInfo, compile_format: Compile, manager: Manager
) -> None:
    quick = compile_format({"type": "regex", "pattern": "a+"})
    slow = CompiledGrammar.deserialize(quick.serialize(), tokenizer_info, first_mask_s=0.1)
    blocked = threading.Event()
    hold_masks(manager, blocked, slow_only=True)
    for row, grammar in enumerate((slow, quick)):
        manager.add(row, grammar, ())
    manager.masks(1)
    assert not manager.row(0).ready.done()
    blocked.set()
    assert manager.allowed(0) == manager.allowed(1)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found = {
        thread.name: os.getpriority(os.PRIO_PROCESS, thread.native_id)
        for thread in threading.enumerate()
        # Others may end before they are asked.
        if thread.name in ("grammar-masks", "grammar-slow-masks") and thread.native_id is not None
    }
    assert found["grammar-masks"] == own
    assert found["grammar-slow-masks"] == min(own + SLOW_NICENESS, 19)


def test_a_row_that_is_gone_is_not_matched(
    compile_format: Compile, manager: Manager, vocabulary: list[bytes]
) -> None:
    grammar, a = compile_format({"type": "regex", "pattern": "a+"}), vocabulary.index(b"a")
    blocked = threading.Event()
    hold_masks(manager, blocked, slow_only=True)
    manager.add(0, grammar, [a] * (SLOW_NUM_TOKENS + 1))
    row = manager.row(0)
    manager.remove(0)
    manager.add(0, grammar, [a])  # another request's, in the same place
    blocked.set()
    assert row.ready.exception(60) is not None
    assert row.num_tokens == 0
    assert manager.allowed(0)


AMBIGUOUS = (
    'root ::= root root | "a"',
    'root ::= "a" root | "a" root "a" | "a"',
    'root ::= s*\ns ::= "a" | "a" s | s s',
)


@pytest.mark.parametrize("grammar", AMBIGUOUS)
def test_an_ambiguous_grammar_ends_its_own_request(
    manager: Manager,
    compile_format: Compile,
    vocabulary: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    grammar: str,
) -> None:
    monkeypatch.setattr(manager_module, "MAX_ACCEPT_S", 0.05)
    letter = vocabulary.index(b"a")
    manager.add(1, compile_format({"type": "grammar", "grammar": 'root ::= "a"*'}), [letter] * 900)
    manager.add(2, compile_format({"type": "grammar", "grammar": grammar}), [letter] * 900)
    masks = manager.masks(1, 2)
    assert {*masks.errors} == {1}
    assert "ambiguous" in masks.errors[1].message
