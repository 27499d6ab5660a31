"""A decode worker dies with 200 streams on it: all go on, and others hardly notice."""

import asyncio
import time

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from support.fake_worker import Running, decode, prefill
from support.router_stack import ANSWER_TEXT, Stack
from support.waiting import until

NUM_STREAMS = 200
TOKENS = pb2.TokenPrompt(token_ids=range(10, 30))
# Four requests sent again, of 22 tokens each.
STEP_TOKENS = 100
ROOM = 4


async def ask(stack: Stack) -> str:
    request = pb2.GenerateRequest(tokens=TOKENS, sampling_params=core.SamplingParams(seed=7))
    responses = [response async for response in stack.stub.Generate(request, timeout=120)]
    return "".join(part.text for response in responses for part in response.output.outputs)


async def stop_after_two_tokens(running: Running) -> None:
    tokens, _ = running.answer()
    running.emit(*tokens[:2], at=0)
    await asyncio.Event().wait()


class OneByOne:
    """Prefill that computes its prompts in order, one for each turn that the test gives it."""

    def __init__(self, computed: set[str]) -> None:
        self.turns = asyncio.Semaphore(0)
        # What waits: sent again, of that the most at a time, and new.
        self.num_again = self.most_again = self.num_new = 0
        self._computed = computed

    async def __call__(self, running: Running) -> None:
        is_again = running.request.attempt > 0
        self._count(is_again, 1)
        await self.turns.acquire()
        self._count(is_again, -1)
        await prefill(running)
        self._computed.add(running.request.request_id)

    def _count(self, is_again: bool, change: int) -> None:
        if is_again:
            self.num_again += change
            self.most_again = max(self.most_again, self.num_again)
        else:
            self.num_new += change


async def test_a_storm_is_bounded_fair_and_cheap(start_stack) -> None:
    async with start_stack(
        prefill=2, decode=2, info={"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 1024}
    ) as stack:
        dying, other = stack.decodes
        dying.behave = stop_after_two_tokens
        other.is_paused = True
        await until(lambda: not stack.server.pool.decode[1].is_ready)
        streams = [asyncio.create_task(ask(stack)) for _ in range(NUM_STREAMS)]
        name = "pdserve_generation_tokens_total"
        await until(lambda: stack.metric(name, model="tiny") == 2 * NUM_STREAMS, timeout_s=60)
        other.is_paused = False
        await until(lambda: stack.server.pool.decode[1].is_ready)
        computed: set[str] = set()

        async def pull(running: Running) -> None:
            await until(lambda: running.request.request_id in computed, timeout_s=120)
            await decode(running)

        other.behave = pull
        queues = [OneByOne(computed) for _ in stack.prefills]
        for worker, queue in zip(stack.prefills, queues, strict=True):
            worker.behave = queue
        cpu = time.process_time()
        await dying.stop()
        for _ in range(5):
            await until(lambda: [queue.num_again for queue in queues] == [ROOM, ROOM])
            answering = asyncio.create_task(ask(stack))
            await until(lambda: any(queue.num_new for queue in queues))
            (queue,) = [queue for queue in queues if queue.num_new]
            # A new request has no more before it than those few.
            for _ in range(ROOM + 1):
                queue.turns.release()
            assert await asyncio.wait_for(answering, 60) == ANSWER_TEXT
        assert stack.metric("pdserve_redrives_waiting") > NUM_STREAMS // 2
        for queue in queues:
            for _ in range(NUM_STREAMS):
                queue.turns.release()
        assert set(await asyncio.gather(*streams)) == {ANSWER_TEXT}
        assert max(queue.most_again for queue in queues) == ROOM
        # 1.2 s for the router, its workers and its clients.
        assert time.process_time() - cpu < 12
