"""Forks processes of services out of ones that have imported what these need: an import of torch
takes several times the CPU of all the rest of a small worker's start.

A fork is a child of who asked for it, as one that was started by `subprocess.Popen`, and does what
that does. It has the fork server's command line, though; its name is the end of its module's.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from pdserve_common.processes import child
from pdserve_common.processes.child import spawn as spawn_anew
from pdserve_common.processes.lifecycle import die_with_parent

SERVICE_MODULES = ("pdserve_prefill.__main__", "pdserve_decode.__main__")
# Torch is with the engine.
WORKER_MODULES = (
    *SERVICE_MODULES,
    "pdserve_engine.clients.__main__",
    "pdserve_engine.clients.child",
    "pdserve_engine.assemble",
    "pdserve_engine.executor.build",
    "pdserve_engine.executor.rank",
    "pdserve_engine.executor.rank_server",
)
ROUTER_MODULES = (
    "pdserve_router.__main__",
    "pdserve_router.server",
    "pdserve_router.api.large_requests.child",
)
# Of processes that services start.
CHILDREN = {
    "pdserve_engine.clients": WORKER_MODULES,
    "pdserve_engine.executor.rank": WORKER_MODULES,
    "pdserve_router.api.large_requests.child": ROUTER_MODULES,
}
PID = struct.Struct("!q")
MAX_JOB_BYTES = 1 << 17
MAX_FDS = 64
# For a fork server's imports, however busy the machine is, and for its end.
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 60.0
# Where `ip netns` keeps network namespaces.
NAMESPACES = Path("/run/netns")
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_SLAVE, MS_REC, MNT_DETACH = 1 << 19, 1 << 14, 2
# Of a process, to Linux.
MAX_NAME_LEN = 15
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36


class Job(NamedTuple):
    """What a fork becomes."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    # Of networks; "" is ours.
    namespace: str = ""
    # A service has a session of its own, and ends with its parent.
    is_service: bool = True
    # Which descriptors it inherits.
    fds: Sequence[int] = (0, 1, 2)

    @property
    def imported(self) -> Sequence[str]:
        """The modules that a service finds imported."""
        if self.module == "pdserve_router":
            return ROUTER_MODULES
        return SERVICE_MODULES if self._has_engine_process else WORKER_MODULES

    @property
    def has_ranks(self) -> bool:
        """Does a service start ranks?"""
        flags = ("--tensor-parallel-size", "--pipeline-parallel-size")
        given = [each for each in self.arguments if each.startswith(flags)]
        is_parallel = any(not each.endswith("=1") for each in given)
        return self.is_service and is_parallel and not self._has_engine_process

    @property
    def _has_engine_process(self) -> bool:
        return "--engine-process=subprocess" in self.arguments


class ForkedProcess(subprocess.Popen[bytes]):
    """A process as if it had been started by `subprocess.Popen`."""

    def __init__(self, job: Job, server: "_Server", fds: Sequence[int]) -> None:
        """Its descriptors are copies of `fds`, in the order of the job's."""
        self.args = [job.module, *job.arguments]
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._lock = threading.Lock()
        self.pid = server.fork(job, fds)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        if self.returncode is not None and self.stdin is not None:
            self.stdin.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            # If another thread has waited for it meanwhile, it has ended as well.
            with contextlib.suppress(ProcessLookupError):
                ended = os.pidfd_open(self.pid)
                try:
                    if not select.select([ended], [], [], timeout)[0]:
                        raise subprocess.TimeoutExpired(self.args, timeout or 0)
                finally:
                    os.close(ended)
        status = self.poll()
        assert status is not None
        return status


def fork_service(job: Job, *, log: IO[bytes], has_stdin: bool = False) -> ForkedProcess:
    """Start a service, which writes to `log`. With `has_stdin` there is a pipe to it, else it reads
    nothing.
    """
    if has_stdin:
        stdin, ours = os.pipe()
    else:
        stdin, ours = os.open(os.devnull, os.O_RDONLY), None
    try:
        process = ForkedProcess(job, _server(job.imported), (stdin, log.fileno(), log.fileno()))
    finally:
        os.close(stdin)
    if ours is not None:
        process.stdin = os.fdopen(ours, "wb", buffering=0)
    return process


def spawn(
    module: str,
    arguments: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Do what `child.spawn` does, in the processes of tests themselves."""
    return _spawn(_server, module, arguments, pass_fds=pass_fds, env=env)


def prepare(module: str) -> None:
    """Start what `spawn` forks a module from, for tests that count children and descriptors."""
    _server(CHILDREN[module])


def _spawn(
    server_of: "Callable[[Sequence[str]], _Server]",
    module: str,
    arguments: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    if module not in CHILDREN:
        return spawn_anew(module, arguments, pass_fds=pass_fds, env=env)
    environment = dict(os.environ if env is None else env)
    job = Job(module, arguments, environment, is_service=False, fds=(0, 1, 2, *pass_fds))
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        return ForkedProcess(job, server_of(CHILDREN[module]), (nothing, 1, 2, *pass_fds))
    finally:
        os.close(nothing)


class _Server:
    """A process to fork from, as who asks it sees it. Any thread."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._control.settimeout(START_TIMEOUT_S)
        self._lock = threading.Lock()

    def fork(self, job: Job, fds: Sequence[int]) -> int:
        """Return the pid of a new child of this process."""
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            # The fork's parent ends at once, and so it becomes ours.
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._control, [json.dumps(job).encode()], fds)
                data = self._control.recv(PID.size)
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0)
        assert data, "the fork server has ended"
        return int(PID.unpack(data)[0])

    def close(self) -> None:
        self._control.close()


@functools.cache
def _server(modules: Sequence[str]) -> _Server:
    """Return the one with these modules, which the first who needs it starts."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.fork_server", str(theirs.fileno()), *modules],
            # numpy's BLAS would start a thread at its import.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "OPENBLAS_NUM_THREADS": "1",
            },
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    server = _Server(control)

    def close() -> None:
        """Wait for its end, so that its time is counted as ours."""
        server.close()
        process.wait(END_TIMEOUT_S)

    atexit.register(close)
    return server


# ---- in the fork server


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    modules = tuple(sys.argv[2:])
    if modules == ROUTER_MODULES:
        from pdserve_router.api.large_requests.no_torch import hide_torch

        hide_torch()
    for module in modules:
        importlib.import_module(module)
    # A library's threads would not be there in a fork.
    assert len(os.listdir("/proc/self/task")) == threading.active_count() == 1
    gc.collect()
    gc.freeze()
    _serve(control)


def _serve(control: socket.socket) -> None:
    """Fork for each job until nobody asks any more."""
    # Signals to a group are for who asks.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_JOB_BYTES, MAX_FDS)
        if not data:
            return
        waits, goes = os.pipe()
        pids, tells = os.pipe()
        # The parent of the one that stays ends at once, so that this becomes a child of who asks.
        if (between := os.fork()) == 0:
            if (child := os.fork()) != 0:
                os.write(tells, PID.pack(child))
                os._exit(0)
            for fd in (goes, pids, tells):
                os.close(fd)
            control.close()
            os.read(waits, 1)  # brings nothing, once it is that child
            os.close(waits)
            job = Job(*json.loads(data))
            _inherit(fds, job.fds)
            _become(job)
            sys.exit()
        pid = os.read(pids, PID.size)
        os.waitpid(between, 0)
        for fd in (waits, goes, pids, tells, *fds):
            os.close(fd)
        control.send(pid)


def _inherit(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors these numbers."""
    # None may be overwritten before it is copied.
    above = max((*fds, *numbers)) + 1
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)


def _become(job: Job) -> None:
    """Run the module, as an interpreter does that starts with this environment."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _set_name(job.module[-MAX_NAME_LEN:])
    if job.is_service:
        os.setsid()
        die_with_parent()
    if job.namespace:
        _enter(job.namespace)
    # Kernels tell MKL so when they are imported, which they are already.
    told = {name: value for name, value in os.environ.items() if name == "MKL_CBWR"}
    os.environ.clear()
    os.environ.update({**told, **job.environment})
    if job.has_ranks:
        server = _Server(_fork_server())
        child.spawn = functools.partial(_spawn, lambda modules: server)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    importlib.invalidate_caches()
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    sys.argv = [job.module, *job.arguments]
    # Its imports are what it was imported for.
    for name in (job.module, f"{job.module}.__main__"):
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)


def _set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def _fork_server() -> socket.socket:
    """Fork a server off this process, which is of one thread."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        control.close()
        _set_name("fork-server")
        die_with_parent()
        _serve(theirs)
        os._exit(0)
    theirs.close()
    return control


def _enter(namespace: str) -> None:
    """Do what `ip netns exec` does: /sys shows the devices of the namespace that mounts it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: object) -> None:
        if getattr(libc, function)(*arguments):
            raise OSError(ctypes.get_errno(), function)

    with (NAMESPACES / namespace).open() as file:
        call("setns", file.fileno(), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS)
    call("mount", b"", b"/", None, MS_SLAVE | MS_REC, None)
    call("umount2", b"/sys", MNT_DETACH)
    call("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)


if __name__ == "__main__":
    main()
