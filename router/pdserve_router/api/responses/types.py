"""The body of OpenAI's responses: the fields that are served."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, WithJsonSchema
from pydantic_core import to_json

from pdserve_common.errors import InvalidRequestError
from pdserve_router.api.openai.fields import REFUSED, REFUSED_IN_RESPONSES, UnknownNames
from pdserve_router.api.openai.model import CONFIG, TEXT_SCHEMA, Int, Items
from pdserve_router.api.openai.structured import Constraint, text_constraint
from pdserve_router.api.openai.tools import FunctionBody, ToolBody, tool_use
from pdserve_router.api.openai.types import GenerationBody
from pdserve_router.api.responses.items import conversation
from pdserve_router.requests.input.request_limits import INLINE_BYTES

_INPUT = {"anyOf": [TEXT_SCHEMA, {"type": "array", "items": {"type": "object"}}]}
_TOOL_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}


class FunctionToolBody(FunctionBody):
    """A function that the model may call."""

    type: Literal["function"]
    """function."""


class TextFormatBody(BaseModel):
    """What an answer has to be."""

    model_config = CONFIG

    type: Literal["text", "json_object", "json_schema"]
    """text (anything), json_object (any JSON object) or json_schema."""
    name: str | None = None
    """Without effect."""
    description: str | None = None
    """Without effect."""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """For the type json_schema: the schema."""
    strict: bool | None = None
    """Without effect: schemas are enforced, whatever it is."""


class TextBody(BaseModel):
    """How the text of an answer is."""

    model_config = CONFIG

    format: TextFormatBody | None = None
    """What it has to be: text, json_object or json_schema."""
    verbosity: Any = None
    """Without effect: models here have no such setting."""


class ReasoningBody(BaseModel):
    """How a model reasons."""

    model_config = CONFIG

    effort: str | None = None
    """The variable reasoning_effort of the chat template."""
    summary: Any = None
    """Without effect: reasoning is told whole."""
    generate_summary: Any = None
    """The older name of summary."""


class ResponsesBody(GenerationBody):
    """POST /v1/responses."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {**REFUSED, **REFUSED_IN_RESPONSES}

    input: Annotated[Any, WithJsonSchema(_INPUT)]
    """A text, or items: messages, reasoning, calls and their results, oldest first."""
    instructions: str | None = None
    """A system message before them."""
    max_output_tokens: Int | None = None
    """Tokens of an answer; all that fit, unless it is set."""
    tools: Items[FunctionToolBody] | None = None
    """Functions that the model may call, at most 1024; the chat template has to know of them."""
    tool_choice: Annotated[Any, WithJsonSchema(_TOOL_CHOICE)] = None
    """none, auto, required, a function's name, or allowed_tools with a mode."""
    parallel_tool_calls: bool | None = None
    """false: only the first call of an answer is told."""
    text: TextBody | None = None
    """What the text has to be: `format`."""
    reasoning: ReasoningBody | None = None
    """`effort`, for the chat template."""
    include: Items[Literal["reasoning.encrypted_content"]] | None = None
    """Without effect: reasoning is told as text, which may come back."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template, such as enable_thinking."""

    @property
    def output_token_limit(self) -> int | None:
        limit = self.max_output_tokens
        if limit is not None and limit < 1:
            # Further down it has another name.
            raise InvalidRequestError(
                f"max_output_tokens is {limit}, must be at least 1", field="max_output_tokens"
            )
        return limit

    @property
    def num_logprobs(self) -> int | None:
        return None

    @property
    def repeated_fields(self) -> bytes:
        """What clients' models of a response have. They are kept while the answer comes, and a
        stream has them three times: at most INLINE_BYTES, the largest are told as unset.
        """
        values = self._repeated_values()
        data = to_json(values)
        if len(data) <= INLINE_BYTES:
            return data
        unset = ResponsesBody.model_construct()._repeated_values()
        by_size = sorted(values, key=lambda name: len(to_json(values[name])))
        while len(data) > INLINE_BYTES:
            name = by_size.pop()
            values[name] = unset[name]
            data = to_json(values)
        return data

    def own_error(self, error: InvalidRequestError) -> InvalidRequestError:
        if error.field not in ("messages", "prompt"):
            return error
        return InvalidRequestError(error.message.replace(error.field, "input", 1), field="input")

    def _repeated_values(self) -> dict[str, object]:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        text = (self.text or TextBody()).model_dump(by_alias=True, exclude_none=True)
        reasoning = self.reasoning or ReasoningBody()
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "store": False,
            "temperature": self.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": _told_choice(self.tool_choice),
            "tools": tools,
            "top_p": self.top_p,
            "truncation": "disabled",
        }

    def prompt_inputs(self) -> list[dict[str, Any]]:
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning is not None and self.reasoning.effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning.effort)
        use = tool_use(
            [_chat_tool(tool) for tool in self.tools or ()],
            _chat_choice(self.tool_choice),
            is_parallel=self.parallel_tool_calls is not False,
            name_field="tools[{}].name",
        )
        prompt = {
            "messages": conversation(self.instructions, self.input),
            "tools": use,
            "template_variables": variables,
        }
        return [prompt]

    def constraint(self) -> Constraint | None:
        form = self.text.format if self.text is not None else None
        kind, schema = ("text", None) if form is None else (form.type, form.schema_)
        return text_constraint(kind, schema, self.structured_outputs)


def check_function_tools(tools: object, unknown: UnknownNames) -> None:
    """Note unknown fields of tools as they came."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            unknown.add(tool.keys() - FunctionToolBody.model_fields.keys(), path="tools.")


def _chat_tool(tool: FunctionToolBody) -> ToolBody:
    """Return it as chats have it."""
    function = FunctionBody.model_construct(**{name: getattr(tool, name) for name in _FUNCTION})
    return ToolBody.model_construct(type="function", function=function)


_FUNCTION = tuple(FunctionBody.model_fields)


def _chat_choice(choice: object) -> object:
    """Return it as chats have it, where the two differ."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return _named(choice)
    if choice.get("type") == "allowed_tools" and isinstance(tools := choice.get("tools"), list):
        allowed = {"mode": choice.get("mode"), "tools": [_named(tool) for tool in tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _told_choice(choice: object) -> object:
    """Return what was read of a choice that `tool_use` has checked."""
    chosen = _chat_choice(choice)
    if not isinstance(chosen, dict):
        return "auto" if chosen is None else chosen
    if chosen["type"] == "function":
        return {"type": "function", "name": chosen["function"]["name"]}
    allowed = chosen["allowed_tools"]
    named = [{"type": "function", "name": tool["function"]["name"]} for tool in allowed["tools"]]
    return {"type": "allowed_tools", "mode": allowed["mode"], "tools": named}


def _named(tool: object) -> object:
    name = tool.get("name") if isinstance(tool, dict) else None
    return {"type": "function", "function": {"name": name}}
