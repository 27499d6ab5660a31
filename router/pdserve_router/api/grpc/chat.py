"""Conversations and parts of answers as the gRPC API has them."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.errors import InvalidRequestError
from pdserve_router.requests.input.request_limits import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    check_lengths,
)
from pdserve_router.requests.input.tool_use import (
    ToolMode,
    ToolUse,
    as_tool,
    check_names,
    check_result,
    past_call,
)
from pdserve_router.text.messages import ChatMessage
from pdserve_router.text.parts import (
    Content,
    MessagePart,
    OutputPart,
    Picture,
    Reasoning,
    join_calls,
    reasoning_of,
)

_MODES = {
    pb2.TOOL_CHOICE_UNSPECIFIED: ToolMode.AUTO,
    pb2.TOOL_CHOICE_NONE: ToolMode.NONE,
    pb2.TOOL_CHOICE_AUTO: ToolMode.AUTO,
    pb2.TOOL_CHOICE_REQUIRED: ToolMode.REQUIRED,
}


def check_chat(chat: pb2.ChatPrompt) -> None:
    """Raise InvalidRequestError for what has too many entries."""
    most_calls = max((len(message.tool_calls) for message in chat.messages), default=0)
    most_parts = max((len(message.parts) for message in chat.messages), default=0)
    check_lengths(
        [
            ("messages", len(chat.messages), MAX_MESSAGES),
            ("tools", len(chat.tools), MAX_TOOLS),
            ("allowed_tools", len(chat.allowed_tools), MAX_TOOLS),
            ("tool_calls", most_calls, MAX_TOOL_CALLS),
            ("parts", most_parts, MAX_CONTENT_PARTS),
        ]
    )


def chat_messages(chat: pb2.ChatPrompt) -> Sequence[ChatMessage]:
    """Return them as the chat template gets them. Raises InvalidRequestError naming the field."""
    return [
        ChatMessage(
            role=message.role,
            parts=_parts(message, f"messages[{index}]"),
            name=message.name if message.HasField("name") else None,
            tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
            has_pictures=any(part.WhichOneof("part") == "picture" for part in message.parts),
        )
        for index, message in enumerate(chat.messages)
    ]


def chat_tools(chat: pb2.ChatPrompt) -> ToolUse | None:
    """Return what an answer may call; None: nothing. Raises InvalidRequestError naming the
    field.
    """
    check_names([tool.name for tool in chat.tools], field="tools[{}].name")
    tools = {tool.name: _tool(tool, index) for index, tool in enumerate(chat.tools)}
    for name in chat.allowed_tools:
        if name not in tools:
            raise InvalidRequestError(
                f"allowed_tools has {name[:128]!r}, which tools lacks", field="allowed_tools"
            )
    mode = _MODES.get(chat.tool_choice)
    if mode is None:
        raise InvalidRequestError(
            f"tool_choice is {chat.tool_choice}, which is unknown", field="tool_choice"
        )
    if mode is ToolMode.REQUIRED and not tools:
        raise InvalidRequestError(
            "tool_choice is TOOL_CHOICE_REQUIRED, tools is empty", field="tool_choice"
        )
    if not tools or mode is ToolMode.NONE:
        return None
    names = dict.fromkeys(chat.allowed_tools or tools)
    return ToolUse(
        tools=tuple(tools[name] for name in names),
        mode=mode,
        is_parallel=not chat.single_tool_call,
        strict=frozenset(tool.name for tool in chat.tools if tool.strict and tool.name in names),
    )


def add_parts(message: pb2.CompletionOutput, parts: Sequence[OutputPart]) -> None:
    """Write what an answer has besides what is said."""
    if reasoning := reasoning_of(parts):
        message.reasoning = reasoning
    for call in join_calls(parts):
        message.tool_calls.add(
            index=call.index, id=call.id, name=call.name, arguments=call.arguments
        )


def _parts(message: pb2.ChatMessage, path: str) -> tuple[MessagePart, ...]:
    check_result(message.role, message.tool_call_id, field=f"{path}.tool_call_id")
    return (
        *((Reasoning(message.reasoning),) if message.reasoning else ()),
        *_content(message, path),
        *(
            past_call(
                id=call.id,
                name=call.name,
                arguments=call.arguments,
                field=f"{path}.tool_calls[{index}].arguments",
            )
            for index, call in enumerate(message.tool_calls)
        ),
    )


def _content(message: pb2.ChatMessage, path: str) -> Sequence[Content | Picture]:
    if not message.parts:
        return (Content(message.content),)
    if message.content:
        field = f"{path}.parts"
        raise InvalidRequestError(f"{field} and content are both set, set one", field=field)
    return [
        _part(part, message.role, f"{path}.parts[{index}]")
        for index, part in enumerate(message.parts)
    ]


def _part(part: pb2.ContentPart, role: str, field: str) -> Content | Picture:
    kind = part.WhichOneof("part")
    if kind is None:
        raise InvalidRequestError(f"{field} is empty, set text or picture", field=field)
    if kind == "text":
        return Content(part.text)
    if role != "user":
        raise InvalidRequestError(
            f"{field} is a picture in a message of role {role[:64]!r}, only a user shows any",
            field=field,
        )
    return Picture(part.picture, field)


def _tool(tool: pb2.Tool, index: int) -> dict[str, Any]:
    field = f"tools[{index}].parameters"
    parameters: object = None
    if tool.parameters:
        try:
            parameters = from_json(tool.parameters)
        except ValueError as error:
            raise InvalidRequestError(f"{field} is no JSON: {error}", field=field) from error
        if not isinstance(parameters, dict):
            raise InvalidRequestError(f"{field} is no JSON object", field=field)
    return as_tool(name=tool.name, description=tool.description or None, parameters=parameters)
