"""OpenAI's answers as JSON: whole ones, chunks of a stream, and errors."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from pydantic_core import to_json

from pdserve_common.errors import InvalidRequestError, ModelNotFoundError, PdserveError
from pdserve_common.types.engine import ErrorCode, FinishReason, LogprobsLists
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.api.openai.logprobs import (
    CompletionLogprobs,
    chat_logprobs,
    prompt_logprobs_object,
)
from pdserve_router.api.openai.parts import delta_object, message_object
from pdserve_router.requests.output.answer_parser import answer_detokenizer
from pdserve_router.requests.output.outputs import CompletionOutput, RequestOutput, Usage
from pdserve_router.requests.records.request_metrics import RequestMetrics
from pdserve_router.requests.tenants.tenant_account import RateLimitError
from pdserve_router.text.detokenizer import Detokenizer
from pdserve_router.text.parts import Content, Reasoning, ToolCallDelta
from pdserve_router.text.tokenizer import Tokenizer

DONE_EVENT = b"data: [DONE]\n\n"
# No client's text is this: JSON writes its quotes otherwise.
_MARK = "\0"

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
    ErrorCode.FAILED_PRECONDITION: 409,
}

ERROR_STATUSES = frozenset(_STATUS.values())

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
    elif isinstance(error, RateLimitError):
        code = "rate_limit_exceeded"
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


# The choices of a request, and what stands beside them.
Whole = tuple[list[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """A prompt that an answer begins with."""

    text: str
    token_ids: Sequence[int]
    # One position per token, the first one empty; None if not asked for.
    logprobs: LogprobsLists | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicesFormat:
    """Writes what one prompt of a request brings, for one of the two endpoints."""

    answer_id: str
    model: str
    created: int
    is_chat: bool
    tokenizer: Tokenizer
    prompt_token_ids: Sequence[int]
    # Where its choices begin among those of all prompts, and how many they are.
    first_index: int = 0
    num_choices: int = 1
    include_usage: bool = False
    # Also in every chunk, of its choice so far.
    continuous_usage: bool = False
    include_metrics: bool = False
    returns_token_ids: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)
    shows_prompt_logprobs: bool = False
    # Also of an echoed prompt.
    shows_logprobs: bool = False
    # The prompt is echoed and nothing else is shown.
    is_prompt_only: bool = False
    shows_reasoning: bool = True
    # Choices that have calls.
    _calling: set[int] = field(default_factory=set)
    # By choice.
    _completion_logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)
    _num_tokens: dict[int, int] = field(default_factory=dict)
    # What stands around the text in an event of text alone.
    _around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)

    def first_events(self, prompt: EchoedPrompt | None = None) -> bytes:
        """Return what comes before the first text: of a chat, who speaks; of a completion the
        prompt, if that is given.
        """
        content: dict[str, Any]
        if self.is_chat:
            content = {"delta": {"role": "assistant", "content": "", "refusal": None}}
        elif prompt is not None:
            content = {"text": prompt.text}
        else:
            return b""
        completions = [CompletionOutput(index=index) for index in range(self.num_choices)]
        return b"".join(
            self._chunk(item, self._choice(item, content, self._logprobs(item, prompt)))
            for item in completions
        )

    def events(self, output: RequestOutput) -> bytes:
        """Return the events of an output that brought text or an end."""
        return b"".join(map(self._event_of, output.outputs))

    def text_event(self, text: str, token_ids: Sequence[int], *, index: int = 0) -> bytes:
        """Return the event of text alone, which has no end and is not the first of its choice."""
        if self.returns_token_ids or self.continuous_usage or self.is_prompt_only:
            return self._whole_event(_text_alone(index, text, token_ids))
        if not text:
            return b""
        if index not in self._around:
            # Writing the whole event took 2.4 us a token; only its text differs.
            event = self._whole_event(_text_alone(index, _MARK, ()))
            before, _, behind = event.rpartition(to_json(_MARK))
            self._around[index] = before, behind
        before, behind = self._around[index]
        return before + to_json(text) + behind

    def end_events(self, usage: Usage, metrics: RequestMetrics) -> bytes:
        """Return what ends a stream, whose prompts had these together."""
        events = b""
        if self.include_usage or self.include_metrics:
            frame = self._frame(self._chunk_name, [])
            if self.include_usage:
                frame["usage"] = usage_object(self._shown_usage(usage))
            if self.include_metrics:
                frame["metrics"] = metrics_object(metrics)
            events = _event(frame)
        return events + DONE_EVENT

    def text_events(self, output: RequestOutput) -> bytes:
        """Return the text of an output that an error event will follow."""
        return b"".join(
            self._event_of(
                item if item.error is None else dataclasses.replace(item, finish_reason=None)
            )
            for item in output.outputs
        )

    def whole(self, output: RequestOutput, prompt: EchoedPrompt | None = None) -> Whole:
        """Return the choices of a finished request, behind its prompt if that is given, and what
        of the prompt stands beside them.
        """
        choices = [self._whole_choice(self._shown(item), prompt) for item in output.outputs]
        of_prompt: dict[str, Any] = {}
        if self.returns_token_ids:
            of_prompt["prompt_token_ids"] = self.prompt_token_ids
        if self.shows_prompt_logprobs and output.prompt_logprobs is not None:
            logprobs = prompt_logprobs_object(output.prompt_logprobs, self.tokenizer)
            of_prompt["prompt_logprobs"] = logprobs
        if self.is_chat:
            return choices, of_prompt
        # As in vLLM: of a chat once, of a completion in each choice.
        return [{**choice, **of_prompt} for choice in choices], {}

    def answer(self, wholes: Sequence[Whole], usage: Usage, metrics: RequestMetrics) -> bytes:
        """Return the whole answer of all prompts together, as JSON."""
        name = "chat.completion" if self.is_chat else "text_completion"
        choices = [choice for whole in wholes for choice in whole[0]]
        shown = usage_object(self._shown_usage(usage))
        # An answer with logprobs may have megabytes: this is several times as fast as json.
        return to_json({**self._frame(name, choices), "usage": shown, **wholes[-1][1]})

    def error_events(self, error: PdserveError) -> bytes:
        """Return what ends a stream that has already begun."""
        return error_event(error)

    def _event_of(self, completion: CompletionOutput) -> bytes:
        if completion.is_text_alone:
            return self.text_event(completion.text, completion.token_ids, index=completion.index)
        return self._whole_event(completion)

    def _whole_event(self, completion: CompletionOutput) -> bytes:
        completion = self._shown(completion)
        is_silent = not completion.parts and completion.logprobs is None
        if self.returns_token_ids:
            is_silent = is_silent and not completion.token_ids
        if is_silent and completion.finish_reason is None:
            return b""
        content: dict[str, Any]
        if self.is_chat:
            content = {"delta": delta_object(completion.parts)}
        else:
            content = {"text": completion.text}
        choice = self._choice(completion, content, self._logprobs(completion))
        return self._chunk(completion, choice)

    def _shown(self, completion: CompletionOutput) -> CompletionOutput:
        for part in completion.parts:
            if isinstance(part, ToolCallDelta):
                self._calling.add(completion.index)
        if not self.shows_reasoning:
            parts = (part for part in completion.parts if not isinstance(part, Reasoning))
            completion = dataclasses.replace(completion, parts=tuple(parts))
        if not self.is_prompt_only:
            return completion
        is_ended = completion.finish_reason is not None
        return CompletionOutput(
            index=completion.index, finish_reason=FinishReason.LENGTH if is_ended else None
        )

    def _shown_usage(self, usage: Usage) -> Usage:
        return dataclasses.replace(usage, num_output_tokens=0) if self.is_prompt_only else usage

    def _logprobs(
        self, completion: CompletionOutput, prompt: EchoedPrompt | None = None
    ) -> dict[str, Any] | None:
        """Return the logprobs of the prompt, if that is given, and of the completion."""
        if self.is_chat:
            if completion.logprobs is None:
                return None
            return chat_logprobs(completion.logprobs, self.tokenizer)
        if completion.index not in self._completion_logprobs:
            self._completion_logprobs[completion.index] = CompletionLogprobs(
                self.tokenizer,
                answer_detokenizer(
                    self.tokenizer,
                    self.prompt_token_ids,
                    dataclasses.replace(self.params, stop=()),
                    parsing=None,
                ),
                first_offset=0 if prompt is None else len(prompt.text),
            )
        writer = self._completion_logprobs[completion.index]
        parts = []
        if prompt is not None and prompt.logprobs is not None:
            parts.append(self._prompt_logprobs(prompt, prompt.logprobs))
        if completion.logprobs is not None:
            parts.append(writer.write(completion.token_ids, completion.logprobs))
        if not parts:
            return None
        return {name: list(chain.from_iterable(part[name] for part in parts)) for name in parts[0]}

    def _prompt_logprobs(
        self, prompt: EchoedPrompt, logprobs: LogprobsLists
    ) -> dict[str, list[Any]]:
        # The tokenizer adds some to a text.
        special = self.tokenizer.special_token_ids
        added = {i for i in special if self.tokenizer.token_text(i) not in prompt.text}
        detokenizer = Detokenizer(
            self.tokenizer.backend,
            texts=self.tokenizer.texts,
            skipped=added,
            token_bytes=self.tokenizer.token_bytes,
        )
        written = CompletionLogprobs(self.tokenizer, detokenizer).write(prompt.token_ids, logprobs)
        # A tokenizer may have changed a text, which is echoed as it came.
        end = len(prompt.text)
        written["text_offset"] = [min(offset, end) for offset in written["text_offset"]]
        return written

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, completion: CompletionOutput, choice: dict[str, Any]) -> bytes:
        frame = self._frame(self._chunk_name, [choice])
        num_before = self._num_tokens.get(completion.index)
        num_tokens = self._num_tokens[completion.index] = (num_before or 0) + len(
            completion.token_ids
        )
        if self.returns_token_ids and num_before is None:
            place = frame if self.is_chat else choice
            place["prompt_token_ids"] = self.prompt_token_ids
        if self.include_usage:
            # OpenAI: present on every chunk, filled on the last.
            frame["usage"] = self._usage_so_far(num_tokens) if self.continuous_usage else None
        return _event(frame)

    def _usage_so_far(self, num_tokens: int) -> dict[str, Any]:
        num_prompt_tokens = len(self.prompt_token_ids)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }

    def _frame(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _whole_choice(
        self, completion: CompletionOutput, prompt: EchoedPrompt | None
    ) -> dict[str, Any]:
        content: dict[str, Any]
        if self.is_chat:
            content = {"message": message_object(completion.parts)}
        else:
            echoed = "" if prompt is None else prompt.text
            content = {"text": echoed + completion.text}
        return self._choice(completion, content, self._logprobs(completion, prompt))

    def _choice(
        self,
        completion: CompletionOutput,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None,
    ) -> dict[str, Any]:
        reason = completion.finish_reason
        choice = {
            "index": self.first_index + completion.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(completion),
        }
        if self.returns_token_ids:
            choice["token_ids"] = completion.token_ids
        if reason is FinishReason.REPETITION:
            # OpenAI's clients know no reason of this kind.
            choice["stop_reason"] = str(reason)
        elif reason is not None:
            choice["stop_reason"] = completion.stop_reason
        return choice

    def _finish_reason(self, completion: CompletionOutput) -> str | None:
        reason = completion.finish_reason
        if reason is FinishReason.STOP and completion.index in self._calling:
            return "tool_calls"
        return None if reason is None else _FINISH_REASONS[reason]


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_reasoning_tokens,
            "accepted_prediction_tokens": usage.num_accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.num_prediction_draft_tokens
            - usage.num_accepted_prediction_tokens,
        },
    }


def metrics_object(metrics: RequestMetrics) -> dict[str, Any]:
    """Return where a request's time went, durations in milliseconds."""
    return {f"{name}_ms": ms for name, ms in metrics.milliseconds()} | dict(metrics.facts())


def _text_alone(index: int, text: str, token_ids: Sequence[int]) -> CompletionOutput:
    parts = (Content(text),) if text else ()
    return CompletionOutput(index=index, parts=parts, token_ids=tuple(token_ids))


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"
