"""A response of OpenAI's as JSON: a whole one, and the events of a stream.

https://developers.openai.com/api/reference/resources/responses has both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from pdserve_common.errors import PdserveError
from pdserve_common.types.engine import FinishReason
from pdserve_router.api.openai.format import EchoedPrompt, error_object, metrics_object
from pdserve_router.requests.output.outputs import RequestOutput, Usage
from pdserve_router.requests.records.request_metrics import RequestMetrics
from pdserve_router.text.parts import Content, OutputPart, Reasoning, ToolCallDelta


@dataclass(slots=True, kw_only=True)
class _Item:
    """One item of an answer, so far."""

    id: str
    # What it began with, which says of what kind it is.
    first: OutputPart
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def goes_on_with(self, part: OutputPart) -> bool:
        if isinstance(part, ToolCallDelta) and isinstance(self.first, ToolCallDelta):
            return part.index == self.first.index
        return type(part) is type(self.first)

    def part(self, text: str) -> dict[str, Any]:
        """Return the only part of its content, with this text."""
        if isinstance(self.first, Reasoning):
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def object(self, status: str) -> dict[str, Any]:
        """Return the item as it is now."""
        if isinstance(self.first, ToolCallDelta):
            return {
                "type": "function_call",
                "id": self.id,
                "call_id": self.first.id,
                "name": self.first.name,
                "arguments": self.text,
                "status": status,
            }
        content = [self.part(self.text)] if self.pieces else []
        common = {"id": self.id, "status": status, "content": content}
        if isinstance(self.first, Reasoning):
            return {"type": "reasoning", "summary": [], **common}
        return {"type": "message", "role": "assistant", **common}


@dataclass(slots=True, kw_only=True)
class ResponseFormat:
    """Writes what one request brings."""

    request_id: str
    model: str
    created: int
    # A JSON object with what each response repeats of its request.
    repeated_fields: bytes
    include_metrics: bool = False
    # Set for prompts that are echoed, which no response does.
    prompt_token_ids: Sequence[int] = ()
    shows_logprobs: bool = False
    _items: list[_Item] = field(default_factory=list)
    _num_events: int = 0
    _finish_reason: FinishReason | None = None

    def first_events(self, prompt: EchoedPrompt | None = None) -> bytes:
        """Return what comes before the answer."""
        names = ("created", "in_progress")
        return b"".join(self._event(name, self._response("in_progress")) for name in names)

    def events(self, output: RequestOutput) -> bytes:
        """Return what an output adds."""
        (completion,) = output.outputs
        self._finish_reason = completion.finish_reason
        return b"".join(map(self._add, completion.parts))

    def text_event(self, text: str, token_ids: Sequence[int], *, index: int = 0) -> bytes:
        """Return what a text adds; index is 0."""
        return self._add(Content(text)) if text else b""

    text_events = events

    def end_events(self, usage: Usage, metrics: RequestMetrics) -> bytes:
        """Return what ends a stream."""
        events = self._end_item(self._status)
        return events + self._event(self._status, self._whole_response(usage, metrics))

    def error_events(self, error: PdserveError) -> bytes:
        """Return what ends a stream that fails."""
        found = error_object(error)["error"]
        code = "rate_limit_exceeded" if found["type"] == "rate_limit_error" else "server_error"
        response = self._response("failed", error={"code": code, "message": found["message"]})
        return self._event("failed", response)

    def whole(self, output: RequestOutput, prompt: EchoedPrompt | None = None) -> None:
        """Take a finished answer."""
        self.events(output)

    def answer(self, wholes: Sequence[None], usage: Usage, metrics: RequestMetrics) -> bytes:
        """Return the whole answer."""
        return self._whole_response(usage, metrics)

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason is FinishReason.LENGTH else "completed"

    def _add(self, part: OutputPart) -> bytes:
        """Take a piece of the answer and return its events."""
        events = b""
        if not self._items or not self._items[-1].goes_on_with(part):
            events = self._end_item() + self._begin_item(part)
        item = self._items[-1]
        text = part.arguments if isinstance(part, ToolCallDelta) else part.text
        if not text:
            return events
        item.pieces.append(text)
        return events + self._item_event(f"{_text_name(item)}.delta", delta=text)

    def _begin_item(self, part: OutputPart) -> bytes:
        prefix = {Content: "msg", Reasoning: "rs", ToolCallDelta: "fc"}[type(part)]
        item = _Item(id=f"{prefix}_{self.request_id}_{len(self._items)}", first=part)
        self._items.append(item)
        index = len(self._items) - 1
        events = self._event(
            "output_item.added", output_index=index, item=item.object("in_progress")
        )
        if isinstance(part, ToolCallDelta):
            return events
        return events + self._item_event("content_part.added", part=item.part(""))

    def _end_item(self, status: str = "completed") -> bytes:
        """Return what ends the last item, if there is one."""
        if not self._items:
            return b""
        item = self._items[-1]
        if isinstance(item.first, ToolCallDelta):
            events = self._item_event(
                f"{_text_name(item)}.done", name=item.first.name, arguments=item.text
            )
        else:
            events = self._item_event(f"{_text_name(item)}.done", text=item.text)
            events += self._item_event("content_part.done", part=item.part(item.text))
        index = len(self._items) - 1
        return events + self._event(
            "output_item.done", output_index=index, item=item.object(status)
        )

    def _item_event(self, name: str, /, **fields: object) -> bytes:
        """Of the last item, and the only part of its content if it has that."""
        item = self._items[-1]
        place: dict[str, object] = {"item_id": item.id, "output_index": len(self._items) - 1}
        if not isinstance(item.first, ToolCallDelta):
            place["content_index"] = 0
            if name.startswith("output_text."):
                place["logprobs"] = []
        return self._event(name, **place, **fields)

    def _event(self, name: str, response: bytes = b"", /, **fields: object) -> bytes:
        kind = f"response.{name}"
        data = to_json({"type": kind, "sequence_number": self._num_events, **fields})
        if response:
            data = data[:-1] + b',"response":' + response + b"}"
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _whole_response(self, usage: Usage, metrics: RequestMetrics) -> bytes:
        is_cut = self._status == "incomplete"
        more: dict[str, Any] = {"usage": usage_object(usage)}
        if is_cut:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        if self.include_metrics:
            more["metrics"] = metrics_object(metrics)
        return self._response(self._status, **more)

    def _response(self, status: str, **more: object) -> bytes:
        output = [item.object("completed") for item in self._items]
        if status != "completed" and output:
            output[-1]["status"] = "incomplete"
        own = {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            "usage": None,
            **more,
        }
        return to_json(own)[:-1] + b"," + self.repeated_fields[1:]


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return the usage of a response."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


def _text_name(item: _Item) -> str:
    """Return what its events call its text."""
    if isinstance(item.first, ToolCallDelta):
        return "function_call_arguments"
    return "reasoning_text" if isinstance(item.first, Reasoning) else "output_text"
