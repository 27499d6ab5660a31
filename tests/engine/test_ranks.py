"""What an executor makes of what its ranks say, or do not say: the ranks here are threads that
answer as they are told to.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, ClassVar

import pytest

from pdserve_common.processes.calls import Answer, Failed
from pdserve_common.processes.connection import Connection
from pdserve_common.processes.frames import FrameCodec
from pdserve_engine.core.executor import Pending
from pdserve_engine.executor import messages, rank_supervisor
from pdserve_engine.executor.messages import Message
from pdserve_engine.executor.rank_supervisor import RankSupervisor
from pdserve_engine.runner.rank_calls import SleepRank
from support.call_sites import CallSite, UnexpectedError, call_sites, each_site, fault_at
from support.clock import Clock
from support.waiting import wait_until

TIMEOUT_S = 20.0
NO_GRAMMAR: Any = None

# What a rank answers to a message; None: nothing.
Script = Callable[[Message], "Message | bytes | None"]


class FakeProcess:
    """In place of a RankProcess: a thread at the other end."""

    all: ClassVar[list["FakeProcess"]] = []
    scripts: ClassVar[Sequence[Script]] = ()

    def __init__(self, rank: int, cores: str, descriptors: Sequence[int], codec: Any) -> None:
        self.rank, self.pid = rank, 0
        self._codec: FrameCodec[Message] = codec
        ours, calls = socket.socketpair()
        self.calls = Connection(ours, codec)
        self.steps, steps = socket.socketpair()
        self._theirs = (calls, steps)
        self.is_killed = False
        self.taken: list[Message] = []
        FakeProcess.all.append(self)
        for theirs in self._theirs:
            threading.Thread(target=self._run, args=(theirs,), daemon=True).start()

    def _run(self, theirs: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was killed
            self._serve(theirs)

    def _serve(self, theirs: socket.socket) -> None:
        reader = messages.make_codec(NO_GRAMMAR).reader()
        while data := theirs.recv(1 << 16):
            for message, number in reader.feed(data):
                self.taken.append(message)
                answer = self.scripts[self.rank](message)
                if isinstance(answer, bytes):
                    theirs.sendall(answer)
                elif answer is not None:
                    theirs.sendall(self._codec.encode(answer, number))

    def kill(self) -> None:
        self.is_killed = True
        for theirs in self._theirs:
            theirs.shutdown(socket.SHUT_RDWR)

    def describe_end(self) -> str:
        return "was ended by SIGKILL" if self.is_killed else ""

    def end(self, timeout_s: float) -> None:
        self.kill()

    def close(self) -> None:
        pass


@pytest.fixture
def make_ranks(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> Iterator[Callable[..., RankSupervisor]]:
    FakeProcess.all = []
    made: list[RankSupervisor] = []
    events: list[tuple[int, messages.TransportEvent]] = []
    monkeypatch.setattr(rank_supervisor, "RankProcess", FakeProcess)
    monkeypatch.setattr(rank_supervisor, "TICK_S", 0.01)

    def make(*scripts: Script) -> RankSupervisor:
        FakeProcess.scripts = scripts
        made.append(
            RankSupervisor(
                [("", ())] * len(scripts), lambda *event: events.append(event), clock=clock
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.expect_end()
        each.close(TIMEOUT_S)


def says(value: object) -> Script:
    return lambda message: Answer.of(value)


def fails(message: Message) -> Message:
    return Failed.of(RuntimeError("out of luck"))


def is_silent(message: Message) -> None:
    return None


ASKED = messages.DetermineNumBlocks()
# How ranks may be asked: at once, or behind steps, when the thread that waits reads itself.
Ask = Callable[[RankSupervisor, Message], Pending[list[Any]]]
both_ways = pytest.mark.parametrize("ask", [RankSupervisor.ask, RankSupervisor.ask_behind_steps])


def test_an_answer_is_there_when_all_have_answered(
    make_ranks: Callable[..., RankSupervisor],
) -> None:
    may_answer = threading.Event()

    def answers_late(message: Message) -> Message:
        assert may_answer.wait(TIMEOUT_S)
        return Answer.of(2)

    both = make_ranks(says(1), answers_late)
    asked = both.ask(ASKED)
    assert both.ask(ASKED, ranks=[0]).result(TIMEOUT_S) == [Answer.of(1)]
    assert not asked.done()
    may_answer.set()
    assert [answer.result_of(ASKED) for answer in asked.result(TIMEOUT_S)] == [1, 2]


def test_each_may_be_asked_something_of_its_own(make_ranks: Callable[..., RankSupervisor]) -> None:
    both = make_ranks(says(True), says(True))
    both.ask(SleepRank(1), SleepRank(2)).result(TIMEOUT_S)
    both.tell(messages.PollSoon(), ranks=[1])
    wait_until(lambda: FakeProcess.all[1].taken == [SleepRank(2), messages.PollSoon()])
    assert FakeProcess.all[0].taken == [SleepRank(1)]


def test_what_comes_behind_steps_is_there_when_all_have_answered(
    make_ranks: Callable[..., RankSupervisor],
) -> None:
    may_answer = threading.Event()

    def answers_late(message: Message) -> Message | None:
        assert may_answer.wait(TIMEOUT_S)
        return None if isinstance(message, messages.Recover) else Answer.of(2)

    both = make_ranks(says(1), answers_late)
    asked = [both.ask_behind_steps(ASKED) for _ in range(2)]
    both.tell_behind_steps(messages.Recover())
    with pytest.raises(FutureTimeoutError):
        asked[1].result(0.1)
    may_answer.set()
    # In any order.
    for each in reversed(asked):
        assert [answer.result_of(ASKED) for answer in each.result(TIMEOUT_S)] == [1, 2]
    wait_until(lambda: FakeProcess.all[1].taken == [ASKED, ASKED, messages.Recover()])


def test_large_messages_pass_while_no_side_reads(make_ranks: Callable[..., RankSupervisor]) -> None:
    """A rank that computes does not read, and neither does an engine that plans."""
    large = "x" * (4 << 20)
    may_answer = threading.Event()

    def answers_late(message: Message) -> Message:
        assert may_answer.wait(TIMEOUT_S)
        return Answer.of(large)

    both = make_ranks(answers_late, says(large))
    asked = [both.ask_behind_steps(messages.RemovePeer(large)) for _ in range(3)]
    may_answer.set()
    for each in asked:
        assert each.result(TIMEOUT_S) == [Answer.of(large)] * 2
    assert FakeProcess.all[0].taken == [messages.RemovePeer(large)] * 3


@both_ways
def test_what_fails_in_all_ranks_is_no_loss(
    make_ranks: Callable[..., RankSupervisor], ask: Ask
) -> None:
    both = make_ranks(fails, fails)
    for _ in range(2):
        assert str(ask(both, ASKED).exception(TIMEOUT_S)) == "out of luck"
    assert both.failure is None


@both_ways
def test_a_rank_that_fails_alone_ends_all(
    make_ranks: Callable[..., RankSupervisor], ask: Ask
) -> None:
    both = make_ranks(says(1), fails)
    assert ask(both, ASKED).exception(TIMEOUT_S) is not None
    wait_until(lambda: both.failure is not None)
    assert both.failure == "rank 1 has failed where others have not: out of luck"
    assert all(process.is_killed for process in FakeProcess.all)
    assert str(ask(both, ASKED).exception(TIMEOUT_S)) == both.failure


@both_ways
def test_so_does_one_that_fails_while_others_compute(
    make_ranks: Callable[..., RankSupervisor], ask: Ask, clock: Clock
) -> None:
    both = make_ranks(fails, is_silent)
    asked = ask(both, ASKED)
    errors: list[BaseException | None] = []
    waiting = threading.Thread(target=lambda: errors.append(asked.exception(TIMEOUT_S)))
    waiting.start()
    wait_until(lambda: len(FakeProcess.all[0].taken) == 1)
    assert not errors

    def is_lost() -> bool:
        clock.now_s += rank_supervisor.FAILURE_GRACE_S / 4  # its answer may still be on its way
        return both.failure is not None

    wait_until(is_lost)
    assert both.failure == "rank 0 has failed, others still compute: out of luck"
    waiting.join(TIMEOUT_S)
    assert [str(error) for error in errors] == [both.failure]


@both_ways
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"\xff" * 64, "rank 1 is gone: a frame of type"),
        (messages.make_codec(NO_GRAMMAR).encode(Answer(b""))[:9], None),
    ],
)
def test_garbage_is_a_loss_and_half_a_frame_is_waited_for(
    answer: bytes, reason: str | None, make_ranks: Callable[..., RankSupervisor], ask: Ask
) -> None:
    both = make_ranks(says(1), lambda message: answer)
    asked = ask(both, ASKED)
    if reason is None:
        with pytest.raises(FutureTimeoutError):
            asked.result(0.1)
        return
    assert str(asked.exception(TIMEOUT_S)).startswith(reason)


def test_a_rank_that_is_gone_ends_all(make_ranks: Callable[..., RankSupervisor]) -> None:
    both = make_ranks(is_silent, is_silent)
    asked = [both.ask(ASKED), both.ask_behind_steps(ASKED)]
    FakeProcess.all[1].kill()
    reasons = {str(future.exception(TIMEOUT_S)) for future in asked}
    assert reasons == {"rank 1 is gone: it was ended by SIGKILL"}
    assert FakeProcess.all[0].is_killed
    both.tell(messages.PollSoon())  # nothing happens
    both.tell_behind_steps(messages.Recover())


def test_an_end_that_is_expected_is_no_loss(make_ranks: Callable[..., RankSupervisor]) -> None:
    both = make_ranks(says(1), says(1))
    both.expect_end()
    FakeProcess.all[0].kill()
    FakeProcess.all[1].kill()
    both.close(TIMEOUT_S)
    assert both.failure is None


READING = call_sites(
    RankSupervisor, "_run", "_read_all", "_take_in", "_on_answer", "_end", "_check_failures", "kill"
)


@each_site(READING)
def test_a_defect_of_the_thread_that_reads_ends_all_and_whoever_waits(
    make_ranks: Callable[..., RankSupervisor], site: CallSite
) -> None:
    with fault_at(site) as fault:
        try:
            both = make_ranks(says(1), fails)
        except UnexpectedError:
            return
        asked = [both.ask(ASKED, ranks=[0]), both.ask(ASKED)]
        errors = [each.exception(TIMEOUT_S) for each in asked]
        wait_until(lambda: both.failure)  # as one fails alone, in any case
    assert isinstance(errors[1], RuntimeError) or fault.has_raised
    with pytest.raises(RuntimeError):
        both.ask(ASKED).result(TIMEOUT_S)
