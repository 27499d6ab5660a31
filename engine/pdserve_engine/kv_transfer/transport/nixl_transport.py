"""KV transport over NIXL: one thread owns the agent and all READs.

UCX makes progress only inside NIXL calls, so the thread polls while a READ is outstanding, and the
owner's pumps from its first peer on: often while peers connect or are told of blocks, else now and
then, for READs that were given up and have not landed. Without peers it sleeps on its queue. A READ
needs the owner to answer once, over shared memory too now and then; what the owner sends over TCP
it sends within that one call.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # its own up to Python 3.10
from typing import TYPE_CHECKING

import numpy as np

from pdserve_common.errors import KVTransferError
from pdserve_common.observability import defects
from pdserve_common.types.kv import KVRankEndpoint
from pdserve_engine.kv_transfer.base import PoolTransport, ReadDone, check_block_ids
from pdserve_engine.kv_transfer.transport.nixl_agent import MAX_LEFT_OPEN, NIXL_ERRORS, NixlAgent
from pdserve_engine.kv_transfer.transport.nixl_reads import NixlRead, Pace, Peer, Reads
from pdserve_engine.kv_transfer.transport.pool_check import check_own_pool
from pdserve_engine.kv_transfer.transport.rdma import has_rdma_device
from pdserve_engine.kv_transfer.transport.shards import KVPeer
from pdserve_engine.request.watchdog import RunningStep, StepWatch

if TYPE_CHECKING:
    from pdserve_engine.kv.kv_cache import KVCache

logger = logging.getLogger(__name__)

MIN_POLL_S = 50e-6
MAX_POLL_S = 1e-3
MIN_PUMP_S = 100e-6
# Below 3% of a core for sessions that nobody reads. Only a reader that reads late meets it: when
# the owner has told of blocks it pumps often.
MAX_PUMP_S = 10e-3
# A READ that is posted while nothing is exported has been given up already: nobody waits for it.
IDLE_PUMP_S = 20e-3
# A call into UCX that takes this long has served a peer; an idle one takes a few microseconds.
SERVED_S = 200e-6
# How long a peer may take to connect, and the owner helps it to.
CONNECT_S = 5.0
# Registering a large pool with a NIC may take minutes: it pins every page.
REGISTER_S = 600.0
SELF_CHECK_S = 5.0
CLOSE_S = 5.0
# For what comes after the last READ has landed, or was given up.
CLOSE_MARGIN_S = 5.0
# A round of commands that takes longer keeps READs unpolled for long enough to count.
LONG_ROUND_S = 0.1
# No call into NIXL takes this long unless it hangs: copies through shared memory come in parts.
HANG_S = 10.0
# This many READs that are over when posted, or on a GPU soon after, mean shared memory; while a
# connection is being set up some are not, and on a network one might be by luck.
NUM_QUICK = 3
MAX_PROBES = 12


class NixlTransport(PoolTransport):
    """Reads blocks with NIXL's UCX backend."""

    name = "nixl"

    def __init__(
        self,
        agent_name: str,
        *,
        require_transport: str = "any",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._agent_name = agent_name
        self._require_transport = require_transport
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._num_peers = 0
        self._is_closed = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._failure: str | None = None
        # What the thread is at; None while it sleeps on its queue.
        self._turn: RunningStep | None = None
        self._watch = StepWatch(timeout_s=HANG_S, clock=clock)
        # The rest belongs to the thread.
        self._all_peers: list[Peer] = []
        self._is_exporting = False
        # Peers are connecting until then.
        self._connect_until = 0.0
        self._has_had_peers = False
        self._poll_pace = Pace(MIN_POLL_S, MAX_POLL_S)
        self._pump_pace = Pace(MIN_PUMP_S, MAX_PUMP_S)
        self._close_by: float | None = None

    # ---- any thread

    def register(self, kv_cache: "KVCache") -> None:
        self._num_blocks = kv_cache.num_blocks
        self._kv_cache = kv_cache
        self._opened: Future[KVRankEndpoint] = Future()
        self._thread.start()
        try:
            self._endpoint = self._opened.result(timeout=REGISTER_S)
        except FutureTimeoutError as error:
            raise KVTransferError(f"NIXL does not start within {REGISTER_S:g} s") from error

    def endpoint(self) -> KVRankEndpoint:
        return self._endpoint

    @property
    def failure(self) -> str | None:
        bound_s = self._watch.overrun(self._turn)
        if bound_s is not None:
            self._fail(f"the KV transfer thread has hung for {bound_s:g} s")
        return self._failure

    def self_check(self) -> None:
        outcome: Future[None] = Future()
        self._commands.put(lambda: self._check_own_pool(outcome))
        try:
            # Twice as long: the call into NIXL may itself hang.
            outcome.result(timeout=2 * SELF_CHECK_S)
        except Exception as error:  # whatever it is, it has not moved any
            raise KVTransferError(
                f"NIXL moves no bytes with UCX_TLS={_ucx_tls()} ({error or 'it hangs'}): set "
                "require_transport, or UCX_TLS, to what this machine has"
            ) from error

    def expect_peer(self) -> None:
        self._commands.put(self._start_connect)

    def set_exporting(self, is_exporting: bool) -> None:
        def change() -> None:
            self._is_exporting = is_exporting
            self._pump_pace.restart(self._clock())

        self._commands.put(change)

    def poll_soon(self) -> None:
        self._commands.put(lambda: self._pump_pace.restart(self._clock()))

    def add_peer(self, peer: KVPeer, on_lost: Callable[[str], None]) -> str:
        with self._lock:
            self._num_peers += 1
            key = f"{peer.agent_name}#{self._num_peers}"
            added = self._peers[key] = Peer(key, peer, on_lost)
        self._commands.put(lambda: self._connect(added))
        return key

    def remove_peer(self, peer: str) -> None:
        with self._lock:
            removed = self._peers.pop(peer, None)
            if removed is None:
                return
            removed.is_removed = removed.is_lost = True
        self._commands.put(lambda: self._reads.drop_waiting(removed, "connection was closed"))

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
            check_block_ids(remote_block_ids, target.rank.num_blocks, "remote")
            check_block_ids(local_block_ids, self._num_blocks, "local")
            if not remote_block_ids or len(remote_block_ids) != len(local_block_ids):
                raise KVTransferError("remote and local block ids differ in number, or are none")
            # NIXL merges blocks that follow on one another on both sides, in ascending order only;
            # what the prefix cache gives back comes in descending order.
            local = np.asarray(local_block_ids, dtype=np.int32)
            order = np.argsort(local)
            remote = np.asarray(remote_block_ids, dtype=np.int32)[order]
            read = NixlRead(target, remote, local[order], timeout_s, on_done, on_stall)
            self._commands.put(lambda: self._queue_read(read))

    def close(self) -> None:
        with self._lock:
            is_first = not self._is_closed
            self._is_closed = True
        if is_first and self._thread.is_alive():
            self._commands.put(self._start_close)
            self._thread.join(CLOSE_S + CLOSE_MARGIN_S)
            if self._thread.is_alive():
                self._fail("the KV transfer thread hangs and cannot be closed")

    # ---- the transfer thread

    def _run(self) -> None:
        try:
            self._agent = NixlAgent(self._agent_name, self._kv_cache)
            self._reads = Reads(
                self._agent,
                on_progress=self._on_progress,
                lose=self._lose,
                fail=self._fail,
                clock=self._clock,
            )
            self._opened.set_result(self._agent.endpoint)
        except BaseException as error:  # `register` waits for this thread
            message = f"NIXL cannot start with UCX_TLS={_ucx_tls()}: {error}"
            self._opened.set_exception(KVTransferError(message))
            return
        try:
            self._work()
        except BaseException as error:  # nobody knows any more what will land (K5)
            defects.record("kv_transfer", error, "this worker")
            self._fail("the KV transfer thread has died")
            for peer in self._all_peers:
                with defects.contained("kv_transfer", "word of a lost peer"):
                    peer.on_lost("the transfer thread has died")
        finally:
            self._turn = None
            with self._lock:
                self._is_closed = True

    def _work(self) -> None:
        while self._close_by is None or any(peer.posted for peer in self._all_peers):
            if self._close_by is not None and self._clock() > self._close_by:
                logger.error("READs have not landed %g s after the close began", CLOSE_S)
                return  # what they write into must stay as it is
            self._take_commands()
            self._progress()
        for peer in list(self._all_peers):
            self._drop_probe(peer)
            self._forget(peer)
        self._agent.close()

    def _take_commands(self) -> None:
        """Sleep until there is something to do, then run what was asked for: not for long, because
        READs are not polled meanwhile.
        """
        wait_s = self._wait_s()
        self._turn = None
        try:
            command = self._commands.get(timeout=wait_s)
        except queue.Empty:
            self._begin_turn()
            return
        started_at, round_s = self._clock(), 0.0
        with contextlib.suppress(queue.Empty):
            while True:
                self._begin_turn()
                command()
                round_s = self._clock() - started_at
                if round_s > MAX_POLL_S:
                    break
                command = self._commands.get_nowait()
        self._begin_turn()
        if round_s > LONG_ROUND_S:
            for peer in self._all_peers:
                peer.pause_clock(round_s)

    def _begin_turn(self) -> None:
        self._turn = RunningStep(self._clock(), None)

    def _on_progress(self) -> None:
        self._begin_turn()
        self._poll_pace.restart(self._clock())

    def _wait_s(self) -> float | None:
        if self._has_posted():
            return self._poll_pace.interval_s(self._clock())
        if self._is_connecting():
            return min(MAX_POLL_S, self._pump_pace.interval_s(self._clock()))
        if self._is_exporting:
            return self._pump_pace.interval_s(self._clock())
        return IDLE_PUMP_S if self._has_had_peers else None

    def _is_connecting(self) -> bool:
        return self._clock() < self._connect_until

    def _has_posted(self) -> bool:
        return any(peer.posted or peer.probe is not None for peer in self._all_peers)

    def _start_connect(self) -> None:
        self._has_had_peers = True
        self._connect_until = self._clock() + CONNECT_S
        self._pump_pace.restart(self._clock())

    def _check_own_pool(self, outcome: "Future[None]") -> None:
        try:
            check_own_pool(self._agent, self._kv_cache, SELF_CHECK_S)
        except Exception as error:  # whoever waits gets it
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    def _start_close(self) -> None:
        self._close_by = self._clock() + CLOSE_S
        for peer in self._all_peers:
            self._reads.drop_waiting(peer, "transport is closing")

    def _progress(self) -> None:
        now = self._clock()
        if self._is_exporting or self._has_had_peers:
            self._pump(now)
        for peer in list(self._all_peers):
            if peer.probe is not None:
                self._poll_probe(peer, now)
            self._reads.progress(peer, now)
            if peer.is_removed and not peer.posted and peer.probe is None:
                self._forget(peer)
        self._reads.check_stalled(now)

    def _pump(self, now: float) -> None:
        self._agent.progress()
        if self._clock() - now > SERVED_S:
            self._pump_pace.restart(self._clock())  # who has read will read again

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            logger.error("%s", reason)

    # ---- peers

    def _connect(self, peer: Peer) -> None:
        """Load the peer and read a few bytes of it: the first READ sets up the connection."""
        if peer.is_removed:
            return  # nobody would use the connection, and NIXL would not close it
        self._all_peers.append(peer)
        peer.connect_by = self._clock() + CONNECT_S
        with self._loses_unconnected(peer):
            peer.blocks = self._agent.add_peer(peer.rank)
            if self._agent.num_left_open > MAX_LEFT_OPEN:
                self._fail(f"more than {MAX_LEFT_OPEN} broken connections cannot be closed")
            self._post_probe(peer)

    @contextlib.contextmanager
    def _loses_unconnected(self, peer: Peer) -> Iterator[None]:
        """Lose the peer by an exception: nothing was read into the pool from it yet."""
        try:
            yield
        except (*NIXL_ERRORS, ValueError) as error:
            self._lose(peer, f"cannot connect: {error}")
        except Exception as error:
            defects.record("kv_transfer", error, f"the connection to {peer.key}")
            self._lose(peer, f"cannot connect: {error!r}")

    def _post_probe(self, peer: Peer) -> None:
        peer.probe = self._agent.make_probe(peer.rank)
        peer.num_probes += 1
        peer.probed_at = self._clock()
        self._poll_pace.restart(peer.probed_at)
        peer.is_probe_over = self._agent.post(peer.probe)

    def _poll_probe(self, peer: Peer, now: float) -> None:
        is_over, error = self._agent.poll(peer.probe)
        if not is_over:
            if now > peer.connect_by:
                self._lose(peer, f"cannot connect within {CONNECT_S:g} s")
            return
        self._drop_probe(peer)
        polled_at = self._clock()
        self._poll_pace.restart(polled_at)
        if error:
            self._lose(peer, f"cannot connect: {error}")
            return
        with self._loses_unconnected(peer):
            self._agent.mark_connected(peer.rank.agent_name)
            is_quick = polled_at - peer.probed_at < self._agent.quick_probe_s
            peer.num_quick += peer.is_probe_over or is_quick
            if peer.num_quick == NUM_QUICK or peer.num_probes == MAX_PROBES:
                self._label(peer)
            elif not peer.is_lost:
                self._post_probe(peer)

    def _drop_probe(self, peer: Peer) -> None:
        """Also of one that may still land: that is in the agent's own memory."""
        if peer.probe is not None:
            self._agent.release(peer.probe)
            peer.probe = None

    def _label(self, peer: Peer) -> None:
        """NIXL does not say how it reaches a peer. Only a copy through shared memory is over when
        it is posted, or soon after on a GPU, where RDMA is as quick; networks then differ by
        whether there is an RDMA device, which UCX prefers.
        """
        required = self._require_transport
        on_network = "rdma" if has_rdma_device() else "tcp"
        may_be_rdma = required == "any" and on_network == "rdma" and self._agent.quick_probe_s > 0
        if peer.num_quick == NUM_QUICK and required != "rdma" and not may_be_rdma:
            found = "shm"
        elif required in ("tcp", "rdma"):
            found = required
        else:
            found = on_network
        if required == "shm" and found != "shm":
            self._lose(peer, f"require_transport is shm, but {peer.key} is reached by {found}")
        elif not peer.is_lost:
            peer.transport = found
            logger.info("connected to %s by %s", peer.key, found)

    def _lose(self, peer: Peer, reason: str) -> None:
        self._reads.drop_waiting(peer, reason)
        peer.is_broken = True
        with self._lock:
            is_new = not peer.is_lost
            peer.is_lost = True
        if is_new:
            logger.warning("lost %s: %s", peer.key, reason)
            peer.on_lost(reason)

    def _forget(self, peer: Peer) -> None:
        self._all_peers.remove(peer)
        if peer.blocks is not None:
            name = peer.rank.agent_name
            self._agent.remove_peer(name, peer.blocks, is_broken=peer.is_broken)
            peer.blocks = None

    # ---- READs

    def _queue_read(self, read: NixlRead) -> None:
        self._reads.queue(read)
        if read.peer.is_lost or self._close_by is not None:
            self._reads.drop_waiting(read.peer, "connection was closed")


def _ucx_tls() -> str:
    return os.environ.get("UCX_TLS", "any")
