"""Starts a router and its services as processes, watches them, and stops them in order.

Services are started by module name and never imported: the client needs neither torch nor an
engine.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve_client import die_with_parent
from pdserve_client.config import StackConfig
from pdserve_common.config import ENV_PREFIX
from pdserve_common.model_files.model_folder import model_name, pools
from pdserve_common.processes.cores import (
    cpu_limit,
    format_cores,
    parse_cores,
    share_cores,
    usable_cores,
)
from pdserve_common.processes.restarts import MAX_RESTARTS, WINDOW_S, Restarts
from pdserve_common.rpc.addresses import join_address
from pdserve_common.rpc.channels import open_blocking_channel
from pdserve_common.rpc.tls import Tls, TlsConfig

ROLES = ("prefill", "decode")
POLL_S = 0.1
# What a process has for its end beside its drain, before it is killed: a router for the last
# answers to be read and connections to be cut, a worker for streams to end and its engine to close,
# both for a collector of spans that does not answer.
END_MARGIN_S = 15.0
# So much of a service's log is shown when it is given up, and so much is read for that.
NUM_LAST_MESSAGES = 8
MAX_TAIL_BYTES = 64 * 1024
# Below the range that outgoing connections take their ports from: one that is free now will not be
# taken by a connection before its service binds it.
FREE_PORTS = range(15000, 32000)


class StackError(Exception):
    """The stack cannot start or has lost a process; the message says what to do."""


@dataclass(slots=True)
class ServiceProcess:
    """One process of the stack."""

    name: str
    module: str
    port: int
    metrics_port: int
    flags: list[str]
    log_path: Path
    process: "subprocess.Popen[bytes] | None" = field(default=None)
    was_ready: bool = field(default=False)
    restarts: Restarts = field(default_factory=Restarts)

    def start(self, *, keeps_log: bool = False) -> None:
        with self.log_path.open("ab" if keeps_log else "wb") as log:
            self.process = self._launch(log, _services_environment())

    def _launch(self, log: BinaryIO, env: dict[str, str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())),
                *(sys.executable, "-m", self.module, *self.flags),
            ],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C goes to us alone: we stop the router first, so that nothing is cut off.
            start_new_session=True,
        )

    def exit_status(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    def last_message(self) -> str:
        """Return the newest line of its log, for people."""
        return next(iter(self.last_messages(1)), "starting")

    def last_messages(self, count: int = NUM_LAST_MESSAGES) -> list[str]:
        """Return the newest lines of its log, the oldest first, for people."""
        if not self.log_path.exists():
            return []
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - MAX_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return [_message(line) for line in lines if line.strip()][-count:]


def _message(line: str) -> str:
    # Not all that a process writes is an entry of its log.
    with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):
        return str(json.loads(line)["msg"])
    return line.strip()


class Stack:
    """A running stack; use as a context manager."""

    service_type: type[ServiceProcess] = ServiceProcess

    def __init__(self, config: StackConfig) -> None:
        _check_model(config)
        self.config = config = _with_roles(config)
        self.tls = config.load_tls()
        log_dir = Path(config.log_dir)
        log_dir.mkdir(parents=True, exist_ok=True)
        num_workers = _num_services(config)
        taken: set[int] = set()
        (self.grpc_port,) = _ports(config.host, "grpc_port", config.grpc_port, 1, taken)
        (self.http_port,) = _ports(config.host, "http_port", config.http_port, 1, taken)
        ports = _ports(config.host, "worker_port", config.worker_port, num_workers, taken)
        metrics_ports = _ports(
            config.host, "metrics_port", config.metrics_port, num_workers + 1, taken
        )
        self._cores = _share_cores(config)
        places = [(role, i) for role in ROLES for i in range(config.num_services(role))]
        self.workers = [
            self._worker(*place, port, metrics_port, cores, log_dir)
            for place, port, metrics_port, cores in zip(
                places, ports, metrics_ports[1:], self._cores, strict=True
            )
        ]
        self.router = self._router(metrics_ports[0], log_dir)
        self.processes = [*self.workers, self.router]

    @property
    def grpc_address(self) -> str:
        return join_address(self.config.host, self.grpc_port)

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.config.served_model_name or model_name(self.config.model)

    @property
    def placement(self) -> str | None:
        """Which cores each service runs on, for people; None if they compute on a GPU."""
        if self.config.device != "cpu":
            return None
        if not all(self._cores):
            cores = format_cores(usable_cores())
            return f"all share {cores}, too few for {len(self.workers)} services to have their own"
        return ", ".join(
            f"{worker.name} on {format_cores(cores)}"
            for worker, cores in zip(self.workers, self._cores, strict=True)
        )

    def start(self) -> None:
        """Start all processes at once; they find each other."""
        for process in self.processes:
            process.start()

    def wait_until_ready(self, check: Callable[[], None] | None = None) -> Iterator[dict[str, str]]:
        """Yield the state of every process that is not ready, until all are. `check` looks at
        processes that have ended, in place of `check_alive`. Raises StackError.
        """
        deadline = time.monotonic() + self.config.ready_timeout_s
        waiting = list(self.processes)
        while waiting:
            (check or self.check_alive)()
            for process in waiting:
                process.was_ready = self._is_serving(process)
            waiting = [process for process in waiting if not process.was_ready]
            yield {process.name: process.last_message() for process in waiting}
            if time.monotonic() > deadline:
                names = ", ".join(process.name for process in waiting)
                raise StackError(
                    f"not ready after {self.config.ready_timeout_s:g} s: {names}; "
                    f"see {self.config.log_dir}/*.log or raise --ready-timeout-s"
                )
            if waiting:
                time.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raise StackError if a process has ended."""
        for process in self.processes:
            if process.exit_status() is not None:
                raise StackError(_how_it_ended(process, "", "see its last lines"))

    def restart_ended(self) -> Iterator[str]:
        """Start again what has ended, on the same ports, after a pause; do not wait for it. Yield a
        line for each that has ended. Raises StackError for one that was never ready, and one that
        ends too often.
        """
        for process in self.processes:
            if process.exit_status() is None:
                continue
            if not process.restarts.is_planned:
                yield _plan_restart(process)
            elif process.restarts.is_due:
                process.start(keeps_log=True)
                process.restarts.started()

    def stop(self) -> None:
        """Router first, so that open streams end, then decode and prefill services; kill what
        hangs.
        """
        for group in ([self.router], self.workers):
            for process in group:
                if process.exit_status() is None and process.process is not None:
                    process.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + self.config.drain_timeout_s + END_MARGIN_S
            for process in group:
                if process.process is None:
                    continue
                try:
                    process.process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.process.kill()
                    process.process.wait()

    def kill(self) -> None:
        """End all processes at once, with what they are at."""
        running = [process.process for process in self.processes if process.process is not None]
        for process in running:
            process.kill()
        for process in running:
            process.wait()

    def __enter__(self) -> "Stack":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _is_serving(self, process: ServiceProcess) -> bool:
        return _is_serving(join_address(self.config.host, process.port), self.tls)

    def _worker(
        self,
        role: str,
        number: int,
        port: int,
        metrics_port: int,
        cores: tuple[int, ...],
        log_dir: Path,
    ) -> ServiceProcess:
        config, name = self.config, f"{role}-{number}"
        group_size = config.num_ranks_of_group(role)
        flags = {
            "engine-id": name,
            "host": config.host,
            "port": port,
            "metrics-port": metrics_port,
            "model": config.model,
            "served-model-name": config.served_model_name,
            "device": config.device,
            "dtype": config.dtype,
            "quantization": config.quantization,
            "runner": config.runner,
            "convert": config.convert,
            "lora": ",".join(config.lora) or None,
            "lora-root": config.lora_root,
            "lora-hub": config.lora_hub,
            "max-loras": config.max_loras,
            "max-lora-rank": config.max_lora_rank,
            **{name.replace("_", "-"): n for name, n in config.parallel_sizes(role).items()},
            "data-parallel-size": group_size,
            "data-parallel-rank": number % group_size,
            "engine-process": config.engine_process,
            "cpu-cores": format_cores(cores) or None,
            "num-threads": config.num_threads or _default_num_threads(config, cores),
            "max-model-len": config.max_model_len,
            "kv-cache-memory-mib": config.kv_cache_memory_mib,
            "kv-offload-host-bytes": config.kv_offload_host_bytes or None,
            "kv-offload-disk-path": config.kv_offload_disk_path
            and str(Path(config.kv_offload_disk_path) / name),
            "kv-offload-disk-bytes": config.kv_offload_disk_bytes or None,
            "max-num-seqs": config.max_num_seqs,
            "max-num-batched-tokens": config.max_num_batched_tokens,
            "require-transport": config.require_transport,
            "drain-timeout-s": config.drain_timeout_s,
            "otlp-traces-endpoint": config.otlp_traces_endpoint,
            "log-level": config.log_level,
            **_tls_flags(config),
        }
        return self.service_type(
            name, f"pdserve_{role}", port, metrics_port, _flags(flags), log_dir / f"{name}.log"
        )

    def _router(self, metrics_port: int, log_dir: Path) -> ServiceProcess:
        config = self.config
        addresses = {
            role: ",".join(
                join_address(config.host, worker.port)
                for worker in self.workers
                if worker.name.startswith(role)
            )
            for role in ROLES
        }
        flags = {
            "host": config.host,
            "grpc-port": self.grpc_port,
            "http-port": self.http_port,
            "metrics-port": metrics_port,
            "prefill": addresses["prefill"] or None,
            "decode": addresses["decode"] or None,
            "model": config.model,
            "served-model-name": config.served_model_name,
            "require-disaggregation": config.require_disaggregation,
            "require-transport": config.require_transport,
            "api-keys-file": config.api_keys_file,
            "lora-updates": config.lora_updates,
            "lora-scale-out-requests": config.lora_scale_out_requests,
            "drain-timeout-s": config.drain_timeout_s,
            "otlp-traces-endpoint": config.otlp_traces_endpoint,
            "log-level": config.log_level,
            **_tls_flags(config),
        }
        return self.service_type(
            "router",
            "pdserve_router",
            self.grpc_port,
            metrics_port,
            _flags(flags),
            log_dir / "router.log",
        )


def _check_model(config: StackConfig) -> None:
    if not (Path(config.model) / "config.json").is_file():
        raise StackError(
            f"no model at {config.model!r}: it has no config.json; pass --model DIR, or "
            "OWNER/NAME on the Hugging Face hub"
        )


def _with_roles(config: StackConfig) -> StackConfig:
    """Return the same without decode services if its model pools, which prefill services do alone.
    Raises StackError if there are no services for the model.
    """
    is_pooling = pools(config.model) if config.runner is None else config.runner == "pooling"
    if is_pooling:
        config = dataclasses.replace(config, decode=0)
    role = "prefill" if is_pooling else "decode"
    if not getattr(config, role):
        does = "pools" if is_pooling else "generates"
        raise StackError(f"{role} is 0, must be at least 1 for a model that {does}")
    return config


def _plan_restart(process: ServiceProcess) -> str:
    """Return what is said of it. Raises StackError if it is not to be started again."""
    if not process.was_ready:
        hint = "correct what its last lines say and start again"
        raise StackError(_how_it_ended(process, " before it was ready", hint))
    pause_s = process.restarts.plan()
    num_ends, minutes = process.restarts.num_in_window, f"{WINDOW_S / 60:g} minutes"
    if pause_s is None:
        hint = "correct what its last lines say, or leave restarts to others with --no-restart"
        raise StackError(_how_it_ended(process, f", {num_ends} times in {minutes}", hint))
    return (
        f"{process.name} ended with {_status_text(process)}, starting it again in {pause_s:g} s: "
        f"restart {num_ends} of {MAX_RESTARTS} in {minutes} (log: {process.log_path})"
    )


def _how_it_ended(process: ServiceProcess, when: str, hint: str) -> str:
    messages = "".join(f"\n    {message}" for message in process.last_messages())
    return (
        f"{process.name} ended with {_status_text(process)}{when}: {hint} "
        f"(log: {process.log_path}):{messages}"
    )


def _status_text(process: ServiceProcess) -> str:
    status = process.exit_status() or 0
    if status == -signal.SIGKILL:
        return "SIGKILL (by the kernel mostly for want of memory)"
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


def _share_cores(config: StackConfig) -> list[tuple[int, ...]]:
    """Return each service's own cores; none if there are too few, or they compute on a GPU.

    Raises StackError for cores that are not there, and if those asked for are too few.
    """
    num_workers = _num_services(config)
    if config.device != "cpu":
        return [()] * num_workers
    usable = usable_cores()
    cores = usable if config.cpu_cores is None else frozenset(parse_cores(config.cpu_cores))
    if missing := cores - usable:
        raise StackError(
            f"cpu_cores has {format_cores(missing)}, must be among {format_cores(usable)}"
        )
    threads = max(config.num_threads, config.num_ranks("prefill"), config.num_ranks("decode"))
    shares = share_cores(cores, num_workers, min_size=threads)
    if shares is None and config.cpu_cores is not None:
        raise StackError(
            f"cpu_cores is {config.cpu_cores}, too few for {num_workers} services of {threads} "
            "cores each; pass more, or none to let them share"
        )
    return shares or [()] * num_workers


def _num_services(config: StackConfig) -> int:
    return sum(map(config.num_services, ROLES))


def _default_num_threads(config: StackConfig, cores: tuple[int, ...]) -> int:
    """One for each of a service's cores, but no more than its part of the container's CPU limit.

    That limits time, not which cores it is spent on: shares of cores stay as large as they are.
    """
    num_workers = _num_services(config)
    num_threads, limit = len(cores) or len(usable_cores()) // num_workers, cpu_limit()
    if limit is not None:
        num_threads = min(num_threads, int(limit / num_workers))
    return max(1, num_threads)


def _tls_flags(config: TlsConfig) -> dict[str, object]:
    names = (field.name for field in dataclasses.fields(TlsConfig))
    return {name.replace("_", "-"): getattr(config, name) for name in names}


def _services_environment() -> dict[str, str]:
    """Ours without the stack's settings: a service is told those of its own as flags."""
    ours = {ENV_PREFIX + field.name.upper() for field in dataclasses.fields(StackConfig)}
    return {name: value for name, value in os.environ.items() if name not in ours}


def _flags(values: dict[str, object]) -> list[str]:
    """None and False are left out, True is a flag without a value."""
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in values.items()
        if value is not None and value is not False
    ]


def _ports(host: str, flag: str, first: int, count: int, taken: set[int]) -> list[int]:
    """Return `count` free ports, from `first` on or, if that is 0, any that are not in `taken`, and
    add them to it. Raises StackError.
    """
    if first:
        ports = list(range(first, first + count))
        for port in ports:
            if (problem := _bind_problem(host, port)) is not None:
                raise StackError(
                    f"cannot use {host}:{port}: {problem}; stop what listens there "
                    f"or pass --{flag.replace('_', '-')}"
                )
    else:
        candidates = random.sample(FREE_PORTS, len(FREE_PORTS))
        free = (p for p in candidates if p not in taken and _bind_problem(host, p) is None)
        ports = list(itertools.islice(free, count))
    taken.update(ports)
    return ports


def _bind_problem(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            return error.strerror
    return None


def _is_serving(address: str, tls: Tls | None) -> bool:
    with open_blocking_channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
