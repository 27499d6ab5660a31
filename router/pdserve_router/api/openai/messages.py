"""Messages of a conversation as OpenAI's clients send them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, WithJsonSchema

from pdserve_common.errors import InvalidRequestError
from pdserve_router.api.openai.fields import (
    MESSAGE_WITHOUT_EFFECT,
    REFUSED_IN_MESSAGE,
    UnknownNames,
    check_refused,
)
from pdserve_router.api.openai.model import CONFIG, TEXT_SCHEMA, Items
from pdserve_router.api.openai.pictures import (
    PICTURE_PART,
    check_picture_names,
    is_picture_part,
    picture_of,
)
from pdserve_router.requests.input.request_limits import (
    MAX_ANNOTATIONS,
    MAX_CONTENT_PARTS,
    MAX_PICTURES,
    MAX_TOOL_CALLS,
    check_num_entries,
)
from pdserve_router.requests.input.tool_use import check_result, past_call
from pdserve_router.text.messages import ChatMessage
from pdserve_router.text.parts import Content, MessagePart, Picture, Reasoning, ToolCall

_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT_SCHEMA},
    "required": ["type", "text"],
}
_CONTENT = {
    "anyOf": [
        TEXT_SCHEMA,
        {"type": "array", "items": {"anyOf": [_PART, PICTURE_PART]}},
        {"type": "null"},
    ]
}


class CalledFunctionBody(BaseModel):
    """What was called."""

    model_config = CONFIG

    name: str
    """Its name."""
    arguments: str
    """A JSON object."""


class ToolCallBody(BaseModel):
    """A call that an answer made."""

    model_config = CONFIG

    id: str | None = None
    """As the answer told it."""
    type: Literal["function"] = "function"
    """function."""
    function: CalledFunctionBody
    """The function."""


class ChatMessageBody(BaseModel):
    """One message."""

    model_config = CONFIG

    role: str
    """system or developer, user, assistant, tool."""
    content: Annotated[Any, WithJsonSchema(_CONTENT)] = None
    """A text, or a list of {"type": "text", "text": ...} and, of a user and where the model takes
    pictures, {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}; an
    assistant's may be null.
    """
    name: str | None = None
    """Of who speaks, for the chat template."""
    reasoning: str | None = None
    """An assistant's, for the chat template."""
    reasoning_content: str | None = None
    """The older name of reasoning."""
    tool_calls: Items[ToolCallBody] | None = None
    """An assistant's."""
    tool_call_id: str | None = None
    """A tool's: which call it answers."""


def chat_messages(messages: Sequence[ChatMessageBody]) -> list[ChatMessage]:
    """Return them as the chat template gets them. Raises InvalidRequestError naming the field."""
    check_num_pictures(messages)
    return [_chat_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _chat_message(message: ChatMessageBody, path: str) -> ChatMessage:
    parts = _parts(message, path)
    is_list = isinstance(message.content, list)
    return ChatMessage(
        role=message.role,
        parts=parts,
        name=message.name,
        tool_call_id=message.tool_call_id,
        has_pictures=is_list and any(isinstance(part, Picture) for part in parts),
    )


def check_num_pictures(messages: Sequence[ChatMessageBody]) -> None:
    """Raise InvalidRequestError if there are more than any request may have."""
    lists = [message.content for message in messages if isinstance(message.content, list)]
    if sum(is_picture_part(part) for parts in lists for part in parts) > MAX_PICTURES:
        raise InvalidRequestError(
            f"messages has more than {MAX_PICTURES} pictures", field="messages"
        )


_MESSAGE_FIELDS = ChatMessageBody.model_fields.keys()
_KNOWN_IN_MESSAGE = frozenset((*_MESSAGE_FIELDS, *REFUSED_IN_MESSAGE, *MESSAGE_WITHOUT_EFFECT))
_PART_FIELDS = frozenset(("type", "text"))


def check_messages(messages: object, unknown: UnknownNames) -> None:
    """Note unknown fields of messages as they came. Raises InvalidRequestError for those that are
    not served.
    """
    if not isinstance(messages, list):
        return
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        if not message.keys() <= _MESSAGE_FIELDS:
            check_refused(message, REFUSED_IN_MESSAGE, path=f"messages[{index}].")
            unknown.add(message.keys() - _KNOWN_IN_MESSAGE, path="messages.")
            annotations = message.get("annotations")
            check_num_entries(f"messages[{index}].annotations", annotations, MAX_ANNOTATIONS)
        calls = message.get("tool_calls")
        check_num_entries(f"messages[{index}].tool_calls", calls, MAX_TOOL_CALLS)
        if isinstance(parts := message.get("content"), list):
            check_num_entries(f"messages[{index}].content", parts, MAX_CONTENT_PARTS)
            for part in parts:
                if isinstance(part, dict) and part.get("type") == "text":
                    unknown.add(part.keys() - _PART_FIELDS, path="messages.content.")
                elif is_picture_part(part):
                    check_picture_names(part, unknown)


def _parts(message: ChatMessageBody, path: str) -> tuple[MessagePart, ...]:
    check_result(message.role, message.tool_call_id, field=f"{path}.tool_call_id")
    reasoning = message.reasoning or message.reasoning_content
    calls = message.tool_calls or ()
    return (
        *((Reasoning(reasoning),) if reasoning else ()),
        *_content(message, f"{path}.content"),
        *(_tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)),
    )


def _tool_call(call: ToolCallBody, path: str) -> ToolCall:
    return past_call(
        id=call.id or "",
        name=call.function.name,
        arguments=call.function.arguments,
        field=f"{path}.function.arguments",
    )


def _content(message: ChatMessageBody, field: str) -> tuple[Content | Picture, ...]:
    """Return what a message says and shows: a string, or a list of parts."""
    content = message.content
    if isinstance(content, str):
        return (Content(content),)
    if content is None:
        if message.role != "assistant":
            raise InvalidRequestError(f"{field} is missing", field=field)
        return ()
    if not isinstance(content, list):
        raise InvalidRequestError(f"{field} must be a string or a list of parts", field=field)
    return tuple(_part(part, message.role, field, i) for i, part in enumerate(content))


def _part(part: object, role: str, field: str, index: int) -> Content | Picture:
    if not is_picture_part(part):
        return Content(part_text(part, field, served="'text' and 'image_url' are served"))
    if role != "user":
        raise InvalidRequestError(
            f"{field} has a picture in a message of role {role[:64]!r}, only a user shows any",
            field=field,
        )
    return picture_of(part, f"{field}[{index}].image_url")


def part_text(part: object, field: str, *, served: str = "only 'text' is served") -> str:
    """Return the text of a part. Raises InvalidRequestError, which names the field, for others."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        raise InvalidRequestError(
            f"{field} has a part of type {str(kind)[:64]!r}, {served}", field=field
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{field} has a part without plain text", field=field)
    return text
