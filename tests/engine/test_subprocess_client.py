"""The socket between a worker and its engine process: encoding, limits, and who notices what."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pdserve_common.processes import channel as channel_module
from pdserve_common.processes.calls import Answer, Call, Failed, ProtocolError
from pdserve_common.processes.channel import Channel
from pdserve_common.processes.frames import FrameCodec
from pdserve_common.types.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineError,
    ErrorCode,
    FinishReason,
    Generate,
    KVTransferParams,
    LogprobsLists,
    PauseMode,
)
from pdserve_common.types.kv import BlocksReady, KVSessionId, SessionEnded, SessionEndReason
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_common.types.verbs import Pause, Profile, Resume, Sleep
from pdserve_engine.clients import child as child_module
from pdserve_engine.clients import subprocess as client_module
from pdserve_engine.clients.messages import (
    CODEC,
    MESSAGES,
    AddRequest,
    Drain,
    GetMetrics,
    LinkLost,
    LoadEngine,
    Message,
    MetricsSnapshot,
)
from pdserve_engine.clients.metrics import EngineProcessCollector, take_snapshot
from pdserve_engine.clients.subprocess import SubprocessEngineClient
from pdserve_engine.config import EngineConfig
from support import fork_server
from support.waiting import until

Children = Callable[[], list[psutil.Process]]

ERROR = EngineError(code=ErrorCode.OVERLOADED, message="full", is_retryable=True, retry_after_ms=5)
SESSION = KVSessionId(p_epoch="p", d_epoch="d", link=1, seq=2**40)
SAMPLES: list[Message] = [
    LoadEngine(config=EngineConfig(num_blocks=9), role="decode", engine_id="d", log_level="info"),
    AddRequest(
        EngineCoreRequest(
            request_id="r",
            prompt_token_ids=(1, 2),
            task=Generate(
                SamplingParams(
                    seed=2**64 - 1,
                    temperature=0.5,
                    stop=("a",),
                    logit_bias={3: -1.5},
                    structured_outputs=StructuredOutputsParams(choice=("x", "y")),
                )
            ),
            trace_headers={"traceparent": "00"},
            deadline=1e9,
            kv_transfer_params=KVTransferParams(do_remote_decode=True, remote_engine_id="p"),
        ),
        {b"\0hash\xff": bytes(range(256))},
    ),
    EngineCoreOutputs(
        outputs=(
            EngineCoreOutput(
                request_id="r",
                new_token_ids=(5,),
                new_logprobs=LogprobsLists(
                    logprob_token_ids=((5, 6),),
                    logprobs=((-0.25, -float("inf")),),
                    sampled_token_ranks=(1,),
                ),
                finish_reason=FinishReason.STOP,
                stop_reason="</s>",
                events=(EngineCoreEvent(EngineCoreEventType.QUEUED, 1.5),),
                error=ERROR,
            ),
        ),
        finished_requests=frozenset({"r"}),
        engine_dead=ERROR,
    ),
    BlocksReady(session=SESSION, first_block=0, block_ids=((1, 2), ())),
    SessionEnded(
        session=None,
        request_id="r",
        attempt=1,
        reason=SessionEndReason.FENCED,
        message="fenced: sleep",
    ),
    Pause(mode=PauseMode.WAIT, clear_cache=True),
    GetMetrics(),
    Answer.of(None),
    Answer.of("path"),
    Failed("pdserve", ERROR),
    Failed("os", ERROR),
]


# ---- encoding


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_way(message: Message) -> None:
    ((decoded, ref),) = CODEC.reader().feed(CODEC.encode(message, 2**33))
    assert decoded == message
    assert type(decoded) is type(message)
    assert ref == 2**33


def test_every_type_is_there_once_and_frozen() -> None:
    assert len(set(MESSAGES)) == len(MESSAGES)
    for cls in MESSAGES:
        assert cls.__dataclass_params__.frozen, cls  # type: ignore[attr-defined]


@given(st.lists(st.sampled_from(SAMPLES), max_size=6), st.integers(1, 50))
def test_frames_may_come_in_pieces(messages: list[Message], size: int) -> None:
    data = b"".join(CODEC.encode(message, number) for number, message in enumerate(messages))
    reader = CODEC.reader()
    found = [m for i in range(0, len(data), size) for m in reader.feed(data[i : i + size])]
    assert found == [(message, number) for number, message in enumerate(messages)]


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_or_an_incomplete_frame(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        list(CODEC.reader().feed(data))


def test_a_field_of_another_type_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match=r"Answer: Expected .* got `float` - at `\$.result`"):
        list(CODEC.reader().feed(CODEC.encode(Answer(1.5))))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "result", "other"),
    [
        (Resume(), None, 0),
        (Sleep(level=1), 2**40, "much"),
        (Profile(start=False), "path", None),
        (Drain(1.0), 3, 1.5),
        (GetMetrics(), MetricsSnapshot(()), 3),
    ],
)
def test_the_answer_to_a_call_has_the_type_of_its_results(
    call: Call[Any], result: object, other: object
) -> None:
    assert Answer.of(result).result_of(call) == result
    with pytest.raises(ProtocolError, match=f"answer to {type(call).__name__}: Expected"):
        Answer.of(other).result_of(call)


def test_the_size_of_a_frame_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[FrameCodec.__module__]
    frame = CODEC.encode(Answer.of("x" * 200))
    monkeypatch.setattr(module, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ProtocolError, match="Answer has"):
        CODEC.encode(Answer.of("x" * 200))
    with pytest.raises(ProtocolError, match="a frame of type"):
        list(CODEC.reader().feed(frame))


# ---- the channel


class End:
    """One end of a connection and what it was told."""

    def __init__(self) -> None:
        self.messages: list[tuple[Message, int]] = []
        self.lost: list[str] = []
        self.channel = Channel(
            CODEC, lambda *message: self.messages.append(message), self.lost.append
        )
        self.transport: asyncio.Transport

    async def connect(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.transport, _ = await loop.create_unix_connection(lambda: self.channel, sock=sock)


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    ends = (End(), End())
    for end, sock in zip(ends, socket.socketpair(), strict=True):
        await end.connect(sock)
    yield ends
    for end in ends:
        end.channel.abort("over")


async def test_messages_of_several_threads_arrive_in_the_order_of_each(
    ends: tuple[End, End],
) -> None:
    left, right = ends

    def send(thread: int) -> None:
        for number in range(500):
            left.channel.send(LinkLost(str(number)), thread)

    await asyncio.gather(*(asyncio.to_thread(send, thread) for thread in range(4)))
    await until(lambda: len(right.messages) == 2000)
    for thread in range(4):
        mine = [message for message, ref in right.messages if ref == thread]
        assert mine == [LinkLost(str(number)) for number in range(500)]


async def test_what_was_sent_before_close_arrives(ends: tuple[End, End]) -> None:
    left, right = ends
    left.channel.send(LinkLost("x" * 4_000_000))
    left.channel.close()
    left.channel.send(LinkLost("late"))
    await until(lambda: right.lost)
    assert right.messages == [(LinkLost("x" * 4_000_000), 0)]
    assert len(left.lost) == len(right.lost) == 1


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("STALL_TIMEOUT_S", 0.2, "has read nothing for 0.2 s"),
        ("MAX_UNSENT_BYTES", 1_000_000, "bytes behind"),
    ],
)
async def test_an_end_that_does_not_read_is_given_up(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch, limit: str, value: float, message: str
) -> None:
    monkeypatch.setattr(channel_module, limit, value)
    left, right = ends
    right.transport.pause_reading()
    left.channel.send(LinkLost("x" * 4_000_000))
    await until(lambda: left.lost)
    assert message in left.lost[0]


async def test_a_slow_end_that_reads_on_is_not(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, timers = asyncio.get_running_loop(), []
    call_later = loop.call_later

    def watch(delay: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        timer = call_later(delay, *args, **kwargs)
        if delay == channel_module.STALL_TIMEOUT_S:
            timers.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", watch)
    left, right = ends
    right.transport.pause_reading()
    left.channel.send(LinkLost("x" * 4_000_000))
    await until(lambda: timers)
    right.transport.resume_reading()
    await until(lambda: right.messages)
    assert all(timer.cancelled() for timer in timers)
    assert not left.lost


async def test_garbage_ends_the_connection(ends: tuple[End, End]) -> None:
    left, right = ends
    left.transport.write(b"\xff" * 100)
    await until(lambda: right.lost and left.lost)
    assert "a frame of type" in right.lost[0]


# ---- metrics


async def test_the_collector_shows_what_the_registry_over_there_holds() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter = Counter("things_total", "Things", ["kind"], registry=theirs)
    Histogram("sizes", "Sizes", buckets=(1, 2), registry=theirs).observe(1.5)

    async def fetch() -> Any:
        return take_snapshot(theirs)

    ours.register(EngineProcessCollector(await fetch(), fetch))
    counter.labels("a").inc(3)
    assert await asyncio.to_thread(generate_latest, ours) == generate_latest(theirs)


async def test_a_scrape_does_not_wait_for_an_engine_that_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[take_snapshot.__module__], "FETCH_TIMEOUT_S", 0.1)
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    Counter("things_total", "Things", registry=theirs).inc(3)
    ours.register(EngineProcessCollector(take_snapshot(theirs), lambda: asyncio.sleep(60)))  # type: ignore[arg-type]
    text = await asyncio.to_thread(generate_latest, ours)
    assert b"things_total 3.0" in text


# ---- processes


async def test_a_failed_callback_ends_the_engine_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was to send is lost: requests would wait for it for ever."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    loop = asyncio.get_running_loop()
    process = child_module._EngineProcess()
    ours, theirs = socket.socketpair()
    await loop.create_unix_connection(lambda: process.channel, sock=theirs)
    monkeypatch.setattr(loop, "call_exception_handler", lambda c: process.on_exception(loop, c))
    loop.call_soon(lambda: process.channel.send(Answer(object())))  # type: ignore[arg-type]
    await until(lambda: exits)
    ours.close()
    assert exits == [child_module.EXIT_LOST]


@pytest.fixture
def config(make_model: Callable[..., Path]) -> EngineConfig:
    return EngineConfig(
        model=str(make_model()), num_threads=1, kv_connector="none", kv_cache_memory_mib=8
    )


async def load(config: EngineConfig) -> SubprocessEngineClient:
    return await SubprocessEngineClient.load(
        config, role="decode", engine_id="d", registry=CollectorRegistry()
    )


async def test_a_process_that_dies_while_loading_is_a_typed_error(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    loading = asyncio.create_task(load(config))
    await until(children)
    children()[0].kill()
    with pytest.raises(Exception, match="was ended by SIGKILL"):
        await loading
    assert not children()


async def test_giving_loading_up_ends_the_process(config: EngineConfig, children: Children) -> None:
    loading = asyncio.create_task(load(config))
    await until(children)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert not children()


async def test_a_process_that_hangs_is_a_problem_until_it_goes_on(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    monkeypatch.setattr(client_module, "SILENCE_S", 1)
    engine = await load(config)
    (child,) = children()
    child.suspend()
    await until(engine.problem)
    assert "has said nothing for" in (engine.problem() or "")
    child.resume()
    await until(lambda: engine.problem() is None)
    await engine.close()


async def test_a_process_that_does_not_close_is_killed(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    monkeypatch.setattr(client_module, "CLOSE_TIMEOUT_S", 0.5)
    engine = await load(config)
    (child,) = children()
    child.suspend()  # it cannot end but by SIGKILL
    await engine.close()
    assert not children()


async def test_a_process_ends_at_once_whatever_an_interpreter_would_do_at_its_end(
    config: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = "import atexit, time\natexit.register(time.sleep, 3600)\n"
    (tmp_path / "sitecustomize.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(client_module, "EXIT_TIMEOUT_S", 60.0)
    engine = await load(config)
    await engine.close()
    assert engine.problem() is None
    assert "is killed" not in caplog.text


PARENT = """
import asyncio, json, sys
from prometheus_client import CollectorRegistry
from pdserve_engine.config import EngineConfig
from pdserve_engine.clients.subprocess import SubprocessEngineClient

async def main():
    config = EngineConfig(**json.loads(sys.argv[1]))
    engine = await SubprocessEngineClient.load(
        config, role="decode", engine_id="d", registry=CollectorRegistry()
    )
    print(engine._process.pid, "torch" in sys.modules, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_process_ends_with_its_parent(config: EngineConfig, signum: int) -> None:
    command = [sys.executable, "-c", PARENT, json.dumps(dataclasses.asdict(config))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        pid, has_torch = parent.stdout.readline().split()
        child = psutil.Process(int(pid))
        parent.send_signal(signum)
        child.wait(60)
    assert has_torch == b"False"


@pytest.fixture(autouse=True)
def children() -> Iterator[Children]:
    """Processes that the test has started; none is to be left."""
    fork_server.prepare("pdserve_engine.clients")
    before = set(psutil.Process().children())

    def started() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child not in before]

    yield started
    assert not started()
