import asyncio
import gc
import random
import weakref

from pdserve_common.runtime import Runtime


def test_nanoseconds_are_of_the_same_clock() -> None:
    assert Runtime(now=lambda: 1.5).now_ns() == 1_500_000_000


def test_two_of_the_same_seed_draw_the_same() -> None:
    drawn = [Runtime(rng=random.Random(7)).rng.random() for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert Runtime().rng.random() != Runtime().rng.random()


async def test_a_task_is_kept_until_its_end() -> None:
    runtime = Runtime()
    waited_for: list[weakref.ref[asyncio.Future[None]]] = []

    async def wait() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waited_for.append(weakref.ref(future))
        await future

    task = weakref.ref(runtime.spawn(wait()))
    await asyncio.sleep(0)
    gc.collect()
    future = waited_for[0]()
    assert future is not None, "the task is lost, as nobody else has it"
    future.set_result(None)
    del future
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    assert task() is None


async def test_a_future_that_is_waited_for_in_vain_goes_on() -> None:
    runtime = Runtime()
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    assert not await runtime.wait(future, 0.0)
    assert not future.done()
    runtime.call_later(0.0, future.set_result, 3)
    assert await runtime.wait(future, None)
    assert future.result() == 3


async def test_a_timer_that_is_cancelled_does_not_call() -> None:
    called: list[str] = []
    runtime = Runtime()
    runtime.call_later(0.0, called.append, "cancelled").cancel()
    runtime.call_later(0.0, called.append, "due")
    await runtime.sleep(0.01)
    assert called == ["due"]
