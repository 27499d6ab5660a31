"""Which values a JSON schema lets pass, for those who read values of it.

Schemas need not be checked. Each keyword that is enforced counts here as well, but `pattern` and
`format`; all others say nothing.

Of types all is known, in a time that grows with the schema. What else is asked is bounded: beyond
that, a name has any of the schemas that name it, and what is not known to be wrong passes.
"""

import dataclasses
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias, TypeVar

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import patterns
from pdserve_common.structured.node import Document, Json, Node
from pdserve_common.structured.schema import implied_types

# "number" is one with a fraction, but in schemas.
ALL_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
# Of all that is asked of one document: schemas that are looked at for names, and for values, and
# listed values that are known.
_MAX_LOOKS = 100_000
_MAX_CHECKS = 100_000
_MAX_LISTED = 10_000
# Listed numbers with one hash, each of which is compared with all others.
_MAX_SAME_HASH = 16
# The router's event loop waits for the checks of a value, some 5 us for each.
_MAX_CHECKS_OF_VALUE = 1000
# Of a value, besides one for each part of it, that do not count for the document: an answer may
# have any number of values.
_FREE_CHECKS = 100
# Digits of numbers, or names, that are compared, which cost as much as a check.
_SIZE_OF_CHECK = 64
_MAX_DEPTH = 64
# Of a name that is matched with patterns, and of a match.
_MAX_NAME_CHARS = 256
_MAX_MATCH_STEPS = 10_000
# And of all matches of a document, some 30 ms.
_MAX_STEPS = 25_000
# Python makes no integer of more.
_MAX_DIGITS = 4300
_TYPE_NAMES: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    str: "string",
    list: "array",
    dict: "object",
}
_OPTIONS = ("anyOf", "oneOf")
# These speak of the parts of an object.
_SAY_PARTS = frozenset(("properties", "patternProperties", "additionalProperties", "propertyNames"))
# Beside these the other keywords of a schema say nothing of types.
_SAY_TYPES = frozenset(("type", "enum", "const", "$ref", "allOf", *_OPTIONS))
# Which name of an object is not known: one that is not listed.
_ANY_OTHER = None
Number: TypeAlias = int | Decimal
Part = TypeVar("Part")


def type_of(value: Json) -> str:
    """Return one of ALL_TYPES. A number with a fraction is a float or a Decimal."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    if isinstance(value, Decimal):
        is_whole = value.is_finite() and value == value.to_integral_value()
        return "integer" if is_whole else "number"
    return _TYPE_NAMES[type(value)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Facts:
    """What a schema itself says, to be asked often."""

    types: frozenset[str] = ALL_TYPES
    # Listed values with their types, and those that have parts, as the schema has them; None: none
    # are listed.
    scalars: frozenset[tuple[str, Any]] | None = None
    containers: Sequence[Json] = ()
    # More are listed, which are not known.
    has_others: bool = False
    required: frozenset[str] = frozenset()

    @classmethod
    def of(cls, schema: Mapping[str, Any], max_listed: int) -> "_Facts":
        """`max_listed`: so many of the listed values are looked at one by one."""
        types = schema.get("type")
        names = set(filter(_is_text, types if isinstance(types, list) else [types]))
        found = ALL_TYPES & names or ALL_TYPES
        if "number" in found:
            found |= {"integer"}
        required = frozenset(filter(_is_text, _list(schema, "required")))
        listed = _listed(schema)
        if not listed:
            return cls(types=found, required=required)
        if _share_hashes(listed[:max_listed]):
            max_listed = 0
        known, others = listed[:max_listed], listed[max_listed:]
        types_of_known = [*map(type_of, known)]
        has_parts = [type_ in ("array", "object") for type_ in types_of_known]
        return cls(
            types=found & {*types_of_known, *_possible_types(others)},
            scalars=frozenset(
                (type_, _exact(value))
                for type_, value, is_container in zip(types_of_known, known, has_parts, strict=True)
                if not is_container
            ),
            containers=[*itertools.compress(known, has_parts)],
            has_others=bool(others),
            required=required,
        )


_NO_FACTS = _Facts()


@dataclasses.dataclass(slots=True)
class _Known:
    """What is known of a document. Schemas are known by their identity."""

    document: Document
    num_looks: int = _MAX_LOOKS
    num_steps: int = _MAX_STEPS
    num_checks: int = _MAX_CHECKS
    num_listed: int = _MAX_LISTED
    targets: dict[str, Json] = dataclasses.field(default_factory=dict)
    facts: dict[int, _Facts] = dataclasses.field(default_factory=dict)
    types: dict[tuple[int, bool], frozenset[str]] = dataclasses.field(default_factory=dict)
    are_listed: dict[int, bool] = dataclasses.field(default_factory=dict)
    trees: dict[str, patterns.Node | None] = dataclasses.field(default_factory=dict)
    # Schemas that are made here: no other may have the identity of one.
    made: list[Json] = dataclasses.field(default_factory=list)
    # What any of an object's patterns says, by the object that has them.
    any_pattern: dict[int, Json] = dataclasses.field(default_factory=dict)


class Values:
    """The values of a schema, or of a schema within one."""

    def __init__(self, schema: Json, within: "Values | None" = None) -> None:
        """`within`: those of the document that its `$ref` are about, if it is no document."""
        self._schema = schema
        # By name; _ANY_OTHER: any that is not listed, nor matched with patterns.
        self._properties: dict[str | None, Values | None] = {}
        self._known: _Known
        if within is None:
            self._known = _Known(Document(root=schema, field="schema", read=_unread))
        else:
            self._known = within._known

    @functools.cached_property
    def types(self) -> frozenset[str]:
        """Those of ALL_TYPES that values may have."""
        return self._types_of(self._schema, 0)

    @functools.cached_property
    def are_listed(self) -> bool:
        """Values are named one by one, or some are."""
        return self._is_listed(self._schema, 0)

    def property(self, name: str) -> "Values | None":
        """Return the values of an object's property; None if nothing is said of it."""
        is_spent = self._known.num_looks <= 0
        is_matched = self._has_patterns and len(name) <= _MAX_NAME_CHARS and not is_spent
        key = name if name in self._named or is_matched else _ANY_OTHER
        if key not in self._properties:
            if is_spent and key is not _ANY_OTHER:
                schema = _any_of(self._named[key])
            else:
                schema = self._property(self._schema, key, set(), 0)
            self._properties[key] = None if schema is None else self._made(schema)
        return self._properties[key]

    def first_of(self, values: Sequence[Json]) -> int | None:
        """Return the index of the first of some values that is among these; None if none is."""
        num_parts = max((_num_parts(v, _MAX_CHECKS_OF_VALUE) for v in values), default=0)
        free = min(_FREE_CHECKS + num_parts, _MAX_CHECKS_OF_VALUE)
        most = min(_MAX_CHECKS_OF_VALUE, free + max(0, self._known.num_checks))
        budget = _Budget(most)
        suits = (self._is_valid(self._schema, value, budget, 0) for value in values)
        found = next((index for index, is_valid in enumerate(suits) if is_valid), None)
        self._known.num_checks -= max(0, most - budget.num_left - free)
        return found

    def _made(self, schema: Json) -> "Values":
        self._known.made.append(schema)
        return Values(schema, self)

    # ---- by what schemas are made of

    @functools.cached_property
    def _named(self) -> Mapping[str, list[Json]]:
        """What is said of each name of an object that is listed."""
        named: dict[str, list[Json]] = {}
        for part in self._parts:
            for name, schema in _mapping(part, "properties").items():
                named.setdefault(name, []).append(schema)
        return named

    @functools.cached_property
    def _has_patterns(self) -> bool:
        return any("patternProperties" in part for part in self._parts)

    @functools.cached_property
    def _parts(self) -> Sequence[Mapping[str, Any]]:
        """Each schema that speaks of the value itself."""
        parts: dict[int, Mapping[str, Any]] = {}
        left = [self._schema]
        while left:
            schema = left.pop()
            if isinstance(schema, Mapping) and id(schema) not in parts:
                parts[id(schema)] = schema
                left += self._all_of(schema)
                left += (option for name in _OPTIONS for option in _list(schema, name))
        return [*parts.values()]

    def _facts(self, schema: Mapping[str, Any]) -> _Facts:
        if schema.keys().isdisjoint(("type", "enum", "const", "required")):
            return _NO_FACTS
        if id(schema) not in self._known.facts:
            self._known.facts[id(schema)] = _Facts.of(schema, self._known.num_listed)
            num_left = self._known.num_listed - len(_listed(schema))
            self._known.num_listed = max(0, num_left)
        return self._known.facts[id(schema)]

    def _target(self, ref: Json) -> Json:
        if not isinstance(ref, str):
            return True
        # A pointer may be long, and what has it may be referred to often.
        targets = self._known.targets
        if ref not in targets:
            targets[ref] = self._found(ref)
        return targets[ref]

    def _found(self, ref: str) -> Json:
        document = self._known.document
        try:
            return document.target(Node(document, {}, "").pointer_of(ref))
        except InvalidRequestError:
            return True

    def _all_of(self, schema: Mapping[str, Any]) -> Iterator[Json]:
        """Return schemas that values have to suit as well."""
        if "$ref" in schema:
            yield self._target(schema["$ref"])
        yield from _list(schema, "allOf")

    def _types_of(self, schema: Json, depth: int, *, is_implied: bool = True) -> frozenset[str]:
        """`is_implied`: without types, those that its keywords speak of, as is enforced."""
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return ALL_TYPES
        known, key = self._known.types, (id(schema), is_implied)
        if key in known:
            return known[key]
        known[key] = ALL_TYPES  # of one within itself
        types, parts = self._facts(schema).types, [*self._all_of(schema)]
        if is_implied and schema.keys().isdisjoint(_SAY_TYPES):
            types = frozenset(implied_types(schema)) or ALL_TYPES
        is_implied = is_implied and len(parts) < 2
        for part in parts:
            types &= self._types_of(part, depth + 1, is_implied=is_implied)
        for name in _OPTIONS:
            if options := _list(schema, name):
                each = (
                    self._types_of(option, depth + 1, is_implied=is_implied) for option in options
                )
                types &= frozenset().union(*each)
        known[key] = types
        return types

    def _is_listed(self, schema: Json, depth: int) -> bool:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return False
        known = self._known.are_listed
        if id(schema) not in known:
            known[id(schema)] = False  # of one within itself
            parts = [*self._all_of(schema), *(o for name in _OPTIONS for o in _list(schema, name))]
            known[id(schema)] = (
                "enum" in schema
                or "const" in schema
                or any(self._is_listed(part, depth + 1) for part in parts)
            )
        return known[id(schema)]

    def _property(self, schema: Json, name: str | None, seen: set[int], depth: int) -> Json | None:
        self._known.num_looks -= 1
        if not isinstance(schema, Mapping) or id(schema) in seen or depth > _MAX_DEPTH:
            return None
        seen.add(id(schema))
        found = [self._own_property(schema, name)]
        found += [self._property(part, name, seen, depth + 1) for part in self._all_of(schema)]
        for keyword in _OPTIONS:
            options = [
                self._property(each, name, seen, depth + 1) for each in _list(schema, keyword)
            ]
            found.append(_any_of([each for each in options if each is not None]))
        return _all_of([each for each in found if each is not None])

    def _own_property(
        self, schema: Mapping[str, Any], name: str | None, others: Json = False
    ) -> Json | None:
        """`others`: what those are that nothing is said of."""
        properties = _mapping(schema, "properties")
        said = [] if name is None or name not in properties else [properties[name]]
        may_be = []
        by_pattern = _mapping(schema, "patternProperties")
        if by_pattern and self._known.num_steps <= 0:
            # Whichever they match: all that any of them says.
            may_be = [self._any_pattern(by_pattern)]
            by_pattern = {}
        for pattern, part in by_pattern.items():
            is_match = self._is_match(pattern, name)
            if is_match is None:
                may_be.append(part)
            elif is_match:
                said.append(part)
        if said:
            return _all_of(said)
        others = schema.get("additionalProperties", others)
        return _any_of(may_be if others is False else [*may_be, others])

    def _any_pattern(self, by_pattern: Mapping[str, Json]) -> Json:
        key = id(by_pattern)
        if key not in self._known.any_pattern:
            self._known.any_pattern[key] = {"anyOf": list(by_pattern.values())}
        return self._known.any_pattern[key]

    def _is_match(self, pattern: str, name: str | None) -> bool | None:
        """Return whether a pattern is found in a name; None: who knows."""
        self._known.num_steps -= 1
        if name is None or len(name) > _MAX_NAME_CHARS or self._known.num_steps <= 0:
            return None
        known = self._known.trees
        if pattern not in known:
            self._known.num_steps -= len(pattern)
            try:
                known[pattern] = patterns.found_in(patterns.parse(pattern))
            except patterns.PatternError:
                known[pattern] = None
        tree = known[pattern]
        if tree is None:
            return None
        is_match, num_steps = patterns.match(tree, name, max_steps=_MAX_MATCH_STEPS)
        self._known.num_steps -= num_steps
        return is_match

    def _is_valid(self, schema: Json, value: Json, budget: "_Budget", depth: int) -> bool:
        is_spent = budget.is_spent()
        if not isinstance(schema, Mapping):
            return schema is not False
        if is_spent or depth > _MAX_DEPTH:
            return True

        def suits(part: Json, value: Json = value) -> bool:
            return self._is_valid(part, value, budget, depth + 1)

        def suits_any(options: Sequence[Json]) -> bool:
            return any(map(suits, budget.while_it_lasts(options))) or not budget.lasts()

        return (
            _suits_itself(schema, self._facts(schema), value, budget)
            and all(map(suits, budget.while_it_lasts(self._all_of(schema))))
            and all(suits_any(options) for name in _OPTIONS if (options := _list(schema, name)))
            and all(
                suits(part, each)
                for part, each in budget.while_it_lasts(self._within(schema, value))
            )
        )

    def _within(self, schema: Mapping[str, Any], value: Json) -> Iterator[tuple[Json, Json]]:
        """Return the parts of a value of which anything is said, each with a schema that it has to
        suit.
        """
        if isinstance(value, list):
            prefix = _list(schema, "prefixItems")
            yield from zip(prefix, value, strict=False)
            if "items" in schema:
                for item in itertools.islice(value, len(prefix), None):
                    yield schema["items"], item
        elif isinstance(value, dict) and not schema.keys().isdisjoint(_SAY_PARTS):
            for name, part in value.items():
                if "propertyNames" in schema:
                    yield schema["propertyNames"], name
                found = self._own_property(schema, name, others=True)
                yield False if found is None else found, part


class _Budget:
    """How many schemas and listed values may be looked at: they may be many, or refer to each other
    in more ways than can be tried. Long numbers count for more than one.
    """

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left

    def is_spent(self) -> bool:
        """Look at one, if one may."""
        is_spent = self.num_left <= 0
        self.num_left -= 1
        return is_spent

    def lasts(self, _: object = None) -> bool:
        """Return whether one more may be looked at."""
        return self.num_left > 0

    def while_it_lasts(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Return those of some parts that may be looked at."""
        return itertools.takewhile(self.lasts, parts)

    def may_compare(self, size: int) -> bool:
        """Count numbers of so many digits, or so many names, and return whether they may be
        compared.
        """
        num_checks = size // _SIZE_OF_CHECK
        may_compare = num_checks <= self.num_left
        self.num_left -= min(num_checks, max(0, self.num_left))
        return may_compare


def _list(schema: Mapping[str, Any], keyword: str) -> Sequence[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else ()


def _listed(schema: Mapping[str, Any]) -> Sequence[Json]:
    return [schema["const"]] if "const" in schema else _list(schema, "enum")


def _share_hashes(values: Sequence[Json]) -> bool:
    """Return whether very many numbers have one hash, which those that write them can choose."""
    numbers = [each for each in values if type(each) not in (str, list, dict)]
    hashes = Counter(map(hash, numbers))
    return max(hashes.values(), default=0) > _MAX_SAME_HASH


def _possible_types(values: Sequence[Json]) -> set[str]:
    """Return the types that values of a schema may have, which are too many to look at each."""
    names = {_TYPE_NAMES.get(kind, "number") for kind in set(map(type, values))}
    return names | {"integer"} if "number" in names else names


def _mapping(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, Mapping) else {}


def _any_of(options: list[Json]) -> Json | None:
    return {"anyOf": options} if len(options) > 1 else options[0] if options else None


def _all_of(parts: list[Json]) -> Json | None:
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else None


def _is_text(value: Json) -> bool:
    return isinstance(value, str)


def _num_parts(value: Json, most: int) -> int:
    """Return how many values a value is made of, or `most` if they are more."""
    num_parts, left = 0, [value]
    while left and num_parts < most:
        each = left.pop()
        num_parts += 1
        if isinstance(each, list | dict):
            left += itertools.islice(each.values() if isinstance(each, dict) else each, most)
    return num_parts


def _exact(value: Json) -> Json:
    """Return a value with its fraction as it is written."""
    return Decimal(repr(value)) if isinstance(value, float) else value


def _suits_itself(schema: Mapping[str, Any], facts: _Facts, value: Json, budget: _Budget) -> bool:
    """Return whether a value suits the keywords that have no schemas within."""
    type_ = type_of(value)
    # That has looked at all digits of a fraction.
    may_compare = not isinstance(value, Decimal) or budget.may_compare(_num_digits(value))
    if type_ not in facts.types:
        return False
    if not may_compare:
        return True
    if facts.scalars is not None and not _is_listed(facts, type_, value, budget):
        return False
    if type_ in ("integer", "number"):
        return schema.keys().isdisjoint(_BOUNDS) or _is_in_range(schema, _exact(value), budget)
    noun = {"string": "Length", "array": "Items", "object": "Properties"}.get(type_)
    if noun is None:
        return True
    if type_ == "object" and not _has_required(facts.required, value, budget):
        return False
    low, high = _number(schema, f"min{noun}"), _number(schema, f"max{noun}")
    return (low is None or len(value) >= low) and (high is None or len(value) <= high)


def _has_required(names: frozenset[str], value: Mapping[str, Any], budget: _Budget) -> bool:
    return not budget.may_compare(len(names)) or names <= value.keys()


def _is_listed(facts: _Facts, type_: str, value: Json, budget: _Budget) -> bool:
    if facts.has_others:
        return True
    if type_ in ("array", "object"):
        return any(_are_same(value, each, budget) for each in facts.containers)
    return (type_, _exact(value)) in (facts.scalars or ())


def _are_same(value: Json, other: Json, budget: _Budget) -> bool:
    """Return whether two values are the same, with their types: to Python true is 1."""
    left = [iter(((value, other),))]
    while left:
        pair = next(left[-1], None)
        if pair is None:
            left.pop()
            continue
        if budget.is_spent():
            return True
        value, other = pair
        if not budget.may_compare(_num_digits(value) + _num_digits(other)):
            return True
        if type_of(value) != type_of(other):
            return False
        if not isinstance(value, list | dict):
            if _exact(value) != _exact(other):
                return False
        elif len(value) != len(other):
            return False
        else:
            left.append(_pairs(value, other))
    return True


def _pairs(value: Json, other: Json) -> Iterator[tuple[Json, Json]]:
    """Return what has to be the same of two containers of one length."""
    if isinstance(value, list):
        yield from zip(value, other, strict=True)
        return
    for name, part in value.items():
        yield name in other, True
        yield part, other.get(name)


def _is_in_range(schema: Mapping[str, Any], value: Number, budget: _Budget) -> bool:
    bounds = [
        (suits, bound)
        for keyword, suits in _BOUNDS.items()
        if (bound := _number(schema, keyword)) is not None
    ]
    num_digits = _num_digits(value) * len(bounds) + sum(_num_digits(each) for _, each in bounds)
    if not budget.may_compare(num_digits):
        return True
    return all(suits(value, bound) for suits, bound in bounds)


def _is_multiple(value: Number, factor: Number) -> bool:
    """Exactly, however large or small they are; what has too many digits passes."""
    is_finite = isinstance(value, int) or value.is_finite()
    if not factor or not is_finite or _num_digits(value) > _MAX_DIGITS:
        return True
    (number, exponent), (divisor, factor_exponent) = _parts_of(value), _parts_of(factor)
    if (places := exponent - factor_exponent) >= 0:
        # Zeros beyond that divide no more.
        places = min(places, divisor.bit_length())
        return number * pow(10, places, divisor) % divisor == 0
    # Of more zeros than it has digits only 0 is a multiple.
    return number == 0 or (-places <= _MAX_DIGITS and number % (divisor * 10**-places) == 0)


# By what a value is compared with a number of its schema.
_BOUNDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "multipleOf": _is_multiple,
}


def _number(schema: Mapping[str, Any], keyword: str) -> Number | None:
    value = schema.get(keyword)
    # Without a conversion: an integer may be more than any float.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    number: Number = _exact(value)
    return None if isinstance(number, Decimal) and not number.is_finite() else number


def _num_digits(value: Json) -> int:
    """Return about how many digits a number is written with; 0 if a value is none."""
    value = _exact(value)
    if isinstance(value, Decimal):
        return len(str(value))
    return value.bit_length() * 3 // 10 if isinstance(value, int) else 0


def _parts_of(number: Number) -> tuple[int, int]:
    """Return an integer and a power of ten, of which a number without its sign is the product."""
    if isinstance(number, int):
        return abs(number), 0
    digits, exponent = f"{number.copy_abs():E}".split("E")
    whole, _, fraction = digits.partition(".")
    return int(whole + fraction), int(exponent) - len(fraction)


def _unread(node: Node) -> dict[str, Any]:
    raise AssertionError("values are looked at, not written")
