"""The embeddings of pictures, as the scheduler has them made and kept
(`core.encoder_cache_manager`).
"""

from typing import NamedTuple

import numpy as np
import torch

from pdserve_engine.models.base import Model, SupportsMultiModal
from pdserve_engine.request.sched_output import SchedulerOutput
from pdserve_engine.runner.run.input_batch import InputBatch
from pdserve_engine.sampling.logits_rows import Rows


class StepEmbeds(NamedTuple):
    """Those of a step's tokens that belong to pictures: [n, hidden_size], and which tokens of the
    step they are, [n] int64 on the host.
    """

    embeds: torch.Tensor
    rows: Rows


class EncoderCache:
    """By the identifiers of their features. Models of text have none."""

    def __init__(self) -> None:
        self._embeds: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._embeds)

    def update(self, step: SchedulerOutput, model: Model) -> None:
        """Forget what the step says, and embed its new pictures."""
        for identifier in step.free_encoder_mm_hashes:
            self._embeds.pop(identifier, None)
        for identifier, pixels in step.scheduled_encoder_inputs.items():
            assert isinstance(model, SupportsMultiModal), "requests are refused otherwise"
            self._embeds[identifier] = model.embed_picture(pixels)

    def clear(self) -> None:
        """Forget all."""
        self._embeds.clear()

    def gather(
        self, batch: InputBatch, rows: Rows, starts: Rows, query_lens: Rows, seq_lens: Rows
    ) -> StepEmbeds | None:
        """Return the embeddings of a step in which each of `rows` computes query_lens tokens, from
        the step's token `starts` on, and has seq_lens then; None if there are none.
        """
        if not self._embeds:
            return None
        pieces: list[torch.Tensor] = []
        tokens: list[Rows] = []
        lists = (array.tolist() for array in (rows, starts, query_lens, seq_lens))
        for row, begin, length, end in zip(*lists, strict=True):
            first = end - length
            for feature in batch.mm_features[row]:
                low = max(feature.position, first)
                high = min(feature.position + feature.length, end)
                if low < high:
                    embeds = self._embeds[feature.identifier]
                    pieces.append(embeds[low - feature.position : high - feature.position])
                    tokens.append(np.arange(low - first, high - first) + begin)
        return StepEmbeds(torch.cat(pieces), np.concatenate(tokens)) if pieces else None
