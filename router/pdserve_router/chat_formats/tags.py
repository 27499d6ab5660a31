"""The structural tag of a chat format: xgrammar's JSON form of a grammar for text with calls."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve_common.engine_types import StructuredOutputsParams

Tag = dict[str, Any]
# What an answer may have between reasoning and what follows.
_LINE_BREAKS = {"type": "regex", "pattern": r"\n{0,2}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What calls an answer may have."""

    # The JSON schema of each tool's parameters, by name; of a named tool only that.
    tools: Mapping[str, Any]
    # Without one an answer is not complete.
    at_least_one: bool
    # Nothing follows the first one.
    stop_after_first: bool


def structural_tag(elements: Iterable[Tag]) -> Tag:
    """Return the whole tag of what comes one behind the other."""
    return {
        "type": "structural_tag",
        "format": {"type": "sequence", "elements": list(elements)},
    }


def reasoning_tag(begin: str, end: str) -> list[Tag]:
    """Return free text up to `end`."""
    return [tag(begin, {"type": "any_text"}, end), _LINE_BREAKS]


def optional(elements: list[Tag]) -> Tag:
    return {"type": "optional", "content": {"type": "sequence", "elements": elements}}


def tag(begin: str, content: Tag, end: str) -> Tag:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


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


def triggered(trigger: str, tags: Iterable[Tag], rules: CallRules) -> Tag:
    """Return text in which these tags come behind their trigger, with which they begin."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": list(tags),
        "at_least_one": rules.at_least_one,
        "stop_after_first": rules.stop_after_first,
    }


def separated(tags: Iterable[Tag], separator: str, rules: CallRules) -> Tag:
    """Return one of these tags or more, and nothing else."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": rules.stop_after_first,
    }


def either(*choices: Tag) -> Tag:
    return {"type": "or", "elements": list(choices)}


def listed(begin: str, tags: Iterable[Tag], separator: str, end: str, rules: CallRules) -> Tag:
    """Return text that ends in a list of these tags, if there is one."""
    return {
        "type": "triggered_tags",
        "triggers": [begin],
        "tags": [tag(begin, separated(tags, separator, rules), end)],
        "at_least_one": rules.at_least_one,
        "stop_after_first": True,
    }


def json_call_tags(rules: CallRules, *, begin: str, arguments: str, end: str) -> list[Tag]:
    """Return for each tool an object with its name and arguments, between two texts."""
    return [
        tag(f'{begin}{{"name": {json.dumps(name)}, "{arguments}": ', json_of(schema), f"}}{end}")
        for name, schema in rules.tools.items()
    ]
