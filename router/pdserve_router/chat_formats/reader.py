"""Reading text that comes bit by bit: what was read does not depend on where it was cut."""

import functools
import json
import re
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
# A reading in progress: it yields when it needs more text.
Steps = Generator[None, None, T]
Emit = Callable[[str], object]

_HALF = re.compile(r"[\ud800-\udfff]")
# A function's name.
_WORD = re.compile(r"""[^\s\[\]{}<>"`]*""")
MAX_WORD_CHARS = 256
# No more than this is read again of what looked like a call and is none: each could go on to the
# end.
MAX_READ_AGAIN = 4096
# Text is read in slices, as what was read is cut off from what was not.
_SLICE_CHARS = 4096


class Reader:
    """The text so far that was not read yet. Methods that are Steps wait for more of it while what
    they do is not certain; at the end of the text all is.
    """

    __slots__ = ("_is_ended", "_later", "_taken", "_text")

    def __init__(self) -> None:
        self._text = ""
        # Behind that, in slices.
        self._later: deque[str] = deque()
        self._is_ended = False
        # What was read since `mark`.
        self._taken: list[str] | None = None

    @property
    def is_ended(self) -> bool:
        """All text was read, and none comes."""
        return self._is_last and not self._text

    def feed(self, text: str) -> None:
        if len(text) <= _SLICE_CHARS:
            self._later.append(text)
        else:
            self._later.extend(_slices(text))

    def end(self) -> None:
        self._is_ended = True

    def mark(self) -> None:
        """Remember what is read from here on, until `unmark` or `rewind`."""
        self._taken = []

    def unmark(self) -> str:
        """Return what was read since the mark, which stays read: the last mark's."""
        taken = "".join(self._taken or ())
        self._taken = None
        return taken

    def rewind(self, *, at_most: int | None = None) -> str:
        """Put back what was read since the mark. If that is more than so many characters, it stays
        read and is returned.
        """
        assert self._taken is not None, "only behind a mark"
        taken = "".join(self._taken)
        self._taken = None
        if at_most is not None and len(taken) > at_most:
            return taken
        self.put_back(taken)
        return ""

    def put_back(self, text: str) -> None:
        """Undo that this was taken last."""
        if text:
            self._later.extendleft(reversed(_slices(text + self._text)))
            self._text = ""

    def until(self, markers: Sequence[str], emit: Emit) -> Steps[str]:
        """Pass on all text up to the first of the markers, take that too and return it; "" if none
        comes.
        """
        _, marker = yield from self._until(markers, emit, holds_blanks=False)
        return marker

    def until_spaced(self, markers: Sequence[str], emit: Emit) -> Steps[tuple[str, str]]:
        """As `until`, but blank space before the marker is not passed on: return it with that."""
        return (yield from self._until(markers, emit, holds_blanks=True))

    def _until(
        self, markers: Sequence[str], emit: Emit, *, holds_blanks: bool
    ) -> Steps[tuple[str, str]]:
        pattern, starts = _any_of(tuple(markers)), {marker[0] for marker in markers}
        # Blank space that is held back. It is cut off, so that no piece of text is looked at again.
        blanks: list[str] = []
        while True:
            # Most text has neither a marker nor the beginning of one.
            likely = markers if any(start in self._text for start in starts) else ()
            found = pattern.search(self._text) if likely else None
            is_end = found is None and self._is_last
            if found is not None:
                before = self._take(found.start())
            else:
                before = self._take(len(self._text) if is_end else self._num_free(likely))
            text = before.rstrip() if holds_blanks and not is_end else before
            if text or is_end:
                self._pass_on("".join((*blanks, text)), emit)
                blanks.clear()
            if len(text) < len(before):
                blanks.append(before[len(text) :])
            if found is not None:
                return "".join(blanks), self._take(len(found[0]))
            if is_end:
                return "", ""
            if not self._advance():
                yield

    def sees(self, markers: tuple[str, ...], *, or_ends: bool = False) -> Steps[bool]:
        """Return whether blank space and one of the markers come next; `or_ends`: or the text ends
        within these. Nothing is taken.
        """
        blanks, found = yield from self._look_behind_blanks(markers)
        is_within = any(marker.startswith(self._text) for marker in markers)
        self.put_back(blanks)
        return found is not None or (or_ends and is_within)

    def accept(self, marker: str) -> Steps[bool]:
        """Take blank space and the marker if they come next, otherwise nothing."""
        blanks, found = yield from self._look_behind_blanks((marker,))
        if found is None:
            self.put_back(blanks)
            return False
        self._remember(blanks)
        self._take(len(marker))
        return True

    def _look_behind_blanks(self, markers: tuple[str, ...]) -> Steps[tuple[str, str | None]]:
        """Cut off blank space until it is certain which of the markers comes next, None if none
        does. Return both; the marker is not taken.
        """
        blanks: list[str] = []
        while True:
            rest = self._text.lstrip()
            if len(rest) < len(self._text):
                blanks.append(self._text[: len(self._text) - len(rest)])
                self._text = rest
            found = next((marker for marker in markers if rest.startswith(marker)), None)
            may_come = any(marker.startswith(rest) for marker in markers)
            if found is not None or self._is_last or not may_come:
                return "".join(blanks), found
            if not self._advance():
                yield

    def peek(self) -> Steps[str]:
        """Take blank space and return the character behind it, "" at the end."""
        while True:
            self._take(len(self._text) - len(self._text.lstrip()))
            if self._text or self._is_last:
                return self._text[:1]
            if not self._advance():
                yield

    def word(self) -> Steps[str]:
        """Take blank space and what looks like a name, at most MAX_WORD_CHARS."""
        yield from self.peek()
        while True:
            word = _WORD.match(self._text)
            assert word is not None, "it may be empty"
            if word.end() < len(self._text) or self._is_last or word.end() > MAX_WORD_CHARS:
                return self._take(min(word.end(), MAX_WORD_CHARS))
            if not self._advance():
                yield

    def json_value(self, emit: Emit, *, is_strict: bool = False) -> Steps[bool]:
        """Take blank space and pass on a JSON value as it stands. Return whether it has an end; no
        more of it is checked than brackets and quotes. Strict: it has none, and no more of it is
        taken, where outside of strings something stands that is in no JSON.
        """
        yield from self.peek()
        span = _JsonSpan(in_brackets=_STRICT_IN_BRACKETS if is_strict else _IN_BRACKETS)
        while True:
            length = span.scan(self._text)
            self._pass_on(self._take(len(self._text) if length is None else length), emit)
            if length is not None or self._is_last:
                return length is not None and not span.is_broken
            if not self._advance():
                yield

    def json_container(self) -> Steps[str | None]:
        """Take blank space and a JSON array or object and return it as it stands; None for anything
        else, of which no more was taken than looks like the beginning of one.
        """
        if (yield from self.peek()) not in ("[", "{"):
            return None
        span = _JsonSpan(in_brackets=_STRICT_IN_BRACKETS, in_string=_STRICT_IN_STRING)
        pieces: list[str] = []
        while True:
            length = span.scan(self._text)
            pieces.append(self._take(len(self._text) if length is None else length))
            if length is not None or self._is_last:
                text = "".join(pieces)
                is_whole = length is not None and not span.is_broken
                return text if is_whole and is_json(text) else None
            if not self._advance():
                yield

    def json_string(self) -> Steps[str | None]:
        """Take blank space and a JSON string and return what it says; None for anything else."""
        if (yield from self.peek()) != '"':
            return None
        pieces: list[str] = []
        if not (yield from self.json_value(pieces.append)):
            return None
        try:
            return str(json.loads("".join(pieces), strict=False))
        except ValueError:
            return None

    @property
    def _is_last(self) -> bool:
        """Nothing comes behind the text."""
        return self._is_ended and not self._later

    def _advance(self) -> bool:
        """Go on to the next slice, if one is there already."""
        if not self._later:
            return False
        self._text += self._later.popleft()
        return True

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        self._remember(taken)
        return taken

    def _remember(self, taken: str) -> None:
        """For a mark that there may be."""
        if self._taken is not None:
            self._taken.append(taken)

    def _pass_on(self, text: str, emit: Emit) -> None:
        if text:
            emit(text)

    def _num_free(self, markers: Sequence[str]) -> int:
        """Return how much of the text is no beginning of a marker."""
        return len(self._text) - max((_overlap(self._text, m) for m in markers), default=0)


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of the text that begins the marker."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


def _slices(text: str) -> list[str]:
    return [text[start : start + _SLICE_CHARS] for start in range(0, len(text), _SLICE_CHARS)]


@functools.cache
def _any_of(markers: tuple[str, ...]) -> "re.Pattern[str]":
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")


def escape_halves(text: str) -> str:
    """Return JSON without halves of surrogate pairs as themselves, which no encoding has."""
    return _HALF.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def is_json(text: str) -> bool:
    """Return whether a text is JSON and nothing else, also no NaN."""
    try:
        load_json(text)
    except (ValueError, RecursionError):
        return False
    return True


def load_json(text: str, *, parse_float: Callable[[str], Any] = float) -> Any:
    """Return what a text says. Raises ValueError or RecursionError if it is no JSON, and what
    `parse_float` raises.
    """
    return json.loads(text, parse_float=parse_float, parse_constant=_refuse)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


_IN_STRING = re.compile(r'["\\]')
_IN_BRACKETS = re.compile(r'["{}\[\]]')
_BEHIND_SCALAR = re.compile(r"[,}\]\s]")
# With what is in no JSON there: outside of strings it has numbers, true, false and null, so that
# no format's marker passes.
_STRICT_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_STRICT_IN_BRACKETS = re.compile(r"[^\s0-9+\-.:,eEtrufalsn]")
_STRICT_BEHIND_SCALAR = re.compile(r"[^0-9+\-.eEtrufalsn]")


class _JsonSpan:
    """Finds the end of a JSON value in text that comes bit by bit."""

    __slots__ = (
        "_behind_scalar",
        "_depth",
        "_in_brackets",
        "_in_string",
        "_is_begun",
        "_is_escaped",
        "_is_string",
        "is_broken",
    )

    def __init__(
        self,
        *,
        in_brackets: "re.Pattern[str]" = _IN_BRACKETS,
        in_string: "re.Pattern[str]" = _IN_STRING,
    ) -> None:
        """What matters in both: what is neither bracket, quote nor escape is in no JSON there."""
        is_strict = in_brackets is _STRICT_IN_BRACKETS
        self._in_string = in_string
        self._in_brackets = in_brackets
        self._behind_scalar = _STRICT_BEHIND_SCALAR if is_strict else _BEHIND_SCALAR
        self._is_begun = False
        self._is_string = False
        self._is_escaped = False
        self._depth = 0
        # Something is in no JSON.
        self.is_broken = False

    def scan(self, text: str) -> int | None:
        """Return how many characters of the next bit belong to it, up to its end or to what is in
        no JSON; None: all, and it goes on.
        """
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
            elif (end := self._next(text, at)) is None:
                return None
            elif self._is_over(text[end]):
                return end if self._is_scalar or self.is_broken else end + 1
            else:
                at = end + 1
        return None

    @property
    def _is_scalar(self) -> bool:
        return self._is_begun and not self._is_string and self._depth < 0

    def _next(self, text: str, at: int) -> int | None:
        """Return the place of the next character that matters."""
        if not self._is_begun:
            self._is_begun = True
            # A number or a word ends before a character that is none of it.
            self._depth = 0 if text[at] in '{["' else -1
        pattern = self._in_string if self._is_string else self._in_brackets
        found = (self._behind_scalar if self._is_scalar else pattern).search(text, at)
        return None if found is None else found.start()

    def _is_over(self, character: str) -> bool:
        if self._is_scalar:
            self.is_broken = _BEHIND_SCALAR.match(character) is None
            return True
        if self._is_string:
            self._is_escaped = character == "\\"
            self._is_string = character != '"'
            self.is_broken = character < " "
        elif character == '"':
            self._is_string = True
        elif character in "{}[]":
            self._depth += 1 if character in "{[" else -1
        else:
            self.is_broken = True
        return self.is_broken or (self._depth == 0 and not self._is_string)
