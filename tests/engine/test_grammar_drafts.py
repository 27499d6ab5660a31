"""Drafts of grammars and of finished answers in whole engines: they are accepted, and change
nothing that a client sees.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_draft_model import SETTINGS, make_prompt, make_request, random_requests

from pdserve_common.types.engine import DraftStats, EngineCoreRequest, Generate
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_engine.assemble import LoadedEngine
from pdserve_engine.config import EngineConfig
from pdserve_engine.core.features.drafts import Drafts
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.request.request import Request
from support import engines
from support.answers import Answer
from support.answers import answers as answers_of
from support.drafts import lengths_chosen_by
from support.grammars import EOS, MODEL, VOCAB_SIZE
from support.samples import sampled
from support.steps import batch_of

SCHEMA = """{
    "type": "object",
    "properties": {
        "first_name": {"enum": ["Mia", "Theo", "Oscar"]},
        "afternoon": {"type": "integer", "minimum": 0, "maximum": 120},
        "garden": {"type": "array", "items": {"enum": ["a kite", "a boat"]}, "maxItems": 3}
    },
    "required": ["first_name", "afternoon", "garden"],
    "additionalProperties": false
}"""
CONSTRAINTS = (
    StructuredOutputsParams(json_schema=SCHEMA),
    StructuredOutputsParams(choice=("a kite in the garden of 北京", "two cats in 南京")),
    StructuredOutputsParams(grammar='root ::= "Mia and " root "Theo found" | "two cats"'),
)
WAYS: dict[str, dict[str, Any]] = {
    "suffix": {},
    "chunks of 24": {"max_num_batched_tokens": 24},
    "async, preempted": {"async_scheduling": True, "num_blocks": 12},
    "preempted": {"num_blocks": 12},
    "a draft model": {"speculation": "draft_model", "draft_model": str(MODEL)},
    "a draft model, preempted": {
        "speculation": "draft_model",
        "draft_model": str(MODEL),
        "num_blocks": 12,
    },
}
NUM_REQUESTS = [40, pytest.param(80, marks=pytest.mark.soak)]
Encode = Callable[[str], Sequence[int]]


@contextmanager
def loaded(
    speculation: str = "suffix", model: Path = MODEL, **fields: Any
) -> Iterator[LoadedEngine]:
    settings = {**SETTINGS, "speculation": speculation, **fields}
    with lengths_chosen_by(), engines.loaded(model, **settings) as engine:
        yield engine


def answers(engine: LoadedEngine, requests: Sequence[EngineCoreRequest]) -> dict[str, Answer]:
    """Run requests to their ends, of which two come with each step."""
    found = answers_of(engine, requests, at_once=2)
    assert len(found) == len(requests)
    return found


@contextmanager
def counted_by_source() -> Iterator[Counter[str]]:
    """Within it tokens of drafts are counted by source, and those that were accepted."""
    counts: Counter[str] = Counter()

    def count(self: Drafts, request: Request, stats: DraftStats) -> None:
        counts[stats.source] += stats.num_draft_tokens
        counts[f"accepted {stats.source}"] += stats.num_accepted_tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafts, "observe_draft", count)
        yield counts


def constrained_requests(count: int) -> list[EngineCoreRequest]:
    """A half of them follow grammars that force a lot."""
    rng, requests = random.Random(5), []
    for index, request in enumerate(random_requests(count)):
        params = request.task.sampling_params
        if index % 2:
            params = replace(
                params,
                structured_outputs=rng.choice(CONSTRAINTS),
                max_tokens=60,
                stop_token_ids=(),
            )
        requests.append(replace(request, task=Generate(params)))
    return requests


@pytest.fixture(scope="module", params=NUM_REQUESTS)
def asked(request: pytest.FixtureRequest) -> list[EngineCoreRequest]:
    return constrained_requests(request.param)


@pytest.fixture(scope="module")
def expected(asked: list[EngineCoreRequest]) -> dict[str, Answer]:
    with loaded("none") as engine:
        return answers(engine, asked)


def encode_with(engine: LoadedEngine, encode: Encode) -> None:
    assert isinstance(engine.core.executor, UniprocExecutor)
    batch_of(engine.core.executor).sampling.grammars.encode = encode


@pytest.mark.parametrize(
    "way", sampled(WAYS, "chunks of 24", "async, preempted", "a draft model, preempted")
)
def test_no_draft_changes_what_a_client_sees(
    way: str, asked: list[EngineCoreRequest], expected: dict[str, Answer]
) -> None:
    with loaded(**WAYS[way]) as engine, counted_by_source() as counts:
        found = answers(engine, asked)
        assert (engine.core.scheduler.num_preemptions > 0) == ("preempted" in way)
    for name, answer in expected.items():
        assert found[name] == answer, name
    assert counts["grammar"] > 50
    assert counts["accepted grammar"] > 0.3 * counts["grammar"]
    assert (counts["draft_model"] > 0) == ("model" in way)


@pytest.mark.parametrize("seed", sampled(range(3), 0))
def test_a_tokenizer_that_lies_changes_nothing_either(
    seed: int, asked: list[EngineCoreRequest], expected: dict[str, Answer]
) -> None:
    rng = random.Random(seed)
    ids = [EOS, 0, VOCAB_SIZE - 1, VOCAB_SIZE, 1 << 40]

    def lie(text: str) -> list[int]:
        return [rng.choice([*ids, rng.randrange(VOCAB_SIZE)]) for _ in range(rng.randrange(9))]

    with loaded() as engine, counted_by_source() as counts:
        encode_with(engine, lie)
        found = answers(engine, asked)
    assert found == expected
    assert counts["grammar"] > 50
    assert counts["accepted grammar"] < 0.3 * counts["grammar"]


def test_a_text_that_is_forced_takes_a_step_for_a_few_tokens() -> None:
    choice = ("One afternoon Mia found a kite in the garden of 北京 and Theo found a boat.",)
    params = SamplingParams(
        temperature=1.0, max_tokens=100, structured_outputs=StructuredOutputsParams(choice=choice)
    )
    request = make_request("a", make_prompt(5), params)
    with loaded() as engine, counted_by_source() as counts:
        (answer,) = answers(engine, [request]).values()
    assert counts["accepted grammar"] > 0.5 * len(answer.token_ids)


@pytest.mark.parametrize(
    ("way", "max_cached"),
    sampled(
        itertools.product(("suffix", "preempted", "a draft model"), (3, 1000)),
        ("suffix", 1000),
        ("preempted", 3),
    ),
)
def test_finished_answers_change_nothing(
    way: str, max_cached: int, asked: list[EngineCoreRequest], expected: dict[str, Answer]
) -> None:
    fields = {"suffix_decoding_max_cached_requests": max_cached, **WAYS[way]}
    with loaded(**fields) as engine, counted_by_source() as counts:
        for _ in range(2):
            assert answers(engine, asked) == expected
    if "model" not in way:  # which seldom leaves a request to others
        assert counts["cached_request"] > 20
    if "model" not in way and max_cached > len(asked):
        assert counts["accepted cached_request"] > 0.3 * counts["cached_request"]


def test_without_speculation_nobody_asks_grammars() -> None:
    with loaded("none") as engine:
        assert isinstance(engine.core.executor, UniprocExecutor)
        assert batch_of(engine.core.executor).sampling.grammars.encode is None


def test_a_model_whose_tokenizer_is_not_there_has_drafts_of_its_texts(
    make_model: Callable[..., Path],
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with loaded(model=make_model()) as engine:
        (answer,) = answers(engine, [make_request("a", [5, 6, 7], params)]).values()
    assert len(answer.token_ids) == 40


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({}, "suffix_decoding_max_cached_requests is 10, must be 0 if speculation is none"),
        ({"suffix_decoding_max_cached_requests": -1}, "is -1, must be at least 0"),
    ],
)
def test_finished_answers_are_kept_for_drafts_alone(fields: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        EngineConfig(model="x", **{"suffix_decoding_max_cached_requests": 10, **fields})
