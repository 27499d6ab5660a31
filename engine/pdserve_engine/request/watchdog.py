"""Tells a step that hangs from one that has much to compute, by what steps have taken so far."""

import time
from collections.abc import Callable
from typing import NamedTuple

from pdserve_common.rpc.liveness import AwakeClock
from pdserve_engine.request.sched_output import SchedulerOutput

# No step counts as hung before this: weights may have to be read from a disk first.
MIN_BOUND_S = 10.0
# A step that is the first to need a kernel waits for Triton to compile it.
MIN_CUDA_BOUND_S = 60.0
# The bound for ranks, of which one that is stopped holds up all, once steps are known: weights are
# in memory.
KNOWN_BOUND_S = 4.0
# So many steps make steps known, of any sizes. Twice as many are remembered at most, as a process's
# first steps are slow.
NUM_KNOWN_STEPS = 16
# A step may take this many times what the longest one lets expect.
MARGIN = 10.0
# Linear layers cost as much as attention to so many tokens, or more; less only loosens the bound.
LINEAR_CONTEXT = 1024
# A picture counts as so many tokens of a vision tower; more only loosens the bound as well.
TOKENS_PER_PICTURE = 1024
# Between two looks at most so much time counts: the process was stopped for the rest.
MAX_LOOK_S = 2.0


class RunningStep(NamedTuple):
    """A step under way."""

    # time.monotonic
    started: float
    # As `work_of` says; None for what is no step but has to be waited for like one.
    work: int | None


def work_of(scheduled: SchedulerOutput) -> int:
    """Return what a step computes, in tokens that one token is compared with."""
    cached, counts = scheduled.scheduled_cached_reqs, scheduled.num_scheduled_tokens
    num_tokens = scheduled.total_num_scheduled_tokens
    num_tokens += TOKENS_PER_PICTURE * len(scheduled.scheduled_encoder_inputs)
    work = LINEAR_CONTEXT * num_tokens
    for request in scheduled.scheduled_new_reqs:
        work += counts[request.request_id] * request.num_computed_tokens
    for request_id, num_computed_tokens in zip(
        cached.request_ids, cached.num_computed_tokens, strict=True
    ):
        work += counts[request_id] * num_computed_tokens
    return work


class StepWatch:
    """Looked at at least twice in MAX_LOOK_S, by one thread that is not the engine's."""

    def __init__(
        self,
        *,
        timeout_s: float,
        min_bound_s: float = MIN_BOUND_S,
        known_bound_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s` bounds any step, and is the bound while nothing is known of any;
        `known_bound_s` is instead of `min_bound_s` once steps are known.
        """
        self._known_bound_s = known_bound_s
        self._timeout_s = timeout_s
        self._min_bound_s = min_bound_s
        self._awake = AwakeClock(MAX_LOOK_S, clock=clock)
        self._clock = clock
        self._running: RunningStep | None = None
        # By the AwakeClock.
        self._running_since = 0.0
        self._has_stalled = False
        self.forget()

    def forget(self) -> None:
        """Steps may take longer from now on: memory was given back."""
        # The longest step so far: its work and how long it took.
        self._longest: tuple[int, float] | None = None
        # By size, a power of two, how long the longest step took: of the last NUM_KNOWN_STEPS at
        # most, and of as many before them, which are there as soon as steps are known.
        self._sizes: dict[int, float] = {}
        self._sizes_before: dict[int, float] = {}
        self._num_steps = 0

    def overrun(self, running: RunningStep | None) -> float | None:
        """Return the bound (seconds) that the step under way has overrun, or None."""
        self._look()
        if running is not self._running:
            self._running = running
            seen_s = min(self._clock() - running.started, MAX_LOOK_S) if running else 0.0
            self._running_since = self._awake() - seen_s
        if running is None:
            return None
        bound_s = self._bound_s(running.work)
        return bound_s if self._awake() - self._running_since > bound_s else None

    def learn(self, work: int, duration_s: float) -> None:
        """A step is over. Steps during which the process was stopped teach nothing."""
        self._look()
        if work and not self._has_stalled:
            if self._longest is None or duration_s > self._longest[1]:
                self._longest = work, duration_s
            size = work.bit_length()
            self._sizes[size] = max(self._sizes.get(size, 0.0), duration_s)
            self._num_steps += 1
            if self._num_steps == NUM_KNOWN_STEPS:
                self._sizes_before, self._sizes, self._num_steps = self._sizes, {}, 0
        self._has_stalled = False

    def _look(self) -> None:
        self._has_stalled |= self._awake.tick() > 0

    def _bound_s(self, work: int | None) -> float:
        if work is None or self._longest is None:
            return self._timeout_s
        if self._known_bound_s is not None and self._sizes_before:
            bound_s = max(self._known_bound_s, MARGIN * self._expected_s(work.bit_length()))
        else:
            known_work, duration_s = self._longest
            expected_s = duration_s * max(1.0, work / known_work)
            bound_s = max(self._min_bound_s, MARGIN * expected_s)
        return min(self._timeout_s, bound_s)

    def _expected_s(self, size: int) -> float:
        """Return what the longest of steps that were no larger lets expect of one of a size."""
        steps = [*self._sizes.items(), *self._sizes_before.items()]
        smaller = [each for each in steps if each[0] <= size] or [min(steps)]
        # What a machine did to one of them it may do to the next.
        longest_s = max(duration_s for _, duration_s in smaller)
        return longest_s * 2.0 ** max(0, size - max(smaller)[0])
