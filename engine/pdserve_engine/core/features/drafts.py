"""Drafts in a plan: they take what all others have left."""

import random
from collections.abc import Mapping

from pdserve_common.types.engine import DraftStats
from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.step_plan import StepPlan
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.request.progress import ScheduledTokens
from pdserve_engine.request.request import Request
from pdserve_engine.request.sched_output import ModelRunnerOutput
from pdserve_engine.spec_decode.draft_lengths import DraftLengths, StepCosts
from pdserve_engine.spec_decode.proposer import Draft, Proposer


class Drafts:
    """Adds a proposer's drafts to a plan that is complete otherwise, as many as are worth it.

    A request has fewer drafts than a block has tokens: with them it takes a block more in a step,
    as it may without. All rows of logits are no more than the batch has places, which is what the
    largest step was measured with.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, proposer: Proposer) -> None:
        self._kv = kv
        self._proposer = proposer
        self._max_rows = config.max_batch_size
        self._max_drafts = min(config.num_speculative_tokens, kv.block_size - 1)
        self._costs = StepCosts()
        self._lengths = DraftLengths(self._costs, random.Random(0))

    def add(self, plan: StepPlan) -> None:
        """Have running requests compute drafts behind their last tokens, where there is room."""
        if plan.has_preempted or plan.needs_drain:
            return
        num_sampled = sum(each.num_sampled_tokens for each in plan.scheduled.values())
        most = min(plan.token_budget, self._max_rows - num_sampled)
        limits = {request: self._limit(request, plan) for request in plan.cached_reqs}
        candidates = {request: limit for request, limit in limits.items() if limit > 0}
        if most <= 0 or not candidates:
            return
        drafts = self._propose(candidates)
        if not drafts:
            return
        num_rows = sum(each.num_tokens for each in plan.scheduled.values())
        lengths = self._lengths.choose(drafts, num_sampled, num_rows, most)
        for request, length in lengths.items():
            draft = drafts[request]
            self._add(request, draft._replace(token_ids=draft.token_ids[:length]), plan)

    def observe_draft(self, request: Request, stats: DraftStats) -> None:
        """A draft was checked."""
        self._lengths.observe(
            request, stats.source, stats.num_draft_tokens, stats.num_accepted_tokens
        )

    def observe_step(
        self, step: Mapping[Request, ScheduledTokens], result: ModelRunnerOutput, duration_s: float
    ) -> None:
        """A step took so long."""
        if step and all(each.num_tokens == each.num_sampled_tokens for each in step.values()):
            num_rows = sum(each.num_tokens for each in step.values())
            self._costs.observe(len(step), num_rows, duration_s - result.drafting_s)
            if guesses := result.draft_token_ids:
                longest = max(map(len, guesses.values()))
                self._costs.observe_guesses(len(guesses), longest, result.drafting_s)

    def choose_guesses(self, limits: Mapping[Request, int], plan: StepPlan) -> dict[Request, int]:
        """Return how many drafts of each request a draft model is to guess behind a complete plan,
        at most `limits`.
        """
        num_requests = sum(each.num_sampled_tokens > 0 for each in plan.scheduled.values())
        return self._lengths.choose_guesses(limits, num_requests, self._max_rows - num_requests)

    def _propose(self, candidates: Mapping[Request, int]) -> dict[Request, Draft]:
        return {
            request: draft._replace(token_ids=draft.token_ids[: candidates[request]])
            for request, draft in self._proposer.propose(candidates).items()
            if draft.token_ids
        }

    def _limit(self, request: Request, plan: StepPlan) -> int:
        """Return how many drafts the request may have."""
        progress = request.progress
        is_decode = plan.scheduled[request].num_sampled_tokens > 0
        # Its last token is not known yet, or its grammar takes its time.
        is_open = progress.num_output_placeholders > 0 or progress.is_length_open
        # A processor is foreign code, which is shown no token that does not count.
        if not is_decode or is_open or request.sampling_params.logits_processors:
            return 0
        asked = request.sampling_params.max_draft_tokens
        most = self._max_drafts if asked is None else min(asked, self._max_drafts)
        # A step brings one token more than there are drafts.
        return min(most, request.output_limit - request.num_output_tokens - 1)

    def _add(self, request: Request, draft: Draft, plan: StepPlan) -> None:
        target = request.num_tokens + len(draft.token_ids)
        new_block_ids = None
        if target > request.progress.num_slots:
            new_block_ids = self._allocate(request, target, plan)
            if new_block_ids is None:
                return
        plan.add_draft(request, draft, new_block_ids)

    def _allocate(
        self, request: Request, target: int, plan: StepPlan
    ) -> tuple[list[int], ...] | None:
        """Take blocks for drafts, unless soon nobody else would find one."""
        num_spare = self._kv.num_groups * (len(plan.scheduled) + 1)
        if self._kv.block_pool.num_free_blocks <= num_spare:
            return None
        return self._kv.allocate_slots(request, target)
