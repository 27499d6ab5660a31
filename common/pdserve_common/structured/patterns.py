"""Regular expressions of clients, as far as they mean the same everywhere.

A pattern is parsed into a tree of sets of characters and written anew (`pattern_text`), with
nothing left to the taste of an engine. The syntax is what ECMA-262 and Python have in common,
without assertions other than ^ and $ at the ends, back references and flags. Where the two differ
about a set (\\d of Python has all of Unicode's digits), the tree has what both hold.
"""

import bisect
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

MAX_PATTERN_CHARS = 1024
# Sets of characters after repetitions are written out: an automaton has about as many states.
MAX_PATTERN_SIZE = 512
MAX_GROUP_DEPTH = 32
# A repetition's bounds are at most this.
MAX_REPEATS = 1_000_000

# Sorted, apart from each other, both ends included.
Ranges: TypeAlias = tuple[tuple[int, int], ...]


class PatternError(ValueError):
    """A pattern is malformed, uses what is not known here, or is too large."""


class Chars(NamedTuple):
    """One character of a set."""

    ranges: Ranges


class Cat(NamedTuple):
    """One after the other; empty text if there are none."""

    parts: "tuple[Node, ...]"


class Alt(NamedTuple):
    """One of several."""

    options: "tuple[Node, ...]"


class Repeat(NamedTuple):
    """`low` to `high` times; any number if that is None."""

    part: "Node"
    low: int
    high: int | None


class Anchor(NamedTuple):
    """^ or $."""

    char: str


Node: TypeAlias = Chars | Cat | Alt | Repeat | Anchor

EMPTY = Cat(())
_LAST = 0x10FFFF
# Everything that UTF-8 can say, but NUL.
UNICODE: Ranges = ((1, 0xD7FF), (0xE000, _LAST))
# What stands in a JSON string as itself.
JSON_CHARS: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, _LAST))


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    result, start = [], 0
    for low, high in ranges:
        if low > start:
            result.append((start, low - 1))
        start = high + 1
    return (*result, (start, _LAST)) if start <= _LAST else tuple(result)


def intersection(left: Ranges, right: Ranges) -> Ranges:
    return complement(union(complement(left), complement(right)))


def chars_of(text: str) -> Ranges:
    return union((ord(char), ord(char)) for char in text)


class _Set(NamedTuple):
    """What every dialect has in a set, and what some dialect has in it."""

    narrow: Ranges
    wide: Ranges

    def inverted(self) -> "_Set":
        return _Set(complement(self.wide), complement(self.narrow))


def _same(ranges: Ranges) -> _Set:
    return _Set(ranges, ranges)


_ABOVE_ASCII: Ranges = ((0x80, _LAST),)
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD = union(_DIGITS, ((0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)))
_SPACE = chars_of(" \t\n\v\f\r")
_SOME_SPACE = union(
    _SPACE,
    ((0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x180E, 0x180E)),
    ((0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F)),
    ((0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_CLASSES = {
    "d": _Set(_DIGITS, union(_DIGITS, _ABOVE_ASCII)),
    "w": _Set(_WORD, union(_WORD, _ABOVE_ASCII)),
    "s": _Set(_SPACE, _SOME_SPACE),
}
_CLASSES |= {letter.upper(): known.inverted() for letter, known in _CLASSES.items()}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_DOT = complement(chars_of("\n\r\u2028\u2029"))
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")
_GROUP = re.compile(r"\(\?(?::|P?<[A-Za-z_][A-Za-z0-9_]*>)")
_COUNT = re.compile(r"\{([0-9]{1,9})(?:(,)([0-9]{1,9})?)?\}")
_QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse(text: str) -> Node:
    """Return the tree of a pattern. Raises PatternError."""
    if len(text) > MAX_PATTERN_CHARS:
        raise PatternError(f"has {len(text)} characters, at most {MAX_PATTERN_CHARS}")
    parser = _Parser(text)
    node = parser.choice(depth=0)
    if parser.at < len(text):
        raise PatternError(f"has a ) without a ( at {parser.at}")
    return node


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    @property
    def _next(self) -> str:
        return self.text[self.at : self.at + 1]

    def _take(self, expression: "re.Pattern[str]") -> "re.Match[str] | None":
        match = expression.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match

    def _refuse(self, what: str) -> PatternError:
        return PatternError(f"has {what} at {self.at}, which is not enforced")

    def choice(self, *, depth: int) -> Node:
        if depth > MAX_GROUP_DEPTH:
            raise PatternError(f"has groups {depth} deep, at most {MAX_GROUP_DEPTH}")
        options = [self._sequence(depth)]
        while self._next == "|":
            self.at += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self, depth: int) -> Node:
        parts = []
        while self._next not in ("", "|", ")"):
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Cat(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        bounds = self._bounds()
        if bounds is None:
            return node
        if isinstance(node, Anchor):
            raise self._refuse(f"a repeated {node.char}")
        if self._next == "?":  # lazy: the same texts
            self.at += 1
        if self._next in ("*", "+", "?", "{"):
            raise self._refuse(f"{self._next} behind a repetition")
        return self._repeat(node, *bounds)

    def _repeat(self, node: Node, low: int, high: int | None) -> Node:
        """Refuses what takes a parser of grammars a time that grows with the text's cube."""
        if high == 0:
            return EMPTY
        if isinstance(node, Repeat) and node.low <= 1 and (node.high in (1, None) or high is None):
            is_endless = None in (node.high, high)
            return Repeat(node.part, low * node.low, None if is_endless else high)
        if high != 1 and not shortest(node):
            raise self._refuse("a repetition of what may be empty")
        return Repeat(node, low, high)

    def _bounds(self) -> tuple[int, int | None] | None:
        if self._next in _QUANTIFIERS:
            self.at += 1
            return _QUANTIFIERS[self.text[self.at - 1]]
        if (match := self._take(_COUNT)) is None:
            return None
        low = int(match[1])
        high = low if match[2] is None else None if match[3] is None else int(match[3])
        if max(low, high or 0) > MAX_REPEATS:
            raise PatternError(f"repeats {max(low, high or 0)} times, at most {MAX_REPEATS}")
        if high is not None and high < low:
            raise PatternError(f"repeats {low} to {high} times, which is never")
        return low, high

    def _atom(self, depth: int) -> Node:
        char = self._next
        if char == "(":
            return self._group(depth)
        if char == "[":
            return Chars(self._class().narrow)
        if char == "\\":
            return Chars(self._escape(in_class=False).narrow)
        if char in ("*", "+", "?", "{", "}", "]"):
            raise self._refuse(f"a {char} that stands for nothing")
        self.at += 1
        if char in ("^", "$"):
            return Anchor(char)
        return Chars(_DOT if char == "." else chars_of(char))

    def _group(self, depth: int) -> Node:
        if self.text.startswith("(?", self.at):
            if self._take(_GROUP) is None:
                raise self._refuse(f"{self.text[self.at : self.at + 4]}")
        else:
            self.at += 1
        node = self.choice(depth=depth + 1)
        if self._next != ")":
            raise PatternError(f"has a ( without a ) at {self.at}")
        self.at += 1
        return node

    def _class(self) -> _Set:
        self.at += 1
        is_negated = self._next == "^"
        self.at += is_negated
        if self._next == "]":
            raise self._refuse("an empty class")
        narrow, wide = [], []
        while self._next != "]":
            item = self._class_item()
            narrow.append(item.narrow)
            wide.append(item.wide)
        self.at += 1
        found = _Set(union(*narrow), union(*wide))
        return found.inverted() if is_negated else found

    def _class_item(self) -> _Set:
        low = self._class_char()
        if self._next != "-" or self.text[self.at + 1 : self.at + 2] in ("]", ""):
            return low
        self.at += 1
        high = self._class_char()
        ends = low.narrow + high.narrow
        if any(
            end.narrow != end.wide or end.narrow[0][0] != end.narrow[-1][1] for end in (low, high)
        ):
            raise self._refuse("a range between sets")
        if ends[0][0] > ends[1][0]:
            raise PatternError(f"has a range that goes backwards at {self.at}")
        return _same(((ends[0][0], ends[1][0]),))

    def _class_char(self) -> _Set:
        if not self._next:
            raise PatternError("has a [ without a ]")
        if self._next == "\\":
            return self._escape(in_class=True)
        self.at += 1
        return _same(chars_of(self.text[self.at - 1]))

    def _escape(self, *, in_class: bool) -> _Set:
        self.at += 1
        if (match := self._take(_HEX)) is not None:
            code = int(match[1] or match[2], 16)
            if 0xD800 <= code <= 0xDFFF:
                raise PatternError(f"has \\{match[0]}, which is no character")
            return _same(((code, code),))
        char = self._next
        if char in _CLASSES:
            self.at += 1
            return _CLASSES[char]
        if char in _CONTROLS:
            self.at += 1
            return _same(chars_of(_CONTROLS[char]))
        if char == "b" and in_class:
            self.at += 1
            return _same(chars_of("\b"))
        if not char or char.isalnum() or char.isspace() or char == "_":
            raise self._refuse(f"\\{char}")
        self.at += 1
        return _same(chars_of(char))


def whole(node: Node) -> Node:
    """The tree of texts that match from end to end; ^ and $ there say nothing new."""
    return _bounded(node, EMPTY, EMPTY)


def found_in(node: Node) -> Node:
    """The tree of texts in which the pattern is found somewhere."""
    anything = Repeat(Chars(UNICODE), 0, None)
    return _bounded(node, anything, anything)


def _bounded(node: Node, before: Node, behind: Node) -> Node:
    """Without anchors, but with what stands at an end that has none. Raises PatternError."""
    if isinstance(node, Alt):
        return Alt(tuple(_bounded(option, before, behind) for option in node.options))
    parts = node.parts if isinstance(node, Cat) else (node,)
    if parts[:1] == (Anchor("^"),):
        parts, before = parts[1:], EMPTY
    if parts[-1:] == (Anchor("$"),):
        parts, behind = parts[:-1], EMPTY
    if not any(map(_has_anchor, parts)):
        return Cat((before, *parts, behind))
    if len(parts) > 1 or not isinstance(parts[0], Cat | Alt):
        raise PatternError("has ^ or $ in the middle, which is not enforced")
    return _bounded(parts[0], before, behind)


def _has_anchor(node: Node) -> bool:
    if isinstance(node, Repeat):
        return _has_anchor(node.part)
    if isinstance(node, Cat | Alt):
        return any(map(_has_anchor, node[0]))
    return isinstance(node, Anchor)


def restrict(node: Node, ranges: Ranges) -> Node | None:
    """The tree with these characters only; None if no text is left."""
    if isinstance(node, Chars):
        chars = intersection(node.ranges, ranges)
        return Chars(chars) if chars else None
    if isinstance(node, Repeat):
        part = restrict(node.part, ranges)
        if part is None:
            return None if node.low else EMPTY
        return Repeat(part, node.low, node.high)
    if isinstance(node, Alt):
        options = [
            left for option in node.options if (left := restrict(option, ranges)) is not None
        ]
        return Alt(tuple(options)) if options else None
    if isinstance(node, Cat):
        parts = [restrict(part, ranges) for part in node.parts]
        return None if None in parts else Cat(tuple(part for part in parts if part is not None))
    raise PatternError("has ^ or $ in the middle, which is not enforced")


def size(node: Node) -> int:
    """Sets of characters with repetitions written out."""
    if isinstance(node, Repeat):
        return max(1, size(node.part)) * max(1, node.low if node.high is None else node.high)
    if isinstance(node, Cat | Alt):
        return sum(map(size, node[0]))
    return 1


def check_size(node: Node) -> None:
    """Raise PatternError for one of which an automaton would be too large."""
    if (num_sets := size(node)) > MAX_PATTERN_SIZE:
        raise PatternError(
            f"has {num_sets} characters with repetitions written out, at most {MAX_PATTERN_SIZE}"
        )


def shortest(node: Node) -> int:
    """Characters of the shortest text."""
    if isinstance(node, Repeat):
        return shortest(node.part) * node.low
    if isinstance(node, Alt):
        return min(map(shortest, node.options))
    return sum(map(shortest, node.parts)) if isinstance(node, Cat) else 1


def longest(node: Node) -> int | None:
    """Characters of the longest text; None if there is no such."""
    if isinstance(node, Repeat):
        part = longest(node.part)
        if part == 0 or node.high == 0:
            return 0
        return None if part is None or node.high is None else part * node.high
    if isinstance(node, Chars | Anchor):
        return 1
    lengths = [longest(part) for part in node[0]]
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return None
    return max(known) if isinstance(node, Alt) else sum(known)


def parts(node: Node) -> tuple[Node, ...]:
    assert isinstance(node, Cat | Alt), "anchors are gone"
    return node[0]


def literal(text: str) -> Node:
    return Cat(tuple(Chars(chars_of(char)) for char in text))


def all_but(words: Sequence[str]) -> Node:
    """The tree of all texts of JSON_CHARS that are none of the words."""
    return _all_but(sorted(set(words)))


def _all_but(words: Sequence[str]) -> Node:
    """`words` are sorted. One level of their trie."""
    rest = Repeat(Chars(JSON_CHARS), 0, None)
    first = sorted({word[0] for word in words if word})
    options: list[Node] = [] if "" in words else [EMPTY]
    if other := intersection(JSON_CHARS, complement(chars_of("".join(first)))):
        options.append(Cat((Chars(other), rest)))
    for char in first:
        low = bisect.bisect_left(words, char)
        behind = [word[1:] for word in words[low:] if word.startswith(char)]
        options.append(Cat((Chars(chars_of(char)), _all_but(behind))))
    return Alt(tuple(options))


def match(node: Node, text: str, *, max_steps: int) -> tuple[bool | None, int]:
    """Return whether a tree without anchors matches a text from end to end, None if that takes more
    steps, and how many it took: none of them is gone back.
    """
    steps = _Steps(text, max_steps)
    try:
        return len(text) in steps.ends(node, {0}), steps.num_steps
    except PatternError:
        return None, steps.num_steps


class _Steps:
    """Where a text may be left by a part of a tree, of all ways at once."""

    def __init__(self, text: str, max_steps: int) -> None:
        self._codes = [*map(ord, text)]
        self._max_steps = max_steps
        self.num_steps = 0

    def ends(self, node: Node, starts: set[int]) -> set[int]:
        self.num_steps += 1 + len(starts)
        if self.num_steps > self._max_steps:
            raise PatternError("takes too many steps")
        if isinstance(node, Chars):
            return {at + 1 for at in starts if at < len(self._codes) and self._is_in(at, node)}
        if isinstance(node, Cat):
            for part in node.parts:
                starts = self.ends(part, starts) if starts else starts
            return starts
        if isinstance(node, Alt):
            return set().union(*(self.ends(option, starts) for option in node.options))
        assert isinstance(node, Repeat), "anchors are gone"
        return self._repeated(node, starts)

    def _repeated(self, node: Repeat, starts: set[int]) -> set[int]:
        ends = set(starts) if node.low == 0 else set()
        number, new = 0, starts
        while new and number != node.high:
            number += 1
            found = self.ends(node.part, new)
            new = found if number < node.low else found - ends
            ends |= found if number >= node.low else set()
        return ends

    def _is_in(self, at: int, node: Chars) -> bool:
        code = self._codes[at]
        index = bisect.bisect_right(node.ranges, (code, _LAST)) - 1
        return index >= 0 and code <= node.ranges[index][1]
