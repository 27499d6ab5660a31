"""How far a request is, under random transitions in any order that their docstrings permit."""

from collections import deque
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pdserve_common.types.engine import KVTransferStats
from pdserve_engine.request.progress import ScheduledTokens
from pdserve_engine.request.request import RequestStatus
from support.requests import greedy, held_request
from support.scripted_engine import ON_D

STATS = KVTransferStats(
    num_bytes=1,
    num_blocks=1,
    num_reads=1,
    transport="test",
    transfer_s=0,
    exposed_s=0,
    release_ack_s=0,
)
MAX_TOKENS = 1000  # more than any example brings
PROMPT = tuple(range(7))


@dataclass
class Step:
    """A step in flight; `num_drafts` of its tokens are drafts."""

    num_tokens: int
    num_sampled: int
    num_drafts: int = 0


class OneRequest(RuleBasedStateMachine):
    """A request, and what a runner and a block pool know of it, which say how far it must be."""

    @initialize(is_pulled=st.booleans())
    def add(self, is_pulled: bool) -> None:
        transfer = ON_D if is_pulled else None
        self.request = held_request(
            "r", PROMPT, params=greedy(MAX_TOKENS), kv_transfer_params=transfer
        )
        self.progress = self.request.progress
        self.num_slots = 0
        # Tokens whose KV the runner has written, and which count.
        self.num_written = 0
        self.steps: deque[Step] = deque()
        # Of steps in flight that were rolled back.
        self.num_void = 0
        self.num_pulled = 0
        # The speculative first step that is over, and how many tokens it has brought.
        self.held: tuple[Step, int] | None = None
        self.was_late = False

    # ---- what the rules may do

    def is_pulled(self) -> bool:
        return self.request.handoff.needs_remote_kv

    def is_running(self) -> bool:
        return self.request.status is RequestStatus.RUNNING

    def may_start(self) -> bool:
        is_first = self.num_pulled > 0 and not self.is_running()
        return is_first or self.request.can_continue

    # ---- blocks

    @precondition(lambda self: not self.is_pulled() and not self.is_running())
    @rule(num_cached=st.integers(0, len(PROMPT) - 1))
    def admit(self, num_cached: int) -> None:
        self.allocate(num_cached + 1)
        self.progress.found(num_cached)
        self.num_written = num_cached
        self.request.status = RequestStatus.RUNNING

    @precondition(lambda self: self.is_pulled() and not self.num_slots)
    @rule()
    def grant(self) -> None:
        self.allocate(self.request.num_tokens)

    @precondition(lambda self: self.is_pulled() and self.num_slots and not self.num_pulled)
    @rule()
    def give_back(self) -> None:
        self.free()

    def allocate(self, num_tokens: int) -> None:
        if num_tokens > self.num_slots:
            self.num_slots = -(-num_tokens // 4) * 4
            self.progress.allocated(self.num_slots)

    def free(self) -> None:
        self.num_slots = 0
        self.progress.freed()

    # ---- a pull

    @precondition(
        lambda self: self.is_pulled() and self.num_slots and not (self.num_pulled or self.num_void)
    )
    @rule(num_output_tokens=st.integers(1, 3))
    def land(self, num_output_tokens: int) -> None:
        self.request.handoff.landed(0.0, (0,) * num_output_tokens)
        self.progress.pulled(num_output_tokens)
        self.progress.found(self.request.num_tokens)
        self.num_pulled, self.num_written = num_output_tokens, self.request.num_tokens

    @precondition(lambda self: self.is_pulled() and self.num_pulled)
    @rule()
    def acknowledge(self) -> None:
        self.request.handoff.accepted(STATS)
        token_ids = self.request.handoff.take_pulled_token_ids()
        self.progress.sampled(len(token_ids), len(token_ids))
        self.request.append_output_token_ids(token_ids)
        self.num_pulled = 0
        if self.held is not None:
            self.apply(*self.held)
            self.held = None
        self.request.status = RequestStatus.RUNNING

    @precondition(lambda self: self.is_pulled())
    @rule()
    def lose(self) -> None:
        self.num_void += sum(step.num_tokens for step in self.steps)
        self.roll_back()

    def roll_back(self) -> None:
        self.steps.clear()
        self.progress.rolled_back()
        self.num_written = self.num_pulled = 0
        self.held = None
        self.request.status = RequestStatus.WAITING_FOR_REMOTE_KVS

    # ---- steps

    @precondition(lambda self: self.may_start())
    @rule(share=st.floats(0, 1), num_drafts=st.integers(0, 3))
    def start(self, share: float, num_drafts: int) -> None:
        num_left = self.request.num_uncomputed_tokens
        assert num_left > 0
        num_tokens = 1 + round(share * (num_left - 1))
        step = Step(num_tokens, num_sampled=int(num_tokens == num_left))
        is_known = not (self.progress.num_output_placeholders or self.progress.is_length_open)
        if step.num_sampled and is_known:
            step = Step(num_tokens + num_drafts, 1 + num_drafts, num_drafts)
        self.allocate(self.num_computed() + step.num_tokens)
        source = "suffix" if step.num_drafts else None
        self.progress.started(ScheduledTokens(step.num_tokens, step.num_sampled, source))
        self.steps.append(step)
        self.request.status = RequestStatus.RUNNING

    @precondition(lambda self: self.steps)
    @rule(share=st.floats(0, 1))
    def end_step(self, share: float) -> None:
        step = self.steps.popleft()
        self.progress.computed(step.num_tokens)
        num_known = self.request.num_tokens + self.num_pulled
        if not step.num_sampled:
            self.num_written += step.num_tokens
            return
        assert self.num_written + step.num_tokens - step.num_drafts == num_known, "its last token"
        num_new = round(share * step.num_sampled)
        if self.is_pulled():
            self.held, self.num_written = (step, num_new), num_known
        else:
            self.apply(step, num_new)

    def apply(self, step: Step, num_new: int) -> None:
        """All but the last token are written now; if there is no new one, that was late."""
        self.progress.sampled(step.num_sampled, num_new)
        self.request.append_output_token_ids((0,) * num_new)
        self.num_written = self.request.num_tokens - 1
        self.was_late = num_new == 0

    @precondition(lambda self: self.num_void)
    @rule()
    def end_void_steps(self) -> None:
        self.progress.computed(self.num_void)
        self.num_void = 0

    @precondition(lambda self: self.steps or self.num_void)
    @rule()
    def fail(self) -> None:
        self.progress.discarded()
        self.steps.clear()
        self.num_void = 0
        if self.is_pulled():
            self.roll_back()
        else:
            self.preempt()

    @precondition(lambda self: self.is_running() and not (self.is_pulled() or self.steps))
    @rule()
    def preempt(self) -> None:
        self.progress.preempted()
        self.free()
        self.num_written, self.was_late = 0, False
        self.request.status = RequestStatus.PREEMPTED

    # ---- what holds at any time

    def num_computed(self) -> int:
        return self.num_written + sum(step.num_tokens for step in self.steps)

    @invariant()
    def it_is_as_far_as_runner_and_pool_know(self) -> None:
        progress, held = self.progress, self.held
        num_sampled = sum(step.num_sampled for step in self.steps)
        num_sampled += self.num_pulled + (0 if held is None else held[0].num_sampled)
        assert progress.num_slots == self.num_slots
        assert progress.num_computed_tokens == self.num_computed()
        assert progress.num_finished_tokens == self.num_written - self.num_void
        assert progress.num_output_placeholders == num_sampled
        has_drafts = any(step.num_drafts for step in self.steps)
        assert progress.is_length_open == (has_drafts or self.was_late)

    @invariant()
    def it_computes_its_own_tokens_in_its_own_blocks(self) -> None:
        progress = self.progress
        num_known = self.request.num_tokens + progress.num_output_placeholders
        assert 0 <= progress.num_computed_tokens <= min(num_known, progress.num_slots)
        assert progress.num_in_flight_tokens >= 0

    @invariant()
    def nothing_is_planned_behind_a_step_of_open_length(self) -> None:
        if self.progress.is_length_open and self.steps:
            assert not self.request.can_continue


def test_a_request_is_as_far_as_runner_and_pool_know() -> None:
    run_state_machine_as_test(
        OneRequest, settings=settings(max_examples=100, stateful_step_count=40)
    )
