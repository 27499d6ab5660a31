from pdserve.v1 import engine_core_pb2 as _engine_core_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionEndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_END_REASON_UNSPECIFIED: _ClassVar[SessionEndReason]
    SESSION_END_REASON_PREEMPTED: _ClassVar[SessionEndReason]
    SESSION_END_REASON_FINISHED: _ClassVar[SessionEndReason]
    SESSION_END_REASON_ABORTED: _ClassVar[SessionEndReason]
    SESSION_END_REASON_SUPERSEDED: _ClassVar[SessionEndReason]
    SESSION_END_REASON_ERROR: _ClassVar[SessionEndReason]
    SESSION_END_REASON_EXPIRED: _ClassVar[SessionEndReason]
    SESSION_END_REASON_FENCED: _ClassVar[SessionEndReason]
    SESSION_END_REASON_REVOKED: _ClassVar[SessionEndReason]
    SESSION_END_REASON_CANCELLED: _ClassVar[SessionEndReason]
    SESSION_END_REASON_LINK_LOST: _ClassVar[SessionEndReason]
    SESSION_END_REASON_RELEASED: _ClassVar[SessionEndReason]
    SESSION_END_REASON_NOT_CACHED: _ClassVar[SessionEndReason]
SESSION_END_REASON_UNSPECIFIED: SessionEndReason
SESSION_END_REASON_PREEMPTED: SessionEndReason
SESSION_END_REASON_FINISHED: SessionEndReason
SESSION_END_REASON_ABORTED: SessionEndReason
SESSION_END_REASON_SUPERSEDED: SessionEndReason
SESSION_END_REASON_ERROR: SessionEndReason
SESSION_END_REASON_EXPIRED: SessionEndReason
SESSION_END_REASON_FENCED: SessionEndReason
SESSION_END_REASON_REVOKED: SessionEndReason
SESSION_END_REASON_CANCELLED: SessionEndReason
SESSION_END_REASON_LINK_LOST: SessionEndReason
SESSION_END_REASON_RELEASED: SessionEndReason
SESSION_END_REASON_NOT_CACHED: SessionEndReason

class KvGroup(_message.Message):
    __slots__ = ("id", "layers", "kind", "window")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[KvGroup.Kind]
        KIND_FULL: _ClassVar[KvGroup.Kind]
        KIND_SLIDING: _ClassVar[KvGroup.Kind]
        KIND_MLA: _ClassVar[KvGroup.Kind]
        KIND_STATE: _ClassVar[KvGroup.Kind]
    KIND_UNSPECIFIED: KvGroup.Kind
    KIND_FULL: KvGroup.Kind
    KIND_SLIDING: KvGroup.Kind
    KIND_MLA: KvGroup.Kind
    KIND_STATE: KvGroup.Kind
    ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    id: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    kind: KvGroup.Kind
    window: int
    def __init__(self, id: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., kind: _Optional[_Union[KvGroup.Kind, str]] = ..., window: _Optional[int] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("groups", "block_size", "block_bytes", "tile_format", "num_kv_heads", "head_bytes")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TILE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    block_size: int
    block_bytes: int
    tile_format: str
    num_kv_heads: int
    head_bytes: int
    def __init__(self, groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., tile_format: _Optional[str] = ..., num_kv_heads: _Optional[int] = ..., head_bytes: _Optional[int] = ...) -> None: ...

class KvSessionId(_message.Message):
    __slots__ = ("p_epoch", "d_epoch", "link", "seq")
    P_EPOCH_FIELD_NUMBER: _ClassVar[int]
    D_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    p_epoch: str
    d_epoch: str
    link: int
    seq: int
    def __init__(self, p_epoch: _Optional[str] = ..., d_epoch: _Optional[str] = ..., link: _Optional[int] = ..., seq: _Optional[int] = ...) -> None: ...

class KvLinkHello(_message.Message):
    __slots__ = ("min_protocol_version", "max_protocol_version", "engine_id", "epoch", "compatibility_hash", "layout", "connector")
    MIN_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_HASH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    min_protocol_version: int
    max_protocol_version: int
    engine_id: str
    epoch: str
    compatibility_hash: str
    layout: KvLayout
    connector: str
    def __init__(self, min_protocol_version: _Optional[int] = ..., max_protocol_version: _Optional[int] = ..., engine_id: _Optional[str] = ..., epoch: _Optional[str] = ..., compatibility_hash: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., connector: _Optional[str] = ...) -> None: ...

class KvMemoryRegion(_message.Message):
    __slots__ = ("base_address", "first_block", "num_blocks", "device_id")
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    base_address: int
    first_block: int
    num_blocks: int
    device_id: int
    def __init__(self, base_address: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., device_id: _Optional[int] = ...) -> None: ...

class KvRankEndpoint(_message.Message):
    __slots__ = ("rank", "first_kv_head", "num_kv_heads", "first_slot", "num_slots", "memory_type", "regions", "nixl_metadata")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FIRST_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    FIRST_SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TYPE_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    NIXL_METADATA_FIELD_NUMBER: _ClassVar[int]
    rank: int
    first_kv_head: int
    num_kv_heads: int
    first_slot: int
    num_slots: int
    memory_type: str
    regions: _containers.RepeatedCompositeFieldContainer[KvMemoryRegion]
    nixl_metadata: bytes
    def __init__(self, rank: _Optional[int] = ..., first_kv_head: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., first_slot: _Optional[int] = ..., num_slots: _Optional[int] = ..., memory_type: _Optional[str] = ..., regions: _Optional[_Iterable[_Union[KvMemoryRegion, _Mapping]]] = ..., nixl_metadata: _Optional[bytes] = ...) -> None: ...

class KvLinkWelcome(_message.Message):
    __slots__ = ("protocol_version", "engine_id", "epoch", "compatibility_hash", "link", "nixl_metadata", "memory_type", "regions", "transport", "ranks")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_HASH_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    NIXL_METADATA_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TYPE_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    engine_id: str
    epoch: str
    compatibility_hash: str
    link: int
    nixl_metadata: bytes
    memory_type: str
    regions: _containers.RepeatedCompositeFieldContainer[KvMemoryRegion]
    transport: str
    ranks: _containers.RepeatedCompositeFieldContainer[KvRankEndpoint]
    def __init__(self, protocol_version: _Optional[int] = ..., engine_id: _Optional[str] = ..., epoch: _Optional[str] = ..., compatibility_hash: _Optional[str] = ..., link: _Optional[int] = ..., nixl_metadata: _Optional[bytes] = ..., memory_type: _Optional[str] = ..., regions: _Optional[_Iterable[_Union[KvMemoryRegion, _Mapping]]] = ..., transport: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[KvRankEndpoint, _Mapping]]] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("session", "first_block")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    session: KvSessionId
    first_block: int
    def __init__(self, session: _Optional[_Union[KvSessionId, _Mapping]] = ..., first_block: _Optional[int] = ...) -> None: ...

class Later(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: KvSessionId
    def __init__(self, session: _Optional[_Union[KvSessionId, _Mapping]] = ...) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: KvSessionId
    def __init__(self, session: _Optional[_Union[KvSessionId, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("session", "through_block")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    THROUGH_BLOCK_FIELD_NUMBER: _ClassVar[int]
    session: KvSessionId
    through_block: int
    def __init__(self, session: _Optional[_Union[KvSessionId, _Mapping]] = ..., through_block: _Optional[int] = ...) -> None: ...

class PrefixRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "first_block", "block_hashes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    first_block: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., first_block: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class KvLinkHeartbeat(_message.Message):
    __slots__ = ("step_seq",)
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    step_seq: int
    def __init__(self, step_seq: _Optional[int] = ...) -> None: ...

class KvLinkRequest(_message.Message):
    __slots__ = ("hello", "cancel", "release", "heartbeat", "granted", "later", "revoke", "prefix_request")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_REQUEST_FIELD_NUMBER: _ClassVar[int]
    hello: KvLinkHello
    cancel: CancelRequest
    release: Release
    heartbeat: KvLinkHeartbeat
    granted: Granted
    later: Later
    revoke: Revoke
    prefix_request: PrefixRequest
    def __init__(self, hello: _Optional[_Union[KvLinkHello, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., heartbeat: _Optional[_Union[KvLinkHeartbeat, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., later: _Optional[_Union[Later, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ..., prefix_request: _Optional[_Union[PrefixRequest, _Mapping]] = ...) -> None: ...

class GrantRequest(_message.Message):
    __slots__ = ("session", "request_id", "attempt", "num_tokens")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session: KvSessionId
    request_id: str
    attempt: int
    num_tokens: int
    def __init__(self, session: _Optional[_Union[KvSessionId, _Mapping]] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class BlockIds(_message.Message):
    __slots__ = ("block_ids", "checksums")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class BlocksReady(_message.Message):
    __slots__ = ("session", "first_block", "groups")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    session: KvSessionId
    first_block: int
    groups: _containers.RepeatedCompositeFieldContainer[BlockIds]
    def __init__(self, session: _Optional[_Union[KvSessionId, _Mapping]] = ..., first_block: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[BlockIds, _Mapping]]] = ...) -> None: ...

class PrefixReady(_message.Message):
    __slots__ = ("request_id", "attempt", "blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    blocks: BlocksReady
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., blocks: _Optional[_Union[BlocksReady, _Mapping]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("session", "num_tokens", "output_token_ids", "timeout_ns", "prefill_stats")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STATS_FIELD_NUMBER: _ClassVar[int]
    session: KvSessionId
    num_tokens: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    timeout_ns: int
    prefill_stats: _engine_core_pb2.PrefillStats
    def __init__(self, session: _Optional[_Union[KvSessionId, _Mapping]] = ..., num_tokens: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., timeout_ns: _Optional[int] = ..., prefill_stats: _Optional[_Union[_engine_core_pb2.PrefillStats, _Mapping]] = ...) -> None: ...

class ReleaseAck(_message.Message):
    __slots__ = ("session", "through_block", "valid")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    THROUGH_BLOCK_FIELD_NUMBER: _ClassVar[int]
    VALID_FIELD_NUMBER: _ClassVar[int]
    session: KvSessionId
    through_block: int
    valid: bool
    def __init__(self, session: _Optional[_Union[KvSessionId, _Mapping]] = ..., through_block: _Optional[int] = ..., valid: bool = ...) -> None: ...

class SessionEnded(_message.Message):
    __slots__ = ("session", "request_id", "attempt", "message", "reason")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    session: KvSessionId
    request_id: str
    attempt: int
    message: str
    reason: SessionEndReason
    def __init__(self, session: _Optional[_Union[KvSessionId, _Mapping]] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[_Union[SessionEndReason, str]] = ...) -> None: ...

class KvLinkResponse(_message.Message):
    __slots__ = ("welcome", "blocks_ready", "prefill_done", "release_ack", "session_ended", "heartbeat", "grant_request", "prefix_ready")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_READY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DONE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_ACK_FIELD_NUMBER: _ClassVar[int]
    SESSION_ENDED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GRANT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_READY_FIELD_NUMBER: _ClassVar[int]
    welcome: KvLinkWelcome
    blocks_ready: BlocksReady
    prefill_done: PrefillDone
    release_ack: ReleaseAck
    session_ended: SessionEnded
    heartbeat: KvLinkHeartbeat
    grant_request: GrantRequest
    prefix_ready: PrefixReady
    def __init__(self, welcome: _Optional[_Union[KvLinkWelcome, _Mapping]] = ..., blocks_ready: _Optional[_Union[BlocksReady, _Mapping]] = ..., prefill_done: _Optional[_Union[PrefillDone, _Mapping]] = ..., release_ack: _Optional[_Union[ReleaseAck, _Mapping]] = ..., session_ended: _Optional[_Union[SessionEnded, _Mapping]] = ..., heartbeat: _Optional[_Union[KvLinkHeartbeat, _Mapping]] = ..., grant_request: _Optional[_Union[GrantRequest, _Mapping]] = ..., prefix_ready: _Optional[_Union[PrefixReady, _Mapping]] = ...) -> None: ...
