"""Drafts change no token and no log-probability, whoever proposes them and wherever they run."""

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers

from support.adapters import write_adapter
from support.chat_models import make_chat_model
from support.drafts import make_noisy_model
from support.metrics import total
from support.random_requests import MAX_MODEL_LEN, Answer, Asked, Watch, random_requests
from support.samples import sampled
from support.stack import Routed, RunningStack

PLUGIN = Path(__file__).parent / "drafts_plugin"
# Of one worker: for the longest answer, and little besides.
FEW_BLOCKS = 12
NUM_REQUESTS = [24, pytest.param(200, marks=pytest.mark.soak)]
CONCURRENCY = 8
# Where a worker is to die in mid-answer, of each step.
DELAY_S = 0.01
NUM_BEFORE_DEATH = 6
NUM_DRAFT_TOKENS = "pdserve_spec_decode_num_draft_tokens_total"
NUM_ACCEPTED_TOKENS = "pdserve_spec_decode_num_accepted_tokens_total"
ADAPTERS = {"one": {"r": 8}, "other": {"r": 16, "target_modules": ["v_proj"]}}


async def ask_all(
    routed: Routed, requests: Sequence[Asked], watch: Watch = lambda num_redrives: None
) -> list[Answer]:
    places = asyncio.Semaphore(CONCURRENCY)

    async def ask_one(asked: Asked) -> Answer:
        async with places:
            return await asked.ask(routed, watch)

    return await asyncio.gather(*map(ask_one, requests))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that calls tools."""
    return make_chat_model(tmp_path_factory.mktemp("model") / "tiny", "hermes")


@pytest.fixture(scope="module")
def drafts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts") / "drafts.json"


@pytest.fixture(scope="module", params=sampled(["suffix", "draft_model"], "draft_model"))
def stack(
    request: pytest.FixtureRequest,
    start_stack: Any,
    model: Path,
    drafts_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningStack]:
    """Three D with drafts; one of them has few blocks, another may die. A draft model is the model
    itself at the first, and is often wrong at the others.
    """
    folder = tmp_path_factory.mktemp("models")
    flags = ["--max-model-len", str(MAX_MODEL_LEN)]
    flags += ["--speculation", request.param, "--num-speculative-tokens", "8"]
    right, wrong = list(flags), list(flags)
    if request.param == "draft_model":
        right += ["--draft-model", str(model)]
        wrong += ["--draft-model", str(make_noisy_model(model, folder / "noisy", noise=0.15))]
    adapters = {
        name: write_adapter(model, folder / name, **config) for name, config in ADAPTERS.items()
    }
    path = os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH"))))
    teach(drafts_file, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("DRAFTS_FILE", str(drafts_file))
        with start_stack(
            model=model,
            num_threads=1,
            decode=3,
            max_num_batched_tokens=32,
            lora=tuple(f"{name}={path}" for name, path in adapters.items()),
            flags={
                "prefill-0": wrong,
                "decode-0": right,
                "decode-1": wrong,
                "decode-2": [*wrong, "--num-blocks", str(FEW_BLOCKS)],
            },
        ) as stack:
            yield stack


def teach(path: Path, answers: Sequence[Answer]) -> None:
    """Tell the workers' proposers what is right; steps with drafts take longer from now on."""
    known = {",".join(map(str, answer.prompt)): answer.token_ids for answer in answers}
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"answers": known, "delay_s": DELAY_S if known else 0.0}))
    new.replace(path)


class Expected(NamedTuple):
    requests: list[Asked]
    answers: list[Answer]


@pytest.fixture(scope="module", params=NUM_REQUESTS)
def expected(
    request: pytest.FixtureRequest,
    stack: RunningStack,
    model: Path,
    drafts_file: Path,
    start_router: Any,
) -> Expected:
    """Requests and one worker's answers without drafts."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    requests = random_requests(request.param, tokenizer, list(ADAPTERS))

    async def first_answers() -> list[Answer]:
        async with start_router(stack) as routed:
            return await ask_all(routed, [asked.without_drafts() for asked in requests])

    before = total(stack.metrics("decode-0"), NUM_DRAFT_TOKENS)
    answers = asyncio.run(first_answers())
    assert total(stack.metrics("decode-0"), NUM_DRAFT_TOKENS) == before
    teach(drafts_file, answers)
    return Expected(requests, answers)


def check(expected: Expected, answers: Sequence[Answer]) -> None:
    for asked, right, answer in zip(*expected, answers, strict=True):
        assert answer == right, asked


def check_drafts(stack: RunningStack, name: str) -> None:
    """Some were right, and some were not."""
    samples = stack.metrics(name)
    assert 0 < total(samples, NUM_ACCEPTED_TOKENS) < total(samples, NUM_DRAFT_TOKENS)


async def test_on_one_worker(stack: RunningStack, expected: Expected, start_router: Any) -> None:
    async with start_router(stack) as routed:
        check(expected, await ask_all(routed, expected.requests))
    check_drafts(stack, "decode-0")


async def test_on_a_worker_that_preempts(
    stack: RunningStack, expected: Expected, start_router: Any
) -> None:
    async with start_router(stack, decode="decode-2") as routed:
        check(expected, await ask_all(routed, expected.requests))
    assert total(stack.metrics("decode-2"), "pdserve_preemptions_total")
    check_drafts(stack, "decode-2")


async def test_with_prefill_and_decode_apart(
    stack: RunningStack, expected: Expected, start_router: Any
) -> None:
    async with start_router(stack, prefill="prefill-0", decode="decode-1") as routed:
        await routed.until(1, "pdserve_worker_pairs", state="proven")
        check(expected, await ask_all(routed, expected.requests))
        assert routed.count("pdserve_handoffs_total", outcome="completed")
    check_drafts(stack, "decode-1")


async def test_when_decode_workers_are_killed_in_mid_answer(
    stack: RunningStack, expected: Expected, start_router: Any, tmp_path: Path
) -> None:
    ports = {worker.name: worker.port for worker in stack.workers}
    listed = tmp_path / "decode"
    listed.write_text(f"127.0.0.1:{ports['decode-0']}\n")
    async with start_router(stack, prefill="prefill-0", decode=f"file://{listed}") as routed:
        listed.write_text(f"127.0.0.1:{ports['decode-0']}\n127.0.0.1:{ports['decode-1']}\n")
        await routed.until(2, "pdserve_worker_pairs", state="proven")
        is_begun = asyncio.Event()
        num_redrives: list[int] = []

        def watch(num: int) -> None:
            num_redrives.append(num)
            if len(num_redrives) == NUM_BEFORE_DEATH * CONCURRENCY:
                is_begun.set()

        asked = asyncio.create_task(ask_all(routed, expected.requests, watch))
        await is_begun.wait()
        stack.kill_process("decode-1")
        check(expected, await asked)
        assert any(num_redrives)
    stack.restore()
    stack.assert_idle()
