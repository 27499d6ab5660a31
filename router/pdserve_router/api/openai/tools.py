"""Tools as OpenAI's clients offer them, and what they say of their use."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, WithJsonSchema

from pdserve_common.errors import InvalidRequestError
from pdserve_router.api.openai.fields import UnknownNames
from pdserve_router.api.openai.model import CONFIG, Items
from pdserve_router.requests.input.tool_use import ToolMode, ToolUse, as_tool, check_names

_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _NAMED},
            },
        },
    },
}
TOOL_CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED]}


class FunctionBody(BaseModel):
    """A function that a model may call."""

    model_config = CONFIG

    name: str
    """Letters, digits and _.:/-, at most 128."""
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments, an object."""
    strict: bool | None = None
    """Where calls are enforced: refuse a schema that cannot be; else arguments are any object."""


class ToolBody(BaseModel):
    """One tool."""

    model_config = CONFIG

    type: Literal["function"]
    """function."""
    function: FunctionBody
    """The function."""


Tools = Items[ToolBody]
ToolChoice = Annotated[Any, WithJsonSchema(TOOL_CHOICE_SCHEMA)]

_TOOL_FIELDS = ToolBody.model_fields.keys()
_FUNCTION_FIELDS = FunctionBody.model_fields.keys()


def check_tools(tools: object, unknown: UnknownNames) -> None:
    """Note unknown fields of tools as they came."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            unknown.add(tool.keys() - _TOOL_FIELDS, path="tools.")
            if isinstance(function := tool.get("function"), dict):
                unknown.add(function.keys() - _FUNCTION_FIELDS, path="tools.function.")


def tool_use(
    tools: Sequence[ToolBody] | None,
    choice: object,
    *,
    is_parallel: bool,
    name_field: str = "tools[{}].function.name",
) -> ToolUse | None:
    """Return what an answer may call; None: nothing. Raises InvalidRequestError naming the
    field, that of a name with a place for its number.
    """
    tools = tools or ()
    check_names([tool.function.name for tool in tools], field=name_field)
    by_name = {tool.function.name: tool for tool in tools}
    mode, names = _read_choice(choice, by_name)
    if not names or mode is ToolMode.NONE:
        return None
    return ToolUse(
        tools=tuple(_for_template(by_name[name].function) for name in names),
        mode=mode,
        is_parallel=is_parallel,
        strict=frozenset(name for name in names if by_name[name].function.strict),
    )


def _read_choice(choice: object, known: Mapping[str, ToolBody]) -> tuple[ToolMode, Sequence[str]]:
    """Return how tools may be called, and which."""
    if choice is None:
        return ToolMode.AUTO, tuple(known)
    if isinstance(choice, str):
        return _mode(choice, "tool_choice", known), tuple(known)
    if isinstance(choice, dict) and choice.get("type") == "function":
        return ToolMode.REQUIRED, (_known_name(choice, "tool_choice", known),)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools"), known)
    raise _invalid(
        "tool_choice",
        "must be none, auto, required, or an object of type function or allowed_tools",
    )


def _read_allowed(allowed: object, known: Mapping[str, ToolBody]) -> tuple[ToolMode, Sequence[str]]:
    field = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or not isinstance(tools := allowed.get("tools"), list):
        raise _invalid(field, "must have a mode and tools")
    mode = _mode(allowed.get("mode"), f"{field}.mode", known)
    names = [_known_name(tool, f"{field}.tools", known) for tool in tools]
    if not names:
        raise _invalid(f"{field}.tools", "is empty, needs at least 1")
    return mode, tuple(dict.fromkeys(names))


def _mode(value: object, field: str, known: Mapping[str, ToolBody]) -> ToolMode:
    try:
        mode = ToolMode(value)
    except ValueError:
        raise _invalid(field, f"is {str(value)[:64]!r}, must be none, auto or required") from None
    if mode is ToolMode.REQUIRED and not known:
        raise _invalid(field, "is 'required', tools is empty")
    return mode


def _known_name(tool: object, field: str, known: Mapping[str, ToolBody]) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in known:
        raise _invalid(field, f"names the function {str(name)[:128]!r}, which tools lacks")
    return name


def _for_template(function: FunctionBody) -> dict[str, Any]:
    return as_tool(
        name=function.name, description=function.description, parameters=function.parameters
    )


def _invalid(field: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} {problem}", field=field)
