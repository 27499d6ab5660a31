"""Parts of messages and answers: what chat templates see, and how they are written for clients."""

import json

from hypothesis import given
from hypothesis import strategies as st

from pdserve_router.api.openai.parts import delta_object, message_object
from pdserve_router.text.messages import ChatMessage
from pdserve_router.text.parts import (
    Content,
    OutputPart,
    Reasoning,
    ToolCall,
    ToolCallDelta,
    content_of,
    join_parts,
)

PIECES = st.one_of(
    st.builds(Content, st.text(max_size=3)),
    st.builds(Reasoning, st.text(max_size=3)),
    st.builds(
        ToolCallDelta, index=st.integers(0, 2), id=st.just(""), arguments=st.text(max_size=3)
    ),
)


@given(st.lists(PIECES), st.data())
def test_pieces_are_joined_alike_in_one_go_or_in_two(parts: list[OutputPart], data) -> None:
    at = data.draw(st.integers(0, len(parts)))
    whole = join_parts(parts)
    assert join_parts([*join_parts(parts[:at]), *join_parts(parts[at:])]) == whole
    assert join_parts(whole) == whole
    assert content_of(whole) == content_of(parts)


def test_a_message_has_what_templates_read_and_no_more() -> None:
    assert ChatMessage(role="user", parts=(Content("a"), Content("b"))).for_template() == {
        "role": "user",
        "content": "ab",
    }
    call = ToolCall(id="c1", name="f", arguments='{"x": [1]}')
    turn = ChatMessage(role="assistant", parts=(Reasoning("hm"), Content("ok"), call), name="ann")
    assert turn.for_template() == {
        "role": "assistant",
        "content": "ok",
        "name": "ann",
        "reasoning": "hm",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
        ],
    }
    result = ChatMessage(role="tool", parts=(Content("5"),), tool_call_id="c1")
    assert result.for_template() == {"role": "tool", "content": "5", "tool_call_id": "c1"}
    assert turn.num_chars == len("hm" + "ok" + '{"x": [1]}')


ANSWER = (
    Reasoning("hm"),
    Content("ok"),
    ToolCallDelta(index=0, id="c0", name="f", arguments='{"x":'),
    ToolCallDelta(index=0, arguments=" 1}"),
    ToolCallDelta(index=1, id="c1", name="g", arguments="{}"),
)


def test_a_message_of_parts() -> None:
    message = message_object(ANSWER)
    assert (message["content"], message["reasoning"]) == ("ok", "hm")
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [
        {"x": 1},
        {},
    ]
    assert [(call["id"], call["type"]) for call in message["tool_calls"]] == [
        ("c0", "function"),
        ("c1", "function"),
    ]


def test_content_is_null_beside_calls_only() -> None:
    assert message_object(ANSWER[2:])["content"] is None
    assert message_object(()) == {"role": "assistant", "content": "", "refusal": None}


def test_a_delta_has_each_call_once() -> None:
    assert delta_object(()) == {}
    delta = delta_object(ANSWER)
    assert [call["index"] for call in delta["tool_calls"]] == [0, 1]
    assert delta["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    assert delta_object(ANSWER[3:4]) == {
        "tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]
    }
