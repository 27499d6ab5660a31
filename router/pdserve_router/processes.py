"""Several router processes on the same ports (`--workers`), kept running by their parent."""

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from pdserve_common.processes.lifecycle import die_with_parent
from pdserve_common.processes.restarts import MAX_RESTARTS, WINDOW_S, Restarts
from pdserve_router.config import RouterConfig

logger = logging.getLogger(__name__)

_STOP = (signal.SIGTERM, signal.SIGINT)
# What a router that cannot start ends with: it would not start the next time either.
_CANNOT_START = (1, 2)
_POLL_S = 0.25


def run_processes(config: RouterConfig, run: Callable[[RouterConfig], None]) -> int:
    """Run `config.workers` routers, which share ports and nothing else, until SIGTERM or SIGINT;
    return the exit status. `run` gets the config of one, in a process of its own. Must be called
    before there are threads. Raises OSError if a port is taken; in a process of its own what `run`
    raises.
    """
    for port in (config.http_port, config.grpc_port):
        _check_free(config.host, port)
    return _Processes([config.of_process(index) for index in range(config.workers)], run).watch()


class _Processes:
    def __init__(self, configs: list[RouterConfig], run: Callable[[RouterConfig], None]) -> None:
        self._configs = configs
        self._run = run
        self._restarts = [Restarts() for _ in configs]
        # Those that run, by process id.
        self._indexes: dict[int, int] = {}
        self._is_stopping = False
        self._status = 0

    def watch(self) -> int:
        # They wait until they are asked for; to the first process of a container too.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
        for index in range(len(self._configs)):
            self._start(index)
        while self._indexes or not self._is_stopping:
            if signal.sigtimedwait(_STOP, _POLL_S) is not None:
                self._stop()
            self._reap()
            self._start_those_due()
        return self._status

    def _start(self, index: int) -> None:
        self._restarts[index].started()
        # A copy of this process, which has no threads and no event loop yet.
        pid = os.fork()
        if pid == 0:
            self._become(self._configs[index])
        self._indexes[pid] = index

    def _become(self, config: RouterConfig) -> NoReturn:
        """What ends it goes up to the interpreter, as if there had been no parent."""
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
        self._run(config)
        sys.exit(0)

    def _stop(self) -> None:
        """Have all drain; they end by themselves, as bounded as a drain is."""
        self._is_stopping = True
        for pid in self._indexes:
            os.kill(pid, signal.SIGTERM)

    def _reap(self) -> None:
        for pid in list(self._indexes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._on_end(self._indexes.pop(pid), os.waitstatus_to_exitcode(status))

    def _on_end(self, index: int, code: int) -> None:
        if self._is_stopping:
            self._status = self._status or abs(code)
            return
        name = self._configs[index].router_id
        pause_s = None if code in _CANNOT_START else self._restarts[index].plan()
        if pause_s is None:
            logger.error(
                "%s ended with %d; it is not started again (at most %d times in %g s), all end",
                *(name, code, MAX_RESTARTS, WINDOW_S),
            )
            self._status = 1
            self._stop()
        else:
            logger.error("%s ended with %d; it is started again in %g s", name, code, pause_s)

    def _start_those_due(self) -> None:
        for index, restarts in enumerate(self._restarts):
            if restarts.is_due and not self._is_stopping:
                self._start(index)


def _check_free(host: str, port: int) -> None:
    """Among processes that share a port the system splits what comes: nobody else may be there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
