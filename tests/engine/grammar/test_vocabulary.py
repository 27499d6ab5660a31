"""What a token means to a grammar is what the detokenizer makes of it."""

from pathlib import Path

import pytest

from pdserve_engine.grammar.native import TokenizerInfo
from pdserve_engine.grammar.vocabulary import SPECIAL, make_tokenizer_info
from pdserve_router.text.tokenizer import Tokenizer
from support.grammars import EOS, MODEL, VOCAB_SIZE


def vocabulary(info: TokenizerInfo) -> list[bytes]:
    return [bytes(token) for token in info.handle.decoded_vocab()]


def test_tokens_have_the_bytes_of_the_detokenizer(tokenizer_info: TokenizerInfo) -> None:
    tokenizer = Tokenizer(str(MODEL))
    special = tokenizer.special_token_ids
    for token_id, token in enumerate(vocabulary(tokenizer_info)):
        before = SPECIAL if token_id in special else b""
        assert token == before + tokenizer.token_bytes(token_id)
    tokenizer.close()


def test_it_is_as_large_as_the_logits() -> None:
    larger = make_tokenizer_info(MODEL, vocab_size=VOCAB_SIZE + 10, eos_token_ids=(EOS,))
    assert vocabulary(larger)[VOCAB_SIZE:] == [b""] * 10
    smaller = make_tokenizer_info(MODEL, vocab_size=100, eos_token_ids=(EOS,))
    assert vocabulary(smaller) == vocabulary(larger)[:100]
    assert smaller.vocab_size == 100


def test_it_crosses_to_another_process_unchanged(tokenizer_info: TokenizerInfo) -> None:
    copy = TokenizerInfo.deserialize(tokenizer_info.serialize())
    assert vocabulary(copy) == vocabulary(tokenizer_info)
    assert copy.serialize() == tokenizer_info.serialize()


def test_a_model_that_cannot_be_matched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        make_tokenizer_info(tmp_path, vocab_size=10, eos_token_ids=(EOS,))
    with pytest.raises(ValueError, match="names no EOS token"):
        make_tokenizer_info(MODEL, vocab_size=10, eos_token_ids=())
