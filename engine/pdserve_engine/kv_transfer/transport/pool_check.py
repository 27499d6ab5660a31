"""Shows at start that NIXL moves bytes here, before a request depends on it."""

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from pdserve_engine.kv.memory import wait_for_stream
from pdserve_engine.kv_transfer.transport.nixl_agent import NixlAgent

if TYPE_CHECKING:
    from pdserve_engine.kv.kv_cache import KVCache

POLL_S = 100e-6


def check_own_pool(agent: NixlAgent, kv_cache: "KVCache", timeout_s: float) -> None:
    """Read the pool's first block into its last and leave both zeroed. Nothing else may use it yet.

    It goes the way of every READ but for the network and CUDA IPC, which need a peer. Raises
    NIXL_ERRORS; ValueError if it failed or other bytes arrived; TimeoutError after `timeout_s`, and
    then it may still land.
    """
    if kv_cache.num_blocks < 2:
        return  # there is nowhere to read to
    first, last = kv_cache.tensor[0].view(torch.uint8), kv_cache.tensor[-1].view(torch.uint8)
    pattern = torch.arange(first.numel(), dtype=torch.int32).remainder_(251).to(torch.uint8)
    first.copy_(pattern.view(first.shape))
    wait_for_stream(first.device)
    _read_own_block(agent, 0, kv_cache.num_blocks - 1, timeout_s)
    is_equal = torch.equal(first, last)
    first.zero_()
    last.zero_()
    wait_for_stream(last.device)
    if not is_equal:
        raise ValueError("a block read from the own pool differs from what was there")


def _read_own_block(agent: NixlAgent, source: int, target: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    blocks = agent.prep_own_pool()
    handle = agent.make_read(blocks, np.array([source], np.int32), np.array([target], np.int32))
    is_over, error = agent.post(handle), ""
    while not is_over:
        # What is left behind here may still be written to: the process must not go on.
        if error:
            raise ValueError(error)
        if time.monotonic() > deadline:
            raise TimeoutError(f"a READ of one block takes longer than {timeout_s:g} s")
        time.sleep(POLL_S)
        is_over, error = agent.poll(handle)
    agent.release(handle)
    blocks.release()
