"""The inputs of one call for vectors, all of which the same weights pool."""

import asyncio

import httpx
import pytest

from pdserve_router.api.pooling.batch import MAX_AT_ONCE
from support.crew import A, B, P
from support.fake_worker import EMBEDDER, all_behave, pool
from support.waiting import until


class Call:
    """A call over HTTP whose first inputs wait on workers of the old weights until `go` is set,
    while new weights take over.
    """

    def __init__(self, crew, stack, http: httpx.AsyncClient) -> None:
        self.crew = crew
        self.stack = stack
        self.http = http
        self.go = asyncio.Event()

    async def hold(self, running) -> None:
        await self.go.wait()
        await pool(running)

    async def begin(self, num_inputs: int) -> "asyncio.Task[httpx.Response]":
        await until(lambda: self.ready == 2)
        all_behave(self.crew.of(A), self.hold)
        inputs = [[5 + number % 100, 5 + number // 100] for number in range(num_inputs)]
        pending = asyncio.ensure_future(self.http.post("/v1/embeddings", json={"input": inputs}))
        await until(lambda: self.crew.num_requests(A) == min(num_inputs, MAX_AT_ONCE))
        for _ in range(3):
            await self.crew.join(P, B, **EMBEDDER)
        await until(lambda: self.ready == 3)
        return pending

    @property
    def ready(self) -> float:
        return self.stack.metric("pdserve_workers", role="prefill", state="ready")


@pytest.fixture
async def call(crew, start_stack):
    for _ in range(2):
        await crew.join(P, A, **EMBEDDER)
    async with start_stack(wait=False, http=True, redrive_wait_s=0.5, **crew.sources) as stack:
        yield Call(crew, stack, stack.api)


def most_used_first(workers):
    return sorted(workers, key=lambda worker: len(worker.requests), reverse=True)


async def test_inputs_that_wait_for_their_turn_stay_with_the_calls_weights(call) -> None:
    pending = await call.begin(3 * MAX_AT_ONCE)
    call.go.set()
    response = await pending
    assert response.status_code == 200, response.text
    assert call.crew.num_requests(A) == 3 * MAX_AT_ONCE
    assert call.crew.num_requests(B) == 0
    # The next call begins with the new ones.
    await call.http.post("/v1/embeddings", json={"input": [[5], [6]]})
    assert call.crew.num_requests(B) == 2


@pytest.mark.parametrize("num_inputs", [2, MAX_AT_ONCE + 3])
async def test_an_input_is_sent_again_to_the_calls_weights(call, num_inputs) -> None:
    pending = await call.begin(num_inputs)
    await most_used_first(call.crew.of(A))[0].stop()
    call.go.set()
    response = await pending
    assert response.status_code == 200, response.text
    assert call.crew.num_requests(B) == 0


async def test_an_input_that_is_alone_is_sent_again_to_whoever_serves(call) -> None:
    pending = await call.begin(1)
    await most_used_first(call.crew.of(A))[0].stop()
    response = await pending
    assert response.status_code == 200, response.text
    assert call.crew.num_requests(B) == 1


@pytest.mark.parametrize("num_inputs", [2, MAX_AT_ONCE + 3])
async def test_a_call_fails_when_its_weights_are_gone(call, num_inputs) -> None:
    pending = await call.begin(num_inputs)
    for worker in call.crew.of(A):
        await worker.stop()
    response = await pending
    assert response.status_code == 503, response.text
    assert call.crew.num_requests(B) == 0


# ---- what waits for a worker


@pytest.fixture
async def draining(crew, start_stack, request):
    """A call that has three inputs left when its only worker takes no more."""
    wait_s = getattr(request, "param", 60.0)
    await crew.join(P, A, **EMBEDDER)
    async with start_stack(wait=False, http=True, redrive_wait_s=wait_s, **crew.sources) as stack:
        call = Call(crew, stack, stack.api)
        (worker,) = crew.workers
        await until(lambda: call.ready == 1)
        worker.behave = call.hold
        inputs = [[5 + number] for number in range(MAX_AT_ONCE + 3)]
        pending = asyncio.ensure_future(stack.api.post("/v1/embeddings", json={"input": inputs}))
        await until(lambda: len(worker.requests) == MAX_AT_ONCE)
        worker.is_draining = True
        await until(lambda: not stack.server.router.is_ready)
        call.go.set()
        await until(lambda: not stack.server.router.num_in_flight)
        yield call, pending


async def test_an_input_waits_for_a_worker_when_its_turn_comes(draining) -> None:
    call, pending = draining
    worker = await call.crew.join(P, A, **EMBEDDER)
    response = await pending
    assert response.status_code == 200, response.text
    assert len(worker.requests) == 3


@pytest.mark.parametrize("draining", [0.5], indirect=True)
async def test_an_input_does_not_wait_for_ever(draining) -> None:
    _, pending = draining
    response = await pending
    assert response.status_code == 503, response.text
    assert "no prefill worker" in response.json()["error"]["message"]


async def test_nothing_waits_for_a_client_that_left(draining) -> None:
    call, pending = draining
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    await call.stack.assert_idle()
    worker = await call.crew.join(P, A, **EMBEDDER)
    await until(lambda: call.stack.server.router.is_ready)
    assert not worker.requests


async def test_an_input_waits_while_too_much_is_queued(start_stack) -> None:
    async with start_stack(
        prefill=1, decode=0, info=EMBEDDER, http=True, max_prefill_queue_tokens=1000
    ) as stack:
        all_there, is_short = asyncio.Event(), asyncio.Event()

        async def answer(running) -> None:
            if running.request.prompt_token_ids == (5,):
                # What it says next is that its queue is short again.
                await is_short.wait()
                running.worker.links[-1].num_waiting_tokens = 0
            else:
                await all_there.wait()
                running.worker.links[-1].num_waiting_tokens = 1001
            await pool(running)

        stack.prefill.behave = answer
        inputs = [[5 + number] for number in range(MAX_AT_ONCE + 3)]
        pending = asyncio.ensure_future(stack.api.post("/v1/embeddings", json={"input": inputs}))
        await until(lambda: len(stack.prefill.requests) == MAX_AT_ONCE)
        all_there.set()
        await until(lambda: stack.server.router.num_in_flight == 1)
        assert not pending.done()
        is_short.set()
        stack.prefill.behave = pool
        response = await pending
        assert response.status_code == 200, response.text
