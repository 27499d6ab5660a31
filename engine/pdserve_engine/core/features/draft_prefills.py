"""What a plan leaves a draft model: drafts behind the step's tokens, and the KV of requests that
wait for another worker.
"""

from collections.abc import Iterator

from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.features.drafts import Drafts
from pdserve_engine.core.request_containers import RequestContainers
from pdserve_engine.core.step_plan import StepPlan
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.request.request import Request
from pdserve_engine.request.sched_output import DraftPrefill


class DraftPrefills:
    """While decode waits for a request's KV it knows the tokens, and owns blocks once prefill has
    asked: the draft model need not wait. Whatever a step leaves of its budget is spent on them, and
    a step that has nothing else to compute has all of it.

    What was planned counts as done. If it was lost, or the blocks are others now, the model runner
    catches up when the request runs. Does nothing without a draft model.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        containers: RequestContainers,
        drafts: Drafts | None,
    ) -> None:
        self._drafts = drafts
        self._config = config
        self._kv = kv
        self._containers = containers
        # How many tokens were planned of requests that wait and have blocks.
        self._num_planned: dict[Request, int] = {}

    def has_any(self) -> bool:
        """Would a step that computes nothing else have something to do?"""
        return any(self._next(self._config.max_num_batched_tokens))

    def add(self, plan: StepPlan) -> None:
        """Complete a plan: nothing else will be added."""
        if not self._config.has_draft_model:
            return
        limits = {
            request: limit
            for request, scheduled in plan.scheduled.items()
            if scheduled.num_sampled_tokens and (limit := self._num_drafts(request)) > 0
        }
        # The largest step is measured without a proposer.
        drafts = self._drafts
        lengths = limits if drafts is None else drafts.choose_guesses(limits, plan)
        plan.num_draft_tokens = {request.request_id: length for request, length in lengths.items()}
        if plan.takes_more:
            for request, num_tokens in list(self._next(plan.token_budget)):
                self._plan(request, num_tokens, plan)

    def _num_drafts(self, request: Request) -> int:
        """Return how many drafts the next step may have, after one token of this one."""
        if request.sampling_params.logits_processors:
            return 0
        num_tokens = request.num_output_tokens + request.progress.num_output_placeholders
        # The next step brings one token more than there are drafts.
        room = request.output_limit - num_tokens - 2
        asked = request.sampling_params.max_draft_tokens
        most = self._config.num_speculative_tokens if asked is None else asked
        return min(room, most, self._config.num_speculative_tokens, self._kv.block_size - 1)

    def _next(self, budget: int) -> Iterator[tuple[Request, int]]:
        """Yield requests, and how many tokens of each, in whole blocks, a budget is enough for."""
        # A request that is tried alone must not be blamed for others.
        if not self._config.has_draft_model or self._containers.isolated.next() is not None:
            return
        waiting = list(self._containers.remote_prefills.with_blocks())
        self._num_planned = {r: self._num_planned.get(r, 0) for r in waiting}
        for request in waiting:
            num_left = request.num_tokens - self._num_planned[request]
            num_tokens = self._whole_blocks(min(num_left, budget))
            if num_tokens > 0:
                budget -= num_tokens
                yield request, num_tokens

    def _plan(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        (block_ids,) = self._kv.get_block_ids(request.request_id)
        self._num_planned[request] += num_tokens
        plan.draft_prefills.append(
            DraftPrefill(
                token_ids=tuple(request.all_token_ids),
                block_ids=tuple(block_ids),
                num_tokens=num_tokens,
            )
        )

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens // self._kv.block_size * self._kv.block_size
