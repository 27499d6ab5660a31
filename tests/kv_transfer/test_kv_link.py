"""Two processes, a real KvLink over gRPC and NIXL under it; the test is D."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from pdserve_common.engine_types import (
    EngineCoreRequest,
    ErrorCode,
    KVTransferParams,
    SamplingParams,
)
from pdserve_common.metrics import KVTransferMetrics
from pdserve_decode.service import KvLinkPool
from pdserve_engine.core.request import Request
from pdserve_engine.kv_transfer.consumer import ConsumerConnector
from pdserve_engine.kv_transfer.factory import make_transport

pytestmark = pytest.mark.slow


class PProcess:
    """p_process.py, started."""

    def __init__(self, *, compatibility_hash: str = "same", transport: str = "any") -> None:
        script = Path(__file__).parent / "p_process.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), compatibility_hash, transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def state(self) -> Any:
        self.say("state")
        return json.loads(self._line())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.close()  # type: ignore[union-attr]
            self.process.wait(timeout=10)
        self.process.stdout.close()  # type: ignore[union-attr]


class D:
    """A decode worker without an engine."""

    def __init__(self, kit: SimpleNamespace) -> None:
        self.pool = kit.make_pool(2)
        identity = kit.make_identity("d0")
        self.connector = ConsumerConnector(
            make_transport("nixl", identity),
            identity=identity,
            metrics=KVTransferMetrics(CollectorRegistry()),
            wakeup=lambda: None,
            step_seq=lambda: 0,
            transfer_timeout_s=1.0,
        )
        self.connector.register_kv_cache(self.pool)
        self.links = KvLinkPool(self.connector)

    def ticket(self, port: int, request_id: str, num_tokens: int) -> Request:
        params = KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id="p0",
            remote_host="127.0.0.1",
            remote_port=port,
        )
        core = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=tuple(range(num_tokens)),
            sampling_params=SamplingParams(max_tokens=8),
            kv_transfer_params=params,
        )
        request = Request(core, max_model_len=4096, seed=0)
        self.connector.on_new_request(request)
        return request

    async def news(self, is_wanted: Callable[[Any], Any], timeout_s: float = 10.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not is_wanted(news := self.connector.take_output()):
            assert time.monotonic() < deadline, "timed out"
            await asyncio.sleep(0.001)
        return news

    def load(self, request: Request, block_ids: list[int]) -> None:
        num_external, _ = self.connector.get_num_new_matched_tokens(request, 0)
        assert num_external is not None
        self.connector.update_state_after_alloc(request, (block_ids,), num_external)
        self.connector.start_load_kv(self.connector.build_connector_meta())

    async def pull(self, p: PProcess, request_id: str, block_ids: list[int]) -> Any:
        """Hand `request_id` over from P and return what it cost."""
        num_tokens = 16 * len(block_ids)
        request = self.ticket(p.port, request_id, num_tokens)
        p.say(f"prefill {request_id} {num_tokens}")
        await self.news(lambda news: news.ready_to_load)
        self.load(request, block_ids)
        news = await self.news(lambda news: news.finished_recving or news.failed_recving)
        assert not news.failed_recving
        assert not self.connector.request_finished(request, (block_ids,))
        return news.finished_recving[request_id]


@pytest.fixture
async def d(kit: SimpleNamespace) -> AsyncIterator[D]:
    d = D(kit)
    yield d
    await d.links.close()
    await asyncio.get_running_loop().run_in_executor(None, d.connector.shutdown)


@pytest.fixture
def start_p() -> Any:
    started: list[PProcess] = []

    def start(**options: str) -> PProcess:
        started.append(PProcess(**options))
        return started[-1]

    yield start
    for p in started:
        p.close()


async def test_blocks_cross_between_processes(d: D, start_p: Any, kit: SimpleNamespace) -> None:
    p = start_p()
    expected = kit.make_pool(1).tensor
    everything = list(range(63, -1, -1))
    stats = await d.pull(p, "r0", everything)
    assert stats.transport == "shm"
    assert torch.equal(d.pool.tensor[everything], expected)
    state = p.state()
    assert (state["num_free"], state["sessions"]) == (64, 0)
    for i in range(20):
        stats = await d.pull(p, f"again-{i}", [i, 40 - i])
    print(f"small pull: {stats}")


@pytest.mark.parametrize("transport", ["any", "tcp"])
async def test_waiting_costs_little_cpu(d: D, start_p: Any, transport: str) -> None:
    p = start_p(transport=transport)
    await d.pull(p, "r0", [0])
    request = d.ticket(p.port, "r1", 64)
    p.say("prefill r1 64")
    await d.news(lambda news: news.ready_to_load)
    ours, theirs = time.process_time(), p.state()["cpu_s"]
    await asyncio.sleep(1.0)
    shares = time.process_time() - ours, p.state()["cpu_s"] - theirs
    print(f"{transport}: open session, quiet: D {shares[0]:.1%}, P {shares[1]:.1%} of a core")
    assert not d.connector.request_finished(request, ([],))


async def test_a_killed_p_fails_its_requests_within_seconds(d: D, start_p: Any) -> None:
    p = start_p()
    await d.pull(p, "r0", [0, 1])
    announced = d.ticket(p.port, "r1", 32)
    p.say("prefill r1 32")
    await d.news(lambda news: news.ready_to_load)
    waiting = d.ticket(p.port, "r2", 32)
    start = time.monotonic()
    p.process.kill()
    p.process.wait()
    failed: dict[str, Any] = {}
    while len(failed) < 2:
        news = await d.news(lambda news: news.failed_recving, timeout_s=6.0)
        failed |= news.failed_recving
    assert time.monotonic() - start < 6.0
    assert {error.code for error in failed.values()} == {ErrorCode.KV_TRANSFER_FAILED}
    for request in (announced, waiting):
        assert not d.connector.request_finished(request, ([],))
    assert d.connector.num_open_sessions() == 0

    late = d.ticket(p.port, "r3", 32)  # nobody listens there any more
    news = await d.news(lambda news: news.failed_recving, timeout_s=6.0)
    assert "no link to p0" in news.failed_recving["r3"].message
    assert not d.connector.request_finished(late, ([],))

    restarted = start_p()
    assert (await d.pull(restarted, "r4", [5])).num_blocks == 1


async def test_a_read_of_memory_whose_owner_was_killed_fails(d: D, start_p: Any) -> None:
    """The READ is posted before the link's end is noticed."""
    p = start_p()
    await d.pull(p, "r0", [0, 1])
    request = d.ticket(p.port, "r1", 32)
    p.say("prefill r1 32")
    await d.news(lambda news: news.ready_to_load)
    p.process.kill()
    p.process.wait()
    d.load(request, [2, 3])  # not awaited: the loop has had no chance to tell
    news = await d.news(lambda news: news.failed_recving)
    assert news.failed_recving["r1"].code is ErrorCode.KV_TRANSFER_FAILED
    if d.connector.request_finished(request, ([2, 3],)):
        news = await d.news(lambda news: news.landed_block_ids)
        assert news.landed_block_ids == [2, 3]
    assert d.connector.num_open_sessions() == 0


async def test_a_stopped_p_is_given_up_and_its_blocks_land_later(d: D, start_p: Any) -> None:
    p = start_p(transport="tcp")
    await d.pull(p, "r0", [0, 1])
    request = d.ticket(p.port, "r1", 32)
    p.say("prefill r1 32")
    await d.news(lambda news: news.ready_to_load)
    p.process.send_signal(signal.SIGSTOP)
    d.load(request, [2, 3])
    start = time.monotonic()
    news = await d.news(lambda news: news.failed_recving)
    assert 0.9 < time.monotonic() - start < 6.0
    assert "stalled" in news.failed_recving["r1"].message
    assert d.connector.request_finished(request, ([2, 3],)), "the READ may still land"
    await asyncio.sleep(0.2)
    assert d.connector.take_output().landed_block_ids == []
    p.process.send_signal(signal.SIGCONT)
    news = await d.news(lambda news: news.landed_block_ids)
    assert news.landed_block_ids == [2, 3]


async def test_a_p_that_differs_is_refused_with_what_differs(d: D, start_p: Any) -> None:
    p = start_p(compatibility_hash="other")
    d.ticket(p.port, "r0", 32)
    news = await d.news(lambda news: news.failed_recving)
    message = news.failed_recving["r0"].message
    assert "FAILED_PRECONDITION: compatibility_hash differs: other on P, same on D" in message
