"""Grammars of clients in GBNF, read and written anew: what reaches xgrammar is GBNF and no more.

xgrammar's own grammars have look-ahead, macros and attributes of rules besides. It keeps some of
them only where a grammar is compiled for speed, and lets classes match halves of surrogate pairs.
"""

import functools
import itertools
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from pdserve_common.structured.pattern_text import MAX_WRITTEN_OUT, ordered
from pdserve_common.structured.patterns import (
    Ranges,
    complement,
    intersection,
    union,
)

# Groups lie at most so deep within each other.
MAX_DEPTH = 64
_ROOT = "root"
# What UTF-8 can say.
_CHARACTERS: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))

_TOKEN = re.compile(
    r"""
      (?P<space>(?:[ \t\r\n]|\#[^\r\n]*)+)
    | (?P<name>[A-Za-z_-][A-Za-z0-9_.-]*)
    | (?P<assign>::=)
    | (?P<text>"(?:\\.|[^"\\\r\n])*")
    | (?P<set>\[(?:\\.|[^]\\\r\n])*\])
    | (?P<count>\{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\})
    | (?P<symbol>[()|*+?.](?!=))
    """,
    re.VERBOSE,
)
_CHAR = re.compile(
    r"\\x(?P<x>[0-9A-Fa-f]{2})|\\u(?P<u>[0-9A-Fa-f]{4})|\\U(?P<U>[0-9A-Fa-f]{8})"
    r"|\\(?P<named>[abefnrtv0])|\\(?P<plain>[]['\"?\\/^$.*+(){}|-])|(?P<itself>[^\\])",
    re.DOTALL,
)
_NAMED = {"a": 7, "b": 8, "e": 27, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "0": 0}
_QUANTIFIERS: Mapping[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class GrammarError(ValueError):
    """A grammar is malformed, or has what is not enforced."""


class _Token(NamedTuple):
    kind: str
    text: str
    line: int
    # The first one of its line.
    is_first: bool


class _Text(NamedTuple):
    codes: tuple[int, ...]


class _Set(NamedTuple):
    ranges: Ranges


class _Ref(NamedTuple):
    name: str


class _Group(NamedTuple):
    options: "_Options"


class _Repeated(NamedTuple):
    """`low` to `high` times; any number if that is None."""

    part: "_Text | _Set | _Ref | _Group"
    low: int = 1
    high: int | None = 1


_Options: TypeAlias = "list[list[_Repeated]]"


def normalized(text: str) -> str:
    """Return the grammar that says the same, in printable ASCII; its rules are named by their order
    from the root on, and those that nothing uses are left out. Raises GrammarError.
    """
    return _Writer(_Parser(text).rules()).write()


def _tokens(text: str) -> Iterator[_Token]:
    at, line, is_first = 0, 1, True
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            yield _Token("unknown", "(=" if text.startswith("(=", at) else text[at], line, False)
            return
        at = match.end()
        if match.lastgroup == "space":
            num_lines = len(re.findall(r"\r\n?|\n", match[0]))
            line += num_lines
            is_first = is_first or num_lines > 0
            continue
        assert match.lastgroup is not None
        yield _Token(match.lastgroup, match[0], line, is_first)
        is_first = False
    yield _Token("end", "its end", line, True)


class _Parser:
    """Recursive descent over one grammar."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0
        self._names = {
            token.text
            for token, following in itertools.pairwise(self._tokens)
            if token.kind == "name" and following.kind == "assign"
        }

    def rules(self) -> dict[str, _Options]:
        rules: dict[str, _Options] = {}
        while self._next.kind != "end":
            name = self._take("name", "the name of a rule")
            self._take("assign", "::=")
            if name.text in rules:
                raise GrammarError(f"defines {name.text} again in line {name.line}")
            if not name.is_first:
                raise GrammarError(f"defines {name.text} within line {name.line}")
            rules[name.text] = self._options(0)
            if self._next.kind != "end" and not self._is_at_rule:
                raise self._refuse()
        if _ROOT not in rules:
            raise GrammarError(f"has no rule {_ROOT}")
        return rules

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    @property
    def _is_at_rule(self) -> bool:
        return self._next.kind == "name" and self._tokens[self._at + 1].kind == "assign"

    def _take(self, kind: str, expected: str) -> _Token:
        token = self._next
        if token.kind != kind:
            raise GrammarError(
                f"has {_shown(token.text)} in line {token.line}, where {expected} is expected"
            )
        self._at += 1
        return token

    def _takes(self, symbol: str) -> bool:
        is_next = self._next.kind == "symbol" and self._next.text == symbol
        self._at += is_next
        return is_next

    def _refuse(self) -> GrammarError:
        return GrammarError(
            f"has {_shown(self._next.text)} in line {self._next.line}, which is not enforced"
        )

    def _options(self, depth: int) -> _Options:
        if depth > MAX_DEPTH:
            raise GrammarError(f"has groups {depth} deep, at most {MAX_DEPTH}")
        options = [self._sequence(depth)]
        while self._takes("|"):
            options.append(self._sequence(depth))
        return options

    def _sequence(self, depth: int) -> list[_Repeated]:
        parts = [self._repeated(depth)]
        while self._next.kind != "end" and not self._is_at_rule:
            if self._next.kind == "symbol" and self._next.text in "|)":
                break
            parts.append(self._repeated(depth))
        return parts

    def _repeated(self, depth: int) -> _Repeated:
        part = self._element(depth)
        token = self._next
        if token.kind == "count":
            self._at += 1
            return _Repeated(part, *_bounds(token))
        if token.kind == "symbol" and token.text in _QUANTIFIERS:
            self._at += 1
            return _Repeated(part, *_QUANTIFIERS[token.text])
        return _Repeated(part)

    def _element(self, depth: int) -> _Text | _Set | _Ref | _Group:
        token = self._next
        if token.kind == "text":
            self._at += 1
            return _Text(tuple(_text_codes(token)))
        if token.kind == "set":
            self._at += 1
            return _Set(_ranges(token))
        if token.kind == "name" and not self._is_at_rule:
            self._at += 1
            return _Ref(self._defined(token))
        if self._takes("."):
            return _Set(_CHARACTERS)
        if self._takes("("):
            if self._takes(")"):
                return _Text(())
            group = _Group(self._options(depth + 1))
            if not self._takes(")"):
                raise GrammarError(f"has a ( without a ) in line {self._next.line}")
            return group
        if token.kind in ("name", "end"):
            raise GrammarError(
                f"has {token.text} in line {token.line}, where something is expected"
            )
        raise self._refuse()

    def _defined(self, token: _Token) -> str:
        if token.text in self._names:
            return token.text
        if self._takes("("):
            raise GrammarError(
                f"has {_shown(token.text)}(...) in line {token.line}, which is not enforced"
            )
        raise GrammarError(
            f"uses {_shown(token.text)} in line {token.line}, a rule that is not defined"
        )


def _bounds(token: _Token) -> tuple[int, int | None]:
    low, comma, high = (part.strip() for part in token.text[1:-1].partition(","))
    for digits in (low, high):
        if len(digits.lstrip("0")) > 9 or int(digits or "0") > MAX_WRITTEN_OUT:
            raise GrammarError(
                f"repeats {digits[:20]} times, at most {MAX_WRITTEN_OUT} are enforced"
            )
    bounds = int(low), int(high) if high else None if comma else int(low)
    if bounds[1] is not None and bounds[1] < bounds[0]:
        raise GrammarError(f"repeats {low} to {high} times in line {token.line}, which is never")
    return bounds


def _text_codes(token: _Token) -> Iterator[int]:
    for spelled, code in _chars(token.text[1:-1], token):
        if not intersection(((code, code),), _CHARACTERS):
            raise GrammarError(f"has {_shown(spelled)} in line {token.line}, which is no character")
        yield code


def _ranges(token: _Token) -> Ranges:
    inner = token.text[1:-1]
    is_negated = inner.startswith("^")
    chars = list(_chars(inner[is_negated:], token))
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(chars):
        is_range = at + 2 < len(chars) and chars[at + 1][0] == "-"
        low, high = chars[at][1], chars[at + 2 * is_range][1]
        if high < low:
            raise GrammarError(f"has a range that goes backwards in line {token.line}")
        found.append((low, high))
        at += 1 + 2 * is_range
    ranges = union(found)
    ranges = intersection(complement(ranges) if is_negated else ranges, _CHARACTERS)
    if not ranges:
        raise GrammarError(f"has {_shown(token.text)} in line {token.line}, which is no character")
    return ranges


def _chars(text: str, token: _Token) -> Iterator[tuple[str, int]]:
    """Yield characters as they are spelled, and as they are meant."""
    at = 0
    while at < len(text):
        match = _CHAR.match(text, at)
        if match is None:
            raise GrammarError(
                f"has {_shown(text[at : at + 2])} in line {token.line}, which is not enforced"
            )
        kind, value = match.lastgroup, match[match.lastgroup or 0]
        if kind in ("x", "u", "U"):
            yield match[0], int(value, 16)
        else:
            yield match[0], _NAMED[value] if kind == "named" else ord(value)
        at = match.end()


class _Writer:
    """Writes rules in the order in which they are first used."""

    def __init__(self, rules: Mapping[str, _Options]) -> None:
        self._rules = rules
        self._names = {_ROOT: _ROOT}
        self._waiting = deque((_ROOT,))

    def write(self) -> str:
        lines = []
        while self._waiting:
            name = self._waiting.popleft()
            lines.append(f"{self._names[name]} ::= {self._options(self._rules[name])}\n")
        return "".join(lines)

    def _options(self, options: _Options) -> str:
        return " | ".join(" ".join(map(self._repeated, parts)) for parts in options)

    def _repeated(self, repeated: _Repeated) -> str:
        part, low, high = repeated
        if high == 0:
            return '""'
        text = self._element(part)
        if (low, high) == (1, 1):
            return text
        for symbol, bounds in _QUANTIFIERS.items():
            if bounds == (low, high):
                return text + symbol
        return f"{text}{{{low},{'' if high is None else high}}}"

    def _element(self, part: _Text | _Set | _Ref | _Group) -> str:
        if isinstance(part, _Text):
            return f'"{_spelled(part.codes)}"'
        if isinstance(part, _Set):
            return _set_text(part.ranges)
        if isinstance(part, _Group):
            return f"({self._options(part.options)})"
        if part.name not in self._names:
            self._names[part.name] = f"rule{len(self._names)}"
            self._waiting.append(part.name)
        return self._names[part.name]


@functools.lru_cache(256)
def _set_text(ranges: Ranges) -> str:
    low, high = ranges[0]
    if len(ranges) == 1 and low == high:
        return f'"{_spelled((low,))}"'
    return f"[{''.join(_range_text(*pair) for pair in ordered(ranges))}]"


def _range_text(low: int, high: int) -> str:
    return _spelled((low,)) if low == high else f"{_spelled((low,))}-{_spelled((high,))}"


def _spelled(codes: Sequence[int]) -> str:
    return "".join(map(_spell, codes))


def _spell(code: int) -> str:
    char = chr(code)
    if char == " " or (code < 0x80 and char.isalnum()):
        return char
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _shown(text: str) -> str:
    """Return what stands in a grammar as an error tells it."""
    return text[:40].encode("unicode_escape").decode() if not text.isprintable() else text[:40]
