"""Pause, sleep, wake-up, cache reset and profile of an engine on its thread, with a real model."""

import asyncio
import contextlib
import gzip
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from pdserve_common.errors import (
    DeadlineExceededError,
    EngineDeadError,
    FailedPreconditionError,
    InvalidRequestError,
    RequestFailedError,
)
from pdserve_common.processes.calls import Call
from pdserve_common.types.engine import (
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    PauseMode,
)
from pdserve_common.types.engine_client import EngineState
from pdserve_common.types.verbs import (
    VERBS,
    ListLoras,
    Pause,
    PinLora,
    Profile,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
)
from pdserve_engine.clients import control as control_client
from pdserve_engine.clients.inproc import InprocEngineClient
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.runner.load import model_source
from pdserve_engine.runner.operate import control
from pdserve_engine.runner.operate.profiler import StepProfiler
from support import engines
from support.engines import LONG
from support.steps import slowed_steps
from support.waiting import until

KV_MIB = 8
PROMPT = tuple(range(2, 70))

pytestmark = pytest.mark.asyncio(loop_scope="module")


def launched(model: Path, **fields: Any) -> contextlib.AbstractAsyncContextManager[Any]:
    settings = {"kv_cache_memory_mib": KV_MIB, "max_num_seqs": 2, "engine_process": "inproc"}
    return engines.launched(model, **{**settings, **fields})


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model(max_position_embeddings=LONG + 2 * len(PROMPT))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Path) -> AsyncIterator[InprocEngineClient]:
    async with launched(model) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: InprocEngineClient) -> AsyncIterator[InprocEngineClient]:
    """The shared engine, awake and empty before and after."""
    yield shared
    if shared.state().sleep_level is not None:
        await shared.call(WakeUp())
    elif shared.state().is_paused:
        await shared.call(Resume())
    await until(lambda: shared.stats().num_free_blocks == shared.stats().num_total_blocks)


class Client(engines.Client):
    """One front end, all of whose requests have one prompt."""

    def add(self, name: str, max_tokens: int = 4, **fields: Any) -> EngineCoreRequest:
        return super().add(name, max_tokens, PROMPT, **fields)

    async def run(self, name: str, max_tokens: int = 8, **fields: Any) -> list[int]:
        return await super().run(name, max_tokens, **fields)


@pytest.fixture
def client(engine: InprocEngineClient) -> Client:
    return Client(engine)


async def settle(engine: InprocEngineClient) -> None:
    """Let the engine take a few steps, if there are any."""
    for _ in range(4):
        # Between two of them.
        await asyncio.wait_for(engine.call(ListLoras()), 60)


# ---- pause and resume


async def test_abort_ends_everything_and_what_comes_later_waits(client: Client) -> None:
    await client.start("running")
    await client.engine.call(Pause(mode=PauseMode.ABORT))
    assert (await client.end_of("running")).finish_reason is FinishReason.ABORT
    client.add("later")
    await settle(client.engine)
    assert client.tokens("later") == []
    await client.engine.call(Resume())
    assert (await client.end_of("later")).finish_reason is FinishReason.LENGTH


async def test_wait_lets_running_requests_finish_and_keeps_waiting_ones(client: Client) -> None:
    with slowed_steps():
        await client.start("a", 60)
        await client.start("b", 60)
        client.add("waits")
        pause = asyncio.create_task(client.engine.call(Pause(mode=PauseMode.WAIT)))
        await until(lambda: client.engine.state().is_paused)
    await pause
    assert set(client.ended()) == {"a", "b"}
    await settle(client.engine)
    assert client.tokens("waits") == []
    assert client.engine.stats().num_waiting_reqs == 1
    await client.engine.call(Resume())
    assert (await client.end_of("waits")).finish_reason is FinishReason.LENGTH


async def test_keep_freezes_requests_which_go_on_with_the_same_tokens(client: Client) -> None:
    expected = await client.run("whole", 60)
    with slowed_steps():
        await client.start("frozen", 60)
        await client.engine.call(Pause(mode=PauseMode.KEEP))
    await settle(client.engine)
    count = len(client.tokens("frozen"))
    assert 0 < count < 60
    await settle(client.engine)
    assert len(client.tokens("frozen")) == count
    await client.engine.call(Resume())
    await client.end_of("frozen")
    assert client.tokens("frozen") == expected


async def test_deadlines_expire_while_paused(client: Client) -> None:
    await client.engine.call(Pause(mode=PauseMode.KEEP))
    client.add("late", deadline=time.monotonic() + 0.1)
    error = (await client.end_of("late")).error
    assert error is not None
    assert error.code is ErrorCode.DEADLINE_EXCEEDED


async def test_requests_can_be_aborted_while_paused(client: Client) -> None:
    await client.start("frozen")
    await client.engine.call(Pause(mode=PauseMode.KEEP))
    client.abort("frozen")
    assert (await client.end_of("frozen")).finish_reason is FinishReason.ABORT


async def test_resume_without_a_pause_is_refused(engine: InprocEngineClient) -> None:
    with pytest.raises(FailedPreconditionError, match="not paused"):
        await engine.call(Resume())


async def test_a_pause_may_change_its_mode(client: Client) -> None:
    await client.start("a")
    await client.engine.call(Pause(mode=PauseMode.KEEP))
    await client.engine.call(Pause(mode=PauseMode.ABORT))
    assert (await client.end_of("a")).finish_reason is FinishReason.ABORT


async def test_one_verb_at_a_time_and_a_cancelled_one_is_undone(client: Client) -> None:
    engine = client.engine
    await client.start("a")
    pause = asyncio.create_task(engine.call(Pause(mode=PauseMode.WAIT)))
    await until(lambda: engine.state().is_paused)
    with pytest.raises(FailedPreconditionError, match="cannot resume: pause is under way"):
        await engine.call(Resume())
    pause.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await pause
    assert engine.state() == EngineState()
    assert await client.run("b")
    client.abort("a")


async def test_a_pause_that_takes_too_long_is_undone(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "CONTROL_TIMEOUT_S", 0.1)
    await client.start("a")
    with pytest.raises(DeadlineExceededError, match=r"pause was not done within 0.1 s"):
        await client.engine.call(Pause(mode=PauseMode.WAIT))
    monkeypatch.undo()
    await until(lambda: client.engine.state() == EngineState())
    client.abort("a")


# ---- the prefix cache


async def test_reset_forgets_cached_blocks_and_counts_them(client: Client) -> None:
    await client.engine.call(ResetPrefixCache())
    await client.run("a", 4)
    await until(lambda: client.engine.stats().num_cached_blocks)
    assert await client.engine.call(ResetPrefixCache()) == len(PROMPT) // 16
    assert await client.engine.call(ResetPrefixCache()) == 0


async def test_reset_is_refused_with_numbers_while_blocks_are_held(client: Client) -> None:
    await client.start("a")
    refusal = r"cannot reset the prefix cache: \d+ KV blocks are held, 1 requests are running, 0 KV"
    with pytest.raises(FailedPreconditionError, match=refusal):
        await client.engine.call(ResetPrefixCache())
    with pytest.raises(FailedPreconditionError, match=refusal):
        await client.engine.call(Pause(mode=PauseMode.KEEP, clear_cache=True))
    assert client.engine.state() == EngineState(), "a pause that fails is undone"
    await client.engine.call(Pause(mode=PauseMode.ABORT, clear_cache=True))
    assert client.engine.state() == EngineState(is_paused=True)


# ---- sleep and wake-up


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_an_engine_that_slept_computes_what_it_did_before(client: Client, level: int) -> None:
    engine = client.engine
    expected = await client.run("before")
    freed = await engine.call(Sleep(level=level, mode=PauseMode.WAIT))
    assert engine.state() == EngineState(is_paused=True, sleep_level=level)
    assert freed >= (0.9 * (KV_MIB << 20) if level else 0)
    client.add("asleep", 8)
    await settle(client.engine)
    assert client.tokens("asleep") == []
    await engine.call(WakeUp())
    assert engine.state() == EngineState()
    await client.end_of("asleep")
    assert client.tokens("asleep") == expected


async def test_memory_wakes_before_scheduling_and_each_tag_on_its_own(client: Client) -> None:
    engine = client.engine
    await engine.call(Sleep(level=2, mode=PauseMode.ABORT))
    with pytest.raises(FailedPreconditionError, match="scheduling needs kv_cache and weights"):
        await engine.call(WakeUp(tags=("scheduling",)))
    await engine.call(WakeUp(tags=("weights",)))
    await engine.call(WakeUp(tags=("weights",)))
    with pytest.raises(FailedPreconditionError, match="scheduling needs kv_cache"):
        await engine.call(WakeUp(tags=("scheduling",)))
    await engine.call(WakeUp(tags=("kv_cache",)))
    assert engine.state().sleep_level == 2
    await engine.call(WakeUp(tags=("scheduling",)))
    assert await client.run("a")


async def test_what_the_state_does_not_allow_is_refused(engine: InprocEngineClient) -> None:
    with pytest.raises(FailedPreconditionError, match="not asleep"):
        await engine.call(WakeUp())
    with pytest.raises(InvalidRequestError, match="tags has 'wings', known tags are weights"):
        await engine.call(WakeUp(tags=("wings",)))
    with pytest.raises(InvalidRequestError, match="level is 3, must be 0 to 2"):
        await engine.call(Sleep(level=3, mode=PauseMode.WAIT))
    await engine.call(Sleep(level=1, mode=PauseMode.WAIT))
    verbs: list[Call[Any]] = [
        Sleep(level=1, mode=PauseMode.WAIT),
        Pause(mode=PauseMode.WAIT),
        Resume(),
    ]
    for verb in verbs:
        with pytest.raises(FailedPreconditionError, match="asleep at level 1"):
            await engine.call(verb)
    assert engine.state().sleep_level == 1


async def test_requests_that_hold_blocks_are_not_slept_over(client: Client) -> None:
    await client.start("a")
    with pytest.raises(FailedPreconditionError, match=r"cannot sleep: .* 1 requests are running"):
        await client.engine.call(Sleep(level=1, mode=PauseMode.KEEP))
    assert client.engine.state() == EngineState()
    count = len(client.tokens("a"))
    await until(lambda: len(client.tokens("a")) > count)
    client.abort("a")


async def test_a_wake_up_without_memory_can_be_repeated(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = client.engine
    expected = await client.run("before")
    await engine.call(Sleep(level=2, mode=PauseMode.WAIT))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("2 GiB wanted\nMore")

    def fail_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty(2**60, dtype=torch.uint8)

    with monkeypatch.context() as patch:
        patch.setattr(model_source, "load_model", fail_on_cpu)
        refusal = "no memory for weights: .*DefaultCPUAllocator.*; free some and try again"
        with pytest.raises(FailedPreconditionError, match=refusal):
            await engine.call(WakeUp())
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "restore", fail)
        with pytest.raises(FailedPreconditionError, match="no memory for kv_cache: 2 GiB wanted;"):
            await engine.call(WakeUp())
    assert engine.state().sleep_level == 2
    assert engine.problem() is None
    await engine.call(WakeUp())
    assert await client.run("after") == expected


async def test_weights_that_changed_on_disk_do_not_wake_up(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    async with launched(copy) as engine:
        client = Client(engine)
        expected = await client.run("before")
        await engine.call(Sleep(level=2, mode=PauseMode.WAIT))
        config = (copy / "config.json").read_text()
        (copy / "config.json").write_text(config + " ")
        with pytest.raises(FailedPreconditionError, match="has changed since the start"):
            await engine.call(WakeUp())
        assert engine.state().sleep_level == 2
        assert engine.problem() is None
        (copy / "config.json").write_text(config)
        await engine.call(WakeUp())
        assert await client.run("after") == expected


# ---- profiles


async def test_a_profile_shows_the_models_operations(model: Path, tmp_path: Path) -> None:
    async with launched(model, profile_dir=str(tmp_path / "new")) as engine:
        with pytest.raises(FailedPreconditionError, match="no profile is running"):
            await engine.call(Profile(start=False))
        assert await engine.call(Profile(start=True)) == ""
        with pytest.raises(FailedPreconditionError, match="a profile is running already"):
            await engine.call(Profile(start=True))
        await Client(engine).run("a")
        path = Path(await engine.call(Profile(start=False)))
        assert path.parent == tmp_path / "new"
        with gzip.open(path) as file:
            names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
        assert "aten::embedding" in names


async def test_a_profile_ends_after_some_steps_and_is_kept_until_it_is_asked_for(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = client.engine
    monkeypatch.setattr(control, "MAX_PROFILE_STEPS", 3)
    with caplog.at_level(logging.INFO, logger=control.__name__):
        await engine.call(Profile(start=True))
        await client.run("a", 10)
        await until(lambda: "profiled 3 steps" in caplog.text)
    path = Path(await engine.call(Profile(start=False)))
    with gzip.open(path) as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert 3 <= names.count("aten::embedding") <= 5
    with pytest.raises(FailedPreconditionError, match="no profile is running"):
        await engine.call(Profile(start=False))


async def test_a_profile_that_cannot_be_written_is_not_started(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with launched(model, profile_dir=str(tmp_path / "file" / "below")) as engine:
        with pytest.raises(
            FailedPreconditionError, match=r"cannot start a profile: .*Not a directory"
        ):
            await engine.call(Profile(start=True))
        assert await Client(engine).run("a")


async def test_any_engine_id_makes_a_file_name(tmp_path: Path) -> None:
    profiler = StepProfiler(str(tmp_path), name="../rack 1/d:0")
    profiler.start()
    path = Path(profiler.stop())
    assert path.parent == tmp_path
    assert path.name.startswith(".._rack_1_d_0-")


def test_a_first_start_loads_no_compiler_and_leaves_no_folder(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from pdserve_engine.runner.operate.profiler import StepProfiler\n"
        "profiler = StepProfiler(None, name='p')\n"
        "profiler.start()\n"
        "os._exit('torch._inductor' in sys.modules)"  # without an end
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=300)
    assert not list(tmp_path.iterdir())


# ---- the end


async def test_a_drain_ends_a_pause_and_refuses_verbs(model: Path) -> None:
    async with launched(model) as engine:
        client = Client(engine)
        with slowed_steps():
            await client.start("frozen", 60)
            await engine.call(Pause(mode=PauseMode.KEEP))
        client.add("waits")
        handed_back = await asyncio.gather(engine.drain(60.0), engine.drain(60.0))
        assert handed_back == [0, 0]
        for request_id in ("frozen", "waits"):
            assert (await client.end_of(request_id)).finish_reason is FinishReason.LENGTH
        with pytest.raises(FailedPreconditionError, match="the worker is draining"):
            await engine.call(Pause(mode=PauseMode.WAIT))


async def test_a_drain_overtakes_a_pause_that_waits(model: Path) -> None:
    async with launched(model) as engine:
        client = Client(engine)
        with slowed_steps():
            await client.start("a", 60)
            client.add("b")
            pause = asyncio.create_task(engine.call(Pause(mode=PauseMode.WAIT)))
            await until(lambda: engine.state().is_paused)
            drain = asyncio.create_task(engine.drain(60.0))
            with pytest.raises(FailedPreconditionError, match="the worker is draining"):
                await pause
        assert await drain == 0
        assert (await client.end_of("b")).finish_reason is FinishReason.LENGTH


async def test_a_drain_hands_back_what_waits_for_a_sleeping_engine(model: Path) -> None:
    async with launched(model) as engine:
        client = Client(engine)
        await engine.call(Sleep(level=2, mode=PauseMode.WAIT))
        client.add("waits")
        started = time.monotonic()
        assert await engine.drain(1000.0) == 1
        error = (await client.end_of("waits")).error
        assert error is not None
        assert error.code is ErrorCode.DRAINING
        assert error.is_retryable
        assert time.monotonic() - started < 100.0


async def test_a_verb_under_way_when_the_engine_dies_says_so(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no more")

    async with launched(model) as engine:
        client = Client(engine)
        await client.start("a")
        pause = asyncio.create_task(engine.call(Pause(mode=PauseMode.WAIT)))
        await until(lambda: engine.state().is_paused)
        monkeypatch.setattr(EngineCore, "begin_step", fail)
        with pytest.raises(EngineDeadError, match="no more"):
            await pause
        with pytest.raises(EngineDeadError, match="no more"):
            await engine.call(Resume())


async def test_steps_are_logged_on_request(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with launched(model, log_iterations=True) as engine:
        with caplog.at_level(logging.INFO, logger="pdserve_engine.clients.inproc"):
            await Client(engine).run("a", 3)
    steps = [r.getMessage() for r in caplog.records if r.getMessage().startswith("step ")]
    assert len(steps) == 3
    assert f"{len(PROMPT)} tokens in " in steps[0]
    assert "KV usage" in steps[0]


async def test_a_wait_with_a_timeout_ends_also_while_the_engine_is_idle(
    engine: InprocEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(_: control.EngineControl, verb: Profile) -> str:
        await control.Wait(lambda: False, timeout_s=0.1)
        await control.Wait(lambda: True)
        return "over"

    monkeypatch.setitem(control.HANDLERS, Profile, handler)  # type: ignore[arg-type]
    assert await asyncio.wait_for(engine.call(Profile(start=True)), 30.0) == "over"


@pytest.mark.parametrize("verb", [Profile(start=True), ListLoras(), PinLora(lora_name="a")])
async def test_a_defect_of_a_verb_that_changes_nothing_fails_it_alone(
    engine: InprocEngineClient, monkeypatch: pytest.MonkeyPatch, verb: Call[Any]
) -> None:
    async def handler(_: control.EngineControl, verb: Call[Any]) -> None:
        if not isinstance(verb, ListLoras):
            await control.Wait(lambda: True)
        raise ZeroDivisionError("a defect")

    with monkeypatch.context() as patch:
        patch.setitem(control.HANDLERS, type(verb), handler)  # type: ignore[arg-type]
        with pytest.raises(RequestFailedError, match="has failed: ZeroDivisionError: a defect"):
            await engine.call(verb)
    assert await engine.call(ListLoras()) == ()
    await Client(engine).run("a", 3)


async def test_a_defect_of_a_verb_that_may_be_half_done_ends_the_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(KVCache, "release", fail)
    async with launched(model) as engine:
        with pytest.raises(EngineDeadError, match="a defect"):
            await engine.call(Sleep(level=2, mode=PauseMode.WAIT))


async def test_every_verb_has_a_handler() -> None:
    assert set(control.HANDLERS) == set(VERBS)
