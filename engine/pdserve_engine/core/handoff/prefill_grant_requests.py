"""Prefill's side of the scheduler: requests that will be decoded elsewhere wait for the decode
worker's blocks before they get any here.

A request that holds blocks of prefill never waits for blocks of decode. Otherwise two workers could
each be full of requests that wait for the other one.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from pdserve_common.types.engine import EngineCoreEventType
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv_transfer.ports import NoConnector, ProducerPort
from pdserve_engine.request.request import Request, RequestContainer, RequestStatus
from pdserve_engine.request.request_queue import RequestQueue

# So many requests of each decode worker are asked for ahead, or as many as make up some steps, so
# that prefill does not wait for answers. More would only hold room on decode for nothing.
NUM_ASKED_AHEAD = 2
# Decode answers between its own steps, which may take as long as several of prefill's.
MAX_STEPS_AHEAD = 8
# After so many steps that did not lack requests one less may do.
NUM_STEPS_FILLED = 64


class HeldUp(NamedTuple):
    """What could not start now on an idle prefill worker either."""

    num_requests: int = 0
    num_tokens: int = 0


class _Stopwatch:
    """Adds up the seconds during which something was so, in points of time of one clock."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = None
        self._until = float("-inf")

    @property
    def since(self) -> float | None:
        return self._since

    def total_s(self, at: float) -> float:
        return self._total_s + (max(0.0, at - self._since) if self._since is not None else 0.0)

    def set(self, since: float | None, at: float) -> None:
        """It has been so since then, as far as that has not been counted; None: until `at`."""
        if since is None:
            self._total_s, self._since, self._until = self.total_s(at), None, at
        elif self._since is None:
            self._since = max(since, self._until)


class _Waits:
    """For how long requests of one decode worker could not start because of it.

    Those that it is asked for wait from then on. Those behind them do only if it says that it is
    full: otherwise its answer is on the way while prefill computes others.
    """

    def __init__(self) -> None:
        self._unanswered = _Stopwatch()
        self._full = _Stopwatch()

    def set(self, *, is_unanswered: bool, is_full: bool, at: float) -> None:
        """`is_unanswered`: decode is asked, and nothing that it has granted waits for prefill;
        `is_full`: and has said so, of all the time for which it is asked.
        """
        self._unanswered.set(at if is_unanswered else None, at)
        self._full.set(self._unanswered.since if is_full else None, at)

    def queue(self, request: Request, at: float) -> None:
        request.handoff.held_up_before_s = self._full.total_s(at)

    def ask(self, request: Request, at: float) -> None:
        behind_s = self._full.total_s(at) - request.handoff.held_up_before_s
        request.handoff.held_up_before_s = self._unanswered.total_s(at) - behind_s

    def take_back(self, request: Request, at: float) -> None:
        request.handoff.held_up_before_s = self._full.total_s(at) - self.of_asked_s(request, at)

    def of_asked_s(self, request: Request, at: float) -> float:
        return self._unanswered.total_s(at) - request.handoff.held_up_before_s


class _Ahead:
    """For how many steps requests of one decode worker are asked for ahead: as many as prefill
    computes until decode has answered.
    """

    def __init__(self) -> None:
        self.num_steps = 1
        self._num_filled = 0
        # By one for each of decode's answers, which show that it does.
        self._may_grow = False

    def on_step(self, *, lacks_answers: bool) -> None:
        """A step was planned, with room for requests that decode has not answered yet or
        without.
        """
        if not lacks_answers:
            self._num_filled += 1
            if self._num_filled == NUM_STEPS_FILLED:
                self.num_steps, self._num_filled = max(1, self.num_steps - 1), 0
        elif self._may_grow:
            self.num_steps = min(self.num_steps + 1, MAX_STEPS_AHEAD)
            self._num_filled, self._may_grow = 0, False

    def on_answer(self) -> None:
        self._may_grow = True


class RemoteDecodes(RequestContainer):
    """Requests on their way to another worker: those that may not start yet wait here, by their
    decode. What is done to one that is decoded here does nothing.
    """

    statuses = (RequestStatus.WAITING, RequestStatus.PREEMPTED)

    def __init__(
        self,
        port: ProducerPort | None,
        kv_cache_manager: KVCacheManager,
        waiting: RequestQueue,
        make_queue: Callable[[RequestContainer], RequestQueue],
        step_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        """`waiting` gets those that may start."""
        self.port: ProducerPort = NoConnector() if port is None else port
        self._has_port = port is not None
        self._kv = kv_cache_manager
        self._waiting = waiting
        self._make_queue = make_queue
        self._step_tokens = step_tokens
        self._clock = clock
        self._queues: dict[str, RequestQueue] = {}
        # Asked for and not started. Granted ones may start: their container is `waiting`.
        self._asked: dict[str, dict[Request, None]] = {}
        self._granted: set[Request] = set()
        # Asked for, and decode was full. If it has granted them since, prefill takes them into its
        # next step; those that this has no room for wait for prefill, and are none of these any
        # more.
        self._deferred: set[Request] = set()
        self._waits: dict[str, _Waits] = {}
        self._ahead: dict[str, _Ahead] = {}

    def __len__(self) -> int:
        num_asked = sum(map(len, self._asked.values())) - len(self._granted)
        return num_asked + sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        for asked in self._asked.values():
            yield from (request for request in asked if request not in self._granted)
        for queue in self._queues.values():
            yield from queue

    @property
    def num_tokens(self) -> int:
        """Of the requests that may not start yet."""
        asked = itertools.chain.from_iterable(self._asked.values())
        num_asked = sum(r.num_waiting_tokens for r in asked if r not in self._granted)
        return num_asked + sum(queue.num_tokens for queue in self._queues.values())

    @property
    def num_granted(self) -> int:
        """Those that may start and have not."""
        return len(self._granted)

    @property
    def held_up(self) -> HeldUp:
        """Of the requests that may not start yet, those whose decode has said that it is full, if
        none that it has granted waits for prefill.
        """
        engine_ids = [
            name
            for name, asked in self._asked.items()
            if not self._deferred.isdisjoint(asked) and self._is_unanswered(asked)
        ]
        asked = [r for name in engine_ids for r in self._asked[name] if r not in self._granted]
        queues = [self._queues[name] for name in engine_ids if name in self._queues]
        return HeldUp(
            len(asked) + sum(map(len, queues)),
            sum(r.num_waiting_tokens for r in asked) + sum(queue.num_tokens for queue in queues),
        )

    def can_serve(self, request: Request) -> bool:
        """False: it is to be decoded elsewhere, and this worker cannot hand it over."""
        return self._has_port or not request.do_remote_decode

    def add(self, request: Request) -> bool:
        """Take a new request; False if it is decoded here."""
        if not request.do_remote_decode:
            return False
        self._queue_of(request).insert_request(request)
        self._waits[_engine_id(request)].queue(request, self._clock())
        return True

    def may_start(self, request: Request) -> bool:
        """Does decode still hold its blocks for a request that is about to join the batch?"""
        return not request.do_remote_decode or self.port.on_started(request)

    def start(self, request: Request) -> None:
        """The request has joined the batch: tell decode what was found in the prefix cache."""
        if request.do_remote_decode:
            self._forget(request)
            request.record_event(EngineCoreEventType.KV_SESSION_OPENED)
            self.announce(request)

    def announce(self, request: Request) -> None:
        """Tell decode of blocks that are whole; the step that wrote them is over (rule K2)."""
        if request.do_remote_decode:
            block_ids = self._kv.get_block_ids(request.request_id)
            self.port.on_blocks_computed(request, request.progress.num_finished_tokens, block_ids)

    def fence(self, request: Request) -> None:
        """The request is about to lose its blocks (rule K3)."""
        if request.do_remote_decode:
            self.port.on_preempted(request)

    def prepend(self, request: Request) -> bool:
        """Put a request first that was preempted; it needs a grant again. False if it is decoded
        here.
        """
        if not request.do_remote_decode:
            return False
        self._queue_of(request).prepend_request(request)
        return True

    def request_finished(self, request: Request) -> frozenset[int]:
        """Return those of its blocks that decode may still read."""
        if not request.do_remote_decode:
            return frozenset()
        self._forget(request)
        return self.port.request_finished(request, self._kv.get_block_ids(request.request_id))

    def abort_sessions(self, request_ids: Iterable[str]) -> None:
        """End the sessions of requests that were handed off. Unknown ids are ignored."""
        for request_id in request_ids:
            self.port.abort_session(request_id)

    def ask_next(self) -> None:
        """Have every decode worker reserve blocks for the next ones."""
        requests = [r for engine_id in list(self._queues) for r in self._take_next_of(engine_id)]
        for request in requests:
            self.port.ask(request)

    def on_step(self, *, has_room: bool) -> None:
        """A step was planned, and had room for more or not: ask while it runs for what is to follow
        it.
        """
        self._deferred -= self._granted
        for engine_id, ahead in self._ahead.items():
            asked = self._asked.get(engine_id, {})
            if not self._granted.isdisjoint(asked):
                self._watch(engine_id)
            is_unanswered = self._granted.isdisjoint(asked) and self._deferred.isdisjoint(asked)
            lacks_answers = has_room and bool(asked) and is_unanswered
            # If decode has been asked for all, it need not be asked for more.
            ahead.on_step(lacks_answers=lacks_answers and len(self._queues[engine_id]) > 0)
        self.ask_next()

    def ask_preempted(self) -> None:
        """As `ask_next` while nothing new is started: for those that had been running, however many
        are asked for already.
        """
        preempted = [
            (engine_id, request)
            for engine_id, queue in self._queues.items()
            for request in queue
            if request.status is RequestStatus.PREEMPTED
        ]
        for engine_id, request in preempted:
            self._queues[engine_id].remove_request(request)
            self._note_asked(engine_id, request)
        for _, request in preempted:
            self.port.ask(request)

    def take_back(self, *, even_preempted: bool) -> None:
        """Nothing is started for some time, and decode shall not hold blocks for it: put those that
        have been asked for back into their queues.
        """
        taken = [
            request
            for asked in self._asked.values()
            for request in asked
            if even_preempted or request.status is not RequestStatus.PREEMPTED
        ]
        for request in reversed(taken):
            self._waits[_engine_id(request)].take_back(request, self._clock())
            request.leave()
            self._forget(request)
            self.prepend(request)
        for request in taken:
            self.port.on_preempted(request)

    def defer(self, request: Request) -> None:
        """Decode is full: the request has to wait for it."""
        if request in self._asked.get(_engine_id(request), ()) and request not in self._granted:
            self._deferred.add(request)
            self._watch(_engine_id(request))

    def allow(self, request: Request, granted_time: float) -> None:
        """Decode has reserved blocks, as it has told at `granted_time`: the request may start, if
        it still waits for that.
        """
        is_asked = request in self._asked.get(_engine_id(request), ())
        if not is_asked or request in self._granted:
            return
        self._ahead[_engine_id(request)].on_answer()
        request.left()
        self._waiting.add_request(request)
        if request.first_scheduled_time is None:  # else it was preempted
            held_up_s = self._waits[_engine_id(request)].of_asked_s(request, granted_time)
            request.handoff.decode_queue_s = max(0.0, held_up_s)
        self._granted.add(request)
        # Prefill may have been in the midst of a step: that was no wait for decode.
        self._watch(_engine_id(request), granted_time)

    def forbid(self, request: Request) -> None:
        """Decode has taken them back: the request may not start, if it has not yet."""
        if request not in self._granted:
            return
        self._waiting.remove_request(request)
        request.entered(self)
        self._granted.discard(request)
        self._deferred.add(request)
        self._watch(_engine_id(request))

    def remove_request(self, request: Request) -> None:
        if self._forget(request):
            request.left()
        else:
            self._queues[_engine_id(request)].remove_request(request)

    def _forget(self, request: Request) -> bool:
        """Decode need not answer any more, or has; False if it was not asked."""
        engine_id = _engine_id(request)
        if request not in self._asked.get(engine_id, ()):
            return False
        del self._asked[engine_id][request]
        self._granted.discard(request)
        self._deferred.discard(request)
        self._watch(engine_id)
        return True

    def _note_asked(self, engine_id: str, request: Request) -> None:
        request.entered(self)
        self._waits[engine_id].ask(request, self._clock())
        self._asked.setdefault(engine_id, {})[request] = None
        self._watch(engine_id)

    def _take_next_of(self, engine_id: str) -> Iterator[Request]:
        queue, asked = self._queues[engine_id], self._asked.setdefault(engine_id, {})
        while len(queue) and (queue.peek_request().is_probe or self._may_ask(engine_id)):
            request = queue.pop_request()
            self._note_asked(engine_id, request)
            yield request
        if not len(queue) and not asked:
            for of_engine in (self._queues, self._asked, self._waits, self._ahead):
                del of_engine[engine_id]

    def _may_ask(self, engine_id: str) -> bool:
        ordinary = [request for request in self._asked[engine_id] if not request.is_probe]
        num_tokens = sum(request.num_tokens for request in ordinary)
        max_tokens = self._ahead[engine_id].num_steps * self._step_tokens
        return len(ordinary) < NUM_ASKED_AHEAD or num_tokens < max_tokens

    def _queue_of(self, request: Request) -> RequestQueue:
        engine_id = _engine_id(request)
        if engine_id not in self._queues:
            self._queues[engine_id] = self._make_queue(self)
            self._waits[engine_id] = _Waits()
            self._ahead[engine_id] = _Ahead()
        return self._queues[engine_id]

    def _watch(self, engine_id: str, at: float | None = None) -> None:
        asked = self._asked[engine_id]
        is_unanswered = bool(asked) and self._is_unanswered(asked)
        self._waits[engine_id].set(
            is_unanswered=is_unanswered,
            is_full=is_unanswered and not self._deferred.isdisjoint(asked),
            at=self._clock() if at is None else at,
        )

    def _is_unanswered(self, asked: Collection[Request]) -> bool:
        """Does nothing of it wait for prefill?"""
        return (self._granted - self._deferred).isdisjoint(asked)


def _engine_id(request: Request) -> str:
    params = request.kv_transfer_params
    return params.remote_engine_id if params is not None else ""
