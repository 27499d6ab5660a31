"""Real stacks: router, prefill and decode services as processes on loopback, NIXL between them."""

import contextlib
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from pdserve_client.config import StackConfig
from pdserve_client.stack import Stack

READY_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 10.0
REATTACH_TIMEOUT_S = 30.0


class RunningStack(Stack):
    """A stack that can say what its processes hold."""

    def metrics(self, name: str) -> dict[str, float]:
        """Return the samples of one process, by name with labels as Prometheus prints them."""
        (process,) = [process for process in self.processes if process.name == name]
        url = f"http://127.0.0.1:{process.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {sample: float(value) for sample, value in samples}

    def worker_names(self) -> list[str]:
        return [worker.name for worker in self.workers]

    def process(self, name: str) -> "subprocess.Popen[bytes]":
        """Return the newest process of that name."""
        (service,) = [service for service in self.processes if service.name == name]
        assert service.process is not None
        return service.process

    def send_signal(self, name: str, signum: int) -> None:
        self.process(name).send_signal(signum)

    def log(self, name: str) -> str:
        """Return what the newest process of that name has logged."""
        (service,) = [service for service in self.processes if service.name == name]
        return service.log_path.read_text()

    def wait_for(self, name: str, sample: str, value: float) -> None:
        """Wait until a process's sample, or its sum over labels, is `value`."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while (found := _value(self.metrics(name), sample)) != value:
            assert time.monotonic() < deadline, f"{name}: {sample} is {found:g}, not {value:g}"
            time.sleep(0.01)

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
        return psutil.Process(self.process(name).pid).memory_info().rss / 2**20

    def _is_whole(self) -> bool:
        config, samples = self.config, self.metrics("router")
        wanted = {
            'pdserve_workers{role="prefill",state="ready"}': config.prefill,
            'pdserve_workers{role="decode",state="ready"}': config.decode,
            'pdserve_worker_pairs{state="proven"}': config.prefill * config.decode,
        }
        return all(samples.get(sample, 0) == value for sample, value in wanted.items())

    def _left_over(self, without: str) -> dict[str, float]:
        left = {}
        for name in set(self.worker_names()) - {without}:
            samples = self.metrics(name)
            for sample in (
                'pdserve_kv_blocks{state="used"}',
                "pdserve_kv_sessions",
                "pdserve_kv_zombie_reads",
                "pdserve_requests_running",
                "pdserve_requests_waiting",
            ):
                if value := _value(samples, sample):
                    left[f"{name} {sample}"] = value
        if in_flight := self.metrics("router")["pdserve_requests_in_flight"]:
            left["router in flight"] = in_flight
        return left


def _value(samples: dict[str, float], name: str) -> float:
    """A sample, or the sum over the labels it has."""
    if name in samples:
        return samples[name]
    return sum(value for sample, value in samples.items() if sample.startswith(name + "{"))


StartStack = Callable[..., "contextlib.AbstractContextManager[RunningStack]"]


@pytest.fixture(scope="session")
def start_stack(tmp_path_factory: pytest.TempPathFactory) -> StartStack:
    """Start a stack on free ports: `with start_stack(model=..., prefill=2) as stack`; `flags` are
    further ones of a worker, by its name.

    On the way out it must be idle, and every process must end with status 0 on SIGTERM, unless the
    test says that it breaks something.
    """

    @contextlib.contextmanager
    def start(
        *,
        model: Path | str,
        is_to_survive: bool = True,
        flags: Mapping[str, Sequence[str]] = {},
        **fields: object,
    ) -> Iterator[RunningStack]:
        defaults: dict[str, object] = {
            "grpc_port": 0,
            "http_port": 0,
            "metrics_port": 0,
            "worker_port": 0,
            "kv_cache_memory_mib": 32,
            "ready_timeout_s": READY_TIMEOUT_S,
            "drain_timeout_s": 10.0,
            "log_dir": str(tmp_path_factory.mktemp("logs")),
        }
        stack = RunningStack(StackConfig(model=str(model), **{**defaults, **fields}))  # type: ignore[arg-type]
        for worker in stack.workers:
            worker.flags += flags.get(worker.name, ())
        try:
            stack.start()
            for _ in stack.wait_until_ready():
                pass
            yield stack
            if is_to_survive:
                stack.check_alive()
                stack.assert_idle()
        except BaseException:  # it goes on; the logs say why
            for process in stack.processes:
                print(f"--- {process.name}\n{process.log_path.read_text()[-4000:]}")
            raise
        finally:
            stack.stop()
        statuses = {process.name: process.exit_status() for process in stack.processes}
        assert not is_to_survive or set(statuses.values()) == {0}, statuses

    return start
