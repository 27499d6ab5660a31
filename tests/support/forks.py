"""A plugin of pytest: `--forks N` runs tests in N processes that are forked once all is collected.

Imports and collection take longer than many a file's tests, and are paid for once.
"""

import atexit
import itertools
import os
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest

from support.run_log import RUN_LOG

# The number of this process, from 0 on; not set in one that runs all tests by itself.
NUMBER = "TESTS_PROCESS"
Files = Sequence[Sequence[pytest.Item]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, metavar="N", help="run files of tests in N processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    num_forks = session.config.getoption("--forks")
    if not num_forks or session.testsfailed or session.config.option.collectonly:
        return None
    files = [list(items) for _, items in itertools.groupby(session.items, lambda item: item.path)]
    forks: list[_Fork] = []
    try:
        for number in range(min(num_forks, len(files))):
            forks.append(_Fork(session, files, number, forks))
        _run(session, files, forks)
    finally:
        for fork in forks:
            fork.kill()
    return True


def _run(session: pytest.Session, files: Files, forks: list["_Fork"]) -> None:
    """Hand out files in their order and report what comes. Raises RuntimeError if a fork died."""
    config = session.config
    left = deque(range(len(files)))
    running = {fork.connection: fork for fork in forks}
    died = []
    while running:
        for ready in wait(list(running)):
            fork = running[ready]  # type: ignore[index]
            try:
                message = fork.connection.recv()
            except EOFError:
                del running[fork.connection]
                if fork.has_ended():
                    continue
                died.append(fork.describe_death())
                config.hook.pytest_runtest_logreport(report=failed(fork.current, died[-1]))
                left.extendleft(fork.not_begun)
                if left:
                    forks.append(_Fork(session, files, len(forks), list(running.values())))
                    running[forks[-1].connection] = forks[-1]
                continue
            if message is None:
                stops = session.shouldfail or session.shouldstop
                fork.hand_out(left.popleft() if left and not stops else None)
            elif isinstance(message, str):
                fork.begin(message)
            else:
                report = config.hook.pytest_report_from_serializable(config=config, data=message)
                config.hook.pytest_runtest_logreport(report=report)
    if died:
        raise RuntimeError("; ".join(died))
    if session.shouldfail:
        raise session.Failed(session.shouldfail)


def failed(test: str, text: str) -> pytest.TestReport:
    """Return the report of a test that could not tell what became of it."""
    location = (test.partition("::")[0], None, test)
    return pytest.TestReport(test, location, {}, "failed", text, "call")


class _Fork:
    """A process of tests, as their parent sees it."""

    def __init__(
        self, session: pytest.Session, files: Files, number: int, others: Sequence["_Fork"]
    ) -> None:
        self.number = number
        # The test that it has begun last.
        self.current = "no test"
        # The files that it was told and has no test begun of: one at most.
        self.not_begun: list[int] = []
        self._files = files
        self.connection, theirs = Pipe()

        def begin() -> NoReturn:
            for connection in (self.connection, *(other.connection for other in others)):
                connection.close()
            os.environ[NUMBER] = str(number)
            _be_fork(session, files, theirs)

        capture: Any = session.config.pluginmanager.getplugin("capturemanager")
        # Its files have one position for all that inherit them.
        capture.stop_global_capturing()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid: int | None = _fork(begin)
        self._status = 0
        theirs.close()
        capture.start_global_capturing()

    def hand_out(self, file: int | None) -> None:
        """Tell it what is next."""
        self.connection.send(file)
        if file is not None:
            self.not_begun.append(file)

    def begin(self, test: str) -> None:
        """It begins a test."""
        self.current = test
        if self.not_begun and test == self._files[self.not_begun[0]][0].nodeid:
            self.not_begun.clear()

    def has_ended(self) -> bool:
        """Wait for its end; return whether it is one that it chose."""
        if self._pid is not None:
            self._status = os.waitpid(self._pid, 0)[1]
            self._pid = None
        return self._status == 0

    def describe_death(self) -> str:
        status = os.waitstatus_to_exitcode(self._status)
        return f"process {self.number} of tests died with status {status} in {self.current}"

    def kill(self) -> None:
        if self._pid is not None:
            os.kill(self._pid, 9)
            self.has_ended()


def _fork(begin: Callable[[], NoReturn]) -> int:
    """Return a child's process id. It goes on in a thread that has computed nothing: of one that
    has, OpenMP takes the helpers to be there still, and waits for them forever.
    """
    pids = []

    def fork() -> None:
        with warnings.catch_warnings():
            # Of the other thread, which only waits.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            begin()
        pids.append(pid)

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return pids[0]


class _Reporter:
    """Tells the parent what becomes of tests."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._connection.send(
            self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )


def _be_fork(session: pytest.Session, files: Files, connection: Connection) -> NoReturn:
    status = 1
    try:
        config = session.config
        for name in ("terminalreporter", RUN_LOG):
            config.pluginmanager.unregister(name=name)
        config.pluginmanager.register(_Reporter(config, connection))
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.start_global_capturing()
        _run_files(session, files, connection)
        capture.stop_global_capturing()
        atexit._run_exitfuncs()  # what tests have started ends
        status = 0
    except BaseException:  # a fork must not go on as its parent would
        traceback.print_exc()
    finally:
        os._exit(status)


def _run_files(session: pytest.Session, files: Files, connection: Connection) -> None:
    def ask() -> Sequence[pytest.Item] | None:
        connection.send(None)
        number = connection.recv()
        return None if number is None else files[number]

    items = ask()
    while items is not None:
        following = None
        for item, behind in zip(items, [*items[1:], None], strict=True):
            connection.send(item.nodeid)
            if behind is None and not session.shouldfail:
                # What both use is kept.
                following = ask()
                behind = following[0] if following is not None else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=behind)
            if session.shouldfail:
                break
        items = following
