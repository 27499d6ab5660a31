"""Structured outputs: each kind of constraint becomes one structural tag, xgrammar's JSON form.

Nothing is compiled here. What is refused is not known to be enforced; an answer that ends by itself
under what is accepted is valid.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import tags
from pdserve_common.structured.json_text import (
    MAX_BYTES,
    check_size,
    check_sizes,
    field_name,
    parse_json,
)
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams

MAX_CHOICES = 1000
# A structural tag may have the schemas of many tools.
MAX_TAG_BYTES = 256 * 1024
# What is compiled has at most so many bytes.
MAX_TEXT_BYTES = 1024 * 1024
_FIELD = "structured_outputs"
_MAX_BYTES = {
    "json_schema": MAX_BYTES,
    "regex": MAX_BYTES,
    "grammar": tags.MAX_GRAMMAR_BYTES,
    "structural_tag": MAX_TAG_BYTES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuralTag:
    """What the grammar compiler takes. Constraints that say the same in another order of keywords,
    with other names of definitions, annotations or spaces, have the same text.
    """

    # JSON in ASCII.
    text: str
    # SHA-256 of the text, in hexadecimal digits.
    digest: str

    @classmethod
    def of(cls, format: tags.Format) -> "StructuralTag":
        """Return the tag that is this format."""
        tag = {"type": "structural_tag", "format": format}
        text = json.dumps(tag, separators=(",", ":"))
        return cls(text=text, digest=hashlib.sha256(text.encode()).hexdigest())


def to_structural_tag(
    params: StructuredOutputsParams,
    *,
    field: str | None = None,
    before: Sequence[tags.Format] = (),
) -> StructuralTag:
    """Return the tag of a constraint. Raises InvalidRequestError for more or less than one, for one
    that is malformed or too large, and for what is not enforced; `field` is the constraint's path
    in what a client sent. `before` comes first, as it is.
    """
    field = check_bounds(params, field=field)
    format = _format(params, field)
    if before:
        format = {"type": "sequence", "elements": [*before, format]}
    tag = StructuralTag.of(format)
    if len(tag.text) > MAX_TEXT_BYTES:
        raise InvalidRequestError(
            f"{field} has {len(tag.text)} bytes as a structural tag, at most {MAX_TEXT_BYTES}",
            field=field_name(field),
        )
    return tag


def check_bounds(params: StructuredOutputsParams, *, field: str | None = None) -> str:
    """Return the path of a constraint, `field` or its own. Raises InvalidRequestError for more or
    less than one, and for one that is empty, too large or no Unicode. Costs next to nothing, so
    that it comes before all that hashes, sends or reads a constraint.
    """
    name = _check_one_constraint(params)
    field = field or f"{_FIELD}.{name}"
    if params.choice:
        _check_choices(params.choice, field)
    elif not params.json_object:
        check_size(getattr(params, name), field=field, limit=_MAX_BYTES[name])
    return field


def _check_choices(choices: tuple[str, ...], field: str) -> None:
    if len(choices) > MAX_CHOICES:
        raise InvalidRequestError(
            f"{field} has {len(choices)} texts, at most {MAX_CHOICES}", field=field_name(field)
        )
    if "" in choices:
        raise InvalidRequestError(f"{field} has an empty text", field=field_name(field))
    check_sizes(choices, field=field)


def _format(params: StructuredOutputsParams, field: str) -> tags.Format:
    if params.json_object:
        return tags.object_format()
    if params.json_schema is not None:
        return tags.schema_format(parse_json(params.json_schema, field=field), field=field)
    if params.regex is not None:
        return tags.regex_format(params.regex, field=field)
    if params.grammar is not None:
        return tags.grammar_format(params.grammar, field=field)
    if params.structural_tag is not None:
        return _tag_format(params.structural_tag, field)
    return tags.choice_format(params.choice)


def _tag_format(text: str, field: str) -> tags.Format:
    value = parse_json(text, field=field, limit=MAX_TAG_BYTES)
    if not isinstance(value, dict) or {*value} - {"type", "format"} or "format" not in value:
        raise InvalidRequestError(
            f"{field} must be an object of type and format", field=field_name(field)
        )
    if value.get("type", "structural_tag") != "structural_tag":
        raise InvalidRequestError(f"{field}: type must be structural_tag", field=field_name(field))
    return tags.read_format(value["format"], field=field)


def validate_structured_outputs(params: SamplingParams) -> None:
    """Raise InvalidRequestError unless exactly one constraint is set, of a size that may be looked
    at, and nothing that it cannot hold beside: an answer ends where its grammar does.
    `to_structural_tag` looks at the constraint itself.
    """
    assert params.structured_outputs is not None
    check_bounds(params.structured_outputs)
    for name, nothing in (("ignore_eos", False), ("min_tokens", 0), ("use_beam_search", False)):
        value = getattr(params, name)
        if value != nothing:
            raise InvalidRequestError(
                f"{name} is {value}, must be {nothing} with {_FIELD}", field=name
            )


def _check_one_constraint(params: StructuredOutputsParams) -> str:
    """Return its name. A oneof on the wire, which would keep the last one."""
    names = [field.name for field in fields(params) if getattr(params, field.name) != field.default]
    if len(names) != 1:
        every = ", ".join(field.name for field in fields(params))
        raise InvalidRequestError(
            f"{_FIELD} has {len(names)} constraints ({', '.join(names) or 'none'}), must be "
            f"exactly one of {every}",
            field=_FIELD,
        )
    return names[0]
