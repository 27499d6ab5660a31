"""Modelled prefill and decode workers: grants, reads under the prefill, and what each holds."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from pdserve_client.advisor.cost_profile import HandoffCost
from pdserve_client.advisor.worker_model import Leg, WorkerModel

# As in the engine's `core/handoff/prefill_grant_requests.py` and `core/handoff/decode_grants.py`.
NUM_ASKED_AHEAD = 2
MAX_SHARE = 0.25
MAX_SKIPPED = 16
OVERDUE_S = 1.0


@dataclass(slots=True, eq=False)
class Handoff:
    """One request on its two workers."""

    prefill: "PrefillModel"
    decode: "DecodeModel"
    prefill_leg: Leg
    decode_leg: Leg
    asked_at: float = 0.0
    # None until decode has room.
    granted_at: float | None = None
    # Tokens of the prompt that decode has, or is told of.
    num_announced: int = 0


class PrefillModel(WorkerModel):
    """Computes prompts for decode workers, once these have room for them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._queues: dict[DecodeModel, deque[Handoff]] = {}
        self._asked: dict[DecodeModel, dict[Handoff, None]] = {}
        self._handoffs: dict[Leg, Handoff] = {}

    @property
    def num_waiting_tokens(self) -> int:
        """With requests that decode has not granted yet."""
        queued = sum(h.prefill_leg.num_left for queue in self._queues.values() for h in queue)
        asked = (h for asked in self._asked.values() for h in asked if h.granted_at is None)
        return super().num_waiting_tokens + queued + sum(h.prefill_leg.num_left for h in asked)

    def hand_over(self, handoff: Handoff) -> None:
        """Take a request of a decode worker."""
        self._handoffs[handoff.prefill_leg] = handoff
        self._queues.setdefault(handoff.decode, deque()).append(handoff)
        self._ask(handoff.decode)

    def on_granted(self, handoff: Handoff) -> None:
        """Decode has reserved its blocks."""
        self.add(handoff.prefill_leg)

    def on_landed(self, handoff: Handoff) -> None:
        """Decode has read all: the blocks are free."""
        self.pool.free(handoff.prefill_leg.holding)
        self.wake()

    def _ask(self, decode: "DecodeModel") -> None:
        """Ask for a few requests ahead, or as many as make up a step."""
        queue, asked = self._queues[decode], self._asked.setdefault(decode, {})
        num_tokens = sum(handoff.prefill_leg.num_left for handoff in asked)
        while queue and (
            len(asked) < NUM_ASKED_AHEAD or num_tokens < self.limits.max_num_batched_tokens
        ):
            handoff = queue.popleft()
            asked[handoff] = None
            num_tokens += handoff.prefill_leg.num_left
            handoff.asked_at = self._clock.now
            decode.request_grant(handoff)

    def _start(self, leg: Leg, num: int) -> None:
        super()._start(leg, num)
        handoff = self._handoffs[leg]
        if self._asked[handoff.decode].pop(handoff, self) is None:
            self._announce(leg)
            # What is asked for is granted by decode, not in the midst of this plan.
            self._clock.after(0.0, lambda: self._ask(handoff.decode))

    def _on_prompt_computed(self, leg: Leg) -> None:
        self._announce(leg)

    def _announce(self, leg: Leg) -> None:
        """Tell decode which whole blocks are here; at the end all of them."""
        handoff, is_last = self._handoffs[leg], leg.num_left == 0
        size = self.limits.block_size
        num_tokens = leg.num_known if is_last else leg.num_computed // size * size
        handoff.decode.read(handoff, num_tokens, is_last=is_last)

    def _release(self, leg: Leg) -> None:
        """Decode still reads."""
        del self._handoffs[leg]


class DecodeModel(WorkerModel):
    """Decodes what prefill workers have computed, and whole requests that are sent to it alone."""

    def __init__(self, *args: Any, handoff: HandoffCost | None) -> None:
        super().__init__(*args)
        self._handoff_cost = handoff
        self._grant_requests: list[Handoff] = []
        # Granted and not landed; landed and not in the batch.
        self._pulls: dict[Leg, None] = {}
        self._landed: deque[Leg] = deque()
        self._link_free_at = 0.0

    @property
    def _cost_of_handoff(self) -> HandoffCost:
        assert self._handoff_cost is not None, "no prefill workers without a measured handoff"
        return self._handoff_cost

    def request_grant(self, handoff: Handoff) -> None:
        """Prefill wants to start the request. It is granted between steps."""
        self._grant_requests.append(handoff)
        self.wake()

    def read(self, handoff: Handoff, num_tokens: int, *, is_last: bool) -> None:
        """Read the prompt's tokens up to `num_tokens`, behind what is being read."""
        cost = self._cost_of_handoff
        num_new = num_tokens - handoff.num_announced
        self._link_free_at = max(self._link_free_at, self._clock.now)
        if num_new > 0:
            self._link_free_at += cost.chunk_s + cost.token_s * num_new
            handoff.num_announced = num_tokens
        if is_last:
            self._clock.at(self._link_free_at, lambda: handoff.prefill.on_landed(handoff))
            self._clock.at(self._link_free_at + cost.admit_s, lambda: self._land(handoff))

    def _land(self, handoff: Handoff) -> None:
        leg = handoff.decode_leg
        del self._pulls[leg]
        leg.num_computed, leg.num_output = leg.num_known, 1
        leg.num_known += 1
        self.pool.publish(leg.holding, leg.keys)
        self._landed.append(leg)
        self.wake()

    def _plan(self) -> None:
        self._serve_grant_requests()
        super()._plan()

    def _serve_grant_requests(self) -> None:
        """Oldest first; what does not fit is overtaken, unless it has waited for long."""
        num_skipped = 0
        for handoff in list(self._grant_requests):
            if self._reserve(handoff):
                self._grant_requests.remove(handoff)
                continue
            num_skipped += 1
            is_overdue = self._clock.now - handoff.asked_at > OVERDUE_S
            if is_overdue or num_skipped > MAX_SKIPPED:
                return

    def _reserve(self, handoff: Handoff) -> bool:
        leg, pool = handoff.decode_leg, self.pool
        if len(self._running) + self._num_promised() >= self.limits.max_num_seqs:
            return False
        num_prompt = leg.request.num_prompt_tokens
        held = sum(pool.blocks_of(each.holding) for each in (*self._pulls, *self._landed))
        if held and held + pool.blocks_for(num_prompt) > MAX_SHARE * pool.num_blocks:
            return False
        cached = leg.keys[: pool.num_cached_keys(leg.keys, num_prompt)]
        if pool.num_needed(num_prompt + 1, cached) + self.num_spare_blocks() > pool.num_free:
            return False
        handoff.num_announced = pool.num_cached_tokens(leg.keys, num_prompt)
        self.stats.num_cached_tokens += handoff.num_announced
        pool.take_cached(leg.holding, cached)
        self.grow(leg, num_prompt)
        self._pulls[leg] = None
        handoff.granted_at = self._clock.now
        grant_s = self._cost_of_handoff.grant_s
        self._clock.after(grant_s, lambda: handoff.prefill.on_granted(handoff))
        return True

    def _num_promised(self) -> int:
        return len(self._pulls) + len(self._landed)

    def _admitted(self) -> list[Leg]:
        return [*self._running, *self._landed, *self._pulls]

    def _plan_landed(self, budget: int) -> int:
        while self._landed and budget and len(self._running) < self.limits.max_num_seqs:
            leg = self._landed[0]
            if not self.grow(leg, leg.num_computed + 1):
                break
            self._start(self._landed.popleft(), 1)
            budget -= 1
        return budget
