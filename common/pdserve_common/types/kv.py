"""The KvLink's messages as frozen dataclasses, and what a KV block's bytes mean.

Prefill is the prefill worker that owns the blocks, decode the decode worker that reads them; for a
cached prefix it is the other way round. The rules K1 to K8 are in docs/architecture.md.
"""

import secrets
from dataclasses import dataclass
from enum import IntEnum

from pdserve_common.types.engine import PrefillStats

PROTOCOL_VERSION = 4
MIN_PROTOCOL_VERSION = 3
# From this version on workers may have several ranks, and checksums are one a block and head.
RANKS_PROTOCOL_VERSION = 4


def new_epoch() -> str:
    """128 random bits that name one start of one process (rule K1)."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheEvents:
    """What has changed in what a pool has cached, to be applied in the order of the fields. Blocks
    are called by their `truncated_hashes`.
    """

    # Counts the messages of an Attach stream, from 1; 0 where nothing is lost.
    seq: int = 0
    all_blocks_cleared: bool = False
    blocks_removed: tuple[int, ...] = ()
    blocks_stored: tuple[int, ...] = ()


class KVGroupKind(IntEnum):
    """How the layers of a KV group attend."""

    FULL = 1
    SLIDING = 2
    MLA = 3
    STATE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share block ids."""

    id: int
    layers: tuple[int, ...]
    kind: KVGroupKind
    # SLIDING: how many positions a token sees, its own included. Otherwise 0.
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What the bytes of a block of the whole model mean; both sides must agree.

    A block is [num_kv_heads, num_slots, k|v, block_size, head_dim].
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    block_bytes: int
    tile_format: str = "row_major"
    num_kv_heads: int
    # The bytes of one KV head in a block, all slots.
    head_bytes: int

    @property
    def num_slots(self) -> int:
        """Layers that a block has room for."""
        return max(len(group.layers) for group in self.groups)

    @property
    def slot_bytes(self) -> int:
        """Of one layer of one KV head in a block, K and V."""
        return self.head_bytes // self.num_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSessionId:
    """Names one session for ever: checked on every message, never reused (rule K1)."""

    p_epoch: str
    d_epoch: str
    link: int
    seq: int

    def __str__(self) -> str:
        """For logs, where lines of prefill and of decode are to be matched."""
        return f"{self.link}.{self.seq}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemoryRegion:
    """A registered piece of a KV pool."""

    base_address: int
    first_block: int
    num_blocks: int
    device_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShard:
    """What the pool of one rank holds of a block of the whole model: some slots of some heads.
    Ranks that hold the same are copies of each other.
    """

    first_kv_head: int
    num_kv_heads: int
    first_slot: int
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRankEndpoint:
    """How the other side reaches the KV pool of one rank."""

    rank: int = 0
    # None: all of every block; version 3 has no words for it.
    shard: KVShard | None = None
    memory_type: str
    regions: tuple[KVMemoryRegion, ...]
    nixl_metadata: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEndpoint:
    """How the other side reaches this worker's KV: what a welcome carries of the transport."""

    # In the order of the ranks.
    ranks: tuple[KVRankEndpoint, ...]
    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLinkHello:
    """Decode introduces itself."""

    min_protocol_version: int
    max_protocol_version: int
    engine_id: str
    epoch: str
    compatibility_hash: str
    layout: KVLayout
    connector: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLinkWelcome:
    """Prefill accepts decode. Decode compares the hash before it decodes the endpoint's NIXL
    metadata.
    """

    protocol_version: int
    engine_id: str
    epoch: str
    compatibility_hash: str
    link: int
    endpoint: KVEndpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRequest:
    """Prefill will soon start this request and asks decode to reserve blocks for it. Opens the
    session.
    """

    session: KVSessionId
    request_id: str
    attempt: int
    # Tokens whose KV decode will pull: the prompt and what was generated before.
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """Decode has reserved blocks for those tokens and one more: prefill may start."""

    session: KVSessionId
    # Logical index of the first block decode lacks; prefill announces none before it.
    first_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """Decode has no room yet; it keeps the grant request and grants it unasked when it has."""

    session: KVSessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    """Decode takes a grant back of which it has seen no announcement."""

    session: KVSessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """Decode gives up a request; prefill fences and frees."""

    request_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Decode has read all blocks below `through_block` (logical index)."""

    session: KVSessionId
    through_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRequest:
    """Decode wants cached blocks of a prompt's start: those with these hashes, without a gap."""

    request_id: str
    attempt: int
    # Logical index of the first of them.
    first_block: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLinkHeartbeat:
    """The sender's process is alive, not just its socket."""

    step_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksReady:
    """Prefill has written these blocks and keeps them until released or fenced (rule K2)."""

    session: KVSessionId
    first_block: int
    # For each KV group, physical ids on prefill in logical order, equally many. Those before a
    # sliding group's window at the prompt's end mean nothing: decode does not read them.
    block_ids: tuple[tuple[int, ...], ...]
    # For each KV group one number a block and KV head of the whole model, block by block, as
    # `KVCache.block_checksums`; empty unless switched on.
    checksums: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReady:
    """Prefill has these blocks of a prefix cached and keeps them until released or fenced. Opens
    the session; no other blocks follow.
    """

    request_id: str
    attempt: int
    blocks: BlocksReady


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone:
    """All blocks are announced and the first token is sampled."""

    session: KVSessionId
    num_tokens: int
    output_token_ids: tuple[int, ...]
    timeout_s: float
    # Decode passes them on: its outputs may be at the router before prefill's.
    prefill_stats: PrefillStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAck:
    """Prefill's answer to a release; only `valid` makes decode's copies usable (rule K4)."""

    session: KVSessionId
    through_block: int
    valid: bool


class SessionEndReason(IntEnum):
    """Why a session of prefill is over. To decode it is a loss, but for the first four that have a
    name.
    """

    UNSPECIFIED = 0
    # Prefill will ask again.
    PREEMPTED = 1
    # These end the request on decode as well.
    FINISHED = 2
    ABORTED = 3
    SUPERSEDED = 4
    ERROR = 5
    EXPIRED = 6
    FENCED = 7
    REVOKED = 8
    # Prefill keeps these for itself.
    CANCELLED = 9
    LINK_LOST = 10
    RELEASED = 11
    # To decode this is no loss: it computes the prefix.
    NOT_CACHED = 12

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """Prefill has fenced the session, or will never open one for the request."""

    session: KVSessionId | None
    request_id: str
    attempt: int
    reason: SessionEndReason
    # For people.
    message: str


KVLinkRequestMessage = (
    KVLinkHello
    | Granted
    | Later
    | Revoke
    | Release
    | CancelRequest
    | PrefixRequest
    | KVLinkHeartbeat
)
KVLinkResponseMessage = (
    KVLinkWelcome
    | GrantRequest
    | BlocksReady
    | PrefixReady
    | PrefillDone
    | ReleaseAck
    | SessionEnded
    | KVLinkHeartbeat
)
