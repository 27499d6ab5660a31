"""Constraints on answers as clients of OpenAI and vLLM ask for them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured.json_text import field_name
from pdserve_common.types.sampling_params import StructuredOutputsParams
from pdserve_router.api.openai.messages import part_text
from pdserve_router.api.openai.model import CONFIG, TEXT_SCHEMA, Items
from pdserve_router.requests.input.request_limits import MAX_CONTENT_PARTS, check_num_entries

_OBJECT = {"type": "object"}
JsonSchema = Annotated[Any, WithJsonSchema({"anyOf": [_OBJECT, TEXT_SCHEMA]})]


class JsonSchemaBody(BaseModel):
    """The schema of a response_format."""

    model_config = CONFIG

    name: str | None = None
    """Without effect."""
    description: str | None = None
    """Without effect."""
    schema_: dict[str, Any] = Field(alias="schema")
    """The schema itself."""
    strict: bool | None = None
    """Without effect: schemas are enforced, whatever it is."""


class StructureBody(BaseModel):
    """A part of an answer that a schema describes."""

    model_config = CONFIG

    begin: str
    """The text before it, which starts with a trigger."""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """The JSON schema of what follows; any JSON without one."""
    end: str
    """The text behind it."""


class ResponseFormatBody(BaseModel):
    """What an answer has to be, as OpenAI and vLLM have it."""

    model_config = CONFIG

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    """text (anything), json_object (any JSON object), json_schema or structural_tag."""
    json_schema: JsonSchemaBody | None = None
    """For the type json_schema."""
    format: dict[str, Any] | None = None
    """For the type structural_tag: text with tags."""
    structures: Items[StructureBody] | None = None
    """For the type structural_tag, its older form: what may stand in free text."""
    triggers: Items[str] | None = None
    """For structures: texts behind which one of them has to follow."""


class StructuredOutputsBody(BaseModel):
    """What an answer has to be, as vLLM has it: one of these, nothing else beside it."""

    # An option that is not known might change what is enforced.
    model_config = ConfigDict(**{**CONFIG, "extra": "forbid"})

    json_: JsonSchema = Field(None, alias="json")
    """JSON that is valid by this schema, an object or its text."""
    json_object: bool | None = None
    """true: any JSON object."""
    regex: str | None = None
    """A text that this pattern matches from end to end."""
    choice: Items[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A text of this grammar, in GBNF."""
    structural_tag: JsonSchema = None
    """Text with tags, an object or its text."""
    disable_fallback: bool | None = None
    """Without effect: there is nothing to fall back to."""
    disable_any_whitespace: Literal[False] | None = None
    """Only false: JSON may have a few blanks."""
    disable_additional_properties: Literal[False] | None = None
    """Only false: the schema says it."""
    whitespace_pattern: None = None
    """Only null."""


class PredictionBody(BaseModel):
    """What a client thinks the answer will be."""

    model_config = CONFIG

    type: Literal["content"]
    """content."""
    content: str | Items[dict[str, Any]]
    """A text, or a list of parts of text."""

    @property
    def text(self) -> str:
        """Return the text of all parts. Raises InvalidRequestError for other parts."""
        field = "prediction.content"
        if isinstance(self.content, str):
            return self.content
        check_num_entries(field, self.content, MAX_CONTENT_PARTS)
        return "".join(part_text(part, field) for part in self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What an answer has to be, and the field that says so."""

    field: str
    params: StructuredOutputsParams


def constraint_of(
    response_format: ResponseFormatBody | None,
    structured_outputs: StructuredOutputsBody | None,
    guided: Mapping[str, Any],
) -> Constraint | None:
    """Return the constraint that a body sets; None: it sets none. `guided` has the older names of
    structured_outputs' fields, by what follows guided_. Raises InvalidRequestError for several.
    """
    found = [
        *_of_response_format(response_format),
        *_of_values("structured_outputs.", _values_of(structured_outputs)),
        *_of_values("guided_", guided),
    ]
    return _only(found)


def text_constraint(
    kind: str,
    schema: dict[str, Any] | None,
    structured_outputs: StructuredOutputsBody | None,
) -> Constraint | None:
    """The same of a response, whose text.format has this type and schema."""
    field = "text.format"
    found = [*_of_values("structured_outputs.", _values_of(structured_outputs))]
    if kind == "json_object":
        found.append(Constraint(field=field, params=StructuredOutputsParams(json_object=True)))
    elif kind == "json_schema":
        if schema is None:
            raise _missing(f"{field}.schema")
        found += _of_values(f"{field}.", {"schema": schema})
    return _only(found)


def _only(found: Sequence[Constraint]) -> Constraint | None:
    if len(found) > 1:
        first, second, *_ = (each.field for each in found)
        raise InvalidRequestError(
            f"{first} and {second} are set, at most one of them can be", field=field_name(first)
        )
    return found[0] if found else None


def _of_response_format(body: ResponseFormatBody | None) -> list[Constraint]:
    field = "response_format"
    if body is None or body.type == "text":
        return []
    if body.type == "json_object":
        params = StructuredOutputsParams(json_object=True)
        return [Constraint(field=field, params=params)]
    if body.type == "structural_tag":
        tag = {"type": "structural_tag", "format": _tag_format(body)}
        params = StructuredOutputsParams(structural_tag=_json_text(field, tag))
        return [Constraint(field=field, params=params)]
    if body.json_schema is None:
        raise _missing(f"{field}.json_schema")
    return _of_values(f"{field}.json_schema.", {"schema": body.json_schema.schema_})


def _tag_format(body: ResponseFormatBody) -> dict[str, Any]:
    if body.format is not None:
        return body.format
    for name in ("structures", "triggers"):
        if getattr(body, name) is None:
            raise _missing(f"response_format.{name if body.structures else 'format'}")
    return {
        "type": "triggered_tags",
        "triggers": body.triggers,
        "tags": [_tag_of(each) for each in body.structures or ()],
    }


def _tag_of(body: StructureBody) -> dict[str, Any]:
    schema = True if body.schema_ is None else body.schema_
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": body.begin, "content": content, "end": body.end}


def _missing(field: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} is missing", field=field)


def _values_of(body: StructuredOutputsBody | None) -> Mapping[str, Any]:
    if body is None:
        return {}
    return {
        "json": body.json_,
        "json_object": body.json_object or None,
        "regex": body.regex,
        "choice": body.choice,
        "grammar": body.grammar,
        "structural_tag": body.structural_tag,
    }


def _of_values(path: str, values: Mapping[str, Any]) -> list[Constraint]:
    return [
        Constraint(field=path + name, params=_params(path + name, name, value))
        for name, value in values.items()
        if value is not None
    ]


def _params(field: str, name: str, value: Any) -> StructuredOutputsParams:
    if name in ("json", "schema"):
        return StructuredOutputsParams(json_schema=_json_text(field, value))
    if name == "structural_tag":
        return StructuredOutputsParams(structural_tag=_json_text(field, value))
    if name == "choice":
        if not value:
            raise InvalidRequestError(f"{field} is empty, needs at least 1", field=field)
        value = tuple(value)
    return StructuredOutputsParams(**{name: value})


def _json_text(field: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{field} must be an object, or its text", field=field)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise InvalidRequestError(f"{field} has a number that is too large", field=field) from error
