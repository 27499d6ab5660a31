"""Routers and their services as processes that can be killed, stopped, frozen and cut off.

Every process has an address of its own, so that it keeps its ports when it is started again: in a
network namespace, or else one of the loopback's.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.controls import ControlError, Controls
from support.fork_server import Job, fork_service
from support.metrics import scrape
from support.network import CLIENT, Network
from support.waiting import wait_until_stopped

PLUGIN = Path(__file__).parents[1] / "faults" / "plugin"
GRPC_PORT, HTTP_PORT, METRICS_PORT = 15051, 15080, 15090
# Of what has to happen, however busy the machine is.
READY_TIMEOUT_S = 300.0
EXIT_TIMEOUT_S = 60.0
METRICS_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 1.0
POLL_S = 0.05
# Of a worker that cannot go on as it is.
RESTART_CODE = 2
WORKER_FLAGS: Mapping[str, object] = {
    "device": "cpu",
    "engine-process": "inproc",
    "num-threads": 1,
    # Few, so that freed blocks soon have a new owner.
    "num-blocks": 130,
    # Small steps: a prompt of a few hundred tokens comes in several chunks.
    "max-num-batched-tokens": 64,
    "drain-timeout-s": 5.0,
    "poison-freed-blocks": True,
    # P reads from D, too.
    "prefix-pulls": True,
}

_numbers = itertools.count(1)


class ClusterError(Exception):
    """A process has ended, or something has not happened in time; the message says what."""


@dataclass(slots=True, eq=False)
class Member:
    """One process of a cluster, and the ones before it under the same name."""

    name: str
    host: str
    job: Job
    log_path: Path
    freeze_path: Path
    controls: Controls
    process: "subprocess.Popen[bytes] | None" = field(default=None)
    is_stopped: bool = False
    # Or asked to end.
    is_killed: bool = False

    @property
    def address(self) -> str:
        """Where its gRPC server listens."""
        return f"{self.host}:{GRPC_PORT}"

    @property
    def pid(self) -> int:
        """The pid of its running process. Raises ClusterError if there is none."""
        if self.process is None or self.process.poll() is not None:
            raise ClusterError(f"{self.name} is not running")
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process; the log goes on where the last one ended."""
        self.is_stopped = self.is_killed = False
        with self.log_path.open("ab") as log:
            # It ends when this pipe does: with us, whatever happens to us.
            self.process = fork_service(self.job, log=log, has_stdin=True)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.is_killed = self.is_killed or self.is_running
        if self.process is not None:
            self.process.kill()
            self.process.wait(EXIT_TIMEOUT_S)

    def terminate(self) -> None:
        """SIGTERM. Raises ClusterError if it is not running."""
        os.kill(self.pid, signal.SIGTERM)
        self.is_killed = True

    def wait_exit(self, timeout_s: float = EXIT_TIMEOUT_S) -> int:
        """Wait for its end and return its exit status. Raises ClusterError."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{self.name} still runs after {timeout_s:g} s") from None

    def check_exit(self) -> None:
        """Raise ClusterError if it ended by itself, unless it did so to be started again."""
        code = self.process.poll() if self.process is not None else None
        if not self.is_killed and code != RESTART_CODE:
            raise ClusterError(f"{self.name} ended by itself with {code}:\n{self.log_tail()}")

    def log_tail(self, num_bytes: int = 3000) -> str:
        """Return the end of its log."""
        return self.log_path.read_text(errors="replace")[-num_bytes:] if self.process else ""


class Cluster:
    """Processes named router-0, prefill-0, decode-0, ...; use as a context manager.

    All verbs are bounded in time; they raise ClusterError, NetworkError or ControlError.
    """

    def __init__(
        self,
        *,
        model: Path,
        log_dir: Path,
        prefill: int = 2,
        decode: int = 2,
        routers: int = 1,
        transport: str = "shm",
        networks: bool = False,
        flags: Mapping[str, object] | None = None,
        router_flags: Mapping[str, object] | None = None,
        prefill_flags: Mapping[str, object] | None = None,
        decode_flags: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`flags` are added to those of all workers, the others to those of one role, `env` to the
        environment of all processes.
        """
        self._env = env or {}
        self._model = model
        self._log_dir = log_dir
        self._flags = {**WORKER_FLAGS, "require-transport": transport, **(flags or {})}
        self._role_flags = {
            "router": router_flags or {},
            "prefill": prefill_flags or {},
            "decode": decode_flags or {},
        }
        self.workers = [f"prefill-{i}" for i in range(prefill)]
        self.workers += [f"decode-{i}" for i in range(decode)]
        self.routers = [f"router-{i}" for i in range(routers)]
        self._names = [*self.workers, *self.routers]
        self._network = Network(self._names) if networks else None
        self._loopback = f"127.{os.getpid() % 250 + 1}.{next(_numbers) % 250}"
        self._cuts: set[tuple[str, str]] = set()
        self._losses: set[tuple[str, str]] = set()
        self.members: dict[str, Member] = {}

    def __enter__(self) -> "Cluster":
        with contextlib.ExitStack() as stack:
            # Not under a test's folder: a socket's path has at most 107 characters.
            self._folder = Path(tempfile.mkdtemp(prefix="pdsv-"))
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            if self._network is not None:
                stack.enter_context(self._network)
            stack.callback(self._kill_all)
            for name in self._names:
                self.members[name] = self._make_member(name)
                self.members[name].start()
            self.wait_until_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def addresses(self) -> list[str]:
        """Where clients send their requests: of the first router, and of the others."""
        return [self.members[name].address for name in self.routers]

    def of_role(self, role: str) -> list[str]:
        """Return the names of the workers of a role."""
        return [name for name in self.workers if name.startswith(role)]

    def controls(self, name: str) -> Controls:
        """Return what rules the faults inside a worker."""
        return self.members[name].controls

    # ---- faults

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.members[name].kill()

    def terminate(self, name: str) -> None:
        """SIGTERM: a worker drains and ends."""
        self.members[name].terminate()

    def stop(self, name: str) -> None:
        """SIGSTOP, for its engine's process as well if that is another."""
        pid = self.members[name].pid
        children = psutil.Process(pid).children(recursive=True)
        group = (pid, *(child.pid for child in children if os.getpgid(child.pid) == pid))
        os.killpg(pid, signal.SIGSTOP)
        for each in group:
            wait_until_stopped(each)
        self.members[name].is_stopped = True

    def cont(self, name: str) -> None:
        """SIGCONT, for all of it."""
        os.killpg(self.members[name].pid, signal.SIGCONT)
        self.members[name].is_stopped = False

    def restart(self, name: str) -> None:
        """Kill it, if it runs, and start it with the same address and engine id."""
        self.members[name].kill()
        self.members[name].start()

    def freeze_loop(self, name: str, seconds: float) -> None:
        """Let the thread of its event loop sleep; its other threads go on. Returns at once."""
        self.members[name].freeze_path.write_text(str(seconds))
        os.kill(self.members[name].pid, signal.SIGUSR2)

    def partition(self, one: str, other: str) -> None:
        """Drop all packets between two processes, or CLIENT and one, in both directions."""
        self._wires().partition(one, other)
        self._cuts.add((one, other))

    def heal(self, one: str, other: str) -> None:
        """End a partition."""
        self._cuts.discard((one, other))
        self._wires().heal(one, other)

    def loss(self, one: str, other: str, percent: int) -> None:
        """Lose so many of the packets between two processes; 0 ends it."""
        self._wires().loss(one, other, percent)
        self._losses.add((one, other))

    def num_lost(self) -> int:
        """Return how many packets were lost since `loss` was last called."""
        return self._wires().num_lost()

    # ---- between two tests

    def restore(self) -> None:
        """Undo all faults: heal, go on, start what is dead; return when all are ready. Raises
        ClusterError also if a process has ended that nobody has killed.
        """
        for pair in list(self._cuts):
            self.heal(*pair)
        for pair in self._losses:
            self.loss(*pair, 0)
        self._losses.clear()
        for name, member in self.members.items():
            if member.is_stopped and member.is_running:
                self.cont(name)
        for name in self.workers:  # before anybody asks what has gone wrong with them
            with contextlib.suppress(ControlError):  # it is gone, or not there yet
                self.controls(name).reset()
        self.wait_for(self._find_unrestored, timeout_s=READY_TIMEOUT_S)

    def _find_unrestored(self) -> str:
        for member in self.members.values():
            if not member.is_running:
                member.check_exit()
                member.start()
        if doom := next(filter(None, map(self._find_doom, self.workers)), ""):
            return doom
        try:
            return self._find_unready()
        except ClusterError as error:  # it has ended since we looked
            return str(error)

    def _find_doom(self, name: str) -> str:
        with contextlib.suppress(ControlError):  # it begins, or is about to end
            if self.controls(name).counts()["fatal_reads"]:
                return f"{name} is to end by itself"
        return ""

    def wait_until_ready(self) -> None:
        """Wait until all serve and the routers know all workers as ready."""
        self.wait_for(self._find_unready, timeout_s=READY_TIMEOUT_S)

    def wait_for(self, find_wrong: Callable[[], str], *, timeout_s: float) -> None:
        """Wait until `find_wrong` returns "". Raises ClusterError with what it returned last."""
        deadline = time.monotonic() + timeout_s
        while wrong := find_wrong():
            if time.monotonic() > deadline:
                raise ClusterError(f"after {timeout_s:g} s: {wrong}")
            time.sleep(POLL_S)

    def metrics(self, name: str) -> dict[str, float]:
        """Return a process's samples, by name with labels. Raises OSError if it does not answer."""
        url = f"http://{self.members[name].host}:{METRICS_PORT}/metrics"
        return scrape(url, timeout_s=METRICS_TIMEOUT_S)

    def is_serving(self, name: str) -> bool:
        """Return whether its gRPC server says so, within PROBE_TIMEOUT_S."""
        with grpc.insecure_channel(self.members[name].address) as channel:
            try:
                response = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S
                )
            except grpc.RpcError:
                return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def log_tails(self) -> str:
        """Return the ends of all logs, for the message of a failed test."""
        return "\n".join(f"--- {m.name}\n{m.log_tail()}" for m in self.members.values())

    def _wires(self) -> Network:
        if self._network is None:
            raise ClusterError("the cluster was started without networks=True")
        return self._network

    def _find_unready(self) -> str:
        for name, member in self.members.items():
            if not member.is_running:
                raise ClusterError(f"{name} has ended:\n{member.log_tail()}")
            if not self.is_serving(name):
                return f"{name} is not ready:\n{member.log_tail()}"
        return next(filter(None, map(self._find_unknown, self.routers)), "")

    def _find_unknown(self, router: str) -> str:
        try:
            known = self.metrics(router)
        except OSError as error:
            return f"{router}: {error}"
        for role in ("prefill", "decode"):
            sample = f'pdserve_workers{{role="{role}",state="ready"}}'
            if known.get(sample) != len(self.of_role(role)):
                return f"{router}: {sample} is {known.get(sample)}"
        return ""

    def _kill_all(self) -> None:
        for member in self.members.values():
            member.kill()

    def _host(self, name: str) -> str:
        if self._network is not None:
            return self._network.address(name)
        return f"{self._loopback}.{self._names.index(name) + 1}"

    def _make_member(self, name: str) -> Member:
        freeze_path = self._folder / f"{name}.freeze"
        controls = Controls(self._folder / f"{name}.sock")
        flags = self._router_flags(name) if name in self.routers else self._worker_flags(name)
        arguments = [f"--{f}" if value is True else f"--{f}={value}" for f, value in flags.items()]
        path = os.pathsep.join(filter(None, [str(PLUGIN), os.environ.get("PYTHONPATH")]))
        env = {
            **os.environ,
            **self._env,
            "PYTHONPATH": path,
            "PDSERVE_FAULTS_FREEZE": str(freeze_path),
            "FAULTS_SOCKET": str(controls.path),
        }
        namespace = ""
        if self._network is not None:
            namespace = self._network.namespace(name)
            env["UCX_NET_DEVICES"] = "all"  # other tests are kept from these devices
        job = Job(f"pdserve_{name.split('-')[0]}", arguments, env, namespace)
        log_path = self._log_dir / f"{name}.log"
        return Member(name, self._host(name), job, log_path, freeze_path, controls)

    def _common_flags(self, name: str) -> dict[str, object]:
        return {"host": self._host(name), "metrics-port": METRICS_PORT, "model": self._model}

    def _worker_flags(self, name: str) -> dict[str, object]:
        return {
            **self._common_flags(name),
            **self._flags,
            **self._role_flags.get(name.split("-")[0], {}),
            "engine-id": name,
            "port": GRPC_PORT,
        }

    def _router_flags(self, name: str) -> dict[str, object]:
        return {
            **self._common_flags(name),
            # Also the few requests of a test go over every pair.
            "routing-policy": "round_robin",
            **self._role_flags["router"],
            "router-id": name,
            "grpc-port": GRPC_PORT,
            "http-port": HTTP_PORT,
            "prefill": self._addresses("prefill"),
            "decode": self._addresses("decode"),
        }

    def _addresses(self, role: str) -> str:
        return ",".join(f"{self._host(name)}:{GRPC_PORT}" for name in self.of_role(role))


__all__ = ["CLIENT", "Cluster", "ClusterError", "Member"]
