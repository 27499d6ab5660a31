"""What the scheduler tells the model runner each step: full data for new requests, diffs for the
rest.
"""

from dataclasses import dataclass, field
from typing import Protocol

from pdserve_common.types.engine import EngineError, LogprobsLists, MultiModalFeatureSpec
from pdserve_common.types.pooling_params import PoolingParams
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.grammar.native import CompiledGrammar


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """A request the runner has not seen, or lost at preemption: everything it needs to know."""

    request_id: str
    # Prompt, and for a resumed or transferred request also the output tokens known so far.
    all_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    # The resolved random seed (the router draws one when the client sent none).
    seed: int
    eos_token_id: int | None
    # One list of physical block ids per KV cache group, in logical order.
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    # What its output follows.
    grammar: CompiledGrammar | None = None
    # The digest of its LoRA adapter.
    adapter: str | None = None
    # Set for a request that is pooled: nothing is sampled.
    pooling_params: PoolingParams | None = None
    # Its pictures, in the order of the prompt.
    mm_features: tuple[MultiModalFeatureSpec, ...] = ()


@dataclass(slots=True, kw_only=True)
class CachedRequestData:
    """Requests the runner knows: only what changed since their last step. Lists run in parallel."""

    request_ids: list[str] = field(default_factory=list)
    # Newly allocated blocks per group, None when the request needed none.
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    # With pipeline stages: the output tokens that are not computed yet. Else empty, as the runner
    # knows what it has sampled.
    new_token_ids: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPrefill:
    """Tokens of a request that waits for another worker: the draft model computes its KV of some
    more of them, in the request's blocks.
    """

    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    # Whole blocks of them.
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step's work."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    # request_id -> number of tokens to compute in this step.
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    # Requests that ended since the last step: the runner forgets them.
    finished_req_ids: frozenset[str]
    # Requests preempted since the last step: forgotten too, they come back as new.
    preempted_req_ids: frozenset[str]
    # Per KV group, leading blocks that all running requests share.
    num_common_prefix_blocks: tuple[int, ...] = ()
    # request_id -> drafts: guesses of its next tokens, which are computed behind its last known
    # one and count among num_scheduled_tokens.
    scheduled_spec_decode_tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # For a draft model: request_id -> how many drafts to guess behind this step's tokens, at most;
    # and what else it is to compute.
    num_draft_tokens: dict[str, int] = field(default_factory=dict)
    draft_prefills: tuple[DraftPrefill, ...] = ()
    # Pictures, by their features' identifiers: those whose embeddings the runner forgets, and then
    # the pixels of those that it embeds and keeps.
    free_encoder_mm_hashes: tuple[str, ...] = ()
    scheduled_encoder_inputs: dict[str, bytes] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Is there nothing to compute, and nothing to tell?"""
        has_work = self.num_scheduled_tokens or self.draft_prefills
        return not (has_work or self.finished_req_ids or self.preempted_req_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """One step's result: token ids and logprobs, never logits. Requests in `request_ids` order.

    A request whose chunk did not reach its last known token has no sampled token: its tuple is
    empty. So is that of a request whose grammar was late: its last token has to be computed again.
    A request with k drafts has up to 1 + k: up to and with the first that differs from its draft.
    """

    request_ids: tuple[str, ...] = ()
    sampled_token_ids: tuple[tuple[int, ...], ...] = ()
    # One position per sampled token.
    logprobs: dict[str, LogprobsLists] = field(default_factory=dict)
    # The prompt tokens that this step's chunk was followed by: for a chunk of positions [a, b)
    # those of tokens a + 1 to b, as far as they belong to the prompt.
    prompt_logprobs: dict[str, LogprobsLists] = field(default_factory=dict)
    # Requests that could not be sampled for a reason of their own (a failing logits processor, or
    # all tokens banned).
    errors: dict[str, EngineError] = field(default_factory=dict)
    num_nans_in_logits: dict[str, int] = field(default_factory=dict)
    # The answers to requests that are pooled, of which the step computed the prompt's end.
    pooler_outputs: dict[str, tuple[float, ...]] = field(default_factory=dict)
    # What a draft model guesses to follow the sampled tokens of some requests, in order.
    draft_token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # How much of the step's time the draft model took.
    drafting_s: float = 0.0
    # What has to follow the sampled tokens of requests whose grammars leave no choice, as a text is
    # usually cut into tokens.
    forced_token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def annotated_ids(self) -> frozenset[str]:
        """Requests of which it says more than their tokens."""
        return frozenset().union(
            self.logprobs,
            self.prompt_logprobs,
            self.errors,
            self.num_nans_in_logits,
            self.draft_token_ids,
            self.forced_token_ids,
        )

    def get_output(self) -> "ModelRunnerOutput":
        """Return itself: there is nothing to wait for."""
        return self


class AsyncModelRunnerOutput(Protocol):
    """A step that the device computes, or has computed."""

    def get_output(self) -> ModelRunnerOutput:
        """Wait until the device has finished. Any thread."""
        ...


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput()
