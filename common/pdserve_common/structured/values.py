"""Which values a JSON schema lets pass, for those who read values of it.

Schemas need not be checked. Each keyword that is enforced counts here as well, but `pattern` and
`format`, and `patternProperties` without their patterns; all others say nothing.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured.node import Document, Json, Node
from pdserve_common.structured.schema import implied_types

# "number" is one with a fraction, but in schemas.
ALL_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
# Schemas that are looked at: for all that is asked of one document, and for one value. Of what is
# behind them nothing is said, and what is not known to be wrong passes.
_MAX_CHECKS = 100_000
_MAX_CHECKS_OF_VALUE = 10_000
# So many checks of a value do not count for the document: an answer may have any number of values.
_FREE_CHECKS = 100
_MAX_DEPTH = 64
_TYPE_NAMES: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    str: "string",
    list: "array",
    dict: "object",
}
_OPTIONS = ("anyOf", "oneOf")
# Beside these the other keywords of a schema say nothing of types.
_SAY_TYPES = frozenset(("type", "enum", "const", "$ref", "allOf", *_OPTIONS))
_LISTS = ("type", "enum", "required", "prefixItems", "patternProperties")


def type_of(value: Json) -> str:
    """Return one of ALL_TYPES."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return _TYPE_NAMES[type(value)]


class Values:
    """The values of a schema, or of a schema within one."""

    def __init__(self, schema: Json, within: "Values | None" = None) -> None:
        """`within`: those of the document that its `$ref` are about, if it is no document."""
        self._schema = schema
        # By name; None: any that is not listed.
        self._properties: dict[str | None, Values | None] = {}
        self._document: Document
        self._targets: dict[str, Json]
        self._budget: _Budget
        if within is None:
            self._document = Document(root=schema, field="schema", read=_unread)
            self._targets, self._budget = {}, _Budget(_MAX_CHECKS)
        else:
            self._document, self._targets = within._document, within._targets
            self._budget = within._budget

    @functools.cached_property
    def types(self) -> frozenset[str]:
        """Those of ALL_TYPES that values may have."""
        return self._types_of(self._schema, {}, 0)

    @functools.cached_property
    def are_listed(self) -> bool:
        """Values are named one by one, or some are."""
        return any("enum" in each or "const" in each for each in self._parts())

    def property(self, name: str) -> "Values | None":
        """Return the values of an object's property; None if nothing is said of it."""
        key = name if name in self._listed_names else None
        if key not in self._properties:
            schema = self._property(self._schema, name, set(), 0)
            self._properties[key] = None if schema is None else Values(schema, self)
        return self._properties[key]

    def accepts(self, value: Json) -> bool:
        """Return whether a value is among them."""
        most = min(_MAX_CHECKS_OF_VALUE, _FREE_CHECKS + max(0, self._budget.num_left))
        budget = _Budget(most)
        is_valid = self._is_valid(self._schema, value, budget, 0)
        self._budget.num_left -= max(0, most - budget.num_left - _FREE_CHECKS)
        return is_valid

    # ---- by what schemas are made of

    @functools.cached_property
    def _listed_names(self) -> frozenset[str]:
        return frozenset(name for part in self._parts() for name in _mapping(part, "properties"))

    def _target(self, ref: Json) -> Json:
        if not isinstance(ref, str):
            return True
        # A pointer may be long, and what has it may be referred to often.
        if ref not in self._targets:
            self._targets[ref] = self._found(ref)
        return self._targets[ref]

    def _found(self, ref: str) -> Json:
        try:
            return self._document.target(Node(self._document, {}, "").pointer_of(ref))
        except InvalidRequestError:
            return True

    def _all_of(self, schema: Mapping[str, Any]) -> Iterator[Json]:
        """Return schemas that values have to suit as well."""
        if "$ref" in schema:
            yield self._target(schema["$ref"])
        yield from _list(schema, "allOf")

    def _parts(self) -> Iterator[Mapping[str, Any]]:
        """Return each schema that speaks of the value itself."""
        seen: set[int] = set()
        left = [self._schema]
        while left:
            schema = left.pop()
            if isinstance(schema, Mapping) and id(schema) not in seen:
                if self._budget.is_spent(schema):
                    return
                seen.add(id(schema))
                yield schema
                left += self._all_of(schema)
                left += (option for name in _OPTIONS for option in _list(schema, name))

    def _types_of(
        self,
        schema: Json,
        known: dict[tuple[int, bool], frozenset[str]],
        depth: int,
        *,
        is_implied: bool = True,
    ) -> frozenset[str]:
        """`is_implied`: without types, those that its keywords speak of, as is enforced."""
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return ALL_TYPES
        key = id(schema), is_implied
        if key in known:
            return known[key]
        if self._budget.is_spent(schema):
            return ALL_TYPES
        known[key] = ALL_TYPES  # of one within itself
        types, parts = _own_types(schema), [*self._all_of(schema)]
        if is_implied and schema.keys().isdisjoint(_SAY_TYPES):
            types = frozenset(implied_types(schema)) or ALL_TYPES
        is_implied = is_implied and len(parts) < 2
        for part in parts:
            types &= self._types_of(part, known, depth + 1, is_implied=is_implied)
        for name in _OPTIONS:
            if options := _list(schema, name):
                each = (
                    self._types_of(option, known, depth + 1, is_implied=is_implied)
                    for option in options
                )
                types &= frozenset().union(*each)
        known[key] = types
        return types

    def _property(self, schema: Json, name: str, seen: set[int], depth: int) -> Json | None:
        if not isinstance(schema, Mapping) or id(schema) in seen or depth > _MAX_DEPTH:
            return None
        if self._budget.is_spent(schema):
            return None
        seen.add(id(schema))
        found = [_own_property(schema, name)]
        found += [self._property(part, name, seen, depth + 1) for part in self._all_of(schema)]
        for keyword in _OPTIONS:
            options = [
                self._property(each, name, seen, depth + 1) for each in _list(schema, keyword)
            ]
            known = [each for each in options if each is not None]
            found.append({"anyOf": known} if known else None)
        said = [each for each in found if each is not None]
        return {"allOf": said} if len(said) > 1 else said[0] if said else None

    def _is_valid(self, schema: Json, value: Json, budget: "_Budget", depth: int) -> bool:
        if not isinstance(schema, Mapping):
            return schema is not False
        if budget.is_spent(schema) or depth > _MAX_DEPTH:
            return True

        def suits(part: Json, value: Json = value) -> bool:
            return self._is_valid(part, value, budget, depth + 1)

        return (
            _suits_itself(schema, value)
            and all(map(suits, self._all_of(schema)))
            and all(
                any(map(suits, options)) for name in _OPTIONS if (options := _list(schema, name))
            )
            and all(suits(part, each) for part, each in _within(schema, value))
        )


class _Budget:
    """How many schemas may be looked at: they may be many, or refer to each other in more ways than
    can be tried.
    """

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left

    def is_spent(self, schema: Mapping[str, Any]) -> bool:
        """Count a look at this schema: what it lists is looked through."""
        is_spent = self.num_left <= 0
        lists = (schema.get(keyword) for keyword in _LISTS)
        self.num_left -= 1 + sum(len(each) for each in lists if isinstance(each, list | dict))
        return is_spent


def _list(schema: Mapping[str, Any], keyword: str) -> Sequence[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else ()


def _mapping(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, Mapping) else {}


def _listed(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the values that a schema names, None if it does not."""
    return [schema["const"]] if "const" in schema else _list(schema, "enum") or None


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    types = schema.get("type")
    names = {each for each in (types if isinstance(types, list) else [types]) if _is_text(each)}
    found = ALL_TYPES & names or ALL_TYPES
    if "number" in found:
        found |= {"integer"}
    values = _listed(schema)
    return found if values is None else found & frozenset(map(type_of, values))


def _is_text(value: Json) -> bool:
    return isinstance(value, str)


def _own_property(schema: Mapping[str, Any], name: str) -> Json | None:
    properties = _mapping(schema, "properties")
    if name in properties:
        return properties[name]
    patterns = [*_mapping(schema, "patternProperties").values()]
    others = schema.get("additionalProperties", False)
    options = patterns if others is False else [*patterns, others]
    return {"anyOf": options} if options else None


def _suits_itself(schema: Mapping[str, Any], value: Json) -> bool:
    """Return whether a value suits the keywords that have no schemas within."""
    type_ = type_of(value)
    if type_ not in _own_types(schema):
        return False
    values = _listed(schema)
    if values is not None and not any(type_ == type_of(v) and value == v for v in values):
        return False
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _is_in_range(schema, value)
    noun = {"string": "Length", "array": "Items", "object": "Properties"}.get(type_)
    if noun is None:
        return True
    low, high = _number(schema, f"min{noun}"), _number(schema, f"max{noun}")
    return (low is None or len(value) >= low) and (high is None or len(value) <= high)


def _is_in_range(schema: Mapping[str, Any], value: float) -> bool:
    low, high = _number(schema, "minimum"), _number(schema, "maximum")
    above, below = _number(schema, "exclusiveMinimum"), _number(schema, "exclusiveMaximum")
    factor = _number(schema, "multipleOf")
    return (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
        and (below is None or value < below)
        and (not factor or _is_multiple(value, factor))
    )


def _is_multiple(value: float, factor: float) -> bool:
    try:
        return value % factor == 0
    except OverflowError:
        return True


def _number(schema: Mapping[str, Any], keyword: str) -> float | None:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _within(schema: Mapping[str, Any], value: Json) -> Iterator[tuple[Json, Json]]:
    """Return the parts of a value, each with a schema that it has to suit."""
    if isinstance(value, list):
        prefix = _list(schema, "prefixItems")
        yield from zip(prefix, value, strict=False)
        for item in value[len(prefix) :]:
            yield schema.get("items", True), item
    elif isinstance(value, dict):
        if any(isinstance(name, str) and name not in value for name in _list(schema, "required")):
            yield False, value
        properties = _mapping(schema, "properties")
        for name, part in value.items():
            yield schema.get("propertyNames", True), name
            if name in properties:
                yield properties[name], part
            elif "patternProperties" not in schema:
                yield schema.get("additionalProperties", True), part
            else:
                found = _own_property(schema, name)
                yield True if found is None else found, part


def _unread(node: Node) -> dict[str, Any]:
    raise AssertionError("values are looked at, not written")
