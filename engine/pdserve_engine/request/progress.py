"""How far a request is computed, and the transitions that change it."""

from dataclasses import dataclass

from pdserve_common.types.engine import DraftSource


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """What a step computes of a request."""

    num_tokens: int
    # Output tokens that it samples behind them: none if it does not reach the last known token.
    # With drafts at most so many.
    num_sampled_tokens: int
    # Where its drafts come from, if it has any: one less than the sampled tokens.
    draft_source: DraftSource | None = None


class RequestProgress:
    """Whoever reads may read any of it; only the transitions write. They check nothing, as they run
    for each request in each step: each says when it may happen.
    """

    __slots__ = (
        "is_length_open",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_slots",
    )

    def __init__(self) -> None:
        # Tokens that the blocks it holds have room for.
        self.num_slots = 0
        # Computed or being computed. Steps run behind their planning (async scheduling): of these,
        # num_in_flight_tokens belong to steps whose results have not come in, and after the known
        # tokens come num_output_placeholders that such steps will sample.
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_output_placeholders = 0
        # Its next result may have fewer tokens than planned: it has drafts, or the last one had
        # none, as its grammar had not got so far. Nothing is planned ahead of that.
        self.is_length_open = False

    @property
    def num_finished_tokens(self) -> int:
        """Tokens whose KV is written. No step is in flight that was rolled back."""
        return self.num_computed_tokens - self.num_in_flight_tokens

    # ---- its blocks

    def allocated(self, num_slots: int) -> None:
        """It holds blocks with room for so many tokens, no fewer than before."""
        self.num_slots = num_slots

    def freed(self) -> None:
        """It holds no blocks any more: nothing is computed in them, or it has ended."""
        self.num_slots = 0

    # ---- before its first step

    def found(self, num_tokens: int) -> None:
        """The KV of its first tokens is here, cached, shared or pulled, in blocks that it holds.
        Nothing was computed before.
        """
        self.num_computed_tokens = num_tokens

    def pulled(self, num_output_tokens: int) -> None:
        """Prefill has sampled the tokens behind those that are known here; they become known, by
        `sampled`, when prefill has acknowledged the release. No step is in flight.
        """
        self.num_output_placeholders = num_output_tokens

    # ---- by steps

    def started(self, scheduled: ScheduledTokens) -> None:
        """A step is in flight. It ends behind the last token, known or about to be sampled, if it
        samples, and before that if not; its drafts and it have room in the blocks.
        """
        num_tokens = scheduled.num_tokens
        self.num_computed_tokens += num_tokens
        self.num_in_flight_tokens += num_tokens
        self.num_output_placeholders += scheduled.num_sampled_tokens
        if scheduled.draft_source is not None:
            self.is_length_open = True

    def computed(self, num_tokens: int) -> None:
        """The oldest step in flight, of so many tokens, is over."""
        self.num_in_flight_tokens -= num_tokens

    def sampled(self, num_planned: int, num_new: int) -> None:
        """A step that is over was to sample `num_planned` tokens, at least one, and `num_new` of
        them count. What it computed behind those, of refused drafts, counts as not computed. If
        there are none its last token is computed again, also by a step that is in flight.
        """
        self.num_output_placeholders -= num_planned
        self.num_computed_tokens -= num_planned - num_new
        self.is_length_open = num_new == 0

    def discarded(self) -> None:
        """Its steps in flight are over and count for nothing. If it has not ended, it is
        `rolled_back` or `preempted` next.
        """
        self.num_in_flight_tokens = 0

    # ---- back to the start

    def rolled_back(self) -> None:
        """Its first step after a pull does not count, nor does what was pulled, as prefill has not
        acknowledged the release. It keeps its blocks. If the step is in flight it still has to be
        `computed`, or `discarded`.
        """
        self.num_computed_tokens = self.num_output_placeholders = 0

    def preempted(self) -> None:
        """It is to be computed anew, and will be `freed`. No step is in flight."""
        self.num_computed_tokens = self.num_output_placeholders = 0
        self.is_length_open = False
