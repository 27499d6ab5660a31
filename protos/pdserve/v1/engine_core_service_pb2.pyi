from pdserve.v1 import engine_core_pb2 as _engine_core_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole

class AttachHello(_message.Message):
    __slots__ = ("router_id", "router_epoch", "resume", "min_protocol_version", "max_protocol_version", "wants_kv_cache_events")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    MIN_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WANTS_KV_CACHE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    router_epoch: str
    resume: AttachResume
    min_protocol_version: int
    max_protocol_version: int
    wants_kv_cache_events: bool
    def __init__(self, router_id: _Optional[str] = ..., router_epoch: _Optional[str] = ..., resume: _Optional[_Union[AttachResume, _Mapping]] = ..., min_protocol_version: _Optional[int] = ..., max_protocol_version: _Optional[int] = ..., wants_kv_cache_events: bool = ...) -> None: ...

class RequestAttempt(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class AttachResume(_message.Message):
    __slots__ = ("worker_epoch", "next_frame_seq", "requests")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_FRAME_SEQ_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: str
    next_frame_seq: int
    requests: _containers.RepeatedCompositeFieldContainer[RequestAttempt]
    def __init__(self, worker_epoch: _Optional[str] = ..., next_frame_seq: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[RequestAttempt, _Mapping]]] = ...) -> None: ...

class AbortRequests(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("step_seq", "draining", "paused", "next_frame_seq", "num_routers", "adapters")
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NEXT_FRAME_SEQ_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    step_seq: int
    draining: bool
    paused: bool
    next_frame_seq: int
    num_routers: int
    adapters: LoraAdapters
    def __init__(self, step_seq: _Optional[int] = ..., draining: bool = ..., paused: bool = ..., next_frame_seq: _Optional[int] = ..., num_routers: _Optional[int] = ..., adapters: _Optional[_Union[LoraAdapters, _Mapping]] = ...) -> None: ...

class LoraAdapters(_message.Message):
    __slots__ = ("version", "adapters")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    adapters: _containers.RepeatedCompositeFieldContainer[_engine_core_pb2.LoraAdapter]
    def __init__(self, version: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[_engine_core_pb2.LoraAdapter, _Mapping]]] = ...) -> None: ...

class KVCacheEvents(_message.Message):
    __slots__ = ("seq", "all_blocks_cleared", "blocks_removed", "blocks_stored")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ALL_BLOCKS_CLEARED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_STORED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    all_blocks_cleared: bool
    blocks_removed: _containers.RepeatedScalarFieldContainer[int]
    blocks_stored: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq: _Optional[int] = ..., all_blocks_cleared: bool = ..., blocks_removed: _Optional[_Iterable[int]] = ..., blocks_stored: _Optional[_Iterable[int]] = ...) -> None: ...

class ResyncKVCacheEvents(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "add_request", "abort_requests", "heartbeat", "resync_kv_cache_events", "handle")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADD_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ABORT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESYNC_KV_CACHE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    hello: AttachHello
    add_request: _engine_core_pb2.EngineCoreRequest
    abort_requests: AbortRequests
    heartbeat: Heartbeat
    resync_kv_cache_events: ResyncKVCacheEvents
    handle: int
    def __init__(self, hello: _Optional[_Union[AttachHello, _Mapping]] = ..., add_request: _Optional[_Union[_engine_core_pb2.EngineCoreRequest, _Mapping]] = ..., abort_requests: _Optional[_Union[AbortRequests, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., resync_kv_cache_events: _Optional[_Union[ResyncKVCacheEvents, _Mapping]] = ..., handle: _Optional[int] = ...) -> None: ...

class AttachWelcome(_message.Message):
    __slots__ = ("info", "client_index", "adopted", "protocol_version")
    INFO_FIELD_NUMBER: _ClassVar[int]
    CLIENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    info: EngineInfo
    client_index: int
    adopted: _containers.RepeatedCompositeFieldContainer[RequestAttempt]
    protocol_version: int
    def __init__(self, info: _Optional[_Union[EngineInfo, _Mapping]] = ..., client_index: _Optional[int] = ..., adopted: _Optional[_Iterable[_Union[RequestAttempt, _Mapping]]] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "outputs", "heartbeat", "frame_seq", "kv_cache_events")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FRAME_SEQ_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    welcome: AttachWelcome
    outputs: _engine_core_pb2.EngineCoreOutputs
    heartbeat: Heartbeat
    frame_seq: int
    kv_cache_events: KVCacheEvents
    def __init__(self, welcome: _Optional[_Union[AttachWelcome, _Mapping]] = ..., outputs: _Optional[_Union[_engine_core_pb2.EngineCoreOutputs, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., frame_seq: _Optional[int] = ..., kv_cache_events: _Optional[_Union[KVCacheEvents, _Mapping]] = ...) -> None: ...

class EngineCoreServiceGenerateRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _engine_core_pb2.EngineCoreRequest
    def __init__(self, request: _Optional[_Union[_engine_core_pb2.EngineCoreRequest, _Mapping]] = ...) -> None: ...

class EngineCoreServiceGenerateResponse(_message.Message):
    __slots__ = ("output",)
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    output: _engine_core_pb2.EngineCoreOutput
    def __init__(self, output: _Optional[_Union[_engine_core_pb2.EngineCoreOutput, _Mapping]] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("engine_id", "epoch", "role", "model", "max_model_len", "vocab_size", "eos_token_ids", "block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "dtype", "kv_compatibility_hash", "kv_transport", "determinism", "version", "logits_processors", "numerics_id", "kernels", "has_prefix_caching", "tokenizer_digest", "weights_digest", "started_at_ms", "served_fields", "has_prefix_pulls", "tensor_parallel_size", "pipeline_parallel_size", "zone", "adapters", "adapters_version", "tasks", "embedding_size", "is_matryoshka", "matryoshka_dimensions", "pooling_type", "modalities", "data_parallel_size", "data_parallel_rank")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_COMPATIBILITY_HASH_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DETERMINISM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOGITS_PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    HAS_PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELDS_FIELD_NUMBER: _ClassVar[int]
    HAS_PREFIX_PULLS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_VERSION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    IS_MATRYOSHKA_FIELD_NUMBER: _ClassVar[int]
    MATRYOSHKA_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    POOLING_TYPE_FIELD_NUMBER: _ClassVar[int]
    MODALITIES_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    epoch: str
    role: WorkerRole
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    kv_compatibility_hash: str
    kv_transport: str
    determinism: str
    version: str
    logits_processors: _containers.RepeatedScalarFieldContainer[str]
    numerics_id: str
    kernels: str
    has_prefix_caching: bool
    tokenizer_digest: str
    weights_digest: str
    started_at_ms: int
    served_fields: _containers.RepeatedScalarFieldContainer[str]
    has_prefix_pulls: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    zone: str
    adapters: _containers.RepeatedCompositeFieldContainer[_engine_core_pb2.LoraAdapter]
    adapters_version: int
    tasks: _containers.RepeatedScalarFieldContainer[str]
    embedding_size: int
    is_matryoshka: bool
    matryoshka_dimensions: _containers.RepeatedScalarFieldContainer[int]
    pooling_type: str
    modalities: _containers.RepeatedScalarFieldContainer[str]
    data_parallel_size: int
    data_parallel_rank: int
    def __init__(self, engine_id: _Optional[str] = ..., epoch: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_compatibility_hash: _Optional[str] = ..., kv_transport: _Optional[str] = ..., determinism: _Optional[str] = ..., version: _Optional[str] = ..., logits_processors: _Optional[_Iterable[str]] = ..., numerics_id: _Optional[str] = ..., kernels: _Optional[str] = ..., has_prefix_caching: bool = ..., tokenizer_digest: _Optional[str] = ..., weights_digest: _Optional[str] = ..., started_at_ms: _Optional[int] = ..., served_fields: _Optional[_Iterable[str]] = ..., has_prefix_pulls: bool = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., zone: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[_engine_core_pb2.LoraAdapter, _Mapping]]] = ..., adapters_version: _Optional[int] = ..., tasks: _Optional[_Iterable[str]] = ..., embedding_size: _Optional[int] = ..., is_matryoshka: bool = ..., matryoshka_dimensions: _Optional[_Iterable[int]] = ..., pooling_type: _Optional[str] = ..., modalities: _Optional[_Iterable[str]] = ..., data_parallel_size: _Optional[int] = ..., data_parallel_rank: _Optional[int] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: EngineInfo
    def __init__(self, info: _Optional[_Union[EngineInfo, _Mapping]] = ...) -> None: ...

class PutTensorRequest(_message.Message):
    __slots__ = ("ref", "chunk")
    REF_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ref: _engine_core_pb2.TensorRef
    chunk: bytes
    def __init__(self, ref: _Optional[_Union[_engine_core_pb2.TensorRef, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class PutTensorResponse(_message.Message):
    __slots__ = ("ttl_ms",)
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ttl_ms: int
    def __init__(self, ttl_ms: _Optional[int] = ...) -> None: ...
