"""The bodies of OpenAI's completion requests: which fields are taken, and which are refused."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from pdserve_common.engine_types import RequestOutputKind, SamplingParams
from pdserve_common.errors import InvalidRequestError
from pdserve_router.input_processor import ChatMessage

# OpenAI's default for /v1/completions; chat answers go on to the end.
COMPLETION_MAX_TOKENS = 16

# Known to OpenAI's clients and not served yet: the values that ask for nothing.
_UNSERVED: Mapping[str, tuple[object, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False, 0),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "prompt_cache_key": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None,),
    "web_search_options": (None,),
}


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None


class GenerationBody(BaseModel):
    """The fields that both endpoints share. null means the default, as with OpenAI."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None  # for abuse reports, which we make none of
    safety_identifier: str | None = None  # likewise
    # Not OpenAI's; named as in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def output_token_limit(self) -> int | None:
        return self.max_tokens

    def sampling_params(self) -> SamplingParams:
        values: dict[str, Any] = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if self.stop is not None:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            values["stop_token_ids"] = tuple(self.stop_token_ids)
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(max_tokens=self.output_token_limit, output_kind=kind, **values)


_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any

    @property
    def output_token_limit(self) -> int | None:
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def prompt_input(self) -> dict[str, Any]:
        """Return the prompt as fields of a GenerationRequest."""
        prompt = self.prompt
        # A batch of one is what many clients send for a single prompt.
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise InvalidRequestError(
                    f"prompt has {len(prompt)} prompts: more than 1 is not served yet",
                    field="prompt",
                )
            prompt = prompt[0]
        if isinstance(prompt, str):
            return {"text": prompt}
        if isinstance(prompt, list) and all(type(item) is int for item in prompt):
            return {"token_ids": tuple(prompt)}
        raise InvalidRequestError(
            "prompt must be a string, a list of token ids, or a list of one of these",
            field="prompt",
        )


class ChatMessageBody(BaseModel):
    """One message. The fields that answers have may come back as null."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: str
    content: Any
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None
    annotations: list[Any] | None = None


class ChatCompletionBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessageBody]
    max_completion_tokens: int | None = None

    @property
    def output_token_limit(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is "
                f"{self.max_completion_tokens}, set one of them",
                field="max_tokens",
            )
        return self.max_completion_tokens

    def prompt_input(self) -> dict[str, Any]:
        """Return the prompt as fields of a GenerationRequest."""
        messages = [
            ChatMessage(role=message.role, content=_content(message.content, index))
            for index, message in enumerate(self.messages)
        ]
        return {"messages": messages}


Body = TypeVar("Body", bound=GenerationBody)


def parse_body(cls: type[Body], raw: bytes) -> Body:
    """Parse a request's JSON. Raises InvalidRequestError naming the field."""
    try:
        values = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"body is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidRequestError("body must be a JSON object")
    for name in _UNSERVED.keys() & values.keys():
        _check_unserved(name, values.pop(name))
    try:
        body = cls.model_validate(values)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False)[0]) from error
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", field="stream_options")
    return body


def _check_unserved(name: str, value: object) -> None:
    # The type too: 0 == False and 1 == True.
    if not any(type(value) is type(unused) and value == unused for unused in _UNSERVED[name]):
        raise InvalidRequestError(f"{name} is set: not served yet, leave it unset", field=name)


def _invalid(details: ErrorDetails) -> InvalidRequestError:
    path = ""
    for part in details["loc"]:
        # Branches of a union come as the name of a type.
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("str", "list[str]"):
            path += f".{part}" if path else part
    path = path[:256]
    if details["type"] == "extra_forbidden":
        message = f"{path} is not a field of this request"
    elif details["type"] == "missing":
        message = f"{path} is missing"
    else:
        message = f"{path}: {details['msg'][:1].lower()}{details['msg'][1:]}"
    return InvalidRequestError(message, field=path)


def _content(content: object, index: int) -> str:
    """Return a message's text: a string, or a list of text parts."""
    field = f"messages[{index}].content"
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{field} must be a string or a list of parts", field=field)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidRequestError(
                f"{field} has a part of type {str(kind)[:64]!r}, only 'text' is served", field=field
            )
        text = part.get("text")
        if not isinstance(text, str) or part.keys() != {"type", "text"}:
            raise InvalidRequestError(f"{field} has a part without plain text", field=field)
        texts.append(text)
    return "".join(texts)
