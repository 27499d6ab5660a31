"""What every EngineClient promises, with a real model, in this process and in one of its own."""

import asyncio
import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import tokenizers
from prometheus_client import CollectorRegistry, generate_latest

from pdserve_common.errors import (
    DrainingError,
    EngineDeadError,
    FailedPreconditionError,
    InvalidRequestError,
)
from pdserve_common.limits.validation import MAX_PROBE_TOKENS, PROBE_PRIORITY
from pdserve_common.tokens.block_hash import extend_block_hashes, truncated_hashes
from pdserve_common.types.engine import (
    ErrorCode,
    FinishReason,
    PauseMode,
)
from pdserve_common.types.engine_client import EngineState
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_common.types.verbs import Pause, Profile, ResetPrefixCache, Resume, Sleep, WakeUp
from pdserve_engine.clients import metrics
from pdserve_engine.clients.inproc import InprocEngineClient
from pdserve_engine.clients.launch import WorkerEngine, launch_engine
from pdserve_engine.clients.subprocess import SubprocessEngineClient
from pdserve_engine.config import NUM_PROBE_SLOTS, EngineConfig
from pdserve_engine.runner.rank import Rank
from support import fork_server
from support.engines import LONG, Client, launched, until_idle
from support.grammars import EOS, MODEL
from support.metrics import samples_of
from support.requests import PROMPT
from support.scripted_engine import apply_events
from support.waiting import until

MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 4
KINDS = ("inproc", "subprocess")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def start(make_model: Callable[..., Path]) -> Callable[..., Any]:
    """start(kind) -> an async context manager with a loaded engine."""

    def start(
        kind: str, registry: CollectorRegistry | None = None, model: Path | None = None
    ) -> contextlib.AbstractAsyncContextManager[WorkerEngine]:
        return launched(
            model or make_model(max_position_embeddings=MAX_MODEL_LEN),
            registry=registry,
            dtype="float32",
            kv_cache_memory_mib=8,
            max_num_seqs=MAX_NUM_SEQS,
            engine_process=kind,
        )

    return start


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def registry(kind: str) -> CollectorRegistry:
    return CollectorRegistry()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    kind: str, registry: CollectorRegistry, start: Callable[..., Any]
) -> AsyncIterator[WorkerEngine]:
    """One engine for all tests that leave it as it was."""
    async with start(kind, registry) as engine:
        yield engine


@pytest.fixture
def client(engine: WorkerEngine) -> Iterator[Client]:
    client = Client(engine)
    yield client
    client.close()


def kill(engine: WorkerEngine, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the engine die and return a piece of what is to be said of it."""
    if isinstance(engine, SubprocessEngineClient):
        engine._process.kill()
        return "SIGKILL"

    def fail(*_: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(Rank, "execute_model", fail)
    return "no more"


# ---- requests


async def test_probes_are_answered_beside_a_full_batch(client: Client) -> None:
    running = [f"running-{index}" for index in range(2 * MAX_NUM_SEQS)]
    probes = [f"probe-{index}" for index in range(2 * NUM_PROBE_SLOTS)]
    for name in running:
        client.add(name, max_tokens=500)
    for name in probes:
        client.add(name, max_tokens=MAX_PROBE_TOKENS, priority=PROBE_PRIORITY)
    for name in probes:
        assert await client.finish_reason(name) is FinishReason.LENGTH
    assert set(client.ended()) == set(probes)
    client.engine.abort_requests(client.index, running)
    for name in running:
        await client.end_of(name)


async def test_the_info_tells_what_is_served(engine: WorkerEngine) -> None:
    info = engine.info
    assert info.engine_id == "d0"
    assert info.max_model_len == MAX_MODEL_LEN
    assert info.max_num_seqs == MAX_NUM_SEQS
    assert info.num_blocks == engine.stats().num_total_blocks > 0
    assert engine.is_alive()
    assert engine.problem() is None


async def test_a_request_gets_the_tokens_of_transformers_and_one_end(
    engine: WorkerEngine,
    client: Client,
    make_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
) -> None:
    model = make_model(max_position_embeddings=MAX_MODEL_LEN)
    client.add("a", max_tokens=12)
    assert await client.finish_reason("a") == FinishReason.LENGTH
    assert client.tokens("a") == hf_greedy(model, list(PROMPT), 12)
    indexes = [output.first_token_index for output in client.outputs("a")]
    lengths = [len(output.new_token_ids) for output in client.outputs("a")]
    assert indexes == [sum(lengths[:i]) for i in range(len(lengths))]
    await until_idle(engine)


async def test_grammars_are_followed_or_refused(kind: str, start: Callable[..., Any]) -> None:
    wanted = {
        "choice": StructuredOutputsParams(choice=("two cats",)),
        "regex": StructuredOutputsParams(regex="(ab){3}"),
    }
    asked = {**wanted, "refused": StructuredOutputsParams(grammar="root ::= nowhere")}
    async with start(kind, model=MODEL) as engine:
        assert "structured_outputs" in engine.info.served_fields
        client = Client(engine)
        for name, constraint in asked.items():
            params = SamplingParams(max_tokens=32, structured_outputs=constraint)
            client.add(name, params=params, eos_token_id=EOS)
        reasoning = {
            "reasoning_ended": False,
            "reasoning_parser_kwargs": {"reasoning_end_str": "e"},
        }
        params = SamplingParams(max_tokens=64, seed=1, structured_outputs=wanted["choice"])
        client.add("reasoning", params=params, eos_token_id=EOS, **reasoning)
        for name in (*wanted, "reasoning"):
            assert await client.finish_reason(name) is FinishReason.STOP
        refusal = (await client.end_of("refused")).error
        assert refusal is not None
        assert refusal.code is ErrorCode.INVALID_ARGUMENT
        assert "nowhere" in refusal.message
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    answers = [tokenizer.decode(client.tokens(name)) for name in wanted]
    assert answers == ["two cats", "ababab"]
    reasoned = tokenizer.decode(client.tokens("reasoning"))
    assert re.fullmatch("[^e]+e\n{0,2}two cats", reasoned), reasoned


async def test_requests_of_a_front_end_are_served_in_order(client: Client) -> None:
    names = [f"fifo-{number}" for number in range(5 * MAX_NUM_SEQS)]
    for name in names:
        client.add(name, max_tokens=1)
    await until(lambda: len(client.ended()) == len(names))
    assert client.ended() == names


async def test_each_front_end_gets_its_own_outputs(engine: WorkerEngine) -> None:
    clients = [Client(engine) for _ in range(3)]
    for number, client in enumerate(clients):
        client.add(f"own-{number}")
    for number, client in enumerate(clients):
        assert await client.finish_reason(f"own-{number}") == FinishReason.LENGTH
        assert {output.request_id for output in client.outputs()} == {f"own-{number}"}
        client.close()


async def test_an_id_in_use_is_refused(client: Client) -> None:
    client.add("twice", max_tokens=50)
    with pytest.raises(InvalidRequestError, match="twice"):
        client.add("twice")
    assert await client.finish_reason("twice") == FinishReason.LENGTH
    assert len(client.tokens("twice")) == 50


async def test_a_deadline_ends_a_request(client: Client) -> None:
    client.add("late", max_tokens=LONG, deadline=time.monotonic() + 0.2)
    end = await client.end_of("late")
    assert end.finish_reason == FinishReason.ERROR
    assert end.error is not None
    assert end.error.code == ErrorCode.DEADLINE_EXCEEDED
    await until_idle(client.engine)


async def test_a_huge_deadline_does_not_end_the_engine(client: Client) -> None:
    client.add("patient", max_tokens=2, deadline=time.monotonic() + 1e10)
    assert await client.finish_reason("patient") == FinishReason.LENGTH
    assert client.engine.problem() is None


# ---- attempts


async def test_a_higher_attempt_supersedes_the_one_that_runs(client: Client) -> None:
    client.add("reference", max_tokens=40)
    await client.end_of("reference")
    wanted = client.tokens("reference")
    await client.start("again")
    client.add("again", max_tokens=40, attempt=2, resume_output_token_ids=tuple(wanted[:7]))
    num_before = len(client.outputs("again"))
    end = await client.end_of("again")
    assert (end.attempt, end.finish_reason) == (2, FinishReason.LENGTH)
    later = client.outputs("again")[num_before:]
    assert {output.attempt for output in later} == {2}
    tokens = {o.first_token_index + i: t for o in later for i, t in enumerate(o.new_token_ids)}
    assert tokens == {i: wanted[i] for i in range(min(tokens), 40)}
    assert min(tokens) <= 7
    await until_idle(client.engine)


async def test_an_attempt_that_is_not_higher_is_refused(client: Client) -> None:
    client.add("second", max_tokens=40, attempt=1)
    for attempt in (0, 1):
        with pytest.raises(InvalidRequestError, match="'second' is running already"):
            client.add("second", attempt=attempt)
    end = await client.end_of("second")
    assert (end.attempt, end.finish_reason) == (1, FinishReason.LENGTH)


async def test_a_front_end_cannot_supersede_anothers_request(client: Client) -> None:
    other = Client(client.engine)
    client.add("owned", max_tokens=40)
    with pytest.raises(InvalidRequestError, match="'owned' is running already"):
        other.add("owned", attempt=1)
    assert await client.finish_reason("owned") == FinishReason.LENGTH
    other.close()


async def test_a_front_end_that_comes_back_supersedes_what_it_had(engine: WorkerEngine) -> None:
    """Its next attempts may come before the engine has ended those that were aborted with it."""
    before, after = Client(engine), Client(engine)
    before.add("back", max_tokens=40)
    before.close()
    with pytest.raises(InvalidRequestError, match="'back' is running already"):
        after.add("back", attempt=0)
    after.add("back", max_tokens=3, attempt=1)
    end = await after.end_of("back")
    assert (end.attempt, end.finish_reason) == (1, FinishReason.LENGTH)
    after.close()
    await until_idle(engine)


async def test_an_attempt_that_ends_late_does_not_end_the_next(client: Client) -> None:
    """The end of the lower one may be under way when the higher one comes."""
    for round_ in range(20):
        name = f"race-{round_}"
        client.add(name, max_tokens=2)
        await asyncio.sleep(round_ * 0.0005)
        client.add(name, max_tokens=3, attempt=1)
        await until(
            lambda name=name: any(o.finished and o.attempt == 1 for o in client.outputs(name))
        )
        other = Client(client.engine)
        other.add(name, max_tokens=1)  # the id is free again
        assert await other.finish_reason(name) == FinishReason.LENGTH
        other.close()
    await until_idle(client.engine)


async def test_an_abort_after_superseding_ends_the_higher_attempt(client: Client) -> None:
    await client.start("both")
    client.add("both", max_tokens=LONG, attempt=1)
    client.abort("both")
    end = await client.end_of("both")
    assert (end.attempt, end.finish_reason) == (1, FinishReason.ABORT)
    await until_idle(client.engine)


# ---- aborts


async def test_running_and_queued_requests_can_be_aborted(client: Client) -> None:
    running = [f"running-{number}" for number in range(MAX_NUM_SEQS)]
    for name in [*running, "queued"]:
        client.add(name, max_tokens=LONG)
    await until(lambda: all(client.tokens(name) for name in running))
    client.engine.abort_requests(client.index, ["queued", running[0], "unknown"])
    for name in ("queued", running[0]):
        assert await client.finish_reason(name) == FinishReason.ABORT
    assert client.tokens("queued") == []
    client.engine.abort_requests(client.index, running)
    await until(lambda: sorted(client.ended()) == sorted([*running, "queued"]))
    await until_idle(client.engine)


async def test_a_front_end_cannot_abort_anothers_request(client: Client) -> None:
    other = Client(client.engine)
    client.add("mine", max_tokens=40)
    client.engine.abort_requests(other.index, ["mine"])
    assert await client.finish_reason("mine") == FinishReason.LENGTH
    other.close()


async def test_an_id_can_be_used_again_after_an_abort_that_came_too_late(client: Client) -> None:
    for _ in range(20):
        client.messages.clear()
        client.add("again", max_tokens=1)
        await client.end_of("again")
        client.abort("again")
        client.messages.clear()
        client.add("again", max_tokens=3)
        assert await client.finish_reason("again") == FinishReason.LENGTH


async def test_a_front_end_that_leaves_takes_its_requests_along(engine: WorkerEngine) -> None:
    client = Client(engine)
    client.add("left", max_tokens=LONG)
    await until(lambda: client.messages)
    client.close()
    num_messages = len(client.messages)
    await until_idle(engine)
    assert len(client.messages) == num_messages
    other = Client(engine)
    other.add("left")
    assert await other.finish_reason("left") == FinishReason.LENGTH
    other.close()


# ---- what is told of the engine


async def test_steps_and_stats_grow(client: Client) -> None:
    seen = [(client.engine.step_seq(), client.engine.stats().prefix_cache_queries)]
    for number in range(3):
        client.add(f"count-{number}", max_tokens=5)
        await client.end_of(f"count-{number}")
        seen.append((client.engine.step_seq(), client.engine.stats().prefix_cache_queries))
    for (step, queries), (later_step, later_queries) in itertools.pairwise(seen):
        assert later_step >= step + 5
        assert later_queries > queries


async def test_the_load_is_seen_while_requests_run(client: Client) -> None:
    for number in range(MAX_NUM_SEQS + 2):
        client.add(f"load-{number}", max_tokens=LONG)

    def load() -> tuple[int, int]:
        return client.engine.stats().num_running_reqs, client.engine.stats().num_waiting_reqs

    await until(lambda: load() == (MAX_NUM_SEQS, 2))
    assert client.engine.stats().num_free_blocks < client.engine.stats().num_total_blocks
    client.engine.abort_requests(client.index, [f"load-{n}" for n in range(MAX_NUM_SEQS + 2)])
    await until_idle(client.engine)


async def scrape(registry: CollectorRegistry) -> dict[str, float]:
    """As the metrics server does, on another thread."""
    return samples_of((await asyncio.to_thread(generate_latest, registry)).decode())


async def test_metrics_are_those_of_the_engine(
    engine: WorkerEngine,
    client: Client,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "FETCH_TIMEOUT_S", 60.0)
    before = await scrape(registry)
    client.add("measured", max_tokens=5)
    await client.end_of("measured")
    after = await scrape(registry)
    name = 'pdserve_engine_requests_total{outcome="length"}'
    assert after[name] == before[name] + 1
    assert before['pdserve_engine_requests_total{outcome="repetition"}'] == 0, "it is there"
    name = "pdserve_engine_step_tokens_sum"
    assert after[name] == before[name] + len(PROMPT) + 4
    assert after["pdserve_kv_links"] == 0
    families = {metric.name for metric in await asyncio.to_thread(lambda: [*registry.collect()])}
    assert {"pdserve_kv_transfer_duration_seconds", "pdserve_kv_blocks"} <= families


# ---- control verbs


async def test_a_pause_holds_requests_until_resume(client: Client) -> None:
    await client.start("frozen")
    await client.engine.call(Pause(mode=PauseMode.KEEP))
    assert client.engine.state() == EngineState(is_paused=True)
    num_tokens = len(client.tokens("frozen"))
    await asyncio.sleep(0.1)
    assert len(client.tokens("frozen")) == num_tokens
    await client.engine.call(Resume())
    assert client.engine.state() == EngineState()
    await until(lambda: len(client.tokens("frozen")) > num_tokens)
    client.abort("frozen")
    assert await client.finish_reason("frozen") == FinishReason.ABORT


async def test_a_verb_that_does_not_suit_the_state_is_a_typed_error(engine: WorkerEngine) -> None:
    with pytest.raises(FailedPreconditionError):
        await engine.call(Resume())
    with pytest.raises(FailedPreconditionError):
        await engine.call(WakeUp())
    with pytest.raises(FailedPreconditionError):
        await engine.call(Profile(start=False))
    with pytest.raises(InvalidRequestError):
        await engine.call(Sleep(level=9, mode=PauseMode.WAIT))
    assert engine.state() == EngineState()


async def test_a_verb_whose_caller_gives_up_is_undone(client: Client) -> None:
    await client.start("long")  # a pause does not wait for requests that wait
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(client.engine.call(Pause(mode=PauseMode.WAIT)), 0.2)
    await until(lambda: client.engine.state() == EngineState())
    client.abort("long")
    assert await client.finish_reason("long") == FinishReason.ABORT
    client.add("after")
    assert await client.finish_reason("after") == FinishReason.LENGTH


async def test_sleep_gives_memory_back_and_wake_up_serves_again(client: Client) -> None:
    client.add("before", max_tokens=8)
    await client.end_of("before")
    assert await client.engine.call(Sleep(level=1, mode=PauseMode.WAIT)) > 0
    assert client.engine.state() == EngineState(is_paused=True, sleep_level=1)
    client.add("asleep", max_tokens=8)
    await client.engine.call(WakeUp())
    assert client.engine.state() == EngineState()
    assert await client.finish_reason("asleep") == FinishReason.LENGTH
    assert client.tokens("asleep") == client.tokens("before")


async def test_the_prefix_cache_can_be_forgotten(client: Client) -> None:
    prompt = tuple(range(3, 43))
    client.add("cached", prompt=prompt)
    await client.end_of("cached")
    assert await client.engine.call(ResetPrefixCache()) >= 2
    assert await client.engine.call(ResetPrefixCache()) == 0
    client.add("anew", prompt=prompt)
    await client.end_of("anew")
    assert client.tokens("anew") == client.tokens("cached")


async def test_it_says_what_its_pool_has_cached_before_the_outputs(client: Client) -> None:
    cached: set[int] = set()
    client.engine.record_kv_cache_events(lambda events: apply_events(cached, events))
    prompt = tuple(range(50, 90))
    hashes: list[bytes] = []
    request = client.add("told", prompt=prompt)
    extend_block_hashes(hashes, request, prompt, client.engine.info.block_size)
    await client.end_of("told")
    assert cached >= set(truncated_hashes(hashes))
    await client.engine.call(ResetPrefixCache())
    await until(lambda: not cached)
    client.add("again", prompt=prompt)
    await client.end_of("again")
    assert cached == set(truncated_hashes(hashes))
    again: set[int] = set()
    client.engine.record_kv_cache_events(lambda events: apply_events(again, events))
    await until(lambda: again == cached)
    client.engine.record_kv_cache_events(lambda events: None)


# ---- the end


async def test_draining_lets_what_runs_finish_and_takes_nothing_new(
    kind: str, start: Callable[..., Any]
) -> None:
    async with start(kind) as engine:
        client = Client(engine)
        names = [f"drained-{number}" for number in range(2 * MAX_NUM_SEQS)]
        for name in names:
            client.add(name, max_tokens=50)
        drains = [asyncio.create_task(engine.drain(60.0)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(DrainingError):
            client.add("new")
        assert await asyncio.gather(*drains) == [0, 0]
        assert client.ended() == names
        assert all(len(client.tokens(name)) == 50 for name in names)
        assert await engine.drain(1.0) == 0


async def test_a_drain_that_takes_too_long_hands_the_rest_back(
    kind: str, start: Callable[..., Any]
) -> None:
    async with start(kind) as engine:
        client = Client(engine)
        for number in range(MAX_NUM_SEQS + 1):
            client.add(f"rest-{number}", max_tokens=LONG)
        await until(lambda: client.tokens("rest-0"))
        assert await engine.drain(0.2) == MAX_NUM_SEQS + 1
        await until(lambda: len(client.ended()) == MAX_NUM_SEQS + 1)
        for end in (output for output in client.outputs() if output.finished):
            assert end.finish_reason == FinishReason.ERROR
            assert end.error is not None
            assert end.error.code == ErrorCode.DRAINING
            assert end.error.is_retryable
        (first, *_) = client.outputs("rest-0")
        assert first.new_token_ids, "what it had is delivered"
        assert engine.stats().num_free_blocks == engine.stats().num_total_blocks


async def test_a_dead_engine_tells_every_front_end_and_takes_nothing_more(
    kind: str, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(kind) as engine:
        one, two = Client(engine), Client(engine)
        one.add("a", max_tokens=LONG)
        await until(lambda: one.tokens("a"))
        told = kill(engine, monkeypatch)
        for client in (one, two):
            await until(lambda client=client: client.messages and client.messages[-1].engine_dead)
            assert [bool(m.engine_dead) for m in client.messages].count(True) == 1
            error = client.messages[-1].engine_dead
            assert error is not None
            assert error.code == ErrorCode.ENGINE_DEAD
            assert told in error.message
        assert told in (engine.problem() or "")
        assert not engine.is_alive()
        with pytest.raises(EngineDeadError):
            one.add("b")
        with pytest.raises(EngineDeadError):
            await engine.call(Resume())
        assert await engine.drain(60.0) == 0


def held() -> set[tuple[object, ...]]:
    """Open files, threads but those of asyncio's pool, child processes."""
    found: set[tuple[object, ...]] = {(child.pid,) for child in psutil.Process().children()}
    found |= {(t.name, t.ident) for t in threading.enumerate() if "asyncio_" not in t.name}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


async def test_closing_gives_everything_back_and_may_be_repeated(
    kind: str, start: Callable[..., Any]
) -> None:
    await asyncio.to_thread(int)
    fork_server.prepare("pdserve_engine.clients")
    before = held()
    async with start(kind) as engine:
        client = Client(engine)
        await client.start("a")
        assert held() - before
        await engine.close()
        assert not engine.is_alive()
    await until(lambda: held() <= before)


async def test_a_killed_engine_leaves_nothing_behind(
    kind: str, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = held()
    async with start(kind) as engine:
        client = Client(engine)
        client.add("a", max_tokens=LONG)
        kill(engine, monkeypatch)
        await until(engine.problem)
    await until(lambda: held() <= before)


async def test_a_model_that_is_not_there_is_a_value_error(kind: str, tmp_path: Path) -> None:
    before = held()
    config = EngineConfig(model=str(tmp_path / "nothing"), engine_process=kind)  # type: ignore[arg-type]
    with pytest.raises((ValueError, OSError), match="nothing"):
        await launch_engine(config, role="decode", engine_id="d", registry=CollectorRegistry())
    await until(lambda: held() <= before)


async def test_the_variants_are_what_the_names_say() -> None:
    assert not EngineConfig().has_engine_process
    assert EngineConfig(device="cuda").has_engine_process
    assert InprocEngineClient is not SubprocessEngineClient
