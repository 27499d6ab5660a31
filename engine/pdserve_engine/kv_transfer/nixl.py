"""NIXL behind the few calls the transfer thread makes. One thread owns an agent.

UCX makes progress only inside NIXL calls.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve_common.kv_types import KVMemoryRegion, KVRankEndpoint
from pdserve_engine.kv_transfer.cuda_ipc import check_cuda_ipc
from pdserve_engine.kv_transfer.links import RecentKeys

if TYPE_CHECKING:
    from pdserve_engine.kv.kv_cache import KVCache

try:
    # It picks the NIXL for the CUDA that is there, if it is installed.
    from nixl import _api, _bindings
except ImportError:
    from nixl_cu13 import _api, _bindings

logger = logging.getLogger(__name__)

# Registrations beyond 4 GiB are slow on some NICs.
MAX_REGION_BYTES = 2 << 30
PROBE_BYTES = 64
# No copy of GPU memory is over when it is posted. What UCX copies through the host comes at
# 0.5 GB/s, by CUDA IPC at 20 GB/s and more: that takes enough bytes to be seen.
CUDA_PROBE_BYTES = 4 << 20
MIN_IPC_BYTES_PER_S = 2e9
# Peers whose links have ended, as when a network was down for some seconds.
MAX_UNUSED_PEERS = 16
# Connections to living peers that NIXL will never close. After this many a new process is cheaper.
MAX_LEFT_OPEN = 64

# They have no base class of their own.
NIXL_ERRORS = (
    _bindings.nixlBackendError,
    _bindings.nixlCancelledError,
    _bindings.nixlInvalidParamError,
    _bindings.nixlMismatchError,
    _bindings.nixlNotAllowedError,
    _bindings.nixlNotFoundError,
    _bindings.nixlNotPostedError,
    _bindings.nixlNotSupportedError,
    _bindings.nixlRemoteDisconnectError,
    _bindings.nixlRepostActiveError,
    _bindings.nixlUnknownError,
)

RemoteDisconnectError = _bindings.nixlRemoteDisconnectError

BlockIds = NDArray[np.int32]


class NixlAgent:
    """A NIXL agent with one registered KV pool. Raises NIXL_ERRORS."""

    def __init__(self, name: str, kv_cache: "KVCache") -> None:
        """Register the pool in slices."""
        self._name = name
        self._block_bytes = kv_cache.block_bytes
        self._device = kv_cache.tensor.device
        is_cuda = kv_cache.tensor.is_cuda
        memory_type = "VRAM" if is_cuda else "DRAM"
        device_id = kv_cache.tensor.get_device() if is_cuda else 0
        if is_cuda:
            # UCX goes by its thread's CUDA context, which a thread has from its first call on.
            torch.cuda.set_device(self._device)
            torch.cuda.synchronize()
            check_cuda_ipc(kv_cache.tensor)
        regions = _regions(kv_cache, device_id)
        config = _api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = _api.nixl_agent(name, config)
        # Of the pool's kind: bytes between the host and a GPU may go another way.
        num_bytes = CUDA_PROBE_BYTES if is_cuda else PROBE_BYTES
        self._scratch = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        # A probe is over within so long of its post, 0: at once, if it goes through shared memory.
        self.quick_probe_s = CUDA_PROBE_BYTES / MIN_IPC_BYTES_PER_S if is_cuda else 0.0
        memory = [
            (r.base_address, r.num_blocks * self._block_bytes, r.device_id, "") for r in regions
        ]
        scratch = (self._scratch.data_ptr(), num_bytes, device_id, "")
        self._registrations = [
            self._agent.register_memory(memory, memory_type),
            self._agent.register_memory([scratch], memory_type),
        ]
        self._local = self._prep("NIXL_INIT_AGENT", regions, memory_type)
        self._num_uses: dict[str, int] = {}
        # Peers that have answered; those that were removed after it and have not come back.
        self._connected: set[str] = set()
        self._removed = RecentKeys()
        self.num_left_open = 0
        self.endpoint = KVRankEndpoint(
            nixl_metadata=self._agent.get_agent_metadata(),
            memory_type=memory_type,
            regions=regions,
        )

    def add_peer(self, name: str, endpoint: KVRankEndpoint) -> Any:
        """Return the descriptors of a peer's pool, to be given to `remove_peer` later.

        Raises ValueError if the metadata is another agent's.
        """
        if name not in self._num_uses:
            loaded = self._agent.add_remote_agent(endpoint.nixl_metadata)
            loaded = loaded.decode() if isinstance(loaded, bytes) else loaded
            if loaded != name:
                if loaded not in self._num_uses:
                    self._agent.remove_remote_agent(loaded)
                raise ValueError(f"{name} sent the metadata of {loaded}")
            self._forget_predecessors(name)
            self._num_uses[name] = 0
            # It was removed, and lives: its name is that of one start of a process (K1).
            self.num_left_open += name in self._removed
            self._removed.discard(name)
        try:
            dlist = self._prep(name, endpoint.regions, endpoint.memory_type)
        except NIXL_ERRORS:
            self._forget_unused(max_kept=0)
            raise
        # Last, as the one used last.
        self._num_uses[name] = self._num_uses.pop(name) + 1
        return dlist

    def mark_connected(self, name: str) -> None:
        """The peer has answered. One that never did leaves nothing open when it is removed."""
        self._connected.add(name)

    def remove_peer(self, name: str, dlist: Any, *, is_broken: bool) -> None:
        """Release a peer's descriptors.

        NIXL 1.5 never closes the sockets of a peer that is removed and lives: only what is broken,
        or one of too many, is removed. The others keep their connection, should they come back.
        `num_left_open` counts how often a peer came back after it had answered and was removed.
        """
        dlist.release()
        self._num_uses[name] -= 1
        if is_broken and self._num_uses[name] == 0:
            self._remove(name)
        self._forget_unused(max_kept=MAX_UNUSED_PEERS)

    def _forget_predecessors(self, name: str) -> None:
        """Forget earlier starts of the same worker: names are engine_id.epoch."""
        engine_id = name.rpartition(".")[0]
        for other, num_uses in list(self._num_uses.items()):
            if num_uses == 0 and other.rpartition(".")[0] == engine_id:
                self._remove(other)

    def _forget_unused(self, max_kept: int) -> None:
        unused = [name for name, num_uses in self._num_uses.items() if num_uses == 0]
        for name in unused[: max(0, len(unused) - max_kept)]:
            self._remove(name)

    def _remove(self, name: str) -> None:
        del self._num_uses[name]
        if name in self._connected:
            self._connected.remove(name)
            self._removed.add(name)
        try:
            self._agent.remove_remote_agent(name)
        except NIXL_ERRORS as error:
            logger.warning("cannot remove %s from NIXL: %s", name, error)

    def prep_own_pool(self) -> Any:
        """Return the descriptors of the own pool for READs from it; `release` them."""
        return self._prep(self._name, self.endpoint.regions, self.endpoint.memory_type)

    def make_read(self, dlist: Any, remote: BlockIds, local: BlockIds) -> Any:
        """Return the handle of a READ of whole blocks, not posted yet."""
        return self._agent.make_prepped_xfer("READ", self._local, local, dlist, remote)

    def make_probe(self, name: str, endpoint: KVRankEndpoint) -> Any:
        """Return the handle of a READ of some bytes into scratch memory, not posted yet."""
        agent, region, own = self._agent, endpoint.regions[0], self.endpoint
        num_bytes = min(self._scratch.nbytes, region.num_blocks * self._block_bytes)
        local = agent.get_xfer_descs(
            [(self._scratch.data_ptr(), num_bytes, own.regions[0].device_id)], own.memory_type
        )
        remote = agent.get_xfer_descs(
            [(region.base_address, num_bytes, region.device_id)], endpoint.memory_type
        )
        return agent.initialize_xfer("READ", local, remote, name)

    def post(self, handle: Any) -> bool:
        """Post a READ; True if it is over already."""
        return bool(self._agent.transfer(handle) == "DONE")

    def poll(self, handle: Any) -> tuple[bool, str]:
        """Return (can nothing land any more, what went wrong).

        After a remote disconnect nothing lands; after any other error nobody knows (rule K5).
        """
        try:
            state = self._agent.check_xfer_state(handle)
        except RemoteDisconnectError as error:
            return True, str(error)
        except NIXL_ERRORS as error:
            return False, str(error)
        return state == "DONE", "NIXL reports an error" if state == "ERR" else ""

    def release(self, handle: Any) -> None:
        """Free a handle of a READ that is over."""
        try:
            handle.release()
        except NIXL_ERRORS as error:
            logger.warning("cannot release a transfer handle: %s", error)

    def progress(self) -> None:
        """Let UCX work: for peers that connect to us or read, and for our own READs."""
        self._agent.get_new_notifs()

    def wait_for_copies(self) -> None:
        """Return when nothing lands any more of READs whose peer is gone: copies that UCX has begun
        on a GPU go on, on streams of its own.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Deregister; no READ may be outstanding and no peer in use."""
        self.wait_for_copies()  # of probes
        self._forget_unused(max_kept=0)
        self._local.release()
        for registration in self._registrations:
            self._agent.deregister_memory(registration)
        # The agent lives, with its sockets, as long as anything that it handed out.
        del self._agent, self._local, self._registrations

    def _prep(self, name: str, regions: Sequence[KVMemoryRegion], memory_type: str) -> Any:
        """One descriptor for each block; its index is the block id."""
        size = self._block_bytes
        rows = [(r.base_address, size, r.device_id, size, r.num_blocks) for r in regions]
        return self._agent.prep_xfer_dlist(name, np.array(rows, dtype=np.uint64), memory_type)


def _regions(kv_cache: "KVCache", device_id: int) -> tuple[KVMemoryRegion, ...]:
    size, num_blocks = kv_cache.block_bytes, kv_cache.num_blocks
    per_region = max(1, MAX_REGION_BYTES // size)
    return tuple(
        KVMemoryRegion(
            base_address=kv_cache.data_ptr + first * size,
            first_block=first,
            num_blocks=min(per_region, num_blocks - first),
            device_id=device_id,
        )
        for first in range(0, num_blocks, per_region)
    )
