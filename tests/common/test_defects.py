"""What nobody expected: counted, told, and no end of what goes on."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.observability import defects
from pdserve_common.observability.defects import DEFECTS, LOOPS
from pdserve_common.rpc.liveness import keep_calling
from support.metrics import value
from support.waiting import until


class Panic(BaseException):
    """As libraries in Rust raise them."""


async def fail(error: BaseException) -> None:
    raise error


@pytest.fixture
def num_before() -> float:
    return value(DEFECTS, "workers")


def test_all_places_are_there_from_the_start() -> None:
    registry = CollectorRegistry()
    defects.export(registry)
    found = [registry.get_sample_value("pdserve_defects_total", {"loop": loop}) for loop in LOOPS]
    assert None not in found


@pytest.mark.parametrize("error", [RuntimeError("a defect"), Panic()])
def test_what_is_contained_is_counted(error: BaseException, num_before: float) -> None:
    with defects.contained("workers", "nothing"):
        raise error
    assert value(DEFECTS, "workers") == num_before + 1


async def test_a_cancellation_is_no_defect(num_before: float) -> None:
    with pytest.raises(asyncio.CancelledError), defects.contained("workers", "nothing"):
        raise asyncio.CancelledError
    task = defects.spawn("workers", asyncio.sleep(60), costs="nothing")
    task.cancel()
    await asyncio.wait([task])
    assert value(DEFECTS, "workers") == num_before


@pytest.mark.parametrize("error", [RuntimeError("a defect"), Panic()])
async def test_a_task_that_nobody_waits_for_is_heard_of(
    error: BaseException, num_before: float
) -> None:
    told: list[BaseException] = []
    defects.spawn("workers", fail(error), costs="nothing", on_defect=told.append)
    await until(lambda: told == [error])
    assert value(DEFECTS, "workers") == num_before + 1


async def test_what_is_called_again_and_again_is_called_after_a_defect(num_before: float) -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        raise RuntimeError("a defect")

    task = keep_calling("workers", 0.001, call, costs="nothing")
    await until(lambda: len(calls) >= 3)
    task.cancel()
    assert value(DEFECTS, "workers") >= num_before + 2


async def test_what_is_kept_running_begins_anew_until_it_is_cancelled(num_before: float) -> None:
    told: list[BaseException] = []
    is_running = asyncio.Event()

    async def run() -> None:
        if len(told) < 2:
            raise RuntimeError("a defect")
        is_running.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("a defect in the place of the cancellation")

    task = defects.keep_running("workers", run, costs="a run", pause_s=0.0, on_defect=told.append)
    await asyncio.wait_for(is_running.wait(), 60)
    task.cancel()
    await asyncio.wait([task], timeout=60)
    assert task.done()
    assert len(told) == 3
    assert value(DEFECTS, "workers") == num_before + 3


async def test_an_event_loop_counts_its_callbacks_and_no_broken_connections() -> None:
    loop = asyncio.get_running_loop()
    defects.watch_event_loop(loop)
    num_before = value(DEFECTS, "event_loop")
    loop.call_exception_handler({"message": "a peer", "exception": ConnectionResetError()})
    loop.call_soon([].pop)
    await until(lambda: value(DEFECTS, "event_loop") == num_before + 1)
