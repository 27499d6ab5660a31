"""The stack that is fuzzed, and what has to hold of it after every input, and in the end."""

import contextlib
import functools
import http.client
import json
import operator
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from support.stack import RunningStack

# Of what has to happen, however busy the machine is.
ANSWER_S = 60.0
SETTLE_S = 60.0
NUM_LOOKS = 4
# Descriptors that gRPC and libraries open now and then and keep, as for a new thread's wake-ups.
MAX_MORE_DESCRIPTORS = 16
# What allocators and caches keep of the largest messages at once.
MAX_MORE_RSS_MIB = 300.0
MAX_MODEL_LEN = 128
# The one that is served from the start, and one that lies beside it.
ADAPTERS = ("tuned", "other")
# Long enough for several blocks, which later honest requests find again where they were.
HONEST_BODY = {
    "model": "pdserve-tiny",
    "prompt": "Once upon a time there was a little fox who lived in a forest and liked to read.",
    "max_tokens": 4,
    "temperature": 0,
    "logprobs": 1,
}
_ERROR_LEVELS = ("ERROR", "CRITICAL")
# What gRPC itself logs of a server's answer that is none (the only one that a worker asks is
# another worker, and one that answers so is for people to look after), and of a caller that left
# just when its status was sent.
_OF_GRPC = ("Exception deserializing message!", "ExecuteBatchError raised in core")


class Resources(NamedTuple):
    """What a process has."""

    descriptors: int
    rss_mib: float
    tasks: Counter[str]


class System:
    """One router, one P and one D, as processes."""

    def __init__(self, stack: RunningStack, tasks_folder: Path) -> None:
        self.stack = stack
        self._tasks_folder = tasks_folder
        self._log_offsets = dict.fromkeys((p.name for p in stack.processes), 0)
        self._honest_answer = self._ask_honestly()
        self._resources = {name: self._settled_resources_of(name) for name in self._log_offsets}

    @property
    def router_address(self) -> str:
        return self.stack.grpc_address

    def worker_address(self, name: str) -> str:
        (worker,) = [worker for worker in self.stack.workers if worker.name == name]
        return f"127.0.0.1:{worker.port}"

    @contextlib.contextmanager
    def example(self) -> Iterator[None]:
        """Around one input. What a former one has killed is started again, so that a failing input
        can be made smaller.
        """
        if any(process.exit_status() is not None for process in self.stack.processes):
            self._start_again()
        try:
            yield
        except AssertionError as error:
            # With what was logged of it, which is not to be the next input's.
            raise AssertionError("\n".join([str(error), *self.new_errors()])) from error
        self.check()

    def check(self) -> None:
        """All processes live, none has logged an error, and an honest client gets its answer."""
        dead = [p.name for p in self.stack.processes if p.exit_status() is not None]
        assert not dead, f"{dead} ended: {self._log_tails(dead)}"
        errors = self.new_errors()
        assert not errors, "\n".join(errors)
        answer = self._ask_honestly()
        assert answer == self._honest_answer, f"{answer}, not {self._honest_answer}"

    def new_errors(self) -> list[str]:
        """Return what processes have logged as errors since the last call."""
        return [
            f"{process.name}: {line}"
            for process in self.stack.processes
            for line in self._new_lines(process.name, process.log_path)
            if _is_error(line)
        ]

    def assert_nothing_left(self) -> None:
        """Blocks, requests, sessions, descriptors and tasks come back, and memory is bounded."""
        self.stack.wait_until_whole()
        self.stack.assert_idle()
        for name in self._log_offsets:
            _until(lambda name=name: self._left_of(name), f"left in {name}")
        self.check()

    # ---- one process

    def _left_of(self, name: str) -> str:
        before, now = self._resources[name], self._resources_of(name)
        if now.descriptors > before.descriptors + MAX_MORE_DESCRIPTORS:
            return f"{now.descriptors} descriptors, there were {before.descriptors}"
        if now.rss_mib > before.rss_mib + MAX_MORE_RSS_MIB:
            return f"{now.rss_mib:.0f} MiB, there were {before.rss_mib:.0f}"
        if more := now.tasks - before.tasks:
            return f"tasks {dict(more)}"
        return ""

    def _settled_resources_of(self, name: str) -> Resources:
        """Of several looks: a loop that waits anew is without its task for a moment."""
        looks = [self._resources_of(name) for _ in range(NUM_LOOKS)]
        tasks = functools.reduce(operator.or_, (look.tasks for look in looks))
        return looks[-1]._replace(tasks=tasks)

    def _resources_of(self, name: str) -> Resources:
        process = psutil.Process(self.stack.process(name).pid)
        rss_mib = process.memory_info().rss / 2**20
        return Resources(process.num_fds(), rss_mib, self._tasks_of(name))

    def _tasks_of(self, name: str) -> Counter[str]:
        report = self._tasks_folder / str(self.stack.process(name).pid)
        report.unlink(missing_ok=True)
        self.stack.send_signal(name, signal.SIGUSR1)
        _until(lambda: "" if report.exists() else "nothing", f"tasks of {name}")
        return Counter(report.read_text().splitlines())

    def _new_lines(self, name: str, path: Path) -> list[str]:
        """Return whole lines that nobody has read."""
        with path.open("rb") as log:
            log.seek(self._log_offsets[name])
            data = log.read()
        data = data[: data.rfind(b"\n") + 1]
        self._log_offsets[name] += len(data)
        return data.decode(errors="replace").splitlines()

    def _log_tails(self, names: list[str]) -> str:
        return "\n".join(self.stack.log(name)[-2000:] for name in names)

    def _start_again(self) -> None:
        for process in self.stack.processes:
            if process.exit_status() is not None:
                process.start()
                self._log_offsets[process.name] = 0
        self.stack.wait_until_whole()
        for name in self._log_offsets:
            self._resources[name] = self._settled_resources_of(name)
        self.new_errors()

    # ---- the honest client

    def _ask_honestly(self) -> object:
        status, answer = self._post("/v1/completions", HONEST_BODY)
        return (status, answer.get("choices") or answer)

    def _post(self, path: str, body: object) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.stack.http_port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())


class PoolingSystem(System):
    """One router and one P with a model that pools."""

    def _ask_honestly(self) -> object:
        status, answer = self._post("/v1/embeddings", {"input": HONEST_BODY["prompt"]})
        return (status, answer.get("data") or answer)


def _is_error(line: str) -> bool:
    """Logs are lines of JSON; what is none comes from libraries, or from an end nobody expected."""
    try:
        entry = json.loads(line)
        return entry["level"] in _ERROR_LEVELS and not entry["msg"].startswith(_OF_GRPC)
    except (ValueError, TypeError, KeyError):
        return line.startswith(("Traceback", "Fatal Python error"))


def _until(problem: Callable[[], str], what: str) -> None:
    """Wait until there is no problem."""
    deadline = time.monotonic() + SETTLE_S
    while found := problem():
        assert time.monotonic() < deadline, f"{what}: {found}"
        time.sleep(0.05)
