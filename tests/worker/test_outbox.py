import asyncio

import pytest

from pdserve_common.engine_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineError,
    ErrorCode,
    FinishReason,
)
from pdserve_common.errors import OverloadedError
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


async def test_what_waits_is_returned_at_once_also_without_any_time_to_wait() -> None:
    """The last look before a stream ends must not lose what came during the last write."""
    box = Outbox()
    box.put(outputs(tokens("a", 0, 5)))
    (frame,) = await box.get(0.0)
    assert frame.outputs == (tokens("a", 0, 5),)
    assert await box.get(0.0) == []


async def test_a_slow_routers_outputs_are_merged_by_request() -> None:
    box = Outbox()
    box.put(outputs(tokens("a", 0, 5), tokens("b", 3, 9)))
    box.put(outputs(tokens("a", 1, 6, 7, finish_reason=FinishReason.LENGTH)))
    (frame,) = await box.get(1.0)
    merged = {output.request_id: output for output in frame.outputs}
    assert merged["a"] == tokens("a", 0, 5, 6, 7, finish_reason=FinishReason.LENGTH)
    assert merged["b"] == tokens("b", 3, 9)


async def test_large_steps_leave_in_frames_that_lose_nothing() -> None:
    box = Outbox()
    sent = [tokens(str(i), 0, *range(1000)) for i in range(500)]
    box.put(outputs(*sent))
    frames = await box.get(1.0)
    assert len(frames) > 1
    assert [output for frame in frames for output in frame.outputs] == sent


async def test_the_death_of_the_engine_is_not_overwritten_by_a_later_message() -> None:
    box = Outbox()
    error = EngineError(code=ErrorCode.ENGINE_DEAD, message="gone")
    box.put(outputs(engine_dead=error))
    box.put(outputs(tokens("a", 0, 5)))
    (frame,) = await box.get(1.0)
    assert frame.engine_dead == error


async def test_a_router_that_lets_too_much_pile_up_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", 1000)
    box = Outbox()
    for index in range(20):
        box.put(outputs(tokens(str(index), 0, *range(20))))
    with pytest.raises(OverloadedError, match="bytes behind, at most 1000"):
        await box.get(1.0)


async def test_waking_an_empty_box_returns_nothing() -> None:
    box = Outbox()
    waiting = asyncio.create_task(box.get(120.0))
    await asyncio.sleep(0)
    box.wake()
    assert await asyncio.wait_for(waiting, 60.0) == []
