"""All that a client sees of requests to an engine that is stepped by hand."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    FinishReason,
    LogprobsLists,
)
from pdserve_engine.assemble import LoadedEngine
from support.engines import run_to_end


class Answer(NamedTuple):
    """All that a client sees of a request."""

    token_ids: tuple[int, ...]
    logprobs: LogprobsLists
    prompt_logprobs: LogprobsLists
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: EngineError | None

    @classmethod
    def of(cls, outputs: Sequence[EngineCoreOutput]) -> "Answer":
        logprobs = (output.new_logprobs for output in outputs)
        prompt_logprobs = (output.new_prompt_logprobs for output in outputs)
        return cls(
            tuple(token_id for output in outputs for token_id in output.new_token_ids),
            LogprobsLists.join(lists for lists in logprobs if lists is not None),
            LogprobsLists.join(lists for lists in prompt_logprobs if lists is not None),
            outputs[-1].finish_reason,
            outputs[-1].stop_reason,
            outputs[-1].error,
        )


def answers(
    engine: LoadedEngine, requests: Iterable[EngineCoreRequest], *, at_once: int = 1000
) -> dict[str, Answer]:
    """Run requests to their ends, after which no block is held; so many come with each step."""
    found = run_to_end(engine.core, requests, at_once=at_once)
    kv = engine.core.scheduler.kv
    kv.check_integrity()
    assert kv.block_pool.num_free_blocks == kv.block_pool.num_blocks
    return {name: Answer.of(outputs) for name, outputs in found.items()}
