"""KV transport over NIXL: one thread owns the agent and all READs.

UCX makes progress only inside NIXL calls, so the thread polls while a READ is outstanding, and P's
pumps while peers connect or may read; otherwise it sleeps on its queue.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from pdserve_common.errors import KVTransferError
from pdserve_common.kv_types import KVEndpoint, KVLinkWelcome
from pdserve_engine.kv_transfer.base import (
    KVTransport,
    ReadDone,
    ReadResult,
    check_block_ids,
    num_region_blocks,
)
from pdserve_engine.kv_transfer.nixl import (
    NIXL_ERRORS,
    NixlAgent,
    RemoteDisconnectError,
    has_rdma_device,
)
from pdserve_engine.kv_transfer.reads import Peer, Piece, Read

if TYPE_CHECKING:
    from pdserve_engine.kv_cache import KVCache

logger = logging.getLogger(__name__)

# Over shared memory posting IS the copy: a larger piece would hold the thread up for too long.
MAX_POSTED_BYTES = 32 << 20
MIN_POLL_S = 50e-6
MAX_POLL_S = 1e-3
# How long a peer may take to connect, and P helps it to.
CONNECT_S = 5.0
# After a REMOTE_DISCONNECT nothing lands any more (K5). UCX gets this long to fail the other pieces
# of the READ, which it does in the same breath, but not in the same call.
SETTLE_S = 0.05
CLOSE_S = 5.0
# So many READs that are over when posted tell shared memory; while a connection is being set up
# some are not, and on a network one might be by luck.
NUM_SYNCHRONOUS = 3
MAX_PROBES = 12


class NixlTransport(KVTransport):
    """Reads blocks with NIXL's UCX backend."""

    name = "nixl"

    def __init__(self, agent_name: str, *, require_transport: str = "any") -> None:
        self._agent_name = agent_name
        self._require_transport = require_transport
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._num_peers = 0
        self._num_pending = 0
        self._is_closed = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        # The rest belongs to the thread.
        self._all_peers: list[Peer] = []
        self._is_exporting = False
        self._pump_until = 0.0
        self._poll_s = MIN_POLL_S
        self._close_by: float | None = None

    # ---- any thread

    def register(self, kv_cache: "KVCache") -> None:
        self._block_bytes = kv_cache.block_bytes
        self._num_blocks = kv_cache.num_blocks
        self._kv_cache = kv_cache
        self._opened: Future[KVEndpoint] = Future()
        self._thread.start()
        self._endpoint = self._opened.result()

    def endpoint(self) -> KVEndpoint:
        return self._endpoint

    def expect_peer(self) -> None:
        self._commands.put(self._start_pump)

    def set_exporting(self, is_exporting: bool) -> None:
        def change() -> None:
            self._is_exporting = is_exporting

        self._commands.put(change)

    def add_peer(self, welcome: KVLinkWelcome, on_lost: Callable[[str], None]) -> str:
        if welcome.endpoint.memory_type not in ("DRAM", "VRAM"):
            raise KVTransferError(f"P's memory type is {welcome.endpoint.memory_type!r}")
        num_blocks = num_region_blocks(welcome, self._block_bytes)
        with self._lock:
            self._num_peers += 1
            key = f"{welcome.engine_id}.{welcome.epoch}#{self._num_peers}"
            peer = Peer(key, welcome, num_blocks, on_lost)
            self._peers[key] = peer
        self._commands.put(lambda: self._connect(peer))
        return key

    def remove_peer(self, peer: str) -> None:
        with self._lock:
            removed = self._peers.pop(peer, None)
            if removed is None:
                return
            removed.is_removed = removed.is_lost = True
        self._commands.put(lambda: self._drop_waiting(removed, "connection was closed"))

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
            if target is None or target.is_lost or self._is_closed:
                raise KVTransferError(f"no connection to {peer}")
            check_block_ids(remote_block_ids, target.num_blocks, "remote")
            check_block_ids(local_block_ids, self._num_blocks, "local")
            if not remote_block_ids or len(remote_block_ids) != len(local_block_ids):
                raise KVTransferError("remote and local block ids differ in number, or are none")
            self._num_pending += 1
            read = Read(
                target,
                np.asarray(remote_block_ids, dtype=np.int32),
                np.asarray(local_block_ids, dtype=np.int32),
                timeout_s,
                on_done,
                on_stall,
            )
            self._commands.put(lambda: self._queue_read(read))

    def num_pending_reads(self) -> int:
        return self._num_pending

    def close(self) -> None:
        with self._lock:
            is_first = not self._is_closed
            self._is_closed = True
        if is_first and self._thread.is_alive():
            self._commands.put(self._start_close)
            self._thread.join()

    # ---- the transfer thread

    def _run(self) -> None:
        try:
            self._agent = NixlAgent(
                self._agent_name, self._kv_cache, transport=self._require_transport
            )
        except BaseException as error:  # `register` waits for this thread's word
            tls = os.environ.get("UCX_TLS", "any")
            message = f"NIXL cannot start with UCX_TLS={tls}: {error}"
            self._opened.set_exception(KVTransferError(message))
            return
        self._opened.set_result(self._agent.endpoint)
        try:
            self._work()
        finally:
            # Only after a bug is there anybody left to tell.
            with self._lock:
                self._is_closed = True
            if self._close_by is None:
                self.failure = "the KV transfer thread has died"
                for peer in self._all_peers:
                    peer.on_lost("the transfer thread has died")

    def _work(self) -> None:
        while self._close_by is None or self._has_posted():
            if self._close_by is not None and time.monotonic() > self._close_by:
                logger.error("READs have not landed %g s after the close began", CLOSE_S)
                return  # what they write into must stay as it is
            self._take_commands()
            self._progress()
        for peer in list(self._all_peers):
            self._forget(peer)
        self._agent.close()

    def _take_commands(self) -> None:
        """Sleep until there is something to do, then run what was asked for."""
        wait_s = self._wait_s()
        try:
            command = self._commands.get(timeout=wait_s)
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _wait_s(self) -> float | None:
        if self._has_posted():
            return self._poll_s
        return MAX_POLL_S if self._is_pumping() else None

    def _is_pumping(self) -> bool:
        # Once connected, READs through shared memory need nothing of P.
        is_read = self._is_exporting and self._require_transport != "shm"
        return is_read or time.monotonic() < self._pump_until

    def _has_posted(self) -> bool:
        return any(peer.posted or peer.probe is not None for peer in self._all_peers)

    def _start_pump(self) -> None:
        self._pump_until = time.monotonic() + CONNECT_S

    def _start_close(self) -> None:
        self._close_by = time.monotonic() + CLOSE_S
        for peer in self._all_peers:
            self._drop_waiting(peer, "transport is closing")

    def _progress(self) -> None:
        now = time.monotonic()
        if self._is_pumping():
            self._agent.progress()
        self._poll_s = min(MAX_POLL_S, self._poll_s * 1.5)
        for peer in list(self._all_peers):
            if peer.probe is not None:
                self._poll_probe(peer, now)
            for piece in list(peer.posted):
                self._poll_piece(peer, piece, now)
            if peer.transport and not peer.is_failing:
                self._post_waiting(peer)
            if peer.is_removed and not peer.posted and peer.probe is None:
                self._forget(peer)

    # ---- peers

    def _connect(self, peer: Peer) -> None:
        """Load the peer and read a few bytes of it: the first READ sets up the connection."""
        self._all_peers.append(peer)
        peer.connect_by = time.monotonic() + CONNECT_S
        try:
            peer.dlist = self._agent.add_peer(peer.agent_name, peer.welcome.endpoint)
            self._post_probe(peer)
        except (*NIXL_ERRORS, ValueError) as error:
            self._lose(peer, f"cannot connect: {error}")

    def _post_probe(self, peer: Peer) -> None:
        peer.probe = self._agent.make_probe(peer.agent_name, peer.welcome.endpoint)
        peer.num_probes += 1
        peer.num_synchronous += self._agent.post(peer.probe)

    def _poll_probe(self, peer: Peer, now: float) -> None:
        is_over, error = self._agent.poll(peer.probe)
        if not is_over:
            if now > peer.connect_by:
                self._lose(peer, f"cannot connect within {CONNECT_S:g} s")
            return
        self._agent.release(peer.probe)
        peer.probe = None
        self._poll_s = MIN_POLL_S
        if error:
            self._lose(peer, f"cannot connect: {error}")
        elif peer.num_synchronous == NUM_SYNCHRONOUS or peer.num_probes == MAX_PROBES:
            self._label(peer)
        elif not peer.is_lost:
            try:
                self._post_probe(peer)
            except NIXL_ERRORS as post_error:
                self._lose(peer, f"cannot connect: {post_error}")

    def _label(self, peer: Peer) -> None:
        """NIXL does not say how it reaches a peer. Only a copy through shared memory is over when
        it is posted; networks then differ by whether there is an RDMA device, which UCX prefers.
        """
        required = self._require_transport
        if peer.num_synchronous == NUM_SYNCHRONOUS:
            found = "shm"
        elif required in ("tcp", "rdma"):
            found = required
        else:
            found = "rdma" if has_rdma_device() else "tcp"
        if required == "shm" and found != "shm":
            self._lose(peer, f"require_transport is shm, but {peer.key} is reached by {found}")
        elif not peer.is_lost:
            peer.transport = found
            logger.info("connected to %s by %s", peer.key, found)

    def _lose(self, peer: Peer, reason: str) -> None:
        self._drop_waiting(peer, reason)
        with self._lock:
            is_news = not peer.is_lost
            peer.is_lost = True
        if is_news:
            logger.warning("lost %s: %s", peer.key, reason)
            peer.on_lost(reason)

    def _forget(self, peer: Peer) -> None:
        self._all_peers.remove(peer)
        if peer.dlist is not None:
            self._agent.remove_peer(peer.agent_name, peer.dlist)
            peer.dlist = None

    # ---- READs

    def _queue_read(self, read: Read) -> None:
        peer = read.peer
        per_piece = max(1, MAX_POSTED_BYTES // self._block_bytes)
        for start in range(0, len(read.local), per_piece):
            stop = min(start + per_piece, len(read.local))
            num_bytes = (stop - start) * self._block_bytes
            peer.waiting.append(Piece(read, start, stop, num_bytes))
            read.num_left += 1
        if peer.is_lost or self._close_by is not None:
            self._drop_waiting(peer, "connection was closed")

    def _post_waiting(self, peer: Peer) -> None:
        while peer.waiting and not peer.is_lost and not peer.is_failing:
            piece = peer.waiting[0]
            if peer.posted and peer.posted_bytes + piece.num_bytes > MAX_POSTED_BYTES:
                return
            peer.waiting.popleft()
            read, now = piece.read, time.monotonic()
            if not read.started_at:
                read.started_at = read.progress_at = now
            wanted = slice(piece.start, piece.stop)
            peer.posted.append(piece)
            peer.posted_bytes += piece.num_bytes
            try:
                piece.handle = self._agent.make_read(
                    peer.dlist, read.remote[wanted], read.local[wanted]
                )
                self._agent.post(piece.handle)
            except RemoteDisconnectError as error:
                self._fail(piece, str(error), now)
            except NIXL_ERRORS as error:
                if piece.handle is None:  # it was never posted
                    self._fail(piece, str(error), now)
                else:
                    piece.is_unsure = True
                    self._give_up(read, str(error))
            self._poll_s = MIN_POLL_S
            self._poll_piece(peer, piece, time.monotonic())

    def _poll_piece(self, peer: Peer, piece: Piece, now: float) -> None:
        read = piece.read
        if piece.is_unsure:
            return
        if piece.settled_at is None:
            is_over, error = self._agent.poll(piece.handle)
            if not is_over:
                if error:
                    self._give_up(read, error)
                else:
                    self._check_stall(read, now)
                return
            if not error:
                read.progress_at = now
                self._land(peer, piece)
                return
            self._fail(piece, error, now)
        self._agent.progress()
        if piece.settled_at is not None and now >= piece.settled_at:
            self._land(peer, piece)
            self._lose(peer, f"READ failed: {read.error}")

    def _give_up(self, read: Read, error: str) -> None:
        """A READ has gone wrong and nobody can say that it will not land: its blocks stay out of
        the pool for good (K5), and the process has to be restarted.
        """
        if self.failure is None:
            self.failure = f"a READ from {read.peer.key} may still land after an error: {error}"
            logger.error("%s", self.failure)
        if not read.is_stalled:
            read.is_stalled = True
            read.error = read.error or error
            read.on_stall()
            self._lose(read.peer, error)

    def _fail(self, piece: Piece, error: str, now: float) -> None:
        piece.read.error = piece.read.error or error
        piece.read.peer.is_failing = True
        piece.settled_at = now + SETTLE_S

    def _check_stall(self, read: Read, now: float) -> None:
        if read.is_stalled or now - read.progress_at <= read.timeout_s:
            return
        read.is_stalled = True
        read.error = read.error or f"no progress for {read.timeout_s:g} s"
        read.on_stall()
        self._lose(read.peer, read.error)

    def _land(self, peer: Peer, piece: Piece) -> None:
        peer.posted.remove(piece)
        peer.posted_bytes -= piece.num_bytes
        if piece.handle is not None:
            self._agent.release(piece.handle)
        self._poll_s = MIN_POLL_S
        self._drop_piece(piece, piece.read.error)

    def _drop_waiting(self, peer: Peer, error: str) -> None:
        while peer.waiting:
            self._drop_piece(peer.waiting.popleft(), error)

    def _drop_piece(self, piece: Piece, error: str) -> None:
        """A piece is over; so is its READ with the last one."""
        read = piece.read
        read.error = read.error or error
        read.num_left -= 1
        if read.num_left > 0:
            return
        with self._lock:
            self._num_pending -= 1
        result = ReadResult(
            is_ok=not read.error,
            num_bytes=len(read.local) * self._block_bytes,
            duration_s=time.monotonic() - read.started_at if read.started_at else 0.0,
            transport=read.peer.transport,
            error=read.error,
        )
        read.on_done(result)
