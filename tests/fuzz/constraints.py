"""Constraints of structured outputs that nearly are some: schemas, patterns, grammars, tags."""

import json
from collections.abc import Sequence
from typing import Any

from byte_mutations import mutated
from hypothesis import strategies as st

from pdserve.v1 import engine_core_pb2 as core_pb2
from support.schema_cases import CASES

SCHEMAS = [json.dumps(case.schema) for case in CASES]
PATTERNS = (
    *(r"\d{3}-\d{2,}", "(ab?|c){2,3}c*", "^[a-c]{2}[^x]$", "(a|bc)*?d", r"[^\n]+\n", "é{2,3}", "$"),
    *(r"\x41\u0042", r"(?P<year>\d{4})", "a{1,129}b", r"\.\*\[\]", "(foo$|bar$)", r"\w+\s\S*"),
)
GRAMMARS = (
    'root ::= "a" b*\nb ::= [0-9]',
    'root ::= ("a" | "1,"){2,5} [^"]{1,3} "\\""\n',
    'root ::= object # all\nobject ::= "{" (pair ("," pair)*)? "}"\npair ::= [a-z]+ ":" object',
    'root ::= "\\x41\\u0042\\U00000043" . root | ""',
)
TAGS = tuple(
    json.dumps({"type": "structural_tag", "format": format})
    for format in (
        {"type": "any_text", "excludes": ["</think>"]},
        {
            "type": "triggered_tags",
            "triggers": ["<call="],
            "tags": [
                {
                    "type": "tag",
                    "begin": "<call=f>",
                    "content": {"type": "json_schema", "json_schema": {"type": "object"}},
                    "end": "</call>",
                }
            ],
            "at_least_one": True,
        },
        {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "a"},
                {"type": "optional", "content": {"type": "regex", "pattern": "[ab]+"}},
                {"type": "repeat", "min": 1, "max": 3, "content": {"type": "token", "token": 5}},
                {"type": "or", "elements": [{"type": "grammar", "grammar": GRAMMARS[0]}]},
                {"type": "star", "content": {"type": "exclude_token", "tokens": [2, 7]}},
            ],
        },
        {
            "type": "json_schema",
            "style": "qwen_xml",
            "json_schema": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    )
)
# What means something in one of them.
WORDS = (
    *(b'"type"', b'"integer"', b'"$ref": "#"', b'"items"', b'"enum": [', b'"pattern": "(', b"null"),
    *(b"{1,128}", b"{0,}", b"(?=", b"[^", b"\\", b"\\d", b"::=", b"root", b'"', b"|", b"*", b"("),
    *(b"[" * 40, b"(" * 40, b"9" * 30, b"1e99", b"\xff", b"\x00", b'"format": {', b'"elements": ['),
)


def _near(texts: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts of the kind, half of them changed in some places."""
    whole = st.sampled_from(texts)
    changed = mutated(whole.map(str.encode), WORDS).map(lambda data: data.decode(errors="replace"))
    return st.one_of(whole, changed)


def constraints() -> st.SearchStrategy[dict[str, Any]]:
    """Fields of StructuredOutputsParams: one that is set, now and then two."""
    texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
    one = st.one_of(
        _near(SCHEMAS).map(lambda text: {"json_schema": text}),
        _near(PATTERNS).map(lambda text: {"regex": text}),
        _near(GRAMMARS).map(lambda text: {"grammar": text}),
        _near(TAGS).map(lambda text: {"structural_tag": text}),
        st.lists(texts, max_size=4).map(lambda choice: {"choice": tuple(choice)}),
        st.booleans().map(lambda is_set: {"json_object": is_set}),
    )
    two = st.tuples(one, one).map(lambda both: both[0] | both[1])
    return st.one_of(one, one, one, one, two)


def proto_constraints() -> st.SearchStrategy[core_pb2.StructuredOutputsParams]:
    """The same as messages, with the one that is set last."""
    return constraints().map(_as_proto)


def _as_proto(fields: dict[str, Any]) -> core_pb2.StructuredOutputsParams:
    choice = fields.pop("choice", None)
    message = core_pb2.StructuredOutputsParams(**fields)
    if choice is not None:
        message.choice.choices.extend(choice)
    return message


def http_constraints() -> st.SearchStrategy[dict[str, Any]]:
    """Fields of bodies that ask for one, by each of their names."""
    return st.one_of(constraints().map(_as_field), _near(SCHEMAS).map(_as_response_format))


def _as_field(fields: dict[str, Any]) -> dict[str, Any]:
    named = {{"json_schema": "json"}.get(name, name): value for name, value in fields.items()}
    if isinstance(named.get("choice"), tuple):
        named["choice"] = list(named["choice"])
    return {"structured_outputs": named}


def _as_response_format(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = text
    asked = {"name": "a", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": asked}}


def http_tools() -> st.SearchStrategy[dict[str, Any]]:
    """Fields of chats with tools whose parameters have nearly a schema."""
    named = {"type": "function", "function": {"name": "now"}}
    choices = st.sampled_from(["auto", "required", "none", named])
    return st.tuples(_near(SCHEMAS), choices).map(lambda pair: _as_tools(*pair))


def _as_tools(text: str, choice: object) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = {"type": text}
    function = {"name": "now", "parameters": schema, "strict": True}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
