"""Scheduling settings of real workers, seen from a client: V0 mode, and priorities of both APIs;
and from a router that starts while they are full.
"""

import asyncio
import json
import random
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve_common.types.sampling_params import SamplingParams

MAX_MODEL_LEN = 4096
PROMPT_LEN = 40
# So many that an answer is read before the next one has ended.
NUM_TOKENS = 300
# Runs until somebody ends it.
ENDLESS = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
# So many of them, one after the other, take longer than a router waits for a pair's proof.
NUM_HOLDING = 12
WAIT_S = 60.0
STEP = re.compile(r"step \d+: (\d+) running, \d+ waiting, (\d+) tokens in")


@pytest.fixture(scope="module")
def workers(make_served_model: Callable[..., Path], start_stack: Any) -> Iterator[Any]:
    """prefill-0 and decode-0 in V0 mode, decode-1 in V1 mode, decode-2 with a single place."""
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=MAX_MODEL_LEN)
    v0, v1 = (["--log-iterations", f"--scheduling-mode={mode}"] for mode in ("v0", "v1"))
    single = ["--scheduling-policy=priority", "--max-num-seqs=1"]
    with start_stack(
        model=model,
        dtype="float32",
        num_threads=1,
        max_num_batched_tokens=MAX_MODEL_LEN,
        decode=3,
        flags={"prefill-0": v0, "decode-0": v0, "decode-1": v1, "decode-2": single},
    ) as running:
        yield running


@pytest.fixture
def stack(workers: Any) -> Iterator[Any]:
    """Each test leaves it idle."""
    yield workers
    workers.assert_idle()


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, 190) for _ in range(PROMPT_LEN)] for _ in range(count)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def has_mixed_step(stack: Any, name: str) -> bool:
    """Did a step compute a prompt of PROMPT_LEN and decode another request?"""
    steps = [(int(a), int(b)) for a, b in STEP.findall(stack.log(name))]
    assert steps, "no step was logged"
    return any(running > 1 and PROMPT_LEN < tokens < 2 * PROMPT_LEN for running, tokens in steps)


# Without prefill services v1 mixes steps; with them there is nothing to mix.
@pytest.mark.parametrize(
    ("prefill", "decode", "is_mixing"),
    [("prefill-0", "decode-0", False), ("", "decode-0", False), ("", "decode-1", True)],
    ids=["v0 after prefill", "v0", "v1"],
)
async def test_tokens_are_those_of_transformers_in_either_mode(
    stack: Any,
    start_router: Any,
    hf_greedy: Callable[..., list[int]],
    prefill: str,
    decode: str,
    is_mixing: bool,
) -> None:
    first, *others = prompts(4)
    expected = [hf_greedy(stack.config.model, prompt, 8) for prompt in others]
    begin_of_long = hf_greedy(stack.config.model, first, 40)
    long: list[int] = []
    has_begun = asyncio.Event()
    # What another case has cached would not be computed.
    salt = f"{prefill} {decode}"
    async with start_router(stack, prefill=prefill, decode=decode) as routed:
        await routed.until(bool(prefill), "pdserve_worker_pairs", state="proven")

        async def decode_beside() -> None:
            client = routed.client
            async for output in client.generate(first, ENDLESS, timeout_s=WAIT_S, cache_salt=salt):
                long.extend(output.outputs[0].token_ids)
                has_begun.set()

        beside = asyncio.create_task(decode_beside())
        await asyncio.wait_for(has_begun.wait(), WAIT_S)
        for prompt, tokens in zip(others, expected, strict=True):
            answer, metrics = await routed.ask(prompt, greedy(8), cache_salt=salt)
            assert answer == tokens
            assert metrics.path == ("disaggregated" if prefill else "local")
        assert not beside.done(), "the others came too late to run beside it"
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
    num_known = min(len(long), len(begin_of_long))
    assert long[:num_known] == begin_of_long[:num_known]
    # With prefill workers, decode computes no prompts and prefill decodes nothing.
    assert has_mixed_step(stack, decode) == is_mixing


async def test_a_lower_priority_number_goes_first_over_both_apis(
    stack: Any, start_router: Any
) -> None:
    ends: list[str] = []
    async with start_router(stack, decode="decode-2") as routed:

        async def over_grpc(name: str, priority: int, params: SamplingParams) -> None:
            stream = routed.client.generate([5, 6], params, timeout_s=WAIT_S, priority=priority)
            async for output in stream:
                assert not any(c.HasField("error") for c in output.outputs)
            ends.append(name)

        async def over_http(name: str, priority: int) -> None:
            body = {"model": Path(stack.config.model).name, "prompt": [5, 6], "priority": priority}
            request = urllib.request.Request(
                f"http://127.0.0.1:{routed.server.http_port}/v1/completions",
                json.dumps(body | {"max_tokens": NUM_TOKENS, "ignore_eos": True}).encode(),
                {"Content-Type": "application/json"},
            )
            await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=WAIT_S).read())
            ends.append(name)

        # One place: it is taken while the others come, the most important one last.
        runs = asyncio.create_task(over_grpc("runs", 9, ENDLESS))
        await wait_for(stack, "pdserve_requests_running", 1)
        calls = [
            over_grpc("normal", 0, greedy(NUM_TOKENS)),
            over_http("low", 7),
            over_http("high", -7),
            over_grpc("highest", -8, greedy(NUM_TOKENS)),
        ]
        waiting = []
        for count, call in enumerate(calls, start=1):
            waiting.append(asyncio.create_task(call))
            await wait_for(stack, "pdserve_requests_waiting", count)
        assert not runs.done(), "they came too late to wait"
        runs.cancel()
        await asyncio.gather(*waiting)
    assert ends == ["highest", "high", "normal", "low"]


async def test_a_router_proves_a_pair_whose_decode_worker_is_full(
    stack: Any, start_router: Any
) -> None:
    async with start_router(stack, decode="decode-2") as busy:

        async def hold() -> None:
            async for output in busy.client.generate([5, 6], ENDLESS, timeout_s=WAIT_S):
                assert not any(c.HasField("error") for c in output.outputs)

        # One has the only slot, the next one takes it over.
        holding = [asyncio.create_task(hold()) for _ in range(NUM_HOLDING)]
        await wait_for(stack, "pdserve_requests_running", 1)
        await wait_for(stack, "pdserve_requests_waiting", NUM_HOLDING - 1)
        async with start_router(stack, prefill="prefill-0", decode="decode-2") as routed:
            await routed.until(1, "pdserve_worker_pairs", state="proven")
            assert not all(task.done() for task in holding), "the slot was free"
        for task in holding:
            task.cancel()
        assert not [e for e in await asyncio.gather(*holding, return_exceptions=True) if is_bad(e)]


def is_bad(result: BaseException | None) -> bool:
    return not isinstance(result, asyncio.CancelledError | None)


async def wait_for(stack: Any, sample: str, value: float) -> None:
    deadline = time.monotonic() + WAIT_S
    while (await asyncio.to_thread(stack.metrics, "decode-2"))[sample] != value:
        assert time.monotonic() < deadline, f"{sample} is not {value}"
        await asyncio.sleep(0.01)
