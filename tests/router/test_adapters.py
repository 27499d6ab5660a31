"""Requests with adapters go to workers that hold them, and names stand for digests."""

import dataclasses
import time
from collections.abc import AsyncIterator

import pytest

from pdserve_common.errors import NoWorkerError
from pdserve_common.types.engine import EngineCoreRequest, Generate
from pdserve_common.types.lora import LoRAAdapter, LoRARequest
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.workers.routing import pairs
from pdserve_router.workers.worker import WorkerState
from support.modelled_pool import ModelledPool, modelled

REQUEST = EngineCoreRequest(
    request_id="r",
    prompt_token_ids=tuple(range(64)),
    task=Generate(SamplingParams(max_tokens=8)),
)
A, B = (LoRAAdapter(name=name, digest=name * 64, rank=8) for name in "ab")
NEW_A = LoRAAdapter(name="a", digest="c" * 64, rank=8)


@pytest.fixture(autouse=True)
async def models() -> AsyncIterator[None]:
    with modelled():
        yield


def with_adapter(adapter: LoRAAdapter) -> EngineCoreRequest:
    lora = LoRARequest(lora_name=adapter.name, digest=adapter.digest)
    return dataclasses.replace(REQUEST, lora_request=lora)


@pytest.mark.parametrize("policy", ["prefix", "power_of_two", "round_robin", "session"])
async def test_both_legs_go_to_workers_that_hold_it(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each is paired with all, so also with those that hold it.
    monkeypatch.setattr(pairs, "ENOUGH_PAIRS", 40)
    stage = ModelledPool(40, 40, routing_policy=policy)
    holders = {*stage.pool.prefill[:2], *stage.pool.decode[38:]}
    for worker in stage.workers:
        stage.attach(worker, adapters=(A, B) if worker in holders else (B,))
    await stage.proven()
    for index in range(30):
        route = stage.pool.route(with_adapter(A), session=str(index))
        assert route.path == "disaggregated"
        assert set(route.workers) <= holders
    assert {stage.pool.route(with_adapter(B)).decode for _ in range(60)} - holders
    # What D holds alone is computed there.
    for prefill in stage.pool.prefill[:2]:
        stage.set(prefill, WorkerState.DOWN)
    route = stage.pool.route(with_adapter(A))
    assert (route.path, route.reason) == ("local", "no_prefill_worker")
    assert route.decode in holders
    for decode in stage.pool.decode[38:]:
        stage.set(decode, WorkerState.DOWN)
    with pytest.raises(NoWorkerError):
        stage.pool.route(with_adapter(A))
    stage.pool.route(with_adapter(B))
    await stage.pool.close()


async def test_a_name_is_what_most_decode_workers_hold() -> None:
    stage = ModelledPool(1, 3)
    held = ((A,), (A, B), (NEW_A,))
    for worker, adapters in zip(stage.pool.decode, held, strict=True):
        stage.attach(worker, adapters=adapters)
    stage.attach(stage.pool.prefill[0], adapters=(LoRAAdapter(name="p", digest="p", rank=1),))
    assert stage.pool.model_limits().adapters == (A, B)
    stage.set(stage.pool.decode[1], WorkerState.DOWN)
    stage.set(stage.pool.decode[0], WorkerState.DOWN)
    limits = stage.pool.model_limits()
    assert limits.adapters == (NEW_A,)
    assert limits.adapter("a") == NEW_A
    assert limits.adapter("b") is None
    await stage.pool.close()


async def test_the_wait_for_an_adapter_counts_from_the_loss_of_its_last_holder() -> None:
    stage = ModelledPool(1, 3)
    pool = stage.pool
    for worker, adapters in zip(pool.decode, ((A,), (A, B), ()), strict=True):
        stage.attach(worker, adapters=adapters)
    versions = {pool.decode[0].model_version}
    for known in ((), versions):
        for each in (A, B):
            assert time.monotonic() - pool.last_served_at(known, adapter=each.digest) < 1
    began = time.monotonic()
    stage.set(pool.decode[0], WorkerState.DOWN)
    assert pool.last_served_at((), adapter=A.digest) > began
    stage.set(pool.decode[1], WorkerState.DOWN)
    ended = time.monotonic()
    for known in ((), versions):
        for each in (A, B):
            served_at = pool.last_served_at(known, adapter=each.digest)
            assert began < served_at <= ended
            assert pool.last_served_at(known, adapter=each.digest) == served_at, "time goes on"
        assert pool.last_served_at(known) > ended
    assert pool.last_served_at((), adapter=NEW_A.digest) < began
    await pool.close()
