"""What JSON schemas ask for and what becomes of it, in the order of JSON Schema's own test suite: a
schema, and values with what they are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Case(NamedTuple):
    """An enforced schema."""

    keyword: str
    schema: Any
    # Allowed, and valid.
    valid: list[Any]
    # Neither.
    invalid: list[Any]
    # Valid and never generated, as the docs say.
    narrower: Sequence[Any] = ()


class Refusal(NamedTuple):
    """A schema that is refused with this keyword at this place."""

    keyword: str
    schema: Any
    pointer: str = ""


OBJECT: dict[str, Any] = {"type": "object"}
STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}
NULL: dict[str, Any] = {"type": "null"}
ANY_TYPE: list[Any] = [None, True, False, 0, -1.5, "", "foo", [], [1, "a"], {}, {"a": [{}]}]


def properties(*required: str, **schemas: Any) -> dict[str, Any]:
    return {"type": "object", "properties": schemas, "required": list(required)}


def kind(name: str, *required: str, **others: Any) -> dict[str, Any]:
    return properties("kind", *required, kind={"const": name}, **others)


TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": properties(
            "value", value=INTEGER, children={"type": "array", "items": {"$ref": "#/$defs/tree"}}
        )
    },
}
LIST = properties("head", head=INTEGER, tail={"anyOf": [{"$ref": "#"}, NULL]})

CASES = [
    Case("boolean schema", True, ANY_TYPE, []),
    Case("empty schema", {}, ANY_TYPE, []),
    # type
    Case("type", NULL, [None], [False, 0, "", "null", [], {}]),
    Case("type", {"type": "boolean"}, [True, False], [None, 0, 1, "true", [], {}]),
    Case("type", INTEGER, [0, 1, -1, 12345678901234567890], [1.5, "1", None, True, []]),
    Case("type", {"type": "number"}, [0, -1, 1.5, 0.25, -0.125], ["1", None, True, [], {}]),
    Case(
        "type",
        STRING,
        ["", "a", "é", "日本", "😀", 'q"', "\\", "\n\t", "\x7f"],
        [None, 1, True, [], {}],
    ),
    Case("type", {"type": "array"}, [[], [1], [None, "a", [{}]]], [None, {}, "[]", 0]),
    Case("type", OBJECT, [{}, {"a": 1}, {"": {"b": []}}], [None, [], "{}", 0]),
    Case("type", {"type": ["string", "null"]}, ["", "a", None], [0, False, [], {}]),
    Case("type", {"type": ["integer", "number"]}, [1, 1.5], ["1", None]),
    Case("type", {"type": ["array", "object", "boolean"]}, [[], {}, True], ["", 1, None]),
    Case(
        "type",
        {"type": ["string", "integer"], "minLength": 2, "maximum": 3},
        ["ab", 3, -7],
        ["a", 4, None],
    ),
    # A node without a type has those of its keywords.
    Case("type", {"minLength": 2}, ["ab"], ["a"], [None, 1, [], {}]),
    Case("type", {"minimum": 3}, [3, 3.5], [2], [None, "a", [], {}]),
    Case("type", {"multipleOf": 2}, [4], [3], [None, "a", [], {}]),
    Case("type", {"properties": {"a": INTEGER}, "required": ["a"]}, [{"a": 1}], [{}], [[], 1]),
    Case("type", {"minLength": 2, "maxItems": 1}, ["ab", [1]], ["a", [1, 2]], [None, 1, {}]),
    # enum and const
    Case(
        "enum",
        {"enum": [1, "two", None, False, [3], {"four": 4}]},
        [1, "two", None, False, [3], {"four": 4}],
        [2, "two ", True, [], {"four": 5}, [3, 3]],
    ),
    Case("enum", {"type": "string", "enum": ["a", "b", 1]}, ["a", "b"], [1, "c", None]),
    Case("enum", {"type": "integer", "enum": [1, 2.0, "a"]}, [1, 2], ["a", 3, True]),
    Case(
        "enum",
        {"enum": ["a/b", 'q"', "\\", "é", "\n", ""]},
        ["a/b", 'q"', "\\", "é", "\n", ""],
        ["a", "n"],
    ),
    Case("enum", {"enum": [0, False]}, [0, False], [True, 1, None]),
    Case("enum", {"enum": [0.1, 1.5, 7]}, [0.1, 1.5, 7], [0.2, 1, 7.5]),
    Case(
        "enum",
        {"enum": [{"a": 1, "b": 2}]},
        [{"a": 1, "b": 2}],
        [{"a": 1}, {"a": 1, "b": 3}],
        [{"b": 2, "a": 1}],
    ),
    Case(
        "enum", {"enum": [{"title": 1}, {"title": 2}]}, [{"title": 1}, {"title": 2}], [{"title": 3}]
    ),
    Case("const", {"const": "x"}, ["x"], ["y", "", None]),
    Case("const", {"const": None}, [None], [0, False, ""]),
    Case("const", {"const": 2}, [2], [3, "2", 2.5]),
    Case("const", {"const": -0.5}, [-0.5], [0.5, -1, -0.25]),
    Case("const", {"const": {"a": [True]}}, [{"a": [True]}], [{"a": [False]}, {}]),
    Case("const", {"const": 9007199254740993}, [9007199254740993], [9007199254740992]),
    # numbers
    Case(
        "minimum", INTEGER | {"minimum": 3}, [3, 4, 10, 99, 12345678901234567890], [2, 0, -3, 3.5]
    ),
    Case("minimum", INTEGER | {"minimum": -12}, [-12, -11, -1, 0, 7], [-13, -100]),
    Case("minimum", INTEGER | {"minimum": 1.5}, [2, 3], [1, 0]),
    Case("minimum", {"type": "number", "minimum": 1.1}, [1.1, 1.2, 2, 1.100001], [1, 1.09, 0, -2]),
    Case("minimum", {"type": "number", "minimum": -0.5}, [-0.5, -0.25, 0, 9.75], [-0.51, -1]),
    Case("maximum", INTEGER | {"maximum": 3}, [3, 2, 0, -4, -99999], [4, 30]),
    Case("maximum", INTEGER | {"maximum": -3}, [-3, -4, -10], [-2, 0, 3]),
    Case("maximum", {"type": "number", "maximum": 3.0}, [3, 2.999999, 0, -7.5], [3.000001, 4]),
    Case("maximum", {"type": "number", "maximum": 0}, [0, -0.1, -3], [0.1, 1]),
    Case("exclusiveMinimum", INTEGER | {"exclusiveMinimum": 3}, [4, 5], [3, 2]),
    Case("exclusiveMinimum", INTEGER | {"exclusiveMinimum": 2.5}, [3, 4], [2, 1]),
    Case("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 1.1}, [1.100001, 2], [1.1, 1]),
    Case("exclusiveMaximum", INTEGER | {"exclusiveMaximum": 3}, [2, -1], [3, 4]),
    Case("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 0}, [-0.000001, -1], [0, 1]),
    Case(
        "minimum",
        INTEGER | {"minimum": 1, "exclusiveMinimum": 4, "maximum": 9, "exclusiveMaximum": 20},
        [5, 9],
        [4, 10, 1],
    ),
    Case("minimum", {"type": "number", "minimum": 0.1, "maximum": 0.1}, [0.1], [0.2, 0, 0.100001]),
    Case(
        "minimum",
        INTEGER | {"minimum": -9223372036854775806, "maximum": 9223372036854775806},
        [-9223372036854775806, 0, 9223372036854775806],
        [9223372036854775807, -9223372036854775807],
    ),
    Case(
        "multipleOf", INTEGER | {"multipleOf": 3}, [0, 3, -3, 9, 999999999999], [1, 2, 4, -1, 100]
    ),
    Case(
        "multipleOf",
        INTEGER | {"multipleOf": 7, "minimum": -10, "maximum": 20},
        [-7, 0, 7, 14],
        [-14, 1, 21],
    ),
    Case("multipleOf", {"type": "number", "multipleOf": 2}, [4, -2], [3, 0.5]),
    Case("multipleOf", {"multipleOf": 4, "minimum": 1, "maximum": 9}, [4, 8], [0, 6, 12], ["a"]),
    Case("multipleOf", INTEGER | {"multipleOf": 1, "minimum": 2}, [2, 3], [1]),
    Case("multipleOf", INTEGER | {"multipleOf": 5.0}, [5, 10, 0], [1, 6]),
    # strings
    Case(
        "minLength",
        STRING | {"minLength": 2},
        ["ab", "éé", "😀😀", "a/", "abc", "\x7f\x7f"],
        ["a", "", "é", "😀"],
        ['a"', "\n\n", "\\\\"],
    ),
    Case("minLength", STRING | {"minLength": 0}, ["", "a"], [1]),
    Case(
        "minLength",
        STRING | {"minLength": 130, "maxLength": 5000},
        ["a" * number for number in (130, 131, 257, 258, 259, 290, 4000, 4993, 4994, 5000)],
        ["a" * 129, "a" * 5001],
    ),
    Case("maxLength", STRING | {"maxLength": 129}, ["", "a", "a" * 129], ["a" * 130]),
    Case(
        "maxLength",
        STRING | {"maxLength": 2},
        ["", "a", "ab", "é😀"],
        ["abc", "ééé", "a\n\n"],
        ['\\"', "\t"],
    ),
    Case("maxLength", STRING | {"maxLength": 0}, [""], ["a"]),
    Case("maxLength", STRING | {"minLength": 1, "maxLength": 3.0}, ["a", "abc"], ["", "abcd"]),
    Case("maxLength", STRING | {"maxLength": 100000}, ["", "a" * 300], [None]),
    Case("pattern", STRING | {"pattern": "^a*$"}, ["", "a", "aaa"], ["b", "ab", "ba"]),
    Case(
        "pattern", STRING | {"pattern": "a+"}, ["a", "xay", "aaa", "éaé"], ["", "x"], ['"a"', "a\n"]
    ),
    Case(
        "pattern",
        STRING | {"pattern": "^[a-c]{2}[^x]$"},
        ["abd", "ccé", "bb😀"],
        ["abx", "ab", "dbb"],
    ),
    Case(
        "pattern",
        STRING | {"pattern": r"^\d{3}-\d{2,}$"},
        ["123-45", "000-123"],
        ["12-34", "123-4"],
        [],
    ),
    Case(
        "pattern",
        STRING | {"pattern": r"^\w+\s\w*$"},
        ["a b", "a_1 "],
        ["a", " a"],
    ),
    Case("pattern", STRING | {"pattern": "^(?:a|bc)*?d$"}, ["d", "abcd", "bcd"], ["bd", "a"]),
    Case("pattern", STRING | {"pattern": "^é[à-ö]$"}, ["éà", "éö"], ["é", "éz", "eà"]),
    Case("pattern", STRING | {"pattern": "^a|b$"}, ["a", "ax", "b", "xb"], ["xa", "bx", ""]),
    Case("pattern", STRING | {"pattern": "^(foo$|bar$)"}, ["foo", "bar"], ["foobar", "fo", "xfoo"]),
    Case("pattern", STRING | {"pattern": r"^\.\*\[\]$"}, [".*[]"], ["a", ".*"]),
    Case("pattern", STRING | {"pattern": r"^\x41\u0042$"}, ["AB"], ["ab"]),
    Case("pattern", STRING | {"pattern": "^[ab]+$", "minLength": 1}, ["a", "ab"], ["", "c"]),
    Case(
        "pattern",
        STRING | {"pattern": "^a{2,4}$", "maxLength": 4, "minLength": 2},
        ["aa", "aaaa"],
        ["a", "aaaaa"],
    ),
    Case("pattern", STRING | {"pattern": ""}, ["", "x"], [1]),
    Case("pattern", STRING | {"pattern": "^.$"}, ["a", "é", "-"], ["", "ab"]),
    Case("pattern", STRING | {"pattern": r"^[^\d]$"}, ["a", "-"], ["1", "ab"]),
    Case("pattern", STRING | {"pattern": r"^\S\D\W$"}, ["aa-", "1x "], [" aa", "a1-", "aaa"]),
    Case("pattern", STRING | {"pattern": r"^(?P<year>\d{4})$"}, ["2024"], ["202"]),
    Case(
        "format",
        STRING | {"format": "date"},
        ["2024-02-29", "2023-12-31", "0001-01-01"],
        ["2023-02-29", "2023-13-01", "2023-04-31", "0000-01-01", "1900-02-29", "x"],
    ),
    Case(
        "format",
        STRING | {"format": "time"},
        ["00:00:00Z", "23:59:59.5+02:00"],
        ["24:00:00Z", "12:60:00Z", "12:00:00"],
    ),
    Case(
        "format",
        STRING | {"format": "date-time"},
        ["2024-02-29T12:00:00Z"],
        ["2024-02-30T12:00:00Z", "2024-02-29"],
    ),
    Case(
        "format",
        STRING | {"format": "duration"},
        ["P1D", "PT2H30M", "P3W", "P1Y2M3DT4H"],
        ["P", "1D", "PT", "P1DT"],
    ),
    Case(
        "format",
        STRING | {"format": "email"},
        ["a@example.com", "a.b+c@x.org"],
        ["a", "@b.c", "a@"],
    ),
    Case(
        "format",
        STRING | {"format": "hostname"},
        ["localhost", "a-b.example.com"],
        ["-a", "a..b", ""],
    ),
    Case(
        "format",
        STRING | {"format": "ipv4"},
        ["127.0.0.1", "255.255.255.255"],
        ["256.0.0.1", "1.2.3", "01.2.3.4"],
    ),
    Case(
        "format",
        STRING | {"format": "ipv6"},
        ["::", "::1", "1::", "2001:db8::1", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::"],
        [":::", "1:2", "1:2:3:4:5:6:7:8:9", "12345::", "1::2::3"],
    ),
    Case(
        "format",
        STRING | {"format": "uuid"},
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567", "g" * 36],
    ),
    Case(
        "format",
        STRING | {"format": "uri"},
        ["https://example.com/a?b=c#d", "s3://bucket/key"],
        ["example.com", "://x", "http:// x"],
    ),
    # arrays
    Case(
        "items", {"type": "array", "items": INTEGER}, [[], [1], [1, 2, 3]], [["a"], [1, "a"], {}, 1]
    ),
    Case("items", {"type": "array", "items": False}, [[]], [[1], [None]]),
    Case("items", {"type": "array", "items": True}, [[], [1, "a"]], [{}]),
    Case(
        "items",
        {"type": "array", "items": {"type": "array", "items": NULL}},
        [[[]], [[None], []]],
        [[None], [[1]]],
    ),
    Case(
        "prefixItems",
        {"type": "array", "prefixItems": [INTEGER, STRING]},
        [[], [1], [1, "a"]],
        [["a"], [1, 1]],
        [[1, "a", None]],
    ),
    Case(
        "prefixItems",
        {"type": "array", "prefixItems": [INTEGER], "items": STRING},
        [[], [1], [1, "a", "b"]],
        [["a"], [1, 2]],
    ),
    Case(
        "prefixItems",
        {"type": "array", "prefixItems": [True, NULL], "items": False},
        [["x", None], [1]],
        [[1, 2], [1, None, 2]],
    ),
    Case(
        "prefixItems",
        {"type": "array", "prefixItems": [INTEGER, INTEGER], "minItems": 2, "maxItems": 2},
        [[1, 2]],
        [[1], [1, 2, 3], []],
    ),
    Case("prefixItems", {"type": "array", "prefixItems": []}, [[], [1]], [1]),
    Case(
        "minItems",
        {"type": "array", "prefixItems": [INTEGER], "items": {"$ref": "#"}, "minItems": 1},
        [[1], [1, [2]], [1, [2, [3]], [4]]],
        [[], [1, 2], [1, []]],
    ),
    Case("minItems", {"type": "array", "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    Case("minItems", {"type": "array", "items": NULL, "minItems": 1.0}, [[None]], [[]]),
    Case(
        "minItems",
        {"type": "array", "prefixItems": [NULL], "items": INTEGER, "minItems": 3, "maxItems": 4},
        [[None, 1, 2], [None, 1, 2, 3]],
        [[None, 1], [None, 1, 2, 3, 4]],
    ),
    Case("maxItems", {"type": "array", "maxItems": 2}, [[], [1], [1, 2]], [[1, 2, 3]]),
    Case("maxItems", {"type": "array", "maxItems": 0}, [[]], [[1]]),
    Case(
        "maxItems",
        {"type": "array", "prefixItems": [INTEGER, STRING], "maxItems": 1},
        [[], [1]],
        [[1, "a"], ["a"]],
    ),
    Case(
        "maxItems", {"type": "array", "items": INTEGER, "maxItems": 100000}, [[], [1] * 50], [["a"]]
    ),
    Case("uniqueItems", {"type": "array", "uniqueItems": False}, [[], [1, 1]], [1]),
    Case("uniqueItems", {"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    # objects
    Case(
        "properties",
        properties(a=INTEGER, b=STRING),
        [{}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}],
        [{"a": "x"}, {"a": 1, "b": 2}, []],
        [{"b": "x", "a": 1}, {"c": 1}],
    ),
    Case(
        "properties",
        properties(**{"": NULL, "a/b": NULL, 'q"': NULL, "é": NULL, "\t": NULL}),
        [{"": None, "a/b": None, 'q"': None, "é": None, "\t": None}, {"\t": None}],
        [{"é": 1}],
    ),
    Case("properties", OBJECT | {"properties": {}}, [{}], [[]], [{"a": 1}]),
    Case("properties", properties(a=True, b={}), [{"a": [1], "b": {}}], [1]),
    Case(
        "properties",
        properties(
            "a", "b", a=properties("title", title=STRING), b=properties("title", title=INTEGER)
        ),
        [{"a": {"title": "x"}, "b": {"title": 1}}],
        [{"a": {"title": "x"}, "b": {"title": "x"}}, {"a": {"title": 1}, "b": {"title": 1}}],
    ),
    Case(
        "properties",
        properties(
            "a",
            "b",
            a=properties("description", description=NULL),
            b=properties("default", default=NULL),
        ),
        [{"a": {"description": None}, "b": {"default": None}}],
        [{"a": {"default": None}, "b": {"default": None}}],
    ),
    Case(
        "properties",
        properties(**{"$ref": STRING, "type": INTEGER, "enum": NULL}),
        [{"$ref": "x", "type": 1, "enum": None}],
        [{"$ref": 1}],
    ),
    Case(
        "required",
        properties("b", a=INTEGER, b=INTEGER),
        [{"b": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1}],
    ),
    Case(
        "required",
        properties("a", "c", a=NULL, b=NULL, c=NULL),
        [{"a": None, "c": None}, {"a": None, "b": None, "c": None}],
        [{"a": None}, {"c": None}, {"b": None}],
    ),
    Case("required", OBJECT | {"required": []}, [{}, {"a": 1}], [1]),
    Case("required", properties("a", "a", a=NULL), [{"a": None}], [{}]),
    Case(
        "additionalProperties",
        OBJECT | {"additionalProperties": INTEGER},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"a": "x"}, {"a": 1, "b": None}],
    ),
    Case("additionalProperties", OBJECT | {"additionalProperties": False}, [{}], [{"a": 1}]),
    Case("additionalProperties", OBJECT | {"additionalProperties": True}, [{}, {"a": 1}], [1]),
    Case(
        "additionalProperties",
        properties(a=INTEGER) | {"additionalProperties": False},
        [{}, {"a": 1}],
        [{"b": 1}, {"a": 1, "b": 1}],
    ),
    Case(
        "additionalProperties",
        properties("a", a=INTEGER, ab=NULL) | {"additionalProperties": STRING},
        [{"a": 1}, {"a": 1, "b": "x"}, {"a": 1, "ab": None, "aa": "x", "": "y", "é": "z"}],
        [{"b": "x"}, {"a": 1, "b": 1}, {"a": "x"}, {"a": 1, "ab": "x"}],
    ),
    Case(
        "additionalProperties",
        properties(**{"é": NULL, 'q"': NULL}) | {"additionalProperties": True},
        [{}, {"é": None, "e": 1}, {"x": 2}],
        [{"é": 1}],
    ),
    Case(
        "patternProperties",
        OBJECT | {"patternProperties": {"^f": INTEGER}},
        [{}, {"f": 1}, {"foo": 1, "fx": 2}],
        [{"f": "x"}],
        [{"a": 1}],
    ),
    Case(
        "patternProperties",
        OBJECT
        | {
            "patternProperties": {"^[a-z]{2}$": {"type": "array"}},
            "additionalProperties": False,
            "maxProperties": 2,
        },
        [{}, {"ab": []}, {"ab": [], "cd": [1]}],
        [{"a": []}, {"ab": 1}, {"ab": [], "cd": [], "ef": []}],
    ),
    Case("patternProperties", OBJECT | {"patternProperties": {}}, [{}, {"a": 1}], [1]),
    Case(
        "propertyNames",
        OBJECT | {"propertyNames": {"pattern": "^a+$"}},
        [{}, {"a": 1, "aa": None}],
        [{"b": 1}, {"": 1}],
    ),
    Case(
        "propertyNames",
        OBJECT | {"propertyNames": {"maxLength": 2}},
        [{}, {"ab": 1}, {"": 1}],
        [{"abc": 1}],
    ),
    Case(
        "propertyNames",
        OBJECT | {"propertyNames": {"enum": ["x", "y"]}, "additionalProperties": INTEGER},
        [{}, {"x": 1}, {"y": 1, "x": 2}],
        [{"z": 1}, {"x": "a"}],
    ),
    Case("propertyNames", OBJECT | {"propertyNames": STRING}, [{}, {"x": 1}], [1]),
    Case(
        "propertyNames",
        OBJECT | {"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"const": "k"}}},
        [{}, {"k": 1}],
        [{"l": 1}],
    ),
    Case("minProperties", OBJECT | {"minProperties": 1}, [{"a": 1}, {"a": 1, "b": 2}], [{}]),
    Case(
        "minProperties",
        properties(a=NULL, b=NULL, c=NULL) | {"minProperties": 2},
        [{"a": None, "b": None}, {"b": None, "c": None}, {"a": None, "b": None, "c": None}],
        [{}, {"a": None}, {"c": None}],
    ),
    Case(
        "minProperties",
        properties("a", a=NULL) | {"minProperties": 1, "additionalProperties": True},
        [{"a": None}, {"a": None, "b": 1}],
        [{}],
    ),
    Case(
        "minProperties",
        properties(next={"$ref": "#"}, a=NULL, b=NULL) | {"minProperties": 2},
        [{"a": None, "b": None}, {"next": {"a": None, "b": None}, "b": None}],
        [{}, {"a": None}, {"next": {"a": None}, "b": None}],
    ),
    Case("maxProperties", OBJECT | {"maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    Case("maxProperties", OBJECT | {"maxProperties": 0}, [{}], [{"a": 1}]),
    Case(
        "maxProperties",
        properties("b", a=NULL, b=NULL, c=NULL) | {"maxProperties": 2},
        [{"b": None}, {"a": None, "b": None}, {"b": None, "c": None}],
        [{"a": None, "b": None, "c": None}, {"a": None}],
    ),
    Case(
        "maxProperties",
        properties(a=NULL, b=NULL, c=NULL) | {"minProperties": 1, "maxProperties": 1},
        [{"a": None}, {"b": None}, {"c": None}],
        [{}, {"a": None, "c": None}],
    ),
    # composition
    Case("anyOf", {"anyOf": [INTEGER, NULL]}, [1, None], ["a", 1.5, []]),
    Case(
        "anyOf",
        {"anyOf": [STRING | {"maxLength": 1}, STRING | {"minLength": 3}]},
        ["", "a", "abc"],
        ["ab", 1],
    ),
    Case(
        "anyOf",
        {"anyOf": [properties("a", a=INTEGER), properties("b", b=INTEGER)]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": "x"}],
        [{"a": 1, "b": 1}],
    ),
    Case("anyOf", {"anyOf": [{"const": 1}, {"const": True}]}, [1, True], [False, 2]),
    Case("anyOf", {"anyOf": [{}]}, ANY_TYPE, []),
    Case("oneOf", {"oneOf": [INTEGER, STRING]}, [1, "a"], [None, 1.5]),
    Case("oneOf", {"oneOf": [{"enum": [1, 2]}, {"enum": [3, "a"]}]}, [1, 3, "a"], [4]),
    Case("oneOf", {"oneOf": [{"enum": ["a"]}, INTEGER]}, ["a", 1], ["b"]),
    Case(
        "oneOf",
        {"oneOf": [kind("a", x=INTEGER), kind("b", x=STRING)]},
        [{"kind": "a", "x": 1}, {"kind": "b", "x": "s"}, {"kind": "a"}],
        [{"kind": "a", "x": "s"}, {"kind": "c"}, {}],
    ),
    Case(
        "oneOf",
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "discriminator": {"propertyName": "kind"},
            "$defs": {"a": kind("a"), "b": kind("b")},
        },
        [{"kind": "a"}, {"kind": "b"}],
        [{"kind": "c"}],
    ),
    Case("oneOf", {"oneOf": [STRING]}, ["a"], [1]),
    Case(
        "oneOf",
        {"oneOf": [{k: v for k, v in kind(name, "kind").items() if k != "type"} for name in "ab"]},
        [{"kind": "a"}, {"kind": "b"}],
        [{"kind": "c"}, {}, "a"],
    ),
    Case("allOf", {"allOf": [INTEGER]}, [1], ["a"]),
    Case(
        "allOf",
        {"allOf": [{"$ref": "#/$defs/a"}], "description": "d", "$defs": {"a": NULL}},
        [None],
        [1],
    ),
    # references
    Case("$ref", {"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, [1], ["a"]),
    Case("$ref", {"$ref": "#/definitions/a", "definitions": {"a": INTEGER}}, [1], ["a"]),
    Case(
        "$ref",
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": INTEGER},
        },
        [1],
        ["a"],
    ),
    Case("$ref", {"$ref": "#/$defs/a~1b~0c%25", "$defs": {"a/b~c%": INTEGER}}, [1], ["a"]),
    Case(
        "$ref",
        properties(a=INTEGER, b={"$ref": "#/properties/a"}),
        [{"a": 1, "b": 2}],
        [{"b": "x"}],
    ),
    Case(
        "$ref",
        {"anyOf": [NULL, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]},
        [None, [None]],
        [[1], 1],
    ),
    Case(
        "$ref",
        TREE,
        [{"value": 1}, {"value": 1, "children": [{"value": 2, "children": []}]}],
        [{"value": 1, "children": [{}]}, {}],
    ),
    Case(
        "$ref",
        LIST,
        [{"head": 1}, {"head": 1, "tail": {"head": 2, "tail": None}}],
        [{"head": 1, "tail": {}}, {"tail": None}],
    ),
    Case("$ref", {"type": "array", "items": {"$ref": "#"}}, [[], [[]], [[], [[]]]], [[1], None]),
    Case(
        "$ref",
        properties(a={"$ref": "#/$defs/x", "title": "t", "default": 1}) | {"$defs": {"x": INTEGER}},
        [{"a": 1}],
        [{"a": "x"}],
    ),
    Case("$defs", {"$defs": {"unused": {"not": {}}}, "type": "integer"}, [1], ["a"]),
    Case("definitions", {"definitions": {"unused": 3}, "type": "integer"}, [1], ["a"]),
    # annotations
    *(
        Case(keyword, INTEGER | {keyword: value}, [1], ["a"])
        for keyword, value in {
            "title": "t",
            "description": "d",
            "default": "not even valid",
            "examples": [1],
            "example": 1,
            "deprecated": True,
            "readOnly": True,
            "writeOnly": True,
            "$comment": "c",
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.com/schema",
            "$anchor": "a",
            "contentEncoding": "base64",
            "contentMediaType": "text/html",
            "contentSchema": {"type": "string"},
            "discriminator": {"propertyName": "kind"},
            "x-order": 3,
        }.items()
    ),
]

REFUSALS = [
    Refusal("", False),
    Refusal("", 3),
    Refusal("", []),
    Refusal("", "string"),
    Refusal("", None),
    Refusal("", properties(a=False), "/properties/a"),
    Refusal("", properties(a=1), "/properties/a"),
    # What no node has.
    *(
        Refusal(keyword, INTEGER | {keyword: value})
        for keyword, value in {
            "not": {"const": 1},
            "if": {"const": 1},
            "then": {"const": 1},
            "else": {"const": 1},
            "dependentRequired": {"a": ["b"]},
            "dependentSchemas": {"a": {}},
            "dependencies": {"a": ["b"]},
            "contains": INTEGER,
            "minContains": 1,
            "maxContains": 1,
            "unevaluatedProperties": False,
            "unevaluatedItems": False,
            "additionalItems": False,
            "$dynamicRef": "#a",
            "$dynamicAnchor": "a",
            "$recursiveRef": "#",
            "$recursiveAnchor": True,
            "$vocabulary": {},
            "extends": {},
            "disallow": "string",
            "divisibleBy": 2,
            "nullable": True,
            "requried": [],
            "minlength": 3,
        }.items()
    ),
    Refusal("$id", properties(a=INTEGER | {"$id": "https://example.com/a"}), "/properties/a"),
    # Keywords of another type.
    Refusal("minLength", INTEGER | {"minLength": 1}),
    Refusal("minimum", STRING | {"minimum": 1}),
    Refusal("items", OBJECT | {"items": {}}),
    Refusal("properties", {"type": ["string", "null"], "properties": {}}),
    Refusal("maximum", {"type": "boolean", "maximum": 1}),
    Refusal("pattern", NULL | {"pattern": "a"}),
    Refusal("multipleOf", {"type": "number", "multipleOf": 0.1}),
    # type, enum and const
    Refusal("type", {"type": "int"}),
    Refusal("type", {"type": 3}),
    Refusal("type", {"type": []}),
    Refusal("type", {"type": ["string", {"type": "null"}]}),
    Refusal("type", {"type": "any"}),
    Refusal("enum", {"enum": []}),
    Refusal("enum", {"enum": "a"}),
    Refusal("enum", INTEGER | {"enum": ["a"]}),
    Refusal("const", STRING | {"const": 1}),
    Refusal("const", {"const": 0.1234567}),
    Refusal("const", {"const": 1e300}),
    Refusal("const", {"const": 10**30}),
    Refusal("enum", {"enum": [[0.5]]}),
    Refusal("minLength", STRING | {"enum": ["a"], "minLength": 1}),
    Refusal("enum", {"const": 1, "enum": [1]}),
    Refusal("properties", {"const": {}, "properties": {}}),
    # numbers
    Refusal("minimum", INTEGER | {"minimum": "1"}),
    Refusal("minimum", INTEGER | {"minimum": True}),
    Refusal("exclusiveMinimum", INTEGER | {"minimum": 1, "exclusiveMinimum": True}),
    Refusal("minimum", INTEGER | {"minimum": 3, "maximum": 2}),
    Refusal("minimum", INTEGER | {"exclusiveMinimum": 3, "exclusiveMaximum": 4}),
    Refusal("minimum", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}),
    Refusal("minimum", INTEGER | {"minimum": 2**64}),
    Refusal("minimum", {"type": "number", "maximum": 1e300}),
    Refusal("minimum", {"type": "number", "minimum": 1234567890.5}),
    Refusal("multipleOf", INTEGER | {"multipleOf": 0}),
    Refusal("multipleOf", INTEGER | {"multipleOf": -2}),
    Refusal("multipleOf", INTEGER | {"multipleOf": 0.5}),
    Refusal("multipleOf", INTEGER | {"multipleOf": 101}),
    Refusal("multipleOf", INTEGER | {"multipleOf": 2, "minimum": 0}),
    Refusal("multipleOf", INTEGER | {"multipleOf": 2, "minimum": 0, "maximum": 10**6}),
    Refusal("multipleOf", INTEGER | {"multipleOf": 7, "minimum": 1, "maximum": 6}),
    # strings
    Refusal("minLength", STRING | {"minLength": -1}),
    Refusal("minLength", STRING | {"minLength": 1.5}),
    Refusal("minLength", STRING | {"minLength": "1"}),
    Refusal("minLength", STRING | {"minLength": 3, "maxLength": 2}),
    Refusal("maxLength", STRING | {"maxLength": 10**9}),
    Refusal("pattern", STRING | {"pattern": 3}),
    Refusal("pattern", STRING | {"pattern": "("}),
    Refusal("pattern", STRING | {"pattern": ")"}),
    Refusal("pattern", STRING | {"pattern": "["}),
    Refusal("pattern", STRING | {"pattern": "[]"}),
    Refusal("pattern", STRING | {"pattern": "[b-a]"}),
    Refusal("pattern", STRING | {"pattern": "*"}),
    Refusal("pattern", STRING | {"pattern": "a**"}),
    Refusal("pattern", STRING | {"pattern": "a++"}),
    Refusal("pattern", STRING | {"pattern": "a{3,2}"}),
    Refusal("pattern", STRING | {"pattern": "(?=a)"}),
    Refusal("pattern", STRING | {"pattern": "(?!a)"}),
    Refusal("pattern", STRING | {"pattern": "(?<=a)b"}),
    Refusal("pattern", STRING | {"pattern": "(?i)a"}),
    Refusal("pattern", STRING | {"pattern": r"(a)\1"}),
    Refusal("pattern", STRING | {"pattern": r"\bfoo\b"}),
    Refusal("pattern", STRING | {"pattern": r"\p{L}"}),
    Refusal("pattern", STRING | {"pattern": r"\u{61}"}),
    Refusal("pattern", STRING | {"pattern": r"\ud83d"}),
    Refusal("pattern", STRING | {"pattern": "a$b"}),
    Refusal("pattern", STRING | {"pattern": "(^a)b"}),
    Refusal("pattern", STRING | {"pattern": '^"$'}),
    Refusal("pattern", STRING | {"pattern": r"^\n$"}),
    Refusal("pattern", STRING | {"pattern": "^a{513}$"}),
    Refusal("pattern", STRING | {"pattern": "(a?b?)*"}),
    Refusal("pattern", STRING | {"pattern": "a" * 1025}),
    Refusal("pattern", STRING | {"pattern": "(" * 40 + ")" * 40}),
    Refusal("maxLength", STRING | {"pattern": "^a+$", "maxLength": 3}),
    Refusal("minLength", STRING | {"pattern": "^a*$", "minLength": 1}),
    Refusal("format", STRING | {"pattern": "a", "format": "date"}),
    Refusal("maxLength", STRING | {"format": "email", "maxLength": 30}),
    *(
        Refusal("format", STRING | {"format": name})
        for name in ("regex", "json-pointer", "idn-email", "binary", "password", "", 3)
    ),
    # arrays
    Refusal("uniqueItems", {"type": "array", "uniqueItems": True}),
    Refusal("uniqueItems", {"type": "array", "uniqueItems": True, "maxItems": 2}),
    Refusal("", {"type": "array", "items": [{}]}, "/items"),
    Refusal("prefixItems", {"type": "array", "prefixItems": {}}),
    Refusal("", {"type": "array", "prefixItems": [False]}, "/prefixItems/0"),
    Refusal("minItems", {"type": "array", "minItems": 2, "maxItems": 1}),
    Refusal("minItems", {"type": "array", "prefixItems": [{}], "minItems": 2}),
    Refusal("minItems", {"type": "array", "items": False, "minItems": 1}),
    Refusal("maxItems", {"type": "array", "maxItems": -1}),
    Refusal("maxItems", {"type": "array", "maxItems": 10**7}),
    Refusal("not", {"type": "array", "items": {"not": {}}}, "/items"),
    # objects
    Refusal("required", OBJECT | {"required": ["a"]}),
    Refusal("required", properties("a", "b", a=NULL)),
    Refusal("required", OBJECT | {"required": True}),
    Refusal("required", OBJECT | {"required": [1]}),
    Refusal("required", OBJECT | {"required": [[]]}),
    Refusal("properties", OBJECT | {"properties": []}),
    Refusal("properties", properties(**{"n" * 65: NULL})),
    Refusal("propertyNames", properties(a=NULL) | {"propertyNames": {"maxLength": 1}}),
    Refusal("propertyNames", OBJECT | {"propertyNames": INTEGER}),
    Refusal("propertyNames", OBJECT | {"propertyNames": {"enum": ["a", 1]}}),
    Refusal("", OBJECT | {"propertyNames": False}, "/propertyNames"),
    Refusal("patternProperties", OBJECT | {"patternProperties": {"a": {}, "b": {}}}),
    Refusal("patternProperties", properties(a=NULL) | {"patternProperties": {"a": {}}}),
    Refusal("patternProperties", OBJECT | {"patternProperties": []}),
    Refusal("patternProperties", OBJECT | {"patternProperties": {"(": {}}}),
    Refusal(
        "additionalProperties",
        OBJECT | {"patternProperties": {"a": {}}, "additionalProperties": {}},
    ),
    Refusal("", OBJECT | {"additionalProperties": 3}, "/additionalProperties"),
    Refusal("minProperties", OBJECT | {"minProperties": 2}),
    Refusal("minProperties", properties(a=NULL) | {"minProperties": 2}),
    Refusal(
        "minProperties", properties(a=NULL) | {"minProperties": 1, "additionalProperties": True}
    ),
    Refusal("", properties(a={"$ref": "#"}, b=NULL) | {"minProperties": 2}),
    Refusal("", properties("a", a={"$ref": "#"}, b=NULL, c=NULL) | {"minProperties": 2}),
    Refusal("maxProperties", properties("a", "b", a=NULL, b=NULL) | {"maxProperties": 1}),
    Refusal(
        "maxProperties", properties(**{f"p{n}": NULL for n in range(65)}) | {"maxProperties": 3}
    ),
    Refusal("not", properties(**{"a/b": {"not": {}}}), "/properties/a~1b"),
    # composition
    Refusal("allOf", {"allOf": [{}, {}]}),
    Refusal("allOf", {"allOf": []}),
    Refusal("type", {"allOf": [{}], "type": "object"}),
    Refusal("anyOf", {"anyOf": []}),
    Refusal("anyOf", {"anyOf": {}}),
    Refusal("type", {"anyOf": [{}], "type": "object"}),
    Refusal("properties", {"anyOf": [{}], "properties": {}}),
    Refusal("oneOf", {"anyOf": [{}], "oneOf": [{}]}),
    Refusal("oneOf", {"oneOf": []}),
    Refusal("oneOf", {"oneOf": [INTEGER, {"type": "number"}]}),
    Refusal("oneOf", {"oneOf": [STRING, STRING | {"maxLength": 3}]}),
    Refusal("oneOf", {"oneOf": [{}, INTEGER]}),
    Refusal("oneOf", {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}),
    Refusal("oneOf", {"oneOf": [{"enum": [1]}, INTEGER]}),
    Refusal("oneOf", {"oneOf": [{"const": [1]}, {"const": [1.0]}]}),
    Refusal("oneOf", {"oneOf": [{"minLength": 1}, {"minimum": 0}]}),
    Refusal("oneOf", {"oneOf": [{"properties": {"a": NULL}}, STRING]}),
    Refusal("oneOf", {"oneOf": [{"minimum": 0}, {"const": "a"}]}),
    Refusal("oneOf", {"oneOf": [properties("a", a=NULL), properties("b", b=NULL)]}),
    Refusal("oneOf", {"oneOf": [kind("a"), kind("a")]}),
    Refusal("oneOf", {"oneOf": [kind("a"), properties(kind={"const": "b"})]}),
    Refusal("oneOf", {"oneOf": [{"const": n} for n in range(65)]}),
    # references
    Refusal("$ref", {"$ref": 3}),
    Refusal("$ref", {"$ref": ""}),
    Refusal("$ref", {"$ref": "https://example.com/schema"}),
    Refusal("$ref", {"$ref": "other.json#/a"}),
    Refusal("$ref", {"$ref": "#anchor"}),
    Refusal("$ref", {"$ref": "#/$defs/none"}, "/$defs/none"),
    Refusal("$ref", {"$ref": "#/$defs/0", "$defs": []}, "/$defs/0"),
    Refusal("type", {"$ref": "#/$defs/a", "type": "object", "$defs": {"a": {}}}),
    Refusal("", {"$ref": "#"}),
    Refusal(
        "",
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [NULL, {"$ref": "#/$defs/a"}]}},
        },
        "/$defs/a",
    ),
    Refusal(
        "",
        {"$ref": "#/$defs/a", "$defs": {"a": properties("a", a={"$ref": "#/$defs/a"})}},
        "/$defs/a",
    ),
    Refusal(
        "",
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}},
        },
        "/$defs/a",
    ),
    Refusal(
        "contains",
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "contains": {}}}},
        "/$defs/a",
    ),
]
