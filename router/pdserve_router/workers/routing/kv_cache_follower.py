"""What one worker says of its cache, applied to the router's index."""

import logging
from collections.abc import Callable
from typing import Generic

from pdserve_common.types.kv import KVCacheEvents
from pdserve_router.workers.routing.prefix_index import PrefixIndex, WorkerT

logger = logging.getLogger(__name__)


class KVCacheFollower(Generic[WorkerT]):
    """Applies a worker's events in their order. Behind a gap nothing is known of the worker until
    it has begun to tell all again.
    """

    def __init__(
        self, index: PrefixIndex[WorkerT], worker: WorkerT, ask_again: Callable[[], None]
    ) -> None:
        """`ask_again` asks the worker for all that it has cached."""
        self._index = index
        self._metrics = index.metrics
        self._worker = worker
        self._ask_again = ask_again
        self._next_seq = 1
        self._is_synced = False

    def on_stream(self) -> None:
        """A stream begins. What was known holds until the worker begins to tell."""
        self._next_seq = 1
        self._is_synced = False

    def on_lost(self) -> None:
        """The worker is gone."""
        self._is_synced = False
        self._index.forget(self._worker)

    def apply(self, events: KVCacheEvents) -> None:
        """The worker has said something."""
        expected, self._next_seq = self._next_seq, events.seq + 1
        if events.seq != expected:
            self._on_gap(expected, events.seq)
        elif events.all_blocks_cleared:
            self._is_synced = True
            self._index.cleared(self._worker)
            self._metrics.cleared.inc()
        if self._is_synced:
            self._index.removed(self._worker, events.blocks_removed)
            self._index.stored(self._worker, events.blocks_stored)
            self._metrics.removed.inc(len(events.blocks_removed))
            self._metrics.stored.inc(len(events.blocks_stored))

    def _on_gap(self, expected: int, seq: int) -> None:
        logger.warning(
            "worker %s: KV cache events %d came, %d were expected: asking for all again",
            self._worker,
            seq,
            expected,
        )
        self._metrics.resyncs.inc()
        self.on_lost()
        self._ask_again()
