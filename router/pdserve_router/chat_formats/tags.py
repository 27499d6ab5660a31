"""The structural tag of a chat format: xgrammar's JSON form of a grammar for text with calls."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve_common.structured.reasoning import texts
from pdserve_common.types.sampling_params import StructuredOutputsParams

Tag = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What calls an answer may have."""

    # The JSON schema of each tool's parameters, by name; of a named tool only that.
    tools: Mapping[str, Any]
    # Nothing follows the first one.
    stop_after_first: bool


def structural_tag(elements: Iterable[Tag]) -> Tag:
    """Return the whole tag of what comes one behind the other."""
    return {"type": "structural_tag", "format": sequence(elements)}


def sequence(elements: Iterable[Tag]) -> Tag:
    return {"type": "sequence", "elements": list(elements)}


def optional(elements: list[Tag]) -> Tag:
    return {"type": "optional", "content": sequence(elements)}


def tag(begin: str, content: Tag, end: str) -> Tag:
    """Return content between two texts."""
    return sequence([*texts(begin), content, *texts(end)])


def json_of(schema: Any, **more: str) -> Tag:
    """Return JSON that the schema of a tool's parameters lets pass."""
    return {"type": "json_schema", "json_schema": schema, **more}


def constraint_tag(params: StructuredOutputsParams) -> Tag:
    """Return what a client asks for, which is checked already, as part of a tag."""
    if params.json_object:
        return json_of({"type": "object"})
    if params.json_schema is not None:
        return json_of(json.loads(params.json_schema))
    if params.regex is not None:
        return {"type": "regex", "pattern": params.regex}
    if params.grammar is not None:
        return {"type": "grammar", "grammar": params.grammar}
    if params.structural_tag is not None:
        tag: Tag = json.loads(params.structural_tag)["format"]
        return tag
    return either(*({"type": "const_string", "value": text} for text in params.choice))


def calls(
    rules: CallRules, *, begin: str, behind_name: str, end: str, separator: str, **more: str
) -> Tag:
    """Return one call or more, and nothing else. What stands around all names and arguments is in
    it once: compiled, a grammar grows with the number of its texts times their length.
    """
    tools = (
        tag(f"{name}{behind_name}", json_of(schema, **more), "")
        for name, schema in rules.tools.items()
    )
    call = tag(begin, either(*tools), end)
    return {
        "type": "tags_with_separator",
        "tags": [{"type": "tag", "begin": "", "content": call, "end": ""}],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": rules.stop_after_first,
    }


def json_calls(rules: CallRules, *, begin: str, arguments: str, end: str, separator: str) -> Tag:
    """Return calls that are objects with a name and arguments, between two texts."""
    return calls(
        rules,
        begin=f'{begin}{{"name": "',
        behind_name=f'", "{arguments}": ',
        end=f"}}{end}",
        separator=separator,
    )


def either(*choices: Tag) -> Tag:
    return {"type": "or", "elements": list(choices)}


def by_id(call_tag: Tag, ids: Mapping[str, int]) -> Tag:
    """Return a tag of calls in which markers that are one token are named by it: no text of a
    grammar matches special tokens, and of others a model knows no other spelling. `ids` has them by
    their text.
    """
    match call_tag:
        case {"type": "sequence", "elements": elements}:
            return sequence(part for each in elements for part in _parts(each, ids))
        case {"type": "or", "elements": elements}:
            return call_tag | {"elements": [by_id(each, ids) for each in elements]}
        case {"type": "tags_with_separator", "tags": tags}:
            return call_tag | {"tags": [by_id(each, ids) for each in tags]}
        case {"type": "tag", "content": content}:
            return call_tag | {"content": by_id(content, ids)}
    return call_tag


def _parts(element: Tag, ids: Mapping[str, int]) -> list[Tag]:
    """Return an element of a sequence as those that stand for it."""
    if element["type"] == "const_string":
        return texts(element["value"], ids)
    return [by_id(element, ids)]
