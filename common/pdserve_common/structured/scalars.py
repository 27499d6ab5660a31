"""Numbers, strings and listed values of a JSON schema."""

import functools
import json
from collections.abc import Iterator
from decimal import ROUND_CEILING, Decimal

from pdserve_common.structured import pattern_text, patterns
from pdserve_common.structured.formats import PATTERNS
from pdserve_common.structured.node import Json, Node, Written, any_of, if_set, kind, short

# Larger factors make too many rules: one for each remainder, or for each value.
MAX_MULTIPLE_OF = 100
MAX_MULTIPLES = 1000
# xgrammar counts in 64 bits, and excludes a bound by adding 1.
MAX_INTEGER = 2**63 - 2
# The bounds of `number` are within this; xgrammar writes them with 6 decimals of a double.
MAX_NUMBER = 2**53
MAX_FRACTION = 10**9
_MICRO = Decimal("0.000001")
# A bound of a number or of a length counts as so many characters of what patterns may have in one
# document: it costs xgrammar about as much.
_BOUND_COST = 16
# A character of a JSON string, but for those that are escaped. As one end of it is not ASCII,
# xgrammar makes rules of it: they count, and their masks are quick.
_ANY_CHAR = r"[\x20-\x21\x23-\x5b\x5d-\u{d7ff}\u{e000}-" + chr(0x10FFFF) + "]"


def read_integer(node: Node) -> Written:
    low, high = _range(node, Decimal(1))
    for bound in (low, high):
        if bound is not None and abs(bound) > MAX_INTEGER:
            node.refuse("minimum", f"or maximum is {bound:.6g}, at most {MAX_INTEGER}")
    factor = _factor(node)
    if factor == 1:
        return {"type": "integer"} | if_set(minimum=_plain(low), maximum=_plain(high))
    if low is None and high is None:
        return {"type": "integer", "multipleOf": factor}
    return _multiples(node, low, high, factor)


def read_number(node: Node) -> Written:
    low, high = _range(node, _MICRO)
    for bound in (low, high):
        if bound is None:
            continue
        limit = MAX_FRACTION if abs(bound) < MAX_NUMBER and bound % 1 else MAX_NUMBER
        if abs(bound) > limit:
            node.refuse("minimum", f"or maximum is {bound:.6g}, at most {limit}")
    return {"type": "number"} | if_set(minimum=_plain(low), maximum=_plain(high))


def _range(node: Node, step: Decimal) -> tuple[Decimal | None, Decimal | None]:
    """The first and the last multiple of `step` within a node's bounds."""
    lows = _firsts(node.bound("minimum"), node.bound("exclusiveMinimum"), step, sign=1)
    highs = _firsts(node.bound("maximum"), node.bound("exclusiveMaximum"), step, sign=-1)
    low, high = max(lows, default=None), min(highs, default=None)
    if (low, high) != (None, None):
        node.spend("characters of patterns", _BOUND_COST, "minimum")
    if low is not None and high is not None and low > high:
        node.refuse("minimum", f"leaves no value: the first is {low:.6g}, the last {high:.6g}")
    return low, high


def _firsts(
    closed: Decimal | None, open_: Decimal | None, step: Decimal, *, sign: int
) -> list[Decimal]:
    """The multiples of `step` next to each bound, upwards if `sign` is 1."""
    firsts = []
    for bound, is_open in ((closed, False), (open_, True)):
        if bound is not None:
            first = (sign * bound / step).to_integral_value(ROUND_CEILING) * step
            firsts.append(sign * (first + step if is_open and first == sign * bound else first))
    return firsts


def _plain(value: Decimal | None) -> int | float | None:
    if value is None:
        return None
    return float(value) if value % 1 else int(value)


def _factor(node: Node) -> int:
    value = node.bound("multipleOf")
    if value is None:
        return 1
    if not 1 <= value <= MAX_MULTIPLE_OF or value % 1:
        node.refuse("multipleOf", f"is {value:.6g}, must be an integer from 1 to {MAX_MULTIPLE_OF}")
    return int(value)


def _multiples(node: Node, low: Decimal | None, high: Decimal | None, factor: int) -> Written:
    if low is None or high is None:
        node.refuse("multipleOf", "is not enforced beside one bound only")
    values = range(-(-int(low) // factor) * factor, int(high) + 1, factor)
    if not 1 <= len(values) <= MAX_MULTIPLES:
        node.refuse("multipleOf", f"leaves {len(values)} values, must be 1 to {MAX_MULTIPLES}")
    node.spend("values of enum and const", len(values), "multipleOf")
    return {"enum": list(values)}


def read_string(node: Node) -> Written:
    low, high = node.lengths("Length")
    if "pattern" in node.schema and "format" in node.schema:
        node.refuse("format", "is not enforced beside pattern")
    for keyword in ("pattern", "format"):
        if keyword in node.schema:
            tree = node.pattern(keyword, _tree(node, keyword))
            _check_lengths(node, keyword, tree, low, high)
            return {"type": "string", "pattern": f"^{pattern_text.write(tree)}$"}
    if low == 0 and high is None:
        return {"type": "string"}
    node.spend("characters of patterns", _BOUND_COST, "maxLength")
    counted = "" if high == 0 else pattern_text.repeated(_ANY_CHAR, low, high)
    return {"type": "string", "pattern": f"^{counted}$"}


def _tree(node: Node, keyword: str) -> patterns.Node:
    text = node.schema[keyword]
    if not isinstance(text, str):
        node.refuse(keyword, f"is {kind(text)}, must be a string")
    if keyword == "pattern":
        return read_pattern(node, keyword, text)
    if text not in PATTERNS:
        node.refuse(keyword, f"is {short(text)}, enforced are {', '.join(PATTERNS)}")
    return _format_tree(text)


@functools.cache
def _format_tree(name: str) -> patterns.Node:
    """Parsing takes longer than all that is done with it."""
    return patterns.whole(patterns.parse(PATTERNS[name]))


def read_pattern(node: Node, keyword: str, text: str) -> patterns.Node:
    """The tree of the texts in which a client's pattern is found."""
    try:
        return patterns.found_in(patterns.parse(text))
    except patterns.PatternError as error:
        node.refuse(keyword, str(error))


def _check_lengths(
    node: Node, keyword: str, tree: patterns.Node, low: int, high: int | None
) -> None:
    longest = patterns.longest(tree)
    what = "a pattern" if keyword == "pattern" else f"format {node.schema[keyword]}"
    if patterns.shortest(tree) < low:
        node.refuse("minLength", f"is not enforced beside {what} that has shorter texts")
    if high is not None and (longest is None or longest > high):
        node.refuse("maxLength", f"is not enforced beside {what} that has longer texts")


def read_values(node: Node, keyword: str, types: list[str]) -> Written:
    """`enum`, or `const`, of these types."""
    values = [node.schema["const"]] if keyword == "const" else node.schema["enum"]
    if not isinstance(values, list) or not values:
        node.refuse(keyword, "must be an array of values")
    node.spend("values of enum and const", len(values), keyword)
    values = [integer(value) for value in values]
    for value in values:
        _check_value(node, keyword, value, is_alone=True)
    left = {json.dumps(value): value for value in values if any(is_of(value, t) for t in types)}
    if not left:
        node.refuse(keyword, f"has no value of type {' or '.join(types)}")
    # xgrammar writes 0.1 as 0.10000000000000001, but ranges are exact.
    fractions = [left.pop(text) for text in sorted(left) if isinstance(left[text], float)]
    rest = [left[text] for text in sorted(left)]
    names = [name for value in rest for name in _names(value)]
    options = [node.marked({"enum": rest}, names)] if rest else []
    options += [{"type": "number", "minimum": value, "maximum": value} for value in fractions]
    return any_of(options)


def integer(value: Json) -> Json:
    """Return a number without a fraction as an integer, anything else as it is."""
    is_integer = isinstance(value, float) and value.is_integer() and abs(value) <= MAX_NUMBER
    return int(value) if is_integer else value


def _check_value(node: Node, keyword: str, value: Json, *, is_alone: bool) -> None:
    if isinstance(value, float):
        if not is_alone or abs(value) > MAX_FRACTION or Decimal(repr(value)) % _MICRO:
            node.refuse(
                keyword,
                f"has {value}: fractions stand alone, have at most 6 decimals and are at "
                f"most {MAX_FRACTION}",
            )
    elif isinstance(value, int) and abs(value) > MAX_INTEGER:
        node.refuse(keyword, f"has {short(value)}, at most {MAX_INTEGER}")
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_value(node, keyword, integer(part), is_alone=False)


def _names(value: Json) -> Iterator[str]:
    """Of all objects in a value."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _names(part)


def is_of(value: Json, type_: str) -> bool:
    """Whether a value is of a JSON schema's type."""
    if type_ in ("integer", "number"):
        known: type | tuple[type, ...] = int if type_ == "integer" else (int, float)
        return isinstance(value, known) and not isinstance(value, bool)
    return isinstance(value, _PYTHON_TYPES[type_])


_PYTHON_TYPES = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}
