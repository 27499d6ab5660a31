"""Between the scheduler and the model runner: steps whose results have not come in, what they keep
from being used again, and what the next one tells.
"""

import itertools
from collections import deque
from collections.abc import Iterable

from pdserve_engine.core.features.encoder_cache_manager import EncoderCacheManager
from pdserve_engine.core.step_plan import StepPlan
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.request.progress import ScheduledTokens
from pdserve_engine.request.request import Request
from pdserve_engine.request.sched_output import SchedulerOutput


class InFlight:
    """Steps that were planned and whose results have not come in, oldest first."""

    def __init__(
        self, kv_cache_manager: KVCacheManager, encoder_cache: EncoderCacheManager
    ) -> None:
        self._kv = kv_cache_manager
        self._encoder_cache = encoder_cache
        self._steps: deque[dict[Request, ScheduledTokens]] = deque()
        self._num_planned = 0
        # Blocks of ended requests, and the step that may still use them.
        self._deferred_block_ids: deque[tuple[int, list[int]]] = deque()
        # What the model runner still has to hear of.
        self.finished_req_ids: set[str] = set()
        self.preempted_req_ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, plan: StepPlan, num_common_prefix_blocks: tuple[int, ...]) -> SchedulerOutput:
        """Make a plan the newest step in flight."""
        output = plan.build(
            finished_req_ids=frozenset(self.finished_req_ids),
            preempted_req_ids=frozenset(self.preempted_req_ids),
            num_common_prefix_blocks=num_common_prefix_blocks,
            encoder=self._encoder_cache.take_step(),
        )
        self.finished_req_ids.clear()
        self.preempted_req_ids.clear()
        for request, scheduled in plan.scheduled.items():
            request.progress.started(scheduled)
        self._encoder_cache.free_computed()
        self._steps.append(plan.scheduled)
        self._num_planned += 1
        return output

    def pop(self) -> dict[Request, ScheduledTokens]:
        """Return the oldest step, which is over. Then apply its results, then free_deferred."""
        step = self._steps.popleft()
        for request, scheduled in step.items():
            request.progress.computed(scheduled.num_tokens)
        return step

    def discard(self, steps: Iterable[SchedulerOutput]) -> list[Request]:
        """All steps in flight, which are given, are over and count for nothing: return the requests
        of the oldest.
        """
        oldest = list(self._steps[0])
        for request in itertools.chain.from_iterable(self._steps):
            request.progress.discarded()
        self._steps.clear()
        self.free_deferred()
        for step in steps:  # the model runner may not have got so far
            self.finished_req_ids |= step.finished_req_ids
            self.preempted_req_ids |= step.preempted_req_ids
            self._encoder_cache.discard(step)
        return oldest

    def free(self, request: Request, block_ids: list[int]) -> None:
        """Free the blocks of an ended request as soon as no step in flight uses them."""
        if request.progress.num_in_flight_tokens:
            self._deferred_block_ids.append((self._num_planned, block_ids))
        else:
            self._kv.free_block_ids(block_ids)

    def free_deferred(self) -> None:
        """Free what no step in flight uses any more."""
        num_done = self._num_planned - len(self._steps)
        while self._deferred_block_ids and self._deferred_block_ids[0][0] <= num_done:
            self._kv.free_block_ids(self._deferred_block_ids.popleft()[1])
