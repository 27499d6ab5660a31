"""What messages and answers are made of, besides tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Content:
    """What is said."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What is thought before."""

    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """What is shown: the bytes of a file, and where in the request it came."""

    data: bytes
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A whole call of a tool. `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """What is new of an answer's call number `index`. Its first piece has id and name; the pieces
    of its arguments add up to JSON, or to the beginning of it if the answer was cut.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


MessagePart = Content | Reasoning | Picture | ToolCall
OutputPart = Content | Reasoning | ToolCallDelta


def join_parts(parts: Iterable[OutputPart]) -> tuple[OutputPart, ...]:
    """Return the same with as few pieces as possible, in order."""
    parts = tuple(parts)
    if len(parts) < 2:
        return parts
    return tuple(_join(list(pieces)) for _, pieces in groupby(parts, _kind))


def join_calls(parts: Iterable[OutputPart]) -> Sequence[ToolCallDelta]:
    """Return the calls among them, what is new of each in one piece."""
    calls = [part for part in parts if isinstance(part, ToolCallDelta)]
    if not calls:  # as of almost every token
        return calls
    ordered = sorted(calls, key=lambda call: call.index)
    return [call for call in join_parts(ordered) if isinstance(call, ToolCallDelta)]


def content_of(parts: Iterable[OutputPart | MessagePart]) -> str:
    """Return what is said in them."""
    return "".join([part.text for part in parts if isinstance(part, Content)])


def reasoning_of(parts: Iterable[OutputPart | MessagePart]) -> str:
    """Return what is thought in them."""
    return "".join([part.text for part in parts if isinstance(part, Reasoning)])


def _kind(part: OutputPart) -> tuple[type, int]:
    return type(part), part.index if isinstance(part, ToolCallDelta) else 0


def _join(pieces: list[OutputPart]) -> OutputPart:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, ToolCallDelta):
        arguments = (piece.arguments for piece in pieces if isinstance(piece, ToolCallDelta))
        return ToolCallDelta(
            index=first.index, id=first.id, name=first.name, arguments="".join(arguments)
        )
    text = "".join(piece.text for piece in pieces if not isinstance(piece, ToolCallDelta))
    return type(first)(text)
