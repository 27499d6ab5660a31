"""The processes of an executor: one thread starts them and reads what they answer to calls."""

import logging
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from pdserve_common.observability import defects
from pdserve_common.processes.calls import Failed, ProtocolError
from pdserve_engine.core.executor import Pending
from pdserve_engine.executor import messages
from pdserve_engine.executor.messages import Message, TransportEvent
from pdserve_engine.executor.rank_process import RankProcess
from pdserve_engine.executor.step_sockets import StepSockets
from pdserve_engine.grammar.native import CompiledGrammar

logger = logging.getLogger(__name__)

# The others fail right behind a rank that has failed, if it is the step's fault.
FAILURE_GRACE_S = 5.0
# How often the thread looks at what takes too long.
TICK_S = 1.0

# Called as on_event(rank, event), on the reading thread.
OnEvent = Callable[[int, TransportEvent], None]


@dataclass(slots=True, eq=False)
class _Pending:
    """What was asked and not answered by all. Guarded by the lock of the ranks."""

    future: "Future[list[Any]]"
    ranks: Sequence[int]
    # By rank.
    answers: dict[int, Message] = field(default_factory=dict)
    # When the first rank failed.
    failed_at: float | None = None


class StepAnswers:
    """What comes of that which all ranks answer behind steps. Implements core.executor.Pending."""

    def __init__(
        self,
        future: "Future[list[Any]]",
        read_until: Callable[["Future[list[Any]]", float | None], None],
        take: Callable[[list[Any]], Any],
    ) -> None:
        """`take` makes it of the answers."""
        self._future = future
        self._read_until = read_until
        self._take = take

    def result(self, timeout: float | None = None) -> Any:
        """See Pending; `timeout` is how long no rank may say anything."""
        self._read_until(self._future, timeout)
        return self._take(self._future.result(0))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `result`."""
        self._read_until(self._future, timeout)
        return self._future.exception(0)


class RankSupervisor:
    """Any thread may ask and tell them something, at once or behind steps. One thread reads their
    answers to what is behind steps. What is asked is over when all who were asked have answered;
    one that is gone, or that fails alone, is the end of all of them (`failure`).
    """

    def __init__(
        self,
        commands: Sequence[tuple[str, Sequence[int]]],
        on_event: OnEvent,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a process for each of `commands`: the cores it is to stay on, and the descriptors
        that it inherits. Raises OSError if one cannot be started.
        """
        self.failure: str | None = None
        self._on_event = on_event
        self._clock = clock
        self._codec = messages.make_codec(_no_grammar)
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._next_number = 1
        self._is_closing = False
        self._processes: list[RankProcess] = []
        started: Future[None] = Future()
        # Processes end with the thread that has started them.
        self._thread = threading.Thread(
            target=self._run, args=(commands, started), name="ranks", daemon=True
        )
        self._thread.start()
        started.result()
        self._steps = StepSockets([process.steps for process in self._processes], self._codec)

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def ask(self, *asked: Message, ranks: Sequence[int] | None = None) -> "Future[list[Any]]":
        """Send all, or those of `ranks`, the same message, or each its own. The future holds their
        answers, or the exception that all of them have raised.
        """
        future: Future[list[Any]] = Future()
        self._begin(self._send, asked, ranks, future)
        return future

    def tell(self, message: Message, ranks: Sequence[int] | None = None) -> None:
        """Send what has no answer. Nothing happens if they are lost."""
        self._begin(self._send, [message], ranks, None)

    def ask_behind_steps(
        self, message: Message, take: Callable[[list[Any]], Any] = list
    ) -> Pending[Any]:
        """Ask all for a step, or for what is to come behind those in flight; `take` makes the
        result of their answers.
        """
        future: Future[list[Any]] = Future()
        self._begin(self._send_behind_steps, [message], None, future)
        return StepAnswers(future, self._read_until, take)

    def tell_behind_steps(self, message: Message) -> None:
        """Tell all, behind the steps in flight, what has no answer. Nothing happens if they are
        lost.
        """
        self._begin(self._send_behind_steps, [message], None, None)

    def close(self, timeout_s: float) -> None:
        """Wait so long for the processes to end, which were told to, and kill those that do not."""
        self._is_closing = True
        deadline = self._clock() + timeout_s
        for process in self._processes:
            process.end(max(0.0, deadline - self._clock()))
            process.close()
        self._thread.join(timeout_s)

    def expect_end(self) -> None:
        """From now on a process that ends is none that is lost."""
        self._is_closing = True

    def kill(self, reason: str) -> None:
        """End all of them now."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
            pending, self._pending = list(self._pending.values()), {}
        if not self._is_closing:
            logger.error("%s", reason)
        for each in pending:
            each.future.set_exception(RuntimeError(reason))
        for process in self._processes:
            with defects.contained("ranks", "the end of a rank, which ends with the engine"):
                process.kill()

    def _begin(
        self,
        send: Callable[[int, bytes], None],
        asked: Sequence[Message],
        ranks: Sequence[int] | None,
        future: "Future[list[Any]] | None",
    ) -> None:
        """`future` is None if nobody answers."""
        if ranks is None:
            ranks = range(len(self._processes))
        with self._lock:
            if self.failure is not None:
                if future is not None:
                    future.set_exception(RuntimeError(self.failure))
                return
            number = self._next_number
            self._next_number += 1
            frames = [self._codec.encode(message, number) for message in asked]
            if len(frames) == 1:
                frames *= len(ranks)
            if future is not None:
                self._pending[number] = _Pending(future, ranks)
            try:
                for rank, frame in zip(ranks, frames, strict=True):
                    send(rank, frame)
            except OSError as error:
                reason = f"rank {rank} takes nothing any more: {error}"
            else:
                return
        self.kill(reason)

    def _send(self, rank: int, frame: bytes) -> None:
        self._processes[rank].calls.send_frame(frame)

    def _send_behind_steps(self, rank: int, frame: bytes) -> None:
        self._steps.send(rank, frame)

    def _read_until(self, future: "Future[list[Any]]", timeout_s: float | None) -> None:
        """Read what ranks say of steps until that is there, or none says anything for so long. Ends
        when they are lost, too.
        """
        while not future.done():
            ranks = self._steps.wait(timeout_s)
            if not ranks:
                return
            for rank in ranks:
                if not self._take_in(self._processes[rank], self._steps.receive(rank)):
                    wait([future], timeout_s)  # whoever has noticed ends all that is pending
                    return

    # ---- the thread

    def _run(self, commands: Sequence[tuple[str, Sequence[int]]], started: "Future[None]") -> None:
        try:
            for rank, (cores, descriptors) in enumerate(commands):
                self._processes.append(RankProcess(rank, cores, descriptors, self._codec))
            started.set_result(None)
        except BaseException as error:  # whoever starts them waits for this thread
            self.kill(f"a rank cannot be started: {error}")
            started.set_exception(error)
            return
        try:
            self._read_all()
        except BaseException as error:  # nobody would hear of anything any more
            defects.record("ranks", error, "this engine")
            self.kill(f"the thread that reads what the ranks say has died: {error!r}")

    def _read_all(self) -> None:
        """Until all ranks are gone."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.calls.socket, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select(TICK_S):
                    if not self._take_in(key.data, key.data.calls.receive()):
                        selector.unregister(key.fileobj)
                self._check_failures()

    def _take_in(self, process: RankProcess, said: Iterable[tuple[Message, int]]) -> bool:
        """Take in what a rank says; False if it is gone."""
        try:
            for message, number in said:
                if isinstance(message, messages.TransportEvent):
                    self._on_event(process.rank, message)
                else:
                    self._on_answer(process.rank, message, number)
        except (OSError, ProtocolError) as error:
            if not self._is_closing:
                end = process.describe_end()
                self.kill(f"rank {process.rank} is gone: {f'it {end}' if end else error}")
            return False
        return True

    def _on_answer(self, rank: int, message: Message, number: int) -> None:
        with self._lock:
            pending = self._pending.get(number)
            if pending is None:
                return
            pending.answers[rank] = message
            if isinstance(message, Failed) and pending.failed_at is None:
                pending.failed_at = self._clock()
            if len(pending.answers) < len(pending.ranks):
                return
            del self._pending[number]
        try:
            self._end(pending)
        except BaseException as error:  # whoever waits gets it, too
            if not pending.future.done():
                pending.future.set_exception(RuntimeError(f"an answer cannot be taken: {error!r}"))
            raise

    def _end(self, pending: _Pending) -> None:
        answers = [pending.answers[rank] for rank in pending.ranks]
        failed = _find_failure(pending)
        if failed is None:
            pending.future.set_result(answers)
            return
        rank, failure = failed
        if not all(isinstance(answer, Failed) for answer in answers):
            self.kill(f"rank {rank} has failed where others have not: {failure.error.message}")
        pending.future.set_exception(failure.to_exception())

    def _check_failures(self) -> None:
        """See whether a rank is long in failing with the others."""
        limit = self._clock() - FAILURE_GRACE_S
        with self._lock:
            overdue = [
                pending
                for pending in self._pending.values()
                if pending.failed_at is not None and pending.failed_at < limit
            ]
        for pending in overdue:
            failed = _find_failure(pending)
            assert failed is not None
            rank, failure = failed
            self.kill(f"rank {rank} has failed, others still compute: {failure.error.message}")


def _find_failure(pending: _Pending) -> tuple[int, Failed] | None:
    for rank, answer in sorted(pending.answers.items()):
        if isinstance(answer, Failed):
            return rank, answer
    return None


def _no_grammar(text: str, first_mask_s: float) -> CompiledGrammar:
    raise ProtocolError("a rank has sent a grammar")
