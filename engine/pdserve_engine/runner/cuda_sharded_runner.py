"""The runners on CUDA of a model over several ranks.

All ranks know what requests ask for, and compute a step that is launched ahead to its end, the same
on each: they exchange the best token of each part of the vocabulary, or for rows with filters all
logits. In a step that looks back rank 0 leads, as on the CPU.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch

from pdserve_engine.models.llama import LlamaModel
from pdserve_engine.runner.cuda_runner import CudaModelRunner
from pdserve_engine.runner.sharded_model import gather_best, gather_logits
from pdserve_engine.runner.sharded_runner import FollowerRunner, LeaderRunner
from pdserve_engine.sampling.processors import LogitsProcessorFactory
from pdserve_engine.sampling.state import FollowedSampling, SamplingState
from pdserve_kernels.triton.device_batch import DeviceSamplingBatch
from pdserve_kernels.triton.sampling import sample_part_staged, sample_staged


class _CudaRankRunner(CudaModelRunner):
    _tells_filters_apart = True

    @property
    @abstractmethod
    def _part(self) -> LlamaModel:
        """This rank's part of the model."""

    def _sample_on_device(
        self, hidden_rows: torch.Tensor, batch: DeviceSamplingBatch, is_filtered: bool
    ) -> torch.Tensor:
        part = self._part
        assert part.group is not None
        logits = part.compute_logits(hidden_rows)
        if is_filtered:
            logits = gather_logits(part, part.group, logits)
            return sample_staged(logits, batch)
        drawn = sample_part_staged(logits, batch, first_id=part.vocabulary.start)
        best = gather_best(part, part.group, drawn)
        return torch.stack((best.token_ids, best.num_nans))


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
