"""Many streams, clients that leave, deadlines: survivors are right and everything comes back."""

import asyncio
import contextlib
import random
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import AsyncClient
from pdserve_client.stack import ServiceProcess
from pdserve_common.types.sampling_params import SamplingParams

WEIGHTS_MIB = 1
NUM_STREAMS = 64
# Longer than anybody waits for: ends only because somebody ends it.
ENDLESS = SamplingParams(temperature=0.0, max_tokens=8000, ignore_eos=True)
FINISHED = 'pdserve_engine_requests_total{outcome="length"}'
LISTENING = re.compile(r"listening: gRPC on (\d+)")
START_TIMEOUT_S = 300.0


@pytest.fixture
async def client(stack: Any) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(stack.grpc_address)
    yield client
    await client.close()


def random_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 190) for _ in range(rng.choice([1, 16, 17, 40, 200]))]


async def collect(
    client: AsyncClient, prompt: list[int], num_tokens: int, stop_after: int | None = None
) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    tokens: list[int] = []
    stream = client.generate(prompt, params, timeout_s=60)
    async for output in stream:
        for completion in output.outputs:
            assert not completion.HasField("error"), completion.error
            tokens.extend(completion.token_ids)
        if stop_after is not None and len(tokens) >= stop_after:
            await stream.aclose()
            break
    return tokens


async def test_64_streams_with_random_cancels(stack: Any, client: AsyncClient) -> None:
    rng = random.Random(7)
    prompts = [random_prompt(rng) for _ in range(NUM_STREAMS)]
    alone = [await collect(client, prompt, 24) for prompt in prompts[::8]]
    stops = [rng.choice([None, None, 1, 2, 5, 12]) for _ in prompts]

    async def all_at_once() -> list[list[int]]:
        return await asyncio.gather(
            *(collect(client, p, 24, stop) for p, stop in zip(prompts, stops, strict=True))
        )

    await all_at_once()  # for the threads that so many bring
    stack.assert_idle()
    before = stack.resources()
    answers = await all_at_once()
    for index, (answer, stop) in enumerate(zip(answers, stops, strict=True)):
        if index % 8 == 0:
            whole = alone[index // 8]
            assert answer == (whole if stop is None else whole[: len(answer)])
        assert len(answer) >= (24 if stop is None else stop)
    stack.assert_idle()
    # Pools of threads grow and shrink; what a stream leaves behind comes once for each.
    slack = NUM_STREAMS // 8
    for name, (fds, threads) in stack.resources().items():
        had_fds, had_threads = before[name]
        assert fds <= had_fds + slack, f"{name} has {fds} descriptors, had {had_fds}"
        assert threads <= had_threads + slack, f"{name} has {threads} threads, had {had_threads}"
    budget_mib = WEIGHTS_MIB + stack.config.kv_cache_memory_mib + 600
    for name in stack.worker_names():
        assert stack.rss_mib(name) < budget_mib, f"{name} takes {stack.rss_mib(name):.0f} MiB"


async def test_a_client_deadline_ends_the_request_on_every_hop(
    stack: Any, client: AsyncClient
) -> None:
    num_finished = stack.metrics("decode-0")[FINISHED]
    ended: list[object] = []
    try:
        async for output in client.generate([5] * 16, ENDLESS, timeout_s=0.3):
            ended += [c.error.code for c in output.outputs if c.HasField("error")]
    except grpc.aio.AioRpcError as error:
        ended.append(error.code())
    # The router's typed end and the call's own status race; whatever arrives says the same.
    assert ended
    assert set(ended) <= {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        core_pb2.ERROR_CODE_DEADLINE_EXCEEDED,
    }
    await asyncio.to_thread(stack.assert_idle)
    assert stack.metrics("decode-0")[FINISHED] == num_finished


@contextlib.asynccontextmanager
async def second_router(stack: Any, folder: Path) -> AsyncIterator[tuple[ServiceProcess, str]]:
    """One more router of the same workers, on ports of its own choice, and where it listens."""
    ports = ("--grpc-port", "--http-port", "--metrics-port")
    flags = [flag for flag in stack.router.flags if flag.split("=")[0] not in ports]
    flags += [f"{name}=0" for name in ports]
    router = ServiceProcess("router-1", "pdserve_router", 0, 0, flags, folder / "router-1.log")
    router.start()
    assert router.process is not None
    try:
        yield router, await address_of(router)
    finally:
        router.process.kill()
        router.process.wait()


async def address_of(router: ServiceProcess) -> str:
    """Wait until the router listens."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while (found := LISTENING.search(router.log_path.read_text())) is None:
        assert router.exit_status() is None, router.last_message()
        assert time.monotonic() < deadline, router.last_message()
        await asyncio.sleep(0.05)
    return f"127.0.0.1:{found[1]}"


def answer_of(outputs: list[pb2.RequestOutput]) -> tuple[str, list[int], list[str]]:
    completions = [output.outputs[0] for output in outputs]
    return (
        "".join(completion.text for completion in completions),
        [token_id for completion in completions for token_id in completion.token_ids],
        [str(position) for each in completions for position in each.logprobs.positions],
    )


async def test_an_answer_outlives_the_router_that_is_killed_under_it(
    stack: Any, client: AsyncClient, tmp_path: Path
) -> None:
    prompt = list(range(3, 100))
    params = SamplingParams(
        seed=5, presence_penalty=0.5, logprobs=1, max_tokens=400, ignore_eos=True
    )
    whole = [output async for output in client.generate(prompt, params, timeout_s=60)]
    outputs = []
    async with second_router(stack, tmp_path) as (router, address):
        # It answers UNAVAILABLE until it has workers.
        waiting = AsyncClient(address, max_resumes=100)
        resuming = AsyncClient([address, stack.grpc_address])
        try:
            await collect(waiting, [5], 1)
            async for output in resuming.generate(prompt, params, timeout_s=60):
                outputs.append(output)
                if len(outputs) == 10:
                    router.process.kill()
        finally:
            await waiting.close()
            await resuming.close()
    assert answer_of(outputs) == answer_of(whole)
    assert [output.finished for output in outputs].count(True) == 1
    assert outputs[-1].usage.num_output_tokens == 400
    assert outputs[-1].metrics.determinism == "exact"
