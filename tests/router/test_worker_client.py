import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Callable

import pytest

from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve_common import wire
from pdserve_common.errors import NoWorkerError
from pdserve_common.observability.defects import DEFECTS, watch_event_loop
from pdserve_common.rpc.attach_protocol import PROTOCOL_VERSION
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    ErrorCode,
    FinishReason,
    Generate,
    WorkerRole,
)
from pdserve_common.types.kv import KVCacheEvents
from pdserve_common.types.lora import LoRAAdapter, LoRAAdapters
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.workers.clients import attach_client
from pdserve_router.workers.clients.attach_client import AttachStream, LinkTimings
from pdserve_router.workers.clients.listeners import Listeners, TokenCallback, no_token
from pdserve_router.workers.clients.worker_client import WorkerClient
from pdserve_router.workers.routing.kv_cache_follower import KVCacheFollower
from pdserve_router.workers.worker import WorkerState
from support.call_sites import CallSite, UnexpectedError, call_sites, each_site, fault_at
from support.fake_worker import MODEL, FakeWorker, Running, decode, fails_with, hang, no_wait
from support.metrics import value
from support.router_stack import TIMINGS
from support.waiting import until

# Of tests in which a worker says nothing any more.
SHORT = dataclasses.replace(TIMINGS, dead_after_s=0.5)


class Link:
    """A fake decode worker, a client of it, and what the client said."""

    def __init__(
        self, role: WorkerRole = WorkerRole.DECODE, *, timings: LinkTimings = TIMINGS
    ) -> None:
        self.worker = FakeWorker(WorkerRole.DECODE, vocab_size=300, answer=range(5, 15))
        self.role = role
        self.timings = timings
        self.states: list[WorkerState] = []
        # Called at the first change to a state, before anything else happens.
        self.at: dict[WorkerState, Callable[[], None]] = {}
        self.outputs: dict[str, list] = {}
        self.num_counted = 0

    async def __aenter__(self) -> "Link":
        await self.worker.start()
        self.client = WorkerClient(
            self.worker.address,
            role=self.role,
            model=MODEL,
            router_id="r",
            on_change=self._on_change,
            runtime=Runtime(),
            count_tokens=self._count_tokens,
            timings=self.timings,
        )
        self.client.start()
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.client.close()
        await self.worker.close()

    def _count_tokens(self, num_tokens: int) -> None:
        self.num_counted += num_tokens

    def _on_change(self) -> None:
        self.states.append(self.client.state)
        self.at.pop(self.client.state, lambda: None)()

    async def ready(self) -> None:
        await until(lambda: self.client.is_ready)

    def add(
        self,
        request_id: str,
        *,
        attempt: int = 0,
        max_tokens: int = 3,
        prompt: tuple[int, ...] = (5,),
        take_token: TokenCallback = no_token,
    ) -> None:
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            task=Generate(SamplingParams(max_tokens=max_tokens)),
            attempt=attempt,
        )
        self.outputs[request_id] = []
        self.client.add_request(request, self.outputs[request_id].append, take_token=take_token)

    def tokens(self, request_id: str) -> list[int]:
        return [t for output in self.outputs[request_id] for t in output.new_token_ids]

    def error(self, request_id: str) -> EngineError:
        """Of a request that got nothing else."""
        (end,) = self.outputs[request_id]
        assert end.finish_reason is FinishReason.ERROR
        return end.error

    def ends(self, request_id: str) -> list:
        return [output for output in self.outputs[request_id] if output.finished]


@pytest.fixture
async def link():
    async with Link() as link:
        yield link


async def test_welcome_brings_the_engine_info(link) -> None:
    await link.ready()
    assert link.client.info == link.worker.info
    assert link.worker.hellos[0].router_id == "r"
    assert re.fullmatch("[0-9a-f]{32}", link.worker.hellos[0].router_epoch)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
async def test_a_worker_of_another_protocol_version_is_refused_by_name(caplog, version) -> None:
    async with Link() as link:
        link.worker.protocol_version = version
        await until(lambda: len(link.worker.hellos) > 1)
        assert set(link.states) == {WorkerState.DOWN}
        hello = link.worker.hellos[0]
        assert hello.min_protocol_version <= PROTOCOL_VERSION == hello.max_protocol_version
        reason = f"it speaks version {version} of the Attach protocol (pdserve 0), this router 1 to"
        assert caplog.text.count(reason) == 1
        # It may be replaced by one that fits.
        link.worker.protocol_version = PROTOCOL_VERSION
        await link.ready()


async def test_outputs_reach_their_request_in_order(link) -> None:
    await link.ready()
    for name in ("a", "b", "c"):
        link.add(name)
    await until(lambda: all(link.ends(name) for name in "abc"))
    for name in "abc":
        assert [t for o in link.outputs[name] for t in o.new_token_ids] == [5, 6, 7]
    assert link.client.num_in_flight == 0
    assert link.client.stats is not None


async def test_nothing_is_sent_to_a_worker_that_is_not_ready(link) -> None:
    with pytest.raises(NoWorkerError, match="is connecting"):
        link.add("a")


async def test_heartbeats_flow_both_ways_and_keep_an_idle_link_alive() -> None:
    often = dataclasses.replace(TIMINGS, heartbeat_s=0.05, dead_after_s=0.8)
    async with Link(timings=often) as link:
        link.worker.heartbeat_s = often.heartbeat_s
        await link.ready()
        # Those take longer than such a silence may.
        await until(lambda: link.worker.num_heartbeats >= 20)
        assert link.client.is_ready
        assert link.states == [WorkerState.READY]


@pytest.mark.parametrize("how", ["stream cut", "worker stopped", "heartbeats stopped"])
async def test_loss_ends_every_request_exactly_once(how) -> None:
    async with Link(timings=SHORT) as link:
        await link.ready()
        link.worker.behave = hang
        for name in ("a", "b"):
            link.add(name)
        await until(lambda: link.worker.num_running == 2)
        if how == "stream cut":
            link.worker.adopts = False
            link.worker.cut()
        elif how == "worker stopped":
            await link.worker.stop()
        else:
            link.worker.heartbeat_s = None
        await until(lambda: link.ends("a") and link.ends("b"))
        await asyncio.sleep(0.2)
        for name in ("a", "b"):
            (end,) = link.outputs[name]
            assert end.finish_reason is FinishReason.ERROR
            assert end.error.code is ErrorCode.ENGINE_DEAD
            assert end.error.is_retryable
        assert link.client.num_in_flight == 0


async def test_it_attaches_again_after_a_loss(link) -> None:
    await link.ready()
    link.worker.cut()
    await until(lambda: WorkerState.REATTACHING in link.states)
    await link.ready()
    assert WorkerState.DOWN not in link.states
    link.add("a")
    await until(lambda: link.ends("a"))
    assert link.ends("a")[0].finish_reason is FinishReason.LENGTH
    assert len(link.worker.hellos) == 2


async def test_a_link_that_held_is_replaced_at_once() -> None:
    hour_s = 3600.0
    timings = dataclasses.replace(TIMINGS, min_backoff_s=hour_s, max_backoff_s=hour_s)
    async with Link(timings=timings) as link:
        await until(lambda: link.worker.num_heartbeats > 3)
        link.worker.cut()
        await until(lambda: len(link.worker.hellos) == 2)
        await link.ready()


async def test_it_attaches_to_a_worker_that_comes_back(link) -> None:
    await link.ready()
    await link.worker.stop()
    await until(lambda: link.client.state is WorkerState.DOWN)
    await link.worker.start()
    await link.ready()


async def test_a_worker_of_the_other_role_is_not_used() -> None:
    async with Link(WorkerRole.PREFILL) as link:
        await until(lambda: link.client.state is WorkerState.DOWN)
        await until(lambda: len(link.worker.hellos) > 1)
        assert not link.client.is_ready


async def test_an_abort_reaches_the_worker_and_silences_the_request(link) -> None:
    await link.ready()
    link.worker.behave = hang
    link.add("a")
    await until(lambda: link.worker.num_running == 1)
    link.client.abort("a")
    await until(lambda: link.worker.aborted == ["a"] and link.worker.num_running == 0)
    await asyncio.sleep(0.05)
    assert link.outputs["a"] == []


async def test_a_worker_that_refuses_because_it_drains_gets_nothing_more(link) -> None:
    refuse = fails_with(ErrorCode.DRAINING, "draining", is_retryable=True)
    await link.ready()
    link.worker.behave = refuse
    link.add("a")
    await until(lambda: link.client.state is WorkerState.DRAINING)
    assert link.ends("a")[0].error.code is ErrorCode.DRAINING
    with pytest.raises(NoWorkerError, match="is draining"):
        link.add("b")


async def test_closing_ends_what_runs(link) -> None:
    await link.ready()
    link.worker.behave = hang
    link.add("a")
    await link.client.close()
    assert link.ends("a")[0].error.message.endswith("the router is closing")


async def test_a_dead_engine_ends_its_requests_and_says_why(link) -> None:
    await link.ready()
    link.worker.behave = hang
    link.add("a")
    await until(lambda: link.worker.num_running == 1)
    error = EngineError(code=ErrorCode.ENGINE_DEAD, message="out of memory")
    link.worker.links[0].say(engine_dead=error)
    await until(lambda: link.ends("a"))
    assert link.ends("a")[0].error.message.endswith("its engine died: out of memory")
    assert WorkerState.DOWN in link.states


async def test_a_request_that_ended_without_an_output_gets_one(link) -> None:
    await link.ready()
    link.worker.behave = hang
    link.add("a")
    await until(lambda: link.worker.num_running == 1)
    link.worker.links[0].say(finished_requests=frozenset({"a", "unknown"}))
    await until(lambda: link.ends("a"))
    assert link.ends("a")[0].error.code is ErrorCode.CANCELLED
    assert link.client.is_ready


async def test_a_defect_in_taking_an_output_fails_that_request_alone(link) -> None:
    await link.ready()
    defects = []

    def explode(output) -> None:
        raise RuntimeError("a defect")

    request = EngineCoreRequest(
        request_id="bad", prompt_token_ids=(5,), task=Generate(SamplingParams(max_tokens=3))
    )
    link.client.add_request(request, explode, lambda: defects.append("bad"))
    link.add("good")
    await until(lambda: link.ends("good"))
    await until(lambda: defects)
    assert defects == ["bad"]
    assert link.client.is_ready
    link.add("later")
    await until(lambda: link.ends("later"))


async def test_a_defect_in_taking_a_message_costs_the_stream_and_not_the_worker(
    link, monkeypatch
) -> None:
    await link.ready()
    answer, link.worker.behave = link.worker.behave, hang
    link.add("a")
    await until(lambda: link.worker.num_running == 1)
    take = wire.engine_core_outputs_from_proto

    def fail(outputs) -> None:
        monkeypatch.setattr(wire, "engine_core_outputs_from_proto", take)
        raise RuntimeError("a defect of the router")

    monkeypatch.setattr(wire, "engine_core_outputs_from_proto", fail)
    link.worker.behave = answer
    link.add("b")
    await until(lambda: link.ends("a") and link.ends("b"))
    assert link.error("a").code is ErrorCode.ENGINE_DEAD
    await link.ready()
    link.add("c")
    await until(lambda: link.ends("c"))
    assert link.tokens("c") == [5, 6, 7]


async def test_a_worker_that_says_it_drains_gets_nothing_more(link) -> None:
    await link.ready()
    link.worker.is_draining = True
    await until(lambda: link.client.state is WorkerState.DRAINING)
    with pytest.raises(NoWorkerError, match="is draining"):
        link.add("a")


async def test_a_paused_worker_is_not_ready_and_keeps_what_it_gets(link) -> None:
    link.worker.behave = hang
    await link.ready()
    link.add("a")
    link.worker.is_paused = True
    await until(lambda: link.client.state is WorkerState.PAUSED)
    assert not link.client.is_ready
    # What goes on with an accepted request still reaches it.
    link.add("b")
    link.worker.is_paused = False
    await link.ready()
    await until(lambda: [each.request_id for each in link.worker.requests] == ["a", "b"])
    assert link.ends("a") == link.ends("b") == []
    link.worker.is_paused = link.worker.is_draining = True
    await until(lambda: link.client.state is WorkerState.DRAINING)


# Re-attachment


async def cut_while_running(link: Link, *names: str) -> asyncio.Event:
    """Let requests start and hang, then break the stream. Returns when the client asks for the next
    one; the worker answers once the event is set.
    """
    await link.ready()
    link.worker.behave = hang
    for name in names:
        link.add(name)
    await until(lambda: link.worker.num_running == len(names))
    may_answer = asyncio.Event()
    link.worker.before_welcome = may_answer.wait
    link.worker.cut()
    await until(lambda: len(link.worker.hellos) == 2)
    return may_answer


async def test_requests_go_on_over_the_next_stream_with_every_token_once(link) -> None:
    steps = asyncio.Semaphore(0)
    link.worker.before_token = lambda running, num_tokens: steps.acquire()
    await link.ready()
    link.add("a", max_tokens=10)
    for num_streams in range(1, 4):
        await until(lambda: len(link.worker.hellos) == num_streams)  # noqa: B023
        num_tokens = len(link.tokens("a"))
        steps.release()
        await until(lambda: len(link.tokens("a")) > num_tokens)  # noqa: B023
        # One token is lost with the stream, or made while there is none.
        steps.release()
        link.worker.cut()
    for _ in range(10):
        steps.release()
    await until(lambda: link.ends("a"))
    assert link.tokens("a") == list(range(5, 15))
    assert link.ends("a")[0].finish_reason is FinishReason.LENGTH
    await until(lambda: len(link.worker.hellos) == 4)
    assert len(link.worker.requests) == 1
    assert WorkerState.DOWN not in link.states


async def test_the_next_hello_says_what_is_wanted(link) -> None:
    await link.ready()
    link.worker.behave = hang
    link.add("a")
    link.add("b", attempt=2)
    link.add("gone")
    await until(lambda: link.worker.num_running == 3)
    link.worker.links[0].say()
    await until(lambda: link.client.stats is not None)
    link.at[WorkerState.REATTACHING] = lambda: link.client.abort("gone")
    link.worker.cut()
    await until(lambda: len(link.worker.hellos) == 2)
    await link.ready()
    resume = link.worker.hellos[1].resume
    assert resume.worker_epoch == link.worker.info.epoch
    assert resume.next_frame_seq == 2
    assert [(r.request_id, r.attempt) for r in resume.requests] == [("a", 0), ("b", 2)]
    assert link.worker.aborted == ["gone"]
    assert link.outputs["gone"] == []
    assert link.client.num_in_flight == 2


async def test_frames_that_have_come_are_dropped(link) -> None:
    """A worker that sends all frames again instead of those that were asked for."""
    steps = asyncio.Semaphore(2)
    link.worker.before_token = lambda running, num_tokens: steps.acquire()
    await link.ready()
    link.add("a", max_tokens=6)
    await until(lambda: len(link.tokens("a")) == 2)
    link.worker.repeats_frames = True
    link.worker.cut()
    await until(lambda: len(link.worker.hellos) == 2)
    for _ in range(4):
        steps.release()
    await until(lambda: link.ends("a"))
    assert link.tokens("a") == list(range(5, 11))


async def test_a_missing_frame_loses_what_runs(link) -> None:
    await link.ready()
    link.worker.behave = hang
    link.worker.links[0].say()
    await until(lambda: link.client.stats is not None)
    link.add("a")
    await until(lambda: link.worker.num_running == 1)
    link.worker.links[0].frames.append(link.worker.links[0].frames[0])
    link.worker.links[0].say()
    await until(lambda: link.ends("a"))
    assert "frame 3 came, 2 did not" in link.error("a").message


async def test_nothing_new_is_taken_while_the_stream_is_broken(link) -> None:
    may_answer = await cut_while_running(link, "a")
    assert not link.client.is_ready
    with pytest.raises(NoWorkerError, match="is reattaching"):
        link.add("b")
    may_answer.set()
    await link.ready()
    assert link.outputs["a"] == []


async def test_requests_that_the_worker_lacks_get_their_error_and_the_others_go_on(link) -> None:
    may_answer = await cut_while_running(link, "a", "b")
    link.worker.abort("a")
    may_answer.set()
    await until(lambda: link.ends("a"))
    await link.ready()
    assert "no longer has the request" in link.error("a").message
    assert link.error("a").code is ErrorCode.ENGINE_DEAD
    assert link.error("a").is_retryable
    assert link.client.num_in_flight == 1
    assert link.outputs["b"] == []


async def test_the_stream_after_a_lost_one_takes_frames_from_the_start(link) -> None:
    await link.ready()
    for name in ("a", "b"):
        link.add(name)
        await until(lambda: link.ends(name))  # noqa: B023
    link.worker.links[0].frames.clear()
    link.worker.adopts = False
    link.worker.cut()
    await until(lambda: len(link.worker.hellos) == 2)
    await link.ready()
    link.add("c")
    await until(lambda: link.ends("c"))
    assert link.tokens("c") == [5, 6, 7]


async def test_a_worker_that_is_gone_is_not_waited_for() -> None:
    async with Link(timings=dataclasses.replace(TIMINGS, dead_after_s=600.0)) as link:
        await link.ready()
        link.worker.behave = hang
        link.add("a")
        await until(lambda: link.worker.num_running == 1)
        await link.worker.stop()
        await until(lambda: link.ends("a"))
        assert link.client.state is WorkerState.DOWN


async def test_another_process_at_the_address_adopts_nothing(link) -> None:
    await link.ready()
    link.worker.behave = hang
    link.add("a")
    await until(lambda: link.worker.num_running == 1)
    link.worker.info = dataclasses.replace(link.worker.info, epoch="1" * 32)
    breaker = link.client.breaker
    link.worker.cut()
    await until(lambda: link.ends("a"))
    await link.ready()
    assert link.client.info.epoch == "1" * 32
    assert link.client.breaker is not breaker


async def test_what_another_process_has_not_that_the_one_before_had_is_known(link) -> None:
    def adapters(*digests: str) -> tuple[LoRAAdapter, ...]:
        return tuple(LoRAAdapter(name=each, digest=each * 64, rank=8) for each in digests)

    async def starts_again(epoch: str, *digests: str) -> None:
        link.worker.info = dataclasses.replace(
            link.worker.info, epoch=epoch * 32, adapters=adapters(*digests)
        )
        link.worker.cut()
        await until(lambda: link.client.epoch == epoch * 32)

    await link.ready()
    assert link.client.forgotten == frozenset()
    await starts_again("1", "a", "b")
    assert link.client.forgotten == frozenset()
    await starts_again("2", "b", "c")
    assert link.client.forgotten == {"a" * 64}
    # It has ended before it was given any again.
    await starts_again("3")
    assert link.client.forgotten == {"a" * 64, "b" * 64, "c" * 64}
    await starts_again("4", "c")
    assert link.client.forgotten == {"a" * 64, "b" * 64}
    # By an operator's hand.
    link.worker.adapters = LoRAAdapters(adapters=adapters("a", "c"), version=1)
    await until(lambda: link.client.forgotten == {"b" * 64})


async def test_the_wait_for_the_next_stream_ends() -> None:
    async with Link(timings=SHORT) as link:
        may_answer = await cut_while_running(link, "a")
        await until(lambda: link.ends("a"))
        assert "did not attach again in time" in link.error("a").message
        assert link.client.state is WorkerState.DOWN
        # What it adopts too late is aborted.
        may_answer.set()
        await link.ready()
        await until(lambda: link.worker.num_running == 0)
        assert link.worker.aborted == ["a"]


@pytest.mark.parametrize(
    ("silence_s", "left_s"),
    # The last: it was this process that hung, and the worker waits for it.
    [(0.0, TIMINGS.dead_after_s), (5.0, TIMINGS.dead_after_s - 5), (60.0, TIMINGS.heartbeat_s)],
)
async def test_a_worker_is_waited_for_from_its_last_word_on(link, silence_s, left_s) -> None:
    await link.ready()
    link.client._stream._last_heard -= silence_s
    assert link.client._hold_s() == pytest.approx(left_s, abs=3)


async def test_an_abort_after_the_hello_follows_it(link) -> None:
    may_answer = await cut_while_running(link, "a")
    link.client.abort("a")
    may_answer.set()
    await until(lambda: link.worker.aborted == ["a"])
    await link.ready()
    assert link.outputs["a"] == []


async def test_a_draining_worker_is_still_draining_after_its_stream_broke(link) -> None:
    await link.ready()
    link.worker.behave = hang
    link.add("a")
    link.worker.is_draining = True
    await until(lambda: link.client.state is WorkerState.DRAINING)
    link.states.clear()
    link.worker.cut()
    await until(lambda: WorkerState.DRAINING in link.states)
    assert link.states == [WorkerState.REATTACHING, WorkerState.DRAINING]
    assert link.client.num_in_flight == 1


async def test_heartbeats_acknowledge_frames(link) -> None:
    await link.ready()
    link.add("a")
    await until(lambda: link.ends("a"))
    num_frames = len(link.worker.links[0].frames)
    await until(lambda: link.worker.acked_frame_seq == num_frames + 1)


# Workers that do not read


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [
        ("MAX_UNSENT_BYTES", 500_000, r"too slow: \d+ behind, at most 500000"),
        ("WRITE_TIMEOUT_S", 0.3, r"it has read nothing for 0.3 s"),
    ],
)
async def test_a_worker_that_lives_and_does_not_read_is_given_up(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float, reason: str
) -> None:
    monkeypatch.setattr(attach_client, limit, value)
    link = Link()
    link.worker.reads.clear()
    async with link:
        await link.ready()
        names = [str(number) for number in range(40)]
        for name in names:
            link.add(name, prompt=(299,) * 50_000)
        await until(lambda: WorkerState.DOWN in link.states)
        for name in names:
            assert re.search(reason, link.error(name).message)
            assert link.error(name).code is ErrorCode.ENGINE_DEAD
        link.worker.reads.set()
        await link.ready()
        link.add("a")
        await until(lambda: link.ends("a"))


# Attempts


async def test_outputs_of_another_attempt_are_dropped(link) -> None:
    await link.ready()
    link.worker.behave = hang
    link.add("a")
    await until(lambda: link.worker.num_running == 1)
    old = link.outputs["a"]
    link.add("a", attempt=1)
    await until(lambda: len(link.worker.requests) == 2)
    for attempt in (0, 1):
        output = EngineCoreOutput(
            request_id="a",
            attempt=attempt,
            new_token_ids=(attempt,),
            finish_reason=FinishReason.LENGTH,
        )
        link.worker.links[0].emit(output)
    await until(lambda: link.ends("a"))
    assert old == []
    assert link.tokens("a") == [1]
    assert link.client.num_in_flight == 0


class Columns:
    """Requests whose worker sends tokens alone, and what takes them."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.taken: list[tuple[int, int]] = []
        self.takes = True

    def add(self, *, attempt: int = 0) -> None:
        self.link.add("a", attempt=attempt, take_token=self._take)

    def _take(self, token_id: int, index: int, now_ns: int) -> bool:
        if self.takes:
            self.taken.append((token_id, index))
        return self.takes

    def emit(self, *token_ids: int, at: int, attempt: int = 0) -> None:
        self.link.worker.links[0].emit(
            EngineCoreOutput(
                request_id="a", attempt=attempt, new_token_ids=token_ids, first_token_index=at
            )
        )


@pytest.fixture
async def columns(link) -> Columns:
    await link.ready()
    link.worker.behave = hang
    columns = Columns(link)
    columns.add()
    await until(lambda: link.worker.num_running == 1)
    return columns


async def test_tokens_that_come_alone_are_taken_and_counted(link, columns) -> None:
    columns.emit(7, 8, at=3)
    await until(lambda: columns.taken == [(7, 3), (8, 4)])
    assert link.num_counted == 2
    assert link.outputs["a"] == []


async def test_tokens_that_are_not_taken_come_as_outputs(link, columns) -> None:
    columns.takes = False
    columns.emit(7, 8, at=3)
    await until(lambda: len(link.outputs["a"]) == 2)
    assert [(o.new_token_ids, o.first_token_index) for o in link.outputs["a"]] == [
        ((7,), 3),
        ((8,), 4),
    ]
    assert link.num_counted == 0


async def test_tokens_of_another_attempt_are_dropped(link, columns) -> None:
    columns.add(attempt=1)
    await until(lambda: len(link.worker.requests) == 2)
    columns.emit(7, at=0)
    columns.emit(8, at=0, attempt=1)
    await until(lambda: columns.taken == [(8, 0)])
    link.client.abort("a")
    columns.emit(9, at=1, attempt=1)
    seen = len(link.worker.links[0].frames)
    await until(lambda: link.worker.acked_frame_seq > seen)
    assert columns.taken == [(8, 0)]


async def test_tokens_go_on_over_the_next_stream(link, columns) -> None:
    columns.emit(7, at=0)
    await until(lambda: columns.taken == [(7, 0)])
    link.worker.cut()
    columns.emit(8, at=1)
    await until(lambda: columns.taken == [(7, 0), (8, 1)])


async def test_a_token_that_cannot_be_taken_ends_its_request_alone(link, columns) -> None:
    defects = []

    def explode(token_id: int, index: int, now_ns: int) -> bool:
        raise ValueError("on purpose")

    task = Generate(SamplingParams(max_tokens=3))
    request = EngineCoreRequest(request_id="b", prompt_token_ids=(5,), task=task)
    link.client.add_request(
        request, lambda output: None, lambda: defects.append("b"), take_token=explode
    )
    await until(lambda: link.worker.num_running == 2)
    for name in "ba":
        output = EngineCoreOutput(request_id=name, new_token_ids=(4,))
        link.worker.links[0].emit(output)
    await until(lambda: columns.taken == [(4, 0)])
    assert defects == ["b"]


async def test_columns_of_unequal_length_end_the_link(link, columns) -> None:
    frame = service_pb2.AttachResponse(frame_seq=1)
    frame.outputs.tokens.handles.append(1)
    link.worker.links[0].frames.append(frame)
    link.worker.cut()
    await until(lambda: link.ends("a"))
    assert "columns" in link.error("a").message


async def test_idle_is_when_nothing_is_in_flight(link) -> None:
    await link.ready()
    await asyncio.wait_for(link.client.wait_until_idle(), 20)
    link.add("a")
    waiting = asyncio.create_task(link.client.wait_until_idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    await asyncio.wait_for(waiting, 20)
    assert link.ends("a")


def test_a_worker_that_requests_wait_for_is_tried_more_often() -> None:
    client = WorkerClient(
        "host:1",
        role=WorkerRole.DECODE,
        model=MODEL,
        router_id="r",
        on_change=lambda: None,
        runtime=Runtime(),
    )
    client._backoff_s = 2.0
    assert client._next_backoff_s == 2.0
    client.state = WorkerState.REATTACHING
    assert client._next_backoff_s == 0.5


# Defects


ENDS = (
    *call_sites(
        WorkerClient,
        "_end_hold",
        "_release_hold",
        "_lost",
        "_fail_all",
        "_end_as_lost",
        "_end_with",
    ),
    *call_sites(Listeners, "dispatch", "forget", "attempts", "attempt_of"),
    *call_sites(KVCacheFollower, "on_lost"),
)
HANDLERS = (
    *ENDS,
    *call_sites(
        WorkerClient,
        "_run",
        "_serve_stream",
        "_hello",
        "_send",
        "_abort_there",
        "_ask_for_kv_cache",
        "_on_response",
        "_is_new_frame",
        "_on_welcome",
        "_adopt",
        "_on_tokens",
        "_on_outputs",
        "_on_heartbeat",
        "_on_adapters",
        "_on_draining",
        "_set_state",
        "_broken",
        "_hold",
        "_hold_s",
    ),
    *call_sites(AttachStream, "send", "serve", "_stamped", "_read", "_tick"),
    # Those that follow are of streams that the router ends: nobody is left that they could concern.
    *call_sites(AttachStream, "_write")[:6],
    *call_sites(Listeners, "dispatch_tokens"),
    *call_sites(KVCacheFollower, "on_stream", "apply", "_on_gap"),
)


def is_long(running: Running) -> bool:
    return running.request.request_id.startswith("long")


class Life:
    """Requests of a worker, each put as soon as it is ready to take them, and their ends."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.link.worker.heartbeat_s = link.timings.heartbeat_s
        self.link.worker.behave = lambda running: (hang if is_long(running) else decode)(running)
        self.ends: dict[str, list[EngineError | None]] = {}
        # Whoever sent them knows of the defect.
        self.num_refused = 0

    async def put(self, *request_ids: str, takes_tokens: bool = False) -> None:
        for request_id in request_ids:
            await self.link.ready()
            self._put(request_id, takes_tokens)

    def _put(self, request_id: str, takes_tokens: bool) -> None:
        ends = self.ends[request_id] = []

        def on_output(output: EngineCoreOutput) -> None:
            if output.finished:
                ends.append(output.error)

        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=(5,),
            task=Generate(SamplingParams(max_tokens=5)),
        )
        try:
            self.link.client.add_request(
                request,
                on_output,
                lambda: ends.append(None),
                take_token=lambda *token: takes_tokens,
            )
        except UnexpectedError:
            ends.append(None)
            self.num_refused += 1

    async def ended(self, *request_ids: str) -> None:
        await until(lambda: all(self.ends[name] for name in request_ids), f"ends of {request_ids}")

    async def become(self, state: WorkerState) -> None:
        await until(lambda: self.link.client.state is state, state.value)

    async def see_everything(self) -> None:
        """All that a worker may say, and each end that a stream may have."""
        worker = self.link.worker
        await self.put("short", "long-silent", "long-forgotten", "long")
        await self.put("short-columns", takes_tokens=True)
        await self.ended("short", "short-columns")
        for seq in (1, 2, 4):  # one is missing
            worker.links[-1].tell_cached(
                KVCacheEvents(seq=seq, all_blocks_cleared=seq == 1, blocks_stored=(seq,))
            )
            await self._hear()
        worker.links[-1].say(finished_requests=frozenset({"long-silent"}))
        worker.adapters = LoRAAdapters(adapters=(), version=worker.info.adapters_version + 1)
        await self._hear()
        worker.is_paused = True
        await self.become(WorkerState.PAUSED)
        worker.is_paused = False
        await self.link.ready()
        may_answer = asyncio.Event()
        worker.before_welcome = may_answer.wait
        num_hellos = len(worker.hellos)
        worker.cut()
        await until(lambda: len(worker.hellos) > num_hellos)
        worker.abort("long-forgotten")
        may_answer.set()
        await self.link.ready()
        error = EngineError(code=ErrorCode.ENGINE_DEAD, message="on purpose")
        worker.links[-1].say(engine_dead=error)
        await self.ended("long")
        await self.put("long-draining")
        worker.is_draining = True
        await self.become(WorkerState.DRAINING)
        await worker.stop()
        await self.ended(*self.ends)
        worker.is_draining = False
        worker.info = dataclasses.replace(worker.info, epoch="1" * 32)
        await worker.start()

    async def _hear(self) -> None:
        """Whatever the worker has said before, the client has heard."""
        worker = self.link.worker
        num_heartbeats = worker.num_heartbeats
        await until(lambda: worker.num_heartbeats > num_heartbeats + 2)

    async def be_held_in_vain(self) -> None:
        """The stream breaks, and so does each that follows, until the wait is over."""

        async def fail() -> None:
            raise ConnectionError

        worker = self.link.worker
        await self.put("long-a", "long-b")
        worker.before_welcome = fail
        worker.cut()
        await self.ended("long-a", "long-b")
        worker.before_welcome = no_wait


async def check_defect(
    site: CallSite, live: Callable[[Life], Awaitable[None]], *, dead_after_s: float
) -> None:
    timings = LinkTimings(
        heartbeat_s=0.02, dead_after_s=dead_after_s, min_backoff_s=0.01, max_backoff_s=0.02
    )
    watch_event_loop(asyncio.get_running_loop())
    num_defects = value(DEFECTS)
    with fault_at(site) as fault:
        async with Link(timings=timings) as link:
            life = Life(link)
            await live(life)
            await life.put("last")
            await life.ended("last")
    assert {name: len(ends) for name, ends in life.ends.items()} == dict.fromkeys(life.ends, 1)
    assert life.ends["last"] == [None]
    assert link.client.num_in_flight == 0
    assert value(DEFECTS) == num_defects + fault.has_raised - life.num_refused


@each_site(HANDLERS, "_on_response", "_on_outputs", "_on_heartbeat", "_lost", "dispatch")
async def test_a_defect_at_any_call_ends_each_request_once_and_the_worker_is_used_again(
    site: CallSite,
) -> None:
    await check_defect(site, Life.see_everything, dead_after_s=20.0)


@each_site(ENDS, "_lost", "_end_hold")
async def test_a_defect_at_any_call_as_a_wait_ends_leaves_nobody_waiting(site: CallSite) -> None:
    await check_defect(site, Life.be_held_in_vain, dead_after_s=0.2)
