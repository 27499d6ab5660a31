"""Reading JSON that a client sent: limits hold before objects are made."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection
from typing import Any, NoReturn

from pdserve_common.errors import InvalidRequestError

MAX_BYTES = 64 * 1024
# Arrays and objects lie at most so deep within each other.
MAX_DEPTH = 64
# A string, also one that never ends, or a bracket. Each character is looked at once.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


class _Problem(ValueError):
    pass


def check_size(text: str, *, field: str, limit: int = MAX_BYTES) -> None:
    """Raise InvalidRequestError if a text is empty, too long or no Unicode."""
    if not text:
        raise InvalidRequestError(f"{field} is empty", field=field_name(field))
    check_sizes((text,), field=field, limit=limit)


def check_sizes(texts: Collection[str], *, field: str, limit: int = MAX_BYTES) -> None:
    """Raise InvalidRequestError if texts are too long together, or no Unicode."""
    # A character has at least one byte, so that what is far too long is not encoded.
    num_bytes = sum(map(len, texts))
    if num_bytes <= limit:
        num_bytes = sum(len(_encoded(text, field)) for text in texts)
    if num_bytes > limit:
        raise InvalidRequestError(
            f"{field} has {num_bytes} bytes, at most {limit}", field=field_name(field)
        )


def parse_json(text: str, *, field: str, limit: int = MAX_BYTES) -> Any:
    """Return the value of a JSON text. Raises InvalidRequestError for one that is too long or too
    deep, for what is no JSON, for keys that repeat, for numbers that overflow and for halves of
    surrogate pairs.
    """
    check_size(text, field=field, limit=limit)
    depth = _depth(text)
    if depth > MAX_DEPTH:
        raise InvalidRequestError(
            f"{field} is {depth} levels deep, at most {MAX_DEPTH}", field=field_name(field)
        )
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_float=_float,
            parse_constant=_constant,
        )
    except ValueError as error:
        raise InvalidRequestError(f"{field} is no JSON: {error}", field=field_name(field)) from None
    # An escape may have made half of a pair.
    _encoded(json.dumps(value, ensure_ascii=False), field)
    return value


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in _BRACKETS.finditer(text):
        if match[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in "]}":
            depth -= 1
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        (again, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise _Problem(f"the key {again[:100]!r} repeats")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Problem(f"{text[:100]} is too large")
    return value


def _constant(text: str) -> NoReturn:
    raise _Problem(f"{text} is no number")


def _encoded(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{field} has half of a surrogate pair", field=field_name(field)
        ) from None


def field_name(field: str) -> str:
    """The field that an error is about: a path's first part."""
    return re.split(r"[.\[]", field, maxsplit=1)[0]
