"""Chat formats: texts as models write them, cut anywhere, and texts that are none."""

import itertools
import json
import string
import sys
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as is_accepted

from pdserve_common.structured import to_structural_tag
from pdserve_common.structured import values as values_module
from pdserve_common.structured.values import Values
from pdserve_common.types.sampling_params import StructuredOutputsParams
from pdserve_router.chat_formats.base import Parser, ParserOptions, ReasoningStart
from pdserve_router.chat_formats.registry import AUTO, FORMATS, NONE, choose_format
from pdserve_router.chat_formats.tags import CallRules, constraint_tag
from pdserve_router.text.parts import (
    Content,
    OutputPart,
    Reasoning,
    ToolCallDelta,
    content_of,
    join_parts,
    reasoning_of,
)
from support.work import Work, work_of

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "of": {"$ref": "#/x"},
    },
    "required": ["city"],
}
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}}
ARGUMENTS = '{"city": "Par\\"is </tool_call> } é", "days": 2}'
R1 = {
    "calls": "<｜tool▁calls▁begin｜>",  # noqa: RUF001
    "call": "<｜tool▁call▁begin｜>",  # noqa: RUF001
    "sep": "<｜tool▁sep｜>",  # noqa: RUF001
    "end": "<｜tool▁call▁end｜>",  # noqa: RUF001
    "ends": "<｜tool▁calls▁end｜>",  # noqa: RUF001
}


def call(index: int, name: str, arguments: str) -> ToolCallDelta:
    """Without its id."""
    return ToolCallDelta(index=index, name=name, arguments=arguments)


BOTH = (call(0, "get_weather", ARGUMENTS), call(1, "now", "{}"))
# By format: what models write, and what it says.
RECORDED: dict[str, list[tuple[str, tuple[OutputPart, ...]]]] = {
    "hermes": [
        (
            "<think>\nLet me\n\nsee.\n</think>\n\n<tool_call>\n"
            f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
            '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>',
            (Reasoning("Let me\n\nsee."), *BOTH),
        ),
        (
            'One moment.\n<tool_call>{"name": "now"}</tool_call> Done.\n',
            (Content("One moment."), call(0, "now", "{}"), Content(" Done.\n")),
        ),
        ("1 < 2 <tool> <think>", (Content("1 < 2 <tool> <think>"),)),
        (" <think>\n\n</think>\n\nHi", (Content("Hi"),)),
        (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa',
            (call(0, "get_weather", '{"city": "Pa'),),
        ),
        ("<tool_call>\nthe weather", (Content("<tool_call>\nthe weather"),)),
        (
            'Tags: <tool_call>, </tool_call>.\n <tool_call>{"\n<tool_call>{"name": "now"}',
            (Content('Tags: <tool_call>, </tool_call>.\n <tool_call>{"'), call(0, "now", "{}")),
        ),
        (
            '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
            (Content('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'),),
        ),
        (
            '<tool_call>{"name": "now", "arguments": 5}',
            (Content('<tool_call>{"name": "now", "arguments": 5}'),),
        ),
        (
            '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}\n'
            '</tool_call>\n<tool_call>{"arguments": " {}", "name": "now"}</tool_call>',
            (call(0, "get_weather", '{"city": "Rome"}'), call(1, "now", "{}")),
        ),
        (
            '<tool_call>{"name": "now", "arguments": "{]"}</tool_call>',
            (Content('<tool_call>{"name": "now", "arguments": "{]"}</tool_call>'),),
        ),
        (
            '<tool_call>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}\n'
            "</tool_call>",
            (call(0, "now", "{}"), call(1, "now", "{}")),
        ),
        (
            '<tool_call>{"name": "now", "arguments": {}}}\n</tool_call>ok',
            (call(0, "now", "{}"), Content("}\n</tool_call>ok")),
        ),
    ],
    "qwen3_coder": [
        (
            'Sure.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"is\n <b>\n\n'
            "</parameter>\n<parameter=days>\n2\n</parameter>\n<parameter=tags>\n"
            '["a", "b"]\n</parameter>\n<parameter=unit>\nNone\n</parameter>\n<parameter=of>\n'
            '{"x": 1}\n</parameter>\n<parameter=other>\n5\n</parameter>\n</function>\n</tool_call>',
            (
                Content("Sure."),
                call(
                    0,
                    "get_weather",
                    '{"city": "Par\\"is\\n <b>\\n", "days": 2, "tags": ["a", "b"], "unit": null, '
                    '"of": {"x": 1}, "other": "5"}',
                ),
            ),
        ),
        (
            "<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\ntwo\n</function>\n"
            "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            (call(0, "get_weather", '{"city": "Rome", "days": "two"}'), call(1, "now", "{}")),
        ),
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nRo",
            (call(0, "get_weather", '{"city": "Ro'),),
        ),
        ("<tool_call>\n{}", (Content("<tool_call>\n{}"),)),
        (
            "<function=get_weather>\n<parameter=city>\na</parameter>.\n</function>\n"
            "<parameter=city>\nc\n</parameter>\n<parameter=tags>\n"
            '["</parameter>\\n</function>"]\n</parameter>\n<parameter=unit>\n<parameter=city>\n'
            "</parameter>\n</function>\n</tool_call>",
            (
                call(
                    0,
                    "get_weather",
                    '{"city": "a</parameter>.\\n</function>\\n<parameter=city>\\nc", '
                    '"tags": ["</parameter>\\n</function>"], "unit": "<parameter=city>"}',
                ),
            ),
        ),
        (
            "<function=get_weather>\n<parameter=tags>\n['it\\'s', \"b\", True, [None],]\n"
            "</parameter>\n<parameter=days>\n[1\n</parameter>\n</function>",
            (call(0, "get_weather", '{"tags": ["it\'s", "b", true, [null]], "days": "[1"}'),),
        ),
        (
            "Use <function=x> or <function=now>, <tool_call>, then </tool_call>. <function=other>\n"
            "</function>",
            (
                Content(
                    "Use <function=x> or <function=now>, <tool_call>, then </tool_call>. "
                    "<function=other>\n</function>"
                ),
            ),
        ),
    ],
    "llama3_json": [
        (
            f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; '
            '{"name": "now", "parameters": {}}',
            BOTH,
        ),
        (
            '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
            (call(0, "now", "{}"),),
        ),
        (
            f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}\n'
            '{"name": "now", "parameters": {}}{"name": "now", "parameters": {}} {"name": "x"}',
            (*BOTH, call(2, "now", "{}"), Content(' {"name": "x"}')),
        ),
        ('{"name": "Ann", "parameters": 1}', (Content('{"name": "Ann", "parameters": 1}'),)),
        ('{"name": "now", "age": 1}', (Content('{"name": "now", "age": 1}'),)),
        ("<|python_tag|>print(1)", (Content("<|python_tag|>print(1)"),)),
        (
            'So: {"name": "now", "parameters": {}}',
            (Content('So: {"name": "now", "parameters": {}}'),),
        ),
    ],
    "mistral": [
        (
            f"[THINK]hm[/THINK]Well.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now{{}}",
            (Reasoning("hm"), Content("Well."), *BOTH),
        ),
        (
            f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
            '{"name": "now", "arguments": {}, "id": "abc"}]',
            BOTH,
        ),
        ("[TOOL_CALLS]now[CALL_ID]VvvODy9mT[ARGS]{}", (call(0, "now", "{}"),)),
        (
            "Write [TOOL_CALLS]now, [TOOL_CALLS]x[ARGS]{}",
            (Content("Write [TOOL_CALLS]now, [TOOL_CALLS]x[ARGS]{}"),),
        ),
        ("[1][TOOL_CALLS]of them", (Content("[1][TOOL_CALLS]of them"),)),
    ],
    "deepseek_r1": [
        (
            f"Okay.\n</think>\n\n{R1['calls']}{R1['call']}function{R1['sep']}get_weather\n```json\n"
            f"{ARGUMENTS}\n```{R1['end']}\n{R1['call']}now{R1['sep']}{{}}{R1['end']}{R1['ends']}",
            (Reasoning("Okay."), *BOTH),
        ),
        ("<think>\nhm</think>yes", (Reasoning("hm"), Content("yes"))),
        (f"</think>a {R1['calls']} b {R1['end']}", (Content(f"a {R1['calls']} b {R1['end']}"),)),
        ("never ends", (Reasoning("never ends"),)),
        (f"</think>{R1['call']}a b", (Content(f"{R1['call']}a b"),)),
    ],
}
RECORDED["mistral_list"] = RECORDED["mistral"]
CASES = [(name, *case) for name, cases in RECORDED.items() for case in cases]


def parse(
    name: str, text: str, cuts: list[int] | None = None, **options: object
) -> tuple[OutputPart, ...]:
    wanted = ParserOptions(format=name, **{"tools": TOOLS, **options})
    parser = Parser(FORMATS[name], wanted, "request")
    places = [0, *sorted(cuts or ()), len(text)]
    parts = []
    for start, end in pairwise(places):
        parts += parser.push(text[start:end])
    return join_parts([*parts, *parser.finish()])


def without_ids(parts: tuple[OutputPart, ...]) -> tuple[OutputPart, ...]:
    return tuple(replace(p, id="") if isinstance(p, ToolCallDelta) else p for p in parts)


def test_every_format_has_recorded_texts() -> None:
    assert RECORDED.keys() == FORMATS.keys()


@pytest.mark.parametrize(("name", "text", "parts"), CASES)
def test_a_recorded_text_says_the_same_wherever_it_is_cut(name, text, parts) -> None:
    whole = parse(name, text)
    assert without_ids(whole) == parts
    for at in range(len(text) + 1):
        assert parse(name, text, [at]) == whole
    assert parse(name, text, list(range(len(text)))) == whole


# What formats are made of, so that random texts get far into them.
SCRAPS = st.sampled_from(
    [
        *(marker for each in FORMATS.values() for marker in each.markers),
        *("<function=", "</function>", "<parameter=", "</parameter>", "get_weather", "city", ">"),
        *('"', "{", "}", "[", "]", ":", ",", ";", "\\", "\n", " ", "```json", "```", "é", "1", "-"),
        *('"name"', '"arguments"', '"parameters"', '{"name": "now", "arguments": {', "null"),
    ]
)
JUNK = st.lists(SCRAPS | st.text(max_size=3), max_size=30).map("".join)


@given(st.sampled_from(sorted(FORMATS)), JUNK, st.sampled_from(ReasoningStart), st.data())
@example("qwen3_coder", "<function=f><parameter=x>" + "[" * 100_000 + "</parameter>", *[None] * 2)
def test_junk_never_raises_and_says_the_same_wherever_it_is_cut(name, text, start, data) -> None:
    start = start or ReasoningStart.FREE
    whole = parse(name, text, reasoning=start)
    if data is not None:
        cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
        assert parse(name, text, cuts, reasoning=start) == whole
        assert parse(name, text, list(range(len(text))), reasoning=start) == whole
    calls = [part for part in whole if isinstance(part, ToolCallDelta)]
    assert sorted({each.index for each in calls}) == list(range(len(calls)))
    assert all(each.id and each.name for each in calls)


@pytest.mark.parametrize(
    "often",
    [{"$ref": f"#/{'%41' * 9000}"}, {"enum": [*range(1000, 9000), "a"]}],
    ids=["a long pointer", "many values"],
)
def test_what_a_schema_refers_to_often_is_looked_at_a_few_times(often) -> None:
    options = [{"type": ["integer", "string"], "minimum": 5, "minLength": 5}]
    value = {"anyOf": [*options, *[{"$ref": "#/often"}] * 50]}
    schema = {"properties": {"x": value}, "often": often, "A" * 9000: {"minimum": 5}}
    text = "<function=f><parameter=x>3</parameter></function>"
    work = work_of(lambda: parse("qwen3_coder", text, tools={"f": schema}))
    assert work.num_chars + work.num_calls < 10 * len(json.dumps(often))


def test_many_parameters_of_many_schemas_are_looked_at_a_few_times() -> None:
    """Each is of any of them."""
    options = [{"additionalProperties": {"type": "integer", "minimum": n}} for n in range(100)]
    listed = {f"p{n}": {"minimum": 1} for n in range(0, 900, 2)}
    schema = {"type": "object", "anyOf": [*options, *({"properties": listed} for _ in range(300))]}

    def num_calls(num_parameters: int) -> int:
        names = (f"<parameter=p{n}>3</parameter>" for n in range(num_parameters))
        text = f"<function=f>{''.join(names)}</function>"
        return work_of(lambda: parse("qwen3_coder", text, tools={"f": schema})).num_calls

    assert num_calls(900) < 4 * num_calls(300)
    one = "<function=f><parameter=x>3</parameter></function>"
    each = [work_of(lambda n=n: parse("qwen3_coder", one * n, tools={"f": schema})) for n in (1, 9)]
    assert each[1].num_calls < 3 * each[0].num_calls


# Schemas, and values that another schema would read otherwise.
TYPED = [
    (STRING, "7"),
    (INTEGER, 7),
    ({"enum": [f"{n}" for n in range(100)]}, "7"),
    ({"enum": [*range(100), "seven"]}, 7),
    ({"oneOf": [{"const": f"{n}"} for n in range(200)]}, "7"),
    ({"anyOf": [{"type": "integer", "minimum": 8}, STRING]}, "7"),
    ({"type": "array", "items": STRING}, ["7"]),
    ({"anyOf": [{"$ref": "#/$defs/of"}, STRING]}, {"a": 7}),
    ({"anyOf": [{"$ref": "#/$defs/of"}, STRING]}, '{"b": 7}'),
]


@pytest.mark.parametrize(
    ("num_parameters", "num_calls", "num_alternatives"), [(9, 100, 1), (600, 4, 1), (600, 1, 600)]
)
def test_arguments_have_their_types_however_many_there_are(
    num_parameters: int, num_calls: int, num_alternatives: int
) -> None:
    """As when a call is the only one, of the only alternative."""
    parameters = {f"p{n}": TYPED[n % len(TYPED)] for n in range(num_parameters)}
    properties = {name: schema for name, (schema, _) in parameters.items()}
    values = {name: value for name, (_, value) in parameters.items()}
    others = [{"properties": {f"q{n}": STRING}} for n in range(num_alternatives - 1)]
    schema = {
        "type": "object",
        "anyOf": [*others, {"properties": properties, "required": [*properties]}],
        "$defs": {"of": {"type": "object", "required": ["a"]}},
    }
    texts = {n: each if isinstance(each, str) else json.dumps(each) for n, each in values.items()}
    said = "".join(f"<parameter={n}>\n{text}\n</parameter>\n" for n, text in texts.items())
    text = "\n".join([f"<function=f>\n{said}</function>"] * num_calls)
    calls = parse("qwen3_coder", text, tools={"f": schema})
    assert len(calls) == num_calls
    assert all(json.loads(call.arguments) == values for call in calls)


def test_what_parameters_of_alternatives_cost_is_bounded() -> None:
    """It took 19 s. Alternatives with their own other properties, which each name may be of."""
    options = [
        {"additionalProperties": {"type": ["integer", "string"], "minimum": n}} for n in range(2000)
    ]
    listed = {f"p{n}": INTEGER for n in range(1500)}
    names = "".join(f"<parameter={name}>3</parameter>" for name in listed)
    schema = {"type": "object", "anyOf": [*options, {"properties": listed}]}
    text = f"<function=f>{names}</function>"
    assert work_of(lambda: parse("qwen3_coder", text, tools={"f": schema})).num_calls < 10_000_000


def read_value(text: str, schema: object) -> tuple[object, int]:
    """Return what a parameter says, and the calls that its beginning and its end cost: between them
    text is looked at as it comes.
    """
    tools = {"f": {"properties": {"x": schema}}}
    parser = Parser(FORMATS["qwen3_coder"], ParserOptions(format="qwen3_coder", tools=tools), "r")
    parts: list[OutputPart] = []
    works = [
        work_of(lambda piece=piece: parts.extend(parser.push(piece)))
        for piece in ("<function=f><parameter=x>", text, "</parameter></function>")
    ]
    (made,) = join_parts([*parts, *parser.finish()])
    assert isinstance(made, ToolCallDelta)
    return json.loads(made.arguments)["x"], works[0].num_calls + works[2].num_calls


LONG = 60_000
LONG_LIST, LONG_DICT = [1] * LONG, {f"k{n}": n for n in range(LONG)}
MOST = [*range(10_000)]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": ["array", "string"]}, LONG_LIST),
        ({"type": ["array", "string"], "items": INTEGER}, LONG_LIST),
        ({"type": ["array", "string"], "items": True}, LONG_LIST),
        ({"type": ["array", "string"], "items": {"anyOf": [STRING, INTEGER]}}, LONG_LIST),
        ({"type": ["array", "string"], "prefixItems": [INTEGER] * LONG}, LONG_LIST),
        ({"type": ["array", "string"], "items": {"items": INTEGER}}, [LONG_LIST, LONG_LIST]),
        ({"type": ["object", "string"]}, LONG_DICT),
        ({"type": ["object", "string"], "properties": {"a": INTEGER}}, LONG_DICT),
        ({"type": ["object", "string"], "additionalProperties": INTEGER}, LONG_DICT),
        ({"type": ["object", "string"], "propertyNames": {"minLength": 1}}, LONG_DICT),
        ({"enum": [[*MOST, n] for n in range(100)]}, [*MOST, 99]),
        ({"enum": ["a", *([*MOST, n] for n in range(100))]}, [*MOST, 99]),
        ({"enum": ["a", *(LONG_DICT | {"k": n} for n in range(9))]}, LONG_DICT | {"k": 8}),
        ({"enum": [*map(str, range(100_000)), *range(100_000)]}, 99_999),
        ({"anyOf": [{"enum": [*range(n, n + 9999), "a"]} for n in range(0, 100_000, 9999)]}, 9),
    ],
)
def test_what_a_value_of_many_parts_costs_is_bounded(schema, value) -> None:
    """60,000 items took 190 ms, 100 arrays that are listed 135 ms: for each part Python called."""
    read, num_calls = read_value(json.dumps(value), schema)
    assert read == value
    assert num_calls < 80_000


@pytest.mark.parametrize(("num_options", "is_known"), [(5, True), (100, False)])
def test_required_names_count_as_they_are_many(num_options: int, is_known: bool) -> None:
    """900 times 30,000 names took 2.9 s. What is not known to be wrong passes."""
    value = dict.fromkeys((f"k{n}" for n in range(3000)), 1)
    types = ["object", "string"]
    options = [{"type": types, "required": [*value, f"other{n}"]} for n in range(num_options)]
    read, _ = read_value(json.dumps(value), {"anyOf": options})
    assert read == (json.dumps(value) if is_known else value)


@pytest.mark.parametrize("count", [10, 900])
@pytest.mark.parametrize("last", [1, "1"])
def test_each_part_of_a_value_of_some_is_looked_at(count, last) -> None:
    schema = {"anyOf": [{"type": "array", "items": INTEGER}, STRING]}
    value = [1] * count + [last]
    said = f"<function=f><parameter=x>{json.dumps(value)}</parameter></function>"
    (made,) = parse("qwen3_coder", said, tools={"f": {"properties": {"x": schema}}})
    assert json.loads(made.arguments) == {"x": value if last == 1 else json.dumps(value)}


@pytest.mark.parametrize(
    ("listed", "value", "is_found"),
    [
        ([[1, 2]], [1, 2], True),
        ([[1, 2]], [1, 2, 3], False),
        ([[1]], [True], False),
        ([[1.5, {"a": [None]}]], [1.5, {"a": [None]}], True),
        ([[1.5]], [1.25], False),
        ([{"a": 1}], {"a": 1}, True),
        ([{"a": 1}], {"b": 1}, False),
        ([{"a": None}], {"b": None}, False),
        ([{"a": []}], {"a": {}}, False),
    ],
)
def test_listed_containers_are_the_same_in_all_parts(listed, value, is_found) -> None:
    text = json.dumps(value)
    said = f"<function=f><parameter=x>{text}</parameter></function>"
    schema = {"anyOf": [{"enum": listed}, STRING]}
    (made,) = parse("qwen3_coder", said, tools={"f": {"properties": {"x": schema}}})
    assert json.loads(made.arguments) == {"x": value if is_found else text}


HALF = '{"name": "f", "arguments": "{\\"x\\": \\"\\ud800\\"}"}'


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("hermes", f"<tool_call>\n{HALF}\n</tool_call>", "\ud800"),
        ("mistral", f"[TOOL_CALLS]{HALF}", "\ud800"),
        ("llama3_json", HALF, "\ud800"),
        ("qwen3_coder", r"<function=f><parameter=x>['\ud800']</parameter></function>", ["\ud800"]),
    ],
)
def test_half_of_a_surrogate_pair_stays_an_escape(name, text, value) -> None:
    schema = {"type": "array" if isinstance(value, list) else "string"}
    (call,) = parse(name, text, tools={"f": {"properties": {"x": schema}}})
    call.arguments.encode()
    assert json.loads(call.arguments) == {"x": value}


def test_what_patterns_of_names_cost_is_bounded() -> None:
    """2 KB took 12 s: each step of a match went through all characters of a class."""
    chars = "".join(map(chr, range(0x100, 0x100 + 2 * 990, 2)))
    costly = {"patternProperties": {f"[{chars}]{{39}}$": INTEGER}}
    many = {"patternProperties": {f"^{n}_": INTEGER for n in range(4000)}}
    names = [chars[-1] * (255 - n) + chars[-2] + chars[-1] * n for n in range(40)]
    for schema, said in ((costly, names), (many, [f"x{n}" for n in range(500)])):
        value = json.dumps(dict.fromkeys(said, 1), ensure_ascii=False)
        tools = {"f": {"properties": {"x": {"type": ["object", "string"], **schema}}}}
        text = f"<function=f><parameter=x>{value}</parameter></function>"
        assert work_of(lambda t=text, u=tools: parse("qwen3_coder", t, tools=u)).num_calls < 500_000


PATTERNED = {"patternProperties": {"^s_": STRING, "^[ns]_[0-9]": {"type": ["integer", "string"]}}}


def within(schema):
    return {"properties": {"x": {"anyOf": [{"type": "object", **schema}, STRING]}}}


@pytest.mark.parametrize(
    ("schema", "name", "text", "value"),
    [
        (PATTERNED, "s_", "5", "5"),
        (PATTERNED, "s_1", "5", "5"),
        (PATTERNED, "n_1", "5", 5),
        (PATTERNED, "a_s_1", "5", "5"),  # nothing is said of it
        (PATTERNED | {"additionalProperties": INTEGER}, "a_s_1", "5", 5),
        (PATTERNED | {"additionalProperties": INTEGER}, "s_", "5", "5"),
        (PATTERNED | {"properties": {"s_1": {}}}, "s_1", "5", "5"),
        ({"anyOf": [PATTERNED, {"properties": {"a": INTEGER}}]}, "s_1", "5", "5"),
        ({"patternProperties": {"(?=s)": INTEGER}}, "s_1", "5", 5),
        ({"patternProperties": {"(a|aa)+$": INTEGER}}, "a" * 200 + "b", "5", "5"),
        (within(PATTERNED), "x", '{"s_1": 5}', '{"s_1": 5}'),
        (within(PATTERNED), "x", '{"n_1": 5, "a": 5}', {"n_1": 5, "a": 5}),
        (within(PATTERNED | {"additionalProperties": False}), "x", '{"a": 5}', '{"a": 5}'),
        (within(PATTERNED | {"additionalProperties": INTEGER}), "x", '{"a": 5}', {"a": 5}),
    ],
)
def test_names_are_matched_with_patterns(schema, name, text, value) -> None:
    said = f"<function=f><parameter={name}>{text}</parameter></function>"
    (call,) = parse("qwen3_coder", said, tools={"f": schema})
    assert json.loads(call.arguments) == {name: value}


DIGITS = st.integers(0, 10**6).map(str)
DECIMALS = st.builds(
    lambda sign, digits, fraction, exponent: f"{sign}{digits}{fraction}{exponent}",
    st.sampled_from(["", "-"]),
    DIGITS,
    st.just("") | DIGITS.map(".{}".format),
    st.just("") | st.integers(-30, 30).map("e{}".format),
)


@given(DECIMALS, DECIMALS)
@example("0.07", "0.01")
@example("0.3", "0.1")
@example("9007199254740993.0", "2")
@example("1e9999999999", "3")
@example("5e-9999999999", "3")
@example("1e99999999999999999999", "3")
def test_multiples_are_exact(text, factor) -> None:
    schema = {"type": ["number", "string"], "multipleOf": json.loads(factor)}
    said = f"<function=f><parameter=x>{text}</parameter></function>"
    (call,) = parse("qwen3_coder", said, tools={"f": {"properties": {"x": schema}}})
    exponent = int(text.partition("e")[2] or 0)
    if abs(exponent) < 100:
        divisor = Fraction(factor)
        is_number = not divisor or Fraction(text) % divisor == 0
    else:
        is_number = exponent > 10**15
    assert call.arguments == f'{{"x": {text if is_number else json.dumps(text)}}}'


HUGE = 10**309  # more than any float


@pytest.mark.parametrize(
    ("bounds", "text", "is_valid"),
    [
        ({"minimum": HUGE}, "1", False),
        ({"minimum": HUGE}, f"{HUGE}", True),
        ({"minimum": -HUGE}, "1.5", True),
        ({"maximum": HUGE}, "1", True),
        ({"maximum": HUGE}, f"{HUGE + 1}", False),
        ({"maximum": HUGE}, f"{HUGE}.5", False),
        ({"exclusiveMinimum": HUGE}, f"{HUGE}", False),
        ({"exclusiveMaximum": HUGE}, "1", True),
        ({"multipleOf": HUGE}, "1", False),
        ({"multipleOf": HUGE}, f"{3 * HUGE}", True),
        ({"multipleOf": HUGE}, f"3e{HUGE}", True),
        ({"minItems": HUGE}, "[]", False),
        ({"maxItems": HUGE}, "[]", True),
        ({"minProperties": HUGE}, "{}", False),
        ({"maxProperties": HUGE}, "{}", True),
        ({"enum": [HUGE]}, f"{HUGE}", True),
        ({"enum": [[HUGE]]}, f"[{HUGE}.0]", True),
        ({"enum": [[HUGE]]}, "[1]", False),
        ({"type": HUGE, "required": HUGE, "prefixItems": HUGE, "minimum": 2}, "1", False),
    ],
)
def test_a_bound_may_be_more_than_any_float(bounds, text, is_valid) -> None:
    schema = {"anyOf": [{"type": ["number", "array", "object"], **bounds}, STRING]}
    said = f"<function=f><parameter=x>{text}</parameter></function>"
    (call,) = parse("qwen3_coder", said, tools={"f": {"properties": {"x": schema}}})
    assert call.arguments == f'{{"x": {text if is_valid else json.dumps(text)}}}'


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [0] * LONG},
        {"anyOf": [0] * LONG},
        {"anyOf": [False] * LONG},
        {"anyOf": [{"allOf": [True] * LONG, "minimum": 0}] * 9},
        {"prefixItems": [True] * LONG},
    ],
)
def test_what_a_schema_has_that_is_no_object_counts(schema) -> None:
    """490,000 entries of allOf took 0.3 s for each value."""
    values = Values({"type": ["integer", "array", "string"], **schema})
    for value in (5, [5] * LONG):
        assert work_of(lambda v=value: values.first_of([v, "5"])).num_calls < 20_000
        assert values.first_of([value, "5"]) == 0


def test_listed_numbers_of_one_hash_are_compared_a_few_times() -> None:
    """10,000 took seconds: a set compares each with all others."""
    num_compared = 0

    class Counted(int):
        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    modulus = sys.hash_info.modulus
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            values_module, "_TYPE_NAMES", {**values_module._TYPE_NAMES, Counted: "integer"}
        )
        values = Values(
            {"type": ["integer", "string"], "enum": [Counted(modulus * n) for n in range(1000)]}
        )
        is_first = values.first_of([1, "1"]) == 0
        assert num_compared < 1000
        assert is_first
        few = Values(
            {"type": ["integer", "string"], "enum": [modulus * n for n in range(9)] + ["1"]}
        )
        assert few.first_of([1, "1"]) == 1


@pytest.mark.parametrize("keyword", ["allOf", "anyOf"])
def test_names_are_looked_for_a_few_times_in_what_is_no_object(keyword) -> None:
    """490,000 entries took 0.13 s for each name."""
    values = Values({keyword: [0] * LONG, "properties": {f"p{n}": True for n in range(100)}})
    work = work_of(lambda: [values.property(f"p{n}") for n in range(100)])
    assert work.num_calls < 20 * LONG


def long_number(num_digits: int, behind: str = "") -> Decimal | int:
    text = "7" * num_digits + behind
    return Decimal(text) if behind else int(text)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"minLength": 9999, "multipleOf": 1.1e-300}, long_number(4000, ".5" + 200 * "5")),
        ({"minimum": 1.5}, -long_number(4290)),
        ({"maximum": 1.5, "multipleOf": int("3" * 300)}, long_number(4200)),
        ({"multipleOf": int("3" * 4290)}, Decimal("7e999999999999999")),
        ({"minimum": int("3" * 4290)}, Decimal("7.5")),
        ({"enum": [[int("3" * 4290)]]}, [Decimal("3" * 4290 + ".5")]),
        ({"maximum": 1}, long_number(10**6, ".5")),
    ],
)
def test_long_numbers_are_compared_a_few_times(schema, value) -> None:
    """1000 comparisons of 4,000 digits took 0.5 s. Of short numbers so many are made."""
    values = Values({"anyOf": [{"type": ["number", "array", "string"], **schema}] * 900})
    work = work_of(lambda: values.first_of([value, "7"]))
    assert work.num_calls < 4000
    # What is not known to be wrong passes.
    assert values.first_of([value, "7"]) == 0


NULL_OR_TEXT = {"type": ["string", "null"]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"pattern": "^[0-9]+$"}, "12345", "12345"),
        ({"anyOf": [{"minLength": 1}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"minLength": 1}, {"type": "null"}]}, "null", None),
        ({"minimum": 1}, "12", 12),
        ({}, "12", 12),
        ({"enum": ["[1]", [True]]}, "[1]", "[1]"),
        ({"enum": ['{"a": 1}', {"a": 1.0}]}, '{"a": 1}', {"a": 1}),
        ({"allOf": [NULL_OR_TEXT, {"minLength": 1}]}, "null", None),
    ],
)
def test_a_value_is_of_the_types_that_its_schema_speaks_of(schema, text, value) -> None:
    tools = {"f": {"properties": {"x": schema}}}
    said = f"<function=f><parameter=x>{text}</parameter></function>"
    (call,) = parse("qwen3_coder", said, tools=tools)
    assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize("blanks", [*itertools.product(["", " ", "\n "], ["", "\n", " \n"])])
@pytest.mark.parametrize("value", ["x ", "  x", "x", " "])
def test_a_listed_value_is_found_among_blanks(value, blanks) -> None:
    before, behind = blanks
    tools = {"f": {"properties": {"x": {"enum": [value, 3, "another one"]}}}}
    said = f"<function=f><parameter=x>{before}{value}{behind}</parameter></function>"
    (call,) = parse("qwen3_coder", said, tools=tools)
    assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize("value", ["[1] ", " [1]", "{} ", [1], ["1"], {"a": "1"}])
@pytest.mark.parametrize("before", ["", "\n"])
def test_a_string_that_looks_like_a_container_keeps_its_blanks(value, before) -> None:
    of = {"items": STRING, "properties": {"a": STRING}, "required": ["a"]}
    container = {"type": ["array", "object"], **of}
    written = value if isinstance(value, str) else json.dumps(value)
    said = f"<function=f><parameter=x>{before}{written}{before}</parameter></function>"
    for other in ({"const": value}, STRING):
        x = {"anyOf": [other, container]}
        (call,) = parse("qwen3_coder", said, tools={"f": {"properties": {"x": x}}})
        expected = written if other is STRING and value == [1] else value
        assert json.loads(call.arguments) == {"x": expected}


BLANKS = " \n"
# What goes on for long behind the beginning of a text.
FILLINGS = SCRAPS | st.sampled_from([BLANKS, "\\'", "'", ", ", '{"a":', "a", "ab <", "</", "\n<"])


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(CASES), st.floats(0, 1), FILLINGS)
@example(("hermes", "<think>a", ()), 1, BLANKS)
@example(("hermes", "<tool_call>", ()), 1, BLANKS)
@example(("qwen3_coder", "<function=now>", ()), 1, BLANKS)
@example(("qwen3_coder", "<function=get_weather>\n<parameter=city>\na</parameter>", ()), 1, BLANKS)
@example(("deepseek_r1", f"</think>{R1['calls']}", ()), 1, BLANKS)
def test_the_work_grows_as_the_text_does(case, share, filling) -> None:
    """Nothing that is held back is looked at again with each piece that comes."""
    name, recorded, _ = case
    begin = recorded[: round(share * len(recorded))]

    def work_on(num_chars: int) -> Work:
        text = begin + (filling * num_chars)[:num_chars]
        return work_of(lambda: parse(name, text, list(range(0, len(text), 16))))

    once, twice = work_on(20_000), work_on(40_000)
    assert twice.num_chars < 3 * once.num_chars
    assert twice.num_calls < 3 * once.num_calls


# What a call may be within, as far as one knows at the beginning of the next.
NESTED = [
    *('{"":[', '{"":["', '{"":"', '{"', '{"":x', '{"":1 ', '{"":{"":', '{"arguments":{"":['),
    *('{"arguments":"{', '{"name":"now","":["",', '{"name":"now","arguments":', '[{"":[', "["),
    *("now[ARGS]", "now[CALL_ID]now[ARGS]", "<function=now>", "\\", '"\\"', '{"\\'),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("nested", NESTED)
def test_what_looks_like_calls_within_calls_is_read_a_few_times(name, nested) -> None:
    """3.8 KB took 110 ms: from each beginning of a call the rest was read again."""

    def num_calls(num_chars: int) -> int:
        one = FORMATS[name].triggers[-1] + nested
        text = one * (num_chars // len(one))
        return work_of(lambda: parse(name, text, reasoning=ReasoningStart.CLOSED)).num_calls

    assert num_calls(3800) < 3 * num_calls(1900)


@pytest.mark.parametrize(
    "looks",
    ['{"a": <b>}', '{"a": nil, "name": "now"}', '{"arguments": {\'a\': 1}, "name": "now"}'],
)
def test_what_is_no_json_before_its_name_is_no_call(looks) -> None:
    text = f"<tool_call>{looks}</tool_call>"
    assert parse("hermes", text) == (Content(text),)
    whole = parse("hermes", f'{text}<tool_call>{{"name": "now"}}')
    assert without_ids(whole) == (Content(text), call(0, "now", "{}"))


@pytest.mark.parametrize("parameter", ["city", "days", "tags"])
def test_calls_without_ends_of_values_are_looked_at_again_once(parameter) -> None:
    """That a value's own end is missing shows at the end of the answer."""
    one = f"<function=get_weather>\n<parameter={parameter}>\n[1\n</function>"

    def work_on(num_calls: int) -> Work:
        text = "\n".join([one] * num_calls)
        assert len(parse("qwen3_coder", text)) == num_calls
        return work_of(lambda: parse("qwen3_coder", text))

    once, twice = work_on(140), work_on(280)
    assert twice.num_chars < 3 * once.num_chars
    assert twice.num_calls < 3 * once.num_calls


def test_a_string_of_python_without_an_end_is_looked_through_once() -> None:
    """From each of its quotes it would take 10 minutes."""
    value = "[" + "\\'" * 200_000
    begin = "<function=get_weather>\n<parameter=days>\n"
    (made,) = parse("qwen3_coder", f"{begin}{value}\n</parameter>\n</function>")
    assert isinstance(made, ToolCallDelta)
    assert json.loads(made.arguments) == {"days": value}


PYTHON_TEXTS = st.lists(
    st.sampled_from(["a", "'", '"', "\\", "\n", "é", " ", ",", "]", "None", "True", "\0", "\ud800"])
).map("".join)
PYTHON = st.recursive(
    st.none() | st.booleans() | st.integers() | PYTHON_TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(PYTHON_TEXTS, inner, max_size=3),
    max_leaves=9,
)


@given(st.lists(PYTHON, max_size=4), st.sampled_from(["", ",", " ,\n"]))
def test_a_list_of_python_is_read_as_python_does(value, behind) -> None:
    text = repr(value)[:-1] + (behind if value else "") + "]"
    said = f"<function=f><parameter=x>{text}</parameter></function>"
    (made,) = parse("qwen3_coder", said, tools={"f": {"properties": {"x": {"type": "array"}}}})
    assert json.loads(made.arguments) == {"x": value}


@pytest.mark.parametrize(
    "value", [["a"], ["it's", 'a"b'], ["a", 1, True], [None], [True, False], [{"a": "b"}], [["a"]]]
)
def test_what_a_long_list_of_python_costs_is_bounded(value) -> None:
    """25,000 items took 51 ms: each was written as JSON by itself."""
    array = {"type": "array"}
    assert read_value(repr(value * 1000), array)[0] == value * 1000
    text = repr(value * 25_000)
    read, num_calls = read_value(text, array)
    is_usual = value in (["a"], [None], [True, False])
    assert read in ([value * 25_000] if is_usual else [value * 25_000, text])
    assert num_calls < 40_000


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
KEYWORDS = st.sampled_from(
    [
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "items", "prefixItems"),
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minimum", "exclusiveMaximum", "multipleOf", "minLength", "maxItems", "minProperties"),
    ]
)
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "object", "array", "null"])
SCHEMAS = st.recursive(
    st.fixed_dictionaries({"type": TYPES}) | st.dictionaries(KEYWORDS, ANY_JSON | TYPES) | ANY_JSON,
    lambda inner: st.builds(lambda name, each: {name: each}, KEYWORDS, st.lists(inner, max_size=3)),
    max_leaves=4,
)


@given(SCHEMAS, ANY_JSON.map(json.dumps) | st.text(max_size=5))
@example({"anyOf": [{"$ref": "#"}, {"$ref": "#/properties/x"}]}, "[" * 900 + "]" * 900)
@example({"$ref": "#/properties/x/items/0", "items": [{"allOf": [{"$ref": "#"}]}]}, "1e999")
@example({"type": ["integer", "string"], "multipleOf": 0.1}, "9" * 400)
@example({"type": ["object", "string"], "required": [{}, 1]}, '{"a": 1}')
def test_arguments_of_xml_are_json_whatever_the_schema(schema, value) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>"
    tools = {"f": {"properties": {"x": schema}}}
    (made,) = parse("qwen3_coder", text, tools=tools)
    assert isinstance(made, ToolCallDelta)
    (read,) = json.loads(made.arguments).values()
    if schema == {"type": "string"}:
        assert read == value
    for properties in ({"x": schema}, schema):
        parse("qwen3_coder", text, tools={"f": {"properties": properties}})
    parse("qwen3_coder", text, tools={"f": schema})


@given(st.sampled_from(sorted(FORMATS)), st.text(alphabet=string.ascii_letters + " \n.é"))
def test_plain_text_stays_as_it_is(name, text) -> None:
    if FORMATS[name].is_reasoning_implied:
        assert reasoning_of(parse(name, text)) == text.lstrip()
    else:
        assert content_of(parse(name, text)) == text


@pytest.mark.parametrize("name", FORMATS)
def test_without_tools_calls_are_text(name) -> None:
    for text, _ in RECORDED[name]:
        parts = parse(name, text, tools={})
        assert not any(isinstance(part, ToolCallDelta) for part in parts)
        said = parse(name, text, tools={}, reasoning=ReasoningStart.CLOSED)
        assert said == (Content(text),)


REASONING = [name for name, each in FORMATS.items() if each.reasoning is not None]


@pytest.mark.parametrize("name", REASONING)
def test_the_prompt_says_whether_reasoning_has_begun(name) -> None:
    end = FORMATS[name].reasoning[1]
    text = f"hm\n{end}\n\nyes"
    assert parse(name, text, reasoning=ReasoningStart.OPEN) == (Reasoning("hm"), Content("yes"))
    assert parse(name, text, reasoning=ReasoningStart.CLOSED)[0] == Content(text)


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_first_call_unless_calls_are_parallel(name) -> None:
    text, parts = RECORDED[name][0]
    first = [p for p in parts if not isinstance(p, ToolCallDelta) or p.index == 0]
    assert list(without_ids(parse(name, text, is_parallel=False))) == first


def test_ids_are_those_of_request_and_place() -> None:
    ids = {
        (request, index): FORMATS["hermes"].call_id(request, index)
        for request in ("a", "b")
        for index in range(3)
    }
    assert len(set(ids.values())) == 6
    assert ids["a", 0] == FORMATS["hermes"].call_id("a", 0)
    assert len(FORMATS["mistral"].call_id("a", 0)) == 9
    assert FORMATS["mistral"].call_id("a", 0).isalnum()


def as_arguments(style: str, value: dict) -> str:
    if style != "qwen3_coder":
        return json.dumps(value)
    return "".join(
        f"<parameter={key}>\n{each if isinstance(each, str) else json.dumps(each)}\n</parameter>\n"
        for key, each in value.items()
    )


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n%s</function>\n</tool_call>",
    "llama3_json": '{"name": "get_weather", "parameters": %s}',
    "mistral": "[TOOL_CALLS]get_weather[ARGS]%s",
    "mistral_list": '[TOOL_CALLS][{"name": "get_weather", "arguments": %s}]',
    "deepseek_r1": f"{R1['calls']}{R1['call']}function{R1['sep']}get_weather\n```json\n%s\n```"
    f"{R1['end']}{R1['ends']}",
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("name", "start"),
    [
        *((name, start) for name in REASONING for start in ReasoningStart),
        ("llama3_json", ReasoningStart.CLOSED),
    ],
)
def test_what_the_structural_tag_lets_pass_is_read_as_a_call(name, start) -> None:
    chat_format = FORMATS[name]
    rules = CallRules(tools={"get_weather": PARAMETERS}, stop_after_first=True)
    tag = json.dumps(chat_format.structural_tag(rules, start, ids={}))
    grammar = Grammar.from_structural_tag(tag)
    begin, end = chat_format.reasoning or ("", "")
    before = {
        ReasoningStart.FREE: f"{begin}\nhm\n{end}\n\n",
        ReasoningStart.OPEN: f"hm\n{end}\n\n",
        ReasoningStart.CLOSED: "",
    }[start]
    value = {"city": "Paris", "days": 2}
    written = before + WRITTEN[name] % as_arguments(name, value)
    assert is_accepted(grammar, written)
    (*_, made) = parse(name, written, reasoning=start)
    assert isinstance(made, ToolCallDelta)
    assert json.loads(made.arguments) == value
    wrong = before + WRITTEN[name] % as_arguments(name, {"city": "Paris", "days": "two"})
    assert not is_accepted(grammar, wrong)
    assert not is_accepted(grammar, before + "It rains.")
    if start is ReasoningStart.CLOSED:
        assert not is_accepted(grammar, f"{begin}hm{end}" + WRITTEN[name])


JSON = '{"city": "Paris", "days": 2}'
CONTENTS = {
    "json_object": (StructuredOutputsParams(json_object=True), '{"a": "<think>"}', "[]"),
    "json_schema": (StructuredOutputsParams(json_schema=json.dumps(PARAMETERS)), JSON, "{}"),
    "regex": (StructuredOutputsParams(regex="[ab]c"), "bc", "c"),
    "choice": (StructuredOutputsParams(choice=("red", "blue")), "blue", "green"),
    "grammar": (StructuredOutputsParams(grammar='root ::= "a" | "b"'), "b", "c"),
    "structural_tag": (
        StructuredOutputsParams(
            structural_tag='{"format": {"type": "sequence", "elements": '
            '[{"type": "const_string", "value": "a"}, {"type": "regex", "pattern": "b+"}]}}'
        ),
        "abb",
        "a",
    ),
}


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("start", ReasoningStart)
@pytest.mark.parametrize("name", FORMATS)
def test_a_constraint_is_on_what_follows_the_reasoning(name, start, kind) -> None:
    chat_format = FORMATS[name]
    params, fitting, other = CONTENTS[kind]
    tag = json.dumps(chat_format.answer_tag(constraint_tag(params), start, ids={}))
    read = to_structural_tag(StructuredOutputsParams(structural_tag=tag))
    grammar = Grammar.from_structural_tag(read.text)
    begin, end = chat_format.reasoning or ("", "")
    may_reason = chat_format.may_reason(start)
    assert may_reason == (name != "llama3_json" and start is not ReasoningStart.CLOSED)
    before = ("" if start is ReasoningStart.OPEN else begin) + f"\nhm\n{end}\n\n"
    if not may_reason:
        assert not begin or not is_accepted(grammar, before + fitting)
        before = ""
    assert is_accepted(grammar, before + fitting)
    assert not is_accepted(grammar, before + other)
    parts = parse(name, before + fitting, reasoning=start, tools={})
    assert content_of(parts) == fitting
    assert reasoning_of(parts) == ("hm" if may_reason else "")
    # Where reasoning may be left out, it may.
    is_needed = may_reason and (start is ReasoningStart.OPEN or chat_format.is_reasoning_implied)
    assert is_accepted(grammar, fitting) != is_needed


TEMPLATES = {
    "hermes": '{%- for tool in tools %}<tools>\n<tool_call>\n{"name": ...}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "llama3_json": '<|start_header_id|>user ... {"name": function name, "parameters": dictionary}',
    "mistral": "[AVAILABLE_TOOLS]...[TOOL_CALLS]name[ARGS]",
    "mistral_list": "[AVAILABLE_TOOLS]...[TOOL_CALLS][",
    "deepseek_r1": f"content.split('</think>')[-1] {R1['calls']}{R1['call']}",
}


def test_a_format_is_chosen_by_the_template_or_by_name() -> None:
    for name, template in TEMPLATES.items():
        assert choose_format(AUTO, template) is FORMATS[name]
        assert choose_format(name, "") is FORMATS[name]
        assert choose_format(NONE, template) is None
    assert choose_format(AUTO, "{{ messages }}") is None
