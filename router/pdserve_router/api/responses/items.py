"""The input of a response, item by item, as a conversation."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve_common.errors import InvalidRequestError
from pdserve_router.api.openai.fields import UnknownNames
from pdserve_router.requests.input.request_limits import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    check_num_entries,
)
from pdserve_router.requests.input.tool_use import check_result, past_call
from pdserve_router.text.messages import ChatMessage
from pdserve_router.text.parts import Content, MessagePart, Reasoning, ToolCall

_ROLES = ("user", "assistant", "system", "developer")
# By the type of an item: its fields. `id` and `status` are those of an answer that comes back.
_FIELDS: Mapping[str, frozenset[str]] = {
    "message": frozenset(("type", "id", "status", "role", "content", "phase")),
    "reasoning": frozenset(("type", "id", "status", "summary", "content", "encrypted_content")),
    "function_call": frozenset(("type", "id", "status", "call_id", "name", "arguments")),
    "function_call_output": frozenset(("type", "id", "status", "call_id", "output")),
}
_TEXT_PARTS = ("input_text", "output_text")


def check_input(items: object, unknown: UnknownNames) -> None:
    """Note unknown fields of items as they came. Raises InvalidRequestError for too many."""
    check_num_entries("input", items, MAX_MESSAGES)
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, dict):
            continue
        unknown.add(item.keys() - _FIELDS.get(_kind(item), item.keys()), path="input.")
        for name in ("content", "output", "summary"):
            check_num_entries(f"input[{index}].{name}", item.get(name), MAX_CONTENT_PARTS)


def conversation(instructions: str | None, items: object) -> list[ChatMessage]:
    """Return the messages that the chat template gets. An answer's items in a row, its reasoning,
    text and calls, are one message of its. Raises InvalidRequestError naming the field.
    """
    messages: list[ChatMessage] = []
    if instructions is not None:
        messages.append(ChatMessage(role="system", parts=(Content(instructions),)))
    if isinstance(items, str):
        return [*messages, ChatMessage(role="user", parts=(Content(items),))]
    if not isinstance(items, list):
        raise _invalid("input", "must be a string or a list of items")
    answer: list[MessagePart] = []
    for index, item in enumerate(items):
        field = f"input[{index}]"
        if not isinstance(item, dict):
            raise _invalid(field, "must be an object")
        parts = _answer_parts(item, field)
        if parts is None or _begins_another(answer, parts):
            _end_answer(messages, answer)
        if parts is None:
            messages.append(_message(item, field))
        else:
            answer += parts
    _end_answer(messages, answer)
    return messages


def _end_answer(messages: list[ChatMessage], answer: list[MessagePart]) -> None:
    if answer:
        messages.append(ChatMessage(role="assistant", parts=tuple(answer)))
        answer.clear()


def _begins_another(answer: Sequence[MessagePart], parts: Sequence[MessagePart]) -> bool:
    """A message has its reasoning first, then its text, once, then its calls."""
    if not answer or not parts:
        return False
    order = (Reasoning, Content, ToolCall)
    last, next_ = (order.index(type(part)) for part in (answer[-1], parts[0]))
    return next_ < last or (isinstance(parts[0], Content) and isinstance(answer[-1], Content))


def _answer_parts(item: Mapping[str, Any], field: str) -> Sequence[MessagePart] | None:
    """Return what an item of an answer says; None: it is of somebody else."""
    kind = _kind(item)
    if kind == "message" and item.get("role") == "assistant":
        return _contents(item.get("content"), f"{field}.content")
    if kind == "reasoning":
        # What is encrypted nobody can read here; the text of a summary is not what was thought.
        return [Reasoning(text) for text in _texts(item.get("content"), f"{field}.content")]
    if kind == "function_call":
        return (_call(item, field),)
    return None


def _message(item: Mapping[str, Any], field: str) -> ChatMessage:
    kind = _kind(item)
    if kind == "function_call_output":
        call_id = item.get("call_id")
        call_id = call_id if isinstance(call_id, str) else None
        check_result("tool", call_id, field=f"{field}.call_id")
        parts = _contents(item.get("output"), f"{field}.output")
        return ChatMessage(role="tool", parts=parts, tool_call_id=call_id)
    if kind != "message":
        raise _invalid(f"{field}.type", f"is {kind[:64]!r}, must be one of {', '.join(_FIELDS)}")
    role = item.get("role")
    if role not in _ROLES:
        raise _invalid(f"{field}.role", f"is {str(role)[:64]!r}, must be {', '.join(_ROLES)}")
    return ChatMessage(role=role, parts=_contents(item.get("content"), f"{field}.content"))


def _call(item: Mapping[str, Any], field: str) -> ToolCall:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise _invalid(f"{field}.{name}", "must be a string")
    return past_call(
        id=item["call_id"],
        name=item["name"],
        arguments=item["arguments"],
        field=f"{field}.arguments",
    )


def _contents(value: object, field: str) -> tuple[Content, ...]:
    if isinstance(value, str):
        return (Content(value),)
    if not isinstance(value, list):
        raise _invalid(field, "must be a string or a list of parts")
    return tuple(Content(text) for text in _texts(value, field, kinds=_TEXT_PARTS))


def _texts(
    parts: object, field: str, *, kinds: Sequence[str] = ("reasoning_text",)
) -> Sequence[str]:
    if parts is None:
        return ()
    if not isinstance(parts, list):
        raise _invalid(field, "must be a list of parts")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_image":
            problem = "has a picture (input_image): only /v1/chat/completions takes any"
            raise _invalid(field, problem)
        if not isinstance(part, dict) or kind not in kinds:
            served = " and ".join(kinds)
            raise _invalid(field, f"has a part of type {str(kind)[:64]!r}, served: {served}")
        if not isinstance(text := part.get("text"), str):
            raise _invalid(field, "has a part without plain text")
        texts.append(text)
    return texts


def _kind(item: Mapping[str, Any]) -> str:
    # OpenAI's clients may leave it out of a message.
    return str(item.get("type", "message"))


def _invalid(field: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} {problem}", field=field)
