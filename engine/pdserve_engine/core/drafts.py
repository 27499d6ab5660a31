"""Drafts in a plan: they take what all others have left."""

from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.step_plan import StepPlan
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.request.request import Request
from pdserve_engine.spec_decode.proposer import Draft, Proposer


class Drafts:
    """Adds a proposer's drafts to a plan that is complete otherwise.

    A request has fewer drafts than a block has tokens: with them it takes a block more in a step,
    as it may without. All rows of logits are no more than the batch has places, which is what the
    largest step was measured with.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, proposer: Proposer) -> None:
        self._kv = kv
        self._proposer = proposer
        self._max_rows = config.max_batch_size
        self._max_drafts = min(config.num_speculative_tokens, kv.block_size - 1)

    def add(self, plan: StepPlan) -> None:
        """Have running requests compute drafts behind their last tokens, where there is room."""
        if plan.has_preempted or plan.needs_drain:
            return
        num_sampled = sum(each.num_sampled_tokens for each in plan.scheduled.values())
        num_left = min(plan.token_budget, self._max_rows - num_sampled)
        if num_left <= 0:
            return
        limits = {request: self._limit(request, plan) for request in plan.cached_reqs}
        candidates = {request: limit for request, limit in limits.items() if limit > 0}
        if not candidates:
            return
        for request, draft in self._proposer.propose(candidates).items():
            token_ids = draft.token_ids[: min(candidates[request], num_left)]
            if token_ids and self._add(request, draft._replace(token_ids=token_ids), plan):
                num_left -= len(token_ids)

    def _limit(self, request: Request, plan: StepPlan) -> int:
        """Return how many drafts the request may have."""
        is_decode = plan.scheduled[request].num_sampled_tokens > 0
        # Its last token is not known yet, or its grammar takes its time.
        is_open = request.num_output_placeholders > 0 or request.is_length_open
        # A processor is foreign code, which is shown no token that does not count.
        if not is_decode or is_open or request.sampling_params.logits_processors:
            return 0
        asked = request.sampling_params.max_draft_tokens
        most = self._max_drafts if asked is None else min(asked, self._max_drafts)
        # A step brings one token more than there are drafts.
        return min(most, request.output_limit - request.num_output_tokens - 1)

    def _add(self, request: Request, draft: Draft, plan: StepPlan) -> bool:
        target = request.num_tokens + len(draft.token_ids)
        new_block_ids = None
        if target > request.num_slots:
            new_block_ids = self._allocate(request, target, plan)
            if new_block_ids is None:
                return False
        plan.add_draft(request, draft, new_block_ids)
        return True

    def _allocate(
        self, request: Request, target: int, plan: StepPlan
    ) -> tuple[list[int], ...] | None:
        """Take blocks for drafts, unless soon nobody else would find one."""
        num_spare = self._kv.num_groups * (len(plan.scheduled) + 1)
        if self._kv.block_pool.num_free_blocks <= num_spare:
            return None
        block_ids = self._kv.allocate_slots(request, target)
        if block_ids is not None:
            request.num_slots = self._kv.blocks_for(target) * self._kv.block_size
        return block_ids
