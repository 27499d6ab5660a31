"""Hugging Face's beam search."""

from collections.abc import Collection
from typing import Any

import torch

from pdserve_common.types.sampling_params import EarlyStopping, SamplingParams

EARLY_STOPPING = {
    EarlyStopping.FALSE: False,
    EarlyStopping.TRUE: True,
    EarlyStopping.NEVER: "never",
}


def hf_beams(
    model: Any, prompt: list[int], params: SamplingParams, stop_token_ids: Collection[int]
) -> list[tuple[tuple[int, ...], float]]:
    """Return the best beams, each up to its first stop token, and their scores."""
    answer = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=params.best_of or params.n,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens,
        length_penalty=params.length_penalty,
        early_stopping=EARLY_STOPPING[params.early_stopping],
        eos_token_id=list(stop_token_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = []
    for row, score in zip(answer.sequences.tolist(), answer.sequences_scores.tolist(), strict=True):
        token_ids = row[len(prompt) :]
        ends = [i + 1 for i, token in enumerate(token_ids) if token in stop_token_ids]
        beams.append((tuple(token_ids[: min(ends, default=len(token_ids))]), score))
    return beams
