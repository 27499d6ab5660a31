"""Requests that may be why workers died.

A worker that dies does not say under which of its requests. What ends a worker ends the next one
too, at the same place: so a request under which two died, and that brought no token from the
second, is at fault if it is the only one, or has lost more than the others. If there are several,
each is tried alone: one such request is on workers at a time, until it has an answer from them or
they die under it.

Each of the two may have died under another request. Those that lost a worker with it are sent
again meanwhile: the verdict waits until they have brought a token, or have lost another worker,
which then speaks against them.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from pdserve_common.types.engine import EngineError, ErrorCode, ErrorFault
from pdserve_router.workers.worker import Worker

# Workers that die under a request before it can be ended for that.
NUM_DEATHS = 2
# So long a verdict waits for those that lost a worker with the request: about a long prompt's time.
RIVALS_WAIT_S = 10.0


class LostRequest(Protocol):
    """A request's `Recovery`."""

    # Workers that ended under it with a word of a death, since it brought more than a few tokens;
    # and their epochs then.
    ended: list[tuple[Worker, str]]
    is_tried_alone: bool
    # Its loss says nothing against it, or not before the next one: what is tried alone has to be
    # sent for that.
    is_excused: bool
    # The one that died under its current attempt, if it brought no token of it and that is not
    # judged yet.
    died_at: Worker | None
    # When.
    lost_at: float


def is_death(error: EngineError) -> bool:
    """Did a request end as its worker did?"""
    return error.code is ErrorCode.ENGINE_DEAD and error.fault is ErrorFault.WORKER


def num_deaths(request: LostRequest) -> int:
    """Return how many of those workers are gone indeed, or are others by now."""
    return sum(not worker.is_ready or epoch_of(worker) != epoch for worker, epoch in request.ended)


def epoch_of(worker: Worker) -> str:
    """Of the process that a worker is now."""
    return worker.info.epoch if worker.info is not None else ""


def is_to_be_judged(request: LostRequest) -> bool:
    """Is it not to be sent again before `find_at_fault` has seen it?"""
    return request.died_at is not None and len(request.ended) >= NUM_DEATHS


def find_at_fault(
    requests: Iterable[tuple[LostRequest, float]],
    now: float,
    *,
    settle_s: float,
    rivals: Sequence[LostRequest] = (),
) -> list[tuple[LostRequest, Worker]]:
    """Return those of all lost requests, each with the time from which it may be sent again, that
    are to be ended, with the workers that died under them. Others that may be at fault are tried
    alone from now on. A worker's death is looked at after `settle_s`, when all that had requests
    there have been told, and when none of them may still go on without it. `rivals`: those that are
    not judged now, and are sent again or were and have brought no token since.
    """
    by_worker: dict[Worker, list[LostRequest]] = {}
    looked_at: dict[Worker, float] = {}
    for each, not_before in requests:
        if (died_at := each.died_at) is not None and is_to_be_judged(each):
            by_worker.setdefault(died_at, []).append(each)
            due = max(each.lost_at + settle_s, not_before)
            looked_at[died_at] = max(looked_at.get(died_at, due), due)
    found = []
    for worker, lost_there in by_worker.items():
        if now < looked_at[worker]:
            continue
        possible = [each for each in lost_there if num_deaths(each) >= NUM_DEATHS]
        most = max(map(num_deaths, possible), default=0)
        worst = [each for each in possible if num_deaths(each) == most]
        if len(worst) == 1:
            if now < worst[0].lost_at + RIVALS_WAIT_S and _has_lost_with(worst[0], rivals):
                continue
            elsewhere = (
                each for at, lost in by_worker.items() if at is not worker for each in lost
            )
            if not _has_lost_with(worst[0], elsewhere):
                found.append((worst[0], worker))
        for each in lost_there:
            each.died_at = None
        for each in possible:
            each.is_tried_alone = each.is_excused = True
    return found


def _has_lost_with(request: LostRequest, others: Iterable[LostRequest]) -> bool:
    """Has the request lost a worker together with one of the others?"""
    ended = set(request.ended)
    return any(not ended.isdisjoint(each.ended) for each in others if each is not request)
