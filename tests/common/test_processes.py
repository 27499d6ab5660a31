"""Child processes: calls over a socket, what comes of those that fail, and how children end."""

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve_common.errors import FailedPreconditionError
from pdserve_common.processes import lifecycle
from pdserve_common.processes.calls import Answer, Call, Failed, Handlers
from pdserve_common.processes.child import ChildProcess, start
from pdserve_common.processes.connection import Connection, answer_calls, receive_one
from pdserve_common.processes.frames import FrameCodec

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Divide(Call[int]):
    dividend: int
    divisor: int


CODEC: FrameCodec[Any] = FrameCodec((Answer, Failed, Divide, bytes))
ERRORS = [ValueError("no"), OSError("no"), FailedPreconditionError("no"), KeyError("no")]


class Calculator:
    errors = iter(ERRORS)

    def divide(self, call: Divide) -> int:
        if call.dividend < 0:
            raise next(self.errors)
        return call.dividend // call.divisor


HANDLERS: Handlers[Calculator] = dict([Divide.handled_by(Calculator.divide)])


@pytest.fixture
def ends() -> Iterator[tuple[Connection[Any], Connection[Any]]]:
    ours, theirs = (Connection(end, CODEC) for end in socket.socketpair())
    with ours.socket, theirs.socket:
        yield ours, theirs


def test_calls_are_answered_in_turn_until_their_caller_is_gone(
    ends: tuple[Connection[Any], Connection[Any]],
) -> None:
    ours, theirs = ends
    thread = threading.Thread(target=answer_calls, args=(theirs, HANDLERS, Calculator()))
    thread.start()
    assert ours.call(Divide(7, 2), TIMEOUT_S) == 3
    for error in ERRORS:
        kind = type(error) if error is not ERRORS[-1] else RuntimeError
        with pytest.raises(kind, match="no") as caught:
            ours.call(Divide(-1, 1), TIMEOUT_S)
        assert type(caught.value) is kind
    with pytest.raises(RuntimeError, match="by zero"):
        ours.call(Divide(1, 0), TIMEOUT_S)
    assert ours.call(Divide(8, 2), TIMEOUT_S) == 4
    ours.socket.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_who_is_silent_or_gone_is_an_os_error(
    ends: tuple[Connection[Any], Connection[Any]],
) -> None:
    ours, theirs = ends
    with pytest.raises(TimeoutError):
        ours.call(Divide(1, 1), 0.01)
    theirs.socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError, match=r"has ended|Broken pipe"):
        ours.call(Divide(1, 1), TIMEOUT_S)


async def test_bytes_are_the_body_of_their_frame(
    ends: tuple[Connection[Any], Connection[Any]],
) -> None:
    ours, theirs = ends
    body = bytes(range(256))
    frame = CODEC.encode(body, 3)
    assert frame == CODEC.header(bytes, len(body), 3) + body
    ours.send_frame(frame)
    theirs.socket.setblocking(False)
    assert await receive_one(theirs.socket, CODEC) == (body, 3)
    ours.socket.close()
    with pytest.raises(ConnectionError):
        await receive_one(theirs.socket, CODEC)


@pytest.mark.parametrize(("divisor", "status"), [(1, 0), (0, 1)])
def test_a_copy_ends_with_what_it_runs(
    divisor: int, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = lifecycle.fork(lambda: 1 // divisor)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
    assert ("ZeroDivisionError" in capfd.readouterr().err) == bool(status)


CHILD = """
import signal, socket, sys
from pdserve_common.processes.lifecycle import be_child, end_now

be_child()
end = socket.socket(fileno=int(sys.argv[1]))
end.send(sys.argv[2].encode())
while (status := end.recv(1)) == b"?":
    signal.raise_signal(signal.SIGTERM)
    end.send(b"!")
end_now(int(status))
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[ChildProcess]:
    (tmp_path / "child_of_tests.py").write_text(CHILD)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    child = ChildProcess("the child", *start("child_of_tests", ["argument"], env=env))
    child.sockets[0].settimeout(TIMEOUT_S)
    assert child.sockets[0].recv(99) == b"argument"
    yield child
    child.close()


def test_a_child_says_how_it_has_ended(child: ChildProcess) -> None:
    (end,) = child.sockets
    end.send(b"?")
    assert end.recv(1) == b"!", "a signal to the group is no end"
    assert child.describe_end() == ""
    end.send(b"3")
    assert child.end(TIMEOUT_S) == 3
    assert child.describe_end() == "ended with status 3"


def test_a_child_that_does_not_end_is_killed(
    child: ChildProcess, caplog: pytest.LogCaptureFixture
) -> None:
    assert child.end(0.01) == -9
    assert "the child does not end and is killed" in caplog.text
    assert child.describe_end() == "was ended by SIGKILL"
