"""Scheduling settings of real workers, seen from a client: V0 mode, and priorities of both APIs."""

import asyncio
import json
import random
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve_client.client import AsyncClient
from pdserve_common.engine_types import SamplingParams

pytestmark = pytest.mark.slow

MAX_MODEL_LEN = 512
PROMPT_LEN = 40
# So many that an answer is read before the next one has ended.
NUM_TOKENS = 40
STEP = re.compile(r"step \d+: (\d+) running, \d+ waiting, (\d+) tokens in")


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, 190) for _ in range(PROMPT_LEN)] for _ in range(count)]


async def generate(
    client: AsyncClient, prompt: list[int], num_tokens: int, started: asyncio.Event | None = None
) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    tokens: list[int] = []
    async for output in client.generate(prompt, params, timeout_s=60):
        for completion in output.outputs:
            assert not completion.HasField("error"), completion.error
            tokens.extend(completion.token_ids)
        if started is not None:
            started.set()
    return tokens


def has_mixed_step(stack: Any, name: str) -> bool:
    """Did a step compute a prompt of PROMPT_LEN and decode another request?"""
    (worker,) = [worker for worker in stack.workers if worker.name == name]
    steps = [(int(a), int(b)) for a, b in STEP.findall(worker.log_path.read_text())]
    assert steps, "no step was logged"
    return any(running > 1 and PROMPT_LEN < tokens < 2 * PROMPT_LEN for running, tokens in steps)


# Without prefill services v1 mixes steps; with them there is nothing to mix.
@pytest.mark.parametrize(("mode", "prefill"), [("v0", 1), ("v0", 0), ("v1", 0)])
async def test_tokens_are_those_of_transformers_in_either_mode(
    mode: str,
    prefill: int,
    make_served_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    start_stack: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDSERVE_SCHEDULING_MODE", mode)
    monkeypatch.setenv("PDSERVE_LOG_ITERATIONS", "true")
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=MAX_MODEL_LEN)
    first, *others = prompts(4)
    with start_stack(model=model, dtype="float32", prefill=prefill, num_threads=1) as stack:
        client = AsyncClient(stack.grpc_address)
        try:
            started = asyncio.Event()
            long = asyncio.create_task(generate(client, first, 300, started))
            await asyncio.wait_for(started.wait(), 30)
            for prompt in others:
                assert await generate(client, prompt, 8) == hf_greedy(model, prompt, 8)
            assert await long == hf_greedy(model, first, 300)
        finally:
            await client.close()
        # With prefill workers, decode computes no prompts and prefill decodes nothing.
        assert has_mixed_step(stack, "decode-0") == (mode == "v1" and not prefill)


async def test_a_lower_priority_number_goes_first_over_both_apis(
    make_served_model: Callable[..., Path], start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_SCHEDULING_POLICY", "priority")
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=1024)
    ends: list[str] = []
    with start_stack(
        model=model, dtype="float32", prefill=0, max_num_seqs=1, num_threads=1
    ) as stack:
        client = AsyncClient(stack.grpc_address)

        async def over_grpc(name: str, priority: int, num_tokens: int = NUM_TOKENS) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            async for output in client.generate([5, 6], params, timeout_s=60, priority=priority):
                assert not any(c.HasField("error") for c in output.outputs)
            ends.append(name)

        async def over_http(name: str, priority: int) -> None:
            body = {"model": model.name, "prompt": [5, 6], "priority": priority}
            request = urllib.request.Request(
                f"http://127.0.0.1:{stack.http_port}/v1/completions",
                json.dumps(body | {"max_tokens": NUM_TOKENS, "ignore_eos": True}).encode(),
                {"Content-Type": "application/json"},
            )
            await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).read())
            ends.append(name)

        try:
            # One place: it is taken while the others come, the most important one last.
            tasks = [asyncio.create_task(over_grpc("runs", 9, 1000))]
            await wait_for(stack, "pdserve_requests_running", 1)
            calls = [
                over_grpc("normal", 0),
                over_http("low", 7),
                over_http("high", -7),
                over_grpc("highest", -8),
            ]
            for count, call in enumerate(calls, start=1):
                tasks.append(asyncio.create_task(call))
                await wait_for(stack, "pdserve_requests_waiting", count)
            assert not ends, "they came too late to wait"
            await asyncio.gather(*tasks)
        finally:
            await client.close()
    assert ends == ["runs", "highest", "high", "normal", "low"]


async def wait_for(stack: Any, sample: str, value: float) -> None:
    deadline = time.monotonic() + 10
    while (await asyncio.to_thread(stack.metrics, "decode-0"))[sample] != value:
        assert time.monotonic() < deadline, f"{sample} is not {value}"
        await asyncio.sleep(0.01)
