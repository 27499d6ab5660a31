"""What a prompt's last tokens are to the text of its answer."""

import codecs
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import islice

# Decoders treat the first token differently, and byte-fallback ones the bytes of a character as
# one: so many tokens are enough for both.
_MIN_CONTEXT = 4
_MAX_CONTEXT = 16
# Behind the last text there may be that many special tokens, such as places of pictures.
_MAX_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """The end of a prompt, for what follows it. `context` are tokens of whole characters, `pending`
    those behind them that hold the beginning of another one, `text` is the text of both without it.
    """

    context: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    text: str = ""


NO_PROMPT = PromptEnd()


def prompt_end(
    token_ids: Sequence[int],
    *,
    skipped: Set[int],
    token_bytes: Callable[[int], bytes],
    decode: Callable[[Sequence[int]], str],
) -> PromptEnd:
    """Return the end of a prompt whose tokens have these bytes; `skipped` ones are in no text."""
    end = _last_tokens(token_ids, skipped, token_bytes)
    num_open = _num_open_bytes(b"".join(data for _, data in end))
    ids = tuple(token_id for token_id, _ in end)
    size, border = 0, len(end)
    while size < num_open:
        border -= 1
        size += len(end[border][1])
    context, pending = ids[:border], ids[border:]
    # A token may end one character and begin the next one.
    whole = b"".join(data for _, data in end[border:])[: size - num_open]
    return PromptEnd(context, pending, decode(context) + whole.decode(errors="replace"))


def _last_tokens(
    token_ids: Sequence[int], skipped: Set[int], token_bytes: Callable[[int], bytes]
) -> list[tuple[int, bytes]]:
    """Return the last tokens with their bytes, from the beginning of a character on."""
    found: list[tuple[int, bytes]] = []
    for token_id in islice(reversed(token_ids), _MAX_TOKENS):
        data = b"" if token_id in skipped else token_bytes(token_id)
        if not data:
            continue
        found.append((token_id, data))
        is_begin = data[0] & 0xC0 != 0x80
        if len(found) >= _MAX_CONTEXT or (is_begin and len(found) > _MIN_CONTEXT):
            break
    return found[::-1]


def _num_open_bytes(data: bytes) -> int:
    """Return how many bytes at the end begin a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])
