"""Reasoning is free text up to its marker, however the text is cut into tokens; then the constraint
holds.
"""

import codecs
import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import to_structural_tag
from pdserve_common.structured.reasoning import Reasoning
from pdserve_common.types.sampling_params import StructuredOutputsParams
from pdserve_engine.grammar.compile_queue import GrammarCompiler
from pdserve_engine.grammar.native import Matcher, TokenizerInfo, compile_structural_tag
from pdserve_engine.grammar.vocabulary import SPECIAL, make_tokenizer_info
from support.grammars import EOS, MODEL, VOCAB_SIZE
from support.samples import seeds

NUMBER = StructuredOutputsParams(regex="[0-9]+")
# All short ones of two characters: one may begin within another one's end.
SHORT = ["".join(each) for n in (1, 2, 3, 4) for each in itertools.product("ab", repeat=n)]
MARKERS = ("</think>", "\n</think>\n\n", "aabaaab", "◁/think▷", "😀x😀y", "]^-\\]", '"', "é" * 32)
THINK = Reasoning(start="<think>", end="</think>")
MARKER_IDS = {THINK.start: VOCAB_SIZE, THINK.end: VOCAB_SIZE + 1}


def matcher_of(info: TokenizerInfo, reasoning: Reasoning) -> Matcher:
    before = reasoning.formats(info.added_token_ids)
    return Matcher(compile_structural_tag(to_structural_tag(NUMBER, before=before).text, info))


def allowed_ids(matcher: Matcher, info: TokenizerInfo) -> set[int]:
    bitmask = np.zeros(-(-info.vocab_size // 32), np.int32)
    matcher.fill(bitmask)
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: info.vocab_size]
    return set(np.flatnonzero(bits).tolist())


def vocabulary_of(info: TokenizerInfo) -> list[bytes]:
    return [bytes(token) for token in info.handle.decoded_vocab()]


def may_begin(text: bytes, marker: str) -> bool:
    """Whether an answer may begin so, by what Python says of texts."""
    free, found, rest = text.partition(marker.encode())
    try:
        codecs.getincrementaldecoder("utf-8")().decode(free, final=bool(found))
    except UnicodeDecodeError:
        return False
    return not found or bool(re.fullmatch(rb"\n{0,2}[0-9]*", rest))


def may_end(text: bytes, marker: str) -> bool:
    return bool(re.fullmatch(rb"\n{0,2}[0-9]+", text.partition(marker.encode())[2]))


@pytest.mark.parametrize("marker", SHORT)
def test_the_first_marker_ends_it(tokenizer_info: TokenizerInfo, marker: str) -> None:
    ids = {each: vocabulary_of(tokenizer_info).index(each.encode()) for each in "ab1"}
    before = Reasoning(end=marker).formats({})
    tag = to_structural_tag(NUMBER, before=before)
    grammar = compile_structural_tag(tag.text, tokenizer_info)
    for text in map("".join, itertools.product(ids, repeat=6)):
        matcher = Matcher(grammar)
        fits = all(matcher.accept(token_id) for token_id in (*map(ids.get, text), EOS))
        assert fits == bool(re.fullmatch("1+", text.partition(marker)[2])), text


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("seed", seeds(3))
def test_each_bit_is_right_before_the_marker_and_behind(
    tokenizer_info: TokenizerInfo, marker: str, seed: int
) -> None:
    vocabulary, rng = vocabulary_of(tokenizer_info), random.Random(seed)
    matcher, text, end = matcher_of(tokenizer_info, Reasoning(end=marker)), b"", marker.encode()
    # The marker's beginnings now and then, then the whole, and some tokens behind it.
    texts = [*(end[: rng.randrange(len(end))] for _ in range(5)), end]
    wanted, num_behind = b"", 0
    while num_behind < 4:
        allowed = allowed_ids(matcher, tokenizer_info)
        for token_id, token in enumerate(vocabulary):
            may = may_end(text, marker) if token_id == EOS else may_begin(text + token, marker)
            is_text = token_id == EOS or (token and not token.startswith(SPECIAL))
            assert (token_id in allowed) == bool(is_text and may), (text, token)
        # Not in the middle of a character.
        choices = [i for i in allowed if wanted and vocabulary[i] == wanted[:1]]
        token_id = rng.choice(choices or sorted(allowed - {EOS}))
        wanted = wanted[1:] if choices else wanted or (texts.pop(0) if texts else b"")
        assert matcher.accept(token_id)
        text += vocabulary[token_id]
        num_behind += end in text


@pytest.fixture(scope="module", params=[True, False], ids=["special", "added"])
def with_markers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TokenizerInfo:
    """A vocabulary in which THINK's markers are tokens, special ones or not."""
    path: Path = tmp_path_factory.mktemp("markers")
    backend = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    backend.add_tokens([AddedToken(each, special=request.param) for each in MARKER_IDS])
    backend.save(str(path / "tokenizer.json"))
    return make_tokenizer_info(path, vocab_size=VOCAB_SIZE + 2, eos_token_ids=(EOS,))


def test_markers_that_are_tokens_have_no_other_spelling(with_markers: TokenizerInfo) -> None:
    vocabulary = vocabulary_of(with_markers)
    start, end = MARKER_IDS.values()
    assert with_markers.added_token_ids.items() >= MARKER_IDS.items()

    def fits(*token_ids: int) -> bool:
        return all(map(matcher_of(with_markers, THINK).accept, (*token_ids, EOS)))

    text, one, newline = (vocabulary.index(each) for each in (b"a", b"1", b"\n"))
    special = with_markers.added_token_ids["<|user|>"]
    spelled = [vocabulary.index(bytes([byte])) for byte in THINK.end.encode()]
    assert fits(start, text, one, end, newline, newline, one)
    assert fits(text, text, end, one)
    assert fits(end, one)
    assert not fits(text, one)
    assert not fits(text, special, end, one)
    assert not fits(end, text)
    assert not fits(end, one, end)
    assert not fits(text, *spelled, one)
    assert not fits(text, *spelled, end, one)
    assert not fits(text, end, special)
    as_text = not vocabulary[start].startswith(SPECIAL)
    assert fits(text, start, end, one) == as_text


@pytest.mark.parametrize("name", ["start", "end"])
@pytest.mark.parametrize(
    ("marker", "problem"),
    [("\n<|user|>", "has the token <|user|> within"), ("<|end|>", "ends the answer")],
)
def test_a_marker_that_cannot_end_reasoning_is_refused(
    compiler: GrammarCompiler, name: str, marker: str, problem: str
) -> None:
    reasoning = Reasoning(**{"end": "</think>", name: marker})
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(NUMBER, reasoning)
    assert f"reasoning_parser_kwargs.reasoning_{name}_str {problem}" in caught.value.message


def test_a_grammar_is_known_by_the_reasoning_before_it_too(compiler: GrammarCompiler) -> None:
    asked = [None, *(Reasoning(end=each) for each in ("</think>", "</thinks>", "<|user|>"))]
    grammars = [compiler.compile(NUMBER, each).result() for each in asked]
    assert len({id(grammar) for grammar in grammars}) == len(asked)
    assert [compiler.compile(NUMBER, each).result() for each in asked] == grammars
