"""One step while it is being planned, and the SchedulerOutput it becomes."""

from dataclasses import dataclass, field

from pdserve_engine.request.request import Request
from pdserve_engine.request.sched_output import CachedRequestData, NewRequestData, SchedulerOutput

NewBlockIds = tuple[list[int], ...] | None


@dataclass(slots=True)
class StepPlan:
    """Who computes how many tokens in the step."""

    token_budget: int
    # Not paused: waiting requests may be admitted.
    admits_new: bool = True
    # In the order of planning.
    scheduled: dict[Request, int] = field(default_factory=dict)
    new_reqs: list[NewRequestData] = field(default_factory=list)
    cached_reqs: dict[Request, NewBlockIds] = field(default_factory=dict)
    # Somebody had to give way: nobody new gets in.
    has_preempted: bool = False
    # Somebody would have to, but steps are in flight.
    needs_drain: bool = False
    # Prefills that will not reach their last known token in this step.
    num_partial_prefills: int = 0
    # Blocks that admitted requests still need; unknown until somebody wants to be admitted.
    num_reserved_blocks: int | None = None

    @property
    def takes_more(self) -> bool:
        """May requests join the batch? Not if somebody has just given way for room."""
        return self.token_budget > 0 and not (self.has_preempted or self.needs_drain)

    def take(self, request: Request, num_tokens: int) -> None:
        self.scheduled[request] = num_tokens
        self.token_budget -= num_tokens
        self.num_partial_prefills += num_tokens < request.num_uncomputed_tokens

    def give_back(self, request: Request) -> None:
        """Take a request out again."""
        num_tokens = self.scheduled.pop(request, 0)
        self.token_budget += num_tokens
        self.num_partial_prefills -= 0 < num_tokens < request.num_uncomputed_tokens
        self.cached_reqs.pop(request, None)

    def build(
        self,
        *,
        finished_req_ids: frozenset[str],
        preempted_req_ids: frozenset[str],
        num_common_prefix_blocks: tuple[int, ...],
    ) -> SchedulerOutput:
        """Return the plan as diffs. Call it before the requests' num_computed_tokens move on."""
        return SchedulerOutput(
            scheduled_new_reqs=self.new_reqs,
            scheduled_cached_reqs=CachedRequestData(
                request_ids=[request.request_id for request in self.cached_reqs],
                new_block_ids=list(self.cached_reqs.values()),
                num_computed_tokens=[request.num_computed_tokens for request in self.cached_reqs],
            ),
            num_scheduled_tokens={r.request_id: num for r, num in self.scheduled.items()},
            total_num_scheduled_tokens=sum(self.scheduled.values()),
            finished_req_ids=finished_req_ids,
            preempted_req_ids=preempted_req_ids,
            num_common_prefix_blocks=num_common_prefix_blocks,
        )
