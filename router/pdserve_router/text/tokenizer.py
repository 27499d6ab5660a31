"""The model's tokenizer and chat template, safe to use beside the event loop."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import tokenizers
from jinja2 import TemplateError
from jinja2.defaults import DEFAULT_NAMESPACE
from pydantic_core import to_json
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pdserve_common.errors import InvalidRequestError
from pdserve_common.token_bytes import parts_of, piece_decoder
from pdserve_router.text.messages import ChatMessage
from pdserve_router.text.token_texts import TokenTexts

# Encoding runs at about 1 MB/s: this many characters take a few milliseconds, which the event
# loop can spare; more go to a thread (the tokenizer releases the GIL).
INLINE_CHARS = 4096
# What the template adds to a message, in time if not in text.
CHARS_PER_MESSAGE = 32
# Dense text has fewer, and all text has, on the whole: of longer text the beginning is looked at
# first.
CHARS_PER_TOKEN = (4, 16)
# Tokens whose bytes are kept; a vocabulary's frequent ones are far fewer.
TOKEN_CACHE_SIZE = 2**16
# Of one request.
MAX_TEMPLATE_VARIABLES = 32
MAX_TEMPLATE_VARIABLES_BYTES = 1 << 14

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
        # None: a token may stand for text of any length.
        self.max_token_bytes = _max_token_bytes(self.backend)
        self._taken_variables = _taken_variables(self._pretrained)
        self._added_tokens = {i: token.content for i, token in added.items()}
        # By their text; special ones and others.
        self.added_token_ids = {token.content: i for i, token in added.items()}
        self.texts = TokenTexts(self.backend, vocab_size=self.vocab_size)
        self._decode_piece = piece_decoder(self.backend)
        # The bytes one token stands for, and its text, in which a part of a character is a
        # replacement character: characters may be spread over several tokens. Ids the tokenizer
        # does not know (of an embedding padded in size) have none.
        self.token_bytes = functools.lru_cache(TOKEN_CACHE_SIZE)(self._token_bytes)
        self.token_text = functools.lru_cache(TOKEN_CACHE_SIZE)(self._token_text)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    @property
    def chat_template(self) -> str:
        """The model's, or all of them one behind the other; "" if it has none."""
        template = self._pretrained.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int,
        field: str = "prompt",
    ) -> Sequence[int]:
        """Return the tokens of a text prompt, with the model's special tokens around it. Raises
        InvalidRequestError, which names the `field`, for text that is known to have more than
        `max_tokens` before all of it is tokenized.
        """
        encode = functools.partial(
            self._encode,
            add_special_tokens=add_special_tokens,
            max_tokens=max_tokens,
            field=field,
        )
        if len(text) <= INLINE_CHARS:
            return encode(text)
        return await self._in_thread(encode, text)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, Any],
        *,
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int,
    ) -> Sequence[int]:
        """Return the tokens of a conversation, like `encode`; the chat template gets `tools` and
        `variables` besides. Raises InvalidRequestError also for variables that are not for clients,
        and if the template refuses them, the tools or the messages.
        """
        self._check_variables(variables)
        if tools and "tools" not in self.chat_template:
            raise InvalidRequestError(
                "tools is set, the model's chat template knows none", field="tools"
            )
        encode = functools.partial(
            self._encode_chat, tools=tools, variables=variables, max_tokens=max_tokens
        )
        size = sum(map(_num_chars, tools))
        size += sum(CHARS_PER_MESSAGE + message.num_chars for message in messages)
        if size <= INLINE_CHARS:
            return encode(messages)
        return await self._in_thread(encode, messages)

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

    def _for_template(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        # Most templates know only the older name of the role.
        older = {} if "developer" in self.chat_template else {"developer": "system"}
        return [
            {**message.for_template(), "role": older.get(message.role, message.role)}
            for message in messages
        ]

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

    def _encode(
        self,
        text: str,
        *,
        max_tokens: int,
        add_special_tokens: bool = True,
        field: str = "prompt",
    ) -> list[int]:
        self._check_length(text, max_tokens, field)
        # Of a batch, since only that releases the GIL.
        encodings = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encodings[0].ids

    def _check_length(self, text: str, max_tokens: int, field: str = "prompt") -> None:
        """Tokens take 200 bytes each and a microsecond: text that has far too many is refused by
        its length, or else by its beginning.
        """
        if self.max_token_bytes is not None:
            limit = max_tokens * self.max_token_bytes
            # No character has more than 4 bytes.
            num_bytes = len(text) if not limit // 4 < len(text) <= limit else _num_bytes(text)
            if num_bytes > limit:
                raise InvalidRequestError(
                    f"{field} has {num_bytes} bytes of text or more, at most {limit}: "
                    f"{max_tokens} tokens (max_model_len) have at most {self.max_token_bytes} each",
                    field=field,
                )
        for chars_per_token in CHARS_PER_TOKEN:
            head = text[: max_tokens * chars_per_token]
            if len(head) == len(text):
                return
            (encoding,) = self.backend.encode_batch_fast([head], add_special_tokens=False)
            # What follows may change tokens at the end of the head, but not half of them.
            if len(encoding) > 2 * max_tokens:
                raise InvalidRequestError(
                    f"{field} has more than {max_tokens} tokens (max_model_len): the first "
                    f"{len(head)} of its {len(text)} characters have {len(encoding)}",
                    field=field,
                )

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        field = "chat_template_kwargs"
        if taken := sorted(self._taken_variables & variables.keys()):
            raise InvalidRequestError(
                f"{field} has {taken[0]!r}, which requests cannot set", field=field
            )
        if len(variables) > MAX_TEMPLATE_VARIABLES:
            raise InvalidRequestError(
                f"{field} has {len(variables)} entries, at most {MAX_TEMPLATE_VARIABLES}",
                field=field,
            )
        if variables and (size := len(to_json(variables))) > MAX_TEMPLATE_VARIABLES_BYTES:
            raise InvalidRequestError(
                f"{field} has {size} bytes of JSON, at most {MAX_TEMPLATE_VARIABLES_BYTES}",
                field=field,
            )

    def _encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
        max_tokens: int,
    ) -> list[int]:
        if not self.chat_template:
            raise InvalidRequestError(
                "messages are set, the model has no chat template", field="messages"
            )
        try:
            text = self._pretrained.apply_chat_template(
                self._for_template(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **variables,
            )
        except TemplateError as error:
            raise InvalidRequestError(
                f"messages do not fit the model's chat template: {error}", field="messages"
            ) from error
        except Exception as error:
            field = "chat_template_kwargs" if variables else "tools"
            if not variables and not tools:
                raise
            raise InvalidRequestError(
                f"{field} do not fit the model's chat template: {error}", field=field
            ) from error
        assert isinstance(text, str), "tokenize=False returns text"
        # The template writes the special tokens itself.
        return self._encode(text, max_tokens=max_tokens, add_special_tokens=False)


def _num_chars(tool: Mapping[str, object]) -> int:
    return len(to_json(tool))


def _taken_variables(pretrained: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return what a chat template gets from elsewhere, and what says how it is used."""
    parameters = inspect.signature(type(pretrained).apply_chat_template).parameters
    return frozenset(
        (
            *parameters,
            *pretrained.special_tokens_map,
            *pretrained.SPECIAL_TOKENS_ATTRIBUTES,
            *DEFAULT_NAMESPACE,
            *("messages", "raise_exception", "strftime_now"),
        )
    )


# What neither drops text nor makes much less of it.
_KEEPING_NORMALIZERS = {"NFC", "NFD", "Prepend", "Lowercase"}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"}
# NFC makes 3 bytes of the 9 of a Korean syllable that is taken apart, the most that there is.
_NORMALIZED_BYTES = 3


def _max_token_bytes(backend: tokenizers.Tokenizer) -> int | None:
    """Return of how many bytes of text one token can come; None if there is no bound, because text
    is dropped or unknown text becomes one token whatever its length.
    """
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return None
    pre_tokenizers = parts_of(backend.pre_tokenizer, "pretokenizers")
    is_byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers)
    if not (is_byte_level or model.byte_fallback):
        return None
    for part in pre_tokenizers:
        if part["type"] not in _KEEPING_PRE_TOKENIZERS or part.get("behavior") == "Removed":
            return None
    normalizers = parts_of(backend.normalizer, "normalizers")
    if not all(_keeps_text(part) for part in normalizers):
        return None
    vocab = backend.get_vocab(with_added_tokens=False)
    added = (token.content for token in backend.get_added_tokens_decoder().values())
    longest = max(map(len if is_byte_level else _num_bytes, vocab))
    longest = max(longest, max(map(_num_bytes, added), default=0))
    return longest * _NORMALIZED_BYTES if normalizers else longest


def _keeps_text(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and _num_bytes(pattern) <= _num_bytes(normalizer["content"])
    return normalizer["type"] in _KEEPING_NORMALIZERS


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))
