"""Copies of whole blocks between the KV pool and host memory, made beside the model's steps."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pdserve_engine.kv.kv_cache import KVCache

# A block's bytes, in host memory; nobody writes into it any more.
BlockBytes = npt.NDArray[np.uint8]


class BlockCopier:
    """Copies blocks one by one, and returns when a copy is made. Used by one thread, which need not
    be the engine's: nothing else may write into the block meanwhile.

    On a GPU copies go through pinned memory, on a stream of their own.
    """

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        device = kv_cache.tensor.device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pinned = torch.empty(kv_cache.block_bytes, dtype=torch.uint8, pin_memory=True)

    def read(self, block_id: int) -> BlockBytes:
        """Return a copy of a block, whose step is over."""
        copy = np.empty(self._kv_cache.block_bytes, dtype=np.uint8)
        block = self._block(block_id)
        if self._stream is not None:
            self._copy(self._pinned, block)
            block = self._pinned
        np.copyto(copy, block.numpy())
        copy.flags.writeable = False
        return copy

    def write(self, block_id: int, content: BlockBytes) -> None:
        """Fill a block, for steps that are begun after the return."""
        block = self._block(block_id)
        if self._stream is None:
            np.copyto(block.numpy(), content)
            return
        np.copyto(self._pinned.numpy(), content)
        self._copy(block, self._pinned)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def _block(self, block_id: int) -> torch.Tensor:
        """Return a block's bytes; the pool's memory may have moved since the last call."""
        return self._kv_cache.tensor[block_id].view(torch.uint8).view(-1)
