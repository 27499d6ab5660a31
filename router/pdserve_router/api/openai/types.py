"""The bodies of OpenAI's completion requests: the fields that are served."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, WithJsonSchema

from pdserve_common.errors import InvalidRequestError
from pdserve_common.limits.validation import MAX_LOGPROBS, MAX_SEED
from pdserve_common.types.sampling_params import (
    EarlyStopping,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from pdserve_router.api.openai.fields import REFUSED, REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS
from pdserve_router.api.openai.messages import ChatMessageBody, chat_messages
from pdserve_router.api.openai.model import (
    CONFIG,
    PROMPTS_SCHEMA,
    Int,
    Items,
    RequestBody,
    prompt_input,
    prompt_list,
)
from pdserve_router.api.openai.structured import (
    Constraint,
    JsonSchema,
    PredictionBody,
    ResponseFormatBody,
    StructuredOutputsBody,
    constraint_of,
)
from pdserve_router.api.openai.tools import ToolChoice, Tools, tool_use
from pdserve_router.requests.input.request_limits import MAX_PROMPTS
from pdserve_router.requests.input.tool_use import ToolUse

# OpenAI's default for /v1/completions; chat answers go on to the end.
COMPLETION_MAX_TOKENS = 16
# The range of int64, which OpenAI's seed is.
MIN_SEED = -(2**63)
_EARLY_STOPPING: Mapping[bool | str, EarlyStopping] = {
    False: EarlyStopping.FALSE,
    True: EarlyStopping.TRUE,
    "never": EarlyStopping.NEVER,
}


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = CONFIG

    include_usage: bool | None = None
    """One more chunk at the end, with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """With include_usage: each chunk has the usage of its choice so far."""
    include_metrics: bool | None = None
    """The last chunk, one without choices, has `metrics`: where the time went."""
    include_obfuscation: bool | None = None
    """Without effect: nothing is added to hide how long a text is."""


class RepetitionDetectionBody(BaseModel):
    """End an answer whose last tokens repeat a pattern."""

    model_config = CONFIG

    max_pattern_size: Int
    """Tokens of the longest pattern that is looked for."""
    min_pattern_size: Int = 1
    """Tokens of the shortest one."""
    min_count: Int = 2
    """How often it has to come."""


class GenerationBody(RequestBody):
    """The fields that all endpoints share that generate."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = REFUSED

    model: str | None = None
    """The served model's name; may be left out."""
    stream: bool | None = None
    """Server-sent events instead of one answer."""
    stream_options: StreamOptions | None = None
    """Needs stream: true."""
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    """Tokens are drawn from the likeliest of this total probability."""
    seed: Int | None = None
    """The same seed gives the same answer; drawn if unset, and told in the header pdserve-seed."""
    stop: str | Items[str] | None = None
    """At most 16 texts that end an answer; not part of it."""
    presence_penalty: float | None = None
    """-2 to 2, for tokens that the answer has already."""
    frequency_penalty: float | None = None
    """-2 to 2, for each time that the answer has them."""
    logit_bias: dict[str, float] | None = None
    """By token id, -100 to 100."""
    top_k: Int | None = None
    """Tokens are drawn from this many; 0 or -1: all."""
    min_p: float | None = None
    """Less likely tokens are left out, relative to the likeliest."""
    repetition_penalty: float | None = None
    """Above 1 for tokens of prompt and answer."""
    bad_words: Items[str] | None = None
    """Texts that do not come."""
    allowed_token_ids: Items[int] | None = None
    """No others come."""
    logits_processors: Items[str] | None = None
    """Names of processors that workers have registered."""
    repetition_detection: RepetitionDetectionBody | None = None
    """Ends an answer that has begun to loop."""
    min_tokens: Int | None = None
    """No end before."""
    max_draft_tokens: Int | None = None
    """Tokens that are guessed at a time, at most, which changes none; 0: none."""
    ignore_eos: bool | None = None
    """The model's end token is a token like others."""
    stop_token_ids: Items[int] | None = None
    """Tokens that end an answer."""
    skip_special_tokens: bool | None = None
    """They are not in the text, unless this is false."""
    spaces_between_special_tokens: bool | None = None
    """Spaces between special tokens that are in the text, where the tokenizer writes any."""
    include_stop_str_in_output: bool | None = None
    """A stop string that came is part of the answer."""
    structured_outputs: StructuredOutputsBody | None = None
    """What an answer has to be, in vLLM's words: json, regex, choice, grammar, structural_tag."""
    truncate_prompt_tokens: Int | None = None
    """Only the prompt's last tokens count, this many; -1: as many as fit beside max_tokens."""
    priority: Int | None = None
    """Lower is first."""
    cache_salt: str | None = None
    """Prefixes are shared only with requests of the same salt."""
    request_id: str | None = None
    """The request's name; the header x-request-id goes first."""
    user: Any = None
    """The session, a text of at most 256 characters; the header x-session-id goes first."""

    @property
    @abstractmethod
    def output_token_limit(self) -> int | None:
        """How many tokens an answer has at most."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many of the top tokens to show for each one of the answer."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many of the top tokens to show for each one of the prompt."""
        return None

    @property
    def echoes_prompt(self) -> bool:
        """The answer begins with the prompt."""
        return False

    @property
    def shows_reasoning(self) -> bool:
        """Reasoning is told, apart from what is said."""
        return True

    @property
    def shows_prompt_logprobs(self) -> bool:
        """They stand in the answer, apart from the prompt's text."""
        return False

    @property
    def returns_token_ids(self) -> bool:
        """The answer has its tokens, and those of the prompt."""
        return False

    @property
    def is_prompt_only(self) -> bool:
        """The prompt back, usually with its logprobs, and no answer: how prompts are scored."""
        return False

    @property
    def repeated_fields(self) -> bytes:
        """A JSON object with what an answer repeats of its request; b"" if it repeats nothing."""
        return b""

    def own_error(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return an error of the prompt with the name that the prompt has in this body."""
        return error

    @abstractmethod
    def prompt_inputs(self) -> list[dict[str, Any]]:
        """Return each prompt as fields of a GenerationRequest. Raises InvalidRequestError."""

    @abstractmethod
    def constraint(self) -> Constraint | None:
        """Return what an answer has to be. Raises InvalidRequestError for two constraints."""

    def check_stream(self) -> None:
        """Raise InvalidRequestError for what does not go with a stream, or only with one."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", field="stream_options")

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError for what SamplingParams cannot say."""
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(
            max_tokens=self.output_token_limit,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            output_kind=kind,
            **self._sampling_values(),
        )

    def _sampling_values(self) -> dict[str, Any]:
        values = self._set_values(_SAMPLING_FIELDS)
        if self.seed is not None:
            values["seed"] = _unsigned(self.seed)
        if self.allowed_token_ids == []:
            raise InvalidRequestError(
                "allowed_token_ids has 0 ids, needs at least 1", field="allowed_token_ids"
            )
        values |= {name: tuple(value) for name, value in self._set_values(_SEQUENCE_FIELDS).items()}
        if self.stop is not None:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias is not None:
            values["logit_bias"] = {_token_id(k): bias for k, bias in self.logit_bias.items()}
        if self.repetition_detection is not None:
            values["repetition_detection"] = RepetitionDetectionParams(
                **self.repetition_detection.model_dump()
            )
        return values

    def _set_values(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_k",
    "min_p",
    "min_tokens",
    "max_draft_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
_SEQUENCE_FIELDS = ("stop_token_ids", "bad_words", "allowed_token_ids", "logits_processors")


class ChoicesBody(GenerationBody):
    """The fields that completions and chats share: their answers are choices."""

    n: Int | None = None
    """Answers to each prompt, at most 64."""
    max_tokens: Int | None = None
    """Tokens of an answer: 16 for a completion, all that fit for a chat, unless it is set."""
    max_completion_tokens: Int | None = None
    """The newer name of max_tokens."""
    prompt_logprobs: Int | None = None
    """Log-probabilities of the prompt, and of this many others at each place."""
    best_of: Int | None = None
    """Answers that are generated; the n likeliest are returned. Not with a stream."""
    use_beam_search: bool | None = None
    """Keep the n likeliest beams. Not with a stream."""
    length_penalty: float | None = None
    """For beam search: the power of the length that scores are divided by."""
    early_stopping: bool | Literal["never"] | None = None
    """For beam search: when it ends."""
    response_format: ResponseFormatBody | None = None
    """What an answer has to be: text, json_object, json_schema or structural_tag."""
    guided_json: JsonSchema = None
    """The older name of structured_outputs.json."""
    guided_regex: str | None = None
    """The older name of structured_outputs.regex."""
    guided_choice: Items[str] | None = None
    """The older name of structured_outputs.choice."""
    guided_grammar: str | None = None
    """The older name of structured_outputs.grammar."""
    return_token_ids: bool | None = None
    """token_ids of each choice, and prompt_token_ids."""

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

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def shows_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None

    @property
    def returns_token_ids(self) -> bool:
        return bool(self.return_token_ids)

    def constraint(self) -> Constraint | None:
        kinds = ("json", "regex", "choice", "grammar")
        guided = {kind: getattr(self, f"guided_{kind}") for kind in kinds}
        return constraint_of(self.response_format, self.structured_outputs, guided)

    def check_stream(self) -> None:
        super().check_stream()
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs is set with stream: true, chunks have no place for it",
                field="prompt_logprobs",
            )

    def _sampling_values(self) -> dict[str, Any]:
        names = ("n", "best_of", "use_beam_search", "length_penalty")
        values = super()._sampling_values() | self._set_values(names)
        if self.early_stopping is not None:
            values["early_stopping"] = _EARLY_STOPPING[self.early_stopping]
        return values


class CompletionBody(ChoicesBody):
    """POST /v1/completions."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {**REFUSED, **REFUSED_IN_COMPLETIONS}

    prompt: Annotated[Any, WithJsonSchema(PROMPTS_SCHEMA)]
    """A text, a list of token ids, or a list of these: several prompts, at most 128."""
    echo: bool | None = None
    """The answer begins with the prompt; with max_tokens 0 it is only scored."""
    logprobs: Int | None = None
    """Log-probabilities of the answer, and of this many others at each place."""
    add_special_tokens: bool | None = None
    """The model's special tokens around a prompt of text, unless this is false."""

    @property
    def echoes_prompt(self) -> bool:
        return bool(self.echo)

    @property
    def is_prompt_only(self) -> bool:
        return self.echoes_prompt and super().output_token_limit == 0

    @property
    def output_token_limit(self) -> int | None:
        if self.is_prompt_only:
            # Engines generate at least one token; it is not shown.
            return 1
        limit = super().output_token_limit
        return COMPLETION_MAX_TOKENS if limit is None else limit

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        # The prompt is part of an echoed answer.
        is_default = self.echoes_prompt and self.prompt_logprobs is None
        return self.logprobs if is_default else self.prompt_logprobs

    def prompt_inputs(self) -> list[dict[str, Any]]:
        """Return each prompt as fields of a GenerationRequest."""
        prompts = prompt_list(self.prompt)
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequestError(
                f"prompt has {len(prompts)} prompts, at most {MAX_PROMPTS}", field="prompt"
            )
        special = {"add_special_tokens": self.add_special_tokens is not False}
        return [prompt_input(prompt, field="prompt") | special for prompt in prompts]


class ChatCompletionBody(ChoicesBody):
    """POST /v1/chat/completions."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {**REFUSED, **REFUSED_IN_CHAT}

    messages: Items[ChatMessageBody]
    """The conversation, oldest first."""
    logprobs: bool | None = None
    """Log-probabilities of the answer."""
    top_logprobs: Int | None = None
    """And of this many others at each place, at most 20."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template, such as enable_thinking."""
    reasoning_effort: str | None = None
    """A variable of the chat template too."""
    include_reasoning: bool | None = None
    """false: an answer is told without its reasoning."""
    tools: Tools | None = None
    """Functions that the model may call, at most 1024; the chat template has to know of them."""
    tool_choice: ToolChoice = None
    """none, auto, required, a function's name, or allowed_tools with a mode."""
    parallel_tool_calls: bool | None = None
    """false: only the first call of an answer is told."""
    prediction: PredictionBody | None = None
    """What the answer may be like: a hint for speed, which changes no token."""

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

    def prompt_inputs(self) -> list[dict[str, Any]]:
        """Return the prompt as fields of a GenerationRequest."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        prompt = {
            "messages": chat_messages(self.messages),
            "tools": self.tool_use(),
            "template_variables": variables,
            "prediction": self.prediction.text if self.prediction is not None else "",
        }
        return [prompt]

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False

    def tool_use(self) -> ToolUse | None:
        """Return what an answer may call; None if nothing."""
        is_parallel = self.parallel_tool_calls is not False
        return tool_use(self.tools, self.tool_choice, is_parallel=is_parallel)


def _unsigned(seed: int) -> int:
    """Return OpenAI's seed, which may be negative, as the engine has it."""
    if not MIN_SEED <= seed <= MAX_SEED:
        raise InvalidRequestError(f"seed is {seed}, must be {MIN_SEED} to {MAX_SEED}", field="seed")
    return seed & MAX_SEED


def _token_id(key: str) -> int:
    """Read a key of logit_bias; JSON's keys are strings."""
    # Numbers of this many digits are out of every vocabulary already.
    if not (key.isascii() and key.isdigit() and len(key) <= 20):
        raise InvalidRequestError(
            f"logit_bias has key {key[:64]!r}, must be a token id", field="logit_bias"
        )
    return int(key)
