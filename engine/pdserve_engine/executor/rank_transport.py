"""The KV transport of a rank: the engine's end, and the rank's."""

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pdserve_common.errors import KVTransferError
from pdserve_common.types.kv import KVRankEndpoint
from pdserve_engine.executor import messages
from pdserve_engine.executor.messages import TransportCommand, TransportEvent
from pdserve_engine.kv_transfer.base import (
    RankTransport,
    ReadDone,
    ReadResult,
    check_block_ids,
)
from pdserve_engine.kv_transfer.transport.shards import KVPeer


class _Peer(NamedTuple):
    num_blocks: int
    on_lost: Callable[[str], None]


class _Read(NamedTuple):
    on_done: ReadDone
    on_stall: Callable[[], None]


class RemoteTransport(RankTransport):
    """The engine's end: the transport is in the rank's process, whose pool it has registered."""

    name = "nixl"

    _endpoint: KVRankEndpoint
    _num_blocks: int

    def __init__(
        self, *, send: Callable[[TransportCommand], None], close: Callable[[], None]
    ) -> None:
        """`send` may not fail: a rank that is gone is the end of the engine. `close` waits."""
        self._send = send
        self._close = close
        self._failure: str | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[int, _Read] = {}

    def opened(self, endpoint: KVRankEndpoint) -> None:
        """The rank has registered its pool."""
        self._endpoint = endpoint
        self._num_blocks = sum(region.num_blocks for region in endpoint.regions)

    @property
    def failure(self) -> str | None:
        return self._failure

    def endpoint(self) -> KVRankEndpoint:
        return self._endpoint

    def self_check(self) -> None:
        """The rank has done it, when it opened the transport."""

    def expect_peer(self) -> None:
        self._send(messages.ExpectPeer())

    def set_exporting(self, is_exporting: bool) -> None:
        self._send(messages.SetExporting(is_exporting))

    def poll_soon(self) -> None:
        self._send(messages.PollSoon())

    def add_peer(self, peer: KVPeer, on_lost: Callable[[str], None]) -> str:
        key = f"{peer.agent_name}#{next(self._numbers)}"
        with self._lock:
            self._peers[key] = _Peer(peer.num_blocks, on_lost)
        self._send(messages.AddPeer(key, peer))
        return key

    def remove_peer(self, peer: str) -> None:
        with self._lock:
            removed = self._peers.pop(peer, None)
        if removed is not None:
            self._send(messages.RemovePeer(peer))

    def read(
        self,
        peer: str,
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
        timeout_s: float,
        on_done: ReadDone,
        on_stall: Callable[[], None],
    ) -> None:
        with self._lock:
            target = self._peers.get(peer)
            if target is None:
                raise KVTransferError(f"no connection to {peer}")
            check_block_ids(remote_block_ids, target.num_blocks, "remote")
            check_block_ids(local_block_ids, self._num_blocks, "local")
            number = next(self._numbers)
            self._reads[number] = _Read(on_done, on_stall)
        self._send(
            messages.Read(
                number=number,
                key=peer,
                remote_block_ids=tuple(remote_block_ids),
                local_block_ids=tuple(local_block_ids),
                timeout_s=timeout_s,
            )
        )

    def close(self) -> None:
        self._close()

    def on_event(self, event: TransportEvent) -> None:
        """The rank's transport says something. On one thread."""
        if isinstance(event, messages.ReadEnded):
            with self._lock:
                read = self._reads.pop(event.number)
            read.on_done(event.result)
        elif isinstance(event, messages.ReadStalled):
            self._reads[event.number].on_stall()
        elif isinstance(event, messages.PeerLost):
            with self._lock:
                peer = self._peers.pop(event.key, None)
            if peer is not None:
                self._send(messages.RemovePeer(event.key))
                peer.on_lost(event.reason)
        else:
            self._failure = event.reason


class TransportHost:
    """The rank's end: has a transport do what comes from the engine. On one thread, which looks
    `check` often enough.
    """

    def __init__(self, transport: RankTransport, send: Callable[[TransportEvent], None]) -> None:
        self._transport = transport
        self._send = send
        # The transport's keys by the engine's.
        self._keys: dict[str, str] = {}
        self._has_failed = False

    def handle(self, command: TransportCommand) -> None:
        transport = self._transport
        if isinstance(command, messages.Read):
            self._read(command)
        elif isinstance(command, messages.PollSoon):
            transport.poll_soon()
        elif isinstance(command, messages.SetExporting):
            transport.set_exporting(command.is_exporting)
        elif isinstance(command, messages.ExpectPeer):
            transport.expect_peer()
        elif isinstance(command, messages.AddPeer):
            self._add_peer(command)
        else:
            key = self._keys.pop(command.key, None)
            if key is not None:
                transport.remove_peer(key)

    def check(self) -> None:
        """Tell the engine if the transport has failed."""
        failure = self._transport.failure
        if failure is not None and not self._has_failed:
            self._has_failed = True
            self._send(messages.TransportFailed(failure))

    def close(self) -> None:
        self._transport.close()

    def _add_peer(self, command: messages.AddPeer) -> None:
        key = command.key
        try:
            self._keys[key] = self._transport.add_peer(
                command.peer, lambda reason: self._send(messages.PeerLost(key, reason))
            )
        except KVTransferError as error:
            self._send_apart(messages.PeerLost(key, error.message))

    def _read(self, command: messages.Read) -> None:
        number = command.number
        try:
            self._transport.read(
                self._keys.get(command.key, command.key),
                command.remote_block_ids,
                command.local_block_ids,
                command.timeout_s,
                partial(self._end_read, number),
                lambda: self._send(messages.ReadStalled(number)),
            )
        except KVTransferError as error:
            refused = ReadResult(
                is_ok=False, num_bytes=0, duration_s=0.0, transport="", error=error.message
            )
            self._send_apart(messages.ReadEnded(number, refused))

    def _send_apart(self, event: TransportEvent) -> None:
        """From another thread: this one has to read on, so that the engine can write."""
        threading.Thread(target=self._send, args=(event,), name="kv-refusal").start()

    def _end_read(self, number: int, result: ReadResult) -> None:
        self._send(messages.ReadEnded(number, result))
