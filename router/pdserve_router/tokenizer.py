"""The model's tokenizer and chat template, safe to use beside the event loop."""

import asyncio
import functools
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import tokenizers
from jinja2 import TemplateError
from transformers import AutoTokenizer

from pdserve_common.errors import InvalidRequestError

# Encoding runs at about 1 MB/s: this many characters take a few milliseconds, which the event
# loop can spare; more go to a thread (the tokenizer releases the GIL).
INLINE_CHARS = 4096
# What the template adds to a message, in time if not in text.
CHARS_PER_MESSAGE = 32
# Tokens whose bytes are kept; a vocabulary's frequent ones are far fewer.
TOKEN_CACHE_SIZE = 2**16

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")

T = TypeVar("T")
R = TypeVar("R")


class Tokenizer:
    """Text to tokens and back."""

    def __init__(self, path: str) -> None:
        self._pretrained = AutoTokenizer.from_pretrained(path, local_files_only=True)
        backend = getattr(self._pretrained, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ValueError(f"{path} has no fast tokenizer (tokenizer.json)")
        self.backend: tokenizers.Tokenizer = backend
        # A training set-up left in tokenizer.json must not cut prompts.
        self.backend.no_truncation()
        self.backend.no_padding()
        added = self.backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values())
        self._added_tokens = {i: token.content for i, token in added.items()}
        self._decode_piece = _piece_decoder(self.backend)
        # The bytes one token stands for, and its text, in which a part of a character is a
        # replacement character: characters may be spread over several tokens. Ids the tokenizer
        # does not know (of an embedding padded in size) have none.
        self.token_bytes = functools.lru_cache(TOKEN_CACHE_SIZE)(self._token_bytes)
        self.token_text = functools.lru_cache(TOKEN_CACHE_SIZE)(self._token_text)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text prompt, with the model's special tokens around it."""
        if len(text) <= INLINE_CHARS:
            return self._encode(text)
        return await self._in_thread(self._encode, text)

    async def encode_chat(self, messages: list[dict[str, str]]) -> Sequence[int]:
        """Return the tokens of a conversation. Raises InvalidRequestError if the chat template
        refuses it.
        """
        size = sum(CHARS_PER_MESSAGE + len(message["content"]) for message in messages)
        if size <= INLINE_CHARS:
            return self._encode_chat(messages)
        return await self._in_thread(self._encode_chat, messages)

    async def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without special tokens around it."""
        if sum(map(len, words)) <= INLINE_CHARS:
            return self._encode_words(words)
        return await self._in_thread(self._encode_words, words)

    async def decode_any(self, token_ids: Sequence[int]) -> str:
        """`decode` for token ids of any number."""
        if len(token_ids) <= INLINE_CHARS:
            return self.decode(token_ids)
        return await self._in_thread(self.decode, token_ids)

    async def _in_thread(self, function: Callable[[T], R], argument: T) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, argument)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of some tokens, special tokens included."""
        return self.backend.decode(list(token_ids), skip_special_tokens=False)

    def _token_text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")

    def _token_bytes(self, token_id: int) -> bytes:
        added = self._added_tokens.get(token_id)
        if added is not None:
            return added.encode()
        piece = self.backend.id_to_token(token_id)
        return b"" if piece is None else self._decode_piece(piece)

    def _encode_words(self, words: Sequence[str]) -> list[list[int]]:
        encodings = self.backend.encode_batch_fast(list(words), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # Of a batch, since only that releases the GIL.
        encodings = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encodings[0].ids

    def _encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if not self._pretrained.chat_template:
            raise InvalidRequestError(
                "messages are set, the model has no chat template", field="messages"
            )
        try:
            text = self._pretrained.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise InvalidRequestError(
                f"messages do not fit the model's chat template: {error}", field="messages"
            ) from error
        assert isinstance(text, str), "tokenize=False returns text"
        # The template writes the special tokens itself.
        return self._encode(text, add_special_tokens=False)


def _piece_decoder(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return how the vocabulary's entries are read: as bytes in disguise (byte-level BPE) or as
    text with byte tokens beside it (SentencePiece).
    """
    if backend.decoder is None:
        return str.encode
    # The decoder's description, in JSON; the library has no other way to ask for it.
    description = json.loads(backend.decoder.__getstate__())
    parts = description.get("decoders", [description])
    if any(part["type"] == "ByteLevel" for part in parts):
        return functools.partial(_byte_level_bytes, table=_byte_level_table())
    return _sentencepiece_bytes


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


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return piece.replace("\u2581", " ").encode() if byte is None else bytes.fromhex(byte[1])
