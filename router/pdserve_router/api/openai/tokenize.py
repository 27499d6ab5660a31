"""/tokenize and /detokenize, as in vLLM: from a body's bytes to an answer's."""

from typing import Any

from pydantic import BaseModel, Field
from pydantic_core import to_json

from pdserve_common.errors import InvalidRequestError
from pdserve_router.api.openai.fields import REFUSED, UnknownNames, check_refused
from pdserve_router.api.openai.messages import ChatMessageBody, chat_messages, check_messages
from pdserve_router.api.openai.model import CONFIG, Items
from pdserve_router.api.openai.parse import json_object, validate
from pdserve_router.api.openai.tools import Tools, check_tools, tool_use
from pdserve_router.requests.input.input_processor import InputProcessor
from pdserve_router.requests.input.request_limits import (
    INLINE_BYTES,
    MAX_ENTRIES,
    MAX_RESUMED_TOKENS,
    check_json_counts,
    check_num_entries,
)
from pdserve_router.workers.model_limits import ModelLimits

# An answer, and the names of unknown fields.
Result = tuple[bytes, tuple[str, ...]]


class TokenizeBody(BaseModel):
    """POST /tokenize: a text or a conversation."""

    model_config = CONFIG

    model: str | None = None
    """The served model's name; may be left out."""
    prompt: str | None = None
    """A text."""
    messages: Items[ChatMessageBody] | None = None
    """Or a conversation."""
    add_special_tokens: bool | None = None
    """Of a text: the model's special tokens around it, unless this is false."""
    tools: Tools | None = None
    """Of a conversation: functions that its chat template gets."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template."""
    return_token_strs: bool | None = None
    """Also each token's entry in the vocabulary."""


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = CONFIG

    model: str | None = None
    """The served model's name; may be left out."""
    tokens: list[int] = Field(fail_fast=True)
    """Token ids."""


async def tokenize(processor: InputProcessor, raw: bytes, limits: ModelLimits) -> Result:
    """Answer a TokenizeBody. Raises InvalidRequestError naming the field."""
    values, unknown = _values(TokenizeBody, raw, max_token_ids=0)
    check_refused(values, REFUSED)
    messages = values.get("messages")
    check_num_entries("messages", messages, MAX_ENTRIES["messages"])
    check_messages(messages, unknown)
    check_num_entries("tools", values.get("tools"), MAX_ENTRIES["tools"])
    check_tools(values.get("tools"), unknown)
    body = validate(TokenizeBody, values)
    processor.check_model(body.model or "", limits)
    if body.messages is not None and body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens is set: a chat template writes them itself",
            field="add_special_tokens",
        )
    tools = tool_use(body.tools, None, is_parallel=True)
    if tools is not None and body.messages is None:
        raise InvalidRequestError("tools is set without messages", field="tools")
    token_ids = await processor.tokenize(
        text=body.prompt,
        messages=None if body.messages is None else chat_messages(body.messages),
        tools=() if tools is None else tools.tools,
        template_variables=body.chat_template_kwargs or {},
        add_special_tokens=body.add_special_tokens is not False,
        max_model_len=limits.max_model_len,
    )
    strings = processor.token_strings(token_ids) if body.return_token_strs else None
    answer = {
        "count": len(token_ids),
        "max_model_len": limits.max_model_len,
        "tokens": token_ids,
        "token_strs": strings,
    }
    return to_json(answer), unknown.names()


async def detokenize(processor: InputProcessor, raw: bytes, limits: ModelLimits) -> Result:
    """Answer a DetokenizeBody. Raises InvalidRequestError naming the field."""
    values, unknown = _values(DetokenizeBody, raw, max_token_ids=MAX_RESUMED_TOKENS)
    body = validate(DetokenizeBody, values)
    processor.check_model(body.model or "")
    text = await processor.detokenize(body.tokens, field="tokens")
    return to_json({"prompt": text}), unknown.names()


def _values(
    cls: type[BaseModel], raw: bytes, *, max_token_ids: int
) -> tuple[dict[str, Any], UnknownNames]:
    if len(raw) > INLINE_BYTES:
        check_json_counts(raw, max_token_ids=max_token_ids)
    values = json_object(raw)
    unknown = UnknownNames()
    unknown.add(values.keys() - cls.model_fields.keys() - REFUSED.keys())
    return values, unknown
