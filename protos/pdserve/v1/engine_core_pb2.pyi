from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_REPETITION: _ClassVar[FinishReason]

class RequestOutputKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_OUTPUT_KIND_UNSPECIFIED: _ClassVar[RequestOutputKind]
    REQUEST_OUTPUT_KIND_DELTA: _ClassVar[RequestOutputKind]
    REQUEST_OUTPUT_KIND_CUMULATIVE: _ClassVar[RequestOutputKind]
    REQUEST_OUTPUT_KIND_FINAL_ONLY: _ClassVar[RequestOutputKind]

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_FALSE: _ClassVar[EarlyStopping]
    EARLY_STOPPING_TRUE: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_ARGUMENT: _ClassVar[ErrorCode]
    ERROR_CODE_OVERLOADED: _ClassVar[ErrorCode]
    ERROR_CODE_NO_WORKER: _ClassVar[ErrorCode]
    ERROR_CODE_KV_TRANSFER_FAILED: _ClassVar[ErrorCode]
    ERROR_CODE_KV_EXPIRED: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_CANCELLED: _ClassVar[ErrorCode]
    ERROR_CODE_ENGINE_DEAD: _ClassVar[ErrorCode]
    ERROR_CODE_DRAINING: _ClassVar[ErrorCode]
    ERROR_CODE_CLIENT_TOO_SLOW: _ClassVar[ErrorCode]
    ERROR_CODE_FAILED_PRECONDITION: _ClassVar[ErrorCode]

class ErrorFault(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_FAULT_UNSPECIFIED: _ClassVar[ErrorFault]
    ERROR_FAULT_REQUEST: _ClassVar[ErrorFault]
    ERROR_FAULT_WORKER: _ClassVar[ErrorFault]
    ERROR_FAULT_PEER: _ClassVar[ErrorFault]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_REPETITION: FinishReason
REQUEST_OUTPUT_KIND_UNSPECIFIED: RequestOutputKind
REQUEST_OUTPUT_KIND_DELTA: RequestOutputKind
REQUEST_OUTPUT_KIND_CUMULATIVE: RequestOutputKind
REQUEST_OUTPUT_KIND_FINAL_ONLY: RequestOutputKind
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_FALSE: EarlyStopping
EARLY_STOPPING_TRUE: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_INVALID_ARGUMENT: ErrorCode
ERROR_CODE_OVERLOADED: ErrorCode
ERROR_CODE_NO_WORKER: ErrorCode
ERROR_CODE_KV_TRANSFER_FAILED: ErrorCode
ERROR_CODE_KV_EXPIRED: ErrorCode
ERROR_CODE_DEADLINE_EXCEEDED: ErrorCode
ERROR_CODE_CANCELLED: ErrorCode
ERROR_CODE_ENGINE_DEAD: ErrorCode
ERROR_CODE_DRAINING: ErrorCode
ERROR_CODE_CLIENT_TOO_SLOW: ErrorCode
ERROR_CODE_FAILED_PRECONDITION: ErrorCode
ERROR_FAULT_UNSPECIFIED: ErrorFault
ERROR_FAULT_REQUEST: ErrorFault
ERROR_FAULT_WORKER: ErrorFault
ERROR_FAULT_PEER: ErrorFault

class EngineError(_message.Message):
    __slots__ = ("code", "message", "retryable", "retry_after_ms", "fault")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    retryable: bool
    retry_after_ms: int
    fault: ErrorFault
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., retryable: bool = ..., retry_after_ms: _Optional[int] = ..., fault: _Optional[_Union[ErrorFault, str]] = ...) -> None: ...

class StructuredOutputsParams(_message.Message):
    __slots__ = ("json_schema", "regex", "choice", "grammar", "json_object", "structural_tag")
    class Choice(_message.Message):
        __slots__ = ("choices",)
        CHOICES_FIELD_NUMBER: _ClassVar[int]
        choices: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, choices: _Optional[_Iterable[str]] = ...) -> None: ...
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    choice: StructuredOutputsParams.Choice
    grammar: str
    json_object: bool
    structural_tag: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[StructuredOutputsParams.Choice, _Mapping]] = ..., grammar: _Optional[str] = ..., json_object: bool = ..., structural_tag: _Optional[str] = ...) -> None: ...

class RepetitionDetectionParams(_message.Message):
    __slots__ = ("max_pattern_size", "min_pattern_size", "min_count")
    MAX_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MIN_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    max_pattern_size: int
    min_pattern_size: int
    min_count: int
    def __init__(self, max_pattern_size: _Optional[int] = ..., min_pattern_size: _Optional[int] = ..., min_count: _Optional[int] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed", "use_beam_search", "length_penalty", "early_stopping", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "logits_processors", "bad_words", "logit_bias", "allowed_token_ids", "structured_outputs", "repetition_detection", "output_kind", "bad_words_token_ids", "max_draft_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    USE_BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPACES_BETWEEN_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_DETECTION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_KIND_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    n: int
    best_of: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    use_beam_search: bool
    length_penalty: float
    early_stopping: EarlyStopping
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    max_tokens: int
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    logits_processors: _containers.RepeatedScalarFieldContainer[str]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    structured_outputs: StructuredOutputsParams
    repetition_detection: RepetitionDetectionParams
    output_kind: RequestOutputKind
    bad_words_token_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    max_draft_tokens: int
    def __init__(self, n: _Optional[int] = ..., best_of: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., use_beam_search: bool = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop_str_in_output: bool = ..., ignore_eos: bool = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., detokenize: bool = ..., skip_special_tokens: bool = ..., spaces_between_special_tokens: bool = ..., logits_processors: _Optional[_Iterable[str]] = ..., bad_words: _Optional[_Iterable[str]] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., structured_outputs: _Optional[_Union[StructuredOutputsParams, _Mapping]] = ..., repetition_detection: _Optional[_Union[RepetitionDetectionParams, _Mapping]] = ..., output_kind: _Optional[_Union[RequestOutputKind, str]] = ..., bad_words_token_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...

class PoolingParams(_message.Message):
    __slots__ = ("task", "dimensions", "use_activation")
    TASK_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    USE_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    task: str
    dimensions: int
    use_activation: bool
    def __init__(self, task: _Optional[str] = ..., dimensions: _Optional[int] = ..., use_activation: bool = ...) -> None: ...

class LoraRequest(_message.Message):
    __slots__ = ("lora_name", "lora_int_id", "lora_path", "digest")
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_INT_ID_FIELD_NUMBER: _ClassVar[int]
    LORA_PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    lora_int_id: int
    lora_path: str
    digest: str
    def __init__(self, lora_name: _Optional[str] = ..., lora_int_id: _Optional[int] = ..., lora_path: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class LoraAdapter(_message.Message):
    __slots__ = ("name", "digest", "rank", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    rank: int
    path: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class LoadedLora(_message.Message):
    __slots__ = ("adapter", "is_pinned", "is_removed", "num_requests")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    IS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    adapter: LoraAdapter
    is_pinned: bool
    is_removed: bool
    num_requests: int
    def __init__(self, adapter: _Optional[_Union[LoraAdapter, _Mapping]] = ..., is_pinned: bool = ..., is_removed: bool = ..., num_requests: _Optional[int] = ...) -> None: ...

class TensorRef(_message.Message):
    __slots__ = ("content_hash", "dtype", "shape")
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    content_hash: bytes
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, content_hash: _Optional[bytes] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class MultiModalFeatureSpec(_message.Message):
    __slots__ = ("modality", "identifier", "position", "length", "data")
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    modality: str
    identifier: str
    position: int
    length: int
    data: TensorRef
    def __init__(self, modality: _Optional[str] = ..., identifier: _Optional[str] = ..., position: _Optional[int] = ..., length: _Optional[int] = ..., data: _Optional[_Union[TensorRef, _Mapping]] = ...) -> None: ...

class KvPrefixSource(_message.Message):
    __slots__ = ("engine_id", "host", "port", "num_tokens")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    host: str
    port: int
    num_tokens: int
    def __init__(self, engine_id: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class KvTransferParams(_message.Message):
    __slots__ = ("do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_host", "remote_port", "prefix_source")
    DO_REMOTE_DECODE_FIELD_NUMBER: _ClassVar[int]
    DO_REMOTE_PREFILL_FIELD_NUMBER: _ClassVar[int]
    REMOTE_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REMOTE_HOST_FIELD_NUMBER: _ClassVar[int]
    REMOTE_PORT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    do_remote_decode: bool
    do_remote_prefill: bool
    remote_engine_id: str
    remote_host: str
    remote_port: int
    prefix_source: KvPrefixSource
    def __init__(self, do_remote_decode: bool = ..., do_remote_prefill: bool = ..., remote_engine_id: _Optional[str] = ..., remote_host: _Optional[str] = ..., remote_port: _Optional[int] = ..., prefix_source: _Optional[_Union[KvPrefixSource, _Mapping]] = ...) -> None: ...

class EngineCoreRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "eos_token_id", "age_ns", "lora_request", "cache_salt", "data_parallel_rank", "prompt_embeds", "prompt_is_token_ids", "client_index", "current_wave", "priority", "trace_headers", "resumable", "external_req_id", "reasoning_ended", "reasoning_parser_kwargs", "kv_transfer_params", "attempt", "resume_output_token_ids", "timeout_ns", "fork_of", "prediction_token_ids", "client_id")
    class ReasoningParserKwarg(_message.Message):
        __slots__ = ("name", "value")
        NAME_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        name: str
        value: str
        def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class TraceHeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MM_FEATURES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    POOLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_NS_FIELD_NUMBER: _ClassVar[int]
    LORA_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    CURRENT_WAVE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACE_HEADERS_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_REQ_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_ENDED_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_KWARGS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_PARAMS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESUME_OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    mm_features: _containers.RepeatedCompositeFieldContainer[MultiModalFeatureSpec]
    sampling_params: SamplingParams
    pooling_params: PoolingParams
    eos_token_id: int
    age_ns: int
    lora_request: LoraRequest
    cache_salt: str
    data_parallel_rank: int
    prompt_embeds: TensorRef
    prompt_is_token_ids: _containers.RepeatedScalarFieldContainer[bool]
    client_index: int
    current_wave: int
    priority: int
    trace_headers: _containers.ScalarMap[str, str]
    resumable: bool
    external_req_id: str
    reasoning_ended: bool
    reasoning_parser_kwargs: _containers.RepeatedCompositeFieldContainer[EngineCoreRequest.ReasoningParserKwarg]
    kv_transfer_params: KvTransferParams
    attempt: int
    resume_output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    timeout_ns: int
    fork_of: str
    prediction_token_ids: _containers.RepeatedScalarFieldContainer[int]
    client_id: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., mm_features: _Optional[_Iterable[_Union[MultiModalFeatureSpec, _Mapping]]] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., pooling_params: _Optional[_Union[PoolingParams, _Mapping]] = ..., eos_token_id: _Optional[int] = ..., age_ns: _Optional[int] = ..., lora_request: _Optional[_Union[LoraRequest, _Mapping]] = ..., cache_salt: _Optional[str] = ..., data_parallel_rank: _Optional[int] = ..., prompt_embeds: _Optional[_Union[TensorRef, _Mapping]] = ..., prompt_is_token_ids: _Optional[_Iterable[bool]] = ..., client_index: _Optional[int] = ..., current_wave: _Optional[int] = ..., priority: _Optional[int] = ..., trace_headers: _Optional[_Mapping[str, str]] = ..., resumable: bool = ..., external_req_id: _Optional[str] = ..., reasoning_ended: bool = ..., reasoning_parser_kwargs: _Optional[_Iterable[_Union[EngineCoreRequest.ReasoningParserKwarg, _Mapping]]] = ..., kv_transfer_params: _Optional[_Union[KvTransferParams, _Mapping]] = ..., attempt: _Optional[int] = ..., resume_output_token_ids: _Optional[_Iterable[int]] = ..., timeout_ns: _Optional[int] = ..., fork_of: _Optional[str] = ..., prediction_token_ids: _Optional[_Iterable[int]] = ..., client_id: _Optional[str] = ...) -> None: ...

class LogprobsLists(_message.Message):
    __slots__ = ("positions",)
    class Position(_message.Message):
        __slots__ = ("token_ids", "logprobs", "sampled_token_rank", "decoded_tokens")
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        SAMPLED_TOKEN_RANK_FIELD_NUMBER: _ClassVar[int]
        DECODED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        logprobs: _containers.RepeatedScalarFieldContainer[float]
        sampled_token_rank: int
        decoded_tokens: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., sampled_token_rank: _Optional[int] = ..., decoded_tokens: _Optional[_Iterable[str]] = ...) -> None: ...
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[LogprobsLists.Position]
    def __init__(self, positions: _Optional[_Iterable[_Union[LogprobsLists.Position, _Mapping]]] = ...) -> None: ...

class EngineCoreEvent(_message.Message):
    __slots__ = ("type", "monotonic_ns")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TYPE_UNSPECIFIED: _ClassVar[EngineCoreEvent.Type]
        TYPE_QUEUED: _ClassVar[EngineCoreEvent.Type]
        TYPE_SCHEDULED: _ClassVar[EngineCoreEvent.Type]
        TYPE_PREEMPTED: _ClassVar[EngineCoreEvent.Type]
        TYPE_KV_SESSION_OPENED: _ClassVar[EngineCoreEvent.Type]
        TYPE_KV_TRANSFER_STARTED: _ClassVar[EngineCoreEvent.Type]
        TYPE_KV_TRANSFER_FINISHED: _ClassVar[EngineCoreEvent.Type]
        TYPE_KV_ACCEPTED: _ClassVar[EngineCoreEvent.Type]
        TYPE_KV_LOST: _ClassVar[EngineCoreEvent.Type]
    TYPE_UNSPECIFIED: EngineCoreEvent.Type
    TYPE_QUEUED: EngineCoreEvent.Type
    TYPE_SCHEDULED: EngineCoreEvent.Type
    TYPE_PREEMPTED: EngineCoreEvent.Type
    TYPE_KV_SESSION_OPENED: EngineCoreEvent.Type
    TYPE_KV_TRANSFER_STARTED: EngineCoreEvent.Type
    TYPE_KV_TRANSFER_FINISHED: EngineCoreEvent.Type
    TYPE_KV_ACCEPTED: EngineCoreEvent.Type
    TYPE_KV_LOST: EngineCoreEvent.Type
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_NS_FIELD_NUMBER: _ClassVar[int]
    type: EngineCoreEvent.Type
    monotonic_ns: int
    def __init__(self, type: _Optional[_Union[EngineCoreEvent.Type, str]] = ..., monotonic_ns: _Optional[int] = ...) -> None: ...

class PrefillStats(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_cached_tokens", "queue_ns", "prefill_ns", "decode_queue_ns", "num_chunks")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    queue_ns: int
    prefill_ns: int
    decode_queue_ns: int
    num_chunks: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., queue_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., decode_queue_ns: _Optional[int] = ..., num_chunks: _Optional[int] = ...) -> None: ...

class DraftStats(_message.Message):
    __slots__ = ("source", "num_draft_tokens", "num_accepted_tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: str
    num_draft_tokens: int
    num_accepted_tokens: int
    def __init__(self, source: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ...) -> None: ...

class KvTransferStats(_message.Message):
    __slots__ = ("num_bytes", "num_blocks", "transport", "num_reads", "transfer_ns", "exposed_ns", "release_ack_ns", "decode_admit_ns", "first_decode_step_ns", "prefill_stats")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NUM_READS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_NS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_NS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_ACK_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADMIT_NS_FIELD_NUMBER: _ClassVar[int]
    FIRST_DECODE_STEP_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STATS_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    num_blocks: int
    transport: str
    num_reads: int
    transfer_ns: int
    exposed_ns: int
    release_ack_ns: int
    decode_admit_ns: int
    first_decode_step_ns: int
    prefill_stats: PrefillStats
    def __init__(self, num_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., transport: _Optional[str] = ..., num_reads: _Optional[int] = ..., transfer_ns: _Optional[int] = ..., exposed_ns: _Optional[int] = ..., release_ack_ns: _Optional[int] = ..., decode_admit_ns: _Optional[int] = ..., first_decode_step_ns: _Optional[int] = ..., prefill_stats: _Optional[_Union[PrefillStats, _Mapping]] = ...) -> None: ...

class KvLost(_message.Message):
    __slots__ = ("num_confirmed_tokens", "reason", "message")
    NUM_CONFIRMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    num_confirmed_tokens: int
    reason: str
    message: str
    def __init__(self, num_confirmed_tokens: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class EngineCoreOutput(_message.Message):
    __slots__ = ("request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs", "pooling_output", "finish_reason", "stop_token_id", "stop_string", "events", "kv_transfer_params", "trace_headers", "prefill_stats", "kv_transfer_stats", "routed_experts", "num_nans_in_logits", "attempt", "first_token_index", "error", "kv_lost", "draft_stats")
    class TraceHeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NEW_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NEW_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLING_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_PARAMS_FIELD_NUMBER: _ClassVar[int]
    TRACE_HEADERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STATS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_STATS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_NANS_IN_LOGITS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    KV_LOST_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STATS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    new_token_ids: _containers.RepeatedScalarFieldContainer[int]
    new_logprobs: LogprobsLists
    new_prompt_logprobs: LogprobsLists
    pooling_output: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: FinishReason
    stop_token_id: int
    stop_string: str
    events: _containers.RepeatedCompositeFieldContainer[EngineCoreEvent]
    kv_transfer_params: KvTransferParams
    trace_headers: _containers.ScalarMap[str, str]
    prefill_stats: PrefillStats
    kv_transfer_stats: KvTransferStats
    routed_experts: _containers.RepeatedScalarFieldContainer[int]
    num_nans_in_logits: int
    attempt: int
    first_token_index: int
    error: EngineError
    kv_lost: KvLost
    draft_stats: _containers.RepeatedCompositeFieldContainer[DraftStats]
    def __init__(self, request_id: _Optional[str] = ..., new_token_ids: _Optional[_Iterable[int]] = ..., new_logprobs: _Optional[_Union[LogprobsLists, _Mapping]] = ..., new_prompt_logprobs: _Optional[_Union[LogprobsLists, _Mapping]] = ..., pooling_output: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., events: _Optional[_Iterable[_Union[EngineCoreEvent, _Mapping]]] = ..., kv_transfer_params: _Optional[_Union[KvTransferParams, _Mapping]] = ..., trace_headers: _Optional[_Mapping[str, str]] = ..., prefill_stats: _Optional[_Union[PrefillStats, _Mapping]] = ..., kv_transfer_stats: _Optional[_Union[KvTransferStats, _Mapping]] = ..., routed_experts: _Optional[_Iterable[int]] = ..., num_nans_in_logits: _Optional[int] = ..., attempt: _Optional[int] = ..., first_token_index: _Optional[int] = ..., error: _Optional[_Union[EngineError, _Mapping]] = ..., kv_lost: _Optional[_Union[KvLost, _Mapping]] = ..., draft_stats: _Optional[_Iterable[_Union[DraftStats, _Mapping]]] = ...) -> None: ...

class SchedulerStats(_message.Message):
    __slots__ = ("num_running_reqs", "num_waiting_reqs", "num_waiting_tokens", "num_total_blocks", "num_free_blocks", "num_cached_blocks", "num_open_kv_sessions", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "step_num_tokens", "step_duration_ns", "num_common_prefix_blocks", "num_slots", "num_waiting_for_decode_reqs", "num_waiting_for_fsm_reqs", "num_late_masks", "num_loras", "num_lora_loads", "num_lora_evictions", "num_lora_steps")
    NUM_RUNNING_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_KV_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMMON_PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FOR_DECODE_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FOR_FSM_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_MASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LORAS_FIELD_NUMBER: _ClassVar[int]
    NUM_LORA_LOADS_FIELD_NUMBER: _ClassVar[int]
    NUM_LORA_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LORA_STEPS_FIELD_NUMBER: _ClassVar[int]
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_tokens: int
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_open_kv_sessions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    step_num_tokens: int
    step_duration_ns: int
    num_common_prefix_blocks: int
    num_slots: int
    num_waiting_for_decode_reqs: int
    num_waiting_for_fsm_reqs: int
    num_late_masks: int
    num_loras: int
    num_lora_loads: int
    num_lora_evictions: int
    num_lora_steps: int
    def __init__(self, num_running_reqs: _Optional[int] = ..., num_waiting_reqs: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_open_kv_sessions: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., step_num_tokens: _Optional[int] = ..., step_duration_ns: _Optional[int] = ..., num_common_prefix_blocks: _Optional[int] = ..., num_slots: _Optional[int] = ..., num_waiting_for_decode_reqs: _Optional[int] = ..., num_waiting_for_fsm_reqs: _Optional[int] = ..., num_late_masks: _Optional[int] = ..., num_loras: _Optional[int] = ..., num_lora_loads: _Optional[int] = ..., num_lora_evictions: _Optional[int] = ..., num_lora_steps: _Optional[int] = ...) -> None: ...

class UtilityOutput(_message.Message):
    __slots__ = ("call_id", "failure_message", "result")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    failure_message: str
    result: str
    def __init__(self, call_id: _Optional[int] = ..., failure_message: _Optional[str] = ..., result: _Optional[str] = ...) -> None: ...

class TokenColumns(_message.Message):
    __slots__ = ("handles", "token_ids", "token_indexes")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEXES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., token_indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class EngineCoreOutputs(_message.Message):
    __slots__ = ("engine_index", "outputs", "scheduler_stats", "monotonic_ns", "utility_output", "finished_requests", "wave_complete", "start_wave", "step_seq", "more", "engine_dead", "tokens")
    ENGINE_INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_STATS_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_NS_FIELD_NUMBER: _ClassVar[int]
    UTILITY_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAVE_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    START_WAVE_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_DEAD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    engine_index: int
    outputs: _containers.RepeatedCompositeFieldContainer[EngineCoreOutput]
    scheduler_stats: SchedulerStats
    monotonic_ns: int
    utility_output: UtilityOutput
    finished_requests: _containers.RepeatedScalarFieldContainer[str]
    wave_complete: int
    start_wave: int
    step_seq: int
    more: bool
    engine_dead: EngineError
    tokens: TokenColumns
    def __init__(self, engine_index: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[EngineCoreOutput, _Mapping]]] = ..., scheduler_stats: _Optional[_Union[SchedulerStats, _Mapping]] = ..., monotonic_ns: _Optional[int] = ..., utility_output: _Optional[_Union[UtilityOutput, _Mapping]] = ..., finished_requests: _Optional[_Iterable[str]] = ..., wave_complete: _Optional[int] = ..., start_wave: _Optional[int] = ..., step_seq: _Optional[int] = ..., more: bool = ..., engine_dead: _Optional[_Union[EngineError, _Mapping]] = ..., tokens: _Optional[_Union[TokenColumns, _Mapping]] = ...) -> None: ...
