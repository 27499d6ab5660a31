"""One step while it is being planned, and the SchedulerOutput it becomes."""

from dataclasses import dataclass, field

from pdserve_engine.core.features.encoder_cache_manager import EncoderStep
from pdserve_engine.request.progress import ScheduledTokens
from pdserve_engine.request.request import Request
from pdserve_engine.request.sched_output import (
    CachedRequestData,
    DraftPrefill,
    NewRequestData,
    SchedulerOutput,
)
from pdserve_engine.spec_decode.proposer import Draft

# What almost all have in almost all steps.
DECODE = ScheduledTokens(num_tokens=1, num_sampled_tokens=1)

NewBlockIds = tuple[list[int], ...] | None


@dataclass(slots=True)
class StepPlan:
    """Who computes how many tokens in the step."""

    token_budget: int
    # Not paused: waiting requests may be admitted.
    admits_new: bool = True
    # The runner has to be told of the tokens that steps have brought.
    tells_tokens: bool = False
    # In the order of planning.
    scheduled: dict[Request, ScheduledTokens] = field(default_factory=dict)
    new_reqs: list[NewRequestData] = field(default_factory=list)
    cached_reqs: dict[Request, NewBlockIds] = field(default_factory=dict)
    # The drafts of some of cached_reqs.
    drafts: dict[Request, tuple[int, ...]] = field(default_factory=dict)
    # For a draft model: how many drafts requests may have after this step, and what else it does.
    num_draft_tokens: dict[str, int] = field(default_factory=dict)
    draft_prefills: list[DraftPrefill] = field(default_factory=list)
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

    def take(self, request: Request, num_tokens: int, num_left: int) -> None:
        """The request computes its next `num_tokens` tokens, of `num_left`."""
        self.token_budget -= num_tokens
        if num_tokens < num_left:
            self.scheduled[request] = ScheduledTokens(num_tokens, 0)
            self.num_partial_prefills += 1
        else:
            is_decode = num_tokens == 1
            self.scheduled[request] = DECODE if is_decode else ScheduledTokens(num_tokens, 1)

    def give_back(self, request: Request) -> None:
        """Take a request out again, if it is in the plan."""
        scheduled = self.scheduled.pop(request, None)
        if scheduled is not None:
            self.token_budget += scheduled.num_tokens
            self.num_partial_prefills -= not scheduled.num_sampled_tokens
            self.cached_reqs.pop(request, None)

    def add_draft(self, request: Request, draft: Draft, new_block_ids: NewBlockIds) -> None:
        """The request, which is in the plan and samples a token, computes a draft behind its last
        token, in blocks of which some may be new.
        """
        scheduled, num_drafts = self.scheduled[request], len(draft.token_ids)
        self.scheduled[request] = ScheduledTokens(
            scheduled.num_tokens + num_drafts,
            scheduled.num_sampled_tokens + num_drafts,
            draft.source,
        )
        self.drafts[request] = tuple(draft.token_ids)
        self.token_budget -= num_drafts
        earlier = self.cached_reqs[request]
        if earlier is not None and new_block_ids is not None:
            new_block_ids = tuple(a + b for a, b in zip(earlier, new_block_ids, strict=True))
        self.cached_reqs[request] = new_block_ids or earlier

    def build(
        self,
        *,
        finished_req_ids: frozenset[str],
        preempted_req_ids: frozenset[str],
        num_common_prefix_blocks: tuple[int, ...],
        encoder: EncoderStep,
    ) -> SchedulerOutput:
        """Return the plan as diffs. Call it before the requests' num_computed_tokens move on."""
        num_scheduled_tokens = {r.request_id: s.num_tokens for r, s in self.scheduled.items()}
        return SchedulerOutput(
            scheduled_new_reqs=self.new_reqs,
            scheduled_cached_reqs=CachedRequestData(
                request_ids=[request.request_id for request in self.cached_reqs],
                new_block_ids=list(self.cached_reqs.values()),
                num_computed_tokens=[
                    request.progress.num_computed_tokens for request in self.cached_reqs
                ],
                new_token_ids=self._new_token_ids() if self.tells_tokens else [],
            ),
            num_scheduled_tokens=num_scheduled_tokens,
            total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
            finished_req_ids=finished_req_ids,
            preempted_req_ids=preempted_req_ids,
            num_common_prefix_blocks=num_common_prefix_blocks,
            scheduled_spec_decode_tokens={r.request_id: ids for r, ids in self.drafts.items()},
            num_draft_tokens=self.num_draft_tokens,
            draft_prefills=tuple(self.draft_prefills),
            free_encoder_mm_hashes=encoder.free_encoder_mm_hashes,
            scheduled_encoder_inputs=encoder.scheduled_encoder_inputs,
        )

    def _new_token_ids(self) -> list[tuple[int, ...]]:
        """Return, of each request that the runner knows, the output tokens that it computes."""
        return [
            tuple(
                request.all_token_ids[
                    max(request.progress.num_computed_tokens, request.num_prompt_tokens) :
                ]
            )
            for request in self.cached_reqs
        ]
