import asyncio

import pytest
from fake_worker import FakeWorker

from conftest import TIMINGS, until
from pdserve_common.engine_types import (
    EngineCoreRequest,
    EngineError,
    ErrorCode,
    FinishReason,
    SamplingParams,
    WorkerRole,
)
from pdserve_common.errors import NoWorkerError
from pdserve_router.worker_client import WorkerClient, WorkerState


class Link:
    """A fake decode worker, a client of it, and what the client said."""

    def __init__(self, role: WorkerRole = WorkerRole.DECODE) -> None:
        self.worker = FakeWorker(WorkerRole.DECODE, vocab_size=300, answer=range(5, 15))
        self.role = role
        self.states: list[WorkerState] = []
        self.outputs: dict[str, list] = {}

    async def __aenter__(self) -> "Link":
        await self.worker.start()
        self.client = WorkerClient(
            self.worker.address,
            role=self.role,
            router_id="r",
            router_epoch="e",
            on_change=lambda: self.states.append(self.client.state),
            timings=TIMINGS,
        )
        self.client.start()
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.client.close()
        await self.worker.stop()

    async def ready(self) -> None:
        await until(lambda: self.client.is_ready)

    def add(self, request_id: str) -> None:
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=(5,),
            sampling_params=SamplingParams(max_tokens=3),
        )
        self.outputs[request_id] = []
        self.client.add_request(request, self.outputs[request_id].append)

    def ends(self, request_id: str) -> list:
        return [output for output in self.outputs[request_id] if output.finished]


async def hang(running) -> None:
    await asyncio.Event().wait()


@pytest.fixture
async def link():
    async with Link() as link:
        yield link


async def test_welcome_brings_the_engine_info(link) -> None:
    await link.ready()
    assert link.client.info == link.worker.info
    assert link.worker.hellos[0].router_id == "r"
    assert link.worker.hellos[0].router_epoch == "e"


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


async def test_heartbeats_flow_both_ways_and_keep_an_idle_link_alive(link) -> None:
    await link.ready()
    await asyncio.sleep(1.5 * TIMINGS.dead_after_s)
    assert link.client.is_ready
    assert link.worker.num_heartbeats >= 3
    assert link.states == [WorkerState.READY]


@pytest.mark.parametrize("how", ["stream cut", "worker stopped", "heartbeats stopped"])
async def test_loss_ends_every_request_exactly_once(link, how) -> None:
    await link.ready()
    link.worker.behave = hang
    for name in ("a", "b"):
        link.add(name)
    await until(lambda: link.worker.num_running == 2)
    if how == "stream cut":
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


async def test_silence_is_noticed_in_time_and_says_so(link) -> None:
    await link.ready()
    link.worker.behave = hang
    link.add("a")
    link.worker.heartbeat_s = None
    began = asyncio.get_running_loop().time()
    await until(lambda: link.ends("a"))
    assert asyncio.get_running_loop().time() - began < 2.5 * TIMINGS.dead_after_s
    assert "nothing heard for" in link.ends("a")[0].error.message


async def test_it_attaches_again_after_a_loss(link) -> None:
    await link.ready()
    link.worker.cut()
    await until(lambda: WorkerState.DOWN in link.states)
    await link.ready()
    link.add("a")
    await until(lambda: link.ends("a"))
    assert link.ends("a")[0].finish_reason is FinishReason.LENGTH
    assert len(link.worker.hellos) == 2


async def test_it_attaches_to_a_worker_that_comes_back(link) -> None:
    await link.ready()
    await link.worker.stop()
    await until(lambda: link.client.state is WorkerState.DOWN)
    await link.worker.start()
    await link.ready()


async def test_it_waits_for_a_worker_that_starts_later(link) -> None:
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
    async def refuse(running) -> None:
        error = EngineError(code=ErrorCode.DRAINING, message="draining", is_retryable=True)
        running.emit(at=0, finish=FinishReason.ERROR, error=error)

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
        request_id="bad", prompt_token_ids=(5,), sampling_params=SamplingParams(max_tokens=3)
    )
    link.client.add_request(request, explode, lambda: defects.append("bad"))
    link.add("good")
    await until(lambda: link.ends("good"))
    await until(lambda: defects)
    assert defects == ["bad"]
    assert link.client.is_ready
    link.add("later")
    await until(lambda: link.ends("later"))


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
    assert [request.request_id for request in link.worker.requests] == ["a", "b"]
    assert link.ends("a") == link.ends("b") == []
    link.worker.is_paused = link.worker.is_draining = True
    await until(lambda: link.client.state is WorkerState.DRAINING)
