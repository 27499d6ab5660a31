"""Tokens to text, one by one: whole characters only, and nothing past a stop string."""

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType

import tokenizers
from tokenizers.decoders import DecodeStream

from pdserve_router.text.token_texts import NO_TEXTS

# A character has up to four bytes, each a token of its own at worst: so many tokens without text
# are no character. Without a bound each further one would decode all of them again.
_MAX_PENDING_TOKENS = 8
NO_UNSPACED: Mapping[int, str] = MappingProxyType({})


class IncrementalDecoder:
    """Decodes a stream of tokens; text is returned when its last character is complete."""

    __slots__ = (
        "_context",
        "_is_stale",
        "_pending",
        "_skipped",
        "_stream",
        "_texts",
        "_tokenizer",
        "_unspaced",
    )

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        texts: Mapping[int, str | None],
        skipped: Set[int],
        unspaced: Mapping[int, str],
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._skipped = skipped
        self._unspaced = unspaced
        self._stream = DecodeStream(skip_special_tokens=False)
        # It lacks tokens whose text was in the table.
        self._is_stale = False
        self._pending: list[int] = []
        # The tokens of the last text: some decoders treat the first token differently.
        self._context: list[int] = []

    def step(self, token_id: int) -> str:
        if self._context and not self._pending and (text := self._texts[token_id]) is not None:
            self._context = [token_id]
            self._is_stale = True
            return text
        if token_id in self._skipped:
            return ""
        follows_unspaced = bool(self._context) and self._context[-1] in self._unspaced
        text = self._decode_next(token_id)
        if follows_unspaced and token_id in self._unspaced and self._context == [token_id]:
            return self._unspaced[token_id]
        return text

    def _decode_next(self, token_id: int) -> str:
        """`step` for a part of a character, and whatever else depends on tokens before it."""
        if self._is_stale:
            self._begin_stream()
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # The library's own and only class for "the text so far is no prefix of the text now",
            # which byte-fallback tokenizers bring about when bytes that began a character end in
            # none. Whole decoding still has an answer.
            return self._restart()
        if text is None:
            return "" if len(self._pending) < _MAX_PENDING_TOKENS else self._restart()
        self._context, self._pending = self._pending, []
        return text

    def _restart(self) -> str:
        """Give up the open character: return what there is of it and begin a new stream."""
        text = self.flush()
        self._begin_stream()
        return text

    def _begin_stream(self) -> None:
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=False)
        self._is_stale = False

    def flush(self) -> str:
        """Return what an incomplete character looks like; at the end there is no more to come."""
        if not self._pending:
            return ""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        self._pending.clear()
        return text.removeprefix(before)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)


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
    ) -> None:
        """`unspaced` are the texts of tokens between which the decoder's spaces are left out."""
        self._decoder = IncrementalDecoder(tokenizer, texts, skipped, unspaced)
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
