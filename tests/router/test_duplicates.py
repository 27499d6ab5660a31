"""Of two workers that call themselves the same the one that was there first is used."""

import random
from dataclasses import replace

import pytest

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_router.workers.duplicates import Duplicates
from support.crew import ANSWERS, A, D, P
from support.waiting import until


async def path_of(stack) -> str:
    """Return the path of a request that needs a pair, answered as it should be."""
    request = pb2.GenerateRequest(
        tokens=pb2.TokenPrompt(token_ids=[5, 6, 7]),
        sampling_params=core.SamplingParams(max_tokens=4),
    )
    outputs = [response.output async for response in stack.stub.Generate(request, timeout=60)]
    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
    assert tokens == [*ANSWERS[A][:4]]
    return outputs[-1].metrics.path


def num_duplicates(stack, role: str = "decode") -> float:
    return stack.metric("pdserve_workers", role=role, state="duplicate")


@pytest.mark.parametrize("role", [P, D])
@pytest.mark.parametrize("departure", ["dies", "leaves"])
async def test_a_name_in_use_stays_with_who_has_it(
    start_stack, crew, caplog, role, departure
) -> None:
    for each in (P, D):
        await crew.join(each, engine_id=each.name.lower())
    first = crew.workers[0 if role is P else 1]
    name = role.name.lower()
    async with start_stack(wait=False, **crew.sources) as stack:
        proven = ("pdserve_worker_pairs", {"state": "proven"})
        await until(lambda: stack.metric(proven[0], **proven[1]) == 1)
        # An older process; but it came later.
        second = await crew.join(role, engine_id=name, started_at_ms=0)
        await until(lambda: num_duplicates(stack, name) == 1)
        for _ in range(4):
            assert await path_of(stack) == "disaggregated"
        assert second.requests == second.probes == []
        assert stack.metric(proven[0], **proven[1]) == 1
        text = f"worker {second.address} calls itself {name}, as worker {first.address} does"
        assert text in caplog.text
        # It restarts, and is the same to us.
        first.info = replace(first.info, epoch="f" * 32, started_at_ms=10**12)
        first.cut()
        client = next(
            client
            for client in (*stack.server.pool.prefill, *stack.server.pool.decode)
            if client.address == first.address
        )
        await until(lambda: client.epoch == "f" * 32)
        await until(lambda: client.is_ready)
        await until(lambda: stack.metric(proven[0], **proven[1]) == 1)
        assert num_duplicates(stack, name) == 1
        assert second.requests == second.probes == []
        if departure == "dies":
            await first.stop()
        else:
            crew.leave(first)
        # The pair of one that is down stays proven until it is another process.
        num_proven = 2 if departure == "dies" else 1
        await until(lambda: len(second.probes) == 1)
        await until(lambda: stack.metric(proven[0], **proven[1]) == num_proven)
        assert num_duplicates(stack, name) == 0
        assert await path_of(stack) == "disaggregated"
        assert second.requests


async def test_a_prefill_and_a_decode_worker_may_share_a_name(start_stack, crew) -> None:
    """Each knows its links by the name of the other side."""
    for role in (P, D):
        await crew.join(role, engine_id="same")
    async with start_stack(wait=False, **crew.sources) as stack:
        await until(lambda: stack.metric("pdserve_worker_pairs", state="proven") == 1)
        assert await path_of(stack) == "disaggregated"


@pytest.mark.parametrize("seed", range(4))
async def test_routers_that_see_both_at_once_take_the_same(start_stack, crew, seed) -> None:
    """In whatever order they attach: the older process."""
    rng = random.Random(seed)
    for _ in range(3):
        await crew.join(D, engine_id="same")
    async with start_stack(wait=False, **crew.sources) as stack:
        await until(lambda: num_duplicates(stack) == 2)
        workers = list(stack.server.pool.decode)
        for _ in range(10):
            rng.shuffle(workers)
            another = Duplicates({worker: place for place, worker in enumerate(workers)})
            for worker in workers:
                another.update(worker, keeps_owners=False)
            (owner,) = set(workers) - another.by_engine_id
            assert owner.address == crew.workers[0].address
