"""A modelled worker: the engine's planner and its KV pool, with steps that cost what was measured.

It plans as `core/step_planner.py` of the engine does: no phases, each request catches up from its
computed tokens to its last known one, running ones first.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve_client.advisor.clock import VirtualClock
from pdserve_client.advisor.cost_profile import StepCost, WorkerLimits
from pdserve_client.advisor.kv_pool import Holding, KVPool
from pdserve_client.advisor.trace import TraceRequest

# As in the planner: prompts that are computed in chunks, and those that may be overtaken in a step.
MAX_PARTIAL_PREFILLS = 1
MAX_SKIPPED = 16


@dataclass(slots=True, eq=False)
class Leg:
    """A request on one worker."""

    number: int
    request: TraceRequest
    # They name the prompt's beginning in the pools.
    keys: tuple[int, ...]
    # It ends here with so many tokens.
    num_to_generate: int
    # Tokens of prompt and answer so far, and of these the ones that have KV.
    num_known: int = field(init=False)
    num_computed: int = 0
    num_output: int = 0
    holding: Holding = field(default_factory=Holding)
    # Tokens that its blocks have room for.
    num_slots: int = 0
    is_running: bool = False

    def __post_init__(self) -> None:
        self.num_known = self.request.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Tokens to compute until the next one is known."""
        return self.num_known - self.num_computed


@dataclass(slots=True)
class WorkerStats:
    """Sums over a simulation."""

    busy_s: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    # Rows that decoded, of all steps.
    num_rows: int = 0
    peak_blocks: int = 0


class WorkerModel:
    """Steps while it has something to compute."""

    def __init__(
        self,
        name: str,
        clock: VirtualClock,
        cost: StepCost,
        limits: WorkerLimits,
        unit_tokens: int,
        on_token: Callable[["WorkerModel", Leg], None],
    ) -> None:
        """`on_token` is called for each token, when the step that brings it is over."""
        self.name = name
        self.stats = WorkerStats()
        self.limits = limits
        self.pool = KVPool(limits.num_blocks, limits.block_size, unit_tokens)
        # Requests of a router that are not over here.
        self.num_in_flight = 0
        self.step_num_tokens = 0
        self._clock = clock
        self._cost = cost
        self._on_token = on_token
        self._running: list[Leg] = []
        self._waiting: deque[Leg] = deque()
        self._scheduled: list[tuple[Leg, int]] = []

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens to compute of requests that wait here."""
        return sum(leg.num_left for leg in self._waiting)

    @property
    def is_stepping(self) -> bool:
        return bool(self._scheduled)

    def add(self, leg: Leg) -> None:
        """Take a request that may start, behind those that came before it."""
        place = len(self._waiting)
        while place and self._waiting[place - 1].number > leg.number:
            place -= 1
        self._waiting.insert(place, leg)
        self.wake()

    def wake(self) -> None:
        """Something has changed: begin a step if none is under way."""
        if not self.is_stepping:
            self._begin_step()

    # ---- a step

    def _begin_step(self) -> None:
        self._plan()
        if not self._scheduled:
            return
        seconds = self._seconds()
        self.stats.busy_s += seconds
        self.stats.num_steps += 1
        self.stats.peak_blocks = max(self.stats.peak_blocks, self.pool.num_held)
        self.step_num_tokens = sum(num for _, num in self._scheduled)
        self._clock.after(seconds, self._end_step)

    def _seconds(self) -> float:
        """Return what the step costs, and count its rows."""
        cost, num_rows, num_context, prompts_s = self._cost, 0, 0, 0.0
        has_prompts = False
        for leg, num in self._scheduled:
            if num == 1 and leg.num_output:
                num_rows += 1
                num_context += leg.num_computed
            else:
                has_prompts = True
                prompts_s += cost.prefill_s(num, leg.num_computed)
        self.stats.num_rows += num_rows
        base_s = cost.base_s(has_prompts=has_prompts, has_decodes=num_rows > 0)
        return base_s + prompts_s + cost.decode_s(num_rows, num_context)

    def _end_step(self) -> None:
        scheduled, self._scheduled = self._scheduled, []
        self.step_num_tokens = 0
        for leg, num in scheduled:
            leg.num_computed += num
            if not leg.num_output:
                self._on_prompt_computed(leg)
            if leg.num_computed == leg.num_known:
                self._generate(leg)
        self.wake()

    def _generate(self, leg: Leg) -> None:
        """The step brought its next token."""
        if not leg.num_output:
            self.pool.publish(leg.holding, leg.keys)
        leg.num_output += 1
        leg.num_known += 1
        is_over = leg.num_output == leg.num_to_generate
        if is_over:
            self._running.remove(leg)
            leg.is_running = False
            self._release(leg)
        self._on_token(self, leg)

    def _on_prompt_computed(self, leg: Leg) -> None:
        """Some or all of its prompt has been computed; for workers that hand it over."""

    def _release(self, leg: Leg) -> None:
        """It is over here: its blocks are free."""
        self.pool.free(leg.holding)

    # ---- planning

    def _plan(self) -> None:
        budget = self.limits.max_num_batched_tokens
        for leg in list(self._running):
            if not budget:
                return
            if not leg.is_running:  # it was preempted for one before it
                continue
            num = min(leg.num_known - leg.num_computed, budget)
            target = leg.num_computed + num
            if target <= leg.num_slots or self._grow_or_preempt(leg, target):
                self._scheduled.append((leg, num))
                budget -= num
        budget = self._plan_landed(budget)
        self._plan_waiting(budget)

    def _plan_landed(self, budget: int) -> int:
        """Take requests whose KV is here into the batch; return what is left of the budget."""
        return budget

    def _num_promised(self) -> int:
        """Slots that are kept for others than those that wait."""
        return 0

    def _plan_waiting(self, budget: int) -> None:
        num_partial = sum(num < leg.num_left for leg, num in self._scheduled)
        num_skipped, spare = 0, None
        for leg in list(itertools.islice(self._waiting, self.limits.max_num_seqs + MAX_SKIPPED)):
            num_free_slots = self.limits.max_num_seqs - len(self._running) - self._num_promised()
            if not budget or num_free_slots <= 0:
                return
            num_keys = self.pool.num_cached_keys(leg.keys, leg.num_known - 1)
            num_cached = self.pool.num_cached_tokens(leg.keys, leg.num_known - 1)
            num = min(leg.num_known - num_cached, budget)
            if num_cached + num < leg.num_known and num_partial >= MAX_PARTIAL_PREFILLS:
                num_skipped += 1
                if num_skipped > MAX_SKIPPED:
                    return
                continue
            cached = leg.keys[:num_keys]
            spare = self.num_spare_blocks() if spare is None else spare
            if self.pool.num_needed(leg.num_known, cached) + spare > self.pool.num_free:
                return
            self._waiting.remove(leg)
            self.pool.take_cached(leg.holding, cached)
            self.grow(leg, num_cached + num)
            leg.num_computed = num_cached
            self.stats.num_cached_tokens += num_cached
            self._start(leg, num)
            spare += self._num_missing(leg)
            num_partial += num < leg.num_left
            budget -= num

    def _start(self, leg: Leg, num: int) -> None:
        leg.is_running = True
        self._running.append(leg)
        self._scheduled.append((leg, num))

    def grow(self, leg: Leg, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` tokens of a request; False if there is none."""
        if not self.pool.grow(leg.holding, num_tokens):
            return False
        leg.num_slots = self.pool.blocks_of(leg.holding) * self.limits.block_size
        return True

    def num_spare_blocks(self) -> int:
        """Blocks that admitted requests still need, for what is known and one block more."""
        return sum(map(self._num_missing, self._admitted()))

    def _admitted(self) -> list[Leg]:
        """Requests that hold blocks and are not over."""
        return self._running

    def _num_missing(self, leg: Leg) -> int:
        num_needed = self.pool.blocks_for(leg.num_known + self.limits.block_size)
        return max(0, num_needed - self.pool.blocks_of(leg.holding))

    def _grow_or_preempt(self, leg: Leg, num_tokens: int) -> bool:
        """Make room for its tokens; the newest running request gives way, and computes all again
        later. False if that is itself.
        """
        while not self.grow(leg, num_tokens):
            victim = self._running.pop()
            self._scheduled = [each for each in self._scheduled if each[0] is not victim]
            self.pool.free(victim.holding)
            victim.num_computed = victim.num_slots = 0
            victim.is_running = False
            self._waiting.appendleft(victim)
            self.stats.num_preemptions += 1
            if victim is leg:
                return False
        return True
