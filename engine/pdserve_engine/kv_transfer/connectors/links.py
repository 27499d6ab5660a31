"""What the owner's and the reader's connectors share: their open KvLinks, who is still alive, and
the handshake.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdserve_common.errors import KVTransferError
from pdserve_common.rpc.liveness import HEARTBEAT_S, SILENCE_S, AwakeClock
from pdserve_common.types.kv import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    RANKS_PROTOCOL_VERSION,
    KVLayout,
    KVLinkHeartbeat,
    KVLinkHello,
    KVLinkWelcome,
    KVSessionId,
)
from pdserve_engine.kv_transfer.base import KVIdentity, KVLinkHandle

# Version 3 has no words for these.
RANKS_LAYOUT_FIELDS = ("num_kv_heads", "head_bytes")

# What both sides log of a session that will not bring its KV to the reader: id and peer, the state
# that it was in, its age, why, and what comes of it.
SESSION_LOST = "KV session %s with %s is lost in state %s after %.1f s: %s; %s"


@dataclass(slots=True, eq=False)
class KVLink:
    """One KvLink as its connector sees it; the owner gives the number."""

    number: int
    engine_id: str
    epoch: str
    # Takes responses on the owner, requests on the reader.
    handle: KVLinkHandle[Any]
    # What both ends speak.
    protocol_version: int = PROTOCOL_VERSION
    # By its table's AwakeClock.
    last_heard: float = 0.0
    # The reader: the transport's key of this peer.
    peer: str = ""
    # The reader: the size of the peer's pool.
    num_blocks: int = 0

    def owns(self, session: KVSessionId, d_epoch: str) -> bool:
        """The reader: can the session be one of this link (rule K1)?"""
        ours = (self.epoch, d_epoch, self.number)
        return (session.p_epoch, session.d_epoch, session.link) == ours


class Tick(NamedTuple):
    """What a tick has found."""

    # Links whose peer has gone silent.
    silent: list[KVLink]
    # How long our own event loop hung. Messages that came meanwhile are read after this tick:
    # they must not find that somebody has given up waiting for them.
    stalled_s: float


class LinkTable:
    """The open links, at most one for each peer engine. Guarded by its connector's lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._links: dict[str, KVLink] = {}
        self._awake = AwakeClock(HEARTBEAT_S, clock=clock)

    def __len__(self) -> int:
        return len(self._links)

    def add(self, link: KVLink) -> None:
        assert link.engine_id not in self._links, "the old link is dropped first"
        self._links[link.engine_id] = link
        self.heard(link)

    def heard(self, link: KVLink) -> None:
        """Its peer has said something."""
        link.last_heard = self._awake()

    def get(self, engine_id: str) -> KVLink | None:
        return self._links.get(engine_id)

    def all(self) -> list[KVLink]:
        return list(self._links.values())

    def is_open(self, link: KVLink) -> bool:
        return self._links.get(link.engine_id) is link

    def remove(self, link: KVLink) -> bool:
        """Return False if it was gone already."""
        if not self.is_open(link):
            return False
        del self._links[link.engine_id]
        return True

    def tick(self, step_seq: int) -> Tick:
        """Send heartbeats and see who has gone silent, other than for our own absence."""
        stalled_s = self._awake.tick()
        now = self._awake()
        for link in self._links.values():
            link.handle.send(KVLinkHeartbeat(step_seq=step_seq))
        silent = [link for link in self._links.values() if now - link.last_heard > SILENCE_S]
        return Tick(silent, stalled_s)


class RecentKeys:
    """A set that forgets its oldest members. What falls out only costs time: a deadline ends it."""

    def __init__(self, max_len: int = 4096) -> None:
        self._keys: OrderedDict[Hashable, None] = OrderedDict()
        self._max_len = max_len

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def add(self, key: Hashable) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._max_len:
            self._keys.popitem(last=False)

    def discard(self, key: Hashable) -> None:
        self._keys.pop(key, None)


def make_hello(identity: KVIdentity, connector: str) -> KVLinkHello:
    """The reader: what to send first on a new link."""
    has_ranks = identity.num_ranks > 1
    return KVLinkHello(
        min_protocol_version=RANKS_PROTOCOL_VERSION if has_ranks else MIN_PROTOCOL_VERSION,
        max_protocol_version=PROTOCOL_VERSION,
        engine_id=identity.engine_id,
        epoch=identity.epoch,
        compatibility_hash=identity.compatibility_hash,
        layout=identity.layout,
        connector=connector,
    )


def check_welcome(identity: KVIdentity, engine_id: str, welcome: KVLinkWelcome) -> None:
    """The reader: raise KVTransferError unless `welcome` is from the owner we dialed and can read
    from.
    """
    if welcome.engine_id != engine_id:
        raise KVTransferError(f"dialed {engine_id}, {welcome.engine_id} answered")
    if not MIN_PROTOCOL_VERSION <= welcome.protocol_version <= PROTOCOL_VERSION:
        raise KVTransferError(f"the owner wants protocol version {welcome.protocol_version}")
    if identity.num_ranks > 1 and welcome.protocol_version < RANKS_PROTOCOL_VERSION:
        raise KVTransferError(_too_old_for_ranks(identity, "the owner", welcome.protocol_version))
    # Before anything of the transport's metadata is looked at.
    mismatch = find_hash_mismatch(welcome.compatibility_hash, identity.compatibility_hash)
    if mismatch is not None:
        raise KVTransferError(mismatch)


def find_mismatch(identity: KVIdentity, connector: str, hello: KVLinkHello) -> str | None:
    """The owner: say why the reader cannot read our blocks, naming what differs, or return None if
    it can.
    """
    version = common_version(hello)
    if not max(MIN_PROTOCOL_VERSION, hello.min_protocol_version) <= version:
        return (
            "protocol versions differ: the owner speaks "
            f"{MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}, "
            f"the reader {hello.min_protocol_version} to {hello.max_protocol_version}"
        )
    knows_ranks = version >= RANKS_PROTOCOL_VERSION
    if identity.num_ranks > 1 and not knows_ranks:
        return _too_old_for_ranks(identity, "the reader", version)
    if hello.connector != connector:
        return f"connector differs: {connector} on the owner, {hello.connector} on the reader"
    for name in KVLayout.__slots__:
        ours, theirs = getattr(identity.layout, name), getattr(hello.layout, name)
        if ours != theirs and (knows_ranks or name not in RANKS_LAYOUT_FIELDS):
            return f"layout.{name} differs: {ours} on the owner, {theirs} on the reader"
    return find_hash_mismatch(identity.compatibility_hash, hello.compatibility_hash)


def common_version(hello: KVLinkHello) -> int:
    """The owner: return the newest protocol version that both may speak."""
    return min(PROTOCOL_VERSION, hello.max_protocol_version)


def _too_old_for_ranks(identity: KVIdentity, peer: str, version: int) -> str:
    return (
        f"{peer} speaks protocol version {version}, which knows workers of one rank: "
        f"{identity.engine_id} has {identity.num_ranks}"
    )


def find_hash_mismatch(p_hash: str, d_hash: str) -> str | None:
    if p_hash == d_hash:
        return None
    return (
        f"compatibility_hash differs: {p_hash} on the owner, {d_hash} on the reader "
        "(model, quantization, weights, tokenizer, dtype, layout or logits processors)"
    )
