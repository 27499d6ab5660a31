"""Which tools an answer may call, and what reads its text."""

import dataclasses
import enum
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import validate_structured_outputs
from pdserve_common.structured.accepted import AcceptedConstraints
from pdserve_common.structured.values import Values
from pdserve_common.types.capabilities import Capabilities
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_router.chat_formats.base import ChatFormat, ParserOptions, ReasoningStart
from pdserve_router.chat_formats.tags import CallRules, json_of
from pdserve_router.text.parts import ToolCall
from pdserve_router.text.tokenizer import Tokenizer

# As OpenAI has it. Of more a grammar would be too large.
MAX_ENFORCED_TOOLS = 128
# Of a tool: objects, and what stands where a schema may. The event loop waits some 10 us for each
# when an answer has a call.
MAX_SCHEMAS = 4096
# What has these has a schema in each entry, or by each name.
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_OBJECTS_OF_SCHEMAS = (
    "properties",
    "patternProperties",
    "dependentSchemas",
    "$defs",
    "definitions",
)
# The end of a prompt in which a marker of reasoning is looked for.
_NUM_LAST_TOKENS = 16
# Variables by which chat templates turn reasoning off.
_SWITCHES = ("enable_thinking", "thinking")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


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
    # Names of tools whose schema is enforced or refused; arguments of others are any object then.
    strict: frozenset[str] = frozenset()

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of each tool's parameters, by name."""
        functions = (tool["function"] for tool in self.tools)
        return {each["name"]: each.get("parameters") or {"type": "object"} for each in functions}


def check_result(role: str, tool_call_id: str | None, *, field: str) -> None:
    """Raise InvalidRequestError for a tool's message that does not say which call it answers."""
    if role == "tool" and not tool_call_id:
        raise InvalidRequestError(f"{field} is missing", field=field)


def check_names(names: Sequence[str], *, field: str) -> None:
    """Raise InvalidRequestError for a name that no tool can have, or that two have. `field` has a
    place for its number.
    """
    known: set[str] = set()
    for index, name in enumerate(names):
        path = field.format(index)
        if _NAME.fullmatch(name) is None:
            raise InvalidRequestError(
                f"{path} is {name[:128]!r}, must be 1 to 128 letters, digits and _.:/-", field=path
            )
        if name in known:
            raise InvalidRequestError(f"{path} is {name!r}, which is there already", field=path)
        known.add(name)


def as_tool(*, name: str, description: str | None, parameters: object) -> dict[str, Any]:
    """Return a tool as chat templates get it, without what is None."""
    fields = {"name": name, "description": description, "parameters": parameters}
    function = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": function}


def past_call(*, id: str, name: str, arguments: str, field: str) -> ToolCall:
    """Return a call of the conversation so far. Raises InvalidRequestError for `field` if its
    arguments are no JSON object.
    """
    arguments = arguments or "{}"
    try:
        is_object = isinstance(from_json(arguments), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise InvalidRequestError(f"{field} is no JSON object", field=field)
    return ToolCall(id=id, name=name, arguments=arguments)


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
    for name, schema in use.parameters.items():
        if _has_too_many_schemas(schema):
            raise InvalidRequestError(
                f"tools.{name}.parameters has more than {MAX_SCHEMAS} schemas", field="tools"
            )


def _has_too_many_schemas(schema: Any) -> bool:
    """An object may be one wherever it stands: others may refer to it."""
    num_schemas, left = 0, [schema] if isinstance(schema, dict | list) else []
    while left and num_schemas <= MAX_SCHEMAS:
        value = left.pop()
        if isinstance(value, dict):
            num_schemas += 1 + sum(not isinstance(part, dict) for part in _schemas_within(value))
        parts = value.values() if isinstance(value, dict) else value
        left += (part for part in parts if isinstance(part, dict | list))
    return num_schemas > MAX_SCHEMAS


def _schemas_within(schema: dict[str, Any]) -> Iterator[Any]:
    """Return what stands where a schema may: the event loop looks at it, whatever it is."""
    for keyword in _LISTS_OF_SCHEMAS:
        if isinstance(parts := schema.get(keyword), list):
            yield from parts
    for keyword in _OBJECTS_OF_SCHEMAS:
        if isinstance(parts := schema.get(keyword), dict):
            yield from parts.values()


def calling_params(
    params: SamplingParams,
    use: ToolUse,
    chat_format: ChatFormat,
    reasoning: ReasoningStart,
    ids: Mapping[str, int],
    accepted: AcceptedConstraints,
) -> SamplingParams:
    """Return the parameters of an answer that has to call. Raises InvalidRequestError for a strict
    tool whose schema cannot be enforced, for tools that are too many for a grammar, and for
    parameters that it cannot hold beside.
    """
    tag = json.dumps(
        chat_format.structural_tag(call_rules(use, chat_format, accepted), reasoning, ids)
    )
    constraint = StructuredOutputsParams(structural_tag=tag)
    accepted.check(constraint, field="tools")
    params = dataclasses.replace(params, structured_outputs=constraint)
    validate_structured_outputs(params)
    return params


def call_rules(use: ToolUse, chat_format: ChatFormat, accepted: AcceptedConstraints) -> CallRules:
    """Return the rules of calls, of which there is at least one. Raises InvalidRequestError for a
    strict tool whose schema cannot be enforced, and for tools that are too many for a grammar.
    """
    if len(use.tools) > MAX_ENFORCED_TOOLS:
        raise InvalidRequestError(
            f"tools has {len(use.tools)} entries, calls of at most {MAX_ENFORCED_TOOLS} can be "
            "enforced",
            field="tools",
        )
    return CallRules(
        tools={
            name: _enforced(name, schema, use, chat_format, accepted)
            for name, schema in use.parameters.items()
        },
        stop_after_first=not use.is_parallel,
    )


def as_constraint(schema: Any) -> StructuredOutputsParams:
    """Return JSON that is valid by a tool's schema."""
    return StructuredOutputsParams(json_schema=json.dumps(schema))


def as_constraints(
    schema: Any, chat_format: ChatFormat | None
) -> tuple[StructuredOutputsParams, ...]:
    """Return what has to be enforced of a tool's schema, of which a format may write less."""
    if chat_format is None or chat_format.arguments_style == "json":
        return (as_constraint(schema),)
    tag = {"format": json_of(schema, style=chat_format.arguments_style)}
    return as_constraint(schema), StructuredOutputsParams(structural_tag=json.dumps(tag))


def _enforced(
    name: str, schema: Any, use: ToolUse, chat_format: ChatFormat, accepted: AcceptedConstraints
) -> Any:
    """Return the schema that the grammar has, of objects."""
    field = f"tools.{name}.parameters"
    try:
        if Values(schema).types != {"object"}:
            raise InvalidRequestError(f"{field} must be of type object", field="tools")
        for constraint in as_constraints(schema, chat_format):
            accepted.check(constraint, field=field)
    except InvalidRequestError:
        if name in use.strict:
            raise
        return {"type": "object"}
    return schema


def parser_options(
    chat_format: ChatFormat,
    use: ToolUse | None,
    prompt_token_ids: Sequence[int],
    tokenizer: Tokenizer,
    template_variables: Mapping[str, object],
) -> ParserOptions:
    """Return how answers to a chat are read."""
    last = tokenizer.decode(prompt_token_ids[-_NUM_LAST_TOKENS:])
    start = _prompt_reasoning(chat_format, last)
    if start is ReasoningStart.FREE and (
        _is_turned_off(template_variables) or not _knows_reasoning(chat_format, tokenizer)
    ):
        start = ReasoningStart.CLOSED
    return ParserOptions(
        format=chat_format.name,
        reasoning=start,
        tools={} if use is None else use.parameters,
        is_parallel=use is None or use.is_parallel,
    )


def _prompt_reasoning(chat_format: ChatFormat, prompt_end: str) -> ReasoningStart:
    if chat_format.reasoning is None:
        return ReasoningStart.CLOSED
    begin, end = chat_format.reasoning
    prompt_end = prompt_end.rstrip()
    if prompt_end.endswith(begin):
        return ReasoningStart.OPEN
    return ReasoningStart.CLOSED if prompt_end.endswith(end) else ReasoningStart.FREE


def _knows_reasoning(chat_format: ChatFormat, tokenizer: Tokenizer) -> bool:
    """Return whether a marker of reasoning is in the model's template or one of its tokens. Others
    of its family may think; from this one a constraint would let pass what it never ends.
    """
    return any(
        marker in tokenizer.chat_template or tokenizer.backend.token_to_id(marker) is not None
        for marker in chat_format.reasoning or ()
    )


def _is_turned_off(template_variables: Mapping[str, object]) -> bool:
    """Return whether a request asks for no reasoning, whatever its template makes of that."""
    return (
        any(template_variables.get(name) is False for name in _SWITCHES)
        or template_variables.get("reasoning_effort") == "none"
    )
