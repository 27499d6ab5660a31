"""Qwen3-Coder: a call as XML, each parameter in an element of its own."""

import itertools
import json
import re
from collections.abc import Iterator
from decimal import Decimal

from pdserve_common.structured.tags import MAX_WHITESPACE
from pdserve_common.structured.values import Values, type_of
from pdserve_router.chat_formats.base import Answer, ChatFormat
from pdserve_router.chat_formats.reader import Reader, Steps, escape_halves, is_json
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


def _as_json(text: str, values: Values) -> str:
    """Return the JSON that a value's text stands for: the first reading that the schema lets pass,
    else one of a type that it names, else any.
    """
    readings = [*_readings(text)]
    if values.are_listed:
        readings += map(_json, _with_fewer_blanks(text))
    loaded = [json.loads(each, parse_float=_number) for each in readings]
    found = [i for i, value in enumerate(loaded) if type_of(value) in values.types] or [0]
    best = values.first_of([loaded[i] for i in found]) if len(found) > 1 else None
    return readings[found[best or 0]]


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except ArithmeticError:  # its exponent has too many digits
        return float(text)


def _readings(text: str) -> Iterator[str]:
    """Return what a text may stand for, as JSON: itself, a string, or what Python would write so,
    as chat templates do of constants.
    """
    inner = text.removeprefix("\n").removesuffix("\n")
    word = inner.strip()
    is_string = word.startswith('"')
    from_python = _from_python(word)
    if not is_string:
        yield from (each for each in (word, _CONSTANTS.get(word, "")) if is_json(each))
    yield from map(_json, (inner, word, text))
    yield from (each for each in (word if is_string else "", from_python) if is_json(each))


def _with_fewer_blanks(text: str) -> Iterator[str]:
    """Return what a text may be of which some of the blanks around it are none of its own: those
    that the grammar lets pass, and a line break.
    """
    num_left = min(len(text) - len(text.lstrip()), MAX_WHITESPACE + 1)
    num_right = min(len(text) - len(text.rstrip()), MAX_WHITESPACE + 1)
    for left, right in itertools.product(range(num_left + 1), range(num_right + 1)):
        yield text[left : len(text) - right]


_CONSTANTS = {"None": "null", "True": "true", "False": "false"}
# Python's strings, constants, and commas before an end. A string without an end is one, too: it
# would be looked through again from each quote within it.
_PYTHON = re.compile(
    r"""(?P<text>(?P<quote>['"])(?:(?!(?P=quote))[^\\\n]|\\.)*)(?P<end>(?P=quote))?"""
    r"""|\b(?P<word>None|True|False)\b|(?P<comma>,(?=\s*[\]}]))"""
)


def _from_python(text: str) -> str:
    """Return a list or a dict of Python as JSON, if it is one."""
    return _PYTHON.sub(_token_from_python, text) if text[:1] in ("[", "{") else ""


def _token_from_python(match: "re.Match[str]") -> str:
    if match["word"]:
        return _CONSTANTS[match["word"]]
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
