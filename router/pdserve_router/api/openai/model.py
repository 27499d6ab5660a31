"""What the models of all bodies have in common."""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import PydanticCustomError

from pdserve_common.errors import InvalidRequestError
from pdserve_common.limits.validation import MAX_REQUEST_ID_CHARS
from pdserve_router.api.openai.fields import WITHOUT_EFFECT

# Describing a million mistakes takes gigabytes, and seconds in which nobody else is served.
MAX_ERRORS = 100
TOO_MANY = "too_many_mistakes"
TOO_MANY_TEXT = "has {num_errors} wrong entries, too many to name one"

_Item = TypeVar("_Item")
# Wrong items are as many as fit into a body: the first one is enough.
Items = Annotated[list[_Item], Field(fail_fast=True)]

# What is unknown is counted apart. Docstrings of fields are their descriptions in /openapi.json.
CONFIG = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class RequestBody(BaseModel):
    """A body that asks for work; null means the default, as with OpenAI."""

    model_config = CONFIG
    # Fields that are not served: what each may be.
    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @field_validator("*", mode="wrap")
    @classmethod
    def _count_mistakes(cls, value: object, validate: ValidatorFunctionWrapHandler) -> object:
        """Make one of too many, so that the field can be named."""
        try:
            return validate(value)
        except ValidationError as error:
            if error.error_count() <= MAX_ERRORS:
                raise
            num_errors = {"num_errors": error.error_count()}
            raise PydanticCustomError(TOO_MANY, TOO_MANY_TEXT, num_errors) from error

    @classmethod
    @functools.cache
    def known_names(cls) -> frozenset[str]:
        """Return all that is taken, or refused by its name."""
        return frozenset((*cls.model_fields, *cls.refused, *WITHOUT_EFFECT))


def session_of(user: object) -> str:
    """Return what a field `user` names; "" if that is no session, as clients may have anything
    there.
    """
    return user if isinstance(user, str) and len(user) <= MAX_REQUEST_ID_CHARS else ""


def prompt_input(prompt: object, *, field: str) -> dict[str, Any]:
    """Return a prompt as fields of a ClientRequest. Raises InvalidRequestError."""
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, list) and all(type(item) is int for item in prompt):
        return {"token_ids": tuple(prompt)}
    raise InvalidRequestError(
        f"{field} must be a string, a list of token ids, or a list of these", field=field
    )


def prompt_list(prompts: object) -> list[Any]:
    """Return each prompt of a field that may have one or several."""
    is_list = isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list)
    return prompts if is_list else [prompts]  # type: ignore[return-value]


# JSON has one kind of number: 12.0 is a whole one. In lists of numbers it is not: they are long.
Int = Annotated[int, BeforeValidator(_whole)]

TEXT_SCHEMA = {"type": "string"}
_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
# The schema of `prompt_list`.
PROMPTS_SCHEMA = {
    "anyOf": [
        TEXT_SCHEMA,
        _TOKEN_IDS_SCHEMA,
        {"type": "array", "items": {"anyOf": [TEXT_SCHEMA, _TOKEN_IDS_SCHEMA]}, "minItems": 1},
    ]
}
