"""Whether UCX may use CUDA IPC, by which one process copies out of another one's GPU memory."""

import ctypes
import logging
import os

import torch

logger = logging.getLogger(__name__)

HANDLE_BYTES = 64


def check_cuda_ipc(tensor: torch.Tensor) -> None:
    """Keep UCX from CUDA IPC if there is no handle of the memory of a tensor [...], of any dtype:
    it would not register it. To be called before UCX starts, on a thread that has called CUDA
    before.

    Raises ValueError if UCX_TLS names cuda_ipc.
    """
    error = export_error(tensor)
    if error is None:
        return
    allowed = os.environ.setdefault("UCX_TLS", "^cuda_ipc")
    if "cuda_ipc" in allowed.split(","):
        raise ValueError(f"no other process can open the KV pool's memory: {error}")
    logger.warning("KV travels without CUDA IPC, as no other process can open the pool: %s", error)


def export_error(tensor: torch.Tensor) -> str | None:
    """Say why the driver gives out no handle of the memory of a GPU tensor [...], of any dtype, or
    return None if it does. The thread has called CUDA before.

    It does for what cudaMalloc has allocated, as torch's allocator does unless it has expandable
    segments, but not in every sandbox.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    handle = ctypes.create_string_buffer(HANDLE_BYTES)
    code = driver.cuIpcGetMemHandle(handle, ctypes.c_uint64(tensor.data_ptr()))
    if code == 0:
        return None
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return f"cuIpcGetMemHandle returns {(name.value or b'').decode() or code}"
