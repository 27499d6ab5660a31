"""What the runner asks of a model, whichever code computes it."""

from typing import Protocol

import torch

from pdserve_engine.models.config import ModelConfig
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.sampling_batch import Argmax


class Model(Protocol):
    """A decoder-only model on one device. Keeps no state: the KV cache belongs to the caller."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def is_row_independent(self) -> bool:
        """Do a token's states depend on its own sequence only, to the bit, in any batch and with
        any chunks? What exact determinism needs.
        """
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: tuple[AttentionMetadata, ...],
    ) -> torch.Tensor:
        """Write the tokens' KV into the cache; return normed states [num_tokens, hidden_size].

        token_ids and positions are [num_tokens] int64 on the model's device; kv_cache is
        [num_blocks, num_kv_heads, num_slots, 2, block_size, head_dim]; metadata has one entry per
        KV group of `group_layers(config.attention_windows)`.
        """
        ...

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab_size] of the n hidden rows, in fp32 or the model's dtype."""
        ...

    def choose_greedily(self, hidden_rows: torch.Tensor) -> Argmax:
        """Return the argmax of the n rows' logits, which need not be in memory for that."""
        ...
