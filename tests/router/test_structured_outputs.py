"""What an answer has to be, over HTTP and gRPC: what workers get, and what is refused by name."""

import asyncio
import itertools
import json
from typing import Any, Literal

import grpc
import openai
import pydantic
import pytest
from test_tools import TOOLS, tool
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as is_accepted

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.structured import accepted as accepted_module
from pdserve_common.structured import to_structural_tag
from pdserve_common.structured.accepted import AcceptedConstraints
from pdserve_common.types.capabilities import Capabilities
from pdserve_common.types.sampling_params import StructuredOutputsParams
from pdserve_router.requests.input.constraint import check_constraint
from pdserve_router.requests.input.request_limits import (
    INLINE_PATTERN_CHARS,
    INLINE_SCHEMA_CHARS,
    NotSmallError,
)
from pdserve_router.requests.input.tool_use import MAX_ENFORCED_TOOLS, MAX_SCHEMAS
from support.refusals import refused
from support.samples import sampled

SERVED = {"served_fields": ("structured_outputs",)}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "b"}}
STRUCTURES = {
    "structures": [
        {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=b>", "end": "</f>"},
    ],
    "triggers": ["<f="],
}
PATHS = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 64},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}
CHAT = "/v1/chat/completions"
NOW = {"type": "function", "function": {"name": "now"}}


def response_format(schema: object = SCHEMA, **more: object) -> dict:
    named = {"name": "n", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def tagged(**fields: object) -> dict:
    return {"response_format": {"type": "structural_tag", **fields}}


def both_names(kind: str, value: object) -> list[dict]:
    return [{"structured_outputs": {kind: value}}, {f"guided_{kind}": value}]


# What a body asks for: texts that fit, and that do not.
ASKED = {
    "json_object": (
        [
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ],
        ('{"a": [1]}', "[1]"),
    ),
    "json_schema": (
        [
            response_format(),
            response_format(strict=True),
            response_format(strict=False),
            *both_names("json", SCHEMA),
            *both_names("json", json.dumps(SCHEMA)),
        ],
        ('{"x": 1}', '{"x": "1"}'),
    ),
    "regex": (both_names("regex", "[ab]c"), ("bc", "c")),
    "choice": (both_names("choice", ["red", "blue"]), ("blue", "re")),
    "grammar": (both_names("grammar", 'root ::= "a" | "b"'), ("b", "c")),
    "structural_tag": (
        [
            *({"structured_outputs": {"structural_tag": each}} for each in (TAG, json.dumps(TAG))),
            {"response_format": TAG},
        ],
        ("b", "c"),
    ),
}
CASES = [
    pytest.param(path, body, kind, texts, id=f"{path.split('/')[2]}-{kind}-{number}")
    for path in PATHS
    for kind, (bodies, texts) in ASKED.items()
    for number, body in enumerate(bodies)
]


STACK = {"http": True, "info": SERVED}


def constraint_of(stack) -> StructuredOutputsParams | None:
    return stack.decode.requests[-1].task.sampling_params.structured_outputs


async def post(http, path: str, body: dict) -> None:
    response = await http.post(path, json={**PATHS[path], **body})
    assert response.status_code == 200, response.text


async def refusal_of(http, path: str, body: dict) -> tuple[str, str]:
    response = await http.post(path, json={**PATHS[path], **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


@pytest.mark.parametrize(("path", "body", "kind", "texts"), CASES)
async def test_a_worker_gets_one_constraint(http, stack, path, body, kind, texts) -> None:
    await post(http, path, body)
    params = constraint_of(stack)
    is_chat = path == CHAT
    # Its reasoning is part of a chat's grammar.
    assert getattr(params, "structural_tag" if is_chat else kind)
    grammar = Grammar.from_structural_tag(to_structural_tag(params).text)
    fitting, other = texts
    for before in ("", "<think>\nso</think>\n\n") if is_chat else ("",):
        assert is_accepted(grammar, before + fitting)
        assert not is_accepted(grammar, before + other)
    assert not is_accepted(grammar, "<think>so</think>")


@pytest.mark.parametrize("path", PATHS)
async def test_the_older_form_of_structural_tags(http, stack, path) -> None:
    await post(http, path, tagged(**STRUCTURES))
    params = constraint_of(stack)
    grammar = Grammar.from_structural_tag(to_structural_tag(params).text)
    for fitting in ("so", 'so <f=a>{"x": 1}</f> or <f=b>[2]</f>'):
        assert is_accepted(grammar, fitting)
    for other in ("so <f=c>", '<f=a>{"x": "1"}</f>', "<f=b>2"):
        assert not is_accepted(grammar, other)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "whitespace_pattern": None}},
        {"structured_outputs": {"disable_any_whitespace": False, "disable_fallback": True}},
    ],
)
async def test_what_asks_for_nothing_is_no_constraint(http, stack, path, body) -> None:
    await post(http, path, body)
    assert constraint_of(stack) is None


ONE_OF_EACH = [bodies[-1] for bodies, _ in ASKED.values()] + [response_format()]
NOT_ENFORCED = {**SCHEMA, "properties": {"x": {"type": "integer", "not": {}}}}


@pytest.mark.parametrize("path", PATHS)
async def test_two_constraints_are_refused_and_both_are_named(http, stack, path) -> None:
    for first in ONE_OF_EACH:
        for second in ONE_OF_EACH:
            names = {*first} | {*second}
            if len(names) == 2:
                field, message = await refusal_of(http, path, {**first, **second})
                assert field in names
                assert all(name in message for name in names)
    kinds = {"json_object": True, "regex": "a", "choice": ["a"]}
    _, message = await refusal_of(http, path, {"structured_outputs": kinds})
    assert "structured_outputs.json_object and structured_outputs.regex are set" in message


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "field", "reason"),
    [
        (response_format(NOT_ENFORCED), "response_format", "not at /properties/x is"),
        (both_names("json", NOT_ENFORCED)[0], "structured_outputs", "not at /properties/x is"),
        (both_names("json", NOT_ENFORCED)[1], "guided_json", "not at /properties/x is"),
        (both_names("json", "{")[1], "guided_json", "guided_json is no JSON"),
        (both_names("json", 5)[0], "structured_outputs.json", "must be an object"),
        (both_names("json", 5)[1], "guided_json", "must be an object"),
        (both_names("json", [SCHEMA])[1], "guided_json", "must be an object"),
        (both_names("json", {"x": "y" * 65536})[1], "guided_json", "at most 65536"),
        (both_names("json", {"const": 10**400})[1], "guided_json", "guided_json"),
        (both_names("regex", "(")[0], "structured_outputs", "structured_outputs.regex "),
        (both_names("regex", "")[1], "guided_regex", "is empty"),
        (both_names("choice", [])[1], "guided_choice", "is empty"),
        (both_names("choice", ["a"] * 1001)[0], "structured_outputs", "at most 1000"),
        (both_names("choice", "a")[0], "structured_outputs.choice", ""),
        (both_names("grammar", "x" * 20000)[1], "guided_grammar", "at most 16384"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs", "must be an object"),
        ({"structured_outputs": {"jsno": SCHEMA}}, "structured_outputs.jsno", ""),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "",
        ),
        (tagged(), "response_format.format", "is missing"),
        (tagged(triggers=["<f="]), "response_format.format", "is missing"),
        (tagged(structures=STRUCTURES["structures"]), "response_format.triggers", "is missing"),
        (tagged(**{**STRUCTURES, "triggers": ["<g="]}), "response_format", "0 of its triggers"),
        (tagged(structures=[{"begin": "<f="}]), "response_format.structures[0].end", "missing"),
        (tagged(format={"type": "const"}), "response_format", "type at /format is"),
        ({"response_format": {}}, "response_format.type", "is missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "is missing",
        ),
        (response_format(SCHEMA) | {"ignore_eos": True}, "ignore_eos", "with structured_outputs"),
        (response_format(SCHEMA) | {"min_tokens": 2}, "min_tokens", "with structured_outputs"),
        (
            response_format(SCHEMA) | {"use_beam_search": True, "temperature": 0},
            "use_beam_search",
            "with structured_outputs",
        ),
    ],
)
async def test_a_wrong_constraint_is_refused_by_name(http, path, body, field, reason) -> None:
    found, message = await refusal_of(http, path, body)
    assert found == field
    assert reason in message


@pytest.mark.parametrize("path", PATHS)
async def test_workers_that_enforce_nothing(start_stack, path) -> None:
    async with start_stack(http=True) as stack:
        for body in ONE_OF_EACH:
            field, message = await refusal_of(stack.api, path, body)
            assert field in body
            assert "not served by all workers" in message


async def test_calls_that_are_asked_for_are_enforced_and_are_no_second_constraint(
    http, stack
) -> None:
    for choice in ("required", NOW):
        calling = {"tools": TOOLS, "tool_choice": choice}
        await post(http, CHAT, calling)
        assert "<tool_call>" in constraint_of(stack).structural_tag
        for body in ONE_OF_EACH:
            field, message = await refusal_of(http, CHAT, {**calling, **body})
            assert field in body
            assert "tool_choice" in message


async def test_more_tools_than_a_grammar_holds_are_refused(start_stack) -> None:
    tools = [tool(f"f{i}") for i in range(MAX_ENFORCED_TOOLS + 1)]
    async with start_stack(http=True, info={**SERVED, "max_model_len": 1 << 17}) as stack:
        field, message = await refusal_of(
            stack.api, CHAT, {"tools": tools, "tool_choice": "required"}
        )
        assert field == "tools"
        assert f"at most {MAX_ENFORCED_TOOLS}" in message
        await post(stack.api, CHAT, {"tools": tools[1:], "tool_choice": "required"})
        assert tools[-1]["function"]["name"] in constraint_of(stack).structural_tag


# Of a property, with so many schemas within.
MANY_SCHEMAS = [
    lambda count: {"anyOf": [{"const": i} for i in range(count)]},
    *(
        lambda count, keyword=keyword: {
            keyword: [0, True, None] * (count // 3) + [""] * (count % 3)
        }
        for keyword in ("allOf", "anyOf", "oneOf", "prefixItems")
    ),
    # The object by whose names they stand counts as one.
    *(
        lambda count, keyword=keyword: {keyword: {f"p{i}": True for i in range(count - 1)}}
        for keyword in ("properties", "patternProperties", "dependentSchemas", "$defs")
    ),
]


@pytest.mark.parametrize("many_schemas", MANY_SCHEMAS)
async def test_a_tools_schema_of_very_many_schemas_is_refused(start_stack, many_schemas) -> None:
    def calling(num_schemas: int) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"city": many_schemas(num_schemas)}}
        function = {"name": "weather", "parameters": parameters}
        return {"tools": [{"type": "function", "function": function}]}

    # Besides them, the parameters have three objects.
    most = MAX_SCHEMAS - 3
    async with start_stack(http=True, info={**SERVED, "max_model_len": 1 << 20}) as stack:
        await post(stack.api, CHAT, calling(most))
        field, message = await refusal_of(stack.api, CHAT, calling(most + 1))
    assert field == "tools"
    assert message == "tools.weather.parameters has more than 4096 schemas"


async def test_a_tools_schema_may_list_very_many_values(start_stack) -> None:
    city = {"enum": [f"{i}" for i in range(10_000)]}
    called = tool("weather")
    called["function"]["parameters"] = {"type": "object", "properties": {"city": city}}
    async with start_stack(http=True, info={**SERVED, "max_model_len": 1 << 20}) as stack:
        await post(stack.api, CHAT, {"tools": [called]})


SHORT_CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 2}}}
UNENFORCED = {
    "hermes": [{"type": "string"}, {"type": ["object", "null"]}],
    "qwen3_coder": [{"type": "string"}, SHORT_CITY],
}


@pytest.mark.parametrize("chat_format", UNENFORCED)
async def test_a_schema_that_the_chat_format_cannot_enforce_is_any_object_or_refused(
    start_stack, chat_format
) -> None:
    async with start_stack(http=True, info=SERVED, chat_format=chat_format) as stack:
        for schema in UNENFORCED[chat_format]:
            called = tool("now")
            called["function"]["parameters"] = schema
            body = {"tools": [called], "tool_choice": "required"}
            await post(stack.api, CHAT, body)
            grammar = Grammar.from_structural_tag(to_structural_tag(constraint_of(stack)).text)
            assert is_accepted(grammar, WRITTEN_NOW[chat_format])
            called["function"]["strict"] = True
            field, message = await refusal_of(stack.api, CHAT, body)
            assert (field, "tools.now.parameters" in message) == ("tools", True)


WRITTEN_NOW = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=now>\n<parameter=city>\nOslo\n</parameter>\n"
    "</function>\n</tool_call>",
}


async def test_an_answer_may_call_instead(http, stack) -> None:
    strict = tool("get_weather")
    strict["function"]["strict"] = True
    await post(http, CHAT, {**response_format(), "tools": [strict]})
    grammar = Grammar.from_structural_tag(to_structural_tag(constraint_of(stack)).text)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": %s}}\n</tool_call>'
    for before in ("", "<think>so</think>"):
        for fitting in ('{"x": 1}', call % '"here"'):
            assert is_accepted(grammar, before + fitting)
        for other in ("so", '{"x": "1"}', call % "1", '{"x": 1}' + call % '"here"'):
            assert not is_accepted(grammar, before + other)


async def test_several_prompts_have_one_constraint(http, stack) -> None:
    await post(http, "/v1/completions", {"prompt": ["a", "b"], **ONE_OF_EACH[2]})
    first, second = (each.task.sampling_params for each in stack.decode.requests[-2:])
    assert first.structured_outputs == second.structured_outputs == constraint_of(stack)


@pytest.mark.parametrize(
    ("is_enforced", "path"),
    sampled(itertools.product((True, False), PATHS), *zip((True, False), PATHS, strict=True)),
)
async def test_a_large_schema_is_checked_in_another_process(
    http, stack, monkeypatch, path, is_enforced
) -> None:
    monkeypatch.setattr(accepted_module, "to_structural_tag", None)
    last = {"type": "string"} if is_enforced else {"type": "string", "not": {}}
    names = [f"name{i}" for i in range(INLINE_SCHEMA_CHARS // 20)]
    schema = {"type": "object", "properties": {**{n: {"type": "null"} for n in names}, "z": last}}
    if is_enforced:
        await post(http, path, response_format(schema))
        assert names[-1] in str(constraint_of(stack))
    else:
        field, message = await refusal_of(http, path, response_format(schema))
        assert (field, "not at /properties/z" in message) == ("response_format", True)
    assert stack.metric("pdserve_large_requests_total", outcome="done") == 1
    if is_enforced:  # it is known now, which no process has to say again
        await post(http, path, response_format(schema))
        assert names[-1] in str(constraint_of(stack))
        assert stack.metric("pdserve_large_requests_total", outcome="done") == 1


def padded_to(params: StructuredOutputsParams, num_chars: int) -> StructuredOutputsParams:
    """With a comment that makes its schema so long."""
    schema = {"$comment": "", **json.loads(params.json_schema)}
    schema["$comment"] = "x" * (num_chars - len(json.dumps(schema)))
    return StructuredOutputsParams(json_schema=json.dumps(schema))


SLOW_KEYWORDS = [
    {"type": "string", "pattern": "a"},
    {"type": "string", "format": "date"},
    {"oneOf": [{"type": "null"}, {"type": "string"}]},
    {"type": "integer", "minimum": 0, "maximum": 9, "multipleOf": 2},
    {"type": "object", "patternProperties": {"^a$": True}},
    {"type": "object", "propertyNames": {"enum": ["a"]}},
    {"type": "object", "properties": {"a": True}, "additionalProperties": True},
    {"const": "\\"},
]
QUICK = {"type": "object", "properties": {"a": True}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "most"),
    [*((each, INLINE_PATTERN_CHARS) for each in SLOW_KEYWORDS), (QUICK, INLINE_SCHEMA_CHARS)],
)
def test_how_much_is_checked_inline_depends_on_what_it_costs(schema, most) -> None:
    params = StructuredOutputsParams(json_schema=json.dumps(schema))
    capabilities = Capabilities(fields=frozenset(("structured_outputs",)))

    def check(num_chars: int, *, is_inline: bool = True) -> None:
        padded = padded_to(params, num_chars)
        accepted = AcceptedConstraints()
        check_constraint(padded, None, capabilities, accepted, field=None, is_inline=is_inline)

    check(most)
    check(most + 1, is_inline=False)
    with pytest.raises(NotSmallError):
        check(most + 1)


def test_a_long_pattern_is_not_checked_inline() -> None:
    params = StructuredOutputsParams(regex="a" * (INLINE_PATTERN_CHARS + 1))
    capabilities = Capabilities(fields=frozenset(("structured_outputs",)))
    with pytest.raises(NotSmallError):
        check_constraint(
            params, None, capabilities, AcceptedConstraints(), field=None, is_inline=True
        )


class Child(pydantic.BaseModel):
    """As OpenAI's client describes it: titles, $defs, no other properties."""

    class Kite(pydantic.BaseModel):
        color: Literal["red", "blue"]
        length: float | None

    name: str
    kites: list[Kite]


async def test_openais_client_parses_an_answer(start_stack) -> None:
    child = Child(name="Mia", kites=[Child.Kite(color="red", length=None)])
    async with (
        start_stack(http=True, info=SERVED, answer=child.model_dump_json()) as stack,
        openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        asked: Any = {"model": "tiny", **PATHS[CHAT], "response_format": Child}
        answer = await client.chat.completions.parse(**asked)
        assert answer.choices[0].message.parsed == child
        grammar = Grammar.from_structural_tag(to_structural_tag(constraint_of(stack)).text)
        assert is_accepted(grammar, child.model_dump_json())
        assert not is_accepted(grammar, '{"name": "Mia"}')
        async with client.chat.completions.stream(**asked) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == child


def grpc_constraints() -> dict[str, core.StructuredOutputsParams]:
    choice = core.StructuredOutputsParams.Choice(choices=["red", "blue"])
    return {
        "json_object": core.StructuredOutputsParams(json_object=True),
        "json_schema": core.StructuredOutputsParams(json_schema=json.dumps(SCHEMA)),
        "regex": core.StructuredOutputsParams(regex="[ab]c"),
        "choice": core.StructuredOutputsParams(choice=choice),
        "grammar": core.StructuredOutputsParams(grammar='root ::= "a" | "b"'),
        "structural_tag": core.StructuredOutputsParams(structural_tag=json.dumps(TAG)),
    }


async def generate(stack, constraint: core.StructuredOutputsParams, **prompt) -> None:
    params = core.SamplingParams(structured_outputs=constraint)
    request = pb2.GenerateRequest(sampling_params=params, **(prompt or {"text": "hello"}))
    async for _ in stack.stub.Generate(request):
        pass


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("kind", ASKED)
async def test_grpc_goes_the_same_way(stack, kind, is_chat) -> None:
    message = pb2.ChatMessage(role="user", content="hello")
    prompt = {"chat": pb2.ChatPrompt(messages=[message])} if is_chat else {}
    await generate(stack, grpc_constraints()[kind], **prompt)
    params = constraint_of(stack)
    grammar = Grammar.from_structural_tag(to_structural_tag(params).text)
    fitting, other = ASKED[kind][1]
    assert is_accepted(grammar, fitting)
    assert not is_accepted(grammar, other)
    assert is_accepted(grammar, "<think></think>" + fitting) == is_chat


@pytest.mark.parametrize(
    ("constraint", "prompt", "reason"),
    [
        (core.StructuredOutputsParams(), {}, "structured_outputs is empty, set one of"),
        (
            core.StructuredOutputsParams(json_schema=json.dumps(NOT_ENFORCED)),
            {},
            "structured_outputs.json_schema: not at /properties/x",
        ),
        (
            core.StructuredOutputsParams(regex="a"),
            {
                "chat": pb2.ChatPrompt(
                    messages=[pb2.ChatMessage(role="user", content="hello")],
                    tools=[pb2.Tool(name="now")],
                    tool_choice=pb2.TOOL_CHOICE_REQUIRED,
                )
            },
            "structured_outputs is set and tool_choice asks for a call",
        ),
    ],
)
async def test_grpc_refuses_by_name(stack, constraint, prompt, reason) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, reason):
        await asyncio.wait_for(generate(stack, constraint, **prompt), 60)
