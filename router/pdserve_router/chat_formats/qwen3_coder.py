"""Qwen3-Coder: a call as XML, each parameter in an element of its own."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from pdserve_common.structured.tags import MAX_WHITESPACE
from pdserve_common.structured.values import Values, type_of
from pdserve_router.chat_formats.base import Answer, ChatFormat
from pdserve_router.chat_formats.reader import Reader, Steps, escape_halves, load_json
from pdserve_router.chat_formats.tags import CallRules, Tag, calls

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
# A value ends with _PARAMETER_END before one of these. The grammar lets none pass within text.
_BEHIND_VALUE = (_PARAMETER, _FUNCTION_END, _CALL_END)
# Where a value ends whose own end is missing.
_IMPLIED_ENDS = (f"\n{_PARAMETER}", f"\n{_FUNCTION_END}")
# So much behind such an end is looked at again.
_MAX_IMPLIED_CHARS = 16_384


class Qwen3Coder(ChatFormat):
    """<tool_call>
    <function=f>
    <parameter=x>
    1
    </parameter>
    </function>
    </tool_call>

    <tool_call> may be missing, and </parameter> in the last calls of an answer. A value is JSON or
    text, as the tool's schema says.
    """

    name = "qwen3_coder"
    triggers = (_CALL, _FUNCTION)
    inner_markers = (_CALL_END,)
    arguments_style = "qwen_xml"

    def matches(self, template: str) -> bool:
        return _FUNCTION in template and _PARAMETER in template

    def call_tag(self, rules: CallRules) -> Tag:
        return calls(
            rules,
            begin=f"{_CALL}\n{_FUNCTION}",
            behind_name=">\n",
            # Behind the line break that a parameter may have.
            end=f"{_FUNCTION_END}\n{_CALL_END}",
            separator="\n",
            style=self.arguments_style,
        )

    def read_call(self, reader: Reader, answer: Answer, trigger: str) -> Steps[bool]:
        if trigger == _CALL and not (yield from reader.accept(_FUNCTION)):
            return False
        name = yield from reader.word()
        if name not in answer.options.tools or not (yield from reader.accept(">")):
            return False
        if not (yield from reader.sees((_PARAMETER, _FUNCTION_END))):
            return False
        answer.begin_call(name)
        answer.arguments("{")
        parameters = _Parameters(reader, answer, answer.parameters_of(name))
        is_whole = yield from parameters.read()
        if is_whole or not reader.is_ended:
            answer.arguments("}")
        yield from reader.accept(_CALL_END)
        return True


class _Parameters:
    """Those of one call."""

    def __init__(self, reader: Reader, answer: Answer, values: Values) -> None:
        self._reader = reader
        self._answer = answer
        self._values = values

    def read(self) -> Steps[bool]:
        """Return whether all came."""
        separator = ""
        while (yield from self._reader.accept(_PARAMETER)):
            pieces: list[str] = []
            end = yield from self._reader.until(("<", ">"), pieces.append)
            name = "".join(pieces)
            if end != ">":
                self._reader.put_back(name + end)
                return False
            self._answer.arguments(f"{separator}{_json(name)}: ")
            separator = ", "
            if not (yield from self._read_value(self._values.property(name))):
                return False
        return (yield from self._reader.accept(_FUNCTION_END))

    def _read_value(self, values: Values | None) -> Steps[bool]:
        """Return whether its end came."""
        if values is None or (values.types == {"string"} and not values.are_listed):
            return (yield from self._read_text(_Text(self._answer)))
        value = _Value(self._answer, values)
        if values.types & {"array", "object"}:
            # A marker within JSON is none.
            self._reader.mark()
            text = yield from self._reader.json_container()
            if text is not None and (yield from self._reader.sees((_PARAMETER_END,))):
                # With the blanks around it: it may be meant as a string.
                value.add(self._reader.unmark())
                yield from self._reader.until((_PARAMETER_END,), value.add)
                value.end()
                return True
            self._reader.rewind()
        return (yield from self._read_text(value))

    def _read_text(self, value: "_Text | _Value") -> Steps[bool]:
        # From what would be its end, if its own is missing, which shows at the end of the answer.
        held: list[str] = []
        while end := (
            yield from self._reader.until(
                (_PARAMETER_END, *_IMPLIED_ENDS), held.append if held else value.add
            )
        ):
            if end == _PARAMETER_END and (
                yield from self._reader.sees(_BEHIND_VALUE, or_ends=True)
            ):
                value.add("".join(held))
                value.end()
                return True
            if end in _IMPLIED_ENDS and self._answer.are_ends_implied:
                value.end()
                self._reader.put_back(end)
                return True
            if held or end in _IMPLIED_ENDS:
                held.append(end)
            else:
                value.add(end)
        rest = "".join(held)
        is_whole = rest.rstrip().endswith((_FUNCTION_END, _CALL_END))
        if not is_whole or len(rest) > _MAX_IMPLIED_CHARS:
            value.add(rest)
            return False
        self._answer.are_ends_implied = True
        value.end()
        self._reader.put_back(rest)
        return True


class _Text:
    """A string: it goes on as it comes, escaped."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._answer.arguments('"')
        self._is_first = True
        # The last line break of the value stands before its end marker.
        self._held = ""

    def add(self, text: str) -> None:
        if not text:
            return
        if self._is_first:
            self._is_first = False
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        if sure := text.removesuffix("\n"):
            self._answer.arguments(_json(sure)[1:-1])

    def end(self) -> None:
        self._answer.arguments('"')


class _Value:
    """What is JSON, text, or one of some values, only when it is whole."""

    def __init__(self, answer: Answer, values: Values) -> None:
        self._answer = answer
        self._values = values
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        self._pieces.append(text)

    def end(self) -> None:
        self._answer.arguments(_as_json("".join(self._pieces), self._values))


@dataclasses.dataclass(frozen=True, slots=True)
class _Reading:
    """What a text may stand for."""

    value: Any
    # As it is written, if it is no string.
    text: str | None = None

    def as_json(self) -> str:
        return _json(self.value) if self.text is None else self.text


def _as_json(text: str, values: Values) -> str:
    """Return the JSON that a value's text stands for: the first reading that the schema lets pass,
    else one of a type that it names, else any.
    """
    readings = [*_readings(text, values.types)]
    if values.are_listed:
        readings += map(_Reading, _with_fewer_blanks(text))
    found = [each for each in readings if type_of(each.value) in values.types] or readings[:1]
    best = values.first_of([each.value for each in found]) if len(found) > 1 else None
    return found[best or 0].as_json()


def _readings(text: str, types: frozenset[str]) -> Iterator[_Reading]:
    """Return what a text may stand for: JSON, a string, or what Python would write so, as chat
    templates do of constants. JSON is nothing of Python's.
    """
    inner = text.removeprefix("\n").removesuffix("\n")
    word = inner.strip()
    found = _from_json(word) or _from_json(_CONSTANTS.get(word, ""))
    is_string = word.startswith('"')
    if not is_string:
        yield from found
    yield from map(_Reading, (inner, word, text))
    if is_string:
        yield from found
    if not found and types & {"array", "object"}:
        yield from _from_json(_from_python(word))


def _from_json(text: str) -> list[_Reading]:
    """Return the reading of a text as JSON, none if it is none."""
    try:
        return [_Reading(_exactly(text), text)]
    except (ValueError, RecursionError):
        return []


def _exactly(text: str) -> Any:
    try:
        return load_json(text, parse_float=Decimal)
    except ArithmeticError:  # an exponent has too many digits
        return load_json(text, parse_float=_number)


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except ArithmeticError:
        return float(text)


def _with_fewer_blanks(text: str) -> Iterator[str]:
    """Return what a text may be of which some of the blanks around it are none of its own: those
    that the grammar lets pass, and a line break.
    """
    num_left = min(len(text) - len(text.lstrip()), MAX_WHITESPACE + 1)
    num_right = min(len(text) - len(text.rstrip()), MAX_WHITESPACE + 1)
    for left, right in itertools.product(range(num_left + 1), range(num_right + 1)):
        yield text[left : len(text) - right]


_CONSTANTS = {"None": "null", "True": "true", "False": "false"}
# No more parts of a list or a dict of Python than this are looked at one by one, and so many of its
# characters may be escaped: what has more is none.
_MAX_PYTHON_PARTS = 4000


def _run_of(part: str) -> str:
    """Return a pattern of parts with nothing but numbers and commas between."""
    return rf"{part}(?:[\s,:\d.+\-]*{part})*"


# What JSON has in its strings as it is, but quotes.
_PLAIN = r"\"'\\\x00-\x1f\ud800-\udfff"
_SINGLE = _run_of(rf"'[^{_PLAIN}]*'")
_DOUBLE = _run_of(rf'"(?:[^{_PLAIN}]|\')*"')
_WORDS = _run_of(r"\b(?:None|True|False)\b")
# Python's strings, constants, and commas before an end. A string without an end is one, too: it
# would be looked through again from each quote within it. The usual ones, of which there may be
# very many, are taken together.
_PYTHON = re.compile(
    rf"(?P<single>{_SINGLE})|(?P<double>{_DOUBLE})"
    r"""|(?P<text>(?P<quote>['"])(?:(?!(?P=quote))[^\\\n]|\\.)*)(?P<end>(?P=quote))?"""
    rf"|(?P<words>{_WORDS})|(?P<comma>,(?=\s*[\]}}]))"
)


def _from_python(text: str) -> str:
    """Return a list or a dict of Python as JSON, if it is one."""
    if text[:1] not in ("[", "{") or text.count("\\") > _MAX_PYTHON_PARTS:
        return ""
    return _PYTHON.sub(_token_from_python, text, count=_MAX_PYTHON_PARTS)


def _token_from_python(match: "re.Match[str]") -> str:
    if match["single"]:
        return match["single"].replace("'", '"')
    if match["double"]:
        return match["double"]
    if match["words"]:
        words = match["words"]
        for word, constant in _CONSTANTS.items():
            words = words.replace(word, constant)
        return words
    if match["comma"]:
        return ""
    is_string = match["end"] is not None
    return _json(_ESCAPE.sub(_unescaped, match["text"][1:])) if is_string else match["text"]


_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}


def _unescaped(match: "re.Match[str]") -> str:
    code = match[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, code if code in "\\'\"" else f"\\{code}")


def _json(text: str) -> str:
    return escape_halves(json.dumps(text, ensure_ascii=False))
