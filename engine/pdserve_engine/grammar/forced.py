"""What has to follow a text, whichever tokens it is made of."""

from collections.abc import Sequence

import numpy as np

from pdserve_engine.grammar.native import Bitmask, Matcher

MAX_BYTES = 64
# No text has this byte: special tokens, and what stands for none, are taken to begin with it.
NO_TEXT = 0xFF


class ForcedText:
    """Finds text of which a grammar leaves no choice, byte by byte: a grammar of a few bytes may
    force a text that never ends, and xgrammar's own search would follow it to there.

    For one thread.
    """

    def __init__(self, vocabulary: Sequence[bytes], stop_token_ids: frozenset[int]) -> None:
        """`vocabulary` has the bytes of each token."""
        num_tokens = -(-len(vocabulary) // 32) * 32
        self._vocabulary = vocabulary
        self._first_bytes = np.full(num_tokens, NO_TEXT, dtype=np.uint8)
        self._lengths = np.zeros(num_tokens, dtype=np.int32)
        for token_id, text in enumerate(vocabulary):
            if text and token_id not in stop_token_ids:
                self._first_bytes[token_id] = text[0]
                self._lengths[token_id] = len(text)
        self._bitmask = np.empty(num_tokens // 32, dtype=np.int32)

    def find(self, matcher: Matcher, *, max_bytes: int = MAX_BYTES) -> bytes:
        """Return what has to come next, `max_bytes` or a token more at most; empty if there is a
        choice, or if the text may end. The matcher is where it was.
        """
        text = b""
        num_accepted = 0
        while len(text) < max_bytes and (token_id := self._only_way(matcher)) is not None:
            if not matcher.accept(token_id):
                break
            num_accepted += 1
            text += self._vocabulary[token_id]
        matcher.rollback(num_accepted)
        return text

    def _only_way(self, matcher: Matcher) -> int | None:
        """Return the shortest of the tokens that fit, if all of them begin with it."""
        matcher.fill(self._bitmask)
        allowed = _set_bits(self._bitmask)
        if not len(allowed):
            return None
        first_bytes = self._first_bytes[allowed]
        if first_bytes.max() == NO_TEXT or first_bytes.min() != first_bytes.max():
            return None
        shortest = int(allowed[self._lengths[allowed].argmin()])
        prefix = self._vocabulary[shortest]
        # A vocabulary without single bytes has more to compare.
        if len(prefix) > 1 and not all(self._vocabulary[i].startswith(prefix) for i in allowed):
            return None
        return shortest


def whole_characters(text: bytes) -> str:
    """Return the text up to a part of a character; empty if it begins within one."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()


def _set_bits(bitmask: Bitmask) -> np.ndarray:
    """Return the indexes of the set bits, the lowest of the first word being 0, in order."""
    words = np.flatnonzero(bitmask)
    bits = np.unpackbits(bitmask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    indexes: np.ndarray = words[word] * 32 + bit
    return indexes
