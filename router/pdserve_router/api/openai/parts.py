"""Parts of an answer as OpenAI's chat has them: in a message, or in a delta of one."""

from collections.abc import Sequence
from typing import Any

from pdserve_router.text.parts import (
    OutputPart,
    ToolCallDelta,
    content_of,
    join_calls,
    reasoning_of,
)


def message_object(parts: Sequence[OutputPart]) -> dict[str, Any]:
    """Return an assistant's message of all parts of an answer."""
    calls = [_call(call) for call in join_calls(parts)]
    # As with OpenAI: no content beside calls is null, otherwise it is empty.
    content = content_of(parts) or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning := reasoning_of(parts):
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def delta_object(parts: Sequence[OutputPart]) -> dict[str, Any]:
    """Return what these parts add to a message; empty if they are none."""
    delta: dict[str, Any] = {}
    if content := content_of(parts):
        delta["content"] = content
    if reasoning := reasoning_of(parts):
        delta["reasoning"] = reasoning
    # Clients add up what has the same index, but not within a delta.
    if calls := join_calls(parts):
        delta["tool_calls"] = [{"index": call.index, **_call(call)} for call in calls]
    return delta


def _call(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if not call.name:
        return {"function": function}
    return {"id": call.id, "type": "function", "function": {"name": call.name, **function}}
