"""The router's process with few file descriptors."""

import asyncio
import contextlib
import json
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve_common.processes.descriptors import share_descriptors
from pdserve_common.types.engine import WorkerRole
from support.fake_worker import FakeWorker
from support.router_stack import ANSWER_TEXT

NUM_DESCRIPTORS = 256
PORTS = re.compile(r"HTTP on (?P<http>\d+), metrics on (?P<metrics>\d+)")
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 50, "stream": True}


# The limits are set by a shell: a function between fork and exec would have gRPC's threads of this
# process start in the child, whose descriptors are being closed.
LIMITED = f'ulimit -Sn {NUM_DESCRIPTORS - 56} && ulimit -Hn {NUM_DESCRIPTORS} && exec "$@"'


@contextlib.asynccontextmanager
async def router_process(model_dir: Path, worker: FakeWorker) -> AsyncIterator[tuple[str, str]]:
    """The URLs of its HTTP API and of its metrics, once it is ready."""
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", LIMITED, "sh", sys.executable, "-m", "pdserve_router", f"--model={model_dir}",
        f"--decode={worker.address}", "--host=127.0.0.1", "--http-port=0",
        "--grpc-port=0", "--metrics-port=0", stderr=asyncio.subprocess.PIPE, env={**os.environ},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        log = ""
        while "the router is ready" not in log:
            line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
            assert line, f"it ended: {log}"
            log += line
        assert f"limit of open files: {NUM_DESCRIPTORS}, was {NUM_DESCRIPTORS - 56}" in log
        ports = PORTS.search(log)
        assert ports is not None
        reading = asyncio.create_task(process.stderr.read())
        yield f"http://127.0.0.1:{ports['http']}", f"http://127.0.0.1:{ports['metrics']}"
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert "Traceback" not in (await reading).decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def stream(url: str) -> str:
    """Return what an honest client gets: `whole`, or the status and whether to come back."""
    port = httpx.URL(url).port
    body = json.dumps(BODY).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        answer = (await reader.read(-1)).decode()
    except OSError as error:
        return type(error).__name__
    finally:
        writer.close()
    if answer.startswith("HTTP/1.1 200 ") and "data: [DONE]" in answer:
        return "whole"
    return f"{answer[9:12]}, {'retry-after: 1' in answer}"


async def test_with_few_descriptors_everybody_gets_an_answer(
    model_dir: Path, tokenizer: Any
) -> None:
    tokens = tokenizer.backend.encode(ANSWER_TEXT).ids
    worker = FakeWorker(WorkerRole.DECODE, vocab_size=tokenizer.vocab_size, answer=tokens)
    await worker.start()
    num_http, _ = share_at(NUM_DESCRIPTORS)
    may_end = asyncio.Event()
    worker.before_token = lambda running, num_tokens: may_end.wait()
    try:
        async with (
            router_process(model_dir, worker) as (url, metrics_url),
            httpx.AsyncClient(base_url=metrics_url, timeout=300) as probe,
        ):
            tasks = [asyncio.create_task(stream(url)) for _ in range(400)]
            while sum(task.done() for task in tasks) < 400 - num_http * 3 // 4:
                await asyncio.wait(
                    [task for task in tasks if not task.done()],
                    return_when=asyncio.FIRST_COMPLETED,
                    timeout=60,
                )
            assert (await probe.get("/ready")).status_code == 200
            may_end.set()
            got = Counter(await asyncio.gather(*tasks))
            assert got["whole"] >= num_http * 3 // 4
            assert got.keys() <= {"whole", "503, True"}
            await check_silent(url, probe)
    finally:
        await worker.close()


async def check_silent(url: str, probe: httpx.AsyncClient) -> None:
    """300 connections that say nothing stop neither probes nor those who come behind them."""
    port = httpx.URL(url).port
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
    try:
        for _ in range(5):
            assert (await probe.get("/ready")).status_code == 200
            assert await stream(url) == "whole"
    finally:
        for _, writer in silent:
            writer.close()


def share_at(limit: int) -> tuple[int, int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        return share_descriptors(reserved=32, max_http=4096, max_grpc=1024)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_shares_leave_descriptors_for_the_process_and_too_few_are_refused() -> None:
    for limit in (144, 256, 1024, 20_000):
        num_http, num_grpc = share_at(min(limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        assert 16 <= num_http <= 4096
        assert 16 <= num_grpc <= 1024
        assert num_http + num_grpc + 32 + 64 <= limit
    with pytest.raises(ValueError, match=r"\(ulimit -n\) is 100, must be 144 or more"):
        share_at(100)
