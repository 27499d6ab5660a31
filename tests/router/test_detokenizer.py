import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as BackendTokenizer

from pdserve_router.text.detokenizer import Detokenizer
from pdserve_router.text.token_texts import NO_TEXTS, TokenTexts
from pdserve_router.text.tokenizer import Tokenizer

BUNDLED = Path(__file__).parents[2] / "models" / "pdserve-tiny"

TEXTS = (
    "hello world",
    "你好、世界。今天天气很好",
    "emoji 😀🎉👩‍👩‍👧‍👦 mixed with text 🏳️‍🌈!",
    "naïve café \n\t  spaces   and\r\nlines",
    "ελληνικά עברית हिन्दी 한국어 𐍈𝄞",
    "",
)


def detokenize(tokenizer: Tokenizer, token_ids: list[int], **options) -> tuple[str, list[str]]:
    skipped = tokenizer.special_token_ids if options.pop("skip", True) else frozenset()
    detokenizer = Detokenizer(tokenizer.backend, skipped=skipped, **options)
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stop_string is not None:
            break
    pieces.append(detokenizer.finish())
    return "".join(pieces), pieces


class CountedDecodes:
    """Decodes as a tokenizer does, and counts the tokens."""

    def __init__(self, backend: BackendTokenizer) -> None:
        self._backend = backend
        self.num_tokens = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.num_tokens += len(token_ids)
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_join_to_the_text(tokenizer, text) -> None:
    token_ids = tokenizer.backend.encode(text).ids
    joined, pieces = detokenize(tokenizer, token_ids)
    assert joined == text == tokenizer.decode(token_ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_of_four_tokens_comes_at_once(tokenizer) -> None:
    token_ids = tokenizer.backend.encode("𐍈").ids
    assert len(token_ids) >= 3
    _, pieces = detokenize(tokenizer, token_ids)
    assert pieces == [""] * (len(token_ids) - 1) + ["𐍈", ""]


def test_an_unfinished_character_is_flushed_at_the_end(tokenizer) -> None:
    token_ids = tokenizer.backend.encode("ok 𐍈").ids[:-1]
    joined, pieces = detokenize(tokenizer, token_ids)
    assert joined == tokenizer.decode(token_ids)
    assert pieces[-1] == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_never_fail_and_lose_no_valid_text(tokenizer, seed) -> None:
    rng = random.Random(seed)
    token_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(200)]
    joined, _ = detokenize(tokenizer, token_ids, skip=False)

    def valid(text: str) -> str:
        return text.replace("\N{REPLACEMENT CHARACTER}", "")

    # Where bytes are no UTF-8 only the number of replacement characters may differ.
    assert valid(joined) == valid(tokenizer.decode(token_ids))


def test_special_tokens_are_left_out_unless_asked_for(tokenizer) -> None:
    token_ids = tokenizer.backend.encode("<|im_start|>hello<|im_end|> world").ids
    assert detokenize(tokenizer, token_ids)[0] == "hello world"
    kept, _ = detokenize(tokenizer, token_ids, skip=False)
    assert kept == "<|im_start|>hello<|im_end|> world"


@pytest.mark.parametrize("kind", ["invalid byte", "skipped special token"])
def test_tokens_without_text_cost_no_more_the_longer_they_last(tokenizer, kind) -> None:
    token_id = 2
    if kind == "invalid byte":
        token_id = next(
            i for i in range(4, tokenizer.vocab_size) if tokenizer.decode([i]) == "\ufffd"
        )
    counted = CountedDecodes(tokenizer.backend)
    detokenizer = Detokenizer(counted, skipped=tokenizer.special_token_ids)  # type: ignore[arg-type]
    for _ in range(2000):
        detokenizer.push(token_id)
    # A thousand for each if all that bring no text were decoded again.
    assert counted.num_tokens < 20 * 2000


def test_a_sentencepiece_style_decoder_keeps_its_spaces() -> None:
    vocab = {"<unk>": 0, "▁hello": 1, "▁world": 2, "s": 3, "▁": 4}
    backend = BackendTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    detokenizer = Detokenizer(backend, skipped=frozenset())
    pieces = [detokenizer.push(i) for i in (1, 2, 3, 2)]
    assert pieces == ["hello", " world", "s", " world"]


@pytest.mark.parametrize("spaced", [False, True])
def test_spaces_between_special_tokens_are_those_of_the_decoder_unless_unwanted(
    spaced: bool,
) -> None:
    """As in vLLM: it is about added tokens next to each other."""
    vocab = {"[UNK]": 0, "hello": 1, "world": 2, "##ly": 3}
    backend = BackendTokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[A]", "[B]"])
    backend.add_tokens(["<think>"])
    detokenizer = Detokenizer(
        backend,
        skipped=frozenset(),
        texts=TokenTexts(backend, vocab_size=7),
        unspaced={} if spaced else {4: "[A]", 5: "[B]", 6: "<think>"},
    )
    token_ids = [4, 5, 1, 3, 4, 4, 6, 5, 2, 5]
    text = "".join([*map(detokenizer.push, token_ids), detokenizer.finish()])
    expected = backend.decode(token_ids, skip_special_tokens=False)
    assert expected == "[A] [B] helloly [A] [A] <think> [B] world [B]"
    assert text == (expected if spaced else "[A][B] helloly [A][A]<think>[B] world [B]")


@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        (["fox"], False, "the quick brown "),
        (["fox"], True, "the quick brown fox"),
        (["k bro"], False, "the quic"),
        (["zebra"], False, "the quick brown fox jumps"),
        (["jump", "quick"], False, "the "),
        (["the"], False, ""),
        (["quick", "quick brown"], True, "the quick"),
        (["jumps!", "umps?", "mps."], False, "the quick brown fox jumps"),
    ],
)
def test_stop_strings_end_the_text_across_token_borders(tokenizer, stop, include, expected) -> None:
    token_ids = [
        token for c in "the quick brown fox jumps" for token in tokenizer.backend.encode(c).ids
    ]
    joined, pieces = detokenize(tokenizer, token_ids, stops=stop, include_stop=include)
    assert joined == expected
    # What went out was never taken back.
    assert all(expected.startswith("".join(pieces[:i])) for i in range(len(pieces)))


def test_only_what_may_become_a_stop_string_is_held_back(tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer.backend, skipped=frozenset(), stops=["abab!"])
    encoded = [tokenizer.backend.encode(c).ids[0] for c in "xababab?"]
    assert [detokenizer.push(i) for i in encoded] == ["x", "", "", "", "", "ab", "", "abab?"]


def test_a_stop_string_in_multi_byte_text(tokenizer) -> None:
    token_ids = tokenizer.backend.encode("今天天气很好、我们").ids
    assert detokenize(tokenizer, token_ids, stops=["很好"])[0] == "今天天气"


def test_min_tokens_are_not_searched_for_stop_strings(tokenizer) -> None:
    token_ids = [tokenizer.backend.encode(c).ids[0] for c in "abcabc"]
    assert detokenize(tokenizer, token_ids, stops=["b"], min_tokens=3)[0] == "abca"


@pytest.mark.parametrize(
    ("stops", "min_tokens", "expected"),
    [
        # "bc" begins in the skipped tokens and ends behind them.
        (["bc"], 2, "a"),
        (["bc"], 3, "abca"),
        # "c" ends in the skipped tokens, where it is not looked for, although it is held back
        # there as the beginning of "cab!".
        (["c", "cab!"], 3, "abcab"),
    ],
)
def test_a_stop_string_counts_if_it_ends_behind_min_tokens(
    tokenizer, stops, min_tokens, expected
) -> None:
    token_ids = [tokenizer.backend.encode(c).ids[0] for c in "abcabc"]
    assert detokenize(tokenizer, token_ids, stops=stops, min_tokens=min_tokens)[0] == expected


def test_bytes_that_end_in_no_character_do_not_end_the_stream() -> None:
    """The library raises where byte tokens that began a character are followed by a word."""
    vocab = {"<unk>": 0, "▁a": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    emoji = [byte + 2 for byte in "😀".encode()]
    half = 0xF0 + 2
    for token_ids, num_emoji in (
        ([*emoji, half, 1], 1),
        ([*emoji, half, 1, *emoji, 1], 2),
        ([half, 1], 0),
    ):
        detokenizer = Detokenizer(backend, skipped=frozenset())
        text = "".join(detokenizer.push(token_id) for token_id in token_ids)
        text += detokenizer.finish()
        assert text.count("😀") == num_emoji
        assert text.endswith("a")


def byte_fallback_backend() -> BackendTokenizer:
    """SentencePiece's kind: words, and bytes for what is none."""
    words = ["<unk>", "▁", "▁a", "a", "▁the", "e", "你", "▁\ufffd", "<x>"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {word: i for i, word in enumerate(words)}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken("<x>", special=True)])
    return backend


@pytest.fixture(scope="module")
def backends(tokenizer) -> dict[str, tuple[BackendTokenizer, int]]:
    """Tokenizers with a known number of tokens that their texts are looked up of."""
    bundled = BackendTokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    odd = BackendTokenizer(models.WordLevel({"a": 0, "##b": 1, "c": 2}, unk_token="a"))
    odd.decoder = decoders.WordPiece()
    return {
        "byte level": (tokenizer.backend, 100),
        "bundled": (bundled, 1000),
        "byte fallback": (byte_fallback_backend(), 120),
        "neither": (odd, 0),
    }


@pytest.mark.parametrize("kind", ["byte level", "bundled", "byte fallback", "neither"])
@pytest.mark.parametrize("skip", [True, False])
def test_texts_from_the_table_are_those_of_the_decoder(backends, kind, skip) -> None:
    backend, least = backends[kind]
    size = backend.get_vocab_size()
    texts = TokenTexts(backend, vocab_size=size)
    added = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    known = [i for i in range(size) if texts[i] is not None]
    assert len(known) >= least
    assert not added & set(known)
    others = sorted(set(range(size)) - set(known))
    skipped = added if skip else set()
    # Parts of characters, ids that nobody knows, and words, in runs of any length.
    some = st.integers(0, size + 3) | st.sampled_from(known or [0]) | st.sampled_from(others or [0])

    @settings(max_examples=60)
    @given(st.lists(some, max_size=40))
    def check(token_ids: list[int]) -> None:
        def pieces(table: Mapping[int, str | None]) -> list[str]:
            detokenizer = Detokenizer(backend, skipped=skipped, texts=table)
            return [*map(detokenizer.push, token_ids), detokenizer.finish()]

        assert pieces(texts) == pieces(NO_TEXTS)

    check()
    assert len(texts) <= size
