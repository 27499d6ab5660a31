"""Workers whose engines run in processes of their own: the same tokens, handoffs and metrics, and
no process outlives the other.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve_client.client import AsyncClient
from pdserve_common.engine_types import SamplingParams

PROMPTS = [list(range(3, 3 + length)) for length in (2, 16, 17, 150)]
LONG = SamplingParams(temperature=0.0, max_tokens=1800, ignore_eos=True)

pytestmark = pytest.mark.slow


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


async def serve(start_stack: Any, model: Path, **fields: object) -> tuple[Any, dict[str, Any]]:
    """Return the answers, and each worker's metrics."""
    with start_stack(model=model, dtype="float32", **fields) as stack:
        client = AsyncClient(stack.grpc_address)
        answers = await asyncio.gather(*(generate(client, prompt) for prompt in 3 * PROMPTS))
        await client.close()
        stack.assert_idle()
        assert stack.metrics("router")['pdserve_handoffs_total{outcome="completed"}'] == 12
        return answers, {name: stack.metrics(name) for name in stack.worker_names()}


async def test_the_engine_process_changes_nothing_that_is_seen(
    model: Path, start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, metrics = [], []
    for kind in ("inproc", "subprocess"):
        monkeypatch.setenv("PDSERVE_ENGINE_PROCESS", kind)
        tokens, samples = await serve(start_stack, model)
        answers.append(tokens)
        metrics.append(samples)
    assert answers[0] == answers[1]
    for name, inproc in metrics[0].items():
        subprocess = metrics[1][name]
        # Label values come when they are first used.
        assert names_of(inproc) == names_of(subprocess)
        for sample in ('pdserve_engine_requests_total{outcome="length"}', "pdserve_kv_links"):
            assert inproc[sample] == subprocess[sample]


def names_of(samples: dict[str, float]) -> set[str]:
    return {sample.partition("{")[0] for sample in samples}


def test_a_worker_without_its_engine_holds_no_torch(stack: Any) -> None:
    for name in stack.worker_names():
        assert has_torch(engine_process(stack, name))
        assert not has_torch(worker_process(stack, name))


def has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_killed_engine_process_ends_its_worker(name: str, stack: Any) -> None:
    client = AsyncClient(stack.grpc_address)
    stream = client.generate(PROMPTS[-1], LONG, timeout_s=60)
    for _ in range(3):
        await anext(stream)
    killed_at = time.monotonic()
    engine_process(stack, name).kill()
    assert await asyncio.to_thread(stack.process(name).wait, 10) == 2
    assert time.monotonic() - killed_at < 5
    await stream.aclose()
    await client.close()
    stack.assert_idle(without=name)
    assert "the engine process was ended by SIGKILL" in stack.log(name)


async def test_a_stopped_engine_process_is_noticed(stack: Any) -> None:
    engine = engine_process(stack, "decode-0")
    engine.suspend()
    assert await asyncio.to_thread(stack.process("decode-0").wait, 20) == 2
    await asyncio.to_thread(psutil.wait_procs, [engine], 10)
    assert not engine.is_running()
    assert "has said nothing for" in stack.log("decode-0")


async def test_an_engine_process_does_not_outlive_its_worker(stack: Any) -> None:
    engines = [engine_process(stack, name) for name in stack.worker_names()]
    for name in stack.worker_names():
        stack.send_signal(name, signal.SIGKILL)
    _, alive = await asyncio.to_thread(psutil.wait_procs, engines, 10)
    assert not alive
