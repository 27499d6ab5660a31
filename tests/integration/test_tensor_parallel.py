"""Services whose models are cut over several ranks, P's other than D's, bring the tokens of one."""

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import SamplingParams
from support.adapters import write_adapter
from support.samples import sampled
from support.stack import RunningStack, StartStack

PROMPT_LENS = (15, 16, 40, 300)
NUM_TOKENS = 24
# Each way of sampling goes another way between ranks.
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "sampled": SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True),
    "filtered": SamplingParams(
        temperature=0.9, top_k=30, top_p=0.9, seed=4, max_tokens=NUM_TOKENS, ignore_eos=True
    ),
}
# Within so long D is given up of which a rank has ended, or has stopped while it computes.
KILLED_TIMEOUT_S = 60.0
STOPPED_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 60.0
NUM_SOAK_LOSSES = 100
HANDED_OVER = 'pdserve_handoffs_total{outcome="completed"}'
# In turn; "" is none.
ADAPTERS = ("all", "", "few")
Answers = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def model(make_served_model: Callable[..., Path]) -> Path:
    # Two KV heads: of four ranks two have the same.
    return make_served_model("Qwen3ForCausalLM", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def start(start_stack: StartStack, model: Path) -> Callable[..., Any]:
    os.environ["PDSERVE_KV_CHECKSUMS"] = "true"

    def start(prefill_size: int, decode_size: int, **options: Any) -> Any:
        """With so many ranks of each layer; further sizes are options."""
        return start_stack(
            model=model,
            dtype="bfloat16",
            num_threads=1,
            max_num_batched_tokens=64,
            prefill_tensor_parallel_size=prefill_size,
            decode_tensor_parallel_size=decode_size,
            **options,
        )

    return start


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    yield
    os.environ.pop("PDSERVE_KV_CHECKSUMS", None)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 190) for _ in range(length)] for length in PROMPT_LENS]


async def ask(
    client: AsyncClient, prompt: list[int], params: SamplingParams, adapter: str = ""
) -> list[int]:
    tokens: list[int] = []
    async for output in client.generate(prompt, params, timeout_s=120, lora_name=adapter):
        for completion in output.outputs:
            assert not completion.HasField("error"), completion.error
            tokens.extend(completion.token_ids)
    return tokens


async def ask_all(stack: RunningStack, adapters: Sequence[str] = ("",)) -> Answers:
    """With the adapters in turn, of which "" is none."""
    client = AsyncClient(stack.grpc_address)
    try:
        asked = [(name, i) for name in PARAMS for i in range(len(PROMPT_LENS))]
        turns = itertools.cycle(adapters)
        answers = await asyncio.gather(
            *(ask(client, prompts()[i], PARAMS[name], next(turns)) for name, i in asked)
        )
        return dict(zip(asked, answers, strict=True))
    finally:
        await client.close()


@pytest.fixture(scope="module")
def lora(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(model, folder / "all", seed=1, r=16)
    write_adapter(model, folder / "few", seed=2, r=4, target_modules=["v_proj", "down_proj"])
    return tuple(f"{name}={folder / name}" for name in ("all", "few"))


@pytest.fixture(scope="module")
def answers(start: Callable[..., Any], lora: tuple[str, ...]) -> tuple[Answers, Answers]:
    """The tokens of services with one rank each: without adapters, and with them in turn."""
    with start(1, 1, lora=lora) as stack:
        return asyncio.run(ask_all(stack)), asyncio.run(ask_all(stack, ADAPTERS))


def sleep_and_wake_up(stack: RunningStack, worker: Any) -> None:
    role = worker.name.split("-")[0]
    command = [sys.executable, "-m", "pdserve_client", "ctl", f"127.0.0.1:{worker.port}"]
    for verb, state in ((["sleep", "--level", "2"], "paused"), (["wake"], "ready")):
        subprocess.run([*command, *verb], check=True, capture_output=True, timeout=120)
        stack.wait_for("router", f'pdserve_workers{{role="{role}",state="{state}"}}', 1)


@pytest.mark.parametrize(
    ("prefill_size", "decode_size", "prefill_stages"),
    sampled([(2, 1, 1), (4, 2, 1), (1, 2, 2)], (4, 2, 1), (1, 2, 2)),
)
async def test_ranks_bring_the_tokens_of_one(
    prefill_size: int,
    decode_size: int,
    prefill_stages: int,
    start: Callable[..., Any],
    answers: tuple[Answers, Answers],
) -> None:
    expected, _ = answers
    with start(prefill_size, decode_size, prefill_pipeline_parallel_size=prefill_stages) as stack:
        assert await ask_all(stack) == expected
        stack.wait_for("router", HANDED_OVER, len(expected))
        stack.assert_idle()
        for worker in stack.workers:
            sleep_and_wake_up(stack, worker)
        assert await ask_all(stack) == expected
        stack.wait_for("router", HANDED_OVER, 2 * len(expected))
        stack.assert_idle()
        ranks = [process for name in stack.worker_names() for process in ranks_of(stack, name)]
    assert not any(process.is_running() for process in ranks)


async def test_so_they_do_with_adapters(
    start: Callable[..., Any], lora: tuple[str, ...], answers: tuple[Answers, Answers]
) -> None:
    without, expected = answers
    assert expected != without
    with start(2, 1, decode_pipeline_parallel_size=2, lora=lora) as stack:
        assert await ask_all(stack, ADAPTERS) == expected
        stack.assert_idle()


def ranks_of(stack: RunningStack, name: str) -> list[psutil.Process]:
    service = psutil.Process(stack.process(name).pid)
    return [p for p in service.children() if p.name().endswith("executor.rank")]


@pytest.mark.parametrize("num_losses", [2, pytest.param(NUM_SOAK_LOSSES, marks=pytest.mark.soak)])
async def test_a_lost_rank_ends_its_service_and_answers_go_on(
    num_losses: int, start: Callable[..., Any]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    with start(1, 2, decode=2, restart=False) as stack:
        client = AsyncClient(stack.grpc_address)
        try:
            undisturbed = await ask(client, prompts()[0], params)
            for number in range(num_losses):
                lost = asyncio.Event()

                async def keep_asking(lost: asyncio.Event = lost) -> None:
                    """Until it is noticed: that a rank is stopped only a step shows."""
                    while True:
                        assert await ask(client, prompts()[0], params) == undisturbed
                        if lost.is_set():
                            return

                answers = [asyncio.create_task(keep_asking()) for _ in range(4)]
                await asyncio.sleep(0.3)
                await lose(stack, f"decode-{number // 2 % 2}", number // 4 % 2, number % 2 == 0)
                lost.set()
                await asyncio.gather(*answers)
                stack.restore()
        finally:
            await client.close()


async def lose(stack: RunningStack, name: str, rank: int, is_kill: bool) -> None:
    """Kill a rank, or stop it, and wait for the end of its service; both ranks are gone then."""
    ranks = ranks_of(stack, name)
    ranks[rank].send_signal(signal.SIGKILL if is_kill else signal.SIGSTOP)
    started = time.monotonic()
    timeout_s = KILLED_TIMEOUT_S if is_kill else STOPPED_TIMEOUT_S
    status = await asyncio.to_thread(stack.process(name).wait, timeout_s)
    print(f"{'killed' if is_kill else 'stopped'}: ended after {time.monotonic() - started:.1f} s")
    assert status == 2, stack.log(name)[-2000:]
    _, alive = psutil.wait_procs(ranks, timeout=EXIT_TIMEOUT_S)
    assert not alive
