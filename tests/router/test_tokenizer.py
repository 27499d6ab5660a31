"""Tokens one by one: their text and their bytes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pdserve_common.errors import InvalidRequestError
from pdserve_router.text.tokenizer import Tokenizer

TEXT = "naïve café, 今天天气很好 😀👩‍👧 the end\n"


def saved(backend: BackendTokenizer, path: Path) -> Tokenizer:
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    return Tokenizer(str(path))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    """As Llama 2's: words with a mark for the space before them, bytes for all else."""
    words = ["\u2581the", "\u2581end", "na", "\u2581"]
    names = ["<unk>", *words, *(f"<0x{byte:02X}>" for byte in range(256)), *"thend"]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    backend = BackendTokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return saved(backend, tmp_path_factory.mktemp("sentencepiece"))


def test_the_text_of_every_token_is_what_the_library_decodes(tokenizer) -> None:
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.token_text(token_id) == tokenizer.decode([token_id])


def test_the_bytes_of_tokens_join_to_the_text(tokenizer) -> None:
    token_ids = tokenizer.backend.encode(TEXT).ids
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == TEXT
    # Which their texts do not: characters are spread over tokens.
    assert "\ufffd" in "".join(map(tokenizer.token_text, token_ids))


def test_a_special_token_is_its_name(tokenizer) -> None:
    assert tokenizer.token_bytes(2) == b"<|im_start|>"


def test_an_entry_that_is_no_bytes_in_disguise_is_its_text(tmp_path) -> None:
    backend = BackendTokenizer(models.BPE(vocab={"\u0120a": 0, "<end of turn>": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = saved(backend, tmp_path)
    for token_id, text in ((0, " a"), (1, "<end of turn>")):
        assert tokenizer.token_text(token_id) == tokenizer.decode([token_id]) == text


def test_an_id_the_tokenizer_does_not_know_has_no_bytes(tokenizer) -> None:
    assert (tokenizer.token_bytes(10**6), tokenizer.token_text(10**6)) == (b"", "")


def test_sentencepiece_tokens_keep_their_spaces_and_bytes(sentencepiece) -> None:
    def bytes_of(name: str) -> bytes:
        return sentencepiece.token_bytes(sentencepiece.backend.token_to_id(name))

    assert bytes_of("\u2581the") == b" the"
    assert bytes_of("na") == b"na"
    assert bytes_of("<0xE2>") == b"\xe2"
    assert bytes_of("<s>") == b"<s>"
    token_ids = sentencepiece.backend.encode(TEXT).ids
    assert b"".join(map(sentencepiece.token_bytes, token_ids)).decode() == " " + TEXT
    assert sentencepiece.decode(token_ids) == TEXT


def test_a_tokenizer_without_a_decoder_has_its_entries_as_text(tmp_path) -> None:
    backend = BackendTokenizer(models.WordLevel({"<unk>": 0, "café": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert saved(backend, tmp_path).token_bytes(1) == "café".encode()


ALL_TEXT = st.text(alphabet=st.characters(exclude_categories=("Cs",)))


@given(text=ALL_TEXT | st.text(alphabet="the end\u2581 ") | st.text(alphabet="\u1112\u1161\u11ab"))
def test_no_token_stands_for_more_bytes_than_the_longest(tokenizer, sentencepiece, text) -> None:
    for each in (tokenizer, sentencepiece):
        num_tokens = len(each.backend.encode(text, add_special_tokens=False).ids)
        assert len(text.encode()) <= num_tokens * each.max_token_bytes


def byte_level(**steps: object) -> BackendTokenizer:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for name, step in steps.items():
        setattr(backend, name, step)
    return backend


SPLIT = pre_tokenizers.Split(" ", "removed")
WORDS = BackendTokenizer(models.WordLevel(vocab={"<unk>": 0, "a": 1}, unk_token="<unk>"))


@pytest.mark.parametrize(
    ("backend", "longest"),
    [
        (byte_level(), 1),
        (byte_level(normalizer=normalizers.NFC()), 3),
        (byte_level(normalizer=normalizers.Strip()), None),
        (byte_level(normalizer=normalizers.Replace("aa", "a")), None),
        (
            byte_level(pre_tokenizer=pre_tokenizers.Sequence([SPLIT, pre_tokenizers.ByteLevel()])),
            None,
        ),
        (WORDS, None),
    ],
)
def test_where_text_can_vanish_a_token_has_no_longest_text(tmp_path, backend, longest) -> None:
    assert saved(backend, tmp_path).max_token_bytes == longest


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a" * 12_001, "prompt has 12001 bytes of text or more, at most 12000: 1000 tokens"),
        ("\u4f60" * 4_001, "prompt has 12003 bytes of text or more, at most 12000: 1000 tokens"),
        ("a" * 4_001, "the first 4000 of its 4001 characters have 4000"),
    ],
)
async def test_text_that_is_too_long_is_refused_before_all_of_it_is_tokenized(
    tokenizer, text, problem
) -> None:
    assert tokenizer.max_token_bytes == 12
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        await tokenizer.encode(text, max_tokens=1000)
    assert caught.value.field == "prompt"
    # What may still fit is counted to the end, for the message that tells how many there are.
    assert len(await tokenizer.encode("a" * 4000, max_tokens=1000)) == 4000
