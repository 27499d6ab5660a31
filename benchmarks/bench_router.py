"""What a router costs: CPU for each request and token, and the time it adds to the first token.

Two fake workers in a process of their own answer one token a step; the router runs as its own
process; this one is the client. Throughput depends on what else the machine does, CPU time does
not: compare versions by the latter.
"""

import argparse
import asyncio
import json
import multiprocessing
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import httpx
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "router"))

from fake_model import make_model_dir
from machine import free_ports

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import engine_core_service_pb2 as engine_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as engine_grpc
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve.v1 import inference_service_pb2_grpc as pb2_grpc
from pdserve_common.rpc.attach_protocol import PROTOCOL_VERSION
from pdserve_common.types.engine import WorkerRole
from support.fake_worker import FakeWorker

# ASCII: every token has a text of its own, so that the first event is the first token.
FIRST_TOKEN_ID = 40
HELLO = engine_pb2.AttachHello(router_id="b", max_protocol_version=PROTOCOL_VERSION)
VOCAB_SIZE = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row."""

    name: str
    num_requests: int
    num_tokens: int
    wall_s: float
    cpu_s: float
    ttft_ms: list[float]

    def row(self) -> str:
        ordered = sorted(self.ttft_ms)
        p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        return (
            f"{self.name:<22}{self.num_requests / self.wall_s:>10.0f}"
            f"{self.num_tokens / self.wall_s:>11.0f}"
            f"{self.cpu_s / self.num_requests * 1e6:>13.0f}"
            f"{self.cpu_s / self.num_tokens * 1e6:>11.1f}"
            f"{statistics.median(ordered):>10.2f}{p99:>10.2f}"
        )


# Of each rate.
RATE_S = 10.0

HEADER = (
    f"{'':<22}{'requests/s':>10}{'tokens/s':>11}{'CPU us/req':>13}{'us/token':>11}"
    f"{'TTFT p50':>10}{'p99 (ms)':>10}"
)


def run_workers(pipe: Connection, step_s: float) -> None:
    """Serve a prefill and a decode worker until the pipe closes."""

    async def serve() -> None:
        workers = [FakeWorker(role, vocab_size=VOCAB_SIZE, model="bench") for role in WorkerRole]
        for worker in workers:
            worker.answer = tuple(FIRST_TOKEN_ID + i % 30 for i in range(4000))
            worker.step_s = step_s
            await worker.start()
        pipe.send([worker.address for worker in workers])
        await asyncio.to_thread(pipe.poll, None)
        for worker in workers:
            await worker.stop()

    uvloop.run(serve())


@contextmanager
def workers(step_s: float) -> Iterator[list[str]]:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_workers, args=(theirs, step_s))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send("stop")
        process.join()


@contextmanager
def router(
    model: Path, addresses: list[str], ports: tuple[int, int], flags: Sequence[str] = ()
) -> Iterator[psutil.Process]:
    """Run one before a prefill worker, "" if there is none, and a decode worker."""
    prefill, decode = addresses
    command = [
        sys.executable, "-m", "pdserve_router", f"--model={model}", f"--decode={decode}",
        "--host=127.0.0.1", f"--grpc-port={ports[0]}", f"--http-port={ports[1]}",
        "--metrics-port=0", "--log-level=warning", "--max-num-queued-requests=100000", *flags,
        *([f"--prefill={prefill}"] if prefill else []),
    ]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


async def wait_until_ready(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if (await http.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
    raise TimeoutError("the router did not become ready")


class GrpcApi:
    """Streams over gRPC."""

    def __init__(self, port: int, args: argparse.Namespace) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._stub = pb2_grpc.InferenceServiceStub(self._channel)
        self._request = pb2.GenerateRequest(
            tokens=pb2.TokenPrompt(token_ids=[5] * args.prompt_tokens),
            sampling_params=core.SamplingParams(max_tokens=args.tokens, temperature=0.0),
        )

    async def stream(self) -> AsyncIterator[None]:
        async for _ in self._stub.Generate(self._request):
            yield

    async def close(self) -> None:
        await self._channel.close()


class HttpApi:
    """Server-sent events, read raw: an HTTP library would cost more than the router."""

    def __init__(self, port: int, args: argparse.Namespace) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        body = json.dumps(
            {
                "model": "bench",
                "prompt": [5] * args.prompt_tokens,
                "max_tokens": args.tokens,
                "temperature": 0,
                "stream": True,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"
        self._request = f"{head}\r\n\r\n{body}".encode()

    async def stream(self) -> AsyncIterator[None]:
        if not self._idle:
            self._idle.append(await asyncio.open_connection("127.0.0.1", self._port))
        reader, writer = self._idle.pop()
        writer.write(self._request)
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b"\r\n\r\n")
        end = b""
        while not end.endswith(b"0\r\n\r\n"):
            data = await reader.read(65536)
            assert data, "the router closed the connection"
            end = (end + data)[-5:]
            yield
        self._idle.append((reader, writer))

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def load(
    name: str, api: GrpcApi | HttpApi, process: psutil.Process, *, streams: int, requests: int,
    tokens: int,
) -> Result:  # fmt: skip
    """Keep `streams` requests running until `requests` are done."""
    left = iter(range(requests))
    ttft_ms: list[float] = []

    async def one_after_the_other() -> None:
        for _ in left:
            ttft_ms.append(await one(api))

    await one(api)
    cpu = sum(process.cpu_times()[:2])
    began = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(streams)))
    return Result(
        name=name,
        num_requests=requests,
        num_tokens=requests * tokens,
        wall_s=time.perf_counter() - began,
        cpu_s=sum(process.cpu_times()[:2]) - cpu,
        ttft_ms=ttft_ms,
    )


async def one(api: GrpcApi | HttpApi) -> float:
    """Have one request answered; return what its first token took, in ms."""
    began = time.perf_counter()
    ttft_ms = 0.0
    async for _ in api.stream():
        ttft_ms = ttft_ms or (time.perf_counter() - began) * 1e3
    return ttft_ms


async def ttft_at_rate(api: GrpcApi | HttpApi, rate: float, seconds: float) -> list[float]:
    """Have so many requests a second answered, which come at random moments."""
    rng = random.Random(1)
    tasks = []
    for _ in range(round(rate * seconds)):
        tasks.append(asyncio.create_task(one(api)))
        await asyncio.sleep(rng.expovariate(rate))
    return await asyncio.gather(*tasks)


async def direct_ttft_ms(address: str, args: argparse.Namespace) -> list[float]:
    """The same without a router: an Attach stream to the prefill worker from here."""
    times = []
    async with grpc.aio.insecure_channel(address) as channel:
        call = engine_grpc.EngineCoreServiceStub(channel).Attach()
        await call.write(engine_pb2.AttachRequest(hello=HELLO))
        for number in range(args.solo_requests):
            request = core.EngineCoreRequest(
                request_id=str(number), prompt_token_ids=[5] * args.prompt_tokens
            )
            request.sampling_params.max_tokens = args.tokens
            began = time.perf_counter()
            await call.write(engine_pb2.AttachRequest(add_request=request))
            while (await call.read()).WhichOneof("message") != "outputs":
                pass
            times.append((time.perf_counter() - began) * 1e3)
        call.cancel()
    return times


async def measure(
    addresses: list[str], process: psutil.Process, ports: tuple[int, int], args: argparse.Namespace
) -> None:
    await wait_until_ready(ports[1])
    direct = statistics.median(await direct_ttft_ms(addresses[0], args))
    print(HEADER)
    for name, api in (("gRPC", GrpcApi(ports[0], args)), ("HTTP/SSE", HttpApi(ports[1], args))):
        solo = await load(
            f"{name}, 1 stream", api, process,
            streams=1, requests=args.solo_requests, tokens=args.tokens,
        )  # fmt: skip
        print(solo.row())
        many = await load(
            f"{name}, {args.streams} streams", api, process,
            streams=args.streams, requests=args.requests, tokens=args.tokens,
        )  # fmt: skip
        print(many.row())
        added = statistics.median(solo.ttft_ms) - direct
        print(f"  added TTFT {added:.2f} ms (the worker alone: {direct:.2f} ms)")
        for rate in args.rates:
            ttft_ms = await ttft_at_rate(api, rate, RATE_S)
            added = statistics.median(ttft_ms) - direct
            print(f"  added TTFT {added:.2f} ms at {rate:g} requests/s")
        await api.close()


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64, help="at once (%(default)s)")
    parser.add_argument("--requests", type=int, default=512, help="in all (%(default)s)")
    parser.add_argument("--solo-requests", type=int, default=50, help="one by one (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--step-ms", type=float, default=2.0, help="worker's step (%(default)s)")
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[100.0], help="requests/s (%(default)s)"
    )
    args = parser.parse_args()
    print(f"python {platform.python_version()}, {psutil.cpu_count()} CPUs, {vars(args)}")
    with tempfile.TemporaryDirectory() as folder, workers(args.step_ms / 1e3) as addresses:
        model = Path(folder) / "bench"
        make_model_dir(model)
        grpc_port, http_port = free_ports(2)
        with router(model, addresses, (grpc_port, http_port)) as process:
            uvloop.run(measure(addresses, process, (grpc_port, http_port), args))


if __name__ == "__main__":
    main()
