from pdserve.v1 import engine_core_pb2 as _engine_core_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolChoice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_UNSPECIFIED: _ClassVar[ToolChoice]
    TOOL_CHOICE_NONE: _ClassVar[ToolChoice]
    TOOL_CHOICE_AUTO: _ClassVar[ToolChoice]
    TOOL_CHOICE_REQUIRED: _ClassVar[ToolChoice]
TOOL_CHOICE_UNSPECIFIED: ToolChoice
TOOL_CHOICE_NONE: ToolChoice
TOOL_CHOICE_AUTO: ToolChoice
TOOL_CHOICE_REQUIRED: ToolChoice

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "reasoning", "tool_calls", "tool_call_id", "parts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    parts: _containers.RepeatedCompositeFieldContainer[ContentPart]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text", "picture")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PICTURE_FIELD_NUMBER: _ClassVar[int]
    text: str
    picture: bytes
    def __init__(self, text: _Optional[str] = ..., picture: _Optional[bytes] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., strict: bool = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "tools", "tool_choice", "allowed_tools", "single_tool_call")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOOLS_FIELD_NUMBER: _ClassVar[int]
    SINGLE_TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    allowed_tools: _containers.RepeatedScalarFieldContainer[str]
    single_tool_call: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, str]] = ..., allowed_tools: _Optional[_Iterable[str]] = ..., single_tool_call: bool = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ResumedCompletion(_message.Message):
    __slots__ = ("index", "token_ids", "finished", "model_version")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    model_version: str
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: bool = ..., model_version: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "chat", "tokens", "sampling_params", "priority", "cache_salt", "lora_name", "resume", "prediction", "include_events", "data_parallel_rank")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    chat: ChatPrompt
    tokens: TokenPrompt
    sampling_params: _engine_core_pb2.SamplingParams
    priority: int
    cache_salt: str
    lora_name: str
    resume: _containers.RepeatedCompositeFieldContainer[ResumedCompletion]
    prediction: str
    include_events: bool
    data_parallel_rank: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., sampling_params: _Optional[_Union[_engine_core_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., lora_name: _Optional[str] = ..., resume: _Optional[_Iterable[_Union[ResumedCompletion, _Mapping]]] = ..., prediction: _Optional[str] = ..., include_events: bool = ..., data_parallel_rank: _Optional[int] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("type", "engine_id", "attempt", "since_queued_ns")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SINCE_QUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    type: _engine_core_pb2.EngineCoreEvent.Type
    engine_id: str
    attempt: int
    since_queued_ns: int
    def __init__(self, type: _Optional[_Union[_engine_core_pb2.EngineCoreEvent.Type, str]] = ..., engine_id: _Optional[str] = ..., attempt: _Optional[int] = ..., since_queued_ns: _Optional[int] = ...) -> None: ...

class CompletionOutput(_message.Message):
    __slots__ = ("index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_token_id", "stop_string", "error", "model_version", "reasoning", "tool_calls", "events")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cumulative_logprob: float
    logprobs: _engine_core_pb2.LogprobsLists
    finish_reason: _engine_core_pb2.FinishReason
    stop_token_id: int
    stop_string: str
    error: _engine_core_pb2.EngineError
    model_version: str
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallDelta]
    events: _containers.RepeatedCompositeFieldContainer[RequestEvent]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., cumulative_logprob: _Optional[float] = ..., logprobs: _Optional[_Union[_engine_core_pb2.LogprobsLists, _Mapping]] = ..., finish_reason: _Optional[_Union[_engine_core_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., error: _Optional[_Union[_engine_core_pb2.EngineError, _Mapping]] = ..., model_version: _Optional[str] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallDelta, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[RequestEvent, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_reasoning_tokens", "num_draft_tokens", "num_accepted_tokens", "num_prediction_draft_tokens", "num_accepted_prediction_tokens")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTION_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_prediction_draft_tokens: int
    num_accepted_prediction_tokens: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_reasoning_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_prediction_draft_tokens: _Optional[int] = ..., num_accepted_prediction_tokens: _Optional[int] = ...) -> None: ...

class RequestMetrics(_message.Message):
    __slots__ = ("router_queue_ns", "tokenize_ns", "dispatch_ns", "prefill_queue_ns", "prefill_ns", "return_ns", "ttft_ns", "kv_transfer_exposed_ns", "release_ack_ns", "decode_admit_ns", "first_decode_step_ns", "decode_return_ns", "first_itl_ns", "kv_transfer_ns", "kv_transfer_bytes", "kv_transport", "mean_itl_ns", "e2e_ns", "path", "prefill_engine_id", "decode_engine_id", "determinism", "num_redrives", "decode_queue_ns", "route_reason")
    ROUTER_QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_NS_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    RETURN_NS_FIELD_NUMBER: _ClassVar[int]
    TTFT_NS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_EXPOSED_NS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_ACK_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADMIT_NS_FIELD_NUMBER: _ClassVar[int]
    FIRST_DECODE_STEP_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_RETURN_NS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ITL_NS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_NS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MEAN_ITL_NS_FIELD_NUMBER: _ClassVar[int]
    E2E_NS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DETERMINISM_FIELD_NUMBER: _ClassVar[int]
    NUM_REDRIVES_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    ROUTE_REASON_FIELD_NUMBER: _ClassVar[int]
    router_queue_ns: int
    tokenize_ns: int
    dispatch_ns: int
    prefill_queue_ns: int
    prefill_ns: int
    return_ns: int
    ttft_ns: int
    kv_transfer_exposed_ns: int
    release_ack_ns: int
    decode_admit_ns: int
    first_decode_step_ns: int
    decode_return_ns: int
    first_itl_ns: int
    kv_transfer_ns: int
    kv_transfer_bytes: int
    kv_transport: str
    mean_itl_ns: int
    e2e_ns: int
    path: str
    prefill_engine_id: str
    decode_engine_id: str
    determinism: str
    num_redrives: int
    decode_queue_ns: int
    route_reason: str
    def __init__(self, router_queue_ns: _Optional[int] = ..., tokenize_ns: _Optional[int] = ..., dispatch_ns: _Optional[int] = ..., prefill_queue_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., return_ns: _Optional[int] = ..., ttft_ns: _Optional[int] = ..., kv_transfer_exposed_ns: _Optional[int] = ..., release_ack_ns: _Optional[int] = ..., decode_admit_ns: _Optional[int] = ..., first_decode_step_ns: _Optional[int] = ..., decode_return_ns: _Optional[int] = ..., first_itl_ns: _Optional[int] = ..., kv_transfer_ns: _Optional[int] = ..., kv_transfer_bytes: _Optional[int] = ..., kv_transport: _Optional[str] = ..., mean_itl_ns: _Optional[int] = ..., e2e_ns: _Optional[int] = ..., path: _Optional[str] = ..., prefill_engine_id: _Optional[str] = ..., decode_engine_id: _Optional[str] = ..., determinism: _Optional[str] = ..., num_redrives: _Optional[int] = ..., decode_queue_ns: _Optional[int] = ..., route_reason: _Optional[str] = ...) -> None: ...

class RequestOutput(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "prompt_logprobs", "outputs", "finished", "usage", "metrics", "seed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: _engine_core_pb2.LogprobsLists
    outputs: _containers.RepeatedCompositeFieldContainer[CompletionOutput]
    finished: bool
    usage: Usage
    metrics: RequestMetrics
    seed: int
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[_Union[_engine_core_pb2.LogprobsLists, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[CompletionOutput, _Mapping]]] = ..., finished: bool = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., metrics: _Optional[_Union[RequestMetrics, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("output",)
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    output: RequestOutput
    def __init__(self, output: _Optional[_Union[RequestOutput, _Mapping]] = ...) -> None: ...

class TextPair(_message.Message):
    __slots__ = ("text", "text_pair")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_PAIR_FIELD_NUMBER: _ClassVar[int]
    text: str
    text_pair: str
    def __init__(self, text: _Optional[str] = ..., text_pair: _Optional[str] = ...) -> None: ...

class PoolRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "pair", "tokens", "pooling_params", "priority", "cache_salt", "lora_name", "truncate_prompt_tokens", "truncate_start", "add_special_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_START_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    pair: TextPair
    tokens: TokenPrompt
    pooling_params: _engine_core_pb2.PoolingParams
    priority: int
    cache_salt: str
    lora_name: str
    truncate_prompt_tokens: int
    truncate_start: bool
    add_special_tokens: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., pair: _Optional[_Union[TextPair, _Mapping]] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., pooling_params: _Optional[_Union[_engine_core_pb2.PoolingParams, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., lora_name: _Optional[str] = ..., truncate_prompt_tokens: _Optional[int] = ..., truncate_start: bool = ..., add_special_tokens: bool = ...) -> None: ...

class PoolResponse(_message.Message):
    __slots__ = ("request_id", "model", "pooling_output", "num_prompt_tokens", "num_cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POOLING_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    pooling_output: _containers.RepeatedScalarFieldContainer[float]
    num_prompt_tokens: int
    num_cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., pooling_output: _Optional[_Iterable[float]] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatPrompt
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_model_len")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("id", "max_model_len", "parent", "tasks", "embedding_size")
    ID_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    id: str
    max_model_len: int
    parent: str
    tasks: _containers.RepeatedScalarFieldContainer[str]
    embedding_size: int
    def __init__(self, id: _Optional[str] = ..., max_model_len: _Optional[int] = ..., parent: _Optional[str] = ..., tasks: _Optional[_Iterable[str]] = ..., embedding_size: _Optional[int] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...
