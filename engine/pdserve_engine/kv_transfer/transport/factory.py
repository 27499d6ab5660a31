"""Makes the transport of a rank; loads NIXL only if it is wanted."""

import os

from pdserve_engine.kv_transfer.base import KVIdentity, PoolTransport

# What UCX may use. Shared memory (CMA) moves the bytes, but UCX cannot do its own messages over it
# and sets up over TCP; that it is not used for more is checked at each peer.
_UCX_TLS = {"shm": "tcp,cma,self", "tcp": "tcp,self", "rdma": "rc,dc,ud,self"}
# What it needs besides for a pool on a GPU. Between processes of one machine such a pool is shared
# memory by CUDA IPC; without it UCX copies through the host.
_CUDA_UCX_TLS = {
    "shm": "cuda_copy,cuda_ipc",
    "tcp": "cuda_copy",
    "rdma": "cuda_copy,gdr_copy",
}


def make_transport(
    identity: KVIdentity, *, rank: int = 0, require_transport: str = "any", device: str = "cpu"
) -> PoolTransport:
    """Return an unregistered transport for a rank's pool on a device, "cpu" or "cuda"."""
    # UCX reads its settings when NIXL loads it.
    if require_transport in _UCX_TLS:
        names = [_UCX_TLS[require_transport]]
        if device == "cuda":
            names.append(_CUDA_UCX_TLS[require_transport])
        os.environ["UCX_TLS"] = ",".join(names)
    if device == "cuda" and require_transport in ("any", "shm"):
        # Else UCX reads by CUDA IPC only if it sees NVLinks, which a virtual machine hides, and
        # otherwise over TCP, a hundred times slower.
        os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
    # Else the transfer thread stands in connect(2), for over two minutes where packets are dropped,
    # and UCX leaks the socket of a connection that is refused.
    os.environ.setdefault("UCX_TCP_CONN_NB", "y")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    from pdserve_engine.kv_transfer.transport.nixl_transport import NixlTransport

    return NixlTransport(identity.agent_name(rank), require_transport=require_transport)
