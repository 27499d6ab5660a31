"""What fits a chat format's grammar is found again, and what is no call stays content: random
answers, which hold every marker of every format, cut anywhere.
"""

import functools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_chat_formats import JUNK, SCRAPS, parse
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as is_accepted

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import to_structural_tag
from pdserve_common.types.sampling_params import StructuredOutputsParams
from pdserve_router.chat_formats.base import ReasoningStart
from pdserve_router.chat_formats.registry import FORMATS
from pdserve_router.chat_formats.tags import CallRules
from pdserve_router.text.parts import Content, ToolCallDelta, content_of
from support.samples import sampled
from support.schemas import NAMES as PROPERTY_NAMES
from support.schemas import RandomSchemas, dump

STRING = {"type": "string"}
TOOLS: dict[str, Any] = {
    "alpha": {
        "type": "object",
        "properties": {
            "text": STRING,
            "days": {"type": "integer"},
            "list": {"type": "array"},
            "deep": {"type": "object"},
            "unit": {"anyOf": [STRING, {"type": "null"}]},
            "more": {"anyOf": [STRING, {"type": "array", "items": STRING}]},
            "a b": {"$ref": "#/$defs/text"},
        },
        "additionalProperties": False,
        "$defs": {"text": STRING},
    },
    "beta": {"type": "object", "properties": {}, "additionalProperties": False},
    "gamma": {"type": "object", "additionalProperties": STRING},
}
TEXTS = st.lists(SCRAPS | st.text(max_size=4), max_size=6).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)
# Strings that are no other value of the same spelling.
UNITS = TEXTS.filter(lambda text: text.strip() not in ("null", "None"))
LISTS = st.lists(TEXTS, max_size=3)
VALUES = {
    "text": TEXTS,
    "days": st.integers(),
    "list": st.lists(JSON, max_size=3),
    "deep": st.dictionaries(TEXTS, JSON, max_size=3),
    "unit": UNITS | st.none(),
    "more": TEXTS.filter(lambda text: not text.strip().startswith("[")) | LISTS,
    "a b": TEXTS,
}
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True)
ARGUMENTS = {
    # In the order of the schema, as grammars have it.
    "alpha": st.fixed_dictionaries({}, optional=VALUES).map(
        lambda drawn: {name: drawn[name] for name in VALUES if name in drawn}
    ),
    "beta": st.just({}),
    "gamma": st.dictionaries(NAMES, TEXTS, max_size=2),
}
CALLS = st.lists(
    st.sampled_from(sorted(TOOLS)).flatmap(lambda name: st.tuples(st.just(name), ARGUMENTS[name])),
    min_size=1,
    max_size=3,
)
SEPARATORS = {"llama3_json": ["; ", ";\n", "\n", ""], "hermes": ["\n", ""], "deepseek_r1": ["\n"]}
# The end of a value, as models write it.
ENDED = re.compile(r"</parameter>\s*(<parameter=|</function>|</tool_call>)")


def number_of_cases(count: int, kept: int) -> Any:
    return pytest.mark.parametrize("num_cases", sampled((kept, count), kept))


def checked(num_cases: int) -> settings:
    return settings(max_examples=num_cases, deadline=None, suppress_health_check=list(HealthCheck))


def as_xml(arguments: dict[str, Any]) -> str:
    return "".join(
        f"<parameter={key}>\n{each if isinstance(each, str) else json.dumps(each)}\n</parameter>\n"
        for key, each in arguments.items()
    )


def written(name: str, calls: list[tuple[str, dict[str, Any]]], separator: str) -> str:
    """As models of that format write calls."""
    dumped = [(tool, json.dumps(each, ensure_ascii=False)) for tool, each in calls]
    if name == "qwen3_coder":
        return "\n".join(
            f"<tool_call>\n<function={tool}>\n{as_xml(each)}</function>\n</tool_call>"
            for tool, each in calls
        )
    if name == "mistral":
        return "".join(f"[TOOL_CALLS]{tool}[ARGS]{text}" for tool, text in dumped)
    if name == "deepseek_r1":
        begins, begin, sep = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")  # noqa: RUF001
        end, ends = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
        each = (f"{begin}function{sep}{t}\n```json\n{text}\n```{end}" for t, text in dumped)
        return begins + separator.join(each) + ends
    key = "parameters" if name == "llama3_json" else "arguments"
    objects = [f'{{"name": "{tool}", "{key}": {text}}}' for tool, text in dumped]
    if name == "hermes":
        return separator.join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if name == "mistral_list":
        return f"[TOOL_CALLS][{', '.join(objects)}]"
    return separator.join(objects)


@functools.cache
def grammar_of(name: str) -> Grammar:
    return grammar_of_tools(name, TOOLS)


def grammar_of_tools(name: str, tools: dict[str, Any]) -> Grammar:
    """Raises InvalidRequestError if they cannot be enforced."""
    rules = CallRules(tools=tools, stop_after_first=False)
    tag = FORMATS[name].structural_tag(rules, ReasoningStart.CLOSED, ids={})
    asked = StructuredOutputsParams(structural_tag=json.dumps(tag))
    return Grammar.from_structural_tag(to_structural_tag(asked).text)


def strings_of(calls: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [each for _, values in calls for each in values.values() if isinstance(each, str)]


@number_of_cases(10_000, kept=200)
def test_calls_are_found_again_wherever_they_are_cut(num_cases: int) -> None:
    @checked(num_cases)
    @given(st.sampled_from(sorted(FORMATS)), CALLS, TEXTS, st.data())
    def check(
        name: str, calls: list[tuple[str, dict[str, Any]]], prose: str, data: st.DataObject
    ) -> None:
        usual, *others = SEPARATORS.get(name, [""])
        fits = is_accepted(grammar_of(name), written(name, calls, usual))
        strings = strings_of(calls) if name == "qwen3_coder" else []
        assert fits == (not any("</parameter>" in each for each in strings))
        if any(ENDED.search(each) for each in strings):
            return
        text = written(name, calls, data.draw(st.sampled_from([usual, *others])))
        # Calls of this format begin the answer.
        said = "" if name == "llama3_json" else prose
        options = {"tools": TOOLS, "reasoning": ReasoningStart.CLOSED}
        whole = parse(name, said + text, **options)
        made = [part for part in whole if isinstance(part, ToolCallDelta)]
        assert [(call.name, json.loads(call.arguments)) for call in made] == calls
        assert content_of(whole) == said.rstrip()
        cuts = data.draw(st.lists(st.integers(0, len(said + text)), max_size=5))
        for places in (cuts, list(range(len(said + text)))):
            assert parse(name, said + text, places, **options) == whole

    check()


@number_of_cases(10_000, kept=200)
def test_what_is_no_call_stays_content_to_the_character(num_cases: int) -> None:
    """No text calls the only tool."""

    @checked(num_cases)
    @given(st.sampled_from(sorted(FORMATS)), JUNK, st.data())
    def check(name: str, text: str, data: st.DataObject) -> None:
        options = {"tools": {"zzzz": {}}, "reasoning": ReasoningStart.CLOSED}
        parts = (Content(text),) if text else ()
        assert parse(name, text, **options) == parts
        cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
        assert parse(name, text, cuts, **options) == parts

    check()


def is_valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


class RandomTools:
    """Schemas of parameters with every keyword that is enforced, and arguments."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._schemas = RandomSchemas(seed)

    def cases(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Return schemas and valid arguments, in the schema's order."""
        while True:
            names = self._rng.sample(PROPERTY_NAMES, self._rng.randint(1, 4))
            inner = {name: self._schemas.schema(2) for name in names}
            definitions: dict[str, Any] = {}
            others = {"additionalProperties": inner[names[0]]} if self._rng.random() < 0.3 else {}
            schema = {
                "type": "object",
                "properties": {n: self._within(each, definitions) for n, each in inner.items()},
                **others,
                "$defs": definitions,
            }
            if self._rng.random() < 0.2:
                definitions["root"] = {k: v for k, v in schema.items() if k != "$defs"}
                schema = {"allOf": [{"$ref": "#/$defs/root"}], "$defs": definitions}
            for _ in range(3):
                value = {n: self._schemas.value(each) for n, each in inner.items()}
                if others:
                    value["other"] = self._schemas.value(inner[names[0]])
                if is_valid(schema, value):
                    yield schema, value

    def _within(self, schema: Any, definitions: dict[str, Any]) -> Any:
        """Return a schema of the same values, and perhaps more."""
        for _ in range(self._rng.randint(0, 2)):
            kind = self._rng.choice(["$ref", "allOf", "anyOf", "oneOf", "any"])
            if kind == "$ref":
                definitions[name := f"d/{len(definitions)}"] = schema
                schema = {"$ref": f"#/$defs/{name.replace('/', '~1')}"}
            elif kind == "any":
                schema = {"anyOf": [schema, self._schemas.schema(0)]}
            else:
                schema = {kind: [schema]}
        return schema


@number_of_cases(10_000, kept=200)
def test_arguments_are_valid_by_the_schema_that_is_enforced(num_cases: int) -> None:
    num_read = 0
    for schema, value in RandomTools(num_cases).cases():
        if num_read == num_cases:
            return
        try:
            grammar = grammar_of_tools("qwen3_coder", {"f": schema})
        except InvalidRequestError:
            continue
        texts = {n: each if isinstance(each, str) else dump(each) for n, each in value.items()}
        text = written("qwen3_coder", [("f", texts)], "")
        if not is_accepted(grammar, text):
            continue
        num_read += 1
        (call,) = parse("qwen3_coder", text, tools={"f": schema}, reasoning=ReasoningStart.CLOSED)
        assert isinstance(call, ToolCallDelta)
        made = json.loads(call.arguments)
        assert is_valid(schema, made), (schema, value, made)


def test_names_that_a_format_cannot_hold_are_excluded_by_its_grammar() -> None:
    known = {"type": "object", "properties": {"a": {"type": "integer"}}}
    patterned = {"type": "object", "patternProperties": {"b$": STRING}}
    for schema in (known | {"additionalProperties": STRING}, patterned):
        grammar = grammar_of_tools("qwen3_coder", {"f": schema})
        for name in ("a>b", "a<b", "ab"):
            text = written("qwen3_coder", [("f", {name: "x"})], "")
            assert is_accepted(grammar, text) == (name == "ab")
