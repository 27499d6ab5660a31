"""The waterfall against the client's own clock, and the engines' part of it."""

import asyncio
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import AsyncClient
from pdserve_common.types.engine import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    Generate,
    KVTransferStats,
    PrefillStats,
)
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.workers.clients.worker_client import WorkerClient
from support.stack import attached_worker
from support.waiting import busyness

# Large enough that a prompt's prefill is far longer than the way to the client.
SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
PROMPT_LEN = 700
LONG_PROMPT_LEN = 1500
CHUNK = 128
BLOCK_SIZE = 16
NUM_REQUESTS = 7
MAX_TRIES = 10

QUEUED = EngineCoreEventType.QUEUED
SCHEDULED = EngineCoreEventType.SCHEDULED
KV_SESSION_OPENED = EngineCoreEventType.KV_SESSION_OPENED
KV_TRANSFER_STARTED = EngineCoreEventType.KV_TRANSFER_STARTED
KV_TRANSFER_FINISHED = EngineCoreEventType.KV_TRANSFER_FINISHED
KV_ACCEPTED = EngineCoreEventType.KV_ACCEPTED


class Measured(NamedTuple):
    """One request: the client's clock (ns) and what the router says."""

    ttft_ns: int
    first_itl_ns: int
    metrics: pb2.RequestMetrics


@pytest.fixture(scope="module")
def stack(make_served_model: Callable[..., Path], start_stack: Any) -> Iterator[Any]:
    model = make_served_model("LlamaForCausalLM", **SHAPE)
    with start_stack(model=model, num_threads=1, max_num_batched_tokens=CHUNK) as running:
        yield running


async def ask(client: AsyncClient, seed: int) -> Measured:
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 250) for _ in range(PROMPT_LEN)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    started = time.monotonic_ns()
    times: list[int] = []
    metrics = pb2.RequestMetrics()
    async for output in client.generate(prompt, params, timeout_s=60):
        times += [time.monotonic_ns()] * len(output.outputs[0].token_ids)
        if output.finished:
            metrics = output.metrics
    assert len(times) == 6
    return Measured(times[0] - started, times[1] - times[0], metrics)


@pytest.fixture(scope="module")
def measured(stack: Any) -> list[Measured]:
    """One request after the other; the first, left out, warms up what is slow once."""

    async def ask_all() -> list[Measured]:
        client = AsyncClient(stack.grpc_address)
        try:
            return [await ask(client, seed) for seed in range(NUM_REQUESTS + 1)]
        finally:
            await client.close()

    return asyncio.run(ask_all())[1:]


def test_every_stage_of_a_handoff_is_known(measured: list[Measured]) -> None:
    def each(name: str) -> list[int]:
        return [getattr(one.metrics, f"{name}_ns") for one in measured]

    def median(name: str) -> float:
        return statistics.median(each(name))

    # At best: on a busy machine messages may be late.
    shares = [a / b for a, b in zip(each("prefill"), each("ttft"), strict=True)]
    assert max(shares) > 1 / 2 / busyness(), shares
    assert median("prefill_queue") > 0
    for stage in ("decode_queue", "decode_admit", "first_decode_step"):
        assert median(stage) > 0
    assert min(each("release_ack")) < median("first_decode_step") / 2 * busyness(), "it is hidden"
    assert median("kv_transfer") > median("kv_transfer_exposed"), "the prefill hides most of it"
    for _, _, metrics in measured:
        assert (metrics.path, metrics.kv_transport) == ("disaggregated", "shm")
        assert (metrics.determinism, metrics.num_redrives) == ("exact", 0)


async def test_a_client_may_ask_what_each_worker_did(stack: Any) -> None:
    client = AsyncClient(stack.grpc_address)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompt = random.Random("events").choices(range(3, 250), k=PROMPT_LEN)
    answer = client.generate(prompt, params, timeout_s=60, include_events=True)
    (completion,) = [output async for output in answer][-1].outputs
    await client.close()
    assert [event.since_queued_ns for event in completion.events if event.type == QUEUED] == [0, 0]
    told = {
        engine_id: {event.type: event.since_queued_ns for event in completion.events
                    if event.engine_id == engine_id}
        for engine_id in ("prefill-0", "decode-0")
    }  # fmt: skip
    assert list(told["prefill-0"]) == [QUEUED, SCHEDULED, KV_SESSION_OPENED]
    started, finished, accepted = (
        told["decode-0"][kind] for kind in (KV_TRANSFER_STARTED, KV_TRANSFER_FINISHED, KV_ACCEPTED)
    )
    assert 0 < started < finished <= accepted < 60e9
    assert told["decode-0"][SCHEDULED] >= finished


async def test_a_prompts_blocks_are_read_while_it_is_computed(stack: Any) -> None:
    """One READ for each chunk, unless D is late: then it reads two at once."""
    num_chunks = -(-LONG_PROMPT_LEN // CHUNK)
    num_reads = []
    async with attached_worker(stack, "prefill-0") as p, attached_worker(stack, "decode-0") as d:
        while num_chunks not in num_reads and len(num_reads) < MAX_TRIES:
            stats = await hand_over(p, d, long_request(seed=len(num_reads)))
            assert stats.num_blocks == -(-LONG_PROMPT_LEN // BLOCK_SIZE)
            assert stats.exposed_s < stats.transfer_s
            num_reads.append(stats.num_reads)
    assert max(num_reads) == num_chunks, num_reads


def long_request(seed: int) -> EngineCoreRequest:
    prompt = random.Random(f"long {seed}").choices(range(3, 250), k=LONG_PROMPT_LEN)
    return EngineCoreRequest(
        request_id=f"overlap-{seed}",
        prompt_token_ids=tuple(prompt),
        task=Generate(SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)),
    )


async def hand_over(
    p: WorkerClient, d: WorkerClient, request: EngineCoreRequest
) -> KVTransferStats:
    """Run both legs of a request; return what D says of the transfer, and of P's part as P does."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[KVTransferStats] = loop.create_future()
    told: asyncio.Future[PrefillStats] = loop.create_future()

    def on_prefill(output: EngineCoreOutput) -> None:
        if output.prefill_stats is not None:
            told.set_result(output.prefill_stats)

    def on_decode(output: EngineCoreOutput) -> None:
        if output.kv_transfer_stats is not None:
            found.set_result(output.kv_transfer_stats)

    p_leg = dataclasses.replace(d.kv_transfer_params, do_remote_decode=True)
    d_leg = dataclasses.replace(p.kv_transfer_params, do_remote_prefill=True)
    p.add_request(dataclasses.replace(request, kv_transfer_params=p_leg), on_prefill)
    d.add_request(dataclasses.replace(request, kv_transfer_params=d_leg), on_decode)
    stats, prefill = await asyncio.wait_for(asyncio.gather(found, told), 60)
    assert stats.prefill_stats == prefill
    return stats
