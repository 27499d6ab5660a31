"""A model's vocabulary as grammars match it: the bytes of each token."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pdserve_common.tokens.token_bytes import piece_decoder
from pdserve_engine.grammar.native import TokenizerInfo

# Begins what special tokens stand for. No text has this byte, so that a grammar reaches them by
# their ids alone: clients do not see them, and what is left must fit.
SPECIAL = b"\xff"

# Returns the ids of a text's tokens.
Encode = Callable[[str], Sequence[int]]


def make_tokenizer_info(
    model_dir: str | Path, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> TokenizerInfo:
    """Read the tokenizer of a model that has `vocab_size` logits. Raises ValueError for one that
    grammars cannot be matched with.
    """
    path = Path(model_dir) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{model_dir} has no tokenizer.json")
    if not eos_token_ids:
        raise ValueError(f"{model_dir} names no EOS token")
    backend = tokenizers.Tokenizer.from_file(str(path))
    added = {
        token.content: token_id
        for token_id, token in backend.get_added_tokens_decoder().items()
        if token_id < vocab_size
    }
    return TokenizerInfo.make(_vocabulary(backend, vocab_size), eos_token_ids, added)


def make_encoder(model_dir: str | Path) -> Encode:
    """Return what cuts texts into tokens as they are in the middle of another: it puts nothing
    before them. Raises ValueError if the model has no tokenizer.
    """
    path = Path(model_dir) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{model_dir} has no tokenizer.json")
    content = json.loads(path.read_text())
    for part in ("normalizer", "pre_tokenizer"):
        content[part] = _without_prefix(content.get(part))
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.no_truncation()
    backend.no_padding()

    def encode(text: str) -> Sequence[int]:
        token_ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return token_ids

    return encode


def _without_prefix(part: Any) -> Any:
    """Return a normalizer or a pre-tokenizer that puts no blank before a text."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    part = dict(part)
    if "add_prefix_space" in part:
        part["add_prefix_space"] = False
    if "prepend_scheme" in part:
        part["prepend_scheme"] = "never"
    for parts in ("normalizers", "pretokenizers"):
        if parts in part:
            kept = map(_without_prefix, part[parts])
            part[parts] = [each for each in kept if each is not None]
    return part


def _vocabulary(backend: tokenizers.Tokenizer, vocab_size: int) -> list[bytes]:
    decode = piece_decoder(backend)
    # Logits without a token, as of an embedding padded in size, stand for nothing.
    vocabulary = [b""] * vocab_size
    for piece, token_id in backend.get_vocab(with_added_tokens=False).items():
        if token_id < vocab_size:
            vocabulary[token_id] = decode(piece)
    for token_id, token in backend.get_added_tokens_decoder().items():
        if token_id < vocab_size:
            content = token.content.encode()
            vocabulary[token_id] = SPECIAL + content if token.special else content
    return vocabulary
