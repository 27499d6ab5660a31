"""vLLM's definitions of what changes logits, written down plainly in float64, for one request."""

from collections import Counter
from collections.abc import Sequence

import torch

from pdserve_common.types.sampling_params import SamplingParams


def adjusted(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_token_ids: Sequence[int] = (),
) -> torch.Tensor:
    """Return logits [vocab_size] after everything that comes before the temperature."""
    values = logits.tolist()
    if params.allowed_token_ids:
        allowed = set(params.allowed_token_ids)
        values = [x if i in allowed else -torch.inf for i, x in enumerate(values)]
    for *prefix, last in params.bad_words_token_ids:
        if list(output[len(output) - len(prefix) :]) == prefix and len(output) >= len(prefix):
            values[last] = -torch.inf
    if len(output) < params.min_tokens:
        for token_id in (*end_token_ids, *params.stop_token_ids):
            values[token_id] = -torch.inf
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    for token_id in {*prompt, *output}:
        if values[token_id] > 0:
            values[token_id] /= params.repetition_penalty
        else:
            values[token_id] *= params.repetition_penalty
    for token_id, count in Counter(output).items():
        values[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return torch.tensor(values, dtype=torch.float64)
