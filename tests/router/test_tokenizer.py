"""Tokens one by one: their text and their bytes."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pdserve_router.tokenizer import Tokenizer

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
