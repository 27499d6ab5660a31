"""The bytes of text that a tokenizer's vocabulary entries stand for."""

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def piece_decoder(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return how the vocabulary's entries are read: as bytes in disguise (byte-level BPE), as text
    with byte tokens beside it (SentencePiece), or as words and their ends (WordPiece), each behind
    another entry. Added tokens are no such entries: they stand for their own text.
    """
    if backend.decoder is None:
        return str.encode
    types = {part["type"] for part in parts_of(backend.decoder, "decoders")}
    if "ByteLevel" in types:
        return functools.partial(_byte_level_bytes, table=_byte_level_table())
    if types == {"WordPiece"}:
        return functools.partial(_wordpiece_bytes, backend.decoder)
    return _sentencepiece_bytes


def parts_of(step: Any, name: str) -> list[dict[str, Any]]:
    """Return a step of the tokenizer as its parts; the library tells them in JSON only."""
    if step is None:
        return []
    description = json.loads(step.__getstate__())
    parts: list[dict[str, Any]] = description.get(name, [description])
    return parts


def _byte_level_table() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones are themselves, the others follow from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level_bytes(piece: str, *, table: dict[str, int]) -> bytes:
    try:
        return bytes(table[character] for character in piece)
    except KeyError:
        # As the tokenizer's own decoder does with entries that are no bytes in disguise.
        return piece.encode()


def _wordpiece_bytes(decoder: Any, piece: str) -> bytes:
    # Only the first one of a text differs.
    text: str = decoder.decode(["a", piece])
    return text[1:].encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return piece.replace("\u2581", " ").encode() if byte is None else bytes.fromhex(byte[1])
