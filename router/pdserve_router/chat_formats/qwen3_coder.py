"""Qwen3-Coder: a call as XML, each parameter in an element of its own."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdserve_router.chat_formats.base import Answer, ChatFormat
from pdserve_router.chat_formats.reader import Reader, Steps
from pdserve_router.chat_formats.tags import CallRules, Tag, calls

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
# What ends a value whose own end is missing.
_IMPLIED_ENDS = (f"\n{_PARAMETER}", f"\n{_FUNCTION_END}")
_TEXT: Mapping[str, Any] = {"type": "string"}
_TYPE_NAMES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


class Qwen3Coder(ChatFormat):
    """<tool_call>
    <function=f>
    <parameter=x>
    1
    </parameter>
    </function>
    </tool_call>

    <tool_call> may be missing, and </parameter> before what follows it. A value is JSON or text, as
    the tool's schema says.
    """

    name = "qwen3_coder"
    triggers = (_CALL, _FUNCTION)
    fillers = (_CALL_END,)

    def matches(self, template: str) -> bool:
        return _FUNCTION in template and _PARAMETER in template

    def call_tag(self, rules: CallRules) -> Tag:
        return calls(
            rules,
            begin=f"{_CALL}\n{_FUNCTION}",
            behind_name=">\n",
            end=f"\n{_FUNCTION_END}\n{_CALL_END}",
            separator="\n",
            style="qwen_xml",
        )

    def read_call(self, reader: Reader, answer: Answer, trigger: str) -> Steps[bool]:
        if trigger == _CALL and not (yield from reader.accept(_FUNCTION)):
            return False
        name = yield from reader.word()
        if not name or not (yield from reader.accept(">")):
            return False
        answer.begin_call(name)
        answer.arguments("{")
        properties = _properties(answer.options.tools.get(name))
        is_whole = yield from _read_parameters(reader, answer, properties)
        if is_whole or not reader.is_ended:
            answer.arguments("}")
        return True


def _read_parameters(reader: Reader, answer: Answer, properties: Mapping[str, Any]) -> Steps[bool]:
    """Return whether all of the answer's arguments came."""
    separator = ""
    while (yield from reader.accept(_PARAMETER)):
        key = yield from reader.word()
        if not (yield from reader.accept(">")):
            return False
        answer.arguments(f"{separator}{_json(key)}: ")
        separator = ", "
        if not (yield from _read_value(reader, answer, properties.get(key, _TEXT))):
            return False
    return (yield from reader.accept(_FUNCTION_END))


def _read_value(reader: Reader, answer: Answer, schema: object) -> Steps[bool]:
    """Return whether its end came: its own marker, or what can only follow it."""
    types, words = types_of(schema), _words(schema)
    is_text = types == {"string"} and not words
    value = _Text(answer) if is_text else _Value(answer, types, words)
    end = yield from reader.until((_PARAMETER_END, *_IMPLIED_ENDS), value.add)
    if not end:
        return False
    value.end()
    if end in _IMPLIED_ENDS:
        reader.put_back(end)
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
    """What is JSON, or one of some words, only when it is whole."""

    def __init__(self, answer: Answer, types: frozenset[str], words: Sequence[object]) -> None:
        self._answer = answer
        self._types = types
        self._words = words
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        self._pieces.append(text)

    def end(self) -> None:
        text = "".join(self._pieces).removeprefix("\n").removesuffix("\n")
        # Blanks around one of some words are the format's.
        text = text.strip() if text.strip() in self._words else text
        self._answer.arguments(_as_json(text, self._types))


def _as_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON that a value stands for: itself, or a string if it has to be one."""
    word = _PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        kind = _TYPE_NAMES[type(json.loads(word, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return _json(text)
    is_other = kind != "string" and (kind in types or (kind == "integer" and "number" in types))
    return _json(text) if "string" in types and not is_other else word


# What its chat template writes of values that are no strings.
_PYTHON_WORDS = {"None": "null", "True": "true", "False": "false"}


def types_of(schema: object) -> frozenset[str]:
    """Return the JSON types that a schema names, empty if it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    for name in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(name), list):
            types = [_own_types(branch) for branch in branches]
            return frozenset().union(*types) if all(types) else frozenset()
    return _own_types(schema)


def _words(schema: object) -> Sequence[object]:
    """Return the values that a schema names one by one, empty if any others may be."""
    if not isinstance(schema, Mapping):
        return ()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else ()


def _own_types(schema: object) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    if isinstance(values := schema.get("enum"), list):
        return frozenset(_TYPE_NAMES[type(value)] for value in values)
    if "const" in schema:
        return frozenset((_TYPE_NAMES[type(schema["const"])],))
    types = schema.get("type")
    # Nobody has checked the schema.
    listed = types if isinstance(types, list) else [types]
    return frozenset(each for each in listed if isinstance(each, str))


def _properties(schema: object) -> Mapping[str, Any]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
