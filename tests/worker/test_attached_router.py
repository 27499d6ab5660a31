"""What a worker keeps of a router across streams: frames, requests, for how long."""

import asyncio
import random
import time

import pytest

from pdserve_common.errors import DrainingError, RequestFailedError
from pdserve_common.types.engine import (
    EngineCoreOutput,
    FinishReason,
    WorkerRole,
)
from pdserve_worker import attached_router as module
from pdserve_worker import outbox as outbox_module
from pdserve_worker.attached_router import (
    AttachedRouter,
    AttachedRouters,
    Frame,
    RequestAttempt,
    Resume,
)
from pdserve_worker.outbox import Outbox
from support.call_sites import CallSite, call_sites, each_site, fault_at
from support.engine_double import EngineDouble
from support.fake_worker import engine_info
from support.requests import make_request

EPOCH = "e" * 32


class ScriptedEngine(EngineDouble):
    def __init__(self) -> None:
        super().__init__(engine_info(WorkerRole.DECODE, vocab_size=100, epoch=EPOCH))

    def bring(
        self, request_id: str, first: int = 0, *token_ids: int, is_last: bool = False, **fields: int
    ) -> None:
        output = EngineCoreOutput(
            request_id=request_id,
            first_token_index=first,
            new_token_ids=token_ids,
            finish_reason=FinishReason.LENGTH if is_last else None,
            **fields,  # type: ignore[arg-type]
        )
        self.emit(output)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def routers(engine: ScriptedEngine) -> AttachedRouters:
    return AttachedRouters(engine)  # type: ignore[arg-type]


ROUTER = ("r", "0" * 32)


def resume(next_frame_seq: int, *requests: tuple[str, int], worker_epoch: str = EPOCH) -> Resume:
    listed = frozenset(RequestAttempt(*request) for request in requests)
    return Resume(worker_epoch, next_frame_seq, listed)


def add(attachment: AttachedRouter, request_id: str, attempt: int = 0) -> None:
    attachment.add_request(make_request(request_id, (1,), attempt=attempt))


async def frames(attachment: AttachedRouter, stream: int) -> list[Frame]:
    return attachment.next_frames(stream, await attachment.outbox.get(0.0), 1)


def attach(routers: AttachedRouters) -> tuple[AttachedRouter, int]:
    attachment, adopted = routers.attach(ROUTER, None)
    assert not adopted
    return attachment, attachment.open_stream()


async def test_frames_are_numbered_and_sent_again_from_where_the_router_is(
    engine: ScriptedEngine, routers: AttachedRouters
) -> None:
    attachment, stream = attach(routers)
    sent = []
    for index in range(4):
        engine.bring("a", index, 10 + index)
        sent += await frames(attachment, stream)
    assert [frame.seq for frame in sent] == [1, 2, 3, 4]
    attachment.acknowledge(2)
    routers.keep(attachment)
    engine.bring("a", 4, 14)
    again, _ = routers.attach(ROUTER, resume(3))
    assert again is attachment
    resumed = await frames(attachment, attachment.open_stream())
    assert resumed[:2] == sent[2:]
    assert [frame.seq for frame in resumed] == [3, 4, 5]
    assert resumed[2].outputs.outputs[0].new_token_ids == (14,)


async def test_a_router_adopts_what_it_lists_and_what_it_does_not_list_is_aborted(
    engine: ScriptedEngine, routers: AttachedRouters
) -> None:
    attachment, stream = attach(routers)
    for request_id in ("runs", "unlisted", "ended-sent", "ended-waiting", "ended-known"):
        add(attachment, request_id)
    add(attachment, "newer", 1)
    engine.bring("ended-known", is_last=True)
    (known,) = await frames(attachment, stream)
    engine.bring("ended-sent", is_last=True)
    await frames(attachment, stream)
    routers.keep(attachment)
    engine.bring("ended-waiting", is_last=True)
    adopted = {("runs", 0), ("ended-sent", 0), ("ended-waiting", 0)}
    lost = {("ended-known", 0), ("newer", 0), ("never-came", 0)}
    _, found = routers.attach(ROUTER, resume(known.seq + 1, *adopted, *lost))
    assert set(found) == adopted
    assert sorted(engine.aborted) == ["newer", "unlisted"]


@pytest.mark.parametrize(
    "wanted",
    [None, resume(3, ("a", 0), worker_epoch="another"), resume(1, ("a", 0)), resume(5, ("a", 0))],
    ids=["nothing to resume", "of another process", "acknowledged before", "never sent"],
)
async def test_a_router_that_cannot_resume_starts_anew(
    engine: ScriptedEngine, routers: AttachedRouters, wanted: Resume | None
) -> None:
    attachment, stream = attach(routers)
    add(attachment, "a")
    for index in range(3):
        engine.bring("a", index, index)
        await frames(attachment, stream)
    attachment.acknowledge(2)
    routers.keep(attachment)
    new, adopted = routers.attach(ROUTER, wanted)
    assert new is not attachment
    assert adopted == []
    assert list(engine.clients) == [new.client_index], "the old one's requests are aborted"


async def test_what_is_kept_for_a_router_is_bounded(
    engine: ScriptedEngine, routers: AttachedRouters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 2000)
    attachment, stream = attach(routers)
    sent = []
    for index in range(100):
        engine.bring("a", index, index)
        sent += await frames(attachment, stream)
    kept = [frame for frame in sent if attachment.can_resume(resume(frame.seq))]
    assert kept == sent[-len(kept) :]
    assert 0 < sum(frame.num_bytes for frame in kept) <= 2000


async def test_large_answers_for_a_slow_router_do_not_end_the_others(
    engine: ScriptedEngine, routers: AttachedRouters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "MAX_PENDING_BYTES", 10_000)
    attachment, _ = attach(routers)
    large = [f"large-{number}" for number in range(10)]
    for request_id in ("small", "running", *large):
        add(attachment, request_id)
    engine.bring("small", 0, 5)
    engine.bring("running", 0, *range(600))
    for request_id in large:
        engine.bring(request_id, 0, *range(500), is_last=True)
    routers.keep(attachment)
    engine.bring("small", 1, 6)
    again, adopted = routers.attach(ROUTER, resume(1, ("small", 0), ("running", 0)))
    assert again is attachment
    assert set(adopted) == {("small", 0), ("running", 0)}
    outputs = {
        output.request_id: output
        for frame in await frames(attachment, attachment.open_stream())
        for output in frame.outputs.outputs
    }
    assert outputs["small"].new_token_ids == (5, 6)
    assert outputs["running"].error is not None
    assert engine.aborted == ["running"], "the others have ended by themselves"
    reasons = [outputs[request_id].finish_reason for request_id in large]
    assert reasons.count(FinishReason.LENGTH) >= 2
    assert set(reasons) == {FinishReason.LENGTH, FinishReason.ERROR}


async def test_a_router_that_stays_away_loses_its_requests(
    engine: ScriptedEngine, routers: AttachedRouters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REATTACH_S", 0.05)
    attachment, _ = attach(routers)
    routers.keep(attachment)
    again, _ = routers.attach(ROUTER, resume(1))
    assert again is attachment
    await asyncio.sleep(0.1)
    assert engine.clients, "it has come back"
    routers.keep(attachment)
    deadline = time.monotonic() + 60
    while engine.clients:
        assert time.monotonic() < deadline, "it waits for ever"
        await asyncio.sleep(0.01)
    new, _ = routers.attach(ROUTER, resume(1))
    assert new is not attachment


async def test_what_an_older_stream_takes_is_sent_on_the_newer_one(
    engine: ScriptedEngine, routers: AttachedRouters
) -> None:
    attachment, old = attach(routers)
    engine.bring("a", 0, 5)
    taken = await attachment.outbox.get(0.0)
    routers.attach(ROUTER, resume(1))
    new = attachment.open_stream()
    assert not attachment.is_current(old)
    assert attachment.next_frames(old, taken, 1) == []
    (frame,) = await frames(attachment, new)
    assert frame.outputs.outputs[0].new_token_ids == (5,)


async def test_a_higher_attempt_takes_the_place_of_a_lower_one(
    engine: ScriptedEngine, routers: AttachedRouters
) -> None:
    attachment, stream = attach(routers)
    add(attachment, "a")
    engine.bring("a", 0, 5)
    assert attachment.is_running("a", 0)
    assert not attachment.is_running("a", 1)
    add(attachment, "a", 1)
    engine.bring("a", 0, 6, attempt=1)
    engine.bring("a", 1, is_last=True, attempt=0)
    assert attachment.is_running("a", 1)
    (frame,) = await frames(attachment, stream)
    (output,) = frame.outputs.outputs
    assert (output.attempt, output.new_token_ids, output.finish_reason) == (1, (6,), None)


async def test_a_refused_attempt_ends_the_one_that_the_router_has_given_up(
    engine: ScriptedEngine, routers: AttachedRouters
) -> None:
    attachment, _ = attach(routers)
    add(attachment, "a")
    engine.is_draining = True
    for request_id in ("a", "b"):
        with pytest.raises(DrainingError):
            add(attachment, request_id, 1)
    assert engine.aborted == ["a"]


@pytest.mark.parametrize("seed", range(20))
async def test_a_router_gets_every_token_once_wherever_its_streams_break(
    engine: ScriptedEngine, routers: AttachedRouters, seed: int
) -> None:
    chance = random.Random(seed)
    attachment, stream = attach(routers)
    add(attachment, "a")
    next_frame_seq, num_emitted, got = 1, 0, []
    for _ in range(200):
        for _ in range(chance.randrange(3)):
            engine.bring("a", num_emitted, num_emitted)
            num_emitted += 1
        sent = await frames(attachment, stream)
        arrived = sent[: chance.randrange(len(sent) + 1)] if chance.random() < 0.3 else sent
        for frame in arrived:
            assert frame.seq == next_frame_seq
            next_frame_seq += 1
            for output in frame.outputs.outputs:
                assert output.first_token_index == len(got)
                got += output.new_token_ids
        if chance.random() < 0.5:
            attachment.acknowledge(next_frame_seq)
        if len(arrived) < len(sent) or chance.random() < 0.1:
            if chance.random() < 0.5:  # else the worker has not noticed
                routers.keep(attachment)
            _, adopted = routers.attach(ROUTER, resume(next_frame_seq, ("a", 0)))
            assert adopted == [("a", 0)]
            stream = attachment.open_stream()
    assert got == list(range(len(got)))
    assert len(got) > 100


OUTPUTS = (
    *call_sites(AttachedRouter, "_take"),
    *call_sites(Outbox, "put", "_put", "_replace"),
)


@each_site(OUTPUTS)
async def test_a_defect_at_one_routers_outputs_is_no_loss_of_anothers(
    site: CallSite, engine: ScriptedEngine
) -> None:
    routers = AttachedRouters(engine)  # type: ignore[arg-type]
    both = [routers.attach((name, "0" * 32), None)[0] for name in "ab"]
    for name, attachment in zip("ab", both, strict=True):
        attachment.open_stream()
        add(attachment, name)
    with fault_at(site) as fault:
        for name in "ab":
            engine.bring(name, 0, 5)
            engine.bring(name, 1, 6, is_last=True)
    told = 0
    for name, attachment in zip("ab", both, strict=True):
        try:
            (outputs,) = await attachment.outbox.get(0.0)
        except RequestFailedError:  # the stream ends, and its router sends the request again
            assert not attachment.can_resume(resume(1))
            continue
        brought = {output.request_id: output.new_token_ids for output in outputs.outputs}
        assert brought[name] == (5, 6)
        told += 1
    assert told >= 2 - fault.has_raised
