"""Profiles and traces for tests of the advisor."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from pdserve_client.advisor.cost_profile import CostProfile, HandoffCost, StepCost, WorkerLimits
from pdserve_client.advisor.kv_pool import KVPool
from pdserve_client.advisor.trace import Trace, TraceRequest

STEP = StepCost(
    prefill_base_s=0.005,
    prompt_token_s=5e-5,
    prompt_pair_s=5e-9,
    decode_base_s=0.01,
    row_s=1e-4,
    context_token_s=1e-8,
)
LIMITS = WorkerLimits(block_size=16, num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=512)
HANDOFF = HandoffCost(
    grant_s=0.002, chunk_s=0.001, token_s=1e-6, admit_s=0.0005, bytes_per_token=1024.0
)


def a_profile(**changes: Any) -> CostProfile:
    """A machine that nobody has."""
    values: dict[str, Any] = {
        "model": "m",
        "machine": "invented",
        "measured_at": "2026-01-01T00:00:00+00:00",
        "step": STEP,
        "decode_worker": LIMITS,
        "prefill_worker": LIMITS,
        "handoff": HANDOFF,
        "overhead_s": 0.0,
    }
    return CostProfile(**(values | changes))


def server(seconds_a_token: float) -> CostProfile:
    """A worker that serves one request at a time, a prompt for so long for each of its tokens."""
    nothing = dict.fromkeys(
        ("prefill_base_s", "prompt_pair_s", "decode_base_s", "row_s", "context_token_s"), 0.0
    )
    limits = WorkerLimits(
        block_size=16, num_blocks=2**20, max_num_seqs=1, max_num_batched_tokens=2**22
    )
    return a_profile(
        step=StepCost(prompt_token_s=seconds_a_token, **nothing),
        prefill_worker=limits,
        decode_worker=WorkerLimits(
            block_size=16, num_blocks=2**24, max_num_seqs=2**16, max_num_batched_tokens=2**22
        ),
        handoff=HandoffCost(
            grant_s=0.0, chunk_s=0.0, token_s=0.0, admit_s=0.0, bytes_per_token=1.0
        ),
    )


def poisson(
    rate: float, num_tokens: Callable[[random.Random], int], num_requests: int, *, seed: int = 1
) -> Trace:
    """Prompts of so many tokens, each answered with one or two."""
    rng, arrival_s = random.Random(seed), 0.0
    requests = []
    for _ in range(num_requests):
        requests.append(TraceRequest(arrival_s, num_tokens(rng), 2))
        arrival_s += rng.expovariate(rate)
    return Trace(tuple(requests))


@contextmanager
def checked_pools() -> Iterator[list[KVPool]]:
    """Within, each change of a KV pool is checked; yields the pools that are made."""
    pools: list[KVPool] = []

    class CheckedPool(KVPool):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            pools.append(self)

        def check(self) -> None:
            assert 0 <= self.num_held <= self.num_blocks
            assert self.num_held + self.num_cached <= self.num_blocks
            assert self._num_own >= 0

    def checking(name: str) -> Callable[..., Any]:
        def method(self: CheckedPool, *args: Any) -> Any:
            result = getattr(KVPool, name)(self, *args)
            self.check()
            return result

        return method

    for name in ("take_cached", "grow", "publish", "free"):
        setattr(CheckedPool, name, checking(name))
    with mock.patch("pdserve_client.advisor.worker_model.KVPool", CheckedPool):
        yield pools
