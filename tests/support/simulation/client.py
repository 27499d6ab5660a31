"""A client of a simulation, and what it may be told."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve_common.errors import PdserveError
from pdserve_common.types.engine import EngineError, ErrorCode, FinishReason
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.requests.input.generation_request import GenerationRequest
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.output.outputs import RequestOutput
from pdserve_router.requests.poison_requests import NUM_DEATHS
from pdserve_router.router import Router
from pdserve_router.workers.model_limits import ModelLimits
from support.scripted_engine import expected

if TYPE_CHECKING:
    from support.simulation.world import World

# What faults of workers and networks may end a request with; all else is a defect.
EXPECTED_ERRORS = {
    ErrorCode.OVERLOADED,
    ErrorCode.NO_WORKER,
    ErrorCode.KV_TRANSFER_FAILED,
    ErrorCode.KV_EXPIRED,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.ENGINE_DEAD,
    ErrorCode.DRAINING,
}
# And this, if so many workers were lost: nobody can tell that the request was not why.
LOST_UNDER_IT = "workers were lost under this request"
# A deadline's own timer, and the turn that its end takes to be read.
DEADLINE_SLACK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one client does."""

    request_id: str
    at_s: float
    prompt: tuple[int, ...]
    num_tokens: int
    deadline_s: float
    # It leaves so long after it has asked.
    patience_s: float | None


@dataclass(slots=True)
class Answer:
    """What came."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    num_redrives: int = 0
    # Its client has had no patience any more.
    has_left: bool = False

    @property
    def outcome(self) -> str:
        if self.finish_reason is None:
            return "left" if self.has_left else "no end"
        reason = str(self.finish_reason)
        return reason if self.error is None else f"{reason}_{self.error.code.name}".lower()


async def ask(world: "World", router: Router, what: Ask) -> None:
    """Ask, and check what comes: every token once, in order, and one end in time."""
    await asyncio.sleep(what.at_s)
    answer = Answer()
    began_s = world.loop.time()
    task = asyncio.current_task()
    assert task is not None

    def leave() -> None:
        answer.has_left = True
        task.cancel()

    timer = None
    if what.patience_s is not None:
        timer = world.loop.call_later(what.patience_s, leave)
    try:
        await _read(world, router, what, answer)
    except asyncio.CancelledError:
        if not answer.has_left:
            raise
        world.journal.note(f"{what.request_id} leaves")
    except PdserveError as error:
        answer.finish_reason, answer.error = FinishReason.ERROR, error.to_engine_error()
    finally:
        if timer is not None:
            timer.cancel()
    world.journal.note(f"{what.request_id} ends: {answer.outcome}")
    world.outcomes[answer.outcome] += 1
    world.num_redrives += answer.num_redrives
    num_lost = world.num_lost_workers(began_s)
    for problem in problems(what, answer, world.loop.time() - began_s, num_lost):
        world.blame(f"{what.request_id}: {problem}")


def problems(what: Ask, answer: Answer, took_s: float, num_lost_workers: int) -> list[str]:
    """Return what is wrong with an answer that so many workers were lost during."""
    right = expected(list(what.prompt), what.num_tokens)
    found = []
    if answer.token_ids != right[: len(answer.token_ids)]:
        found.append(f"tokens {answer.token_ids}, not {right}")
    if answer.finish_reason is FinishReason.LENGTH and len(answer.token_ids) != what.num_tokens:
        found.append(f"{len(answer.token_ids)} tokens, not {what.num_tokens}")
    if answer.finish_reason is None and not answer.has_left:
        found.append("it has no end")
    if answer.finish_reason not in (FinishReason.LENGTH, FinishReason.ERROR, None):
        found.append(f"it ends with {answer.finish_reason}")
    if (error := answer.error) is not None:
        is_blamed = LOST_UNDER_IT in error.message and num_lost_workers >= NUM_DEATHS
        if error.code not in EXPECTED_ERRORS and not is_blamed:
            found.append(f"it fails with {error.code.name}: {error.message}")
    if took_s > what.deadline_s + DEADLINE_SLACK_S:
        found.append(f"it took {took_s:.3f} s, its deadline is {what.deadline_s:.3f} s")
    return found


async def _read(world: "World", router: Router, what: Ask, answer: Answer) -> None:
    request = GenerationRequest(
        request_id=what.request_id,
        token_ids=what.prompt,
        sampling_params=SamplingParams(
            temperature=0.0, max_tokens=what.num_tokens, ignore_eos=True, seed=0
        ),
        arrival_ns=round(world.loop.time() * 1e9),
        deadline=world.loop.time() + what.deadline_s,
    )

    async def prepare(limits: ModelLimits) -> Sequence[ProcessedInput]:
        return [await router.input_processor.process(request, limits)]

    world.journal.note(f"{what.request_id} asks for {what.num_tokens} tokens of {what.prompt}")
    (live,) = await router.submit(prepare)
    with live:
        async for output in live:
            _take(output, answer)
            world.journal.note(f"{what.request_id} has {len(answer.token_ids)} tokens")


def _take(output: RequestOutput, answer: Answer) -> None:
    (completion,) = output.outputs
    answer.token_ids += completion.token_ids
    if output.finished:
        assert output.metrics is not None
        answer.finish_reason = completion.finish_reason
        answer.error = completion.error
        answer.num_redrives = output.metrics.num_redrives
