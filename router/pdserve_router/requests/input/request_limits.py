"""How large requests may be. What is counted here is counted before objects are made of it."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve_common.errors import InvalidRequestError
from pdserve_common.limits.validation import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGITS_PROCESSORS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

# Up to here a request is parsed on the event loop, which takes at most 3 ms of it.
INLINE_BYTES = 64 << 10
INLINE_OBJECTS = 1024
# Schemas and patterns up to this are checked there, up to 5 ms of work: with keywords that take
# long, and without.
INLINE_PATTERN_CHARS = 256
INLINE_SCHEMA_CHARS = 2048
MAX_MESSAGES = 1 << 14
# One request has at most so many; each is a request of its own to workers, and waits as one.
MAX_PROMPTS = 128
# One request has at most so many; a router's own limit may be lower.
MAX_PICTURES = 256
# One message has at most so many.
MAX_CONTENT_PARTS = 1 << 12
MAX_ANNOTATIONS = 1 << 10
MAX_TOOL_CALLS = 1 << 10
# One request has at most so many.
MAX_TOOLS = 1 << 10
# A body in JSON has at most so many, names of fields included; a chat of MAX_MESSAGES has four for
# each.
MAX_STRINGS = 1 << 18
# A body in JSON has at most so many values that are no strings; prompts and allowed_token_ids may
# have more, by the model.
MAX_VALUES = 1 << 18
# A message in protobuf has at most so many; numbers that are packed count as one.
MAX_WIRE_FIELDS = 1 << 18
# All completions together have at most so many: a second's work for the detokenizer.
MAX_RESUMED_TOKENS = 1 << 18

# Limits of one request for vectors: inputs (OpenAI's limit), their tokens together unless one input
# may have more, the characters of pairs of texts, which repeat what a body has once, and the
# numbers of an answer, some 40 MiB of JSON.
MAX_POOLED_INPUTS = 2048
MAX_POOLED_TOKENS = 1 << 18
MAX_POOLED_CHARS = 1 << 23
MAX_POOLED_NUMBERS = 1 << 21

# A token id has at most 5 bytes, and may have a field of its own.
MAX_DETOKENIZE_BYTES = 6 * MAX_RESUMED_TOKENS + INLINE_BYTES

# Limits of lists and maps among the sampling parameters.
MAX_PARAMS = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "logits_processors": MAX_LOGITS_PROCESSORS,
}
# Limits of a list or an object in JSON.
MAX_ENTRIES = {"messages": MAX_MESSAGES, "tools": MAX_TOOLS, **MAX_PARAMS}

# One character of text has at most so many bytes for each of its own in JSON: \u0000.
_JSON_ESCAPE = 6
# What a token may take otherwise: as a number in a list, or as a message of its own.
_BYTES_PER_TOKEN = 64
# An entry of allowed_token_ids.
_BYTES_PER_TOKEN_ID = 16
# All other fields: resumed tokens, stop strings, bad words, logit_bias, names.
_OTHER_BYTES = (1 << 20) + 5 * MAX_RESUMED_TOKENS

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH = 100


class NotSmallError(Exception):
    """A request turned out to be too much work for the event loop."""


def max_request_bytes(
    *, max_model_len: int, vocab_size: int, max_token_bytes: int | None
) -> int | None:
    """Return how many bytes a request can have of which `max_model_len` leaves anything to use;
    None if a token may stand for any number of bytes.
    """
    if max_token_bytes is None:
        return None
    per_token = _JSON_ESCAPE * max_token_bytes + _BYTES_PER_TOKEN
    return max_model_len * per_token + vocab_size * _BYTES_PER_TOKEN_ID + _OTHER_BYTES


def is_small(raw: bytes, mark: bytes) -> bool:
    """Return whether a request may be parsed on the event loop; `mark` is in every object that is
    made of it.
    """
    return len(raw) <= INLINE_BYTES and raw.count(mark) <= INLINE_OBJECTS


def check_json_counts(raw: bytes, *, max_token_ids: int) -> None:
    """Raise InvalidRequestError if JSON has more strings, or more other values, than any body
    needs. Some 10 ms for a megabyte, without an object for each.
    """
    # What is not valid is counted somehow, and refused later.
    text = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check("body", text.count(b'"') // 2, "strings", MAX_STRINGS)
    outside = b"".join(text.split(b'"')[::2])
    num_values = sum(map(outside.count, (b",", b"[", b"{")))
    _check("body", num_values, "values", MAX_VALUES + max_token_ids)


def check_num_entries(field: str, value: object, limit: int) -> None:
    """Raise InvalidRequestError if a list or an object has more entries."""
    if isinstance(value, list | dict):
        _check(field, len(value), "entries", limit)


def check_wire_counts(raw: bytes, descriptor: Any) -> None:
    """Raise InvalidRequestError if a message in protobuf has more fields than any request needs,
    those of messages in it included, or is none.
    """
    fields = _wire_fields(memoryview(raw), descriptor, depth=0)
    if next(itertools.islice(fields, MAX_WIRE_FIELDS, None), None) is not None:
        raise InvalidRequestError(f"the message has more than {MAX_WIRE_FIELDS} fields")


def check_lengths(lengths: Sequence[tuple[str, int, int]]) -> None:
    """Raise InvalidRequestError for the first of (field, number of entries, limit) above it."""
    for field, length, limit in lengths:
        _check(field, length, "entries", limit)


def _check(field: str, number: int, noun: str, limit: int) -> None:
    if number > limit:
        raise InvalidRequestError(f"{field} has {number} {noun}, at most {limit}", field=field)


def _wire_fields(data: memoryview, descriptor: Any, *, depth: int) -> Iterator[int]:
    """The numbers of all fields, depth first."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        yield number
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            at += 4 if kind == _FIXED32 else 8
        elif kind == _LENGTH_DELIMITED:
            length, at = _varint(data, at)
            field = descriptor.fields_by_number.get(number)
            if field is not None and field.message_type is not None and depth < _MAX_DEPTH:
                inner = data[at : at + length]
                yield from _wire_fields(inner, field.message_type, depth=depth + 1)
            at += length
        else:
            raise InvalidRequestError(f"the message has a field of the unknown kind {kind}")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise InvalidRequestError("the message is cut off, or no message")
