"""The runner of a model that pools, on CUDA."""

import torch

from pdserve_engine.runner.cuda_runner import WARM_UP_ROWS, CudaModelRunner
from pdserve_engine.runner.pooling_runner import PoolingRunner
from pdserve_engine.sampling.logits_rows import Rows


class CudaPoolingRunner(PoolingRunner, CudaModelRunner):
    """Each step waits for its vectors, and for the steps before it. Graphs would record a draw of
    tokens, so there are none.
    """

    def _looks_back(self, batch_rows: Rows) -> bool:
        return True

    @torch.inference_mode()
    def warm_up(self) -> None:
        """See ModelRunner."""
        self._warm_up_forward()
        config = self.model.config
        for num_rows in WARM_UP_ROWS if self._pooler.num_labels else ():
            shape = (num_rows, config.hidden_size)
            self.model.compute_logits(torch.zeros(shape, dtype=config.dtype, device=self._device))

    def capture_graphs(self) -> None:
        """Nothing is recorded."""
