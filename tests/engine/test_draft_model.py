"""A draft model in whole engines: what it guesses is accepted where it thinks as the model does,
and changes no token and no logprob, whatever it thinks.
"""

import asyncio
import itertools
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVTransferParams,
    PauseMode,
)
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_common.types.verbs import Sleep, WakeUp
from pdserve_engine.assemble import LoadedEngine
from pdserve_engine.clients.launch import WorkerEngine
from pdserve_engine.config import EngineConfig, Role
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.models.base import ForwardInputs
from pdserve_engine.models.config import ModelError
from pdserve_engine.request.sched_output import ModelRunnerOutput, SchedulerOutput
from pdserve_engine.runner.draft.drafter import Drafter
from pdserve_engine.runner.load import kv_sizing
from pdserve_engine.runner.rank_calls import RestoreKVCache, RestoreWeights, SleepRank
from support import engines, requests
from support.answers import Answer, answers
from support.drafts import lengths_chosen_by, make_noisy_model
from support.engines import Client, counted_drafts, linked, tokens_of
from support.grammars import EOS, MODEL, VOCAB_SIZE
from support.samples import sampled
from support.steps import before_steps, loaded_part
from support.waiting import until

NUM_REQUESTS = [60, pytest.param(200, marks=pytest.mark.soak)]
MIB = 1 << 20
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01),
    "penalized": SamplingParams(
        temperature=0.7,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={300: 2.0, 500: -3.0},
        min_tokens=4,
        logprobs=2,
    ),
}
WAYS: dict[str, dict[str, object]] = {
    "in a batch": {},
    "chunks of 24": {"max_num_batched_tokens": 24},
    "v0": {"scheduling_mode": "v0"},
    "without prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_blocks": 12},
    "preempted, without prefix cache": {"num_blocks": 12, "enable_prefix_caching": False},
}
CONSTRAINTS = (
    StructuredOutputsParams(regex="(Mia|Theo) [a-z]{3,9}( and [a-z]{2,9}){0,2}[.!]"),
    StructuredOutputsParams(choice=("a kite", "a boat", "two cats")),
    StructuredOutputsParams(json_object=True),
)


@pytest.fixture(scope="module")
def noisy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with other weights: it is often right, and often not."""
    return make_noisy_model(MODEL, tmp_path_factory.mktemp("noisy") / "model", noise=0.15)


SETTINGS: dict[str, Any] = {
    "num_blocks": 96,
    "max_model_len": 160,
    "max_num_seqs": 8,
    "kv_watermark": 0.0,
}


def settings_of(draft_model: Path | None, **fields: Any) -> dict[str, Any]:
    drafts = {"speculation": "draft_model", "draft_model": str(draft_model)}
    return {**SETTINGS, **(drafts if draft_model is not None else {}), **fields}


@contextmanager
def loaded(draft_model: Path | None, model: Path = MODEL, **fields: Any) -> Iterator[LoadedEngine]:
    settings = settings_of(draft_model, **fields)
    with lengths_chosen_by(), engines.loaded(model, **settings) as engine:
        yield engine


def drafter_of(engine: LoadedEngine) -> Drafter:
    assert isinstance(engine.core.executor, UniprocExecutor)
    drafter = engine.core.executor.rank.runner.drafter
    assert drafter is not None
    return drafter


def make_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(f"{length} {seed}")
    return tuple(rng.randrange(300, VOCAB_SIZE) for _ in range(length))


def make_request(name: str, prompt: Sequence[int], params: SamplingParams) -> EngineCoreRequest:
    return requests.make_request(name, prompt, params, eos_token_id=EOS)


def random_params(rng: random.Random) -> SamplingParams:
    def one_of(*choices: Any) -> Any:
        return rng.choice(choices)

    return SamplingParams(
        temperature=one_of(0.0, 0.0, 0.5, 1.0, 1.5),
        top_p=one_of(1.0, 1.0, 0.9),
        top_k=one_of(0, 0, 30),
        min_p=one_of(0.0, 0.0, 0.05),
        presence_penalty=one_of(0.0, 0.0, 0.5),
        frequency_penalty=one_of(0.0, 0.0, -0.3),
        repetition_penalty=one_of(1.0, 1.0, 1.2),
        seed=rng.randrange(1 << 64),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), one_of(0, 0, 100))),
        ignore_eos=one_of(True, False),
        max_tokens=rng.randrange(1, 40),
        min_tokens=one_of(0, 0, 5),
        logprobs=one_of(None, 0, 3),
        prompt_logprobs=one_of(None, None, None, 1),
        logit_bias=one_of({}, {}, {400: 3.0, 900: -2.0}),
        bad_words_token_ids=one_of((), ((500,), (600, 700))),
        structured_outputs=one_of(None, None, None, *CONSTRAINTS),
    )


def random_requests(count: int) -> list[EngineCoreRequest]:
    """The first of them are the same, however many there are."""
    rng = random.Random(21)
    # Come four at once, these outgrow a pool of 12 blocks whenever the grammars of others are done.
    params = SamplingParams(temperature=1.0, seed=21, max_tokens=60, ignore_eos=True)
    requests = [make_request(f"long{index}", make_prompt(20, index), params) for index in range(4)]
    for index in range(count):
        prompt = make_prompt(rng.randrange(1, 70), rng.randrange(3))
        # Some prompts begin alike.
        shared = make_prompt(64)[: rng.choice([0, 0, 16, 40])]
        request = make_request(f"r{index}", shared + prompt, random_params(rng))
        source = requests[-1] if requests and rng.random() < 0.2 else None
        if source is not None and source.task.sampling_params.prompt_logprobs is None:
            prompt = source.prompt_token_ids
            request = replace(request, prompt_token_ids=prompt, fork_of=source.request_id)
        requests.append(request)
    return requests


# ---- right drafts


@pytest.mark.parametrize(
    ("kind", "dtype"),
    sampled(
        itertools.product(PARAMS, ("bfloat16", "float32")),
        ("greedy", "float32"),
        ("penalized", "bfloat16"),
    ),
)
def test_the_model_accepts_its_own_drafts(kind: str, dtype: str) -> None:
    params = replace(PARAMS[kind], max_tokens=40, ignore_eos=True, seed=7)
    with loaded(MODEL, dtype=dtype) as engine, counted_drafts() as counts:
        for length in (1, 15, 16, 17, 70, 100):
            answers(engine, [make_request(f"{length}", make_prompt(length), params)])
    assert counts["drafts"] > 150
    assert counts["accepted"] >= 0.99 * counts["drafts"]


def test_a_request_whose_drafts_were_all_right_has_as_many_again() -> None:
    """Until its last tokens: a step brings one more than it has drafts."""
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    found: list[int] = []

    def watch(step: SchedulerOutput) -> None:
        if step.num_scheduled_tokens:
            found.append(sum(map(len, step.scheduled_spec_decode_tokens.values())))

    with loaded(MODEL) as engine, before_steps(watch):
        answers(engine, [make_request("a", make_prompt(20), params)])
    # The first step computes the prompt, and the last one has nothing left to guess.
    assert found == [0, 5, 5, 5, 5, 5, 0]


def test_drafts_end_where_the_positions_do() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with loaded(MODEL, max_model_len=64) as engine:
        found = answers(engine, [make_request("a", make_prompt(20), params)])
    with loaded(None, max_model_len=64) as engine:
        assert found == answers(engine, [make_request("a", make_prompt(20), params)])
    assert len(found["a"].token_ids) == 44


@pytest.mark.parametrize("way", sampled(WAYS, "chunks of 24", "preempted, without prefix cache"))
def test_its_kv_is_there_however_requests_run(way: str) -> None:
    requests = [
        make_request(
            f"{length}-{kind}",
            make_prompt(length),
            replace(params, max_tokens=40, ignore_eos=True, seed=length),
        )
        for length in (1, 16, 33, 70)
        for kind, params in PARAMS.items()
    ]
    with loaded(MODEL, **WAYS[way]) as engine, counted_drafts() as counts:
        for attempt in range(2):
            again = [replace(each, request_id=f"{each.request_id}-{attempt}") for each in requests]
            answers(engine, again, at_once=2)
        assert (engine.core.scheduler.num_preemptions > 0) == ("preempted" in way)
    assert counts["drafts"] > 400
    assert counts["accepted"] >= 0.99 * counts["drafts"]


# ---- drafts of any kind


@pytest.fixture(scope="module", params=NUM_REQUESTS)
def asked(request: pytest.FixtureRequest) -> list[EngineCoreRequest]:
    return random_requests(request.param)


@pytest.fixture(scope="module")
def expected(asked: list[EngineCoreRequest]) -> dict[str, Answer]:
    """What an engine without drafts answers."""
    with loaded(None) as engine:
        found = answers(engine, asked, at_once=2)
    assert len(found) == len(asked)
    return found


@pytest.mark.parametrize("way", sampled(WAYS, "in a batch", "v0", "preempted"))
def test_no_draft_changes_what_a_client_sees(
    way: str,
    noisy_model: Path,
    asked: list[EngineCoreRequest],
    expected: dict[str, Answer],
) -> None:
    is_preempted = "preempted" in way
    with loaded(noisy_model, **WAYS[way]) as engine, counted_drafts() as counts:
        found = answers(engine, asked, at_once=4 if is_preempted else 2)
        assert (engine.core.scheduler.num_preemptions > 0) == is_preempted
    for name, answer in expected.items():
        assert found[name] == answer, name
    # Both kinds are there.
    assert 0.1 < counts["accepted"] / counts["drafts"] < 0.9


@pytest.mark.parametrize("way", sampled(["in a batch", "preempted"], "preempted"))
def test_a_model_that_knows_nothing_changes_nothing_either(
    way: str,
    make_model: Callable[..., Path],
    asked: list[EngineCoreRequest],
    expected: dict[str, Answer],
) -> None:
    """Another family, another shape, its own dtype, and random weights."""
    stranger = make_model("Qwen3ForCausalLM", vocab_size=VOCAB_SIZE)
    shutil.copy(MODEL / "tokenizer.json", stranger)
    with loaded(stranger, **WAYS[way]) as engine, counted_drafts() as counts:
        found = answers(engine, asked[: len(asked) // 3], at_once=2)
    assert all(expected[name] == answer for name, answer in found.items())
    assert counts["drafts"] > 100
    assert counts["accepted"] < 0.5 * counts["drafts"]


# ---- what it computes


def test_a_step_computes_no_more_than_its_budget() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with loaded(MODEL, max_num_batched_tokens=32) as engine:
        computed = counted_tokens(engine)
        steps: list[SchedulerOutput] = []
        with before_steps(lambda step: (steps.append(step), computed.append(0))):
            requests = [make_request(f"{n}", make_prompt(n), params) for n in (100, 5, 60)]
            answers(engine, requests)
    # The prompts' chunks leave nothing; drafts follow each other one by one, beside the budget.
    for step, num_tokens in zip(steps, computed, strict=True):
        num_drafting = sum(num_drafts - 1 for num_drafts in step.num_draft_tokens.values())
        assert step.total_num_scheduled_tokens + num_tokens <= 32 + num_drafting
    assert computed[0] == 0
    assert sum(computed) > 165


def test_a_prompt_that_others_had_is_not_computed_again() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with loaded(MODEL) as engine:
        computed = counted_tokens(engine)
        costs = []
        for name in ("first", "second"):
            computed.append(0)
            answers(engine, [make_request(name, make_prompt(100), params)])
            costs.append(computed[-1])
    # Of the second what is behind the last full block, and what it says.
    assert costs[0] >= 100
    assert costs[1] <= 100 % 16 + 2


def counted_tokens(engine: LoadedEngine) -> list[int]:
    """Return an empty list. Its last number, once there is one, grows by each token that the draft
    model computes.
    """
    model, computed = drafter_of(engine).model, list[int]()
    forward = model.forward

    def count(inputs: ForwardInputs) -> torch.Tensor:
        computed[-1] += len(inputs.token_ids)
        return forward(inputs)

    model.forward = count
    return computed


# ---- P and D


PAIR = {"kv_connector": "nixl", "engine_process": "inproc"}


async def test_d_computes_what_it_waits_for_and_drafts_from_the_start() -> None:
    requests = [
        make_request(
            f"{length}-{kind}",
            make_prompt(length),
            replace(PARAMS[kind], max_tokens=9, ignore_eos=True, seed=length),
        )
        for length in (150, 17, 64)
        for kind in ("greedy", "sampled")
    ]
    is_computed = threading.Event()

    def watch(step: SchedulerOutput) -> None:
        """P does not begin before D has planned to compute the first prompt."""
        if step.draft_prefills:
            is_computed.set()
        assert not step.num_scheduled_tokens or is_computed.wait(60.0)

    async with (
        launched("prefill", MODEL, **PAIR) as p,
        launched("decode", MODEL, **PAIR) as d,
        linked(p, d) as port,
    ):
        costs = step_costs(loaded_part(d))
        with before_steps(watch), counted_drafts() as counts:
            for request in requests:
                await hand_over(request, Client(p), Client(d), port)
            await until(lambda: not p.stats().num_open_kv_sessions)
    assert costs[0] == (costs[0][0], 144), "whole blocks of the first prompt, before P began"
    # Then the rest of a block, P's token and D's own, and drafts.
    later = [cost for step, cost in costs if requests[0].request_id in step.num_scheduled_tokens]
    assert max(later) <= 150 - 144 + 2 + 4
    # The first one is P's, D's first step brings one and has drafts of five more.
    assert counts["drafts"] >= 5 * len(requests)
    assert counts["accepted"] >= 0.99 * counts["drafts"]


async def test_no_draft_of_a_d_changes_what_its_clients_see(
    noisy_model: Path, asked: list[EngineCoreRequest], expected: dict[str, Answer]
) -> None:
    # D's leg has no log-probabilities of prompts, and no part in answers of one token.
    requests = [
        request
        for request in asked
        if request.task.sampling_params.prompt_logprobs is None
        and len(expected[request.request_id].token_ids) > 1
        and request.fork_of is None
    ][:60]
    async with (
        launched("prefill", noisy_model, **PAIR) as p,
        launched("decode", noisy_model, num_blocks=40, **PAIR) as d,
        linked(p, d) as port,
    ):
        on_p, on_d = Client(p), Client(d)
        with counted_drafts() as counts:
            for some in batches(requests, 6):
                found = await asyncio.gather(*(hand_over(r, on_p, on_d, port) for r in some))
                for request, answer in zip(some, found, strict=True):
                    check_d(answer, expected[request.request_id], request.request_id)
            await until(lambda: not p.stats().num_open_kv_sessions)
    assert 0.1 < counts["accepted"] / counts["drafts"] < 0.9


async def hand_over(
    request: EngineCoreRequest, on_p: Client, on_d: Client, port: int
) -> list[EngineCoreOutput]:
    """Return what D brings of a request."""
    on_d.send(replace(request, kv_transfer_params=replace(ON_D, remote_port=port)))
    on_p.send(replace(request, kv_transfer_params=ON_P))
    return await on_d.answer(request.request_id)


def batches(
    requests: Sequence[EngineCoreRequest], size: int
) -> Iterator[Sequence[EngineCoreRequest]]:
    return (requests[start : start + size] for start in range(0, len(requests), size))


def check_d(outputs: Sequence[EngineCoreOutput], expected: Answer, name: str) -> None:
    """D repeats P's token, of whose logprob it does not know."""
    found = Answer.of(outputs)
    assert found.logprobs[1:] == expected.logprobs[1:], name
    assert found._replace(logprobs=expected.logprobs) == expected, name


def step_costs(engine: LoadedEngine) -> list[tuple[SchedulerOutput, int]]:
    """Return a list that gets each step, and how many tokens the draft model computed in it."""
    drafter, computed, costs = drafter_of(engine), counted_tokens(engine), []
    draft = drafter.draft

    def record(step: SchedulerOutput, output: ModelRunnerOutput) -> ModelRunnerOutput:
        computed.append(0)
        result = draft(step, output)
        costs.append((step, computed[-1]))
        return result

    drafter.draft = record  # type: ignore[method-assign]
    return costs


ON_P = KVTransferParams(do_remote_decode=True, remote_engine_id="d0")
ON_D = KVTransferParams(
    do_remote_prefill=True, remote_engine_id="p0", remote_host="127.0.0.1", remote_port=1
)


@asynccontextmanager
async def launched(role: Role, draft_model: Path, **fields: Any) -> AsyncIterator[WorkerEngine]:
    settings = settings_of(draft_model, **{"max_model_len": 256, **fields})
    async with AsyncExitStack() as stack:
        with lengths_chosen_by() if role == "decode" else nullcontext():
            engine = await stack.enter_async_context(engines.launched(MODEL, role, **settings))
        yield engine


# ---- memory


@pytest.mark.parametrize("level", sampled([1, 2], 2))
async def test_a_sleep_gives_its_memory_back(level: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    # 64 MiB of KV, and as much of the draft model.
    fields = {"engine_process": "inproc", "num_blocks": 2048}
    async with launched("decode", MODEL, **fields) as engine:
        client, seen = Client(engine), set()
        for attempt in range(3):
            with counted_drafts() as counts:
                client.send(make_request(f"{attempt}", make_prompt(70), params))
                seen.add(tuple(tokens_of(await client.answer(f"{attempt}"))))
            assert counts["accepted"] >= 0.99 * counts["drafts"] > 0
            assert await engine.call(Sleep(level=level)) > 120 * MIB
            await engine.call(WakeUp(tags=("weights",)))
            await engine.call(WakeUp())
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("mode", "level"),
    sampled(
        itertools.product((PauseMode.ABORT, PauseMode.WAIT), (1, 2)),
        (PauseMode.ABORT, 1),
        (PauseMode.WAIT, 2),
    ),
)
async def test_a_sleep_in_mid_traffic_changes_no_answer(
    mode: PauseMode,
    level: int,
    noisy_model: Path,
    asked: list[EngineCoreRequest],
    expected: dict[str, Answer],
) -> None:
    """Requests that an abort ends come again; those that had waited go on by themselves."""
    fields = {"engine_process": "inproc", "max_model_len": 160, "max_num_seqs": 3}
    requests = {each.request_id: each for each in asked[:30]}
    async with launched("decode", noisy_model, **fields) as engine:
        client = Client(engine)
        with counted_drafts() as counts:
            for request in requests.values():
                client.send(request)
            await until(lambda: counts["accepted"] > 0)
            await engine.call(Sleep(level=level, mode=mode))
        with counted_drafts() as counts:
            await engine.call(WakeUp())
            found = {name: Answer.of(await client.answer(name)) for name in requests}
            aborted = [n for n in found if found[n].finish_reason is FinishReason.ABORT]
            for name in aborted:
                again = f"{name}-again"
                client.send(replace(requests[name], request_id=again))
                token_ids = found[name].token_ids
                assert token_ids == expected[name].token_ids[: len(token_ids)], name
                found[name] = Answer.of(await client.answer(again))
        assert bool(aborted) == (mode is PauseMode.ABORT)
        assert counts["accepted"] > 0, "it goes on"
    for name, answer in found.items():
        assert answer == expected[name], name


def test_weights_and_kv_of_a_sleeping_draft_model_are_gone() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with loaded(MODEL, enable_prefix_caching=False) as engine:
        drafter = drafter_of(engine)
        answers(engine, [make_request("a", make_prompt(70), params)])
        assert drafter.kv_cache.tensor.any()
        engine.core.executor.collective_rpc(SleepRank(2))
        assert drafter.model is None
        assert not drafter.kv_cache.tensor.any()
        engine.core.executor.collective_rpc(RestoreWeights())
        engine.core.executor.collective_rpc(RestoreKVCache())
        assert drafter.model is not None
        assert not drafter.kv_cache.tensor.any()
        with counted_drafts() as counts:
            answers(engine, [make_request("b", make_prompt(70), params)])
        assert counts["accepted"] >= 0.99 * counts["drafts"] > 0


def test_the_pools_size_is_that_of_both(make_model: Callable[..., Path]) -> None:
    with loaded(None, num_blocks=None, kv_cache_memory_mib=8) as engine:
        alone = engine.info.num_blocks
    with loaded(MODEL, num_blocks=None, kv_cache_memory_mib=8) as engine:
        assert engine.info.num_blocks == alone // 2
        # And a block for each place in the batch.
        pool = drafter_of(engine).kv_cache
        assert pool.num_blocks == alone // 2 + engine.core.scheduler.config.max_batch_size


def test_pools_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve_engine.runner.rank.measure_largest_step", lambda *args: 0)
    # 40 MiB are enough for the model's pool of 32, and not for the draft model's as well.
    monkeypatch.setattr(kv_sizing, "available_host_bytes", lambda: 40 * MIB)
    with loaded(None, num_blocks=1024):
        pass
    refusal = r"KV pool of 64.0 MiB does not fit: \d+.\d MiB are left"
    with pytest.raises(ValueError, match=refusal), loaded(MODEL, num_blocks=1024):
        pass


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"speculation": "draft_model"}, "draft_model is None: draft_model must be set"),
        ({"draft_model": "x"}, "speculation is none and draft_model is x"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(fields: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        EngineConfig(**fields)


@pytest.mark.parametrize(
    ("architecture", "overrides", "refusal"),
    [
        ("LlamaForCausalLM", {"vocab_size": 1400}, "vocab_size of 1400, must be the model's 1392"),
        (
            "LlamaForCausalLM",
            {"max_position_embeddings": 128},
            r"128 positions, must have at least max_model_len \(160\): lower --max-model-len",
        ),
        (
            "MistralForCausalLM",
            {"sliding_window": 32},
            r"draft_model has sliding windows \(32 tokens\), and must have none",
        ),
        ("GPTNeoXForCausalLM", {}, "architectures is .*GPTNeoX.*, native are"),
    ],
)
def test_draft_models_that_do_not_fit_are_refused(
    architecture: str, overrides: dict[str, Any], refusal: str, make_model: Callable[..., Path]
) -> None:
    folder = make_model(architecture, **{"vocab_size": VOCAB_SIZE, **overrides})
    with pytest.raises(ModelError, match=refusal), loaded(folder):
        pass


def test_another_tokenizer_is_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(MODEL, folder)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text + "\n")
    refusal = r"its tokenizer\.json is not that of the model"
    with pytest.raises(ModelError, match=refusal), loaded(folder):
        pass
