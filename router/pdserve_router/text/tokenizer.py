"""The model's tokenizer and chat template, safe to use beside the event loop."""

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tokenizers
from jinja2 import TemplateError
from jinja2.defaults import DEFAULT_NAMESPACE
from pydantic_core import to_json
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pdserve_common.errors import InvalidRequestError
from pdserve_common.tokens.token_bytes import parts_of, piece_decoder
from pdserve_router.text.messages import ChatMessage
from pdserve_router.text.prompt_end import PromptEnd, prompt_end
from pdserve_router.text.token_texts import TokenTexts, letter_id

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
# One request has at most so many.
MAX_TEMPLATE_VARIABLES = 32
MAX_TEMPLATE_VARIABLES_BYTES = 1 << 14

T = TypeVar("T")
R = TypeVar("R")


class Cut(NamedTuple):
    """How a prompt is cut: to so many tokens, at its end unless that is kept."""

    num_tokens: int
    keeps_end: bool = False

    def apply(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return what is left of tokens."""
        return token_ids[-self.num_tokens :] if self.keeps_end else token_ids[: self.num_tokens]


class _Special(NamedTuple):
    """A token that the model's template puts beside texts."""

    token_id: int


class Tokenizer:
    """Text to tokens and back."""

    def __init__(self, path: str, *, image_token_id: int | None = None) -> None:
        """`image_token_id`: what stands for a picture, of a model that takes any."""
        self._pretrained = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if not self._pretrained.chat_template:
            self._pretrained.chat_template = _processor_template(path)
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
        self.added_tokens = {i: token.content for i, token in added.items()}
        # By their text; special ones and others.
        self.added_token_ids = {token.content: i for i, token in added.items()}
        self._letter_id = letter_id(self.backend)
        self.texts = TokenTexts(self.backend, vocab_size=self.vocab_size)
        self._decode_piece = piece_decoder(self.backend)
        # The bytes one token stands for, and its text, in which a part of a character is a
        # replacement character: characters may be spread over several tokens. Ids the tokenizer
        # does not know (of an embedding padded in size) have none.
        self.token_bytes = functools.lru_cache(TOKEN_CACHE_SIZE)(self._token_bytes)
        self.token_text = functools.lru_cache(TOKEN_CACHE_SIZE)(self._token_text)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._image_token = "" if image_token_id is None else self._token_text(image_token_id)
        # The template goes through the parts of a content, instead of taking it as text.
        self._lists_parts = bool(self._image_token) and self._finds_pictures()

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

    async def encode_pooled(
        self,
        text: str,
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_tokens: int,
        cut: Cut | None = None,
    ) -> Sequence[int]:
        """Return the tokens of a text, or of two as the model's template puts them together. With
        `cut` text is left out and special tokens stay, as transformers truncates. Raises
        InvalidRequestError as `encode` does, and if there is no room for text beside them.
        """
        encode = functools.partial(
            self._encode_pooled,
            pair=pair,
            add_special_tokens=add_special_tokens,
            max_tokens=max_tokens,
            cut=cut,
        )
        if len(text) + len(pair or "") <= INLINE_CHARS:
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
        return self.backend.decode(token_ids, skip_special_tokens=False)

    def prompt_end(
        self,
        token_ids: Sequence[int],
        *,
        skipped: Set[int] = frozenset(),
        begins_text: bool = True,
    ) -> PromptEnd:
        """Return what a prompt's last tokens are to the text that follows; `skipped` are in no
        text. Unless a text `begins_text` if there is none before it, it is as behind a letter.
        """
        of = functools.partial(
            prompt_end, skipped=skipped, token_bytes=self.token_bytes, decode=self.decode
        )
        end = of(token_ids)
        if begins_text or end.context or self._letter_id is None:
            return end
        return of((self._letter_id, *end.pending))

    async def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt, without a character that it only begins: its answer goes on
        with that.
        """
        end = self.prompt_end(token_ids)
        if not end.pending:
            return await self.decode_any(token_ids)
        known = list(filter(self.token_bytes, token_ids))
        text = await self.decode_any(known[: -len(end.pending)])
        return text + end.text.removeprefix(self.decode(end.context))

    async def decode_answer(
        self, token_ids: Sequence[int], *, prompt_token_ids: Sequence[int], skipped: Set[int]
    ) -> str:
        """Return the text of an answer's tokens, but `skipped` ones, behind that of its prompt."""
        end = self.prompt_end(prompt_token_ids, skipped=skipped)
        shown = (token_id for token_id in token_ids if token_id not in skipped)
        text = await self.decode_any([*end.context, *end.pending, *shown])
        return text[len(end.text) :]

    def _for_template(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        # Most templates know only the older name of the role.
        older = {} if "developer" in self.chat_template else {"developer": "system"}
        return [
            {
                **message.for_template(
                    image_token=self._image_token, lists_parts=self._lists_parts
                ),
                "role": older.get(message.role, message.role),
            }
            for message in messages
        ]

    def _finds_pictures(self) -> bool:
        """Does the chat template write one token for a picture among the parts of a content?"""
        content = [{"type": "image"}, {"type": "text", "text": "text"}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        try:
            text = self._pretrained.apply_chat_template(messages, tokenize=False)
        except Exception:  # whatever it raises, it is made for text
            return False
        return isinstance(text, str) and text.count(self._image_token) == 1

    def _token_text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")

    def _token_bytes(self, token_id: int) -> bytes:
        added = self.added_tokens.get(token_id)
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
        # A batch, since only that releases the GIL.
        encodings = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encodings[0].ids

    def _encode_pooled(
        self,
        text: str,
        *,
        pair: str | None,
        add_special_tokens: bool,
        max_tokens: int,
        cut: Cut | None,
    ) -> list[int]:
        texts = [text] if pair is None else [text, pair]
        for each in texts:
            self._check_length(each, max_tokens)
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        parts: list[Sequence[int]] = [encoding.ids for encoding in encodings]
        template = self._template(len(parts), add_special_tokens=add_special_tokens)
        if cut is not None:
            room = cut.num_tokens - sum(isinstance(place, _Special) for place in template)
            if room < len(parts):
                raise InvalidRequestError(
                    f"truncate_prompt_tokens is {cut.num_tokens}, must be at least "
                    f"{cut.num_tokens - room + len(parts)}: special tokens stay",
                    field="truncate_prompt_tokens",
                )
            sizes = shares_of(room, [len(part) for part in parts])
            parts = [
                cut._replace(num_tokens=size).apply(part)
                for part, size in zip(parts, sizes, strict=True)
            ]
        token_ids: list[int] = []
        for place in template:
            token_ids.extend(place if isinstance(place, _Special) else parts[place])
        return token_ids

    def _template(self, num_parts: int, *, add_special_tokens: bool) -> list["_Special | int"]:
        """Return how the model puts one text or two together: its special tokens, and the places
        of the texts between them.

        The tokenizer does so for one token in place of each text. Of a text that was truncated it
        would do so with each piece that was cut off, and of two with all pairs of them.
        """
        parts = [tokenizers.Encoding() for _ in range(num_parts)]
        for part in parts:
            part.pad(1)
        first, *others = parts
        second = others[0] if others else None
        whole = self.backend.post_process(first, second, add_special_tokens)
        return [
            _Special(token_id) if place is None else place
            for token_id, place in zip(whole.ids, whole.sequence_ids, strict=True)
        ]

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
                "messages cannot be rendered, the model has no chat template", field="messages"
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
                f"messages cannot be rendered by the model's chat template: {error}",
                field="messages",
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


def _processor_template(path: str) -> str | None:
    """Return the chat template that older models with pictures have in a file of its own."""
    file = Path(path) / "chat_template.json"
    template = json.loads(file.read_text()).get("chat_template") if file.is_file() else None
    return template if isinstance(template, str) else None


def shares_of(room: int, sizes: Sequence[int]) -> Sequence[int]:
    """Return how many tokens of one or two texts are left in `room`: the longer one is cut first
    (transformers' "longest_first").
    """
    if sum(sizes) <= room:
        return sizes
    if len(sizes) == 1:
        return [room]
    shorter = min(*sizes, room // 2)
    first = shorter if sizes[0] <= sizes[1] else room - shorter
    return [first, room - first]


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
