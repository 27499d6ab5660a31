"""What the models of all bodies have in common."""

from typing import Annotated, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field

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


# JSON has one kind of number: 12.0 is a whole one. In lists of numbers it is not: they are long.
Int = Annotated[int, BeforeValidator(_whole)]

TEXT_SCHEMA = {"type": "string"}
