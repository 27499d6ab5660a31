"""A turn of a conversation, and how chat templates see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from pdserve_router.text.parts import (
    Content,
    MessagePart,
    Picture,
    ToolCall,
    content_of,
    reasoning_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    parts: Sequence[MessagePart] = ()
    # The name of who speaks, among several of one role.
    name: str | None = None
    # The call that a tool's message answers.
    tool_call_id: str | None = None
    # Some parts are pictures: said once, as few messages have any.
    has_pictures: bool = False

    @property
    def num_chars(self) -> int:
        """Of its text."""
        return sum(map(_num_chars, self.parts))

    @property
    def pictures(self) -> Sequence[Picture]:
        """What it shows."""
        if not self.has_pictures:
            return ()
        return [part for part in self.parts if isinstance(part, Picture)]

    def for_template(self, *, image_token: str = "", lists_parts: bool = False) -> dict[str, Any]:
        """Return it in the form that chat templates read (transformers' `apply_chat_template`):
        what it lacks is left out, arguments of calls are objects. A picture is a part of the
        content for templates that go through parts, and `image_token` in its text for others.
        """
        content: str | list[dict[str, str]]
        if lists_parts:
            content = _content_parts(self.parts)
        elif self.has_pictures:
            content = _content_text(self.parts, image_token)
        else:
            content = content_of(self.parts)
        message: dict[str, Any] = {"role": self.role, "content": content}
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


def _num_chars(part: MessagePart) -> int:
    if isinstance(part, Picture):
        return 0
    return len(part.arguments if isinstance(part, ToolCall) else part.text)


def _content_parts(parts: Sequence[MessagePart]) -> list[dict[str, str]]:
    return [
        {"type": "image"} if isinstance(part, Picture) else {"type": "text", "text": part.text}
        for part in parts
        if isinstance(part, Content | Picture)
    ]


def _content_text(parts: Sequence[MessagePart], image_token: str) -> str:
    return "".join(
        image_token if isinstance(part, Picture) else part.text
        for part in parts
        if isinstance(part, Content | Picture)
    )


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": from_json(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}
