"""What workers' engines tell of a request on its way, for clients that ask."""

from dataclasses import dataclass

from pdserve_common.types.engine import EngineCoreEventType, EngineCoreOutput

# One completion has at most so many. An engine under memory pressure may preempt a request any
# number of times.
MAX_EVENTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEvent:
    """A milestone. Each worker has a clock of its own: its time is since the worker got the
    attempt, by that clock.
    """

    type: EngineCoreEventType
    engine_id: str
    attempt: int
    since_queued_ns: int


class RequestEvents:
    """Those of one completion: the first MAX_EVENTS."""

    def __init__(self) -> None:
        self.events: list[RequestEvent] = []
        # When workers queued its attempts, which they tell first: seconds of their clocks.
        self._queued: dict[tuple[str, int], float] = {}

    def take(self, output: EngineCoreOutput, engine_id: str) -> None:
        """Note those of an output, of the worker of that name."""
        for event in output.events[: MAX_EVENTS - len(self.events)]:
            queued = self._queued.setdefault((engine_id, output.attempt), event.timestamp)
            self.events.append(
                RequestEvent(
                    type=event.type,
                    engine_id=engine_id,
                    attempt=output.attempt,
                    since_queued_ns=max(0, round((event.timestamp - queued) * 1e9)),
                )
            )
