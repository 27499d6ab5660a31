"""A real worker and a router's client of it: the index is what the pool has cached."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pdserve.v1 import control_service_pb2 as control_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import EngineCoreOutput, EngineCoreRequest, Generate, WorkerRole
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.clients.inproc import InprocEngineClient
from pdserve_engine.config import EngineConfig
from pdserve_router.text.served_model import ServedModel
from pdserve_router.workers.clients.attach_client import LinkTimings
from pdserve_router.workers.clients.worker_client import WorkerClient
from pdserve_router.workers.routing.prefix_index import PrefixIndex, prefix_hashes
from pdserve_router.workers.worker import WorkerState
from support.cut_proxy import CutProxy
from support.metrics import value
from support.prefix_lengths import num_cached
from support.scripted_engine import cached_in
from support.steps import loaded_part
from support.waiting import until
from support.worker import TIMEOUT_S, Worker, add, read_until, serve

TIMINGS = LinkTimings(heartbeat_s=0.1, min_backoff_s=0.01, max_backoff_s=0.05)

NUM_SHARDS = 4


@contextlib.asynccontextmanager
async def started(make_model: Callable[..., Path]) -> AsyncIterator[Worker]:
    """One start of a worker whose pool is small."""
    config = EngineConfig(
        model=str(make_model()),
        served_model_name="tiny",
        num_threads=1,
        kv_connector="none",
        kv_cache_memory_mib=1,
        max_model_len=256,
        max_num_seqs=2,
    )
    engine = await InprocEngineClient.load(
        config, role="decode", engine_id="d", metrics=KVTransferMetrics(CollectorRegistry())
    )
    async with serve(engine) as worker:
        yield worker
    await engine.close()


class Router:
    """A router's client of the worker that a proxy leads to, and its index."""

    def __init__(self, proxy: CutProxy) -> None:
        self.index = PrefixIndex[WorkerClient](runtime=Runtime(), num_shards=NUM_SHARDS)
        self.states: list[WorkerState] = []
        self.client = WorkerClient(
            proxy.address,
            role=WorkerRole.DECODE,
            model=ServedModel("tiny", ""),
            router_id="r",
            on_change=lambda: self.states.append(self.client.state),
            runtime=Runtime(),
            prefix_index=self.index,
            timings=TIMINGS,
        )

    async def serve(self, request: EngineCoreRequest) -> list[int]:
        ended = asyncio.Event()
        token_ids: list[int] = []

        def on_output(output: EngineCoreOutput) -> None:
            token_ids.extend(output.new_token_ids)
            if output.finished:
                ended.set()

        self.client.add_request(request, on_output)
        await asyncio.wait_for(ended.wait(), TIMEOUT_S)
        return token_ids

    async def equals(self, worker: Worker) -> None:
        """Wait until the index is what the worker's pool, which is idle, has cached."""
        pool = loaded_part(worker.engine).core.scheduler.kv.block_pool

        def is_equal() -> bool:
            cached = cached_in(pool)
            # Sweep out what was forgotten, a shard a call.
            for _ in range(2 * NUM_SHARDS):
                self.index.stored(self.client, ())
            return len(self.index) == len(cached) and all(
                num_cached(self.index, [block]) == {self.client: 1} for block in cached
            )

        await until(is_equal)


def request(number: int, **fields: object) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    return EngineCoreRequest(
        request_id=f"r{number}",
        prompt_token_ids=tuple((number * 7 + i) % 90 + 3 for i in range(64)),
        task=Generate(params),
        **fields,  # type: ignore[arg-type]
    )


async def test_the_index_is_what_the_pool_has_cached(make_model: Callable[..., Path]) -> None:
    proxy = CutProxy(0)
    await proxy.start()
    router = Router(proxy)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(proxy.stop)
        stack.push_async_callback(router.client.close)
        async with started(make_model) as worker:
            proxy.redirect(worker.port)
            router.client.start()
            await until(lambda: router.client.is_ready)
            # A chat: the answer is cached, too, under the salt alone.
            asked = request(0, cache_salt="s")
            answer = await router.serve(asked)
            size = worker.engine.info.block_size
            chain = prefix_hashes(
                request(0, cache_salt="s", resume_output_token_ids=tuple(answer)), size
            )
            await router.equals(worker)
            # The last token was sampled, not computed.
            num_blocks = (64 + len(answer) - 1) // size
            assert num_cached(router.index, chain) == {router.client: num_blocks}
            assert num_cached(router.index, prefix_hashes(request(0), size)) == {}
            # More than fit: the pool evicts.
            for number in range(1, 2 + worker.engine.info.num_blocks // num_blocks):
                await router.serve(request(number))
            await router.equals(worker)
            assert num_cached(router.index, chain).get(router.client, 0) < num_blocks
            # The stream breaks, and another one takes its place.
            proxy.reset()
            await until(lambda: WorkerState.REATTACHING in router.states)
            await until(lambda: router.client.is_ready)
            await router.serve(request(0))
            await router.equals(worker)
            await worker.control.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest())
            await until(lambda: num_cached(router.index, prefix_hashes(request(0), size)) == {})
            await router.serve(request(1))
            await router.equals(worker)
            assert len(router.index)
        # Another start of the process has nothing.
        await until(lambda: router.client.state is WorkerState.DOWN)
        assert num_cached(router.index, prefix_hashes(request(1), size)) == {}
        async with started(make_model) as worker:
            proxy.redirect(worker.port)
            await until(lambda: router.client.is_ready)
            await router.serve(request(2))
            await router.equals(worker)
            assert value(router.index.metrics.resyncs) == 0


async def test_a_router_that_does_not_want_events_gets_none_and_one_that_asks_gets_all_again(
    worker: Worker,
) -> None:
    async with worker.attach("a") as old, worker.attach("b", wants_kv_cache_events=True) as new:
        await new.write(add("r", 64))
        blocks: set[int] = set()
        seqs = []
        while len(blocks) < 4:
            events = await next_events(new)
            blocks.update(events.blocks_stored)
            seqs.append(events.seq)
        assert seqs == list(range(1, len(seqs) + 1))
        resync = service_pb2.ResyncKVCacheEvents()
        await new.write(service_pb2.AttachRequest(resync_kv_cache_events=resync))
        while not (events := await next_events(new)).all_blocks_cleared:
            pass
        assert blocks <= set(events.blocks_stored)
        messages = await read_until(old, lambda message: message.WhichOneof("message"))
        assert not any(message.HasField("kv_cache_events") for message in messages)


async def next_events(call: Any) -> Any:
    messages = await read_until(call, lambda message: message.HasField("kv_cache_events"))
    return messages[-1].kv_cache_events
