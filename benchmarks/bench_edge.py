"""What one client's message does to another's stream: the longest gap, and the router's memory.

The router runs as its own process, and so do a fake worker and the attacker; this one is the
victim, which reads one stream over gRPC and asks for the list of models over HTTP all the time.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "router"))

from fake_model import make_model_dir
from machine import describe, free_ports

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve.v1 import inference_service_pb2_grpc as pb2_grpc
from pdserve_common.types.engine import FinishReason, WorkerRole
from support.fake_worker import FakeWorker, Running

MiB = 1 << 20
VICTIM = "victim"
STEP_S = 0.005
# The victim's alone, before an attack.
REST_S = 1.0
ATTACK_TIMEOUT_S = 180.0
SERVICE = "/pdserve.v1.InferenceService/"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """Messages that one client sends at once; `to` is a path, or a method of gRPC."""

    to: str
    make: Callable[[int], bytes]  # takes max_model_len
    count: int = 1


def chat(messages: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"bench","max_tokens":2,"messages":[%b]%b}' % (messages, more)


def completion(prompt: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"bench","max_tokens":2,"prompt":%b%b}' % (prompt, more)


def many(entry: bytes, num_bytes: int) -> bytes:
    return b",".join([entry] * (num_bytes // (len(entry) + 1)))


def fields(number: int, content: bytes) -> bytes:
    """A length-delimited field in protobuf."""
    tag, length = number << 3 | 2, len(content)
    out = bytearray()
    for value in (tag, length):
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out) + content


MESSAGE = b'{"role":"user","content":"a"}'
WORDS = b"the quick brown fox "
BODY = 8 * MiB - 4096
WIRE = 8 * MiB - 4096
TURN = fields(1, fields(1, b"user") + fields(2, b"a"))


def text(num_bytes: int) -> bytes:
    return WORDS * (num_bytes // len(WORDS))


def token_ids(max_model_len: int) -> bytes:
    return b"[" + many(b"300", 4 * (max_model_len - 4)) + b"]"


ATTACKS: dict[str, Attack] = {
    "nothing": Attack(to=COMPLETION, make=lambda _: completion(b'"a"')),
    "HTTP chat, 8 MB of messages": Attack(to=CHAT, make=lambda _: chat(many(MESSAGE, BODY))),
    "HTTP chat, 8 MB of parts": Attack(
        to=CHAT,
        make=lambda _: chat(
            b'{"role":"user","content":[%b]}' % many(b'{"type":"text","text":""}', BODY)
        ),
    ),
    "HTTP, one string of 8 MB": Attack(
        to=COMPLETION, make=lambda _: completion(b'"%b"' % text(BODY))
    ),
    "HTTP, 8 MB of escapes": Attack(
        to=COMPLETION, make=lambda _: completion(b'"%b"' % (b"\\u0061" * (BODY // 6)))
    ),
    "HTTP, 4 M token ids": Attack(
        to=COMPLETION, make=lambda _: completion(b"[%b]" % many(b"1", BODY))
    ),
    "HTTP, 2 M prompts": Attack(
        to=COMPLETION, make=lambda _: completion(b"[%b]" % many(b'""', BODY))
    ),
    "HTTP, nesting of 4 M": Attack(
        to=COMPLETION, make=lambda _: completion(b"[" * (BODY // 2) + b"]" * (BODY // 2))
    ),
    "HTTP, 2 M objects": Attack(
        to=COMPLETION, make=lambda _: completion(b"[%b]" % many(b"{}", BODY))
    ),
    "HTTP, 1 M stop strings": Attack(
        to=COMPLETION, make=lambda _: completion(b'"a"', b',"stop":[%b]' % many(b'"abcde"', BODY))
    ),
    "HTTP, 1 M annotations": Attack(
        to=CHAT,
        make=lambda _: chat(
            b'{"role":"user","content":"a","annotations":[%b]}' % many(b'{"a":1}', BODY)
        ),
    ),
    "HTTP, logit_bias of 600 k": Attack(
        to=COMPLETION,
        make=lambda _: completion(
            b'"a"', b',"logit_bias":{%b}' % b",".join(b'"%d":1' % i for i in range(600_000))
        ),
    ),
    "HTTP, 600 k unknown fields": Attack(
        to=COMPLETION,
        make=lambda _: completion(b'"a"', b"," + b",".join(b'"%d":1' % i for i in range(600_000))),
    ),
    "HTTP, 12 chats of 8 MB": Attack(to=CHAT, make=lambda _: chat(many(MESSAGE, BODY)), count=12),
    "HTTP, 100 chats of 60 KB": Attack(
        to=CHAT, make=lambda _: chat(many(MESSAGE, 60_000)), count=100
    ),
    "HTTP, 500 short prompts": Attack(to=COMPLETION, make=lambda _: completion(b'"a"'), count=500),
    "HTTP, longest valid prompt, ids": Attack(
        to=COMPLETION, make=lambda n: completion(token_ids(n))
    ),
    "HTTP, longest valid prompt, echoed": Attack(
        to=COMPLETION, make=lambda n: completion(token_ids(n), b',"echo":true')
    ),
    "gRPC chat, 8 MB of messages": Attack(
        to="Generate", make=lambda _: fields(4, TURN * (WIRE // len(TURN)))
    ),
    "gRPC chat, 4 M empty messages": Attack(
        to="Generate", make=lambda _: fields(4, fields(1, b"") * (WIRE // 2))
    ),
    "gRPC, one text of 8 MB": Attack(to="Generate", make=lambda _: fields(3, text(WIRE))),
    "gRPC, 8 M token ids": Attack(
        to="Generate", make=lambda _: fields(5, fields(1, b"\x01" * WIRE))
    ),
    "gRPC, 8 MB of resume entries": Attack(
        to="Generate", make=lambda _: fields(3, b"a") + fields(10, b"") * (WIRE // 2)
    ),
    "gRPC, 8 MB of stop strings": Attack(
        to="Generate", make=lambda _: fields(3, b"a") + fields(6, fields(14, b"a") * (WIRE // 3))
    ),
    "gRPC, a model's name of 8 MB": Attack(
        to="Generate", make=lambda _: fields(3, b"a") + fields(2, b"x" * WIRE)
    ),
    "gRPC, 8 MB that is no message": Attack(to="Generate", make=lambda _: b"\xff" * WIRE),
    "gRPC, 12 chats of 8 MB": Attack(
        to="Generate", make=lambda _: fields(4, TURN * (WIRE // len(TURN))), count=12
    ),
    "gRPC, 500 short prompts": Attack(
        to="Generate",
        make=lambda _: pb2.GenerateRequest(
            text="a", sampling_params=core.SamplingParams(max_tokens=2)
        ).SerializeToString(),
        count=500,
    ),
    "gRPC, longest valid prompt, ids": Attack(
        to="Generate",
        make=lambda n: pb2.GenerateRequest(
            tokens=pb2.TokenPrompt(token_ids=[300] * (n - 4)),
            sampling_params=core.SamplingParams(max_tokens=2),
        ).SerializeToString(),
    ),
    "Tokenize, one text of 8 MB": Attack(to="Tokenize", make=lambda _: fields(2, text(WIRE))),
    "Tokenize, 8 MB of messages": Attack(
        to="Tokenize", make=lambda _: fields(3, TURN * (WIRE // len(TURN)))
    ),
    "Detokenize, 8 M token ids": Attack(to="Detokenize", make=lambda _: fields(2, b"\x05" * WIRE)),
    "Detokenize, 256 k token ids": Attack(
        to="Detokenize", make=lambda _: fields(2, b"\x05" * (1 << 18))
    ),
    "ListModels, 8 MB": Attack(to="ListModels", make=lambda _: fields(1, b"") * (WIRE // 2)),
}


@dataclass(slots=True)
class Gaps:
    """The longest time between two events."""

    last: float = field(default_factory=time.perf_counter)
    longest_s: float = 0.0

    def event(self) -> None:
        now = time.perf_counter()
        self.longest_s = max(self.longest_s, now - self.last)
        self.last = now

    def take(self) -> float:
        longest, self.longest_s = self.longest_s, 0.0
        return longest


class Memory(threading.Thread):
    """Samples the resident memory of the router, and of it and its children together."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(pid)
        self.router = self.total = 0
        self.base_router, self.base_total = self._sample()
        self.start()

    def run(self) -> None:
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):
                router, total = self._sample()
                self.router, self.total = max(self.router, router), max(self.total, total)
            time.sleep(0.02)

    def take(self) -> tuple[float, float]:
        """Return the peaks since the last call, in MiB above those at the start."""
        grown = (self.router - self.base_router) / MiB, (self.total - self.base_total) / MiB
        self.router = self.total = 0
        return grown

    def _sample(self) -> tuple[int, int]:
        router = self._process.memory_info().rss
        children = 0
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                # What copies of a process share counts once.
                rollup = Path(f"/proc/{child.pid}/smaps_rollup").read_text()
                children += 1024 * int(rollup.partition("Pss:")[2].split()[0])
        return router, router + children


async def stream_on(running: Running) -> None:
    """The victim's tokens never end; others get two."""
    at = 0
    limit = running.request.task.sampling_params.max_tokens
    while at < limit:
        finish = FinishReason.LENGTH if at + 1 == limit else None
        running.emit(40, at=at, finish=finish)
        at += 1
        await asyncio.sleep(STEP_S)


async def serve_worker(max_model_len: int) -> None:
    worker = FakeWorker(
        WorkerRole.DECODE, vocab_size=320, model="bench", max_model_len=max_model_len
    )
    worker.behave = stream_on
    await worker.start()
    print(worker.address, flush=True)
    await asyncio.Event().wait()


async def attack(name: str, http_port: int, grpc_port: int, max_model_len: int) -> None:
    """Send it and print what came back."""
    one = ATTACKS[name]
    data = one.make(max_model_len)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    send = send_http if one.to.startswith("/") else send_grpc
    port = http_port if one.to.startswith("/") else grpc_port
    answers = await asyncio.gather(*(send(port, one.to, data) for _ in range(one.count)))
    print(json.dumps(sorted(set(answers))), flush=True)


async def send_http(port: int, path: str, data: bytes) -> str:
    # Without TLS's context, which takes 10 ms to make.
    async with httpx.AsyncClient(timeout=ATTACK_TIMEOUT_S, verify=False) as client:
        try:
            answer = await client.post(f"http://127.0.0.1:{port}{path}", content=data)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}"
    if answer.status_code == 200:
        return "200"
    return f"{answer.status_code} {answer.json()['error']['message'][:120]}"


async def send_grpc(port: int, method: str, data: bytes) -> str:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        try:
            if method == "Generate":
                async for _ in channel.unary_stream(SERVICE + method)(
                    data, timeout=ATTACK_TIMEOUT_S
                ):
                    pass
            else:
                await channel.unary_unary(SERVICE + method)(data, timeout=ATTACK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {(error.details() or '')[:120]}"
    return "OK"


@contextlib.contextmanager
def process(*command: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, **options)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


class Victim:
    """Reads a stream, and asks over HTTP, all the time."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self._http_port = http_port
        self._grpc_port = grpc_port
        self.stream = Gaps()
        self.asking = Gaps()
        self.began = asyncio.Event()

    async def read(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{self._grpc_port}", options=options
        ) as channel:
            stub = pb2_grpc.InferenceServiceStub(channel)
            params = core.SamplingParams(max_tokens=1 << 30, temperature=0)
            request = pb2.GenerateRequest(text="a", sampling_params=params, request_id=VICTIM)
            while True:
                async for _ in stub.Generate(request):
                    self.stream.event()
                    self.began.set()

    async def ask(self) -> None:
        url = f"http://127.0.0.1:{self._http_port}/v1/models"
        async with httpx.AsyncClient(timeout=ATTACK_TIMEOUT_S) as client:
            while True:
                (await client.get(url)).raise_for_status()
                self.asking.event()
                await asyncio.sleep(STEP_S)


async def measure(arguments: argparse.Namespace, ports: list[int], router_pid: int) -> None:
    http_port, grpc_port = ports
    victim = Victim(http_port, grpc_port)
    tasks = [asyncio.create_task(victim.read()), asyncio.create_task(victim.ask())]
    await asyncio.wait_for(victim.began.wait(), 60)
    await asyncio.sleep(2 * REST_S)
    memory = Memory(router_pid)
    print("| one client sends | stream's longest gap | request's | RSS | and children | it gets |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in ATTACKS:
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        rounds = [
            await one_round(name, arguments, ports, victim, memory) for _ in range(arguments.rounds)
        ]
        stream, asking, router, total = (statistics.median(r[i] for r in rounds) for i in range(4))
        answers = sorted({answer for r in rounds for answer in r[4]})
        print(
            f"| {name} | {1000 * stream:.0f} ms | {1000 * asking:.0f} ms | {router:+.0f} MiB "
            f"| {total:+.0f} MiB | {'; '.join(answers)[:200]} |",
            flush=True,
        )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def one_round(
    name: str, arguments: argparse.Namespace, ports: list[int], victim: Victim, memory: Memory
) -> tuple[float, float, float, float, list[str]]:
    """Return both gaps (s), both memories (MiB) and what the attacker got."""
    command = [sys.executable, __file__, "--attack", name, "--ports", *map(str, ports)]
    limit = ["--max-model-len", str(arguments.max_model_len)]
    with process(*command, *limit, stdin=subprocess.PIPE) as attacker:
        assert attacker.stdin
        assert attacker.stdout
        await asyncio.to_thread(attacker.stdout.readline)
        await asyncio.sleep(REST_S)
        for sampled in (victim.stream, victim.asking, memory):
            sampled.take()
        attacker.stdin.write("go\n")
        attacker.stdin.flush()
        answers = await asyncio.to_thread(attacker.stdout.readline)
        await asyncio.sleep(REST_S / 2)
    victim.stream.event()
    victim.asking.event()
    return victim.stream.take(), victim.asking.take(), *memory.take(), json.loads(answers)


def run_all(arguments: argparse.Namespace) -> None:
    print(describe("grpcio", "pydantic", "tokenizers"))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Path(folder) / "bench"
        make_model_dir(model)
        limit = ("--max-model-len", str(arguments.max_model_len))
        worker = stack.enter_context(process(sys.executable, __file__, "--worker", *limit))
        assert worker.stdout
        address = worker.stdout.readline().strip()
        http_port, grpc_port, metrics_port = free_ports(3)
        flags = {
            "model": model,
            "decode": address,
            "host": "127.0.0.1",
            "http-port": http_port,
            "grpc-port": grpc_port,
            "metrics-port": metrics_port,
            "max-deadline-s": 7200,
            "default-deadline-s": 7200,
            "client-stall-timeout-s": 600,
            "log-level": "error",
        }
        command = [f"--{name}={value}" for name, value in flags.items()]
        router = stack.enter_context(process(sys.executable, "-m", "pdserve_router", *command))
        wait_for(f"http://127.0.0.1:{http_port}/health")
        asyncio.run(measure(arguments, [http_port, grpc_port], router.pid))


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"{url} does not answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-model-len", type=int, default=131_072, help="of the fake worker")
    parser.add_argument("--rounds", type=int, default=3, help="of which medians are shown")
    parser.add_argument("--only", nargs="*", help="parts of names")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--ports", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        asyncio.run(serve_worker(arguments.max_model_len))
    elif arguments.attack:
        asyncio.run(attack(arguments.attack, *arguments.ports, arguments.max_model_len))
    else:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        run_all(arguments)


if __name__ == "__main__":
    main()
