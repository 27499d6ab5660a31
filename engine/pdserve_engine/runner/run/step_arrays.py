"""A step as arrays, and its output made of what was sampled."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pdserve_common.types.engine import LogprobsLists
from pdserve_engine.request.sched_output import ModelRunnerOutput
from pdserve_engine.sampling.logits_rows import LogitsRows, Rows
from pdserve_engine.sampling.state import SampledTokens


class StepArrays(NamedTuple):
    """One forward pass as arrays: its requests, those with one token first, and its tokens."""

    request_ids: tuple[str, ...]
    rows: Rows
    # Each request's first token in the step, how many follow, and how many there are then.
    starts: Rows
    query_lens: Rows
    seq_lens: Rows
    # Each token's request, as a row, and its position in that request.
    token_rows: Rows
    positions: Rows
    logits_rows: LogitsRows
    # [len(logits_rows)]: the hidden row that each is made from.
    hidden_rows: Rows


def by_request(
    step: StepArrays, sampled: SampledTokens, prompt_logprobs: dict[str, LogprobsLists]
) -> ModelRunnerOutput:
    """Return what was sampled, for each request of the step."""
    if np.array_equal(sampled.rows.batch_rows, step.rows):  # one token each
        request_ids: Sequence[str] = step.request_ids
        sampled_token_ids: tuple[tuple[int, ...], ...] = tuple(zip(sampled.token_ids.tolist()))
    else:
        names = dict(zip(step.rows.tolist(), step.request_ids, strict=True))
        request_ids = [names[row] for row in sampled.rows.batch_rows.tolist()]
        token_ids: dict[str, tuple[int, ...]] = dict.fromkeys(step.request_ids, ())
        for request_id, token_id in zip(request_ids, sampled.token_ids.tolist(), strict=True):
            token_ids[request_id] += (token_id,)
        sampled_token_ids = tuple(token_ids.values())
    logprobs: dict[str, LogprobsLists] = {}
    for i, lists in sampled.logprobs.items():
        known = logprobs.get(request_ids[i])
        logprobs[request_ids[i]] = lists if known is None else known + lists
    return ModelRunnerOutput(
        request_ids=step.request_ids,
        sampled_token_ids=sampled_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        errors={request_ids[i]: error for i, error in sampled.errors.items()},
        num_nans_in_logits={
            request_ids[i]: int(sampled.num_nans[i])
            for i in np.flatnonzero(sampled.num_nans).tolist()
        },
    )
