"""Pipeline parallelism: which layers a rank has, and how their states go from stage to stage.

Source of the design: GPipe (Huang et al. 2019, arXiv:1811.06965), for inference: a step of the
scheduler's is a micro-batch.
"""

from dataclasses import dataclass

import torch

from pdserve_engine.models.config import LlamaConfig, ModelError
from pdserve_kernels.groups import Group


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `index` of `count`. States come from `before` and go to `after`, groups of two in which
    the earlier stage is rank 0; None where there is no such stage.
    """

    index: int = 0
    count: int = 1
    before: Group | None = None
    after: Group | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Return this stage's layers of so many."""
        return range(
            num_layers * self.index // self.count, num_layers * (self.index + 1) // self.count
        )

    def receive(self, num_tokens: int, config: LlamaConfig) -> torch.Tensor:
        """Return the residual [num_tokens, hidden_size], in the model's dtype, behind the stage
        before, on the CPU.
        """
        assert self.before is not None
        states = torch.empty(num_tokens, config.hidden_size, dtype=config.dtype)
        self.before.broadcast(states)
        return states

    def send(self, states: torch.Tensor) -> None:
        """Hand the residual [num_tokens, hidden_size], in the model's dtype, on; returns when the
        stage behind has it.
        """
        assert self.after is not None
        self.after.broadcast(states)


ALL_LAYERS = Stage()


def check_stages(config: LlamaConfig, count: int) -> None:
    """Raise ModelError, with the numbers, if the model cannot be cut in so many stages."""
    if count == 1:
        return
    if count > config.num_layers:
        raise ModelError(
            f"pipeline_parallel_size is {count}, the model has {config.num_layers} layers"
        )
