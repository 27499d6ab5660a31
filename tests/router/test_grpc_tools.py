"""Reasoning and tools over gRPC."""

import grpc
import pytest
from test_tools import ARGUMENTS, CALLING, THOUGHT

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2

QUESTION = pb2.ChatMessage(role="user", content="what is the weather?")
TOOLS = [
    pb2.Tool(name="get_weather", description="w", parameters='{"type": "object"}'),
    pb2.Tool(name="now"),
]


# Nothing enforces its schema.
UNENFORCED = '{"type": "object", "allOf": [{"type": "object"}, {"type": "object"}]}'


STACK = {"answer": CALLING}


def chat(messages=(QUESTION,), **fields) -> pb2.ChatPrompt:
    return pb2.ChatPrompt(messages=messages, **{"tools": TOOLS, **fields})


async def outputs_of(stack, prompt: pb2.ChatPrompt, **fields) -> list[pb2.CompletionOutput]:
    request = pb2.GenerateRequest(chat=prompt, **fields)
    responses = [response async for response in stack.stub.Generate(request)]
    return [completion for each in responses for completion in each.output.outputs]


async def refusal_of(stack, prompt: pb2.ChatPrompt) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await outputs_of(stack, prompt)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return error.value.details()


def calls_of(outputs) -> list[tuple[str, str, str]]:
    """The id, name and arguments of each."""
    pieces = [call for output in outputs for call in output.tool_calls]
    return [
        (call.id, call.name, "".join(each.arguments for each in pieces if each.index == call.index))
        for call in pieces
        if call.id
    ]


async def test_a_stream_has_reasoning_text_and_calls(stack) -> None:
    outputs = await outputs_of(stack, chat())
    assert "".join(output.reasoning for output in outputs) == THOUGHT
    assert "".join(output.text for output in outputs) == "the fox"
    (_, *first), (_, *second) = calls_of(outputs)
    assert (first, second) == (["get_weather", ARGUMENTS], ["now", "{}"])
    assert outputs[-1].finish_reason == core.FINISH_REASON_STOP


@pytest.mark.parametrize(
    "kind", [core.REQUEST_OUTPUT_KIND_CUMULATIVE, core.REQUEST_OUTPUT_KIND_FINAL_ONLY]
)
async def test_the_last_message_has_all_of_it(stack, kind) -> None:
    params = core.SamplingParams(output_kind=kind)
    *_, last = await outputs_of(stack, chat(), sampling_params=params, request_id="a")
    streamed = await outputs_of(stack, chat(), request_id="a")
    assert (last.reasoning, last.text) == (THOUGHT, "the fox")
    assert calls_of([last]) == calls_of(streamed)


async def test_a_stream_goes_on_at_another_router_with_the_same_pieces(stack, start_stack) -> None:
    params = core.SamplingParams(seed=5)
    whole = await outputs_of(stack, chat(), sampling_params=params, request_id="mine")
    token_ids = [token_id for output in whole for token_id in output.token_ids]
    assert len(whole) > 10
    async with start_stack(answer=CALLING) as other:
        for place in range(1, len(whole) - 1, max(1, len(whole) // 10)):
            before = whole[:place]
            num_tokens = sum(len(output.token_ids) for output in before)
            resumed = pb2.ResumedCompletion(index=0, token_ids=token_ids[:num_tokens])
            rest = await outputs_of(
                other, chat(), sampling_params=params, request_id="mine", resume=[resumed]
            )
            assert calls_of([*before, *rest]) == calls_of(whole)
            assert "".join(output.reasoning for output in [*before, *rest]) == THOUGHT


async def test_what_may_be_called(stack, tokenizer) -> None:
    async def prompt_with(**fields) -> str:
        await outputs_of(stack, chat(**fields))
        return tokenizer.decode(stack.decode.requests[-1].prompt_token_ids)

    assert "get_weather" in await prompt_with()
    assert "get_weather" not in await prompt_with(allowed_tools=["now"])
    assert "now" not in await prompt_with(tool_choice=pb2.TOOL_CHOICE_NONE)
    outputs = await outputs_of(stack, chat(single_tool_call=True))
    assert [name for _, name, _ in calls_of(outputs)] == ["get_weather"]
    tokens = await stack.stub.Tokenize(pb2.TokenizeRequest(chat=chat(allowed_tools=["now"])))
    assert tokenizer.decode(tokens.token_ids) == await prompt_with(allowed_tools=["now"])


async def test_the_template_gets_calls_and_their_results(stack, tokenizer) -> None:
    call = pb2.ToolCall(id="c1", name="now", arguments='{"at": [1]}')
    turn = pb2.ChatMessage(role="assistant", reasoning="hm", tool_calls=[call])
    result = pb2.ChatMessage(role="tool", content="noon", tool_call_id="c1")
    await outputs_of(stack, chat([QUESTION, turn, result]))
    assert (
        '<|im_start|>assistant\n<think>hm</think><tool_call>{"name": "now", "arguments": '
        '{"at": [1]}}</tool_call><|im_end|>\n<|im_start|>tool\nnoon<|im_end|>'
    ) in tokenizer.decode(stack.decode.requests[-1].prompt_token_ids)


async def test_a_strict_tool_is_enforced_or_refused(start_stack) -> None:
    info = {"served_fields": ("structured_outputs",)}
    async with start_stack(answer=CALLING, info=info) as stack:
        for strict in (None, False, True):
            tool = pb2.Tool(name="now", parameters=UNENFORCED, strict=strict)
            prompt = chat(tools=[tool], tool_choice=pb2.TOOL_CHOICE_REQUIRED)
            if strict:
                assert "tools.now.parameters: " in await refusal_of(stack, prompt)
            else:
                assert await outputs_of(stack, prompt)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (chat(tool_choice=pb2.TOOL_CHOICE_REQUIRED), "no worker enforces yet"),
        (chat(tool_choice=pb2.TOOL_CHOICE_REQUIRED, tools=[]), "tools is empty"),
        (chat([pb2.ChatMessage(role="tool")]), "messages[0].tool_call_id is missing"),
        (chat(tool_choice=9), "tool_choice is 9, which is unknown"),
        (chat(allowed_tools=["other"]), "allowed_tools has 'other', which tools lacks"),
        (chat(tools=[pb2.Tool(name="a b")]), "tools[0].name is 'a b', must be"),
        (chat(tools=[pb2.Tool(name="a")] * 2), "tools[1].name is 'a', which is there already"),
        (chat(tools=[pb2.Tool(name="a", parameters="{")]), "tools[0].parameters is no JSON: "),
        (chat(tools=[pb2.Tool(name="a", parameters="5")]), "tools[0].parameters is no JSON object"),
        (chat(tools=[pb2.Tool(name="a")] * 1025), "tools has 1025 entries, at most 1024"),
        (
            chat([pb2.ChatMessage(tool_calls=[pb2.ToolCall()] * 1025)]),
            "tool_calls has 1025 entries, at most 1024",
        ),
        (
            chat([pb2.ChatMessage(role="user", tool_calls=[pb2.ToolCall(arguments="[")])]),
            "messages[0].tool_calls[0].arguments is no JSON object",
        ),
    ],
)
async def test_a_wrong_use_of_tools_is_refused_by_name(stack, prompt, reason) -> None:
    assert reason in await refusal_of(stack, prompt)
