"""Drafts change no token and no log-probability, whoever proposes them and wherever they run."""

import asyncio
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.sampling_params import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from support.grammars import EOS, MODEL, VOCAB_SIZE
from support.metrics import total
from support.stack import Routed, RunningStack

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).parent / "drafts_plugin"
MAX_MODEL_LEN = 192
# Of one worker: for the longest answer, and little besides.
FEW_BLOCKS = 12
NUM_REQUESTS = [24, pytest.param(200, marks=pytest.mark.soak)]
CONCURRENCY = 8
# Where a worker is to die in mid-answer, of each step.
DELAY_S = 0.01
NUM_BEFORE_DEATH = 6
TIMEOUT_S = 300.0
TEXT = (
    "One afternoon Mia found a kite in the garden. Theo found a boat by the sea. Mia and Theo "
    "found two cats, and one afternoon the cats found a kite by the sea. "
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Mia", "Theo", "Oscar"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "friends": {"type": "array", "items": {"enum": ["a kite", "a boat"]}, "maxItems": 3},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}
# What a client's tools become.
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call"],
        "tags": [
            {
                "type": "tag",
                "begin": "<call>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</call>",
            }
        ],
        "at_least_one": True,
    },
}
CONSTRAINTS = (
    StructuredOutputsParams(json_schema=json.dumps(SCHEMA)),
    StructuredOutputsParams(regex="(Mia|Theo) [a-z]{3,9}( and [a-z]{2,9}){0,2}[.!]"),
    StructuredOutputsParams(choice=("a kite", "a boat by the sea", "a boat", "two cats")),
    StructuredOutputsParams(structural_tag=json.dumps(TAG)),
)


class Asked(NamedTuple):
    """A request."""

    prompt: list[int]
    params: SamplingParams


class Completion(NamedTuple):
    """One completion of an answer, as its client gets it."""

    token_ids: list[int]
    text: str
    logprobs: list[str]
    reason: str


class Answer(NamedTuple):
    completions: list[Completion]
    num_tokens: tuple[int, int]
    prompt_logprobs: list[str]


Watch = Callable[[pb2.RequestOutput], None]


def random_params(rng: random.Random, index: int) -> SamplingParams:
    """Any that go together."""

    def maybe(probability: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < probability else otherwise

    words = rng.sample(["a", "the", "Mia", " kite", "cats", "."], k=2)
    max_tokens = rng.randrange(1, 100)
    constraint = maybe(0.35, rng.choice(CONSTRAINTS), None)
    return SamplingParams(
        n=maybe(0.2, rng.randrange(2, 4), 1),
        temperature=maybe(0.3, 0.0, rng.choice([0.3, 1.0, 1.5])),
        seed=index,
        top_p=maybe(0.3, 0.8, 1.0),
        top_k=maybe(0.3, rng.randrange(1, 50), 0),
        min_p=maybe(0.2, 0.05, 0.0),
        presence_penalty=maybe(0.2, rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(0.2, rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(0.2, rng.uniform(0.8, 1.5), 1.0),
        stop=maybe(0.25, tuple(words), ()),
        include_stop_str_in_output=rng.random() < 0.5,
        stop_token_ids=maybe(0.15, (rng.randrange(VOCAB_SIZE),), ()),
        ignore_eos=rng.random() < 0.3 and constraint is None,
        max_tokens=max_tokens,
        min_tokens=maybe(0.2, rng.randrange(max_tokens), 0) if constraint is None else 0,
        logprobs=maybe(0.4, rng.randrange(4), None),
        prompt_logprobs=maybe(0.1, rng.randrange(3), None),
        bad_words=maybe(0.2, tuple(words[:1]), ()) if constraint is None else (),
        logit_bias=maybe(0.2, {rng.randrange(3, VOCAB_SIZE): rng.uniform(-5, 5)}, {}),
        allowed_token_ids=maybe(0.1, (EOS, *rng.sample(range(3, VOCAB_SIZE), 40)), ())
        if constraint is None
        else (),
        repetition_detection=maybe(0.1, RepetitionDetectionParams(max_pattern_size=4), None),
        structured_outputs=constraint,
    )


def random_requests(num: int) -> list[Asked]:
    rng = random.Random(num)
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    asked = []
    for index in range(num):
        text = f"Story {index}. {TEXT * 2}"
        prompt = tokenizer.encode(text).ids[: rng.randrange(12, 80)]
        asked.append(Asked(prompt, random_params(rng, index)))
    return asked


async def ask(routed: Routed, asked: Asked, watch: Watch) -> Answer:
    found: dict[int, Completion] = {}
    prompt_logprobs: list[str] = []
    last = pb2.RequestOutput()
    async for last in routed.client.generate(asked.prompt, asked.params, timeout_s=TIMEOUT_S):
        watch(last)
        prompt_logprobs += map(str, last.prompt_logprobs.positions)
        for part in last.outputs:
            assert not part.HasField("error"), part.error
            known = found.get(part.index, Completion([], "", [], ""))
            found[part.index] = Completion(
                [*known.token_ids, *part.token_ids],
                known.text + part.text,
                [*known.logprobs, *map(str, part.logprobs.positions)],
                f"{part.finish_reason} {part.stop_token_id} {part.stop_string}",
            )
    usage = last.usage
    num_tokens = usage.num_prompt_tokens, usage.num_output_tokens
    return Answer([found[index] for index in sorted(found)], num_tokens, prompt_logprobs)


async def ask_all(
    routed: Routed, requests: Sequence[Asked], watch: Watch = lambda output: None
) -> list[Answer]:
    places = asyncio.Semaphore(CONCURRENCY)

    async def ask_one(asked: Asked) -> Answer:
        async with places:
            return await ask(routed, asked, watch)

    return await asyncio.gather(*map(ask_one, requests))


@pytest.fixture(scope="module")
def drafts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafts") / "drafts.json"
    teach(path, [], [])
    return path


@pytest.fixture(scope="module")
def stack(start_stack: Any, drafts_file: Path) -> Iterator[RunningStack]:
    """Three D with drafts; one of them has few blocks, another may die."""
    length = ("--max-model-len", str(MAX_MODEL_LEN))
    drafts = (*length, "--speculation", "suffix", "--num-speculative-tokens", "8")
    flags = {
        "prefill-0": drafts,
        "decode-0": drafts,
        "decode-1": drafts,
        "decode-2": (*drafts, "--num-blocks", str(FEW_BLOCKS)),
    }
    path = os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("DRAFTS_FILE", str(drafts_file))
        with start_stack(
            model=MODEL, num_threads=1, decode=3, max_num_batched_tokens=32, flags=flags
        ) as stack:
            yield stack


def teach(path: Path, requests: Sequence[Asked], answers: Sequence[Answer]) -> None:
    """Tell the workers' proposers what is right; they propose nothing before."""
    known = {
        ",".join(map(str, asked.prompt)): [each.token_ids for each in answer.completions]
        for asked, answer in zip(requests, answers, strict=True)
    }
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"answers": known, "delay_s": DELAY_S if known else 0.0}))
    new.replace(path)


class Expected(NamedTuple):
    requests: list[Asked]
    answers: list[Answer]


@pytest.fixture(scope="module", params=NUM_REQUESTS)
def expected(
    request: pytest.FixtureRequest, stack: RunningStack, drafts_file: Path, start_router: Any
) -> Expected:
    """Requests and one worker's answers without drafts; from now on there are drafts."""
    requests = random_requests(request.param)
    teach(drafts_file, [], [])

    async def first_answers() -> list[Answer]:
        async with start_router(stack) as routed:
            return await ask_all(routed, requests)

    answers = asyncio.run(first_answers())
    teach(drafts_file, requests, answers)
    return Expected(requests, answers)


def check(expected: Expected, answers: Sequence[Answer]) -> None:
    for asked, right, answer in zip(*expected, answers, strict=True):
        assert answer == right, asked


async def test_on_one_worker(stack: RunningStack, expected: Expected, start_router: Any) -> None:
    async with start_router(stack) as routed:
        check(expected, await ask_all(routed, expected.requests))


async def test_on_a_worker_that_preempts(
    stack: RunningStack, expected: Expected, start_router: Any
) -> None:
    async with start_router(stack, decode="decode-2") as routed:
        check(expected, await ask_all(routed, expected.requests))
    assert total(stack.metrics("decode-2"), "pdserve_preemptions_total")


async def test_with_prefill_and_decode_apart(
    stack: RunningStack, expected: Expected, start_router: Any
) -> None:
    async with start_router(stack, prefill="prefill-0") as routed:
        await routed.until(1, "pdserve_worker_pairs", state="proven")
        check(expected, await ask_all(routed, expected.requests))
        assert routed.count("pdserve_handoffs_total", outcome="completed")


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

        def watch(output: pb2.RequestOutput) -> None:
            num_redrives.append(output.metrics.num_redrives)
            if len(num_redrives) == NUM_BEFORE_DEATH * CONCURRENCY:
                is_begun.set()

        asked = asyncio.create_task(ask_all(routed, expected.requests, watch))
        await is_begun.wait()
        stack.kill_process("decode-1")
        check(expected, await asked)
        assert any(num_redrives)
    stack.restore()
