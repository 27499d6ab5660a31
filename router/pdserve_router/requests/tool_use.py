"""Which tools an answer may call, and what reads its text."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdserve_common.capabilities import Capabilities
from pdserve_common.errors import InvalidRequestError
from pdserve_router.chat_formats.base import ChatFormat, ParserOptions, ReasoningStart
from pdserve_router.text.tokenizer import Tokenizer

# The end of a prompt in which a marker of reasoning is looked for.
_NUM_LAST_TOKENS = 16


class ToolMode(enum.Enum):
    """Whether an answer has calls: never, as the model likes, or always."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that an answer may call."""

    # At least one, in the form of chat templates: {"type": "function", "function": {...}}.
    tools: Sequence[dict[str, Any]]
    mode: ToolMode = ToolMode.AUTO
    # More than one call in an answer.
    is_parallel: bool = True

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of each tool's parameters, by name."""
        functions = (tool["function"] for tool in self.tools)
        return {each["name"]: each.get("parameters", {"type": "object"}) for each in functions}


def check_tool_use(
    use: ToolUse | None, chat_format: ChatFormat | None, capabilities: Capabilities
) -> None:
    """Raise InvalidRequestError if what is asked of tools cannot be had."""
    if use is None:
        return
    if chat_format is None:
        raise InvalidRequestError(
            "tools is set, how this model writes calls is not known (chat_format)", field="tools"
        )
    if use.mode is ToolMode.REQUIRED and "structured_outputs" not in capabilities.fields:
        raise InvalidRequestError(
            "tool_choice asks for a call, which no worker enforces yet, must be none or auto",
            field="tool_choice",
        )


def parser_options(
    chat_format: ChatFormat | None,
    use: ToolUse | None,
    prompt_token_ids: Sequence[int],
    tokenizer: Tokenizer,
) -> ParserOptions | None:
    """Return how answers to a chat are read; None: they are text."""
    if chat_format is None:
        return None
    last = tokenizer.decode(prompt_token_ids[-_NUM_LAST_TOKENS:])
    return ParserOptions(
        format=chat_format.name,
        reasoning=_reasoning_start(chat_format, last),
        tools={} if use is None else use.parameters,
        is_parallel=use is None or use.is_parallel,
    )


def _reasoning_start(chat_format: ChatFormat, prompt_end: str) -> ReasoningStart:
    if chat_format.reasoning is None:
        return ReasoningStart.CLOSED
    begin, end = chat_format.reasoning
    prompt_end = prompt_end.rstrip()
    if prompt_end.endswith(begin):
        return ReasoningStart.OPEN
    return ReasoningStart.CLOSED if prompt_end.endswith(end) else ReasoningStart.FREE
