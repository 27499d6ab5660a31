"""What a chat format is: how a model writes reasoning and tool calls, and how that is read."""

import base64
import enum
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pdserve_common.structured.reasoning import reasoning_formats
from pdserve_common.structured.values import Values
from pdserve_router.chat_formats.reader import MAX_READ_AGAIN, Reader, Steps
from pdserve_router.chat_formats.tags import (
    CallRules,
    Tag,
    by_id,
    optional,
    structural_tag,
)
from pdserve_router.text.parts import Content, OutputPart, Reasoning, ToolCallDelta

CallId = Callable[[int], str]


class ReasoningStart(enum.Enum):
    """What the prompt says of the answer's reasoning."""

    # Nothing: the answer may begin with it.
    FREE = "free"
    # The prompt ends with the marker that begins it.
    OPEN = "open"
    # The prompt ends with the marker that ends it.
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions:
    """How the answers of one request are read."""

    # A name in `registry.FORMATS`.
    format: str
    reasoning: ReasoningStart = ReasoningStart.FREE
    # The JSON schema of each tool's parameters; empty: calls are text like any other.
    tools: Mapping[str, Any] = field(default_factory=dict)
    # Calls behind the first one are dropped unless it is set.
    is_parallel: bool = True


class Answer:
    """Collects the parts of an answer as they are read."""

    __slots__ = (
        "_call_id",
        "_max_calls",
        "_num_calls",
        "_parameters",
        "_parts",
        "are_ends_implied",
        "is_reasoning",
        "options",
    )

    def __init__(self, options: ParserOptions, call_id: CallId) -> None:
        self.options = options
        self.is_reasoning = False
        # The values of a call had no ends of their own, so none of those behind it has.
        self.are_ends_implied = False
        self._call_id = call_id
        self._parts: list[OutputPart] = []
        self._parameters: dict[str, Values] = {}
        self._num_calls = 0
        self._max_calls = None if options.is_parallel else 1

    def content(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))

    def reasoning(self, text: str) -> None:
        self._parts.append(Reasoning(text))

    def begin_call(self, name: str) -> None:
        index = self._num_calls
        self._num_calls += 1
        if not self._is_dropped:
            self._parts.append(ToolCallDelta(index=index, id=self._call_id(index), name=name))

    def arguments(self, text: str) -> None:
        """Add to those of the last call."""
        if not self._is_dropped:
            self._parts.append(ToolCallDelta(index=self._num_calls - 1, arguments=text))

    def parameters_of(self, name: str) -> Values:
        """Return what a tool may be called with. Answers have many calls, and schemas many parts:
        what is known of one counts for the next.
        """
        if name not in self._parameters:
            self._parameters[name] = Values(self.options.tools[name])
        return self._parameters[name]

    def take(self) -> list[OutputPart]:
        parts, self._parts = self._parts, []
        return parts

    @property
    def _is_dropped(self) -> bool:
        return self._max_calls is not None and self._num_calls > self._max_calls


class ChatFormat(ABC):
    """How models of one family write. Stateless: a parser holds what an answer needs."""

    # What users call it.
    name: ClassVar[str]
    # Around reasoning, at the beginning of an answer; None: there is none.
    reasoning: ClassVar[tuple[str, str] | None] = ("<think>", "</think>")
    # An answer begins with reasoning, whether its marker comes or not, unless the prompt says more.
    is_reasoning_implied: ClassVar[bool] = False
    # Each begins a call, or several.
    triggers: ClassVar[tuple[str, ...]]
    # What else calls are made of and may be a token.
    inner_markers: ClassVar[tuple[str, ...]] = ()
    # How a schema's values are written, as structural tags have it.
    arguments_style: ClassVar[str] = "json"
    # What a call's id begins with. Some templates take no others.
    id_prefix: ClassVar[str] = "call_"
    num_id_chars: ClassVar[int] = 24

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser has to see even if they are special tokens."""
        return (*(self.reasoning or ()), *self.triggers, *self.inner_markers)

    def marker_ids(self, added_token_ids: Mapping[str, int]) -> dict[str, int]:
        """Return the token of each marker that is one among these."""
        return {m: added_token_ids[m] for m in self.markers if m in added_token_ids}

    @abstractmethod
    def matches(self, template: str) -> bool:
        """Return whether a model with this chat template writes so."""

    @abstractmethod
    def read_call(self, reader: Reader, answer: Answer, trigger: str) -> Steps[bool]:
        """Read the call behind a trigger, with all that belongs to it. Return False, with nothing
        added, if it is none: what looks like one, but calls no tool that is there, is content.
        """

    @abstractmethod
    def call_tag(self, rules: CallRules) -> Tag:
        """Return one call or more and nothing else, as part of a structural tag of text."""

    def structural_tag(
        self, rules: CallRules, reasoning: ReasoningStart, ids: Mapping[str, int]
    ) -> Tag:
        """Return the grammar of an answer, in xgrammar's JSON form: reasoning, unless the prompt
        has closed it, then calls. What fits it `read` finds again. `ids` has `marker_ids`.
        """
        return self.answer_tag(by_id(self.call_tag(rules), ids), reasoning, ids)

    def answer_tag(self, content: Tag, reasoning: ReasoningStart, ids: Mapping[str, int]) -> Tag:
        """Return the grammar of an answer with this content behind its reasoning."""
        if self.reasoning is None or reasoning is ReasoningStart.CLOSED:
            return structural_tag([content])
        begin, end = self.reasoning
        if reasoning is ReasoningStart.OPEN:
            return structural_tag([*reasoning_formats("", end, ids), content])
        if self.is_reasoning_implied:
            return structural_tag([*reasoning_formats(begin, end, ids), content])
        return structural_tag([optional(reasoning_formats(begin, end, ids)), content])

    def may_reason(self, reasoning: ReasoningStart) -> bool:
        """Return whether an answer to such a prompt may have reasoning."""
        return self.reasoning is not None and reasoning is not ReasoningStart.CLOSED

    def read_start(self, reader: Reader, answer: Answer) -> Steps[None]:
        """Read calls at the beginning of an answer that no trigger announces."""
        yield from ()

    def call_id(self, request: str, index: int) -> str:
        """Return the id of a request's call; the same wherever and whenever it is read."""
        digest = hashlib.sha256(f"{request}/{index}".encode()).digest()
        text = base64.b32encode(digest).decode().lower()
        return self.id_prefix + text[: self.num_id_chars]

    def read(self, reader: Reader, answer: Answer) -> Steps[None]:
        """Read an answer: reasoning, then text and calls."""
        start = answer.options.reasoning
        if self.reasoning is not None and start is not ReasoningStart.CLOSED:
            begin, end = self.reasoning
            # A model may repeat the marker that the prompt ends with.
            is_marked = yield from reader.accept(begin)
            if is_marked or start is ReasoningStart.OPEN or self.is_reasoning_implied:
                yield from self._read_reasoning(reader, answer, end)
        if not answer.options.tools:
            yield from reader.until((), answer.content)
            return
        yield from self.read_start(reader, answer)
        while not reader.is_ended:
            yield from self._read_content(reader, answer)

    def _read_reasoning(self, reader: Reader, answer: Answer, end: str) -> Steps[None]:
        answer.is_reasoning = True
        yield from reader.peek()
        yield from reader.until_spaced((end,), answer.reasoning)
        answer.is_reasoning = False
        yield from reader.peek()

    def _read_content(self, reader: Reader, answer: Answer) -> Steps[None]:
        blanks, trigger = yield from reader.until_spaced(self.triggers, answer.content)
        if not trigger:
            return
        reader.mark()
        if (yield from self.read_call(reader, answer, trigger)):
            reader.unmark()
        else:
            answer.content(blanks + trigger)
            answer.content(reader.rewind(at_most=MAX_READ_AGAIN))


class TextParser:
    """Reads an answer that is text and nothing else, as Parser does."""

    __slots__ = ()

    is_reasoning = False

    def push(self, text: str) -> Sequence[OutputPart]:
        return (Content(text),) if text else ()

    def finish(self) -> Sequence[OutputPart]:
        return ()


class Parser:
    """Reads the text of one answer as it comes."""

    __slots__ = ("_answer", "_reader", "_steps")

    def __init__(self, chat_format: ChatFormat, options: ParserOptions, request: str) -> None:
        """`request` tells the answer from all others: ids of calls depend on it."""
        self._reader = Reader()
        self._answer = Answer(options, lambda index: chat_format.call_id(request, index))
        self._steps = chat_format.read(self._reader, self._answer)

    @property
    def is_reasoning(self) -> bool:
        """What comes next is reasoning, as far as one knows."""
        return self._answer.is_reasoning

    def push(self, text: str) -> Sequence[OutputPart]:
        """Return the parts that are certain with this text."""
        self._reader.feed(text)
        next(self._steps, None)
        return self._answer.take()

    def finish(self) -> Sequence[OutputPart]:
        """Return the rest. No text follows."""
        self._reader.end()
        for _ in self._steps:
            raise AssertionError("at its end a text has no more to wait for")
        return self._answer.take()
