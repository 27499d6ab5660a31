"""READs and peers as the transfer thread of NixlTransport sees them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdserve_common.kv_types import KVLinkWelcome
from pdserve_engine.kv_transfer.base import ReadDone
from pdserve_engine.kv_transfer.nixl import BlockIds


@dataclass(slots=True, eq=False)
class Read:
    peer: "Peer"
    remote: BlockIds
    local: BlockIds
    timeout_s: float
    on_done: ReadDone
    on_stall: Callable[[], None]
    # Pieces that have neither landed nor been dropped.
    num_left: int = 0
    started_at: float = 0.0
    progress_at: float = 0.0
    is_stalled: bool = False
    error: str = ""


@dataclass(slots=True, eq=False)
class Piece:
    read: Read
    start: int
    stop: int
    num_bytes: int
    handle: Any = None
    settled_at: float | None = None
    # Posting it failed in a way that leaves open whether it will land.
    is_unsure: bool = False


@dataclass(slots=True, eq=False)
class Peer:
    key: str
    welcome: KVLinkWelcome
    num_blocks: int
    on_lost: Callable[[str], None]
    # Both under the transport's lock; the rest belongs to the thread.
    is_lost: bool = False
    is_removed: bool = False
    # A READ has failed; the peer is lost as soon as that has landed.
    is_failing: bool = False
    connect_by: float = 0.0
    # "" until connected.
    transport: str = ""
    probe: Any = None
    num_probes: int = 0
    # Of these, over when they were posted.
    num_synchronous: int = 0
    dlist: Any = None
    waiting: deque[Piece] = field(default_factory=deque)
    posted: list[Piece] = field(default_factory=list)
    posted_bytes: int = 0

    @property
    def agent_name(self) -> str:
        return f"{self.welcome.engine_id}.{self.welcome.epoch}"
