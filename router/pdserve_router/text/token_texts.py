"""The texts of tokens that stand for whole characters, wherever they stand."""

import tokenizers

from pdserve_common.tokens.token_bytes import parts_of

# With these a token's text does not depend on those around it, unless it is the first one or stands
# for a part of a character. Behind Fuse the whole text is one piece: only its ends may change.
_LOCAL_DECODERS = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip"}
_LOCAL_BEHIND_FUSE = {"Fuse", "Strip"}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts(dict[int, str | None]):
    """What a token adds to the text behind another one; None: that depends on what stands around
    it. Filled as tokens come, each costs 3 us once: a vocabulary at once would take half a second.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._added = backend.get_added_tokens_decoder().keys()
        self._before = letter_id(backend) if _is_local(backend) else None

    def __missing__(self, token_id: int) -> str | None:
        if token_id >= self._vocab_size:
            return None
        text = self[token_id] = self._text_of(token_id)
        return text

    def _text_of(self, token_id: int) -> str | None:
        if self._before is None or token_id in self._added:
            return None
        before, both = (
            self._backend.decode(ids, skip_special_tokens=False)
            for ids in ([self._before], [self._before, token_id])
        )
        text = both.removeprefix(before)
        return None if not text or REPLACEMENT in text else text


class _NoTexts(dict[int, str | None]):
    def __missing__(self, token_id: int) -> None:
        return None


# All tokens are decoded with what stands around them.
NO_TEXTS = _NoTexts()


def _is_local(backend: tokenizers.Tokenizer) -> bool:
    types = [part["type"] for part in parts_of(backend.decoder, "decoders")]
    fused = types[types.index("Fuse") :] if "Fuse" in types else []
    return (
        bool(types) and _LOCAL_DECODERS.issuperset(types) and _LOCAL_BEHIND_FUSE.issuperset(fused)
    )


def letter_id(backend: tokenizers.Tokenizer) -> int | None:
    """Return a token that is a letter, None if there is none."""
    return next(filter(None, map(backend.token_to_id, "aetA")), None)
