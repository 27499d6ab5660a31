"""A turn of a conversation, and how chat templates see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from pdserve_router.text.parts import MessagePart, ToolCall, content_of, reasoning_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    parts: Sequence[MessagePart] = ()
    # Of who speaks, among several of one role.
    name: str | None = None
    # Of a tool's message: the call that it answers.
    tool_call_id: str | None = None

    @property
    def num_chars(self) -> int:
        """Of its text."""
        return sum(
            len(part.arguments if isinstance(part, ToolCall) else part.text) for part in self.parts
        )

    def for_template(self) -> dict[str, Any]:
        """Return it in the form that chat templates read (transformers' `apply_chat_template`):
        what it lacks is left out, arguments of calls are objects.
        """
        message: dict[str, Any] = {"role": self.role, "content": content_of(self.parts)}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if reasoning := reasoning_of(self.parts):
            # Templates know one or the other.
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        calls = [_call(part) for part in self.parts if isinstance(part, ToolCall)]
        if calls:
            message["tool_calls"] = calls
        return message


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": from_json(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}
