"""READs that go wrong, and a count of what a worker has NIXL hold. Only for memory of the CPU."""

import ctypes
import enum
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdserve_engine.kv_transfer.transport import nixl_transport
from pdserve_engine.kv_transfer.transport.nixl_agent import (
    BlockDescriptors,
    BlockIds,
    NixlAgent,
    _api,
    _bindings,
)
from pdserve_engine.kv_transfer.transport.shards import KVPeer

if TYPE_CHECKING:
    from pdserve_engine.kv.kv_cache import KVCache


class ReadFault(enum.Enum):
    """What happens to one READ."""

    # It cannot be posted; nobody knows whether it will land.
    POST_BACKEND_ERROR = "post_backend_error"
    # It cannot be posted, and will not land.
    POST_REMOTE_DISCONNECT = "post_remote_disconnect"
    # An error after it was posted; nobody knows whether it will land.
    BACKEND_ERROR = "backend_error"
    # An error after it was posted; nothing lands any more.
    REMOTE_DISCONNECT = "remote_disconnect"
    # It does not end before `reset`; then it copies.
    STALL = "stall"
    # `delay_s` after it was posted wrong numbers appear where it writes, whoever owns the blocks by
    # then. Only then it copies, and ends.
    LATE = "late"
    # It ends well, with wrong numbers in its last block.
    CORRUPT = "corrupt"
    # An exception that nobody expects, before it was posted.
    DEFECT = "defect"


_POST_ERRORS = {
    ReadFault.POST_BACKEND_ERROR: _bindings.nixlBackendError,
    ReadFault.POST_REMOTE_DISCONNECT: _bindings.nixlRemoteDisconnectError,
}
# What `poll` returns.
_POLL_ERRORS = {
    ReadFault.POST_BACKEND_ERROR: (False, "injected"),
    ReadFault.POST_REMOTE_DISCONNECT: (True, "injected"),
    ReadFault.BACKEND_ERROR: (False, "injected"),
    ReadFault.REMOTE_DISCONNECT: (True, "injected"),
}
_DELAYED = (ReadFault.STALL, ReadFault.LATE)
_FATAL = (ReadFault.POST_BACKEND_ERROR, ReadFault.BACKEND_ERROR)


@dataclass(slots=True, eq=False)
class _FaultyRead:
    fault: ReadFault
    delay_s: float
    local: BlockIds
    may_copy: bool = False
    is_copying: bool = False


class ReadFaults:
    """The faults of READs to come, and of those under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: deque[tuple[ReadFault, float]] = deque()
        self._delayed: list[_FaultyRead] = []
        # What NIXL holds for the worker now; how many READs suffered a fault so far, and how many
        # of these one after which the worker has to be restarted.
        held = dict.fromkeys(("registered_bytes", "peers", "handles"), 0)
        self.counts = {**held, "faulty_reads": 0, "fatal_reads": 0}

    def inject(self, fault: str, count: int, delay_s: float) -> None:
        """Let the next `count` READs suffer a ReadFault. Raises ValueError for an unknown one."""
        kind = ReadFault(fault)
        with self._lock:
            self._next.extend([(kind, delay_s)] * count)

    def reset(self) -> None:
        """Nothing else goes wrong; READs that hang copy when they are next polled."""
        with self._lock:
            self._next.clear()
            for read in self._delayed:
                read.may_copy = True
            self._delayed.clear()

    def take(self, local: BlockIds) -> _FaultyRead | None:
        """Return what is to happen to a new READ into these blocks."""
        with self._lock:
            if not self._next:
                return None
            fault, delay_s = self._next.popleft()
            read = _FaultyRead(fault, delay_s, local)
            if fault in _DELAYED:
                self._delayed.append(read)
            self.counts["faulty_reads"] += 1
            self.counts["fatal_reads"] += fault in _FATAL
            return read

    def land_late(self, read: _FaultyRead, agent: "FaultyNixlAgent") -> None:
        """Write wrong numbers, unless `reset` came first."""
        with self._lock:
            if not read.may_copy:
                agent.scribble(read.local)
                read.may_copy = True


class CountingAgent(_api.nixl_agent):  # type: ignore[misc]
    """NIXL's own agent, with an account of the memory that is registered."""

    def register_memory(self, regions: Any, *args: Any, **options: Any) -> Any:
        registration = super().register_memory(regions, *args, **options)
        FaultyNixlAgent.faults.counts["registered_bytes"] += _num_bytes(registration)
        return registration

    def deregister_memory(self, registration: Any, *args: Any, **options: Any) -> None:
        super().deregister_memory(registration, *args, **options)
        FaultyNixlAgent.faults.counts["registered_bytes"] -= _num_bytes(registration)


def _num_bytes(registration: Any) -> int:
    """Of regions as NIXL lists them: (address, bytes, device, ...)."""
    return sum(registration[i][1] for i in range(registration.descCount()))


class FaultyNixlAgent(NixlAgent):
    """A NixlAgent whose READs suffer faults. The probes of a new connection never do."""

    faults = ReadFaults()

    def __init__(self, name: str, kv_cache: "KVCache") -> None:
        super().__init__(name, kv_cache)
        # By id of the handle.
        self._reads: dict[int, _FaultyRead | None] = {}
        self._pool_address = kv_cache.data_ptr

    def add_peer(self, peer: KVPeer) -> BlockDescriptors:
        blocks = super().add_peer(peer)
        self._count("peers", 1)
        return blocks

    def remove_peer(self, name: str, blocks: BlockDescriptors, *, is_broken: bool) -> None:
        super().remove_peer(name, blocks, is_broken=is_broken)
        self._count("peers", -1)

    def make_probe(self, peer: KVPeer) -> Any:
        handle = super().make_probe(peer)
        self._count("handles", 1)
        return handle

    def make_read(self, blocks: BlockDescriptors, remote: BlockIds, local: BlockIds) -> Any:
        read = self.faults.take(local)
        if read is not None and read.fault is ReadFault.DEFECT:
            raise AssertionError("injected")
        handle = super().make_read(blocks, remote, local)
        self._count("handles", 1)
        self._reads[id(handle)] = read
        return handle

    def release(self, handle: Any) -> None:
        self._reads.pop(id(handle), None)
        super().release(handle)
        self._count("handles", -1)

    def post(self, handle: Any) -> bool:
        is_over = self._post(handle, self._reads.get(id(handle)))
        if id(handle) in self._reads:
            self.on_read_posted()
        return is_over

    def on_read_posted(self) -> None:
        """Do nothing: the stage mid_read is here."""

    def _post(self, handle: Any, read: _FaultyRead | None) -> bool:
        if read is None or read.is_copying:
            return super().post(handle)
        if read.fault in _POST_ERRORS:
            raise _POST_ERRORS[read.fault]("injected")
        if read.fault is ReadFault.LATE:
            timer = threading.Timer(read.delay_s, self.faults.land_late, (read, self))
            timer.daemon = True
            timer.start()
        return False if read.fault in _DELAYED else super().post(handle)

    def poll(self, handle: Any) -> tuple[bool, str]:
        read = self._reads.get(id(handle))
        if read is None:
            return super().poll(handle)
        if read.fault is ReadFault.REMOTE_DISCONNECT and not super().poll(handle)[0]:
            return False, ""  # it may not say that nothing lands any more before that is so
        if read.fault in _POLL_ERRORS:
            return _POLL_ERRORS[read.fault]
        if read.fault in _DELAYED and not read.may_copy:
            return False, ""
        if read.fault in _DELAYED and not read.is_copying:
            read.is_copying = True
            super().post(handle)
        is_over, error = super().poll(handle)
        if read.fault is ReadFault.CORRUPT and is_over and not error:
            self.scribble(read.local[-1:])
        return is_over, error

    def scribble(self, block_ids: Iterable[int]) -> None:
        """Turn what these blocks of ours hold into other numbers, none of them NaN."""
        size = self._block_bytes
        for block_id in block_ids:
            place = (ctypes.c_uint8 * size).from_address(self._pool_address + int(block_id) * size)
            place[:] = [byte ^ 0x80 for byte in place]

    def _count(self, what: str, change: int) -> None:
        self.faults.counts[what] += change


def install() -> ReadFaults:
    """Let the transport use a FaultyNixlAgent, and that count what it registers; return what tells
    it which READs fail.
    """
    _api.nixl_agent = CountingAgent
    nixl_transport.NixlAgent = FaultyNixlAgent  # type: ignore[attr-defined]
    return FaultyNixlAgent.faults
