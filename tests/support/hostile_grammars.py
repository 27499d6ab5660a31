"""Texts that strangers may send for a grammar: odd, large, deep, ambiguous, and no grammars."""

import json
import random
from collections.abc import Iterator
from typing import Any

ATOMS = (".", "a", "[a-z]", "[^x]", r"\d", r"\w", r"\S", "é", "😀", "(ab|a|b)", "", r"\u0041", "()")
BROKEN = ("[", "(", ")", "{", "a{2,1}", "*", "(?=a)", r"\1", "(?P<x>a", r"\p{L}", "[z-a]", "^$")
QUANTIFIERS = ("*", "+", "?", "{3}", "{0,50}", "{1,}", "{1,1000}", "{100000}", "{1,99999999999}")
SYMBOLS = ('"x"', '"y"', '""', "[a-z]", r"[^\n]*", '("x"* "x"*)*', "(a | b)+")
NODES: tuple[Any, ...] = (
    {},
    True,
    False,
    None,
    3,
    "x",
    {"type": "nothing"},
    {"type": ["string", "null"]},
)


def texts(seed: int, count: int) -> Iterator[str]:
    """Yield texts, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.choice((_regex, _regex, _ebnf, _schema, _schema, _tag, _junk))(rng)


def _structural_tag(format: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": format})


def _power(rng: random.Random, most: int) -> int:
    power: int = 10 ** rng.randint(1, most)
    return power


def _nested(before: str, middle: str, after: str, depth: int) -> str:
    return before * depth + middle + after * depth


def _pattern(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(ATOMS if rng.random() < 0.97 else BROKEN)
    parts = [_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    join = "|" if rng.random() < 0.3 else ""
    quantifier = rng.choice(QUANTIFIERS) if rng.random() < 0.6 else ""
    return f"({join.join(parts)}){quantifier}"


def _regex(rng: random.Random) -> str:
    depth = _power(rng, 4)
    patterns = (
        _pattern(rng, rng.randint(0, 4)),
        _pattern(rng, rng.randint(0, 4)),
        rng.choice(BROKEN),
        "(" * depth,
        _nested("(", "a", rng.choice((")", "?)", ")*")), depth),
        _nested("(a|", "b", ")*", depth),
        "[" + "".join(chr(rng.randint(48, 0x2FFF)) for _ in range(3000)) + "]*",
        f"(.*a){{{depth}}}",
        f".{{1,{_power(rng, 6)}}}" * rng.randint(1, 3),
    )
    return _structural_tag({"type": "regex", "pattern": rng.choice(patterns)})


def _ebnf(rng: random.Random) -> str:
    names = ("root", "a", "b", "c")

    def choice() -> str:
        symbols = (rng.choice(rng.choice((names, SYMBOLS))) for _ in range(rng.randint(1, 4)))
        return " ".join(symbols)

    grammar = "\n".join(
        f"{name} ::= {' | '.join(choice() for _ in range(rng.randint(1, 4)))}" for name in names
    )
    if rng.random() < 0.2:
        grammar = grammar[: rng.randint(0, len(grammar))]
    if rng.random() < 0.1:
        grammar = f"root ::= {_nested('(', 'root', ')', _power(rng, 4))}"
    return _structural_tag({"type": "grammar", "grammar": grammar})


def _schema(rng: random.Random) -> str:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(_power(rng, 2)):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    circle = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    properties = {f"key {i}": {"type": "number"} for i in range(_power(rng, 3))}
    schemas = (
        _schema_node(rng, rng.randint(0, 4)),
        _schema_node(rng, rng.randint(0, 4)),
        {"$ref": rng.choice(("#", "https://example.com/schema", "#/nowhere"))},
        {"$defs": circle, "$ref": "#/$defs/a"},
        {"enum": [f"{i}" * 20 for i in range(_power(rng, 4))]},
        deep,
        {"type": "string", "minLength": _power(rng, 9)},
        {"type": "array", "minItems": _power(rng, 7)},
        {"type": "integer", "minimum": -_power(rng, 300)},
        {"type": "object", "properties": properties},
        {"type": "object", "patternProperties": {_pattern(rng, 2): {}}},
        {"type": "string", "pattern": _pattern(rng, 3)},
    )
    return _structural_tag({"type": "json_schema", "json_schema": rng.choice(schemas)})


def _schema_node(rng: random.Random, depth: int) -> Any:
    if depth == 0:
        return rng.choice(NODES)
    keyword = rng.choice(("anyOf", "allOf", "oneOf", "not", "items", "prefixItems", "properties"))
    inner: Any = [_schema_node(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if keyword == "properties":
        inner = {f"p{i}": node for i, node in enumerate(inner)}
    elif keyword in ("not", "items"):
        inner = inner[0] if inner else {}
    return {keyword: inner, "maxLength": rng.randint(-2, 2)}


def _tag(rng: random.Random) -> str:
    inner: Any = rng.choice(
        ({"type": "any_text"}, {"type": "regex", "pattern": "a*"}, {"type": "x"}, 7)
    )
    for _ in range(rng.randint(1, 40)):
        least, most = rng.randint(-1, 9), rng.randint(-1, 2**31)
        inner = rng.choice(
            (
                {"type": "sequence", "elements": [inner] * rng.randint(0, 2)},
                {"type": "or", "elements": [inner, {"type": "const_string", "value": "b"}]},
                {"type": "star", "content": inner},
                {"type": "repeat", "min": least, "max": most, "content": inner},
                {"type": "tag", "begin": rng.choice(("<a>", "")), "content": inner, "end": "</a>"},
                {"type": "token", "token": rng.choice((-1, 0, 5, 10**9, "no such token"))},
            )
        )
    return _structural_tag(inner)


def _junk(rng: random.Random) -> str:
    texts = (
        "",
        "null",
        "{",
        '{"type": "structural_tag"}',
        "\x00\ud800" + "x" * 100,
        "[" * _power(rng, 5),
        '{"a":' * _power(rng, 4),
        "".join(chr(rng.randint(0, 0xD7FF)) for _ in range(500)),
        _structural_tag("a" * 2**20),
    )
    return rng.choice(texts)
