"""What crosses between a worker and its engine process. Both ends are on one machine:
time.monotonic() means the same.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from pdserve_common.observability.defects import Loop
from pdserve_common.processes.calls import Answer, Call, CancelCall, Failed
from pdserve_common.processes.frames import FrameCodec
from pdserve_common.types.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    SchedulerStats,
)
from pdserve_common.types.engine_client import EngineState
from pdserve_common.types.kv import (
    BlocksReady,
    CancelRequest,
    Granted,
    GrantRequest,
    KVCacheEvents,
    KVLinkHeartbeat,
    KVLinkHello,
    KVLinkWelcome,
    Later,
    PrefillDone,
    PrefixReady,
    PrefixRequest,
    Release,
    ReleaseAck,
    Revoke,
    SessionEnded,
)
from pdserve_common.types.lora import LoRAAdapters
from pdserve_common.types.verbs import VERBS
from pdserve_engine.config import EngineConfig, Role
from pdserve_engine.kv_transfer.base import KVIdentity


class ConnectorKind(enum.IntEnum):
    """An engine has one connector of each kind at most."""

    PRODUCER = 0
    CONSUMER = 1


class LinkRef(NamedTuple):
    """Which link a message is about."""

    connector: ConnectorKind
    # Given by the service's side; 0 is for all links of the connector.
    number: int

    @classmethod
    def unpack(cls, ref: int) -> "LinkRef":
        number, connector = divmod(ref, len(ConnectorKind))
        return cls(ConnectorKind(connector), number)

    def pack(self) -> int:
        return self.number * len(ConnectorKind) + self.connector


# ---- to the engine process; refers to a client (0 to the engine as a whole) unless said otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The engine is loaded, with these connectors."""

    info: EngineInfo
    kv_identities: dict[ConnectorKind, KVIdentity]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEngine(Call[EngineReady]):
    """The first message: what to load. Raises ValueError, OSError or a PdserveError."""

    config: EngineConfig
    role: Role
    engine_id: str
    log_level: str


@dataclass(frozen=True, slots=True)
class RegisterClient:
    """A new front end."""


@dataclass(frozen=True, slots=True)
class UnregisterClient:
    """A front end is gone, and its requests with it."""


@dataclass(frozen=True, slots=True)
class RecordKVCacheEvents:
    """KVCacheEvents are wanted."""


@dataclass(frozen=True, slots=True)
class AddRequest:
    """As EngineClient.add_request; the request names its front end itself. `tensors` are those that
    the process lacks, by content hash.
    """

    request: EngineCoreRequest
    tensors: dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class ForgetTensors:
    """No request needs these any more."""

    content_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """End requests of a front end."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """Stop the engine and exit."""


# ---- from the engine process


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """Sent after every step, before every answer to a call and at least every HEARTBEAT_S."""

    step_seq: int
    stats: SchedulerStats
    state: EngineState
    is_alive: bool
    problem: str | None
    # (request_id, attempt) of those whose terminal output follows, if their front end is not gone.
    finished_requests: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineDefect:
    """The engine process has logged a defect; the worker counts it."""

    loop: Loop


@dataclass(frozen=True, slots=True)
class MetricSample:
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class MetricFamily:
    name: str
    documentation: str
    type: str
    samples: tuple[MetricSample, ...]


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    families: tuple[MetricFamily, ...]


# ---- calls, the operator's VERBS among them; they refer to a call id, and are answered under it


@dataclass(frozen=True, slots=True)
class Drain(Call[int]):
    """As EngineClient.drain."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class GetMetrics(Call[MetricsSnapshot]):
    """What the process's registry holds."""


# ---- KvLinks, both ways; refers to a LinkRef


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Decode: prefill has welcomed us."""

    engine_id: str
    welcome: KVLinkWelcome


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """Decode: no link can be had."""

    engine_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link's stream has ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkTick:
    """HEARTBEAT_S has passed."""


@dataclass(frozen=True, slots=True)
class DialLink:
    """The connector wants a link; answered by LinkUp or LinkFailed."""

    engine_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The connector ends the link's stream."""

    reason: str


LinkMessage = (
    KVLinkHello | Granted | Later | Revoke | CancelRequest | Release | KVLinkHeartbeat
    | KVLinkWelcome | GrantRequest | BlocksReady | PrefillDone | ReleaseAck | SessionEnded
    | PrefixRequest | PrefixReady
    | LinkUp | LinkFailed | LinkLost | LinkTick | DialLink | LinkClosed
)  # fmt: skip
_OneWay = (
    RegisterClient | UnregisterClient | AddRequest | ForgetTensors | AbortRequests
    | Close | CancelCall | RecordKVCacheEvents
    | EngineStatus | EngineCoreOutputs | Answer | Failed | KVCacheEvents
    | LoRAAdapters | EngineDefect
    | LinkMessage
)  # fmt: skip
Message = _OneWay | Call[Any]

MESSAGES: tuple[type, ...] = (*get_args(_OneWay), LoadEngine, Drain, GetMetrics, *VERBS)

CODEC: FrameCodec[Message] = FrameCodec(MESSAGES)
