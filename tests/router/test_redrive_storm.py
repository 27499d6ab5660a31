"""A decode worker dies with 200 streams on it: all go on, and others hardly notice."""

import asyncio
import statistics
import time

from fake_worker import Running, decode, prefill

from conftest import ANSWER_TEXT, until
from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2

NUM_STREAMS = 200
TOKENS = pb2.TokenPrompt(token_ids=range(10, 30))
# Four requests sent again, of 21 tokens each.
STEP_TOKENS = 100


async def text_and_ttft(stack) -> tuple[str, float]:
    request = pb2.GenerateRequest(tokens=TOKENS, sampling_params=core.SamplingParams(seed=7))
    began = time.monotonic()
    ttft = 0.0
    text = ""
    async for response in stack.stub.Generate(request, timeout=30):
        ttft = ttft or time.monotonic() - began
        text += "".join(completion.text for completion in response.output.outputs)
    return text, ttft


async def stop_after_a_token(running: Running) -> None:
    tokens, _ = running.answer()
    running.emit(*tokens[:2], at=0)
    await asyncio.Event().wait()


class OneByOne:
    """Prefill that computes one prompt at a time, and how many sent again waited for it at most."""

    def __init__(self, computed: set[str]) -> None:
        self.most = 0
        self._num = 0
        self._lock = asyncio.Lock()
        self._computed = computed

    async def __call__(self, running: Running) -> None:
        is_again = running.request.attempt > 0
        self._num += is_again
        self.most = max(self.most, self._num)
        try:
            async with self._lock:
                await asyncio.sleep(0.002)
                await prefill(running)
            self._computed.add(running.request.request_id)
        finally:
            self._num -= is_again


async def test_a_storm_is_bounded_fair_and_cheap(start_stack) -> None:
    async with start_stack(
        prefill=2, decode=2, info={"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 1024}
    ) as stack:
        dying, other = stack.decodes
        dying.behave = stop_after_a_token
        other.is_paused = True
        await until(lambda: len([w for w in stack.server.pool.decode if w.is_ready]) == 1)
        streams = [asyncio.create_task(text_and_ttft(stack)) for _ in range(NUM_STREAMS)]
        await until(lambda: dying.num_running == NUM_STREAMS, timeout_s=20)
        await asyncio.sleep(0.2)
        other.is_paused = False
        await until(lambda: stack.server.pool.decode[1].is_ready)
        computed: set[str] = set()

        async def pull(running: Running) -> None:
            await until(lambda: running.request.request_id in computed)
            await decode(running)

        other.behave = pull
        queues = [OneByOne(computed) for _ in stack.prefills]
        for worker, queue in zip(stack.prefills, queues, strict=True):
            worker.behave = queue
        cpu = time.process_time()
        await dying.stop()
        ttfts = []
        while not all(stream.done() for stream in streams):
            ttfts.append((await text_and_ttft(stack))[1])
        # 1.2 s for the router, its workers and its clients.
        assert time.process_time() - cpu < 6
        # Behind the few let onto P: 0.05 s, and 0.4 s behind all of them.
        assert statistics.median(ttfts) < 0.25
        assert max(queue.most for queue in queues) == STEP_TOKENS // 21
        assert {text for text, _ in await asyncio.gather(*streams)} == {ANSWER_TEXT}
        await stack.assert_idle()
