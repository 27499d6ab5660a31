"""What an engine asks its grammar compiler for, and what comes of it."""

from dataclasses import dataclass
from typing import Any

import msgspec

from pdserve_common.processes.calls import Answer, Call, Failed
from pdserve_common.processes.frames import FrameCodec
from pdserve_common.structured.tags import Format
from pdserve_common.types.sampling_params import StructuredOutputsParams


class Read(msgspec.Struct, frozen=True, tag=True):
    """A constraint as a structural tag: its text and digest."""

    text: str
    digest: str


class NotEnforced(msgspec.Struct, frozen=True, tag=True):
    """A constraint is malformed, too large, or asks for what no grammar enforces."""

    message: str
    field: str | None


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """A CompiledGrammar, serialized, and what its first mask took."""

    grammar: str
    first_mask_s: float


class CompiledLarge(msgspec.Struct, frozen=True, tag=True):
    """The text compiles within its bounds, to what is not worth sending."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The text is no grammar, or one that takes too much."""

    reason: str


class TimedOut(msgspec.Struct, frozen=True, tag=True):
    """The compiler had no time: a text that takes much of its time is refused."""

    after_s: float


class Killed(msgspec.Struct, frozen=True, tag=True):
    """Somebody else ended the compilation."""


# How any call may end instead.
Unfinished = Refused | TimedOut | Killed


@dataclass(frozen=True, slots=True)
class LoadVocabulary(Call[None]):
    """The first call: a tokenizer info."""

    tokenizer_info: str


@dataclass(frozen=True, slots=True)
class ReadConstraint(Call[Read | NotEnforced | Unfinished]):
    """Make one structural tag of a constraint and of the formats that come first."""

    params: StructuredOutputsParams
    before: tuple[Format, ...]


@dataclass(frozen=True, slots=True)
class Compile(Call[Compiled | CompiledLarge | Unfinished]):
    """Compile a structural tag. Its text may have lone surrogates: UTF-8 with `surrogatepass`."""

    text: bytes


CODEC: FrameCodec[Any] = FrameCodec((Answer, Failed, LoadVocabulary, ReadConstraint, Compile))
