"""Structural tags of clients and of chat formats: text, and what is between it.

The types of xgrammar's formats that are known here are checked field by field; JSON schemas and
patterns within them like those that stand alone.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import grammar_text, pattern_text, patterns
from pdserve_common.structured.json_text import field_name
from pdserve_common.structured.node import Json, kind, refuse, short
from pdserve_common.structured.schema import read_schema

Format: TypeAlias = dict[str, Any]

MAX_FORMATS = 1024
MAX_FORMAT_DEPTH = 16
MAX_TEXT_CHARS = 4096
MAX_GRAMMAR_BYTES = 16 * 1024
MAX_REPEATS = 1000
MAX_TOKEN_ID = 2**31 - 1
# Blanks in a row between the elements of JSON. Models that may write any number do not end.
MAX_WHITESPACE = 2


def schema_format(schema: Json, *, field: str) -> Format:
    """Return the format of JSON that is valid by a schema: parsed JSON of bounded size and depth.
    Raises InvalidRequestError with JSON pointer and keyword; `field` says where the schema is.
    """
    return {
        "type": "json_schema",
        "json_schema": read_schema(schema, field=field),
        "max_whitespace_cnt": MAX_WHITESPACE,
    }


def object_format() -> Format:
    """Return the format of any JSON object."""
    return schema_format({"type": "object"}, field="")


def regex_format(text: str, *, field: str) -> Format:
    """Return the format of texts that a pattern matches from end to end. Raises
    InvalidRequestError.
    """
    try:
        tree = patterns.restrict(patterns.whole(patterns.parse(text)), patterns.UNICODE)
        if tree is None:
            raise patterns.PatternError("matches nothing")
        patterns.check_size(tree)
    except patterns.PatternError as error:
        raise InvalidRequestError(f"{field} {error}", field=field_name(field)) from None
    return {"type": "regex", "pattern": f"^{pattern_text.write(tree, is_split=False)}$"}


def grammar_format(text: str, *, field: str) -> Format:
    """Return the format of texts of a grammar. Raises InvalidRequestError for what is no GBNF."""
    try:
        return {"type": "grammar", "grammar": grammar_text.normalized(text)}
    except grammar_text.GrammarError as error:
        raise InvalidRequestError(f"{field} {error}", field=field_name(field)) from None


def choice_format(choices: tuple[str, ...]) -> Format:
    """Return the format of one of some texts; in whatever order they are, it is the same."""
    options = [{"type": "const_string", "value": text} for text in sorted(set(choices))]
    return options[0] if len(options) == 1 else {"type": "or", "elements": options}


def read_format(value: Json, *, field: str) -> Format:
    """Return a format of a structural tag. Raises InvalidRequestError with a JSON pointer."""
    return _Reader(field).read(value, "/format", 1)


class _Reader:
    """One structural tag."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._num_formats = 0

    def read(self, value: Json, pointer: str, depth: int) -> Format:
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS:
            refuse(
                self._field, "", pointer, f"is format {self._num_formats}, at most {MAX_FORMATS}"
            )
        if depth > MAX_FORMAT_DEPTH:
            refuse(self._field, "", pointer, f"is {depth} levels deep, at most {MAX_FORMAT_DEPTH}")
        if not isinstance(value, dict):
            refuse(self._field, "", pointer, f"is {kind(value)}, must be an object")
        type_ = value.get("type")
        if not isinstance(type_, str) or type_ not in _TYPES:
            known = ", ".join(_TYPES)
            refuse(self._field, "type", pointer, f"is {short(type_)}, must be one of {known}")
        required, optional = _TYPES[type_]
        for key in value:
            if key not in ("type", *required, *optional):
                refuse(self._field, key, pointer, f"is no field of {type_}")
        for key in required:
            if key not in value:
                refuse(self._field, key, pointer, "is missing")
        fields = [key for key in (*required, *optional) if key in value]
        read = {"type": type_} | {
            key: self._field_of(value[key], key, f"{pointer}/{key}", depth)
            for key in fields
            if key != "json_schema"
        }
        if "json_schema" in fields:
            read["json_schema"] = self._schema(value, f"{pointer}/json_schema")
        return self._finished(read, pointer)

    def _schema(self, value: Json, pointer: str) -> Any:
        schema, field = value["json_schema"], f"{self._field}: {pointer}"
        if value.get("style", "json") == "json":
            return read_schema(schema, field=field)
        read = read_schema(schema, field=field, name_chars=_XML_NAME_CHARS)
        while isinstance(read, dict) and "$ref" in read:
            # It has no objects in XML but the root.
            definitions = read["$defs"]
            target = definitions[read["$ref"].removeprefix("#/$defs/")]
            read = target | {"$defs": definitions}
        return read

    def _field_of(self, value: Json, key: str, pointer: str, depth: int) -> Any:
        """A field of a format, by its name: the same in each type."""
        if key == "content" or (key in ("begin", "end") and isinstance(value, dict)):
            return self.read(value, pointer, depth + 1)
        if key in _LISTS:
            return self._items(value, key, pointer, depth)
        if key in ("min", "max"):
            return self._count(value, pointer, least=-1 if key == "max" else 0)
        if key in ("at_least_one", "stop_after_first"):
            if not isinstance(value, bool):
                refuse(self._field, "", pointer, f"is {kind(value)}, must be a boolean")
            return value
        if key == "token":
            return self._token(value, pointer)
        return self._text(value, pointer, may_be_empty=key in ("begin", "end", "separator"))

    def _items(self, value: Json, key: str, pointer: str, depth: int) -> list[Any]:
        if not isinstance(value, list) or (not value and key not in _MAY_BE_EMPTY):
            refuse(self._field, "", pointer, "must be an array that is not empty")
        places = [(item, f"{pointer}/{n}") for n, item in enumerate(value)]
        if key in ("elements", "tags"):
            return [self.read(item, place, depth + 1) for item, place in places]
        if key in ("exclude_tokens", "trigger_tokens"):
            return [self._token(item, place) for item, place in places]
        return [self._text(item, place) for item, place in places]

    def _count(self, value: Json, pointer: str, *, least: int, most: int = MAX_REPEATS) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(self._field, "", pointer, f"is {kind(value)}, must be an integer")
        if not least <= value <= most:
            refuse(self._field, "", pointer, f"is {short(value)}, must be {least} to {most}")
        return value

    def _token(self, value: Json, pointer: str) -> int | str:
        if isinstance(value, str):
            return self._text(value, pointer)
        return self._count(value, pointer, least=0, most=MAX_TOKEN_ID)

    def _text(self, value: Json, pointer: str, *, may_be_empty: bool = False) -> str:
        if not isinstance(value, str) or not (value or may_be_empty):
            refuse(self._field, "", pointer, "must be a string that is not empty")
        limit = MAX_GRAMMAR_BYTES if pointer.endswith("/grammar") else MAX_TEXT_CHARS
        if len(value) > limit:
            refuse(self._field, "", pointer, f"has {len(value)} characters, at most {limit}")
        return value

    def _finished(self, read: Format, pointer: str) -> Format:
        """With what its fields have to do with each other."""
        check = _CHECKS.get(read["type"])
        if check is not None and (problem := check(read)) is not None:
            refuse(self._field, "", pointer, problem)
        if read["type"] == "regex":
            return regex_format(read["pattern"], field=f"{self._field}: {pointer}")
        if read["type"] == "grammar":
            return grammar_format(read["grammar"], field=f"{self._field}: {pointer}")
        if read["type"] == "json_schema":
            return read | {"max_whitespace_cnt": MAX_WHITESPACE}
        return read


def _tag_problem(read: Format) -> str | None:
    ends = [read[key] for key in ("begin", "end") if isinstance(read[key], dict)]
    return None if all(end["type"] == "token" for end in ends) else "begins or ends with no token"


def _tags_problem(read: Format) -> str | None:
    return None if all(tag["type"] == "tag" for tag in read["tags"]) else "has tags that are no tag"


def _triggered_problem(read: Format) -> str | None:
    """xgrammar takes the first trigger that a tag begins with."""
    for tag in read["tags"]:
        begin = tag.get("begin")
        found = [t for t in read["triggers"] if isinstance(begin, str) and begin.startswith(t)]
        if len(found) != 1:
            return f"has a tag that begins with {len(found)} of its triggers, must be 1"
    return None


def _repeat_problem(read: Format) -> str | None:
    is_never = 0 <= read["max"] < read["min"]
    return f"repeats {read['min']} to {read['max']} times" if is_never else None


def _schema_problem(read: Format) -> str | None:
    """In XML the values of an object's properties are JSON, but for strings, which are as they are:
    what is said of their characters would be said of JSON's.
    """
    style = read.get("style", "json")
    if style not in STYLES:
        return f"has style {short(style)}, must be one of {', '.join(STYLES)}"
    schema = read["json_schema"]
    if style == "json":
        return None
    if schema is True or schema.get("type") != "object":
        return f"has style {style} and no schema of type object"
    if any("<" in name or ">" in name for name in schema.get("properties", ())):
        return f"has style {style} and a name with < or >"
    seen: set[str] = set()
    values = [*schema.get("properties", {}).values(), schema.get("additionalProperties")]
    values += schema.get("patternProperties", {}).values()
    values = [value for value in values if isinstance(value, Mapping)]
    if any(_has_pattern(value, schema.get("$defs", {}), seen) for value in values):
        return f"has style {style} and a property with pattern, format or a length"
    return None


def _has_pattern(schema: Format, definitions: Format, seen: set[str]) -> bool:
    """Each definition is looked at once: they lead to each other in more ways than can be tried."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        if name in seen:
            return False
        seen.add(name)
        return _has_pattern(definitions[name], definitions, seen)
    options = schema.get("anyOf", ())
    return "pattern" in schema or any(_has_pattern(o, definitions, seen) for o in options)


STYLES = ("json", "qwen_xml")
_XML_NAME_CHARS = patterns.intersection(
    patterns.JSON_CHARS, patterns.complement(patterns.chars_of("<>"))
)
_LISTS = ("elements", "tags", "triggers", "excludes", "exclude_tokens", "trigger_tokens")
_MAY_BE_EMPTY = ("excludes", "exclude_tokens")
_FLAGS = ("at_least_one", "stop_after_first")
# Each type of format has fields that it must have, and others that it may have.
_TYPES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "const_string": (("value",), ()),
    "any_text": ((), ("excludes",)),
    "json_schema": (("json_schema",), ("style",)),
    "regex": (("pattern",), ()),
    "grammar": (("grammar",), ()),
    "token": (("token",), ()),
    "exclude_token": (("exclude_tokens",), ()),
    "any_tokens": ((), ("exclude_tokens",)),
    "sequence": (("elements",), ()),
    "or": (("elements",), ()),
    "optional": (("content",), ()),
    "plus": (("content",), ()),
    "star": (("content",), ()),
    "repeat": (("min", "max", "content"), ()),
    "tag": (("begin", "content", "end"), ()),
    "tags_with_separator": (("tags", "separator"), _FLAGS),
    "triggered_tags": (("triggers", "tags"), (*_FLAGS, "excludes")),
    "token_triggered_tags": (("trigger_tokens", "tags"), (*_FLAGS, "exclude_tokens")),
}
_CHECKS: Mapping[str, Callable[[Format], str | None]] = {
    "tag": _tag_problem,
    "tags_with_separator": _tags_problem,
    "triggered_tags": lambda read: _tags_problem(read) or _triggered_problem(read),
    "token_triggered_tags": _tags_problem,
    "repeat": _repeat_problem,
    "json_schema": _schema_problem,
}
