"""The runners on CUDA of a model over several ranks.

All ranks know what requests ask for, and compute a step that is launched ahead to its end, the same
on each: they exchange the best token of each part of the vocabulary, or for rows with filters all
logits. In a step that looks back rank 0 leads, as on the CPU.
"""

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch

from pdserve_engine.models.llama import LlamaModel
from pdserve_engine.runner.cuda_runner import CudaModelRunner, Drawn
from pdserve_engine.runner.sharded_model import gather_best, gather_logits
from pdserve_engine.runner.sharded_runner import FollowerRunner, LeaderRunner
from pdserve_engine.sampling.logits_rows import LogitsRows, Rows
from pdserve_engine.sampling.processors import LogitsProcessorFactory
from pdserve_engine.sampling.state import FollowedSampling, SamplingState
from pdserve_kernels.sampling_batch import num_mask_words
from pdserve_kernels.triton.device_batch import DeviceSamplingBatch
from pdserve_kernels.triton.sampling import sample_part_staged, sample_staged


class _CudaRankRunner(CudaModelRunner):
    @property
    @abstractmethod
    def _part(self) -> LlamaModel:
        """This rank's part of the model."""

    def _looks_back(self, batch_rows: Rows) -> bool:
        # Only rank 0 has use for all logits.
        has_logprobs = self.input_batch.sampling.asks_for_logprobs(batch_rows)
        return has_logprobs or super()._looks_back(batch_rows)

    def _warm_up_sampling(self, hidden_rows: torch.Tensor) -> None:
        part, sampling = self._part, self.input_batch.sampling
        logits = part.compute_logits(hidden_rows)
        # All ranks' together.
        sampling.warm_up(logits.new_zeros(1, part.config.vocab_size))
        zero = np.zeros(1, dtype=np.int64)
        batch = sampling.describe(LogitsRows(zero, zero))
        num_words = num_mask_words(logits.shape[1])
        mask = torch.zeros(1, num_words, dtype=torch.int32, device=logits.device)
        for each in (None, mask):
            part.choose_greedily(hidden_rows[:1], mask=each)
            part.sample_part(hidden_rows[:1], batch, mask=each)

    def _sample_on_device(
        self, hidden_rows: torch.Tensor, batch: DeviceSamplingBatch, is_filtered: bool
    ) -> Drawn:
        part = self._part
        assert part.group is not None
        logits = part.compute_logits(hidden_rows)
        if is_filtered:
            logits = gather_logits(part, part.group, logits)
            return Drawn(sample_staged(logits, batch), logits)
        drawn = sample_part_staged(logits, batch, first_id=part.vocabulary.start)
        best = gather_best(part, part.group, drawn)
        return Drawn(torch.stack((best.token_ids, best.num_nans)), logits)


class CudaLeaderRunner(LeaderRunner, _CudaRankRunner):
    """Rank 0's."""

    @property
    def _part(self) -> LlamaModel:
        return self.model.part


class CudaFollowerRunner(FollowerRunner, _CudaRankRunner):
    """Any other rank's."""

    @property
    def _part(self) -> LlamaModel:
        return self.model

    def _make_sampling(
        self, max_num_seqs: int, logits_processors: Mapping[str, LogitsProcessorFactory]
    ) -> SamplingState:
        return FollowedSampling(
            max_num_seqs=max_num_seqs,
            vocab_size=self.model.config.vocab_size,
            device=self.model.device,
        )
