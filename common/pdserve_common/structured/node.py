"""A schema within a document, and what the readers of its keywords share."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import patterns
from pdserve_common.structured.json_text import field_name

# One document has at most so many of each.
LIMITS = {
    "schemas": 5000,
    "properties": 512,
    "values of enum and const": 1000,
    "different $ref": 128,
    "characters of patterns": 4096,
    "comparisons within oneOf": 20_000,
}
_MAX_REFS = 8
_INDEX = re.compile("0|[1-9][0-9]{0,8}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_$. -]+")
# A bound of a length is at most this.
MAX_LENGTH = 1_000_000

Json: TypeAlias = Any
# A schema as it is written for xgrammar.
Written: TypeAlias = dict[str, Any]


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_UNSEEN_NAMES = words(
    "title default description examples deprecated readOnly writeOnly $comment $schema"
)


@dataclasses.dataclass(slots=True, kw_only=True)
class Document:
    """What all nodes of one document have in common."""

    root: Json
    # Named in errors.
    field: str
    read: Callable[["Node"], Written]
    # Names that a pattern says have these characters.
    name_chars: patterns.Ranges = patterns.JSON_CHARS
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    # Definitions by pointer, numbered in the order of their first use.
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)
    # Options of each oneOf with its place.
    one_ofs: list[tuple["Node", list[Written]]] = dataclasses.field(default_factory=list)

    def target(self, pointer: str) -> Json:
        """Return what a JSON pointer points at. Raises InvalidRequestError if it is nothing."""
        value = self.root
        for token in pointer.split("/")[1:]:
            key = token.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and _INDEX.fullmatch(key) and int(key) < len(value):
                value = value[int(key)]
            else:
                refuse(self.field, "$ref", pointer, "points at nothing")
        return value


class Node:
    """A schema and its JSON pointer."""

    def __init__(self, document: Document, schema: Json, pointer: str) -> None:
        self.document = document
        self.schema = schema
        self.pointer = pointer

    def refuse(self, keyword: str, why: str) -> NoReturn:
        """Raise InvalidRequestError; of this node as a whole if `keyword` is empty."""
        refuse(self.document.field, keyword, self.pointer, why)

    def read(self, schema: Json, *path: str | int) -> Written:
        """Return the schema below `path` as it is written for xgrammar."""
        tokens = (str(token).replace("~", "~0").replace("/", "~1") for token in path)
        pointer = "/".join((self.pointer, *tokens))
        return self.document.read(Node(self.document, schema, pointer))

    def spend(self, what: str, amount: int, keyword: str) -> None:
        """Count towards a limit of the document."""
        self.document.counts[what] += amount
        total = self.document.counts[what]
        if total > LIMITS[what]:
            self.refuse(keyword, f"makes more than {LIMITS[what]} {what}")

    def pointer_of(self, ref: Json) -> str:
        """The JSON pointer of a $ref within the document."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            self.refuse("$ref", f"is {short(ref)}, must be # or start with #/")
        return unquote(ref[1:])

    def follow(self, schema: Json, keyword: str) -> Json:
        """The schema that a $ref stands for, if it is one."""
        for _ in range(_MAX_REFS):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self.document.target(self.pointer_of(schema["$ref"]))
        self.refuse(keyword, f"is behind {_MAX_REFS} $ref, which is too far")

    def marked(self, written: Written, names: Iterable[str]) -> Written:
        """Made different from all others if xgrammar would take it for another: its cache leaves
        these names out of what it compares, and writes all as they are.
        """
        if all(_PLAIN_NAME.fullmatch(name) and name not in _UNSEEN_NAMES for name in names):
            return written
        self.document.counts["marks"] += 1
        return written | {"mark": self.document.counts["marks"]}

    def bound(self, keyword: str) -> Decimal | None:
        """The number of a keyword, None if it is not there."""
        if keyword not in self.schema:
            return None
        value = self.schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(keyword, f"is {kind(value)}, must be a number")
        return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)

    def lengths(self, noun: str) -> tuple[int, int | None]:
        """min`noun` and max`noun`."""
        low, high = self._length(f"min{noun}") or 0, self._length(f"max{noun}")
        if high is not None and low > high:
            self.refuse(f"min{noun}", f"is {low}, max{noun} is {high}")
        return low, high

    def _length(self, keyword: str) -> int | None:
        value = self.bound(keyword)
        if value is None:
            return None
        if not 0 <= value <= MAX_LENGTH or value % 1:
            self.refuse(keyword, f"is {short(value)}, must be an integer from 0 to {MAX_LENGTH}")
        return int(value)

    def pattern(self, keyword: str, tree: patterns.Node) -> patterns.Node:
        """A pattern's tree for texts in JSON strings without escapes."""
        return self._restricted(keyword, tree, patterns.JSON_CHARS)

    def names(self, keyword: str, tree: patterns.Node) -> patterns.Node:
        """The same for names of properties."""
        return self._restricted(keyword, tree, self.document.name_chars)

    def _restricted(
        self, keyword: str, tree: patterns.Node, chars: patterns.Ranges
    ) -> patterns.Node:
        restricted = patterns.restrict(tree, chars)
        if restricted is None:
            self.refuse(keyword, "needs characters that are escaped")
        try:
            patterns.check_size(restricted)
        except patterns.PatternError as error:
            self.refuse(keyword, str(error))
        self.spend("characters of patterns", patterns.size(restricted), keyword)
        return restricted


def refuse(field: str, keyword: str, pointer: str, why: str) -> NoReturn:
    """Raise InvalidRequestError about a place in the document of `field`."""
    place = pointer[:400] or "the root"
    where = f"{short(keyword)} at {place}" if keyword else place
    raise InvalidRequestError(f"{field}: {where} {why}", field=field_name(field))


def kind(value: Json) -> str:
    """What a JSON value is, for errors."""
    for types, name in (
        (type(None), "null"),
        (bool, "a boolean"),
        (int | float, "a number"),
        (str, "a string"),
        (list, "an array"),
    ):
        if isinstance(value, types):
            return name
    return "an object"


def short(value: Json | Decimal) -> str:
    """A value for errors: strings are cut, others than numbers only named."""
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    # Python writes no integers of more than some thousand digits.
    if is_number and abs(value) < 10**100:
        return str(value)
    text = value if isinstance(value, str) else kind(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def if_set(**keywords: int | float | None) -> Written:
    return {keyword: value for keyword, value in keywords.items() if value is not None}


def any_of(options: list[Written]) -> Written:
    """One of these, each once."""
    different = [*{json.dumps(option): option for option in options}.values()]
    return different[0] if len(different) == 1 else {"anyOf": different}
