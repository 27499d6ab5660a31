"""Several routers on the same ports (`--workers`)."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from pdserve_common.types.engine import WorkerRole
from pdserve_router.config import RouterConfig
from pdserve_router.server import RouterServer
from support.fake_worker import FakeWorker
from support.waiting import until

BODY = {"model": "tiny", "prompt": "a", "max_tokens": 4, "temperature": 0}


def test_each_process_has_a_name_and_a_metrics_port_of_its_own(model_dir: Path) -> None:
    config = RouterConfig(
        model=str(model_dir), decode=("a:1",), workers=3, router_id="r", metrics_port=9090
    )
    each = [config.of_process(index) for index in range(3)]
    assert [one.router_id for one in each] == ["r-0", "r-1", "r-2"]
    assert [one.metrics_port for one in each] == [9090, 9091, 9092]
    assert {one.http_port for one in each} == {config.http_port}


@pytest.mark.parametrize(
    "bad", [{"workers": 0}, {"workers": 2, "http_port": 0}, {"workers": 9, "metrics_port": 65530}]
)
def test_what_processes_cannot_share_is_refused(model_dir: Path, bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"workers|http_port|metrics_port"):
        RouterConfig(model=str(model_dir), decode=("a:1",), **bad)


def ports_in_a_row(stack: ExitStack) -> list[int]:
    """Reserve four free ports until `stack` is closed: two to share, two that follow each other."""
    while True:
        reserved = [stack.enter_context(socket.socket()) for _ in range(4)]
        try:
            for one in reserved[:3]:
                one.bind(("127.0.0.1", 0))
            reserved[3].bind(("127.0.0.1", reserved[2].getsockname()[1] + 1))
        except OSError:
            continue
        return [one.getsockname()[1] for one in reserved]


async def test_processes_share_ports_are_started_again_and_drain(model_dir: Path) -> None:
    with ExitStack() as stack:
        http_port, grpc_port, metrics_port, second_metrics_port = ports_in_a_row(stack)
    worker = FakeWorker(WorkerRole.DECODE, vocab_size=320, answer=range(40, 60))
    await worker.start()
    flags = {
        "model": model_dir, "served-model-name": "tiny", "decode": worker.address, "workers": 2,
        "host": "127.0.0.1", "http-port": http_port, "grpc-port": grpc_port, "router-id": "r",
        "metrics-port": metrics_port, "log-level": "warning",
    }  # fmt: skip
    command = [f"--{name}={value}" for name, value in flags.items()]
    router = await asyncio.create_subprocess_exec(sys.executable, "-m", "pdserve_router", *command)
    try:
        await until(lambda: worker_names(worker) == ["r-0", "r-1"])
        for port in (metrics_port, second_metrics_port):
            await until_ready(port)
        for _ in range(8):
            assert await ask(http_port) == 200
        os.kill(children_of(router.pid)[0], signal.SIGKILL)
        # The other one serves; the first comes back under its name.
        await until(lambda: worker_names(worker) == ["r-0", "r-0", "r-1"])
        await until_ready(metrics_port)
        assert await ask(http_port) == 200
    finally:
        router.terminate()
        assert await asyncio.wait_for(router.wait(), 30) == 0
        await worker.close()


async def test_one_of_several_listens_when_it_is_ready(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or when nobody is for so long."""
    with ExitStack() as stack:
        http_port, grpc_port, *_ = ports_in_a_row(stack)
    worker = FakeWorker(WorkerRole.DECODE, vocab_size=320, answer=range(40, 60))
    await worker.start()
    config = RouterConfig(
        model=str(model_dir), served_model_name="tiny", decode=(worker.address,), workers=2,
        host="127.0.0.1", http_port=http_port, grpc_port=grpc_port, metrics_port=0,
    )  # fmt: skip
    await worker.stop()
    for timeout_s, status in ((0.1, 503), (60.0, 200)):
        monkeypatch.setattr("pdserve_router.server.READY_TIMEOUT_S", timeout_s)
        server = RouterServer(config)
        starting = asyncio.create_task(server.start())
        if status == 200:
            await asyncio.sleep(0.1)
            for port in (http_port, grpc_port):
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection("127.0.0.1", port)
            await worker.start()
        await starting
        assert await ask(http_port) == status
        await asyncio.open_connection("127.0.0.1", grpc_port)
        await server.stop(1.0)
    await worker.close()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def worker_names(worker: FakeWorker) -> list[str]:
    return sorted(hello.router_id for hello in worker.hellos)


async def ask(port: int) -> int:
    """Over a connection of its own, which the system gives to either."""
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY, timeout=30)
        return answer.status_code


async def until_ready(metrics_port: int) -> None:
    async def status() -> int:
        try:
            async with httpx.AsyncClient() as http:
                return (await http.get(f"http://127.0.0.1:{metrics_port}/ready")).status_code
        except httpx.TransportError:
            return 0

    for _ in range(600):
        if await status() == 200:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"nobody is ready on {metrics_port}")
