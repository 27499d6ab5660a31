"""What a token and a request cost a router: CPU, fitted over short and long answers.

One fake decode worker in a process of its own gives all its requests a token each step, in one
frame, as an engine does. Beside it stands the plain echo: the same server without a router behind
it, which writes a message to each stream each step. CPU time is that of the router's, or of the
echo's, process.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import psutil
import uvicorn
import uvloop
from bench_router import FIRST_TOKEN_ID, VOCAB_SIZE, HttpApi, router, wait_until_ready
from fake_model import make_model_dir
from machine import free_ports

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import FinishReason, WorkerRole
from support.fake_worker import PREFILL_STATS, FakeWorker, Running

GENERATE = "/pdserve.v1.InferenceService/Generate"
# What an answer's event is, in size.
ECHO_EVENT = b"data: " + b"x" * 160 + b"\n\n"
ECHO_MESSAGE = b"x" * 60


class Steps:
    """Gives each request of a worker one token a step, all in one frame."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        # With how many tokens it has.
        self._running: dict[Running, int] = {}

    async def answer(self, running: Running) -> None:
        """A worker's behaviour."""
        finish = FinishReason.LENGTH if running.params.max_tokens == 1 else None
        running.emit(FIRST_TOKEN_ID, at=0, finish=finish, prefill_stats=PREFILL_STATS)
        self._running[running] = 1
        try:
            await asyncio.Event().wait()
        finally:
            self._running.pop(running, None)

    async def run(self) -> None:
        """Step until cancelled."""
        at = time.monotonic()
        while True:
            at = max(at + self._step_s, time.monotonic())
            await asyncio.sleep(at - time.monotonic())
            for running, num_tokens in list(self._running.items()):
                is_last = num_tokens + 1 == running.params.max_tokens
                finish = FinishReason.LENGTH if is_last else None
                running.emit(FIRST_TOKEN_ID + num_tokens % 30, at=num_tokens, finish=finish)
                if is_last:
                    del self._running[running]
                    running.worker.abort(running.request.request_id)
                else:
                    self._running[running] = num_tokens + 1


async def serve_worker(pipe: Connection, step_s: float) -> None:
    worker = FakeWorker(WorkerRole.DECODE, vocab_size=VOCAB_SIZE, model="bench")
    steps = Steps(step_s)
    worker.behave = steps.answer
    await worker.start()
    pipe.send(worker.address)
    stepping = asyncio.create_task(steps.run())
    await asyncio.to_thread(pipe.poll, None)
    stepping.cancel()
    await worker.stop()


class Echo:
    """Writes a message to each of its streams each step, as often as the client asks for."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._step = asyncio.Event()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            self._step.set()
            self._step = asyncio.Event()

    async def http(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(int(scope["query_string"])):
            await self._step.wait()
            await send({"type": "http.response.body", "body": ECHO_EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def grpc(self, raw: bytes, context: grpc.aio.ServicerContext) -> None:
        for _ in range(int(raw)):
            await self._step.wait()
            await context.write(ECHO_MESSAGE)


async def serve_echo(pipe: Connection, step_s: float) -> None:
    echo = Echo(step_s)
    grpc_port, http_port = free_ports(2)
    config = uvicorn.Config(
        echo.http,
        port=http_port,
        http="httptools",
        interface="asgi3",
        proxy_headers=False,
        lifespan="off",
        log_level="warning",
    )
    http_server = uvicorn.Server(config)
    http = asyncio.create_task(http_server.serve())
    while not http_server.started:  # noqa: ASYNC110 - uvicorn tells it this way
        await asyncio.sleep(0.01)
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(echo.grpc)
    service, method = GENERATE[1:].split("/")
    server.add_registered_method_handlers(service, {method: handler})
    server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await server.start()
    steps = asyncio.create_task(echo.run())
    pipe.send((grpc_port, http_port))
    await asyncio.to_thread(pipe.poll, None)
    for task in (steps, http):
        task.cancel()
    await server.stop(0)


def run_child(pipe: Connection, serve: Callable[..., Awaitable[None]], step_s: float) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(serve(pipe, step_s))  # type: ignore[arg-type]
    os._exit(0)


@contextmanager
def child(
    serve: Callable[..., Awaitable[None]], step_s: float
) -> Iterator[tuple[object, psutil.Process]]:
    """Run `serve` in a process of its own; yield what it says of itself."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_child, args=(theirs, serve, step_s))
    process.start()
    try:
        yield ours.recv(), psutil.Process(process.pid)
    finally:
        ours.send("stop")
        process.join(5)


class HttpStreams:
    """Answers over SSE."""

    def __init__(self, port: int, args: argparse.Namespace, num_tokens: int) -> None:
        options = argparse.Namespace(prompt_tokens=args.prompt_tokens, tokens=num_tokens)
        self._api = HttpApi(port, options)

    async def stream(self) -> AsyncIterator[None]:
        async for _ in self._api.stream():
            yield

    async def close(self) -> None:
        await self._api.close()


class HttpEchoes(HttpStreams):
    """The same number of events, of the plain echo."""

    def __init__(self, port: int, args: argparse.Namespace, num_tokens: int) -> None:
        super().__init__(port, args, num_tokens)
        self._api._request = f"GET /?{num_tokens} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


class GrpcStreams:
    """Answers over gRPC, as bytes."""

    def __init__(self, port: int, args: argparse.Namespace, num_tokens: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._generate = self._channel.unary_stream(GENERATE)
        self._request = pb2.GenerateRequest(
            tokens=pb2.TokenPrompt(token_ids=[5] * args.prompt_tokens),
            sampling_params=core.SamplingParams(max_tokens=num_tokens, temperature=0.0),
        ).SerializeToString()

    async def stream(self) -> AsyncIterator[None]:
        async for _ in self._generate(self._request):
            yield

    async def close(self) -> None:
        await self._channel.close()


class GrpcEchoes(GrpcStreams):
    """The same number of messages, of the plain echo."""

    def __init__(self, port: int, args: argparse.Namespace, num_tokens: int) -> None:
        super().__init__(port, args, num_tokens)
        self._request = b"%d" % num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What some requests took."""

    num_requests: int
    num_tokens: int
    num_messages: int
    cpu_s: float
    wall_s: float


async def load(
    kind: Callable[..., HttpStreams | GrpcStreams],
    port: int,
    processes: list[psutil.Process],
    num_tokens: int,
    args: argparse.Namespace,
) -> Load:
    """Have each stream answered `rounds` times, all at once."""
    api = kind(port, args, num_tokens)
    num_messages = 0

    async def one_after_the_other(rounds: int) -> None:
        nonlocal num_messages
        for _ in range(rounds):
            async for _ in api.stream():
                num_messages += 1

    rounds = max(1, args.short_rounds if num_tokens == args.short else 1)
    await one_after_the_other(1)
    num_messages = 0
    cpu_s, began = cpu_of(processes), time.perf_counter()
    await asyncio.gather(*(one_after_the_other(rounds) for _ in range(args.streams)))
    wall_s = time.perf_counter() - began
    await api.close()
    return Load(
        num_requests=args.streams * rounds,
        num_tokens=args.streams * rounds * num_tokens,
        num_messages=num_messages,
        cpu_s=cpu_of(processes) - cpu_s,
        wall_s=wall_s,
    )


def cpu_of(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def measure(
    name: str,
    kind: Callable[..., HttpStreams | GrpcStreams],
    port: int,
    processes: list[psutil.Process],
    step_ms: float,
    args: argparse.Namespace,
) -> None:
    """Print a row: CPU = requests * a + tokens * b, from two sizes of answers."""
    short = await load(kind, port, processes, args.short, args)
    long = await load(kind, port, processes, args.long, args)
    short_us = short.cpu_s / short.num_requests * 1e6
    long_us = long.cpu_s / long.num_requests * 1e6
    token_us = (long_us - short_us) / (args.long - args.short)
    print(
        f"{name:<12}{step_ms:>8g}{token_us:>11.1f}{short_us - args.short * token_us:>13.0f}"
        f"{long.num_tokens / long.num_messages:>12.2f}{long.num_tokens / long.wall_s:>11.0f}"
        f"{long.cpu_s / long.wall_s:>9.2f}",
        flush=True,
    )


HEADER = (
    f"{'':<12}{'step ms':>8}{'us/token':>11}{'us/request':>13}{'tokens/msg':>12}"
    f"{'tokens/s':>11}{'cores':>9}"
)


def run_step(model: Path, step_ms: float, args: argparse.Namespace) -> None:
    """Measure both APIs and their echoes at one length of a step."""
    grpc_port, http_port = free_ports(2)
    if args.echo:
        with child(serve_echo, step_ms / 1e3) as (ports, process):
            for name, kind, port in zip(
                ("gRPC echo", "SSE echo"), (GrpcEchoes, HttpEchoes), ports, strict=True
            ):
                if args.only in ("", name.split()[0]):
                    uvloop.run(measure(name, kind, port, [process], step_ms, args))
    with (
        child(serve_worker, step_ms / 1e3) as (address, _),
        router(model, ["", str(address)], (grpc_port, http_port), args.router) as process,
    ):
        uvloop.run(wait_until_ready(http_port))
        every = [process, *process.children(recursive=True)] if args.router else [process]
        for name, kind, port in (("gRPC", GrpcStreams, grpc_port), ("SSE", HttpStreams, http_port)):
            if args.only in ("", name):
                uvloop.run(measure(name, kind, port, every, step_ms, args))


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256, help="at once (%(default)s)")
    parser.add_argument("--long", type=int, default=512, help="tokens of an answer (%(default)s)")
    parser.add_argument("--short", type=int, default=64, help="tokens of an answer (%(default)s)")
    parser.add_argument("--short-rounds", type=int, default=2, help="of those (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[25.0, 4.0])
    parser.add_argument("--only", choices=("gRPC", "SSE", ""), default="")
    parser.add_argument("--echo", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--router", nargs="*", default=[], help="further flags of the router")
    args = parser.parse_args()
    print(f"python {platform.python_version()}, {psutil.cpu_count()} CPUs, {vars(args)}")
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "bench"
        make_model_dir(model)
        for step_ms in args.step_ms:
            run_step(model, step_ms, args)


if __name__ == "__main__":
    sys.exit(main())
