"""Reading text that comes bit by bit: what was read does not depend on where it was cut."""

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
# A reading in progress: it yields when it needs more text.
Steps = Generator[None, None, T]
Emit = Callable[[str], object]

# A function's name, or a parameter's.
_WORD = re.compile(r"""[^\s\[\]{}<>"`]*""")
MAX_WORD_CHARS = 256


class Reader:
    """The text so far that was not read yet. Methods that are Steps wait for more of it while what
    they do is not certain; at the end of the text all is.
    """

    __slots__ = ("_is_ended", "_taken", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._is_ended = False
        # What was read since `mark`.
        self._taken: list[str] | None = None

    @property
    def is_ended(self) -> bool:
        """All text was read, and none comes."""
        return self._is_ended and not self._text

    def feed(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        self._is_ended = True

    def mark(self) -> None:
        """Remember what is read from here on, for `since_mark`, until `unmark`."""
        self._taken = []

    def unmark(self) -> None:
        self._taken = None

    def since_mark(self) -> str:
        """Return what was read since the mark, and take that away."""
        assert self._taken is not None, "only behind a mark"
        taken = "".join(self._taken)
        self._taken = None
        return taken

    def put_back(self, text: str) -> None:
        """Undo that this was taken last."""
        self._text = text + self._text
        if self._taken is not None:
            self._taken.append("")
            self._taken = ["".join(self._taken).removesuffix(text)]

    def until(
        self, markers: Sequence[str], emit: Emit, *, holds_blanks: bool = False
    ) -> Steps[str]:
        """Pass on all text up to the first of the markers, take that too and return it; "" if none
        comes. With `holds_blanks` blank space before a marker is dropped.
        """
        starts = {marker[0] for marker in markers}
        while True:
            # Of most text neither a marker nor the beginning of one.
            likely = markers if any(start in self._text for start in starts) else ()
            found = [(at, m) for m in likely if (at := self._text.find(m)) >= 0]
            if found:
                at, marker = min(found)
                before = self._take(at)
                self._take(len(marker))
                self._pass_on(before.rstrip() if holds_blanks else before, emit)
                return marker
            if self._is_ended:
                self._pass_on(self._take(len(self._text)), emit)
                return ""
            self._pass_on(self._take(self._num_free(likely, holds_blanks)), emit)
            yield

    def accept(self, marker: str) -> Steps[bool]:
        """Take blank space and the marker if they come next, otherwise nothing."""
        while True:
            rest = self._text.lstrip()
            if rest.startswith(marker):
                self._take(len(self._text) - len(rest) + len(marker))
                return True
            if self._is_ended or not marker.startswith(rest):
                return False
            yield

    def peek(self) -> Steps[str]:
        """Take blank space and return the character behind it, "" at the end."""
        while True:
            self._take(len(self._text) - len(self._text.lstrip()))
            if self._text or self._is_ended:
                return self._text[:1]
            yield

    def word(self) -> Steps[str]:
        """Take blank space and what looks like a name, at most MAX_WORD_CHARS."""
        yield from self.peek()
        while True:
            word = _WORD.match(self._text)
            assert word is not None, "it may be empty"
            if word.end() < len(self._text) or self._is_ended or word.end() > MAX_WORD_CHARS:
                return self._take(min(word.end(), MAX_WORD_CHARS))
            yield

    def json_value(self, emit: Emit) -> Steps[bool]:
        """Take blank space and pass on a JSON value as it stands. Return whether it has an end; no
        more of it is checked than brackets and quotes.
        """
        yield from self.peek()
        span = _JsonSpan()
        while True:
            length = span.scan(self._text)
            self._pass_on(self._take(len(self._text) if length is None else length), emit)
            if length is not None or self._is_ended:
                return length is not None
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

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        if self._taken is not None:
            self._taken.append(taken)
        return taken

    def _pass_on(self, text: str, emit: Emit) -> None:
        if text:
            emit(text)

    def _num_free(self, markers: Sequence[str], holds_blanks: bool) -> int:
        """Return how much of the text is no beginning of a marker."""
        free = len(self._text) - max((_overlap(self._text, m) for m in markers), default=0)
        return len(self._text[:free].rstrip()) if holds_blanks else free


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of the text that begins the marker."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


_IN_STRING = re.compile(r'["\\]')
_IN_BRACKETS = re.compile(r'["{}\[\]]')
_BEHIND_SCALAR = re.compile(r"[,}\]\s]")


class _JsonSpan:
    """Finds the end of a JSON value in text that comes bit by bit."""

    __slots__ = ("_depth", "_is_begun", "_is_escaped", "_is_string")

    def __init__(self) -> None:
        self._is_begun = False
        self._is_string = False
        self._is_escaped = False
        self._depth = 0

    def scan(self, text: str) -> int | None:
        """Return how many characters of the next bit belong to it; None: all, and it goes on."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
            elif (end := self._next(text, at)) is None:
                return None
            elif self._is_over(text[end]):
                return end if self._is_scalar else end + 1
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
        pattern = _IN_STRING if self._is_string else _IN_BRACKETS
        found = (_BEHIND_SCALAR if self._is_scalar else pattern).search(text, at)
        return None if found is None else found.start()

    def _is_over(self, character: str) -> bool:
        if self._is_scalar:
            return True
        if self._is_string:
            self._is_escaped = character == "\\"
            self._is_string = self._is_escaped
        elif character == '"':
            self._is_string = True
        else:
            self._depth += 1 if character in "{[" else -1
        return self._depth == 0 and not self._is_string
