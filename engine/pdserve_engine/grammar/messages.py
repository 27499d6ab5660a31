"""What an engine asks its grammar compiler for, and what comes of it."""

from dataclasses import dataclass
from typing import Any

import msgspec

from pdserve_common.processes.calls import Answer, Call, Failed
from pdserve_common.processes.frames import FrameCodec


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


Outcome = Compiled | CompiledLarge | Refused | TimedOut | Killed


@dataclass(frozen=True, slots=True)
class LoadVocabulary(Call[None]):
    """The first call: a tokenizer info."""

    tokenizer_info: str


@dataclass(frozen=True, slots=True)
class Compile(Call[Outcome]):
    """Compile a structural tag. Its text may have lone surrogates: UTF-8 with `surrogatepass`."""

    text: bytes


CODEC: FrameCodec[Any] = FrameCodec((Answer, Failed, LoadVocabulary, Compile))
