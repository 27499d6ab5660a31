import asyncio
import random

import pytest

from pdserve_common.errors import OverloadedError
from pdserve_common.rpc.channels import MAX_MESSAGE_BYTES
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineError,
    ErrorCode,
    FinishReason,
    SchedulerStats,
)
from pdserve_common.wire.output import engine_core_outputs_to_proto
from pdserve_worker import outbox as module
from pdserve_worker.outbox import Outbox


def outputs(*items: EngineCoreOutput, **fields: object) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=items, **fields)  # type: ignore[arg-type]


def tokens(request_id: str, first: int, *token_ids: int, **fields: object) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=token_ids,
        first_token_index=first,
        **fields,  # type: ignore[arg-type]
    )


def no_abort(request_id: str) -> None:
    raise AssertionError(f"{request_id} is cut off")


async def test_what_waits_is_returned_at_once_also_without_any_time_to_wait() -> None:
    """The last look before a stream ends must not lose what came during the last write."""
    box = Outbox(no_abort)
    box.put(outputs(tokens("a", 0, 5)))
    (frame,) = await box.get(0.0)
    assert frame.outputs == (tokens("a", 0, 5),)
    assert await box.get(0.0) == []


async def test_a_slow_routers_outputs_are_merged_by_request() -> None:
    box = Outbox(no_abort)
    box.put(outputs(tokens("a", 0, 5), tokens("b", 3, 9)))
    box.put(outputs(tokens("a", 1, 6, 7, finish_reason=FinishReason.LENGTH)))
    (frame,) = await box.get(1.0)
    merged = {output.request_id: output for output in frame.outputs}
    assert merged["a"] == tokens("a", 0, 5, 6, 7, finish_reason=FinishReason.LENGTH)
    assert merged["b"] == tokens("b", 3, 9)


async def test_large_steps_leave_in_frames_that_lose_nothing() -> None:
    box = Outbox(no_abort)
    sent = [tokens(str(i), 0, *range(1000)) for i in range(500)]
    box.put(outputs(*sent))
    frames = await box.get(1.0)
    assert len(frames) > 1
    assert [output for frame in frames for output in frame.outputs] == sent


def vector(request_id: str, size: int) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request_id, finish_reason=FinishReason.STOP, pooling_output=(0.5,) * size
    )


async def test_vectors_leave_in_frames_that_fit_into_messages() -> None:
    box = Outbox(no_abort)
    sent = [vector(str(i), 4096) for i in range(1000)]
    box.put(outputs(*sent))
    frames = await box.get(1.0)
    assert [output for frame in frames for output in frame.outputs] == sent
    most = max(engine_core_outputs_to_proto(frame).ByteSize() for frame in frames)
    assert most <= module.MAX_FRAME_BYTES


async def test_a_vector_that_fits_no_frame_leaves_alone() -> None:
    """One of as many labels as an output may have bytes fits into a message all the same."""
    size = (module.MAX_OUTPUT_BYTES - module.OUTPUT_BYTES) // module.POOLED_BYTES
    box = Outbox(no_abort)
    box.put(outputs(vector("small", 8), vector("large", size), vector("last", 8)))
    frames = await box.get(1.0)
    assert [[output.request_id for output in frame.outputs] for frame in frames] == [
        ["small"],
        ["large"],
        ["last"],
    ]
    assert engine_core_outputs_to_proto(frames[1]).ByteSize() <= MAX_MESSAGE_BYTES


async def test_the_largest_vector_is_cut_off_if_too_much_piles_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", 10_000)
    box = Outbox(no_abort)
    box.put(outputs(vector("small", 100), vector("large", 2400), tokens("other", 0, 5)))
    (frame,) = await box.get(0.0)
    found = {output.request_id: output for output in frame.outputs}
    assert (found["small"], found["other"]) == (vector("small", 100), tokens("other", 0, 5))
    assert found["large"].pooling_output is None
    assert found["large"].error is not None
    assert found["large"].error.code is ErrorCode.OVERLOADED


async def test_the_death_of_the_engine_is_not_overwritten_by_a_later_message() -> None:
    box = Outbox(no_abort)
    error = EngineError(code=ErrorCode.ENGINE_DEAD, message="gone")
    box.put(outputs(engine_dead=error))
    box.put(outputs(tokens("a", 0, 5)))
    (frame,) = await box.get(1.0)
    assert frame.engine_dead == error


async def test_what_a_step_says_of_the_engine_outlives_messages_that_say_nothing_of_it() -> None:
    """A refusal, or a request that failed beside the steps, is put behind the last step's."""
    box = Outbox(no_abort)
    stats = SchedulerStats(num_running_reqs=0)
    box.put(outputs(tokens("a", 0, 5), scheduler_stats=stats, finished_requests=frozenset("b")))
    box.put(outputs(tokens("c", 0, finish_reason=FinishReason.ERROR)))
    (frame,) = await box.get(1.0)
    assert frame.scheduler_stats == stats
    assert frame.finished_requests == {"b"}
    # Told once.
    box.put(outputs(tokens("d", 0, 5)))
    (frame,) = await box.get(1.0)
    assert (frame.scheduler_stats, frame.finished_requests) == (None, frozenset())


async def test_a_wave_outlives_messages_that_name_none_or_an_earlier_one() -> None:
    box = Outbox(no_abort)
    box.put(outputs(start_wave=4, wave_complete=3))
    box.put(outputs(tokens("a", 0, 5), start_wave=3))
    (frame,) = await box.get(0.0)
    assert (frame.start_wave, frame.wave_complete) == (4, 3)


async def test_experts_of_tokens_that_pile_up_are_those_of_all_tokens() -> None:
    box = Outbox(no_abort)
    box.put(outputs(tokens("a", 0, 5, routed_experts=(1, 2))))
    box.put(outputs(tokens("a", 1, 6, 7, routed_experts=(0, 3, 1, 3))))
    (frame,) = await box.get(0.0)
    assert frame.outputs == (tokens("a", 0, 5, 6, 7, routed_experts=(1, 2, 0, 3, 1, 3)),)


async def test_ends_that_follow_from_a_step_come_behind_all_its_outputs() -> None:
    """Whoever reads that the engine has died reads no further."""
    box = Outbox(no_abort)
    error = EngineError(code=ErrorCode.ENGINE_DEAD, message="gone")
    sent = [tokens(str(i), 0, *range(1000)) for i in range(500)]
    box.put(outputs(*sent, engine_dead=error, finished_requests=frozenset("b")))
    *frames, last = await box.get(1.0)
    assert frames
    assert [(each.engine_dead, each.finished_requests) for each in frames] == [
        (None, frozenset()) for _ in frames
    ]
    assert (last.engine_dead, last.finished_requests) == (error, {"b"})


async def test_ends_alone_that_pile_up_are_too_much_for_any_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", 1000)
    box = Outbox(no_abort)
    for index in range(20):
        box.put(outputs(tokens(str(index), 0, finish_reason=FinishReason.ABORT)))
    with pytest.raises(OverloadedError, match="bytes behind, at most 1000"):
        await box.get(1.0)


async def test_only_the_largest_is_cut_off_if_too_much_piles_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", 2000)
    aborted: list[str] = []
    box = Outbox(aborted.append)
    box.put(outputs(tokens("small", 0, 5), tokens("large", 0, *range(150))))
    box.put(outputs(tokens("larger", 0, *range(200)), tokens("done", 0, 1)))
    box.put(outputs(tokens("large", 150, *range(10)), tokens("larger", 200, 7)))
    assert aborted == ["larger"]
    box.put(outputs(tokens("larger", 201, finish_reason=FinishReason.ABORT), tokens("small", 1, 6)))
    (frame,) = await box.get(0.0)
    found = {output.request_id: output for output in frame.outputs}
    assert found["small"] == tokens("small", 0, 5, 6)
    assert found["large"] == tokens("large", 0, *range(150), *range(10))
    assert found["larger"].finish_reason is FinishReason.ERROR
    assert found["larger"].error is not None
    assert found["larger"].error.code is ErrorCode.OVERLOADED
    assert "bytes behind" in found["larger"].error.message
    box.put(outputs(tokens("larger", 0, 9)))
    (frame,) = await box.get(0.0)
    assert frame.outputs == (tokens("larger", 0, 9),), "the id may be used again"


async def test_what_waits_of_one_request_fits_into_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_OUTPUT_BYTES", 1000)
    aborted: list[str] = []
    box = Outbox(aborted.append)
    box.put(outputs(tokens("a", 0, *range(100)), tokens("b", 0, *range(100))))
    assert not aborted
    box.put(outputs(tokens("a", 100, *range(100))))
    assert aborted == ["a"]


@pytest.mark.parametrize("seed", range(30))
async def test_each_request_comes_whole_or_is_cut_off_once_whatever_piles_up(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", 3000)
    chance = random.Random(seed)
    running = {str(index): 0 for index in range(10)}
    ending: list[str] = []
    cut: set[str] = set()
    got: dict[str, int] = dict.fromkeys(running, 0)
    ended: dict[str, FinishReason] = {}

    def abort(request_id: str) -> None:
        assert request_id not in cut
        cut.add(request_id)
        ending.append(request_id)

    box = Outbox(abort)
    for _ in range(300):
        for name in chance.sample(sorted(running), min(3, len(running))):
            count = chance.choice((1, 1, 1, 200))
            is_last = chance.random() < 0.02 or name in ending
            reason = FinishReason.LENGTH if is_last else None
            box.put(outputs(tokens(name, running[name], *range(count), finish_reason=reason)))
            running[name] += count
            if is_last:
                running.pop(name)
            assert not box.is_overfull
        if chance.random() < 0.2:
            for frame in await box.get(0.0):
                for output in frame.outputs:
                    name = output.request_id
                    assert name not in ended
                    if output.error is None:
                        assert output.first_token_index == got[name]
                        got[name] += len(output.new_token_ids)
                    if output.finish_reason is not None:
                        ended[name] = output.finish_reason
                        assert (name in cut) <= (output.error is not None)
    assert cut


async def test_waking_an_empty_box_returns_nothing() -> None:
    box = Outbox(no_abort)
    waiting = asyncio.create_task(box.get(120.0))
    await asyncio.sleep(0)
    box.wake()
    assert await asyncio.wait_for(waiting, 60.0) == []
