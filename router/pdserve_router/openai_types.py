"""The bodies of OpenAI's completion requests: which fields are taken, and which are refused."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from pdserve_common.engine_types import (
    EarlyStopping,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from pdserve_common.errors import InvalidRequestError
from pdserve_common.validation import MAX_LOGPROBS
from pdserve_router.input_processor import ChatMessage
from pdserve_router.request_limits import (
    MAX_ANNOTATIONS,
    MAX_CONTENT_PARTS,
    MAX_ENTRIES,
    check_num_entries,
)

# OpenAI's default for /v1/completions; chat answers go on to the end.
COMPLETION_MAX_TOKENS = 16
# More than there are.
_MAX_FIELDS = 100
# Describing a million mistakes takes gigabytes, and seconds in which nobody else is served.
_MAX_ERRORS = 100
_TOO_MANY = "too_many_mistakes"
_TOO_MANY_TEXT = "has {num_errors} unknown or wrong entries, too many to name one"

_Item = TypeVar("_Item")
# Wrong items are as many as fit into a body: the first one is enough.
Items = Annotated[list[_Item], Field(fail_fast=True)]

_EARLY_STOPPING: Mapping[bool | str, EarlyStopping] = {
    False: EarlyStopping.FALSE,
    True: EarlyStopping.TRUE,
    "never": EarlyStopping.NEVER,
}

# Known to OpenAI's clients and not served yet: the values that ask for nothing.
_UNSERVED: Mapping[str, tuple[object, ...]] = {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
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
    "verbosity": (None,),
    "web_search_options": (None,),
}


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None


class RepetitionDetectionBody(BaseModel):
    """End an answer whose last tokens repeat a pattern."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


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
    stop: str | Items[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None  # for abuse reports, which we make none of
    safety_identifier: str | None = None  # likewise
    # Not OpenAI's; named as in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    prompt_logprobs: int | None = None
    bad_words: Items[str] | None = None
    allowed_token_ids: Items[int] | None = None
    logits_processors: Items[str] | None = None  # names of registered ones
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    repetition_detection: RepetitionDetectionBody | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Items[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @field_validator("*", mode="wrap")
    @classmethod
    def _count_mistakes(cls, value: object, validate: ValidatorFunctionWrapHandler) -> object:
        """Make one of too many, so that the field can be named."""
        try:
            return validate(value)
        except ValidationError as error:
            if error.error_count() <= _MAX_ERRORS:
                raise
            num_errors = {"num_errors": error.error_count()}
            raise PydanticCustomError(_TOO_MANY, _TOO_MANY_TEXT, num_errors) from error

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def output_token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def echoes_prompt(self) -> bool:
        """The answer begins with the prompt."""
        return False

    @property
    def is_prompt_only(self) -> bool:
        """The prompt back, usually with its logprobs, and no answer: how prompts are scored."""
        return False

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many of the top tokens to show for each one of the answer."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many of the top tokens to show for each one of the prompt."""
        return self.prompt_logprobs

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError for what SamplingParams cannot say."""
        values: dict[str, Any] = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        for name in _SEQUENCE_FIELDS:
            if (value := getattr(self, name)) is not None:
                values[name] = tuple(value)
        if self.stop is not None:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias is not None:
            values["logit_bias"] = {_token_id(k): bias for k, bias in self.logit_bias.items()}
        if self.early_stopping is not None:
            values["early_stopping"] = _EARLY_STOPPING[self.early_stopping]
        if self.repetition_detection is not None:
            values["repetition_detection"] = RepetitionDetectionParams(
                **self.repetition_detection.model_dump()
            )
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(
            max_tokens=self.output_token_limit,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            output_kind=kind,
            **values,
        )


_SAMPLING_FIELDS = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_k",
    "min_p",
    "use_beam_search",
    "length_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
_SEQUENCE_FIELDS = ("stop_token_ids", "bad_words", "allowed_token_ids", "logits_processors")


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def echoes_prompt(self) -> bool:
        return bool(self.echo)

    @property
    def is_prompt_only(self) -> bool:
        return self.echoes_prompt and self.max_tokens == 0

    @property
    def output_token_limit(self) -> int | None:
        if self.is_prompt_only:
            # Engines generate at least one token; it is not shown.
            return 1
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        # The prompt is part of an echoed answer.
        is_default = self.echoes_prompt and self.prompt_logprobs is None
        return self.logprobs if is_default else self.prompt_logprobs

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

    messages: Items[ChatMessageBody]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs is {top}, must be 0 to {MAX_LOGPROBS}", field="top_logprobs"
            )
        if top and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", field="top_logprobs")
        return top if self.logprobs else None

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
        for index, message in enumerate(self.messages):
            check_num_entries(
                f"messages[{index}].annotations", message.annotations, MAX_ANNOTATIONS
            )
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
    if len(values) > _MAX_FIELDS:
        raise InvalidRequestError(f"body has {len(values)} fields, at most {_MAX_FIELDS}")
    for name in MAX_ENTRIES.keys() & values.keys():
        check_num_entries(name, values[name], MAX_ENTRIES[name])
    for name in _UNSERVED.keys() & values.keys():
        _check_unserved(name, values.pop(name))
    try:
        body = cls.model_validate(values)
    except ValidationError as error:
        raise _invalid(error) from error
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", field="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError(
            "prompt_logprobs is set with stream: true, chunks have no place for it",
            field="prompt_logprobs",
        )
    return body


def _check_unserved(name: str, value: object) -> None:
    # The type too: 0 == False and 1 == True.
    if not any(type(value) is type(unused) and value == unused for unused in _UNSERVED[name]):
        raise InvalidRequestError(f"{name} is set: not served yet, leave it unset", field=name)


_BRANCHES = ("str", "list[str]", "bool", "literal['never']")


def _invalid(error: ValidationError) -> InvalidRequestError:
    if error.error_count() > _MAX_ERRORS:
        return InvalidRequestError(
            f"body has {error.error_count()} unknown or wrong fields, too many to name one"
        )
    return _first(error.errors(include_url=False, include_input=False)[0])


def _first(details: ErrorDetails) -> InvalidRequestError:
    path = ""
    for part in details["loc"]:
        # Branches of a union come as the name of a type.
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _BRANCHES:
            path += f".{part}" if path else part
    path = path[:256]
    if details["type"] == "extra_forbidden":
        message = f"{path} is not a field of this request"
    elif details["type"] == "missing":
        message = f"{path} is missing"
    elif details["type"] == _TOO_MANY:
        message = f"{path} {details['msg']}"
    else:
        message = f"{path}: {details['msg'][:1].lower()}{details['msg'][1:]}"
    return InvalidRequestError(message, field=path)


def _token_id(key: str) -> int:
    """Read a key of logit_bias; JSON's keys are strings."""
    # Numbers of this many digits are out of every vocabulary already.
    if not (key.isascii() and key.isdigit() and len(key) <= 20):
        raise InvalidRequestError(
            f"logit_bias has key {key[:64]!r}, must be a token id", field="logit_bias"
        )
    return int(key)


def _content(content: object, index: int) -> str:
    """Return a message's text: a string, or a list of text parts."""
    field = f"messages[{index}].content"
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{field} must be a string or a list of parts", field=field)
    check_num_entries(field, content, MAX_CONTENT_PARTS)
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
