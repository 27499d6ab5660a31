"""Real stacks: router, prefill and decode services as processes on loopback, NIXL between them."""

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import AsyncClient
from pdserve_client.config import StackConfig
from pdserve_client.stack import FREE_PORTS, ServiceProcess, Stack
from pdserve_common.runtime import Runtime
from pdserve_common.tokens.tokenizer_digest import tokenizer_digest
from pdserve_common.types.engine import WorkerRole
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.config import RouterConfig
from pdserve_router.server import RouterServer
from pdserve_router.text.served_model import ServedModel
from pdserve_router.workers.clients.worker_client import WorkerClient
from support import forks
from support.fork_server import Job, fork_service
from support.metrics import scrape, total
from support.waiting import stop_process

# Of what has to happen, however busy the machine is.
READY_TIMEOUT_S = 300.0
SETTLE_TIMEOUT_S = 120.0
REATTACH_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
# Of tests, at the same time.
MAX_PROCESSES = 8
# Of a test that has to meet answers on their way.
MAX_ROUNDS = 5


class ForkedService(ServiceProcess):
    """One that has its imports from a fork server."""

    def _launch(self, log: BinaryIO, env: dict[str, str]) -> "subprocess.Popen[bytes]":
        return fork_service(Job(self.module, self.flags, env), log=log)


class RunningStack(Stack):
    """A stack that can say what its processes hold."""

    service_type = ForkedService

    def metrics(self, name: str) -> dict[str, float]:
        """Return the samples of one process, by name with labels as Prometheus prints them."""
        (process,) = [process for process in self.processes if process.name == name]
        return scrape(f"http://127.0.0.1:{process.metrics_port}/metrics")

    @property
    def served_model(self) -> ServedModel:
        """What a router has to serve that attaches to the workers."""
        path = Path(self.config.model).resolve()
        return ServedModel(path.name, tokenizer_digest(path))

    def worker_names(self) -> list[str]:
        return [worker.name for worker in self.workers]

    def process(self, name: str) -> "subprocess.Popen[bytes]":
        """Return the newest process of that name."""
        (service,) = [service for service in self.processes if service.name == name]
        assert service.process is not None
        return service.process

    def send_signal(self, name: str, signum: int) -> None:
        if signum == signal.SIGSTOP:
            stop_process(self.process(name).pid)
        else:
            self.process(name).send_signal(signum)

    def kill_process(self, name: str) -> None:
        """SIGKILL, and wait: who restores the stack has to find it dead."""
        self.process(name).kill()
        self.process(name).wait(ANSWER_TIMEOUT_S)

    def log(self, name: str) -> str:
        """Return what the newest process of that name has logged."""
        (service,) = [service for service in self.processes if service.name == name]
        return service.log_path.read_text()

    def wait_for(self, name: str, sample: str, value: float) -> None:
        """Wait until a process's sample, or its sum over labels, is `value`."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while (found := total(self.metrics(name), sample)) != value:
            assert time.monotonic() < deadline, f"{name}: {sample} is {found:g}, not {value:g}"
            time.sleep(0.01)

    def num_redrives(self) -> float:
        """Return how often the router sent a request on to another worker."""
        return total(self.metrics("router"), "pdserve_redrives_total")

    async def until_redriven(self, run: Callable[[], Awaitable[None]]) -> None:
        """Await `run`, in which a worker dies amid answers, until one of them went on elsewhere.

        A quick worker may be done with all of them before it dies. Then it is started again, for
        the next of at most MAX_ROUNDS.
        """
        for _ in range(MAX_ROUNDS):
            before = self.num_redrives()
            await run()
            if self.num_redrives() > before:
                return
            self.wake_and_start()
            await asyncio.to_thread(self.wait_until_whole)
        raise AssertionError(f"no answer went on elsewhere in {MAX_ROUNDS} rounds")

    def restore(self) -> None:
        """Wake what is stopped, start what has ended, and wait until all is as at first."""
        self.wake_and_start()
        self.wait_until_whole()

    def wake_and_start(self) -> None:
        """The first half of `restore`. Only for threads that stay: processes end with theirs."""
        for service in self.processes:
            if service.exit_status() is None:
                self.send_signal(service.name, signal.SIGCONT)
            else:
                service.start()

    def wait_until_whole(self) -> None:
        """Wait until the router can use every worker and pair."""
        for _ in self.wait_until_ready():
            pass
        deadline = time.monotonic() + REATTACH_TIMEOUT_S
        while not self._is_whole():
            assert time.monotonic() < deadline, "the router does not use every worker and pair"
            time.sleep(0.05)

    def assert_idle(self, *, without: str = "") -> None:
        """Every block, session and request comes back within SETTLE_TIMEOUT_S."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            left = self._left_over(without)
            if not left:
                return
            assert time.monotonic() < deadline, f"not idle: {left}"
            time.sleep(0.05)

    def resources(self) -> dict[str, tuple[int, int]]:
        """Return (file descriptors, threads) of every process."""
        found = {}
        for process in self.processes:
            handle = psutil.Process(self.process(process.name).pid)
            found[process.name] = (handle.num_fds(), handle.num_threads())
        return found

    def rss_mib(self, name: str) -> float:
        """Return the resident memory of one process."""
        return float(psutil.Process(self.process(name).pid).memory_info().rss / 2**20)

    def _is_whole(self) -> bool:
        """Workers of other weights and pairs that do not fit are known as such."""
        config, samples = self.config, self.metrics("router")

        def count(name: str, labels: str, *states: str) -> float:
            return sum(samples.get(f'{name}{{{labels}state="{state}"}}', 0) for state in states)

        roles = {role: config.num_services(role) for role in ("prefill", "decode")}
        num_pairs = count("pdserve_worker_pairs", "", "proven", "mismatched")
        return num_pairs == math.prod(roles.values()) and all(
            count("pdserve_workers", f'role="{role}",', "ready", "mismatched") == number
            for role, number in roles.items()
        )

    def _left_over(self, without: str) -> dict[str, float]:
        left = {}
        for name in set(self.worker_names()) - {without}:
            samples = self.metrics(name)
            for sample in (
                'pdserve_kv_blocks{state="used"}',
                "pdserve_kv_sessions",
                "pdserve_kv_unlanded_reads",
                "pdserve_requests_running",
                "pdserve_requests_waiting",
            ):
                if value := total(samples, sample):
                    left[f"{name} {sample}"] = value
        if in_flight := self.metrics("router")["pdserve_requests_in_flight"]:
            left["router in flight"] = in_flight
        return left


def own_ports() -> range:
    """Return ports that no other process of this run takes between our look and our bind."""
    number = int(os.environ.get(forks.NUMBER, 0))
    share = len(FREE_PORTS) // MAX_PROCESSES
    first = FREE_PORTS.start + number % MAX_PROCESSES * share
    return range(first, first + share)


@contextlib.contextmanager
def running_stack(
    log_dir: Path,
    *,
    model: Path | str,
    is_to_survive: bool = True,
    flags: Mapping[str, Sequence[str]] = {},
    **fields: object,
) -> Iterator[RunningStack]:
    """Start a stack on free ports; `flags` are further ones of a worker, by its name, `fields`
    StackConfig's.

    On the way out it must be idle, and every process must end with status 0 on SIGTERM, unless the
    test says that it breaks something.
    """
    defaults: dict[str, object] = {
        "grpc_port": 0,
        "http_port": 0,
        "metrics_port": 0,
        "worker_port": 0,
        "kv_cache_memory_mib": 32,
        "ready_timeout_s": READY_TIMEOUT_S,
        # Whoever has to end in order is given the time, however busy the machine is.
        "drain_timeout_s": 60.0,
        "log_dir": str(log_dir),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdserve_client.stack.FREE_PORTS", own_ports())
        stack = RunningStack(StackConfig(model=str(model), **{**defaults, **fields}))  # type: ignore[arg-type]
    for worker in stack.workers:
        worker.flags += flags.get(worker.name, ())
    with contextlib.ExitStack() as on_exit:
        on_exit.callback(stack.stop)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(_print_logs, stack)
            stack.start()
            stack.wait_until_whole()
            yield stack
            if is_to_survive:
                stack.check_alive()
                stack.assert_idle()
            on_failure.pop_all()
    statuses = {process.name: process.exit_status() for process in stack.processes}
    assert not is_to_survive or set(statuses.values()) == {0}, statuses


def _print_logs(stack: RunningStack) -> None:
    """They say why a test has failed."""
    for process in stack.processes:
        if process.log_path.exists():
            print(f"--- {process.name}\n{process.log_path.read_text()[-4000:]}")


@dataclass(frozen=True)
class Routed:
    """A router in this process, and its client."""

    server: RouterServer
    client: AsyncClient

    def count(self, name: str, **labels: str) -> float:
        """Return a sample of its metrics, 0 if it has none."""
        return self.server.registry.get_sample_value(name, labels) or 0.0

    async def until(self, value: float, name: str, **labels: str) -> None:
        """Wait until a sample of its metrics is `value`."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while self.count(name, **labels) != value:
            assert time.monotonic() < deadline, f"{name} {labels} is {self.count(name, **labels)}"
            await asyncio.sleep(0.02)

    async def ask(
        self, prompt: list[int], params: SamplingParams, **fields: object
    ) -> tuple[list[int], pb2.RequestMetrics]:
        """Return a request's tokens, and where it went; `fields` are its further ones."""
        token_ids: list[int] = []
        last = pb2.RequestOutput()
        async for last in self.client.generate(prompt, params, timeout_s=60, **fields):
            for completion in last.outputs:
                assert not completion.HasField("error"), completion.error
                token_ids += completion.token_ids
        return token_ids, last.metrics


@contextlib.asynccontextmanager
async def attached_router(
    stack: RunningStack, prefill: str = "", decode: str = "decode-0", **config: object
) -> AsyncIterator[Routed]:
    """Start one more router of a stack's workers, which are names, or sources as routers know them,
    of one decode worker at first; `config` is RouterConfig's.
    """
    ports = {worker.name: worker.port for worker in stack.workers}
    sources = {
        role: (f"127.0.0.1:{ports[source]}" if source in ports else source,)
        for role, source in (("prefill", prefill), ("decode", decode))
        if source
    }
    free = dict.fromkeys(("grpc_port", "http_port", "metrics_port"), 0)
    host, name = "127.0.0.1", "other"
    fields = {"model": stack.config.model, "host": host, "router_id": name, **sources, **free}
    server = RouterServer(RouterConfig(**{**fields, **config}))  # type: ignore[arg-type]
    await server.start()
    client = AsyncClient(f"{host}:{server.grpc_port}")
    try:
        other = Routed(server, client)
        await other.until(1, "pdserve_workers", role="decode", state="ready")
        yield other
    finally:
        await client.close()
        await server.stop(1.0)


@contextlib.asynccontextmanager
async def attached_worker(stack: RunningStack, name: str) -> AsyncIterator[WorkerClient]:
    """Attach to a worker as a router does, for requests as engines take them."""
    (worker,) = [worker for worker in stack.workers if worker.name == name]
    is_ready = asyncio.Event()

    def look() -> None:
        if client.is_ready:
            is_ready.set()

    client = WorkerClient(
        f"127.0.0.1:{worker.port}",
        role=WorkerRole[name.split("-")[0].upper()],
        model=stack.served_model,
        router_id="other",
        on_change=look,
        runtime=Runtime(),
    )
    client.start()
    try:
        await asyncio.wait_for(is_ready.wait(), READY_TIMEOUT_S)
        yield client
    finally:
        await client.close()


StartStack = Callable[..., "contextlib.AbstractContextManager[RunningStack]"]
StartRouter = Callable[..., "contextlib.AbstractAsyncContextManager[Routed]"]
