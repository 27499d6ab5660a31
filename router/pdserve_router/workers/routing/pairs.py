"""Which prefill and decode workers may be used together: those that have been seen to."""

import asyncio
import heapq
import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import KVTransferStats, WorkerRole
from pdserve_router.workers.circuit_breaker import CircuitBreaker
from pdserve_router.workers.model_limits import answering_role
from pdserve_router.workers.routing.indexed_set import IndexedSet
from pdserve_router.workers.routing.pair_groups import Group, PairGroups, group_of, other_side
from pdserve_router.workers.routing.pair_probe import ProbeFailedError, probe
from pdserve_router.workers.routing.route_table import RouteTable
from pdserve_router.workers.worker import Worker

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
MAX_PROBES = 4
# Each worker's pairs above which no more are drawn for it: in big pools each proof opens a link
# and exchanges NIXL metadata, and so many pairs are enough to choose from.
ENOUGH_PAIRS = 8
# One that fails with so many draws no more: it tries these again.
MAX_DRAWN_PAIRS = 64
# How long a first proof may keep the router from being ready.
SETTLE_S = 10.0
STATES = ("proven", "unproven", "failed", "mismatched")


@dataclass(eq=False, slots=True)
class Pair:
    """One prefill and one decode worker, each at one start of its process."""

    prefill: Worker
    decode: Worker
    # Open after a failed proof and after several failed handoffs: its trial is another proof.
    breaker: CircuitBreaker
    # By the pool's clock.
    created_at: float
    # What was found about the transport, which only a transfer can tell: these can never work.
    refused_transport: str = ""
    is_proven: bool = False
    is_probing: bool = False
    # It waits for its proof.
    is_queued: bool = False
    # As it was counted.
    counted_as: str = ""
    # Comes when another proof is due.
    timer: asyncio.TimerHandle | None = None

    @property
    def state(self) -> str:
        if self.refused_transport:
            return "mismatched"
        if self.breaker.is_open:
            return "failed"
        return "proven" if self.is_proven else "unproven"

    @property
    def is_present(self) -> bool:
        return self.prefill.is_ready and self.decode.is_ready

    def is_settling(self, now: float) -> bool:
        """True while its first proof is still to come."""
        is_first = self.is_present and self.state == "unproven"
        return is_first and now - self.created_at < SETTLE_S

    def __str__(self) -> str:
        return f"{self.prefill.engine_id} and {self.decode.engine_id}"


@dataclass(eq=False, slots=True)
class _Member:
    """What is known of one worker, at one start of its process."""

    group: Group
    epoch: str
    pairs: dict[Worker, Pair] = field(default_factory=dict)
    # Whom it can be used with or is about to be, and whom it may be used with.
    paired: set[Worker] = field(default_factory=set)
    viable: set[Worker] = field(default_factory=set)

    def is_of(self, worker: Worker) -> bool:
        """True if this is what is known of it as it is now."""
        return self.epoch == worker.epoch and self.group == group_of(worker)


class Pairs:
    """Pairs of a pool's workers. Each worker draws others until ENOUGH_PAIRS may work, those
    with the fewest first. A pair is used once a real generation has gone over it, at most
    MAX_PROBES at a time, and no longer after failures: that is what `table` is told. `on_change` is
    called when something has changed by itself.
    """

    def __init__(
        self,
        *,
        require_transport: str,
        metrics: RouterMetrics,
        table: RouteTable,
        on_change: Callable[[], None],
        runtime: Runtime,
    ) -> None:
        """`require_transport` is "any" or what a transfer has to have used."""
        self._require_transport = require_transport
        self._metrics = metrics
        self._table = table
        self._on_change = on_change
        self._runtime = runtime
        self._clock = runtime.now
        self._members: dict[Worker, _Member] = {}
        self._groups = PairGroups()
        # Those that are ready, and of these the ones without enough pairs.
        self._ready: defaultdict[Group, IndexedSet[Worker]] = defaultdict(IndexedSet)
        self._short_of_pairs: defaultdict[Group, dict[Worker, None]] = defaultdict(dict)
        # The workers whose pairs have changed, until `advance`.
        self._touched: dict[Worker, None] = {}
        self._counts: Counter[str] = Counter()
        # What waits for its proof, by what `_urgency` was.
        self._queue: list[tuple[tuple[bool, int], int, Pair]] = []
        self._numbers = itertools.count()
        self._probes: set[asyncio.Task[KVTransferStats]] = set()
        self._is_closed = False
        self._show_counts()

    @property
    def is_settling(self) -> bool:
        """True while a pair is in its first proof and there is no other to use."""
        now = self._clock()
        return not self._table.has_pairs and any(
            pair.is_settling(now)
            for member in self._members.values()
            for pair in member.pairs.values()
        )

    def update(self, worker: Worker, *, is_listed: bool) -> None:
        """Take a worker of the pool as it is now; a restarted one's pairs begin anew, and one whose
        model pools has none. `advance` is to follow.
        """
        info = worker.info
        hands_off = info is not None and answering_role(info) is WorkerRole.DECODE
        is_known = is_listed and hands_off
        member = self._members.get(worker)
        is_same = is_known and member is not None and member.is_of(worker)
        if member is not None and not is_same:
            self._leave(worker, member)
            member = None
        if is_known:
            self._note_worker(worker, member or self._join(worker))

    def report_failure(self, prefill: Worker, decode: Worker) -> None:
        """A handoff between the two failed. If one of them is going or gone that is known, and says
        nothing of the way between them.
        """
        if (pair := self._pair(prefill, decode)) and pair.is_present:
            was_open = pair.breaker.is_open
            pair.breaker.report_failure()
            if pair.breaker.is_open and not was_open:
                logger.warning("handoffs between %s fail: they are not used", pair)
                self._changed(pair)

    def report_transfer(self, prefill: Worker, decode: Worker, stats: KVTransferStats) -> None:
        """A handoff between the two went well. Over another transport than required it is the last:
        their link may have been made anew since the proof.
        """
        pair = self._pair(prefill, decode)
        if pair is None:
            return
        pair.breaker.report_success()
        # What decode had cached does not travel.
        is_seen = stats.num_blocks > 0 and not pair.refused_transport
        if is_seen and not self._has_right_transport(pair, stats):
            self._changed(pair)

    def advance(self) -> None:
        """Draw the pairs that are missing, and start the proofs that are due."""
        self._draw_missing()
        while (
            not self._is_closed
            and len(self._probes) < MAX_PROBES
            and (pair := self._next_to_prove()) is not None
        ):
            self._start_probe(pair)
        self._show_counts()

    async def close(self) -> None:
        self._is_closed = True
        for member in self._members.values():
            for pair in member.pairs.values():
                _cancel_timer(pair)
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)

    # Workers

    def _join(self, worker: Worker) -> _Member:
        member = self._members[worker] = _Member(self._groups.add(worker), worker.epoch)
        return member

    def _leave(self, worker: Worker, member: _Member) -> None:
        for pair in tuple(member.pairs.values()):
            self._drop(pair)
        del self._members[worker]
        self._groups.remove(worker, member.group)
        self._set_ready(worker, member, is_ready=False)
        self._touched.pop(worker, None)

    def _note_worker(self, worker: Worker, member: _Member) -> None:
        was_ready = worker in self._ready[member.group]
        if worker.is_ready == was_ready:
            return
        self._set_ready(worker, member, is_ready=worker.is_ready)
        for other, pair in member.pairs.items():
            self._note(pair)
            self._touched[other] = None
        if worker.is_ready:
            self._touched[worker] = None
            self._touched.update(self._short_of_pairs[other_side(member.group)])

    def _set_ready(self, worker: Worker, member: _Member, *, is_ready: bool) -> None:
        if is_ready:
            self._ready[member.group].add(worker)
        else:
            self._ready[member.group].discard(worker)
            self._short_of_pairs[member.group].pop(worker, None)

    # Pairs

    def _draw_missing(self) -> None:
        while self._touched:
            self._draw_pairs(self._touched.popitem()[0])

    def _draw_pairs(self, worker: Worker) -> None:
        member = self._members.get(worker)
        if member is None or not worker.is_ready:
            return
        num_missing = ENOUGH_PAIRS - len(member.viable)
        if num_missing > 0 and len(member.pairs) < MAX_DRAWN_PAIRS:
            for other in self._undrawn(member, num_missing):
                self._make(worker, other)
        self._queue_again(member)
        if len(member.viable) < ENOUGH_PAIRS:
            self._short_of_pairs[member.group][worker] = None
        else:
            self._short_of_pairs[member.group].pop(worker, None)

    def _undrawn(self, member: _Member, num: int) -> Sequence[Worker]:
        """Return up to `num` workers that it is in no pair with, those that are in the fewest."""
        others = self._ready[other_side(member.group)].items
        if len(others) > 4 * ENOUGH_PAIRS + len(member.pairs):
            others = self._runtime.rng.sample(others, 4 * ENOUGH_PAIRS)
        undrawn = [other for other in others if other not in member.pairs]
        return heapq.nsmallest(num, undrawn, key=lambda other: len(self._members[other].pairs))

    def _queue_again(self, member: _Member) -> None:
        """What failed and was not needed may be now."""
        if len(member.paired) < ENOUGH_PAIRS:
            for pair in member.pairs.values():
                self._enqueue(pair)

    def _make(self, worker: Worker, other: Worker) -> None:
        is_prefill = worker.role is WorkerRole.PREFILL
        prefill, decode = (worker, other) if is_prefill else (other, worker)
        breaker = CircuitBreaker(clock=self._clock)
        pair = Pair(prefill, decode, breaker, created_at=self._clock())
        self._members[prefill].pairs[decode] = self._members[decode].pairs[prefill] = pair
        self._note(pair)
        self._enqueue(pair)

    def _drop(self, pair: Pair) -> None:
        """Forget a pair; its workers may draw others."""
        _cancel_timer(pair)
        self._counts[pair.counted_as] -= 1
        self._table.unlink(pair.prefill, pair.decode)
        for worker, other in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
            member = self._members[worker]
            del member.pairs[other]
            member.paired.discard(other)
            member.viable.discard(other)
            self._touched[worker] = None

    def _pair(self, prefill: Worker, decode: Worker) -> Pair | None:
        member = self._members.get(prefill)
        return member.pairs.get(decode) if member is not None else None

    def _is_current(self, pair: Pair) -> bool:
        return self._pair(pair.prefill, pair.decode) is pair

    def _note(self, pair: Pair) -> None:
        """Keep what is counted of a pair."""
        state, is_present = pair.state, pair.is_present
        if state != pair.counted_as:
            self._counts[pair.counted_as] -= 1
            self._counts[state] += 1
            pair.counted_as = state
            change = self._table.link if state == "proven" else self._table.unlink
            change(pair.prefill, pair.decode)
        is_paired = (is_present and state == "proven") or pair.is_probing
        is_viable = is_present and state in ("proven", "unproven")
        for worker, other in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
            member = self._members[worker]
            if (other in member.paired) != is_paired:
                _toggle(member.paired, other)
                self._touched[worker] = None
            if (other in member.viable) != is_viable:
                _toggle(member.viable, other)
                self._touched[worker] = None

    def _changed(self, pair: Pair) -> None:
        self._note(pair)
        if pair.breaker.is_open:
            self._set_timer(pair)
        for member in self._members_of(pair):
            self._drop_surplus(member)
        self.advance()
        self._on_change()

    # Proofs

    def _enqueue(self, pair: Pair) -> None:
        """Have it proven when its turn comes."""
        is_wanted = pair.is_present and pair.state in ("unproven", "failed")
        if is_wanted and not pair.is_probing and not pair.is_queued:
            if pair.breaker.retry_in_s == 0:
                pair.is_queued = True
                heapq.heappush(self._queue, (self._urgency(pair), next(self._numbers), pair))
            elif pair.timer is None:
                self._set_timer(pair)

    def _urgency(self, pair: Pair) -> tuple[bool, int]:
        """The least goes first: what has never failed, and of that the workers with the fewest
        pairs.
        """
        return pair.breaker.is_open, sum(len(m.paired) for m in self._members_of(pair))

    def _members_of(self, pair: Pair) -> tuple[_Member, _Member]:
        return self._members[pair.prefill], self._members[pair.decode]

    def _next_to_prove(self) -> Pair | None:
        while self._queue:
            urgency, number, pair = heapq.heappop(self._queue)
            if not self._is_current(pair):
                continue
            if urgency < (now := self._urgency(pair)):
                heapq.heappush(self._queue, (now, number, pair))
                continue
            pair.is_queued = False
            if not pair.is_present or pair.state not in ("unproven", "failed"):
                continue
            if not self._is_surplus(pair) and not self._exchange(pair):
                return pair
            self._draw_missing()
        return None

    def _is_surplus(self, pair: Pair) -> bool:
        """True if both workers have enough pairs; one that never failed is forgotten then."""
        is_surplus = all(len(m.paired) >= ENOUGH_PAIRS for m in self._members_of(pair))
        if is_surplus and pair.state == "unproven":
            self._drop(pair)
        return is_surplus

    def _exchange(self, pair: Pair) -> bool:
        """Take another pair in the place of one whose worker has far more pairs than others of
        its role; False if there is none.
        """
        for worker, other in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
            member, full = self._members[worker], self._members[other]
            if pair.state != "unproven" or not self._is_overfull(full):
                continue
            for better in self._undrawn(member, 1):
                if len(self._members[better].paired) < len(full.paired) // 2:
                    self._drop(pair)
                    self._make(worker, better)
                    return True
        return False

    def _is_overfull(self, member: _Member) -> bool:
        num_own = len(self._ready[member.group])
        share = ENOUGH_PAIRS * len(self._ready[other_side(member.group)]) / max(num_own, 1)
        return len(member.paired) > 2 * max(share, ENOUGH_PAIRS)

    def _start_probe(self, pair: Pair) -> None:
        pair.is_probing = True
        self._note(pair)
        task = self._runtime.spawn(
            probe(pair.prefill, pair.decode, timeout_s=PROBE_TIMEOUT_S, runtime=self._runtime),
            name=f"probe {pair}",
        )
        self._probes.add(task)
        task.add_done_callback(lambda done: self._on_probed(pair, done))

    def _on_probed(self, pair: Pair, task: "asyncio.Task[KVTransferStats]") -> None:
        self._probes.discard(task)
        pair.is_probing = False
        if task.cancelled():
            return
        if not self._is_current(pair):
            # One of the two has left or was restarted.
            self.advance()
            return
        if (error := task.exception()) is None:
            self._on_proven(pair, task.result())
        else:
            is_expected = isinstance(error, ProbeFailedError)
            logger.warning(
                "%s are not used: %s", pair, error, exc_info=None if is_expected else error
            )
            pair.breaker.open()
        self._changed(pair)

    def _on_proven(self, pair: Pair, stats: KVTransferStats) -> None:
        if not self._has_right_transport(pair, stats):
            return
        logger.info("%s work together, over %s", pair, stats.transport)
        pair.is_proven = True
        pair.breaker.close()

    def _drop_surplus(self, member: _Member) -> None:
        """Give up a paired worker that far more others have: who came first would have all."""
        if len(member.paired) <= ENOUGH_PAIRS:
            return
        other = max(member.paired, key=lambda each: len(self._members[each].paired))
        pair = member.pairs[other]
        if self._is_overfull(self._members[other]) and not pair.is_probing:
            self._drop(pair)

    def _has_right_transport(self, pair: Pair, stats: KVTransferStats) -> bool:
        """False if the pair is refused from now on."""
        if self._require_transport in ("any", stats.transport):
            return True
        pair.refused_transport = (
            f"KV travels over {stats.transport}, --require-transport is {self._require_transport}"
        )
        logger.warning("%s cannot work together: %s", pair, pair.refused_transport)
        return False

    def _set_timer(self, pair: Pair) -> None:
        _cancel_timer(pair)
        if not self._is_closed:
            retry_in_s = pair.breaker.retry_in_s
            pair.timer = self._runtime.call_later(retry_in_s, self._on_due, pair)

    def _on_due(self, pair: Pair) -> None:
        pair.timer = None
        self._enqueue(pair)
        self.advance()

    def _show_counts(self) -> None:
        num_mismatched = self._groups.num_mismatched()
        for state in STATES:
            num_more = num_mismatched if state == "mismatched" else 0
            self._metrics.pairs.labels(state=state).set(self._counts[state] + num_more)


def _toggle(workers: set[Worker], worker: Worker) -> None:
    workers ^= {worker}


def _cancel_timer(pair: Pair) -> None:
    if pair.timer is not None:
        pair.timer.cancel()
        pair.timer = None
