"""Which prefill and decode workers may be used together: those that have been seen to."""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pdserve_common.engine_types import EngineInfo, KVTransferStats
from pdserve_common.metrics import RouterMetrics
from pdserve_router.workers.circuit_breaker import CircuitBreaker
from pdserve_router.workers.pair_probe import ProbeFailedError, probe
from pdserve_router.workers.worker_client import WorkerClient

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
MAX_PROBES = 4
# Each worker's proven partners above which others stay unproven: in big pools each proof opens a
# link and exchanges NIXL metadata, and so many partners are enough to choose from.
ENOUGH_PARTNERS = 8
# How long a first proof may keep the router from being ready.
SETTLE_S = 10.0
STATES = ("proven", "unproven", "failed", "mismatched")
# Of EngineInfo; the last one covers what else the KV depends on, the weights among it. That they
# serve the same model is known: workers are used only if it is this router's.
_SAME_FIELDS = (
    "dtype",
    "block_size",
    "vocab_size",
    "kv_transport",
    "kv_compatibility_hash",
)


@dataclass(eq=False, slots=True)
class Pair:
    """One prefill and one decode worker, each at one start of its process."""

    prefill: WorkerClient
    decode: WorkerClient
    epochs: tuple[str, str]
    # Open after a failed proof and after several failed handoffs: its trial is another proof.
    breaker: CircuitBreaker
    # By the pool's clock.
    created_at: float
    # Why these two can never work; empty if they might.
    mismatch: str = ""
    # What was found about the transport, which only a transfer can tell.
    refused_transport: str = ""
    is_proven: bool = False
    is_probing: bool = False

    @property
    def state(self) -> str:
        if self.mismatch:
            return "mismatched"
        if self.breaker.is_open:
            return "failed"
        return "proven" if self.is_proven else "unproven"

    @property
    def is_present(self) -> bool:
        return self.prefill.is_ready and self.decode.is_ready

    @property
    def is_usable(self) -> bool:
        return self.is_present and self.state == "proven"

    def is_settling(self, now: float) -> bool:
        """True while its first proof is still to come."""
        is_first = self.is_present and self.state == "unproven"
        return is_first and now - self.created_at < SETTLE_S

    def __str__(self) -> str:
        return f"{self.prefill.engine_id} and {self.decode.engine_id}"


class Pairs:
    """All pairs of a pool. A pair is used once a real generation has gone over it, at most
    MAX_PROBES at a time, and no longer after failures. When that changes `on_change` is called, and
    has to call `update`.
    """

    def __init__(
        self,
        *,
        require_transport: str,
        metrics: RouterMetrics,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`require_transport` is "any" or what a transfer has to have used."""
        self._require_transport = require_transport
        self._metrics = metrics
        self._on_change = on_change
        self._clock = clock
        self._pairs: dict[tuple[WorkerClient, WorkerClient], Pair] = {}
        # Asked for with each request, and changed only with `update`.
        self._usable: dict[WorkerClient, tuple[WorkerClient, ...]] = {}
        self._probes: set[asyncio.Task[KVTransferStats]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.update((), ())

    @property
    def is_settling(self) -> bool:
        """True while a pair is in its first proof and there is no other to use."""
        now = self._clock()
        return not self.usable() and any(pair.is_settling(now) for pair in self._pairs.values())

    def usable(self) -> Mapping[WorkerClient, tuple[WorkerClient, ...]]:
        """Return for each prefill worker that can be used the decode workers it can be used with,
        both in the order of the pool.
        """
        return self._usable

    def update(self, prefill: Sequence[WorkerClient], decode: Sequence[WorkerClient]) -> None:
        """Take the pool's workers as they are now; a restarted worker's pairs begin anew."""
        self._pairs = {
            (p, d): self._current(p, d)
            for p in prefill
            if p.info is not None
            for d in decode
            if d.info is not None
        }
        for pair in self._pairs.values():
            self._check(pair)
        self._usable = self._find_usable()
        self.advance()

    def report_failure(self, prefill: WorkerClient, decode: WorkerClient) -> None:
        """A handoff between the two failed. If one of them is going or gone that is known, and says
        nothing of the way between them.
        """
        if (pair := self._pairs.get((prefill, decode))) and pair.is_present:
            was_open = pair.breaker.is_open
            pair.breaker.report_failure()
            if pair.breaker.is_open and not was_open:
                logger.warning("handoffs between %s fail: they are not used", pair)
                self._on_change()

    def report_transfer(
        self, prefill: WorkerClient, decode: WorkerClient, stats: KVTransferStats
    ) -> None:
        """A handoff between the two went well. Over another transport than required it is the last:
        their link may have been made anew since the proof.
        """
        pair = self._pairs.get((prefill, decode))
        if pair is None:
            return
        pair.breaker.report_success()
        # Of what D had cached nothing travels.
        if stats.num_blocks and not pair.mismatch and not self._has_right_transport(pair, stats):
            self._on_change()

    def advance(self) -> None:
        """Start the proofs that are due, and come back for those that will be."""
        if not self._is_closed:
            # First: what comes due in between is started, or the timer comes for it.
            self._set_timer()
            while len(self._probes) < MAX_PROBES and (pair := self._next_to_prove()) is not None:
                self._start_probe(pair)
        counts = Counter(pair.state for pair in self._pairs.values())
        for state in STATES:
            self._metrics.pairs.labels(state=state).set(counts[state])

    async def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)

    def _find_usable(self) -> dict[WorkerClient, tuple[WorkerClient, ...]]:
        partners: defaultdict[WorkerClient, list[WorkerClient]] = defaultdict(list)
        for (prefill, decode), pair in self._pairs.items():
            if pair.is_usable:
                partners[prefill].append(decode)
        return {prefill: tuple(decodes) for prefill, decodes in partners.items()}

    def _current(self, prefill: WorkerClient, decode: WorkerClient) -> Pair:
        epochs = (prefill.epoch, decode.epoch)
        pair = self._pairs.get((prefill, decode))
        if pair is not None and pair.epochs == epochs:
            return pair
        breaker = CircuitBreaker(clock=self._clock)
        return Pair(prefill, decode, epochs, breaker, created_at=self._clock())

    def _check(self, pair: Pair) -> None:
        mismatch = self._mismatch(pair)
        if mismatch and mismatch != pair.mismatch:
            logger.warning("%s cannot work together: %s", pair, mismatch)
        pair.mismatch = mismatch

    def _mismatch(self, pair: Pair) -> str:
        assert pair.prefill.info is not None
        assert pair.decode.info is not None
        return _difference(pair.prefill.info, pair.decode.info) or pair.refused_transport

    def _unused(self) -> list[Pair]:
        return [
            pair
            for pair in self._pairs.values()
            if pair.is_present and pair.state in ("unproven", "failed") and not pair.is_probing
        ]

    def _next_to_prove(self) -> Pair | None:
        """First what has never failed, and of that the workers with the fewest partners."""
        partners = self._num_partners()
        wanted = [
            pair
            for pair in self._unused()
            if pair.breaker.retry_in_s == 0
            and min(partners[pair.prefill], partners[pair.decode]) < ENOUGH_PARTNERS
        ]
        return min(
            wanted,
            key=lambda pair: (pair.breaker.is_open, partners[pair.prefill] + partners[pair.decode]),
            default=None,
        )

    def _num_partners(self) -> Counter[WorkerClient]:
        """Count for each worker the pairs that are proven or being proven."""
        count: Counter[WorkerClient] = Counter()
        for pair in self._pairs.values():
            if pair.is_usable or pair.is_probing:
                count.update((pair.prefill, pair.decode))
        return count

    def _start_probe(self, pair: Pair) -> None:
        pair.is_probing = True
        task = asyncio.create_task(
            probe(pair.prefill, pair.decode, timeout_s=PROBE_TIMEOUT_S, clock=self._clock),
            name=f"probe {pair}",
        )
        self._probes.add(task)
        task.add_done_callback(lambda done: self._on_probed(pair, done))

    def _has_right_transport(self, pair: Pair, stats: KVTransferStats) -> bool:
        """False if the pair is refused from now on."""
        if self._require_transport in ("any", stats.transport):
            return True
        pair.refused_transport = (
            f"KV travels over {stats.transport}, --require-transport is {self._require_transport}"
        )
        self._check(pair)
        return False

    def _on_proven(self, pair: Pair, stats: KVTransferStats) -> None:
        if not self._has_right_transport(pair, stats):
            return
        logger.info("%s work together, over %s", pair, stats.transport)
        pair.is_proven = True
        pair.breaker.close()

    def _on_probed(self, pair: Pair, task: "asyncio.Task[KVTransferStats]") -> None:
        self._probes.discard(task)
        pair.is_probing = False
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            self._on_proven(pair, task.result())
        else:
            is_expected = isinstance(error, ProbeFailedError)
            logger.warning(
                "%s are not used: %s", pair, error, exc_info=None if is_expected else error
            )
            pair.breaker.open()
        # At once: what can be used is found only there.
        self._on_change()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waits = [wait for pair in self._unused() if (wait := pair.breaker.retry_in_s) > 0]
        if waits:
            self._timer = asyncio.get_running_loop().call_later(min(waits), self.advance)


def _difference(prefill: EngineInfo, decode: EngineInfo) -> str:
    return ", ".join(
        f"{name} is {getattr(prefill, name)} and {getattr(decode, name)}"
        for name in _SAME_FIELDS
        if getattr(prefill, name) != getattr(decode, name)
    )
