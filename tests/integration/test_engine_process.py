"""Workers whose engines run in processes of their own: the same tokens, handoffs and metrics, and
no process outlives the other.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import SamplingParams
from support.samples import sampled

PROMPTS = [list(range(3, 3 + length)) for length in (2, 16, 17, 150)]
LONG = SamplingParams(temperature=0.0, max_tokens=1800, ignore_eos=True)
FAILURES = "pdserve_kv_transfer_failures_total"

# Of what has to happen, however busy the machine is. A silent process is given up after 10 s.
EXIT_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def model(make_served_model: Callable[..., Path]) -> Path:
    return make_served_model("LlamaForCausalLM", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def running(model: Path, start_stack: Any) -> Iterator[Any]:
    with start_stack(model=model, engine_process="subprocess", num_threads=1) as stack:
        yield stack


@pytest.fixture
def stack(running: Any) -> Iterator[Any]:
    """Engines in processes of their own; whole again after each test."""
    yield running
    running.restore()


def worker_process(stack: Any, name: str) -> psutil.Process:
    return psutil.Process(stack.process(name).pid)


def engine_process(stack: Any, name: str) -> psutil.Process:
    (child,) = worker_process(stack, name).children()
    return child


async def generate(client: AsyncClient, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    tokens: list[int] = []
    async for output in client.generate(prompt, params, timeout_s=60):
        for completion in output.outputs:
            assert not completion.HasField("error"), completion.error
            tokens.extend(completion.token_ids)
    return tokens


async def serve(stack: Any) -> tuple[Any, dict[str, dict[str, float]]]:
    """Return the answers, and the increase of each worker's metrics."""
    before = {name: stack.metrics(name) for name in ["router", *stack.worker_names()]}
    client = AsyncClient(stack.grpc_address)
    answers = await asyncio.gather(*(generate(client, prompt) for prompt in 3 * PROMPTS))
    await client.close()
    await asyncio.to_thread(stack.assert_idle)
    increase = {
        name: {sample: value - old.get(sample, 0) for sample, value in stack.metrics(name).items()}
        for name, old in before.items()
    }
    assert increase.pop("router")['pdserve_handoffs_total{outcome="completed"}'] == 12
    return answers, increase


async def test_the_engine_process_changes_nothing_that_is_seen(
    plain_stack: Any, stack: Any
) -> None:
    expected, inproc = await serve(plain_stack)
    answers, subprocess = await serve(stack)
    assert answers == expected
    for name, samples in inproc.items():
        # Label values come when they are first used, and `plain_stack` has served others.
        assert names_of(samples) - names_of(subprocess[name]) <= {FAILURES, f"{FAILURES}_created"}
        sample = 'pdserve_engine_requests_total{outcome="length"}'
        assert samples[sample] == subprocess[name][sample] == 12


def test_the_memory_of_both_processes_is_told(stack: Any) -> None:
    for name in stack.worker_names():
        samples = stack.metrics(name)
        worker, engine = (
            samples[f"{prefix}process_start_time_seconds"] for prefix in ("", "engine_")
        )
        assert worker <= engine
        assert samples["engine_process_resident_memory_bytes"] > 64 << 20  # it has torch


def names_of(samples: dict[str, float]) -> set[str]:
    return {sample.partition("{")[0] for sample in samples}


def test_a_worker_without_its_engine_holds_no_torch(stack: Any) -> None:
    for name in stack.worker_names():
        assert has_torch(engine_process(stack, name))
        assert not has_torch(worker_process(stack, name))


def has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


@pytest.mark.parametrize("name", sampled(["prefill-0", "decode-0"], "decode-0"))
async def test_a_killed_engine_process_ends_its_worker(name: str, stack: Any) -> None:
    client = AsyncClient(stack.grpc_address)
    stream = client.generate(PROMPTS[-1], LONG, timeout_s=60)
    for _ in range(3):
        await anext(stream)
    engine_process(stack, name).kill()
    assert await asyncio.to_thread(stack.process(name).wait, EXIT_TIMEOUT_S) == 2
    # At once: it was not its silence.
    assert "the engine process was ended by SIGKILL" in stack.log(name)
    await stream.aclose()
    await client.close()
    await asyncio.to_thread(stack.assert_idle, without=name)


async def test_a_stopped_engine_process_is_noticed_and_none_outlives_its_worker(stack: Any) -> None:
    stopped, left = (engine_process(stack, name) for name in ("decode-0", "prefill-0"))
    stopped.suspend()
    stack.kill_process("prefill-0")
    assert await asyncio.to_thread(stack.process("decode-0").wait, EXIT_TIMEOUT_S) == 2
    assert "has said nothing for" in stack.log("decode-0")
    _, alive = await asyncio.to_thread(psutil.wait_procs, [stopped, left], EXIT_TIMEOUT_S)
    assert not alive
