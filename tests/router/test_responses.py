"""OpenAI's responses, as OpenAI's own client reads them."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pdserve_common.types.engine import ErrorCode
from pdserve_router.api.openai.types import ChoicesBody, GenerationBody
from pdserve_router.api.responses.types import ResponsesBody
from pdserve_router.requests.input.request_limits import (
    INLINE_BYTES,
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
)
from support.router_stack import ANSWER_TEXT
from support.waiting import until

PATH = "/v1/responses"
THOUGHT = "hello world, this is"
ARGUMENTS = '{"city":  "the \\"quick\\" fox"}'
CALLING = (
    f"<think>\n{THOUGHT}\n</think>\n\nthe fox\n<tool_call>\n"
    f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "name": name, "parameters": PARAMETERS, "strict": False}
    for name in ("get_weather", "now")
]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


STACK = {"http": True}


@pytest.fixture
async def calling(start_stack):
    """A stack whose answer has reasoning, text and calls."""
    async with (
        start_stack(http=True, answer=CALLING) as stack,
        openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused") as client,
    ):
        yield client


def read_strictly(response: dict[str, Any]) -> Response:
    """Return it if it has all that OpenAI's model asks for; only what they bill has no place."""
    if response["usage"] is not None:
        response["usage"]["input_tokens_details"]["cache_write_tokens"] = 0
    return Response.model_validate(response)


async def events_of(http, **body: object) -> list[Any]:
    """The events of a stream, each as its name says, in order."""
    response = await http.post(PATH, json={"input": "hello", "stream": True, **body})
    assert response.status_code == 200, response.text
    events = []
    for number, text in enumerate(response.text.split("\n\n")[:-1]):
        name, _, data = text.partition("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        assert value["sequence_number"] == number
        if "response" in value:
            read_strictly(value["response"])
        events.append(EVENTS.validate_python(value))
    return events


async def refusal_of(http, **body: object) -> tuple[str, str]:
    response = await http.post(PATH, json={"input": "hello", **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


async def test_a_whole_answer(http) -> None:
    response = await http.post(PATH, json={"model": "tiny", "input": "hello", "temperature": 0.5})
    answer = read_strictly(response.json())
    assert (answer.status, answer.output_text) == ("completed", ANSWER_TEXT)
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.temperature, answer.tool_choice, answer.store) == (0.5, "auto", False)
    assert response.headers["pdserve-path"] == "disaggregated"


async def test_an_answer_that_is_cut_says_so(http) -> None:
    body = {"input": "hello", "max_output_tokens": 3}
    answer = read_strictly((await http.post(PATH, json=body)).json())
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert ANSWER_TEXT.startswith(answer.output_text)
    *_, done, last = await events_of(http, max_output_tokens=3)
    assert (done.type, done.item.status) == ("response.output_item.done", "incomplete")
    assert last.type == "response.incomplete"
    assert last.response.usage.output_tokens == 3


async def test_a_stream_adds_up_to_the_whole_answer(http) -> None:
    events = await events_of(http)
    assert [event.type for event in events[:4]] == [
        f"response.{name}"
        for name in ("created", "in_progress", "output_item.added", "content_part.added")
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == ANSWER_TEXT
    assert [event.type for event in events[-4:]] == [
        f"response.{name}"
        for name in ("output_text.done", "content_part.done", "output_item.done", "completed")
    ]
    assert events[-1].response.output_text == events[-4].text == ANSWER_TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_text_and_calls_are_items(calling, stream) -> None:
    body = {"model": "tiny", "input": "weather?", "tools": TOOLS}
    if stream:
        async with calling.responses.stream(**body) as events:
            async for _ in events:  # the client adds up deltas, and compares
                pass
            answer = await events.get_final_response()
    else:
        answer = await calling.responses.create(**body)
    reasoning, message, weather, now = answer.output
    assert [part.text for part in reasoning.content] == [THOUGHT]
    assert message.content[0].text == answer.output_text == "the fox"
    assert (weather.type, weather.name, weather.arguments) == (
        "function_call",
        "get_weather",
        ARGUMENTS,
    )
    assert (now.name, now.arguments) == ("now", "{}")
    assert weather.call_id != now.call_id
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


async def test_an_answer_comes_back_as_chats_have_it(calling, http, stack, tokenizer) -> None:
    """Its items are one message: the prompt is that of a chat of the same content."""
    answer = await calling.responses.create(model="tiny", input="weather?", tools=TOOLS)
    items = [item.model_dump(exclude_none=True) for item in answer.output]
    calls = [
        {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in items[2:]
    ]
    result = {"type": "function_call_output", "call_id": calls[0]["id"], "output": "sunny"}
    history = [{"role": "user", "content": "weather?"}, *items, result]
    await http.post(PATH, json={"instructions": "Be brief.", "input": [*history, *map(said, "ab")]})
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "the fox", "reasoning": THOUGHT, "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    await http.post("/v1/chat/completions", json={"messages": chat})
    of_response, of_chat = (request.prompt_token_ids for request in stack.decode.requests)
    assert tokenizer.decode(of_response) == tokenizer.decode(of_chat)


def said(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": [{"type": "output_text", "text": text}]}


async def test_choices_of_tools(http, stack, tokenizer) -> None:
    named = {"type": "function", "name": "now"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [named]}
    sent = {**allowed, "tools": [{**named, "x": 1}], "x": 1}
    response = await http.post(PATH, json={"input": "hello", "tools": TOOLS, "tool_choice": sent})
    assert response.status_code == 200
    assert response.json()["tool_choice"] == allowed
    prompt = tokenizer.decode(stack.decode.requests[-1].prompt_token_ids)
    assert "now" in prompt
    assert "get_weather" not in prompt
    # No worker here enforces calls.
    assert (await refusal_of(http, tools=TOOLS, tool_choice=named))[0] == "tool_choice"


async def test_of_large_fields_the_largest_are_not_repeated(http) -> None:
    large = {**TOOLS[0], "name": "large", "description": "x" * INLINE_BYTES}
    body = {"instructions": "Be brief.", "tools": [*TOOLS, large], "tool_choice": "none"}
    response = await http.post(PATH, json={"input": "hello", **body})
    told = [response.json()]
    events = await events_of(http, **body)
    told += [event.response.model_dump() for event in events if hasattr(event, "response")]
    assert len(told) == 4
    for answer in told:
        assert (answer["tools"], answer["tool_choice"]) == ([], "none")
        assert answer["instructions"] == "Be brief."
    small = (await http.post(PATH, json={"input": "hello", **body, "tools": TOOLS})).json()
    assert small["tools"] == TOOLS


def test_what_is_repeated_is_bounded() -> None:
    large = {"x": "x" * INLINE_BYTES}
    schema = {"type": "json_schema", "name": "x", "schema": large}
    allowed = {"type": "function", "name": "x" * INLINE_BYTES}
    body = ResponsesBody.model_validate(
        {
            "input": "hello",
            "instructions": "x" * INLINE_BYTES,
            "text": {"format": schema},
            "reasoning": {"effort": "x" * INLINE_BYTES},
            "tools": [{**TOOLS[0], "parameters": large}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [allowed]},
        }
    )
    assert json.loads(body.repeated_fields) == json.loads(ResponsesBody(input="").repeated_fields)


async def test_what_the_text_has_to_be_is_enforced(start_stack) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    info = {"served_fields": ("structured_outputs",)}
    async with start_stack(http=True, info=info) as stack:
        response = await stack.api.post(PATH, json={"input": "hello", "text": {"format": form}})
        assert response.status_code == 200, response.text
        params = stack.decode.requests[-1].task.sampling_params
        tag = json.loads(params.structured_outputs.structural_tag)
        assert json.dumps(schema) in json.dumps(tag)
        bad = {"format": {**form, "schema": {"type": "nothing"}}}
        assert (await refusal_of(stack.api, text=bad))[0] == "text"
        missing = {"format": {"type": "json_schema"}}
        assert (await refusal_of(stack.api, text=missing))[0] == "text.format.schema"


async def test_a_failure_in_mid_stream_is_the_last_event(http, stack) -> None:
    async def die(running) -> None:
        await until(lambda: stack.metric("pdserve_generation_tokens_total", model="tiny") == 1)
        running.fail(ErrorCode.INTERNAL, "the model was lost")

    stack.decode.behave = die
    last = (await events_of(http))[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error"
    assert "was lost" in last.response.error.message


WRONG_INPUTS = [
    (5, "input"),
    ([], "input"),
    ("forbidden", "input"),  # the chat template says so
    ("hello " * 5000, "input"),
    (["x"], "input[0]"),
    ([{"role": "robot", "content": "x"}], "input[0].role"),
    ([{"type": "web_search_call"}], "input[0].type"),
    ([{"role": "user"}], "input[0].content"),
    ([{"role": "user", "content": [{"type": "input_file"}]}], "input[0].content"),
    ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content"),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content"),
    ([{"type": "reasoning", "content": "x"}], "input[0].content"),
    ([{"type": "function_call", "name": "now", "arguments": "{}"}], "input[0].call_id"),
    (
        [{"type": "function_call", "call_id": "a", "name": "now", "arguments": "["}],
        "input[0].arguments",
    ),
    ([{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
    ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), "input"),
    ([{"role": "user", "content": [5] * (MAX_CONTENT_PARTS + 1)}], "input[0].content"),
]


async def test_what_is_wrong_is_named(http) -> None:
    for value, field in WRONG_INPUTS:
        assert (await refusal_of(http, input=value))[0] == field
    others = [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
        ({"tools": [{**TOOLS[0], "name": "a b"}]}, "tools[0].name"),
        ({"include": ["web_search_call.results"]}, "include[0]"),
        ({"stream_options": {}}, "stream_options"),
        *(({name: {"x": 1}}, name) for name in ResponsesBody.refused),
    ]
    for body, field in others:
        assert (await refusal_of(http, **body))[0] == field
    nothing = {name: values[0] for name, values in ResponsesBody.refused.items()}
    assert (await http.post(PATH, json={"input": "hello", **nothing})).status_code == 200
    # What chats and completions share is served, or refused: nothing of it is ignored.
    unserved = ChoicesBody.model_fields.keys() - GenerationBody.model_fields.keys()
    assert unserved <= ResponsesBody.refused.keys()


async def test_pictures_are_refused_by_name(http) -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    _, message = await refusal_of(http, input=[{"role": "user", "content": [picture]}])
    assert "/v1/chat/completions" in message


async def test_errors_of_the_prompt_name_the_input(http, tokenizer, monkeypatch) -> None:
    for value in ([], "forbidden"):
        _, message = await refusal_of(http, input=value)
        assert message.startswith("input ")
    monkeypatch.setattr(type(tokenizer), "chat_template", "")
    field, message = await refusal_of(http)
    assert (field, message.split(",")[0]) == ("input", "input cannot be rendered")


async def test_unknown_fields_are_counted_by_their_place(http, stack) -> None:
    item = {"role": "user", "content": "hello", "mood": "good"}
    tool = {**TOOLS[0], "x": 1}
    body = {"input": [item], "tools": [tool], "text": {"x": 1}, "y": 1}
    assert (await http.post(PATH, json=body)).status_code == 200
    for name in ("input.mood", "tools.x", "text.x", "y"):
        assert stack.metric("pdserve_http_unknown_fields_total", field=name) == 1
