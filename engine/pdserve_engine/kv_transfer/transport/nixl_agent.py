"""NIXL behind the few calls the transfer thread makes. One thread owns an agent.

UCX makes progress only inside NIXL calls.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve_common.types.kv import KVMemoryRegion, KVRankEndpoint
from pdserve_engine.kv_transfer.connectors.links import RecentKeys
from pdserve_engine.kv_transfer.transport.cuda_ipc import check_cuda_ipc
from pdserve_engine.kv_transfer.transport.shards import KVPeer

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
# Pieces of a block that are read: where in it, and how many bytes.
Pieces = tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class BlockDescriptors:
    """What NIXL knows of the pieces of blocks that are read, and of where they go. A descriptor's
    index is the number of its piece times that of all blocks, and the block's id.
    """

    remote: Any
    num_remote_blocks: int
    # For all peers that are read the same pieces of.
    local: Any
    num_local_blocks: int
    num_pieces: int

    def release(self) -> None:
        self.remote.release()


class NixlAgent:
    """A NIXL agent with one registered KV pool. Raises NIXL_ERRORS."""

    def __init__(self, name: str, kv_cache: "KVCache") -> None:
        """Register the pool in slices."""
        self._name = name
        self._block_bytes = kv_cache.block_bytes
        self._num_blocks = kv_cache.num_blocks
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
        # The probe is of the pool's kind: bytes between the host and a GPU may go another way.
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
        # Few, as there are few ways to cut a model.
        self._locals: dict[Pieces, Any] = {}
        self._num_uses: dict[str, int] = {}
        # The worker of each peer in there, and that worker's start.
        self._starts: dict[str, tuple[str, str]] = {}
        # What it has told of itself.
        self._metadata: dict[str, bytes] = {}
        # Peers that have answered; those that were removed after it and have not come back.
        self._connected: set[str] = set()
        self._removed = RecentKeys()
        self.num_left_open = 0
        self.endpoint = KVRankEndpoint(
            shard=kv_cache.spec.part,
            memory_type=memory_type,
            regions=regions,
            nixl_metadata=self._agent.get_agent_metadata(),
        )

    def add_peer(self, peer: KVPeer) -> BlockDescriptors:
        """Return the descriptors for what is read of a peer, to be given to `remove_peer` later.

        Raises ValueError if the metadata is another agent's, or if it has changed while READs by
        what it was have not landed.
        """
        name = peer.agent_name
        if self._metadata.get(name, peer.endpoint.nixl_metadata) != peer.endpoint.nixl_metadata:
            self._forget_registration(name)
        if name not in self._num_uses:
            loaded = self._agent.add_remote_agent(peer.endpoint.nixl_metadata)
            loaded = loaded.decode() if isinstance(loaded, bytes) else loaded
            if loaded != name:
                if loaded not in self._num_uses:
                    self._agent.remove_remote_agent(loaded)
                raise ValueError(f"{name} sent the metadata of {loaded}")
            self._forget_predecessors(peer)
            self._num_uses[name] = 0
            self._starts[name] = (peer.engine_id, peer.epoch)
            self._metadata[name] = peer.endpoint.nixl_metadata
            # It was removed, and lives: its name is that of one start of a process (K1).
            self.num_left_open += name in self._removed
            self._removed.discard(name)
        try:
            blocks = self._prep_blocks(peer)
        except NIXL_ERRORS:
            self._forget_unused(max_kept=0)
            raise
        # Last, as the one used last.
        self._num_uses[name] = self._num_uses.pop(name) + 1
        return blocks

    def mark_connected(self, name: str) -> None:
        """The peer has answered. One that never did leaves nothing open when it is removed."""
        self._connected.add(name)

    def remove_peer(self, name: str, blocks: BlockDescriptors, *, is_broken: bool) -> None:
        """Release a peer's descriptors.

        NIXL 1.5 never closes the sockets of a peer that is removed and lives: only what is broken,
        or one of too many, is removed. The others keep their connection, should they come back.
        `num_left_open` counts how often a peer came back after it had answered and was removed.
        """
        blocks.release()
        self._num_uses[name] -= 1
        if is_broken and self._num_uses[name] == 0:
            self._remove(name)
        self._forget_unused(max_kept=MAX_UNUSED_PEERS)

    def _forget_registration(self, name: str) -> None:
        """The peer has slept: its agent of before is gone, and so are its connections."""
        if self._num_uses[name] > 0:
            raise ValueError(f"{name} has registered its pool anew, and READs of before go on")
        self._remove(name)
        self._removed.discard(name)

    def _forget_predecessors(self, peer: KVPeer) -> None:
        """Forget earlier starts of the same worker."""
        for name, (engine_id, epoch) in list(self._starts.items()):
            is_earlier = engine_id == peer.engine_id and epoch != peer.epoch
            if is_earlier and self._num_uses[name] == 0:
                self._remove(name)

    def _forget_unused(self, max_kept: int) -> None:
        unused = [name for name, num_uses in self._num_uses.items() if num_uses == 0]
        for name in unused[: max(0, len(unused) - max_kept)]:
            self._remove(name)

    def _remove(self, name: str) -> None:
        del self._num_uses[name], self._starts[name], self._metadata[name]
        if name in self._connected:
            self._connected.remove(name)
            self._removed.add(name)
        try:
            self._agent.remove_remote_agent(name)
        except NIXL_ERRORS as error:
            logger.warning("cannot remove %s from NIXL: %s", name, error)

    def prep_own_pool(self) -> BlockDescriptors:
        """Return the descriptors of the own pool for READs from it; `release` them."""
        whole = ((0, self._block_bytes),)
        return BlockDescriptors(
            remote=self._prep(self._name, self.endpoint, self._block_bytes, whole),
            num_remote_blocks=self._num_blocks,
            local=self._prep_local(whole),
            num_local_blocks=self._num_blocks,
            num_pieces=1,
        )

    def make_read(self, blocks: BlockDescriptors, remote: BlockIds, local: BlockIds) -> Any:
        """Return the handle of a READ of what there is to read of these blocks, int32 [n] on either
        side, not posted yet.
        """
        if blocks.num_pieces > 1:
            remote = _indices(remote, blocks.num_pieces, blocks.num_remote_blocks)
            local = _indices(local, blocks.num_pieces, blocks.num_local_blocks)
        return self._agent.make_prepped_xfer("READ", blocks.local, local, blocks.remote, remote)

    def make_probe(self, peer: KVPeer) -> Any:
        """Return the handle of a READ of some bytes into scratch memory, not posted yet."""
        agent, endpoint, own = self._agent, peer.endpoint, self.endpoint
        region = endpoint.regions[0]
        num_bytes = min(self._scratch.nbytes, region.num_blocks * peer.block_bytes)
        local = agent.get_xfer_descs(
            [(self._scratch.data_ptr(), num_bytes, own.regions[0].device_id)], own.memory_type
        )
        remote = agent.get_xfer_descs(
            [(region.base_address, num_bytes, region.device_id)], endpoint.memory_type
        )
        return agent.initialize_xfer("READ", local, remote, peer.agent_name)

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
        for local in self._locals.values():
            local.release()
        for registration in self._registrations:
            self._agent.deregister_memory(registration)
        # The agent lives, with its sockets, as long as anything that it handed out.
        del self._agent, self._locals, self._registrations

    def _prep_blocks(self, peer: KVPeer) -> BlockDescriptors:
        theirs = tuple((piece.remote_offset, piece.num_bytes) for piece in peer.slices)
        ours = tuple((piece.local_offset, piece.num_bytes) for piece in peer.slices)
        return BlockDescriptors(
            remote=self._prep(peer.agent_name, peer.endpoint, peer.block_bytes, theirs),
            num_remote_blocks=peer.num_blocks,
            local=self._prep_local(ours),
            num_local_blocks=self._num_blocks,
            num_pieces=len(peer.slices),
        )

    def _prep_local(self, pieces: Pieces) -> Any:
        if pieces not in self._locals:
            prepared = self._prep("NIXL_INIT_AGENT", self.endpoint, self._block_bytes, pieces)
            self._locals[pieces] = prepared
        return self._locals[pieces]

    def _prep(self, name: str, owner: KVRankEndpoint, block_bytes: int, pieces: Pieces) -> Any:
        """Return what NIXL makes of the same pieces of all blocks."""
        rows = [
            (r.base_address + offset, num_bytes, r.device_id, block_bytes, r.num_blocks)
            for offset, num_bytes in pieces
            for r in owner.regions
        ]
        rows_array = np.array(rows, dtype=np.uint64)
        return self._agent.prep_xfer_dlist(name, rows_array, owner.memory_type)


def _indices(block_ids: BlockIds, num_pieces: int, num_blocks: int) -> BlockIds:
    """Return the indices of all pieces of some blocks, block by block."""
    firsts = np.arange(num_pieces, dtype=np.int32) * np.int32(num_blocks)
    indices: BlockIds = np.add.outer(block_ids, firsts)
    return indices.ravel()


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
