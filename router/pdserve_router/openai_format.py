"""OpenAI's answers as JSON: whole ones, chunks of a stream, and errors."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from pdserve_common.engine_types import ErrorCode, FinishReason
from pdserve_common.errors import InvalidRequestError, ModelNotFoundError, PdserveError
from pdserve_router.output_processor import CompletionOutput, RequestOutput, Usage

DONE_EVENT = b"data: [DONE]\n\n"

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "stop",
}

_STATUS = {
    ErrorCode.INTERNAL: 500,
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.NO_WORKER: 503,
    ErrorCode.KV_TRANSFER_FAILED: 503,
    ErrorCode.KV_EXPIRED: 503,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.CANCELLED: 499,
    ErrorCode.ENGINE_DEAD: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.CLIENT_TOO_SLOW: 408,
}

_ERROR_TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 429: "rate_limit_error"}

# Fields of the engine that have another name in OpenAI's requests.
_PARAMS = {"prompt_token_ids": "prompt"}


class BodyTooLargeError(InvalidRequestError):
    """The HTTP body is above the limit. Not retryable."""


def http_status(error: PdserveError) -> int:
    """Return the HTTP status that says what `error` says."""
    if isinstance(error, ModelNotFoundError):
        return 404
    if isinstance(error, BodyTooLargeError):
        return 413
    return _STATUS[error.code]


def error_object(error: PdserveError) -> dict[str, Any]:
    """Return OpenAI's error object."""
    status = http_status(error)
    code = error.code.name.lower()
    if isinstance(error, ModelNotFoundError):
        code = "model_not_found"
    return plain_error_object(
        error.message,
        status=status,
        code=code,
        param=_param(error),
    )


def _param(error: PdserveError) -> str | None:
    if not isinstance(error, InvalidRequestError) or error.field is None:
        return None
    return _PARAMS.get(error.field, error.field)


def plain_error_object(
    message: str, *, status: int, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    default = "invalid_request_error" if status < 500 else "server_error"
    error_type = _ERROR_TYPES.get(status, default)
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def error_headers(error: PdserveError) -> dict[str, str]:
    """Return when to try again, if that helps."""
    if error.retry_after_ms is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_ms / 1000)))}


def error_event(error: PdserveError) -> bytes:
    """Return the event that ends a stream which has already begun."""
    return _event(error_object(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Writes the answers of one request, for one of the two endpoints."""

    answer_id: str
    model: str
    created: int
    is_chat: bool
    include_usage: bool = False

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        """Return the whole answer of a finished request."""
        completion = output.completion
        content: dict[str, Any] = {"text": completion.text}
        if self.is_chat:
            message = {"role": "assistant", "content": completion.text, "refusal": None}
            content = {"message": message}
        name = "chat.completion" if self.is_chat else "text_completion"
        answer = self._frame(name, [self._choice(completion, content)])
        return {**answer, "usage": usage_object(output.usage)}

    def first_events(self) -> bytes:
        """Return what comes before the first text: of a chat, who speaks."""
        if not self.is_chat:
            return b""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk(self._choice(CompletionOutput(), {"delta": delta}))

    def events(self, output: RequestOutput) -> bytes:
        """Return the events of an output that brought text or the end."""
        completion = output.completion
        events = b""
        if completion.text or output.finished:
            events = self._chunk(self._choice(completion, self._delta(completion)))
        if output.finished:
            if self.include_usage:
                frame = self._frame(self._chunk_name, [])
                events += _event({**frame, "usage": usage_object(output.usage)})
            events += DONE_EVENT
        return events

    def text_events(self, output: RequestOutput) -> bytes:
        """Return the text of an output that an error event will follow."""
        completion = dataclasses.replace(output.completion, finish_reason=None)
        if not completion.text:
            return b""
        return self._chunk(self._choice(completion, self._delta(completion)))

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _delta(self, completion: CompletionOutput) -> dict[str, Any]:
        if not self.is_chat:
            return {"text": completion.text}
        return {"delta": {"content": completion.text} if completion.text else {}}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        frame = self._frame(self._chunk_name, [choice])
        if self.include_usage:
            # OpenAI: present on every chunk, filled on the last.
            frame["usage"] = None
        return _event(frame)

    def _frame(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, completion: CompletionOutput, content: dict[str, Any]) -> dict[str, Any]:
        reason = completion.finish_reason
        choice = {
            "index": completion.index,
            **content,
            "logprobs": None,
            "finish_reason": None if reason is None else _FINISH_REASONS[reason],
        }
        if reason is not None:
            choice["stop_reason"] = completion.stop_reason
        return choice


def usage_object(usage: Usage | None) -> dict[str, Any] | None:
    """Return OpenAI's usage object."""
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def _event(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"
