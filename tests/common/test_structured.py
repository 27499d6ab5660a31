"""Constraints of every kind as structural tags: what is the same, what is refused, how large."""

import copy
import hashlib
import json
import random
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import (
    MAX_TEXT_BYTES,
    schema,
    to_structural_tag,
)
from pdserve_common.structured.accepted import (
    DIGEST_BYTES,
    AcceptedConstraints,
    StructuralTags,
)
from pdserve_common.structured.formats import PATTERNS
from pdserve_common.types.sampling_params import StructuredOutputsParams
from support.samples import seeds
from support.schema_cases import CASES, REFUSALS
from support.schemas import Judge
from support.work import work_of

DOCS = Path(__file__).parents[2] / "docs" / "structured_outputs.md"
STRING: dict[str, Any] = {"type": "string"}


def _params(**constraint: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**constraint)


ANY_TEXT = {"type": "any_text"}
AN_A = {"type": "const_string", "value": "a"}


def _schema(schema: Any) -> StructuredOutputsParams:
    return _params(json_schema=json.dumps(schema))


def _tag(format: Any) -> StructuredOutputsParams:
    return _params(structural_tag=json.dumps({"type": "structural_tag", "format": format}))


def test_a_tag_has_its_texts_digest() -> None:
    tag = to_structural_tag(_params(choice=("é",)))
    assert json.loads(tag.text)["format"] == {"type": "const_string", "value": "é"}
    assert tag.digest == hashlib.sha256(tag.text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (_params(choice=("a", "b")), _params(choice=("b", "a", "b"))),
        (_params(regex="[a-c]x"), _params(regex="^(?:[cab])(x)$")),
        (_params(regex=r"\d+"), _params(regex="[0-9]{1,}?")),
        (_schema({"enum": [1, "a"]}), _schema({"enum": ["a", 1.0, 1]})),
        (
            _params(json_schema='{"type": "string", "minLength": 1}'),
            _params(json_schema='{\n "minLength":1.0,"type":["string"], "title": "t" }'),
        ),
        (
            _schema({"$ref": "#/$defs/a", "$defs": {"a": STRING, "unused": {}}}),
            _schema({"$ref": "#/definitions/b", "definitions": {"b": STRING}}),
        ),
        (_params(json_object=True), _schema({"type": "object", "description": "any"})),
        (
            _schema({"type": "integer", "exclusiveMinimum": 2}),
            _schema({"type": "integer", "minimum": 3}),
        ),
        (
            _schema({"type": "object", "properties": {"a": STRING}}),
            _tag(
                {
                    "type": "json_schema",
                    "json_schema": {
                        "properties": {"a": STRING},
                        "additionalProperties": False,
                        "type": "object",
                    },
                }
            ),
        ),
    ],
)
def test_what_says_the_same_is_compiled_once(
    left: StructuredOutputsParams, right: StructuredOutputsParams
) -> None:
    assert to_structural_tag(left) == to_structural_tag(right)


def test_properties_in_another_order_are_another_constraint() -> None:
    left, right = (
        to_structural_tag(_schema({"type": "object", "properties": dict.fromkeys(names, STRING)}))
        for names in ("ab", "ba")
    )
    assert left.digest != right.digest


@pytest.mark.parametrize(
    ("params", "allowed", "not_allowed"),
    [
        (_params(json_object=True), ["{}", '{"a": [1]}', '{ "a":  1 }'], ["[]", '{"a":   1}', ""]),
        (_params(choice=("yes", "no", "not")), ["yes", "no", "not"], ["", "n", "yesno"]),
        (_params(regex="a|bc"), ["a", "bc"], ["ab", "xa", ""]),
        (_params(regex=r"[^\n]+\n"), ["é\n", '"\\\n'], ["\n", "a"]),
        (_params(regex="^é{2,3}$"), ["éé", "ééé"], ["é", "éééé"]),
        (_params(regex="$"), [""], ["a"]),
        (_params(grammar='root ::= "a" b*\nb ::= [0-9]'), ["a", "a12"], ["", "ab"]),
        (
            _tag(
                {
                    "type": "sequence",
                    "elements": [
                        {"type": "any_text", "excludes": ["</think>"]},
                        {"type": "const_string", "value": "</think>"},
                        {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 7}},
                    ],
                }
            ),
            ["</think>7", "so</think>12"],
            ["7", "</think>6", "</think></think>7"],
        ),
        (
            _tag(
                {
                    "type": "triggered_tags",
                    "triggers": ["<call="],
                    "tags": [
                        {
                            "type": "tag",
                            "begin": "<call=f>",
                            "content": {"type": "json_schema", "json_schema": {"type": "object"}},
                            "end": "</call>",
                        }
                    ],
                }
            ),
            ["text", "<call=f>{}</call>", 'so <call=f>{"a":1}</call> then'],
            ["<call=g>{}</call>", "<call=f>1</call>"],
        ),
        (
            _tag(
                {
                    "type": "repeat",
                    "min": 1,
                    "max": 2,
                    "content": {"type": "or", "elements": [{"type": "regex", "pattern": "[ab]"}]},
                }
            ),
            ["a", "ba"],
            ["", "aaa", "c"],
        ),
        (
            _tag({"type": "repeat", "min": 150, "max": 300, "content": AN_A}),
            ["a" * 150, "a" * 300],
            ["a" * 149, "a" * 301],
        ),
        (_params(regex="a{1,129}b"), ["ab", "a" * 129 + "b"], ["b", "a" * 130 + "b"]),
        (_params(regex="(ab){130,}"), ["ab" * 130, "ab" * 400], ["ab" * 129, "ab" * 130 + "a"]),
        (
            _tag(
                {
                    "type": "json_schema",
                    "style": "qwen_xml",
                    "json_schema": {
                        "type": "object",
                        "properties": {"city": STRING, "days": {"type": "integer"}},
                        "required": ["city"],
                    },
                }
            ),
            ["<parameter=city>\nRome & more\n</parameter>\n<parameter=days>\n3\n</parameter>"],
            [
                "<parameter=days>3</parameter>",
                "<parameter=city>x</parameter><parameter=days>x</parameter>",
            ],
        ),
    ],
)
def test_a_constraint_allows_what_it_says(
    params: StructuredOutputsParams, allowed: list[str], not_allowed: list[str]
) -> None:
    judge = Judge(params)
    assert [text for text in allowed if not judge.allows(text)] == []
    assert [text for text in not_allowed if judge.allows(text)] == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (_params(), "structured_outputs has 0 constraints (none), must be exactly one of json_sch"),
        (_params(regex="a", json_object=True), "structured_outputs has 2 constraints (regex, json"),
        (_params(json_schema=""), "structured_outputs.json_schema is empty"),
        (_params(json_schema=" " * 65537), "structured_outputs.json_schema has 65537 bytes, at mo"),
        (
            _params(json_schema='"' + "é" * 40000 + '"'),
            "structured_outputs.json_schema has 80002 by",
        ),
        (
            _params(json_schema="[" * 65),
            "structured_outputs.json_schema is 65 levels deep, at most 64",
        ),
        (_params(json_schema="{"), "structured_outputs.json_schema is no JSON: "),
        (_params(json_schema="{} {}"), "structured_outputs.json_schema is no JSON: "),
        (_params(json_schema='{"a": 1, "a": 2}'), "is no JSON: the key 'a' repeats"),
        (_params(json_schema='{"const": NaN}'), "is no JSON: NaN is no number"),
        (_params(json_schema='{"const": -Infinity}'), "is no JSON: -Infinity is no number"),
        (_params(json_schema='{"const": 1e400}'), "is no JSON: 1e400 is too large"),
        (_params(json_schema=f'{{"const": {"9" * 5000}}}'), "is no JSON: "),
        (_params(json_schema='{"const": "\\ud800"}'), "json_schema has half of a surrogate pair"),
        (_params(json_schema='{"const": "\ud800"}'), "json_schema has half of a surrogate pair"),
        (
            _schema(STRING | {"format": "email", "maxLength": 30}),
            "maxLength at the root is not enforced beside format email that has longer texts",
        ),
        (_params(regex=""), "structured_outputs.regex is empty"),
        (_params(regex="a" * 1025), "structured_outputs.regex has 1025 characters, at most 1024"),
        (
            _params(regex="(.{9}){99}"),
            "structured_outputs.regex has 891 characters with repetitions",
        ),
        (_params(regex="a{1000001}"), "structured_outputs.regex repeats 1000001 times, at most"),
        (_params(regex="(?=a)b"), "structured_outputs.regex has (?=a at 0, which is not enforced"),
        (_params(regex="a(b"), "structured_outputs.regex has a ( without a ) at 3"),
        (
            _params(regex="[^\\x00-\\uffff\U00010000-\U0010ffff]"),
            "structured_outputs.regex matches noth",
        ),
        (_params(choice=("a", "")), "structured_outputs.choice has an empty text"),
        (_params(choice=("a",) * 1001), "structured_outputs.choice has 1001 texts, at most 1000"),
        (
            _params(choice=("a" * 65537,)),
            "structured_outputs.choice has 65537 bytes, at most 65536",
        ),
        (_params(choice=("\udcff",)), "structured_outputs.choice has half of a surrogate pair"),
        (_params(grammar='root ::= "a"{129}'), "grammar repeats 129 times, at most 128"),
        (
            _params(grammar='root ::= "a"{ 1 , 999999999999 }'),
            "repeats 999999999999 times, at most",
        ),
        (
            _tag({"type": "grammar", "grammar": 'root ::= ("{9}" [{"9}] "#"){1,200} # {9'}),
            "structural_tag: /format repeats 200 times, at most 128 are enforced",
        ),
        (_params(grammar="a" * 16385), "structured_outputs.grammar has 16385 bytes, at most 16384"),
        (_params(structural_tag="{}"), "structural_tag must be an object of type and format"),
        (_params(structural_tag='{"format": {}, "x": 1}'), "structural_tag must be an object of"),
        (_params(structural_tag='{"format": {}, "type": "x"}'), "type must be structural_tag"),
        (_tag([]), "structural_tag: /format is an array, must be an object"),
        (_tag({}), "structural_tag: type at /format is null, must be one of const_string, "),
        (
            _tag({"type": "qwen_xml_parameter"}),
            "type at /format is qwen_xml_parameter, must be one",
        ),
        (_tag({"type": "regex"}), "pattern at /format is missing"),
        (_tag({"type": "regex", "pattern": "a", "x": 1}), "x at /format is no field of regex"),
        (
            _tag({"type": "regex", "pattern": "(?i)a"}),
            "/format has (?i) at 0, which is not enforced",
        ),
        (
            _tag({"type": "sequence", "elements": []}),
            "/format/elements must be an array that is not",
        ),
        (_tag({"type": "const_string", "value": 3}), "/format/value must be a string that is not"),
        (
            _tag({"type": "const_string", "value": "a" * 4097}),
            "/format/value has 4097 characters, at",
        ),
        (_tag({"type": "token", "token": -1}), "/format/token is -1, must be 0 to 2147483647"),
        (_tag({"type": "token", "token": 0.5}), "/format/token is a number, must be an integer"),
        (
            _tag({"type": "repeat", "min": 3, "max": 2, "content": ANY_TEXT}),
            "/format repeats 3 to 2 times",
        ),
        (
            _tag({"type": "repeat", "min": 0, "max": 1001, "content": ANY_TEXT}),
            "/format/max is 1001, must be -1 to 1000",
        ),
        (
            _tag({"type": "tag", "begin": ANY_TEXT, "content": ANY_TEXT, "end": ""}),
            "/format begins or ends with no token",
        ),
        (
            _tag({"type": "triggered_tags", "triggers": ["<"], "tags": [ANY_TEXT]}),
            "/format has tags that are no tag",
        ),
        (
            _tag(
                {
                    "type": "triggered_tags",
                    "triggers": ["<a", "<"],
                    "tags": [{"type": "tag", "begin": "<a>", "content": ANY_TEXT, "end": "b"}],
                }
            ),
            "/format has a tag that begins with 2 of its triggers, must be 1",
        ),
        (
            _tag({"type": "json_schema", "json_schema": {"type": "array", "contains": {}}}),
            "structural_tag: /format/json_schema: contains at the root is not enforced",
        ),
        (
            _tag({"type": "json_schema", "style": "yaml", "json_schema": {}}),
            "/format has style yaml, must be one of json, qwen_xml",
        ),
        (
            _tag({"type": "json_schema", "style": "qwen_xml", "json_schema": {}}),
            "/format has style qwen_xml and no schema of type object",
        ),
        (
            _tag(
                {
                    "type": "json_schema",
                    "style": "qwen_xml",
                    "json_schema": {
                        "type": "object",
                        "properties": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}},
                        "$defs": {"b": STRING | {"maxLength": 3}},
                    },
                }
            ),
            "/format has style qwen_xml and a property with pattern, format or a length",
        ),
    ],
)
def test_a_malformed_constraint_is_refused(params: StructuredOutputsParams, message: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        to_structural_tag(params)
    assert message in error.value.message
    assert error.value.field == "structured_outputs"


@pytest.mark.parametrize(
    "others", [{"additionalProperties": STRING}, {"patternProperties": {"^x$": STRING}}]
)
def test_in_xml_what_is_said_of_characters_is_refused_of_any_property(others: Any) -> None:
    for changes, is_served in (({}, True), ({"pattern": "1$"}, False), ({"maxLength": 2}, False)):
        schema = copy.deepcopy(others)
        (kind,) = schema
        where = schema[kind] if kind == "additionalProperties" else schema[kind]["^x$"]
        where.update(changes)
        json_schema = {"type": "object", **schema}
        tag = _tag({"type": "json_schema", "style": "qwen_xml", "json_schema": json_schema})
        if is_served:
            to_structural_tag(tag)
            continue
        with pytest.raises(InvalidRequestError, match="a property with pattern"):
            to_structural_tag(tag)


def _nested(format: Any, levels: int) -> StructuredOutputsParams:
    for _ in range(levels):
        format = {"type": "optional", "content": format}
    return _tag(format)


@pytest.mark.parametrize(
    ("make", "fits", "message"),
    [
        (
            lambda n: _schema({"type": "array", "items": {"enum": [*range(n)]}}),
            1000,
            "makes more than 1000 val",
        ),
        (lambda n: _schema({"anyOf": [{}] * n}), 4999, "makes more than 5000 schemas"),
        (
            lambda n: _schema({"type": "object", "properties": {f"p{i}": {} for i in range(n)}}),
            512,
            "makes more than 512 properties",
        ),
        (
            lambda n: _schema(
                {
                    "type": "array",
                    "prefixItems": [{"$ref": f"#/$defs/{i}"} for i in range(n)],
                    "$defs": {f"{i}": {"type": "null"} for i in range(n)},
                }
            ),
            128,
            "makes more than 128 different $ref",
        ),
        (
            lambda n: _schema(
                {"anyOf": [STRING | {"pattern": f"^{'.' * 255}{i:x}$"} for i in range(n)]}
            ),
            16,
            "makes more than 4096 characters of patterns",
        ),
        (
            lambda n: _schema(
                {"oneOf": [{"anyOf": [{"const": f"{k}{i}"} for i in range(n)]} for k in "ab"]}
            ),
            10,
            None,
        ),
        (
            lambda n: _schema(
                {"type": "object", "properties": {"n" * n: {}}, "additionalProperties": {}}
            ),
            64,
            "of 65 characters, at most 64",
        ),
        (lambda n: _nested(ANY_TEXT, n), 15, "is 17 levels deep, at most 16"),
        (
            lambda n: _tag({"type": "or", "elements": [ANY_TEXT] * n}),
            1023,
            "is format 1025, at most 1024",
        ),
    ],
)
def test_sizes_are_bounded(
    make: Callable[[int], StructuredOutputsParams], fits: int, message: str | None
) -> None:
    assert len(to_structural_tag(make(fits)).text) <= MAX_TEXT_BYTES
    if message is not None:
        with pytest.raises(InvalidRequestError) as error:
            to_structural_tag(make(fits + 1))
        assert message in error.value.message


def test_comparisons_within_one_of_are_bounded() -> None:
    options = [{"anyOf": [STRING | {"maxLength": i}, {"type": "null"}]} for i in range(200)]
    schema = {"oneOf": [{"anyOf": options}, {"anyOf": [{"const": i} for i in range(200)]}]}
    with pytest.raises(InvalidRequestError, match="more than 20000 comparisons within oneOf"):
        to_structural_tag(_schema(schema))


def test_values_are_read_once_however_often_schemas_with_them_are_compared() -> None:
    names = [f"p{n}" for n in range(8)]
    values = {"enum": [f"s{n}" for n in range(400)]}

    def compared(num_options: int) -> int:
        properties: Any = {name: {"$ref": "#/$defs/values"} for name in names}
        kinds = [properties | {"kind": {"const": n}} for n in range(num_options)]
        options = [{"type": "object", "properties": each, "required": [*each]} for each in kinds]
        schema = {"oneOf": options, "$defs": {"values": values}}
        return work_of(lambda: to_structural_tag(_schema(schema))).num_calls

    assert compared(8) < 3 * compared(4)


def test_definitions_within_each_other_do_not_multiply() -> None:
    schema: Any = {"anyOf": [STRING] * 1000}
    for _ in range(25):
        schema = {"type": "object", "properties": {"a": schema}}
    refs = [{"$ref": "#/$defs/a" + "/properties/a" * n} for n in range(25)]
    with pytest.raises(InvalidRequestError, match="makes more than 5000 schemas"):
        to_structural_tag(_schema({"anyOf": refs, "$defs": {"a": schema}}))


def _layers(num_layers: int) -> StructuredOutputsParams:
    """Definitions of which each may be any of those of the next layer."""
    refs = {n: [{"$ref": f"#/$defs/{n}.{m}"} for m in range(4)] for n in range(1, num_layers)}
    layers = {f"{n - 1}.{m}": {"anyOf": each} for n, each in refs.items() for m in range(4)}
    last = {f"{num_layers - 1}.{m}": {"type": "integer", "minimum": m} for m in range(4)}
    properties = {"a": {"$ref": "#/$defs/0.0"}}
    schema = {"type": "object", "properties": properties, "$defs": layers | last}
    return _tag({"type": "json_schema", "json_schema": schema, "style": "qwen_xml"})


def test_work_grows_with_definitions_not_with_the_ways_through_them() -> None:
    few, many = (work_of(lambda n=n: to_structural_tag(_layers(n))).num_calls for n in (4, 8))
    assert many < 3 * few


def test_the_docs_list_what_is_enforced() -> None:
    text = DOCS.read_text()
    for word in (*schema.ENFORCED, *schema.ANNOTATIONS, *PATTERNS):
        assert f"`{word}`" in text, word


def test_the_docs_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    exec(example, {})
    digest, error = capsys.readouterr().out.splitlines()
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert f"# {error}" in example


def test_what_looks_like_a_long_repetition_stands_in_grammars() -> None:
    to_structural_tag(_params(grammar='root ::= "b"{1,128} "{200}" [\\]{200}] # {200}'))


KEYWORDS = sorted(
    {key for case in (*CASES, *REFUSALS) if isinstance(case.schema, dict) for key in case.schema}
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**70, 10**400, 1e308, 5e-324, -0.0, "", "#", "a", "\x00"),
    *(
        "string",
        "object",
        "(",
        "[^",
        "a{9}{9}",
        "\\",
        "#/x",
        "^$",
        "😀" * 9,
        [],
        {},
        [[]],
        [{}],
        {"a": {}},
    ),
)


class Hostile:
    """Texts that no honest client sends, and some that are nearly right."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def params(self) -> StructuredOutputsParams:
        text = self._rng.choice([self._schema, self._schema, self._deep, self._long, self._noise])()
        kind = self._rng.choice(
            ["json_schema", "json_schema", "regex", "grammar", "structural_tag"]
        )
        if kind == "structural_tag" and self._rng.random() < 0.5:
            text = f'{{"format": {{"type": "json_schema", "json_schema": {text}}}}}'
        return _params(**{kind: text})

    def _value(self, depth: int) -> Any:
        pick = self._rng.random()
        if depth == 0 or pick < 0.2:
            return self._rng.choice(VALUES)
        if pick < 0.4:
            return self._rng.choice(CASES).schema
        if pick < 0.5:
            return [self._value(depth - 1) for _ in range(self._rng.randint(0, 4))]
        keys = self._rng.choices(KEYWORDS, k=self._rng.randint(1, 4))
        return {key: self._value(depth - 1) for key in keys}

    def _schema(self) -> str:
        return json.dumps(self._value(self._rng.randint(1, 5)))

    def _deep(self) -> str:
        depth = 10 ** self._rng.randint(0, 5)
        begin, end = self._rng.choice(
            [
                ("[", "]"),
                ('{"items":', "}"),
                ('{"anyOf":[', "]}"),
                ("(", ")"),
                ("(?:a|", ")*"),
                ('\\"', ""),
            ]
        )
        return begin * depth + self._rng.choice(["", "{}", "a"]) + end * depth

    def _long(self) -> str:
        unit = self._rng.choice(
            ['{"type":"string","maxLength":9},', '"a",', "é", "\\", "a|", "[^a]", "9", '\\"']
        )
        begin, end = self._rng.choice(
            [('{"anyOf":[', "{}]}"), ('{"enum":[', "1]}"), ("", ""), ('"', "")]
        )
        return begin + unit * 10 ** self._rng.randint(1, 5) + end

    def _noise(self) -> str:
        alphabet = self._rng.choice(
            [string.printable, '{}[]",:\\', "()[]{}|*+?^$\\.-a1", "\x00\ud800é😀\u2028"]
        )
        return "".join(self._rng.choices(alphabet, k=self._rng.randint(0, 300)))


@pytest.mark.parametrize("seed", seeds(8))
def test_hostile_texts_are_refused_or_small(seed: int) -> None:
    hostile = Hostile(seed)
    errors = [error for _ in range(250) if (error := _refusal(hostile.params())) is not None]
    assert 0 < len(errors) < 250
    for error in errors:
        assert error.field == "structured_outputs"
        assert len(error.message.encode()) < 4000


def _refusal(params: StructuredOutputsParams) -> InvalidRequestError | None:
    try:
        tag = to_structural_tag(params)
    except InvalidRequestError as error:
        return error
    assert len(tag.text) <= MAX_TEXT_BYTES
    return None


def test_what_was_accepted_is_known_until_it_is_the_oldest_of_many() -> None:
    accepted = AcceptedConstraints(max_entries=2)
    first, second, third = (_params(regex=each) for each in "abc")
    for each in (first, second):
        assert each not in accepted
        accepted.check(each, field=None)
    assert first in accepted
    accepted.check(third, field=None)
    assert (first in accepted, second in accepted, len(accepted)) == (True, False, 2)
    with pytest.raises(InvalidRequestError):
        accepted.check(_params(regex="("), field=None)
    assert _params(regex="(") not in accepted
    assert _params(json_schema="a") not in accepted  # the same text as another kind


UNBOUNDED = [
    _params(json_schema="[" * (1 << 20)),
    _params(regex="a" * (1 << 20)),
    _params(grammar="a" * (1 << 20)),
    _params(structural_tag="[" * (1 << 20)),
    _params(choice=("a",) * (1 << 20)),
    _params(choice=("a" * (1 << 20),)),
    _params(regex="\ud800"),
    _params(choice=("a", "\ud800")),
]


@pytest.mark.parametrize("params", UNBOUNDED)
def test_what_is_too_large_is_refused_before_it_is_hashed(
    params: StructuredOutputsParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve_common.structured.accepted.digest_of", None)
    accepted = AcceptedConstraints()
    assert params not in accepted
    with pytest.raises(InvalidRequestError, match=r"^tools.f has ") as error:
        accepted.check(params, field="tools.f")
    assert error.value.field == "tools"


def test_tags_that_are_kept_have_a_bound() -> None:
    made = [_params(regex="a" * length) for length in range(1, 40)]
    size = len(to_structural_tag(made[-1]).text) + DIGEST_BYTES
    tags = StructuralTags(max_bytes=4 * size)
    for params in (*made, *made):
        tag = to_structural_tag(params)
        for _ in range(2):
            tags.put(tag.digest, tag)
        assert tags.get(tag.digest) == tag
        assert 0 < tags.num_bytes <= 4 * size
    assert tags.get(to_structural_tag(made[0]).digest) is None
