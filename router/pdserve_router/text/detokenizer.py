"""Tokens to text, one by one: whole characters only, and nothing past a stop string."""

from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType

import tokenizers

from pdserve_router.text.prompt_end import NO_PROMPT, PromptEnd
from pdserve_router.text.token_texts import NO_TEXTS, REPLACEMENT

# A character has up to four bytes, each a token of its own at worst: so many tokens without text
# are no character. Without a bound each further one would decode all of them again.
_MAX_PENDING_TOKENS = 8
NO_UNSPACED: Mapping[int, str] = MappingProxyType({})


class IncrementalDecoder:
    """Decodes a stream of tokens; text is returned when its last character is complete. Of the
    texts returned and of that before them come what the library decodes as a whole.
    """

    __slots__ = (
        "_context",
        "_pending",
        "_said",
        "_skipped",
        "_texts",
        "_token_bytes",
        "_tokenizer",
        "_unspaced",
    )

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        texts: Mapping[int, str | None],
        skipped: Set[int],
        unspaced: Mapping[int, str],
        prompt: PromptEnd,
        token_bytes: Callable[[int], bytes] | None,
    ) -> None:
        self._token_bytes = token_bytes
        self._tokenizer = tokenizer
        self._texts = texts
        self._skipped = skipped
        self._unspaced = unspaced
        # The tokens of the last text: decoders treat the first token differently.
        self._context = list(prompt.context)
        # Those behind it, which bring no text yet.
        self._pending = list(prompt.pending)
        # How the text of all of them begins that is out; None: with that of the context.
        self._said: str | None = prompt.text

    def step(self, token_id: int) -> str:
        if self._context and not self._pending and (text := self._texts[token_id]) is not None:
            self._context = [token_id]
            self._said = None
            return text
        if token_id in self._skipped:
            return ""
        follows_unspaced = bool(self._context) and self._context[-1] in self._unspaced
        text = self._decode_next(token_id)
        if follows_unspaced and token_id in self._unspaced and self._context == [token_id]:
            return self._unspaced[token_id]
        return text

    def flush(self) -> str:
        """Return what an incomplete character looks like; at the end there is no more to come."""
        if not self._pending:
            return ""
        text = self._new_text(self._decode(self._context + self._pending))
        self._pending = []
        return text

    def _decode_next(self, token_id: int) -> str:
        """`step` for a part of a character, and whatever else depends on tokens before it."""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        is_open = text.endswith(REPLACEMENT) and not self._is_whole()
        if is_open or len(text) <= len(self._text_before()):
            return "" if len(self._pending) < _MAX_PENDING_TOKENS else self.flush()
        new = self._new_text(text)
        self._context, self._pending, self._said = self._pending, [], None
        return new

    def _is_whole(self) -> bool:
        """True if a replacement character at the end is one that the tokens say, and stands for no
        part of another one.
        """
        if self._token_bytes is None:
            return False
        try:
            b"".join(map(self._token_bytes, self._pending)).decode()
        except UnicodeDecodeError:
            return False
        return True

    def _new_text(self, text: str) -> str:
        before = self._text_before()
        self._said = None
        if text.startswith(before):
            return text[len(before) :]
        # With byte-fallback tokenizers bytes that begin a character and end in none spoil the
        # characters of the bytes before them, which are out.
        return self._decode(self._pending)

    def _text_before(self) -> str:
        if self._said is None:
            self._said = self._decode(self._context)
        return self._said

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class StopChecker:
    """Finds stop strings in a growing text and holds back what may become one."""

    __slots__ = ("_held", "_include", "_max_chars", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._max_chars = max(map(len, stops))
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may go out, and the stop string that ended it."""
        num_held = len(self._held)
        text = self._held + text
        # The earliest; of those that begin together the first listed. Each ends in the new text.
        found = [
            (at, i)
            for i, stop in enumerate(self._stops)
            if (at := text.find(stop, max(0, num_held - len(stop) + 1))) >= 0
        ]
        if found:
            at, index = min(found)
            stop = self._stops[index]
            self._held = ""
            return text[: at + len(stop) if self._include else at], stop
        return self._release(text), None

    def skip(self, text: str) -> str:
        """`push` for text in which no stop string may end; one may begin."""
        return self._release(self._held + text)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _release(self, text: str) -> str:
        border = len(text) - self._num_held(text)
        self._held = text[border:]
        return text[:border]

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        start = max(0, len(text) - self._max_chars + 1)
        for stop in self._stops:
            at = text.find(stop[0], start)
            while at >= 0:
                if stop.startswith(text[at:]):
                    longest = max(longest, len(text) - at)
                    break
                at = text.find(stop[0], at + 1)
        return longest


class Detokenizer:
    """The text of one request. `stop_string` is set once a stop string ended it."""

    __slots__ = ("_checker", "_decoder", "_min_tokens", "num_tokens", "stop_string")

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        skipped: Set[int],
        texts: Mapping[int, str | None] = NO_TEXTS,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        unspaced: Mapping[int, str] = NO_UNSPACED,
        prompt: PromptEnd = NO_PROMPT,
        token_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        """`unspaced` are the texts of tokens between which the decoder's spaces are left out;
        `prompt` is what the tokens follow. A character that it begins is in the first text. Without
        `token_bytes` a replacement character that tokens say is taken for a part of another one.
        """
        self._decoder = IncrementalDecoder(tokenizer, texts, skipped, unspaced, prompt, token_bytes)
        self._checker = StopChecker(stops, include=include_stop) if stops else None
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.stop_string: str | None = None

    def push(self, token_id: int) -> str:
        """Add a token and return the text that may go out now."""
        self.num_tokens += 1
        text = self._decoder.step(token_id)
        return text if self._checker is None else self._check(text)

    def finish(self) -> str:
        """Return what is still held back. No token follows."""
        text = self._check(self._decoder.flush())
        if self._checker is not None and self.stop_string is None:
            text += self._checker.flush()
        return text

    def _check(self, text: str) -> str:
        if self._checker is None or not text:
            return text
        if self.num_tokens <= self._min_tokens:
            # As in vLLM: no stop string ends in what the first min_tokens tokens say.
            return self._checker.skip(text)
        released, self.stop_string = self._checker.push(text)
        return released
