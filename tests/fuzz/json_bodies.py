"""JSON for HTTP bodies: what a schema allows, what it does not, and what is no JSON at all."""

import functools
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from byte_mutations import mutated
from hypothesis import strategies as st

# Where checks have their limits, and where integers of machines end.
INTEGERS = (0, 1, 2, 3, 16, 20, 21, 64, 65, 127, 128, 1024, 2**31 - 1, 2**31, 2**32, 2**53 + 1)
LARGE_INTEGERS = (2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**400, -(2**63), -(2**63) - 1)
TEXTS = (
    *("", " ", "\x00", "a\x00b", "\ud800", "\udc00\ud800", "\ufeff", "\u202e", "\u0300" * 20),
    *("😀", "ﷺ", "\x1b[31m", "\r\n", "<s>", "</s>", "<|im_end|>", "{{ 7*7 }}", "{% x %}", "%s%n"),
    *("never", "user", "assistant", "system", "text", "pdserve-tiny", "x" * 300),
    *("tuned", "other"),
)
ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp037")
DICTIONARY = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0000", b"\\ud800", b"null", b"NaN"),
    *(b"-Infinity", b"1e999", b"-0", b"0x1", b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\x00"),
    *(b"[" * 200, b'{"a":' * 200, b"9" * 5000, b'"prompt":', b'"model":null,'),
)


class Raw(NamedTuple):
    """Text that is written as it is."""

    text: str


class Twice(NamedTuple):
    """A value that is written after another one of the same name."""

    first: Any
    second: Any


RAWS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e-999", "1E400", "01", "+1", ".5", "1.", "0x10"),
    *("'a'", "undefined", "True", "None", "/**/1", "", "9" * 5000, "1" + "0" * 400, "-0", "-0.0"),
    *('"\\ud800"', '"\\udc00"', '"\\u0000"', '"\\x41"', '"\t"', '"'),
)


@functools.cache
def integers() -> st.SearchStrategy[int]:
    signed = st.sampled_from(INTEGERS).flatmap(lambda i: st.sampled_from((i, -i, -i - 1)))
    return st.one_of(st.integers(0, 8), signed, st.sampled_from(LARGE_INTEGERS), st.integers())


@functools.cache
def numbers() -> st.SearchStrategy[float | int]:
    usual = st.sampled_from((0.0, 0.5, 1.0, 2.0, -2.0, 1e-45, 1e38, 1e39, 5e-324, 1.7e308, -0.0))
    return st.one_of(usual, st.floats(allow_nan=False, allow_infinity=False), integers())


@functools.cache
def texts() -> st.SearchStrategy[str]:
    wild = st.text(st.characters(exclude_categories=()), max_size=20)
    return st.one_of(
        st.sampled_from(TEXTS), wild, st.sampled_from("abc \n").map(lambda c: c * 3000)
    )


@functools.cache
def values() -> st.SearchStrategy[Any]:
    """Any JSON, and what is none."""
    deep = st.sampled_from((100, 300, 100_000)).map(lambda depth: Raw("[" * depth + "]" * depth))
    raws = st.one_of(st.sampled_from(RAWS).map(Raw), deep)
    leaves = st.one_of(st.none(), st.booleans(), numbers(), texts(), raws)
    many = st.tuples(st.integers(2, 300), leaves).map(lambda pair: [pair[1]] * pair[0])
    return st.recursive(
        st.one_of(leaves, many),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(texts(), inner, max_size=4)
        ),
        max_leaves=6,
    )


def of_schema(schema: Mapping[str, Any], root: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """What a JSON schema allows, as far as pydantic uses its words."""
    if "$ref" in schema:
        return of_schema(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return st.one_of([of_schema(branch, root) for branch in schema["anyOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    kind = schema.get("type")
    if kind == "array":
        return st.lists(of_schema(schema.get("items", {}), root), max_size=5)
    if kind == "object" and "properties" in schema:
        return objects(schema, root)
    if kind == "object":
        items = schema.get("additionalProperties")
        items = items if isinstance(items, dict) else {}  # true allows all
        keys = st.one_of(st.integers(0, 2000).map(str), texts())
        return st.dictionaries(keys, of_schema(items, root), max_size=5)
    simple = {
        "string": texts(),
        "integer": integers(),
        "number": numbers(),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    return simple[kind] if kind is not None else values()


def objects(
    schema: Mapping[str, Any], root: Mapping[str, Any]
) -> st.SearchStrategy[dict[str, Any]]:
    """An object with its required fields and up to four others."""
    fields = {name: of_schema(value, root) for name, value in schema["properties"].items()}
    required = {name: fields[name] for name in schema.get("required", ())}
    others = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    )
    return st.tuples(st.fixed_dictionaries(required), others).map(lambda both: both[0] | both[1])


@st.composite
def spoilt(draw: st.DrawFn, source: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    """Draw an object and put, drop, repeat or nest something in up to three places."""
    body = dict(draw(source))
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.one_of(st.sampled_from(sorted(body) or [""]), texts()))
        how = draw(st.integers(0, 3))
        if how == 0:
            body[name] = draw(values())
        elif how == 1:
            body.pop(name, None)
        elif how == 2:
            body[name] = Twice(body.get(name), draw(values()))
        else:
            body[name] = [body.get(name)] * draw(st.sampled_from((1, 2, 100)))
    return body


@st.composite
def encoded(draw: st.DrawFn, source: st.SearchStrategy[Any]) -> bytes:
    """Write JSON as its clients do, or hardly ever."""
    is_ascii = draw(st.booleans())
    text = write(draw(source), is_ascii=is_ascii)
    if draw(st.integers(0, 9)):
        return text.encode("utf-8", "surrogatepass")
    return text.encode(draw(st.sampled_from(ENCODINGS)), "replace")


def bodies(source: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[bytes]:
    """The bytes of bodies: right ones, spoilt ones, and those spoilt in their bytes."""
    whole = encoded(source)
    return st.one_of(
        whole,
        encoded(spoilt(source)),
        mutated(whole, DICTIONARY),
        encoded(values()),
        st.binary(max_size=100),
    )


def write(value: Any, *, is_ascii: bool) -> str:
    """`json.dumps` that takes Raw and Twice."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Mapping):
        return "{" + ",".join(_member(k, v, is_ascii) for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(write(item, is_ascii=is_ascii) for item in value) + "]"
    if isinstance(value, int) and not isinstance(value, bool):
        return _digits(value)
    return json.dumps(value, ensure_ascii=is_ascii)


def _member(name: str, value: Any, is_ascii: bool) -> str:
    if isinstance(value, Twice):
        first = _member(name, value.first, is_ascii)
        return first + "," + _member(name, value.second, is_ascii)
    return json.dumps(name, ensure_ascii=is_ascii) + ":" + write(value, is_ascii=is_ascii)


def _digits(value: int) -> str:
    """Python itself refuses to write more than 4300 digits."""
    assert abs(value) < 10**4000
    return str(value)


def read_strictly(data: bytes) -> Any:
    """Read what a server has sent. Raises ValueError for what JSON does not have, such as NaN."""

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is no JSON")

    value = json.loads(data.decode(), parse_constant=refuse)
    _check_finite(value)
    return value


def _check_finite(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that doubles do not have")
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, dict | list) else ():
        _check_finite(item)
