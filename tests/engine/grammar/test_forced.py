"""What grammars force: cut into tokens, and nothing that they leave a choice about."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from pdserve_engine.grammar import manager as manager_module
from pdserve_engine.grammar.forced import MAX_BYTES, ForcedText, whole_characters
from pdserve_engine.grammar.native import CompiledGrammar, Matcher, TokenizerInfo
from pdserve_engine.grammar.vocabulary import make_encoder
from support.grammars import EOS, MODEL, VOCAB_SIZE, Compile, Manager, hold_masks

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Mia", "Theo", "Mathilde", "Mathis"]},
        "Größe": {"const": "日本語"},
        "friends": {"type": "array", "items": {"enum": ["a kite", "a boat"]}, "maxItems": 2},
    },
    "required": ["name", "Größe", "friends"],
    "additionalProperties": False,
}
FORMATS: tuple[dict[str, Any], ...] = (
    {"type": "json_schema", "json_schema": SCHEMA},
    {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 2},
    {"type": "regex", "pattern": "(Mia|Theo) found (a kite|a boat by the sea)( and more){0,2}\\."},
    {"type": "const_string", "value": "One afternoon Mia found 日本語 in the garden."},
    {
        "type": "or",
        "elements": [
            {"type": "const_string", "value": "in 北京"},
            {"type": "const_string", "value": "in 南京"},
        ],
    },
    {"type": "any_text"},
)


@pytest.fixture(scope="module")
def encode() -> Callable[[str], Sequence[int]]:
    return make_encoder(MODEL)


@pytest.fixture
def manager(encode: Callable[[str], Sequence[int]]) -> Iterator[Manager]:
    manager = Manager(VOCAB_SIZE)
    manager.encode = encode
    yield manager
    assert manager.close()


@pytest.mark.parametrize("format_", FORMATS)
def test_what_is_forced_is_all_that_the_masks_allow(
    format_: dict[str, Any],
    manager: Manager,
    compile_format: Compile,
    vocabulary: list[bytes],
) -> None:
    grammar = compile_format(format_)
    num_forced = 0
    for seed in range(10):
        rng = random.Random(seed)
        manager.add(seed, grammar, ())
        token_ids: list[int] = []
        for _ in range(40):
            forced = manager.forced_of(seed)
            text = b"".join(vocabulary[token_id] for token_id in forced)
            allowed = manager.allowed(seed)
            if forced:
                num_forced += 1
                assert all(
                    text.startswith(vocabulary[each]) or vocabulary[each].startswith(text)
                    for each in allowed
                )
            # They are tokens that fit one behind the other, and looking has changed nothing.
            manager.add(1000, grammar, token_ids)
            assert manager.allowed(1000) == allowed
            for token_id in forced:
                assert token_id in manager.allowed(1000)
                manager.accept({1000: [token_id]})
            manager.remove(1000)
            if allowed <= {EOS}:
                break
            token_ids.append(rng.choice(sorted(allowed - {EOS})))
            manager.accept({seed: [token_ids[-1]]})
    assert (num_forced > 0) == (format_["type"] != "any_text")


def test_drafts_are_cut_as_the_tokenizer_cuts_them(
    manager: Manager, compile_format: Compile
) -> None:
    text = "One afternoon Mia found a kite in the garden."
    token_ids = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids
    manager.add(0, compile_format({"type": "const_string", "value": text}), ())
    for index in range(len(token_ids)):
        assert list(manager.forced_of(0)) == token_ids[index:]
        manager.accept({0: [token_ids[index]]})
    assert not manager.forced_of(0)
    manager.accept({0: [EOS]})
    assert not manager.forced_of(0)


def test_parts_of_characters_are_left_out(
    compile_format: Compile, tokenizer_info: TokenizerInfo, vocabulary: list[bytes]
) -> None:
    matcher = Matcher(compile_format(FORMATS[4]))

    def goes_on_by(text: bytes) -> bool:
        return all(matcher.accept(vocabulary.index(bytes([byte]))) for byte in text)

    forced = ForcedText(tokenizer_info.vocabulary, tokenizer_info.stop_token_ids)
    # Both cities begin with the same byte.
    assert forced.find(matcher) == b"in \xe5"
    assert whole_characters(b"in \xe5") == "in "
    assert goes_on_by(b"in \xe5\x8d")
    assert forced.find(matcher) == b"\x97\xe4\xba\xac"
    assert whole_characters(b"\x97\xe4\xba\xac") == "", "it begins within a character"
    assert goes_on_by(b"\x97")
    assert whole_characters(forced.find(matcher)) == "京"


# Each forces a text without end, or one that nobody lives to see the end of.
ENDLESS = {
    "a rule that is followed by itself": 'root ::= "a" root',
    "a rule behind a choice": 'root ::= [ab] loop\nloop ::= "xy" loop',
    "rules that double": "root ::= a30\n"
    + "".join(f"a{i} ::= a{i - 1} a{i - 1}\n" for i in range(30, 0, -1))
    + 'a0 ::= "xy"',
    "repeats of repeats": 'root ::= a{128}\na ::= b{128}\nb ::= c{128}\nc ::= "xy"{128}',
}


@pytest.mark.parametrize("name", ENDLESS)
def test_of_a_text_without_end_the_beginning_is_forced(
    name: str, manager: Manager, compile_format: Compile, vocabulary: list[bytes]
) -> None:
    manager.add(0, compile_format({"type": "grammar", "grammar": ENDLESS[name]}), ())
    for _ in range(3):
        allowed = manager.allowed(0)
        forced = manager.forced_of(0)
        num_bytes = sum(len(vocabulary[token_id]) for token_id in forced)
        assert num_bytes <= MAX_BYTES + max(map(len, vocabulary))
        manager.accept({0: [min(allowed)]})
    assert manager.forced_of(0)


def test_of_rows_that_are_late_slow_large_or_gone_nothing_is_forced(
    manager: Manager,
    compile_format: Compile,
    tokenizer_info: TokenizerInfo,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammar = compile_format({"type": "const_string", "value": "the garden"})
    slow = CompiledGrammar.deserialize(grammar.serialize(), tokenizer_info, first_mask_s=0.1)
    manager.add(0, slow, ())
    monkeypatch.setattr(manager_module, "MAX_FORCING_GRAMMAR_BYTES", 10)
    manager.add(1, grammar, ())
    monkeypatch.undo()
    manager.add(2, grammar, ())
    assert manager.allowed(0) == manager.allowed(1) == manager.allowed(2)
    assert manager.forced([0, 1, 2, 3]).keys() == {2}
    manager.remove(2)
    assert manager.forced([0, 1, 2, 3]) == {}
    is_over = threading.Event()
    hold_masks(manager, is_over)
    manager.add(2, grammar, ())
    assert manager.forced([2]) == {}
    is_over.set()


def test_what_is_no_token_of_the_model_ends_a_draft(
    manager: Manager, compile_format: Compile
) -> None:
    manager.encode = lambda text: [7, VOCAB_SIZE - 1, VOCAB_SIZE, 8]
    manager.add(0, compile_format({"type": "const_string", "value": "the garden"}), ())
    assert manager.forced_of(0) == (7, VOCAB_SIZE - 1)


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
        (None, pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first")])),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
        (normalizers.Prepend("▁"), None),
        (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    ],
)
def test_no_blank_is_put_before_a_text(normalizer: Any, pre_tokenizer: Any, tmp_path: Path) -> None:
    pieces = ["▁", "Ġ", "a", "b", "▁a", "Ġa", "ab"]
    model = tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, [("a", "b")])
    tokenizer = tokenizers.Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.enable_truncation(1)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert list(make_encoder(tmp_path)("abab")) == [6, 6]


def test_a_model_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        make_encoder(tmp_path)
