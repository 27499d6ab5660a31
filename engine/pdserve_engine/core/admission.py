"""Whether there is room for one more: in the batch, and in the pool besides what those that have
been admitted still need.
"""

import itertools
from collections.abc import Iterator

from pdserve_engine.config import NUM_PROBE_SLOTS, SchedulerConfig
from pdserve_engine.core.handoff.decode_grants import Room
from pdserve_engine.core.request_containers import RequestContainers
from pdserve_engine.core.step_plan import StepPlan
from pdserve_engine.kv.kv_cache_manager import ComputedBlocks, KVCacheManager
from pdserve_engine.request.request import Request


class Admission:
    """Counts what admitted requests have and need; changes nothing."""

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, containers: RequestContainers
    ) -> None:
        self._config = config
        self._kv = kv
        self._containers = containers

    def may_add(self, request: Request, plan: StepPlan) -> bool:
        """May the request join the batch?"""
        if not plan.takes_more:
            return False
        if not request.is_probe:
            return self._containers.decode_slots.num_free > 0
        # A pull has its slot with its blocks.
        return request.progress.num_slots > 0 or self.num_free_probe_slots() > 0

    def num_free_probe_slots(self) -> int:
        """Of those that only probes may have: they take them with their blocks."""
        return NUM_PROBE_SLOTS - sum(request.is_probe for request in self._admitted())

    def can_allocate(self, request: Request, blocks: ComputedBlocks, plan: StepPlan) -> bool:
        """Do all known tokens of the request fit, of which it would share `blocks`, or would it and
        admitted ones evict each other?
        """
        if request.is_probe:  # too small to look after others
            return self._kv.can_allocate(request.num_tokens, blocks)
        if plan.num_reserved_blocks is None:
            plan.num_reserved_blocks = self._num_reserved_blocks()
        num_spare = self._with_watermark(plan.num_reserved_blocks)
        return self._kv.can_allocate(request.num_tokens, blocks, num_spare=num_spare)

    def has_room_for_fork(self, source: Request) -> bool:
        """Is there room for what a fork does not share with its source?"""
        # A block for the prompt's end and one for what comes then.
        num_needed = self.num_missing_blocks(source) + 2 * self._kv.num_groups
        num_left = self._kv.block_pool.num_free_blocks - num_needed
        return num_left >= self.num_spare_blocks()

    def room_for_pulls(self) -> Room:
        """Return what limits grants to pulls."""
        containers = self._containers
        landed = (request for request in self._without_slot() if request.do_remote_prefill)
        pulls = itertools.chain(containers.remote_prefills.with_blocks(), landed)
        return Room(
            num_held=sum(self._kv.num_blocks_of(pull.request_id) for pull in pulls),
            num_spare=self.num_spare_blocks(),
            slot_forecast=containers.decode_slots.look_ahead(containers.num_ahead),
        )

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks the request still needs for its known tokens, and one more."""
        num_needed = self._kv.num_blocks_needed(request.num_tokens + self._kv.block_size)
        return max(0, num_needed - self._kv.num_blocks_of(request.request_id))

    def num_spare_blocks(self) -> int:
        """Blocks that whoever is admitted now has to leave free."""
        return self._with_watermark(self._num_reserved_blocks())

    def _without_slot(self) -> Iterator[Request]:
        """Requests that own all their blocks and find no slot in the batch."""
        ready = (request for request in self._containers.kv_ready if not request.is_probe)
        return itertools.islice(ready, self._containers.decode_slots.num_free, None)

    def _admitted(self) -> Iterator[Request]:
        """Requests that own blocks. Pulls count: they cannot be preempted, so their first decode
        step must find its block.
        """
        containers = self._containers
        pulls = containers.remote_prefills.with_blocks()
        return itertools.chain(containers.running, containers.kv_ready, pulls)

    def _num_reserved_blocks(self) -> int:
        return sum(map(self.num_missing_blocks, self._admitted()))

    def _with_watermark(self, num_reserved: int) -> int:
        if not num_reserved:  # nobody could be preempted
            return 0
        return num_reserved + int(self._config.kv_watermark * self._kv.block_pool.num_blocks)
