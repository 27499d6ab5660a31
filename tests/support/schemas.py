"""JSON schemas for tests: what their grammars allow, random ones, and values for them."""

import contextlib
import functools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xgrammar
from transformers import AutoTokenizer

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import to_structural_tag
from pdserve_common.types.sampling_params import StructuredOutputsParams

MODEL = Path(__file__).parents[2] / "models" / "pdserve-tiny"


@functools.cache
def tokenizer() -> xgrammar.TokenizerInfo:
    """The bundled model's."""
    return xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(MODEL))


@functools.cache
def _compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(tokenizer(), max_threads=1, cache_enabled=False)


class Judge:
    """What a constraint allows."""

    def __init__(self, params: StructuredOutputsParams) -> None:
        """Raises InvalidRequestError if it is refused."""
        self._grammar = _compiler().compile_structural_tag(to_structural_tag(params).text)

    @classmethod
    def of_schema(cls, schema: Any) -> "Judge":
        return cls(StructuredOutputsParams(json_schema=json.dumps(schema)))

    def allows(self, text: str) -> bool:
        """Whether a text is a whole answer."""
        matcher = xgrammar.GrammarMatcher(self._grammar)
        return matcher.accept_string(text) and matcher.is_completed()

    def allows_prefix(self, text: bytes) -> bool:
        """Whether a text is one or goes on to one."""
        return bool(xgrammar.GrammarMatcher(self._grammar).accept_string(text))

    def answer(self, rng: random.Random, *, max_tokens: int = 80) -> bytes | None:
        """Tokens drawn of those that are allowed, until an end is and is drawn; None: there was
        none in time. Tokens that close or separate are likelier, and bytes of ASCII.
        """
        matcher, answer = xgrammar.GrammarMatcher(self._grammar), b""
        for _ in range(max_tokens):
            allowed = self._allowed(matcher)
            assert allowed, f"no token goes on after {answer!r}"
            ends = allowed.intersection(tokenizer().stop_token_ids)
            if ends and (allowed == ends or rng.random() < 0.4):
                return answer
            token_id = self._draw(sorted(allowed - ends), rng)
            assert matcher.accept_token(token_id)
            answer += tokenizer().decoded_vocab[token_id]
        return None

    @staticmethod
    def _allowed(matcher: xgrammar.GrammarMatcher) -> set[int]:
        mask = xgrammar.allocate_token_bitmask(1, tokenizer().vocab_size)
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits[: tokenizer().vocab_size]).tolist())

    @staticmethod
    def _draw(token_ids: list[int], rng: random.Random) -> int:
        vocab = tokenizer().decoded_vocab
        ascii_ids = [i for i in token_ids if vocab[i].isascii()]
        closing = [i for i in ascii_ids if vocab[i][:1] in (b"}", b"]", b'"', b",", b":")]
        draw = rng.random()
        if closing and draw < 0.5:
            return rng.choice(closing)
        return rng.choice(ascii_ids if ascii_ids and draw < 0.9 else token_ids)


def answer_bytes(token_ids: Sequence[int]) -> bytes:
    """What tokens say, without those that end a text."""
    info = tokenizer()
    return b"".join(info.decoded_vocab[i] for i in token_ids if i not in info.stop_token_ids)


def dump(value: Any) -> str:
    """Compact JSON, numbers as short as they can be without an exponent."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{value:.6f}".rstrip("0")
    if isinstance(value, list):
        return f"[{','.join(map(dump, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{dump(key)}:{dump(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def closed(schema: Any) -> Any:
    """The schema without what it allows and we never generate: properties beside `properties`, and
    items behind `prefixItems`, unless it speaks of them.
    """
    if not isinstance(schema, dict):
        return schema
    schema = dict(schema)
    for key in ("anyOf", "oneOf", "prefixItems"):
        if key in schema:
            schema[key] = [closed(option) for option in schema[key]]
    for key in ("properties", "patternProperties"):
        if key in schema:
            schema[key] = {name: closed(inner) for name, inner in schema[key].items()}
    for key in ("items", "additionalProperties"):
        if key in schema:
            schema[key] = closed(schema[key])
    if "properties" in schema or schema.get("patternProperties"):
        schema.setdefault("additionalProperties", False)
    if schema.get("prefixItems"):
        schema.setdefault("items", False)
    return schema


NAMES = ("a", "b", "ab", "title", "description", "type", "é", "a b", "", "x/y", 'q"')
PATTERNS = (
    *("^a", "b$", "^[ab]{1,3}$", "a|b", "^(a|bc)*$", r"\d", r"^\w+$", "^[^a]$", r"^\S+$", "^.$"),
    *(r"^\D$", r"^\W$", "x?", "^(?:ab?|c){2}$", r"[^\d]", "^é$", "[à-ü]+$", "(a+){2,}", "^(a*b)*$"),
    *("(ab?){2,3}c*", "^[é-ü]*$", "^[^é]{1,2}$", r"^[\u0500-\uff00]$", "^(a$|b$)", "^[a-c-]+?$"),
)
TEXTS = (
    *("", "a", "b", "ab", "ba", "abc", "aaa", "bcbc", "1", "a1", "é", "A b", "x", "-", " ", "cc"),
    *("abab", "ccccc", "٣", "_", "aab", "\u0600", "a-c"),
)
NUMBERS = (
    *(0, 1, 2, 3, -1, -2, 5, 7, 10, 100, -100, 0.5, 1.5, -0.5, 0.1, 2.25, 1e-6, 99.999999),
    *(12345678901, 2**53, 1e3),
)


class RandomSchemas:
    """Schemas of what is enforced, and a little of what is not, and values that nearly suit."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._pick = self._rng.choice

    def _maybe(self, chance: float = 0.5) -> bool:
        return self._rng.random() < chance

    def schema(self, depth: int = 3) -> Any:
        kinds = [
            self._anything,
            self._values,
            self._string,
            self._string,
            self._number,
            self._types,
        ]
        if depth:
            kinds += [self._array, self._object, self._object, self._options]
        return self._pick(kinds)(depth - 1)

    def _anything(self, depth: int) -> Any:
        return self._pick([True, {}, {"title": "x"}, {"type": "null"}, {"type": "boolean"}])

    def _values(self, depth: int) -> Any:
        if self._maybe(0.3):
            return {"const": self.value_of_any(1)}
        types = self._pick(["string", "integer", "number", "object", ["string", "null"]])
        values = [self.value_of_any(1) for _ in range(self._rng.randint(1, 4))]
        return {"enum": values} | ({"type": types} if self._maybe(0.3) else {})

    def _lengths(self, noun: str) -> dict[str, int]:
        return {
            f"{end}{noun}": self._rng.randint(0, 4) for end in ("min", "max") if self._maybe(0.4)
        }

    def _string(self, depth: int) -> Any:
        pattern = {"pattern": self._pick(PATTERNS)} if self._maybe(0.4) else {}
        return {"type": "string"} | (self._lengths("Length") if self._maybe() else {}) | pattern

    def _number(self, depth: int) -> Any:
        names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        schema: dict[str, Any] = {"type": self._pick(["integer", "number"])}
        schema |= {name: self._pick(NUMBERS) for name in names if self._maybe(0.3)}
        if schema["type"] == "integer" and self._maybe(0.3):
            schema["multipleOf"] = self._pick([1, 2, 3, 5, 2.0])
        return schema

    def _types(self, depth: int) -> Any:
        types = [self._pick(["null", "boolean"]), self._pick(["string", "integer", "number"])]
        keywords = self._pick([{}, {}, {"minLength": 1}, {"maximum": 3}])
        return {"type": types} | keywords

    def _array(self, depth: int) -> Any:
        schema: dict[str, Any] = {"type": "array"} | self._lengths("Items")
        if self._maybe(0.3):
            schema["prefixItems"] = [self.schema(depth) for _ in range(self._rng.randint(0, 3))]
        if self._maybe(0.6):
            schema["items"] = self._pick([self.schema(depth), self.schema(depth), False, True])
        if self._maybe(0.1):
            schema["uniqueItems"] = self._maybe()
        return schema

    def _object(self, depth: int) -> Any:
        schema: dict[str, Any] = {"type": "object"}
        if self._maybe(0.8):
            names = self._rng.sample(NAMES, self._rng.randint(0, 4))
            schema["properties"] = {name: self.schema(depth) for name in names}
            schema["required"] = [name for name in names if self._maybe(0.4)]
        if self._maybe(0.4):
            schema["additionalProperties"] = self._pick([True, False, self.schema(depth)])
        if self._maybe(0.3):
            schema |= self._lengths("Properties")
        if self._maybe(0.15):
            schema["patternProperties"] = {self._pick(PATTERNS): self.schema(depth)}
        if self._maybe(0.15):
            schema["propertyNames"] = self._pick(
                [
                    {"pattern": self._pick(PATTERNS)},
                    {"enum": self._rng.sample(NAMES, 2)},
                    {"maxLength": 2},
                    {"minLength": 1, "type": "string"},
                ]
            )
        return schema

    def _options(self, depth: int) -> Any:
        keyword = self._pick(["anyOf", "oneOf"])
        return {keyword: [self.schema(depth) for _ in range(self._rng.randint(1, 3))]}

    def value_of_any(self, depth: int = 2) -> Any:
        kind = self._rng.randint(0, 5 if depth else 3)
        if kind == 4:
            return [self.value_of_any(depth - 1) for _ in range(self._rng.randint(0, 3))]
        if kind == 5:
            names = (self._pick(NAMES) for _ in range(self._rng.randint(0, 3)))
            return {name: self.value_of_any(depth - 1) for name in names}
        texts = (*TEXTS, '"', "\\", "\n", "/", "😀")
        return (None, self._maybe(), self._pick(texts), self._pick(NUMBERS))[kind]

    def value(self, schema: Any, depth: int = 4) -> Any:
        """A value that may well be valid."""
        if self._maybe(0.08) or depth == 0 or not isinstance(schema, dict):
            return self.value_of_any(1)
        if "const" in schema:
            return schema["const"]
        options = schema.get("anyOf", schema.get("oneOf"))
        if options is not None:
            return self.value(self._pick(options), depth)
        type_ = schema.get("type")
        if "enum" in schema or type_ is None:
            return self._pick(schema["enum"]) if "enum" in schema else self.value_of_any(1)
        type_ = self._pick(type_) if isinstance(type_, list) else type_
        if type_ in ("integer", "number"):
            return self._near(schema)
        if type_ == "array":
            return self._list(schema, depth - 1)
        if type_ == "object":
            return self._mapping(schema, depth - 1)
        return {"null": None, "boolean": self._maybe(), "string": self._pick(TEXTS)}[type_]

    def _near(self, schema: Any) -> int | float:
        bounds = [value for name, value in schema.items() if "imum" in name]
        value = round(self._pick([*NUMBERS, *bounds]) + self._pick([0, 0, 1, -1, 0.5, 1e-6]), 6)
        return int(value) if value == int(value) else value

    def _list(self, schema: Any, depth: int) -> list[Any]:
        prefix = schema.get("prefixItems", [])
        schemas = prefix + [schema.get("items", True)] * 4
        return [self.value(inner, depth) for inner in schemas[: self._rng.randint(0, 4)]]

    def _mapping(self, schema: Any, depth: int) -> dict[str, Any]:
        known = schema.get("properties", {})
        required = schema.get("required", ())
        value = {
            name: self.value(inner, depth)
            for name, inner in known.items()
            if self._maybe(0.95 if name in required else 0.6)
        }
        if known and self._maybe(0.7):
            return value
        others = [*schema.get("patternProperties", {}).values()] or [
            schema.get("additionalProperties", True)
        ]
        # Names that are known stand in the schema's order.
        names = {self._pick(NAMES + TEXTS) for _ in range(self._rng.randint(0, 3))} - known.keys()
        return value | {name: self.value(others[0], depth) for name in sorted(names)}


def accepted_schemas(seed: int) -> Iterator[Any]:
    """Random ones without end of which none is refused."""
    schemas = RandomSchemas(seed)
    while True:
        schema = schemas.schema()
        with contextlib.suppress(InvalidRequestError):
            to_structural_tag(StructuredOutputsParams(json_schema=json.dumps(schema)))
            yield schema
