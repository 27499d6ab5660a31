"""From a body's bytes to its model; every refusal names the field."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from pdserve_common.errors import InvalidRequestError
from pdserve_router.api.openai.fields import UnknownNames, check_refused
from pdserve_router.api.openai.messages import check_messages
from pdserve_router.api.openai.model import MAX_ERRORS, TOO_MANY, RequestBody
from pdserve_router.api.openai.structured import ResponseFormatBody
from pdserve_router.api.openai.tools import check_tools
from pdserve_router.api.openai.types import (
    ChatCompletionBody,
    GenerationBody,
    RepetitionDetectionBody,
    StreamOptions,
)
from pdserve_router.api.responses.items import check_input
from pdserve_router.api.responses.types import (
    ReasoningBody,
    ResponsesBody,
    TextBody,
    check_function_tools,
)
from pdserve_router.requests.input.request_limits import MAX_ENTRIES, check_num_entries

# More than there are.
_MAX_FIELDS = 100

Body = TypeVar("Body", bound=GenerationBody)


def parse_body(cls: type[Body], raw: bytes) -> tuple[Body, tuple[str, ...]]:
    """Parse a request's JSON; return also the names of unknown fields, a few of them. Raises
    InvalidRequestError naming the field.
    """
    values = json_object(raw)
    for name in MAX_ENTRIES.keys() & values.keys():
        check_num_entries(name, values[name], MAX_ENTRIES[name])
    unknown = check_names(cls, values)
    for name in _NESTED.keys() & values.keys():
        if isinstance(values[name], dict):
            unknown.add(values[name].keys() - _NESTED[name], path=f"{name}.")
    if cls is ChatCompletionBody:
        check_messages(values.get("messages"), unknown)
        check_tools(values.get("tools"), unknown)
    elif cls is ResponsesBody:
        check_input(values.get("input"), unknown)
        check_function_tools(values.get("tools"), unknown)
    body = validate(cls, values)
    body.check_stream()
    return body, unknown.names()


def json_object(raw: bytes) -> dict[str, Any]:
    """Return a body that is a JSON object. Raises InvalidRequestError."""
    try:
        values = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"body is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidRequestError("body must be a JSON object")
    if len(values) > _MAX_FIELDS:
        raise InvalidRequestError(f"body has {len(values)} fields, at most {_MAX_FIELDS}")
    return values


_Model = TypeVar("_Model", bound=BaseModel)


def validate(cls: type[_Model], values: Mapping[str, object]) -> _Model:
    """Return an object of these values. Raises InvalidRequestError naming the field."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise _invalid(error) from error


def check_names(cls: type[RequestBody], values: Mapping[str, object]) -> UnknownNames:
    """Return the names of unknown fields. Raises InvalidRequestError for what is not served."""
    check_refused(values, cls.refused)
    unknown = UnknownNames()
    unknown.add(values.keys() - cls.known_names())
    return unknown


_NESTED = {
    "stream_options": StreamOptions.model_fields.keys(),
    "repetition_detection": RepetitionDetectionBody.model_fields.keys(),
    "response_format": ResponseFormatBody.model_fields.keys(),
    "reasoning": ReasoningBody.model_fields.keys(),
    "text": TextBody.model_fields.keys(),
}
_BRANCHES = ("str", "list[str]", "bool", "literal['never']")


def _invalid(error: ValidationError) -> InvalidRequestError:
    if error.error_count() > MAX_ERRORS:
        return InvalidRequestError(
            f"body has {error.error_count()} wrong fields, too many to name one"
        )
    return _first(error.errors(include_url=False, include_input=False)[0])


def _first(details: ErrorDetails) -> InvalidRequestError:
    path = ""
    for part in details["loc"]:
        # Branches of a union come as the name of a type.
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _BRANCHES:
            path += f".{part}" if path else part
    path = path[:256]
    if details["type"] == "missing":
        message = f"{path} is missing"
    elif details["type"] == TOO_MANY:
        message = f"{path} {details['msg']}"
    else:
        message = f"{path}: {details['msg'][:1].lower()}{details['msg'][1:]}"
    return InvalidRequestError(message, field=path)
