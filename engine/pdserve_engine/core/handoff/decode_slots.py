"""Decode's slots, the places in its batch: who has been promised one, and whether another request
finds one in time.

A client has its first token when prefill is done. If decode has no slot then, the stream is silent
in the midst of its answer. So decode grants no blocks before a slot is in sight: free now, or free
when the KV will have landed, so that slots do not stay empty while prefill computes. Time is
counted in steps of this engine, as running requests end after so many of them. Probes have slots of
their own, and do not count here.
"""

import bisect
from collections.abc import Collection, Sequence
from typing import NamedTuple

from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.features.forks import Forks
from pdserve_engine.core.running import Running
from pdserve_engine.request.request import Request

# How far the last observation moves an estimate, if it is lower and if it is higher: who lands too
# early waits behind its first token, who lands too late leaves a slot empty for a step.
_LOWER = 1 / 4
_HIGHER = 1 / 8
# The same for ends before the last permitted token, of which a step sees few.
_NEWEST_EARLY_END = 1 / 64


class SlotForecast(NamedTuple):
    """Slots and who needs them, as far as can be told; in steps from now, ascending."""

    # When each slot is free: 0, or the last token that its request may have.
    free_at: Sequence[int]
    # When each of those who have been let in needs one.
    arrivals: Sequence[int]
    # Requests that end before their last permitted token, in one step.
    early_ends: float

    def has_slot(self, arrival: int) -> bool:
        """Does one more that needs a slot in `arrival` steps find one, and all that come after it
        still theirs?
        """
        num_before = bisect.bisect_right(self.arrivals, arrival)
        after = (arrival, *self.arrivals[num_before:])
        return all(self._is_free(num_before + i, steps) for i, steps in enumerate(after))

    def _is_free(self, number: int, steps: int) -> bool:
        """Is the slot free by then that is the `number`th to be taken?"""
        number -= int(self.early_ends * steps)
        return number < 0 or (number < len(self.free_at) and self.free_at[number] <= steps)


class DecodeSlots:
    """The slots of an engine, and the pulls that have been promised one."""

    def __init__(
        self,
        config: SchedulerConfig,
        running: Running,
        kv_ready: Collection[Request],
        forks: Forks,
    ) -> None:
        """`running` have a slot; `kv_ready` and `forks` of either need one as soon as they can."""
        self._config = config
        self._running = running
        self._kv_ready = kv_ready
        self._forks = forks
        self._step = 0
        # Pulls whose KV has not landed, and the step in which they were granted.
        self._granted: dict[Request, int] = {}
        # Steps from the grant until the KV has landed, by the prompt's size as a power of two.
        self._landing_steps: dict[int, float] = {}
        self._num_early_ends = 0
        self._early_ends = 0.0

    @property
    def num_free(self) -> int:
        """Slots that nobody has now, promised or not."""
        return self._config.max_num_seqs - len(self._running) + self._running.num_probes

    def promise(self, request: Request) -> None:
        """It has been granted its blocks, and will run once its KV has landed."""
        if not request.is_probe:
            self._granted[request] = self._step

    def land(self, request: Request) -> None:
        """Its KV is here: it needs its slot now."""
        granted = self._granted.pop(request, None)
        if granted is not None:
            num_steps, size = float(self._step - granted), _size(request)
            before = self._landing_steps.get(size, num_steps)
            weight = _LOWER if num_steps < before else _HIGHER
            self._landing_steps[size] = before + weight * (num_steps - before)

    def withdraw(self, request: Request) -> None:
        """Its KV will not land, or not for now."""
        self._granted.pop(request, None)

    def on_step(self) -> None:
        """A step was planned."""
        self._step += 1
        self._early_ends += _NEWEST_EARLY_END * (self._num_early_ends - self._early_ends)
        self._num_early_ends = 0

    def on_end(self, request: Request) -> None:
        """A running request has ended."""
        self._num_early_ends += request.num_output_tokens < request.output_limit

    def may_grant(self, request: Request, forecast: SlotForecast) -> bool:
        """Will the request have a slot when its KV has landed?"""
        return forecast.has_slot(self._steps_to_land(request))

    def may_run(self) -> bool:
        """May a request that has been promised none take a slot now? Not one of a pull."""
        return not self._granted or self.look_ahead().has_slot(0)

    def look_ahead(self, num_ahead: int = 0) -> SlotForecast:
        """Return what is in sight. `num_ahead` waiting requests take the next slots."""
        running = [request for request in self._running if not request.is_probe]
        free = (0,) * self.num_free
        arrivals = [0] * num_ahead
        for request in running:
            arrivals += [0] * self._forks.num_of(request)
        for request in self._kv_ready:
            if request.is_probe:
                continue
            arrivals += [0] * (1 + self._forks.num_of(request))
        for request, granted in self._granted.items():
            num_left = max(0, granted + self._steps_to_land(request) - self._step)
            arrivals += [num_left] * (1 + self._forks.num_of(request))
        slots = sorted((*free, *map(self._steps_to_end, running)))
        return SlotForecast(slots, sorted(arrivals), self._early_ends)

    def _steps_to_land(self, request: Request) -> int:
        return round(self._landing_steps.get(_size(request), 0))

    def _steps_to_end(self, request: Request) -> int:
        """At most; a prompt that is not computed yet takes steps as well."""
        num_known = request.num_output_tokens + request.progress.num_output_placeholders
        num_chunks = request.num_uncomputed_tokens // self._config.max_num_batched_tokens
        return max(0, request.output_limit - num_known + num_chunks)


def _size(request: Request) -> int:
    return request.num_tokens.bit_length()
