"""Messages of a conversation as OpenAI's clients send them."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, WithJsonSchema

from pdserve_common.errors import InvalidRequestError
from pdserve_router.api.openai_fields import (
    MESSAGE_WITHOUT_EFFECT,
    REFUSED_IN_MESSAGE,
    UnknownNames,
    check_refused,
)
from pdserve_router.api.openai_model import CONFIG, TEXT_SCHEMA
from pdserve_router.requests.request_limits import (
    MAX_ANNOTATIONS,
    MAX_CONTENT_PARTS,
    check_num_entries,
)
from pdserve_router.text.messages import ChatMessage
from pdserve_router.text.parts import Content

_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT_SCHEMA},
    "required": ["type", "text"],
}
_CONTENT = {"anyOf": [TEXT_SCHEMA, {"type": "array", "items": _PART}, {"type": "null"}]}


class ChatMessageBody(BaseModel):
    """One message."""

    model_config = CONFIG

    role: str
    """system or developer, user, assistant."""
    content: Annotated[Any, WithJsonSchema(_CONTENT)] = None
    """A text, or a list of {"type": "text", "text": ...}; an assistant's may be null."""


# Templates know the older name.
_ROLES = {"developer": "system"}


def chat_messages(messages: Sequence[ChatMessageBody]) -> list[ChatMessage]:
    """Return them as the chat template gets them. Raises InvalidRequestError naming the field."""
    return [
        ChatMessage(role=_ROLES.get(message.role, message.role), parts=_content(message, index))
        for index, message in enumerate(messages)
    ]


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
        if isinstance(parts := message.get("content"), list):
            check_num_entries(f"messages[{index}].content", parts, MAX_CONTENT_PARTS)
            for part in parts:
                if isinstance(part, dict) and part.get("type") == "text":
                    unknown.add(part.keys() - _PART_FIELDS, path="messages.content.")


def _content(message: ChatMessageBody, index: int) -> tuple[Content, ...]:
    """Return what a message says: a string, or a list of text parts."""
    field = f"messages[{index}].content"
    content = message.content
    if isinstance(content, str):
        return (Content(content),)
    if content is None:
        if message.role != "assistant":
            raise InvalidRequestError(f"{field} is missing", field=field)
        return ()
    if not isinstance(content, list):
        raise InvalidRequestError(f"{field} must be a string or a list of parts", field=field)
    return tuple(Content(_part_text(part, field)) for part in content)


def _part_text(part: object, field: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        raise InvalidRequestError(
            f"{field} has a part of type {str(kind)[:64]!r}, only 'text' is served", field=field
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{field} has a part without plain text", field=field)
    return text
