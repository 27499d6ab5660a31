"""Reasoning and tools over HTTP, as a whole and streamed, and with OpenAI's own client."""

import json

import pytest
from fake_model import copy_with_template

from pdserve_router.requests.input.request_limits import INLINE_BYTES
from pdserve_router.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "what is the weather?"}


def tool(name: str) -> dict:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("get_weather"), tool("now")]
ASKED = {"messages": [QUESTION], "tools": TOOLS}
ARGUMENTS = '{"city":  "the \\"quick\\" fox </tool_call>"}'
THOUGHT = "hello world, this is"
CALLING = (
    f"<think>\n{THOUGHT}\n</think>\n\nthe fox\n<tool_call>\n"
    f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


STACK = {"http": True, "answer": CALLING}


async def choice_of(http, **body) -> dict:
    response = await http.post(PATH, json={**ASKED, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def refusal_of(http, **body) -> tuple[str, str]:
    response = await http.post(PATH, json={**ASKED, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def prompt_of(stack, tokenizer) -> str:
    return tokenizer.decode(stack.decode.requests[-1].prompt_token_ids)


async def test_an_answer_has_its_reasoning_and_calls(http, stack) -> None:
    response = await http.post(PATH, json={**ASKED, "return_token_ids": True})
    answer = response.json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == (THOUGHT, "the fox")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"name": "get_weather", "arguments": ARGUMENTS},
        {"name": "now", "arguments": "{}"},
    ]
    usage = answer["usage"]
    num_thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < num_thought < usage["completion_tokens"]


async def test_without_reasoning_and_without_tools(http, stack, tokenizer) -> None:
    message = (await choice_of(http, include_reasoning=False))["message"]
    assert "reasoning" not in message
    assert len(message["tool_calls"]) == 2
    for nothing in ({"tools": []}, {"tool_choice": "none"}):
        choice = await choice_of(http, **nothing)
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == CALLING.partition("</think>\n\n")[2]
        assert "tool_calls" not in choice["message"]
        assert "get_weather" not in prompt_of(stack, tokenizer)


async def test_one_call_unless_calls_are_parallel(http) -> None:
    choice = await choice_of(http, parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"


async def test_the_template_gets_the_tools_that_are_allowed(http, stack, tokenizer) -> None:
    await choice_of(http)
    whole = prompt_of(stack, tokenizer)
    assert all(json.dumps(each) in whole for each in TOOLS)
    named = {"type": "function", "function": {"name": "now"}}
    allowed = {"mode": "auto", "tools": [named]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    await choice_of(http, tool_choice=choice)
    only_now = prompt_of(stack, tokenizer)
    assert "get_weather" not in only_now
    body = {"messages": [QUESTION], "tools": [TOOLS[1]]}
    tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
    assert tokenizer.decode(tokens) == only_now


NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        NAMED,
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
    ],
)
async def test_what_asks_for_a_call_is_refused_while_no_worker_enforces_it(http, choice) -> None:
    field, message = await refusal_of(http, tool_choice=choice)
    assert field == "tool_choice"
    assert "no worker enforces" in message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [NAMED]}}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": []},
                }
            },
            "tool_choice.allowed_tools.tools",
        ),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("a")] * 1025}, "tools"),
        ({"tools": {}}, "tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
    ],
)
async def test_a_wrong_use_of_tools_is_refused_by_name(http, body, field) -> None:
    assert (await refusal_of(http, **body))[0] == field


def answer_turn(**call) -> dict:
    function = {"name": "now", "arguments": "{}", **call}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": calls}


async def test_the_template_gets_calls_and_their_results(http, stack, tokenizer) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
    turn = answer_turn(arguments='{"at": [1]}')
    await choice_of(http, messages=[QUESTION, turn, result])
    assert (
        '<|im_start|>assistant\n<think>hm</think><tool_call>{"name": "now", "arguments": '
        '{"at": [1]}}</tool_call><|im_end|>\n<|im_start|>tool\nnoon<|im_end|>'
    ) in prompt_of(stack, tokenizer)


@pytest.mark.parametrize("arguments", ["{", "[]", "5", '{"a": }'])
async def test_arguments_of_past_calls_are_objects(http, arguments) -> None:
    messages = [QUESTION, answer_turn(arguments=arguments)]
    field, _ = await refusal_of(http, messages=messages)
    assert field == "messages[1].tool_calls[0].function.arguments"


async def test_a_result_says_whose_it_is(http) -> None:
    messages = [QUESTION, answer_turn(), {"role": "tool", "content": "noon"}]
    field, _ = await refusal_of(http, messages=messages)
    assert field == "messages[2].tool_call_id"


async def test_unknown_fields_of_tools_and_calls_are_named(http, stack) -> None:
    odd = {"type": "function", "x": 1, "function": {"name": "now", "y": 1}}
    await choice_of(http, tools=[odd])
    for name in ("tools.x", "tools.function.y"):
        assert stack.metric("pdserve_http_unknown_fields_total", field=name) == 1


async def test_a_model_whose_template_knows_no_tools(
    start_stack, model_dir, tmp_path, monkeypatch
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = copy_with_template(model_dir, tmp_path / "tiny", template)
    monkeypatch.setattr("pdserve_router.server.Tokenizer", lambda path, **_: Tokenizer(folder))
    for chat_format, reason in (("auto", "is not known"), ("hermes", "chat template knows none")):
        async with start_stack(http=True, answer=CALLING, chat_format=chat_format) as stack:
            field, message = await refusal_of(stack.api)
            assert field == "tools"
            assert reason in message
            message = (await choice_of(stack.api, tools=None))["message"]
            # Neither does it know reasoning.
            assert (message["content"], "reasoning" in message) == (CALLING, False)


async def test_a_stream_adds_up_to_the_whole_with_the_same_ids(http) -> None:
    headers = {"x-request-id": "mine"}
    whole = await http.post(PATH, json=ASKED, headers=headers)
    message = whole.json()["choices"][0]["message"]
    streamed = await http.post(PATH, json={**ASKED, "stream": True}, headers=headers)
    *lines, _ = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    choices = [json.loads(line)["choices"][0] for line in lines]
    deltas = [choice["delta"] for choice in choices]
    for name in ("reasoning", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert len(pieces) > len(message["tool_calls"])
    for index, call in enumerate(message["tool_calls"]):
        own = [piece for piece in pieces if piece["index"] == index]
        assert (own[0]["id"], own[0]["function"]["name"]) == (call["id"], call["function"]["name"])
        assert not any("id" in piece for piece in own[1:])
        arguments = "".join(piece["function"]["arguments"] for piece in own)
        assert arguments == call["function"]["arguments"]
    assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "tool_calls"]


async def test_several_choices_have_ids_of_their_own(http) -> None:
    answer = (await http.post(PATH, json={**ASKED, "n": 2})).json()
    ids = [call["id"] for each in answer["choices"] for call in each["message"]["tool_calls"]]
    assert len(set(ids)) == 4


async def test_an_answer_that_is_cut_has_a_prefix_of_its_call(http, stack, tokenizer) -> None:
    cut = CALLING.index("fox </tool_call>")
    num_tokens = len(tokenizer.backend.encode(CALLING[:cut]).ids)
    choice = await choice_of(http, max_tokens=num_tokens)
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert ARGUMENTS.startswith(call["function"]["arguments"])
    assert call["function"]["arguments"].startswith('{"city":  "the')


async def test_beams_have_calls(http, stack, tokenizer) -> None:
    choice = await choice_of(http, use_beam_search=True, temperature=0, max_tokens=8)
    assert choice["message"]["role"] == "assistant"


async def test_completions_are_text(http) -> None:
    body = {"prompt": "hello", "max_tokens": 4000}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (CALLING, "stop")


async def test_a_loop_with_openais_client(client, stack, tokenizer) -> None:
    messages: list = [QUESTION]
    answer = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    message = answer.choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "now"]
    assert json.loads(message.tool_calls[0].function.arguments) == json.loads(ARGUMENTS)
    messages.append(message)
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt_of(stack, tokenizer)


async def test_a_stream_with_openais_client(client) -> None:
    async with client.chat.completions.stream(
        model="tiny", messages=[QUESTION], tools=TOOLS
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["get_weather", "now"]
    calls = final.choices[0].message.tool_calls
    assert [call.function.arguments for call in calls] == [ARGUMENTS, "{}"]
    assert final.choices[0].finish_reason == "tool_calls"


async def test_a_large_request_is_read_in_the_chosen_format_too(start_stack) -> None:
    async with start_stack(http=True, answer=CALLING, chat_format="none") as stack:
        for padding in ("", "x" * INLINE_BYTES):
            body = {"messages": [QUESTION], "metadata": {"padding": padding}}
            response = await stack.api.post(PATH, json=body)
            assert response.json()["choices"][0]["message"]["content"] == CALLING
        assert stack.metric("pdserve_large_requests_total", outcome="done") == 1
