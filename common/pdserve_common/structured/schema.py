"""JSON schemas as far as xgrammar enforces them: JSON Schema 2020-12, xgrammar 0.2.8.

A schema is written anew from what is known to be enforced, by keyword and by the node that it
stands on; all else is refused with its JSON pointer. `docs/structured_outputs.md` lists both.
"""

import graphlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations

from pdserve_common.structured.containers import read_array, read_object
from pdserve_common.structured.node import Document, Json, Node, Written, any_of, kind, short, words
from pdserve_common.structured.patterns import JSON_CHARS, Ranges
from pdserve_common.structured.scalars import (
    integer,
    is_of,
    read_integer,
    read_number,
    read_string,
    read_values,
)

MAX_ONE_OF = 64
# Written, and no keyword to xgrammar: the schema names no type.
_IMPLIED = "implied"
_MAX_DISJOINT_DEPTH = 8

# They say nothing about a value, or hold what is read where it is referred to.
ANNOTATIONS = words(
    "title description default example examples deprecated readOnly writeOnly "
    "discriminator contentEncoding contentMediaType contentSchema $comment $schema $anchor "
    "$defs definitions"
)
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": words("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"),
    "number": words("minimum maximum exclusiveMinimum exclusiveMaximum"),
    "string": words("minLength maxLength pattern format"),
    "array": words("items prefixItems minItems maxItems uniqueItems"),
    "object": words(
        "properties required additionalProperties patternProperties propertyNames "
        "minProperties maxProperties"
    ),
}
_READERS: Mapping[str, Callable[[Node], Written]] = {
    "integer": read_integer,
    "number": read_number,
    "string": read_string,
    "array": read_array,
    "object": read_object,
}
ENFORCED = words("type enum const $ref allOf anyOf oneOf").union(*_KEYWORDS.values())
# Keywords of any version of JSON Schema, and of OpenAPI.
_NOT_ENFORCED = words(
    "not if then else dependentRequired dependentSchemas dependencies contains minContains "
    "maxContains unevaluatedProperties unevaluatedItems additionalItems $dynamicRef "
    "$dynamicAnchor $recursiveRef $recursiveAnchor $vocabulary $id id extends disallow "
    "divisibleBy nullable"
)


def read_schema(schema: Json, *, field: str, name_chars: Ranges = JSON_CHARS) -> Written | bool:
    """Return a schema as it is written for xgrammar. `schema` is parsed JSON of bounded size and
    depth; names that it does not list have only `name_chars`. Raises InvalidRequestError with JSON
    pointer and keyword.
    """
    document = Document(root=schema, field=field, read=_read, name_chars=name_chars)
    root = _read(Node(document, schema, ""))
    definitions: list[tuple[Node, Written]] = []
    while len(definitions) < len(document.numbers):
        pointer = list(document.numbers)[len(definitions)]
        node = Node(document, document.target(pointer), pointer)
        definitions.append((node, _read(node)))
    _check_recursion(definitions)
    written = [definition for _, definition in definitions]
    comparison = _Comparison(written)
    for node, options in document.one_ofs:
        comparison.check_disjoint(node, options)
    if written:
        root = root | {"$defs": {str(n): definition for n, definition in enumerate(written)}}
    return root or True


def _read(node: Node) -> Written:
    node.spend("schemas", 1, "")
    if isinstance(node.schema, bool):
        return {} if node.schema else node.refuse("", "is false, which no value satisfies")
    if not isinstance(node.schema, dict):
        node.refuse("", f"is {kind(node.schema)}, must be an object or a boolean")
    keywords = [key for key in node.schema if not _is_annotation(key, node)]
    for keyword in keywords:
        if keyword not in ENFORCED:
            known = keyword in _NOT_ENFORCED
            node.refuse(keyword, "is not enforced" if known else "is no known keyword")
    for keyword, read in _COMPOSITIONS.items():
        if keyword in keywords:
            _check_alone(node, keyword, keywords)
            return read(node)
    for keyword in ("const", "enum"):
        if keyword in keywords:
            _check_alone(node, keyword, [other for other in keywords if other != "type"])
            return read_values(node, keyword, _types(node))
    return _read_typed(node, keywords) if keywords else {}


def _is_annotation(key: str, node: Node) -> bool:
    return key in ANNOTATIONS or key.startswith("x-") or (key == "$id" and not node.pointer)


def _check_alone(node: Node, keyword: str, keywords: Collection[str]) -> None:
    for other in keywords:
        if other != keyword:
            node.refuse(other, f"is not enforced beside {keyword}")


def _types(node: Node, keywords: Collection[str] = ()) -> list[str]:
    """Of a node without a type: those that its keywords speak of, or all."""
    value = node.schema.get("type", implied_types(keywords) or [*_KEYWORDS])
    types = value if isinstance(value, list) else [value]
    if "multipleOf" in node.schema:
        types = ["integer" if type_ == "number" else type_ for type_ in types]
    for type_ in types:
        if not isinstance(type_, str) or type_ not in _KEYWORDS:
            node.refuse("type", f"is {short(type_)}, must be one of {', '.join(_KEYWORDS)}")
    if not types:
        node.refuse("type", "is an empty array")
    return [t for t in dict.fromkeys(types) if t != "integer" or "number" not in types]


def implied_types(keywords: Collection[str]) -> list[str]:
    """Return the types that keywords speak of."""
    return [type_ for type_, known in _KEYWORDS.items() if known.intersection(keywords)]


def _read_typed(node: Node, keywords: Sequence[str]) -> Written:
    types = _types(node, keywords)
    for keyword in keywords:
        if keyword != "type" and not any(keyword in _KEYWORDS[type_] for type_ in types):
            node.refuse(keyword, f"is not enforced for type {' or '.join(types)}")
    options = [_READERS[t](node) if t in _READERS else {"type": t} for t in types]
    if "type" not in node.schema:
        # Values of other types are valid as well, and never generated.
        options = [option | {_IMPLIED: True} for option in options]
    return any_of(options)


def _read_ref(node: Node) -> Written:
    pointer = node.pointer_of(node.schema["$ref"])
    node.document.target(pointer)
    numbers = node.document.numbers
    if pointer not in numbers:
        node.spend("different $ref", 1, "$ref")
        numbers[pointer] = len(numbers)
    return {"$ref": f"#/$defs/{numbers[pointer]}"}


def _options(node: Node, keyword: str) -> list[Written]:
    options = node.schema[keyword]
    if not isinstance(options, list) or not options:
        node.refuse(keyword, "must be an array of schemas")
    return [node.read(option, keyword, n) for n, option in enumerate(options)]


def _read_all_of(node: Node) -> Written:
    options = _options(node, "allOf")
    if len(options) > 1:
        node.refuse("allOf", f"has {len(options)} schemas, which is enforced with one only")
    return options[0]


def _read_any_of(node: Node) -> Written:
    return any_of(_options(node, "anyOf"))


def _read_one_of(node: Node) -> Written:
    options = _options(node, "oneOf")
    if len(options) > MAX_ONE_OF:
        node.refuse("oneOf", f"has {len(options)} schemas, at most {MAX_ONE_OF}")
    node.document.one_ofs.append((node, options))
    return any_of(options)


_COMPOSITIONS: Mapping[str, Callable[[Node], Written]] = {
    "$ref": _read_ref,
    "allOf": _read_all_of,
    "anyOf": _read_any_of,
    "oneOf": _read_one_of,
}


def _check_recursion(definitions: Sequence[tuple[Node, Written]]) -> None:
    """Refuse a definition that is only itself, or that has no finite value."""
    graph = {n: {*_own_refs(written)} for n, (_, written) in enumerate(definitions)}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        definitions[error.args[1][0]][0].refuse("", "refers to itself and to nothing else")
    finite: set[int] = set()
    is_done = False
    while not is_done:
        found = {
            n
            for n, (_, written) in enumerate(definitions)
            if n not in finite and _is_finite(written, finite)
        }
        finite |= found
        is_done = not found
    for n, (node, _) in enumerate(definitions):
        if n not in finite:
            node.refuse("", "has no finite value, as it always contains itself")


def _own_refs(written: Written) -> Iterator[int]:
    """The definitions that a value of this schema is directly a value of."""
    if "$ref" in written:
        yield _number(written)
    for option in written.get("anyOf", ()):
        yield from _own_refs(option)


def _number(written: Written) -> int:
    return int(written["$ref"].removeprefix("#/$defs/"))


def _is_finite(written: Written, finite: Collection[int]) -> bool:
    """Whether there is a finite value, if there is one of each definition in `finite`."""
    if "$ref" in written:
        return _number(written) in finite
    if "anyOf" in written:
        return any(_is_finite(option, finite) for option in written["anyOf"])
    needed: list[Written] = []
    if low := written.get("minItems"):
        needed = written.get("prefixItems", [])[:low]
        needed = needed if len(needed) == low else [*needed, written["items"]]
    elif "properties" in written:
        properties = written["properties"]
        needed = [properties[name] for name in written.get("required", ())]
        if low := written.get("minProperties"):
            # Others are not listed beside it, and those that are required count.
            found = sum(_is_finite(part, finite) for part in properties.values())
            return found >= low and all(_is_finite(part, finite) for part in needed)
    elif "minProperties" in written:
        needed = [*written.get("patternProperties", {"": written["additionalProperties"]}).values()]
    return all(_is_finite(part, finite) for part in needed)


class _Comparison:
    """Of the options of each oneOf."""

    def __init__(self, definitions: Sequence[Written]) -> None:
        self._definitions = definitions
        # Texts and types of the values of an enum, by its identity: there may be many, and many
        # schemas to compare with.
        self._listed: dict[int, tuple[frozenset[str], frozenset[str]]] = {}

    def check_disjoint(self, node: Node, options: Sequence[Written]) -> None:
        for (m, left), (n, right) in combinations(enumerate(options), 2):
            if not self._are_disjoint(node, left, right, _MAX_DISJOINT_DEPTH):
                node.refuse(
                    "oneOf",
                    f"is enforced only where its schemas exclude each other: {m} and {n} may both "
                    "hold, use anyOf",
                )

    def _are_disjoint(self, node: Node, left: Written, right: Written, depth: int) -> bool:
        """Whether no value is valid by both, as far as it shows: in types, in listed values, or in
        a property that both require.
        """
        node.spend("comparisons within oneOf", 1, "oneOf")
        if depth == 0:
            return False
        for one, other in ((left, right), (right, left)):
            if "$ref" in one:
                return self._are_disjoint(node, self._definitions[_number(one)], other, depth - 1)
            if "anyOf" in one:
                return all(self._are_disjoint(node, o, other, depth - 1) for o in one["anyOf"])
        if not left or not right:
            return False
        (left_texts, left_types), (right_texts, right_types) = self._of(left), self._of(right)
        if left_types.isdisjoint(right_types):
            return _IMPLIED not in left and _IMPLIED not in right
        if left_texts and right_texts:
            return left_texts.isdisjoint(right_texts)
        return any(
            self._are_disjoint(node, left["properties"][name], right["properties"][name], depth - 1)
            for name in left.get("required", ())
            if name in right.get("required", ())
        )

    def _of(self, written: Written) -> tuple[frozenset[str], frozenset[str]]:
        """Return the texts of listed values, none if they are not listed, and all types."""
        if "enum" not in written:
            type_ = written["type"]
            return frozenset(), frozenset((type_, "number") if type_ == "integer" else (type_,))
        if id(written) not in self._listed:
            values = written["enum"]
            texts = frozenset(json.dumps(_with_integers(value), sort_keys=True) for value in values)
            types = frozenset(t for t in _KEYWORDS if any(is_of(value, t) for value in values))
            self._listed[id(written)] = texts, types
        return self._listed[id(written)]


def _with_integers(value: Json) -> Json:
    """Equal values as equal texts."""
    if isinstance(value, dict):
        return {name: _with_integers(part) for name, part in value.items()}
    return [*map(_with_integers, value)] if isinstance(value, list) else integer(value)
