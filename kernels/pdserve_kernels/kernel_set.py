"""What every kernel set has: functions with the contracts of `pdserve_kernels.reference`."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from pdserve_kernels.decoder import Decoder
from pdserve_kernels.kv_scales import NO_SCALES, KVScales
from pdserve_kernels.lora import LoraLayer, LoraPart, LoraRows
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.sampling_batch import (
    Argmax,
    LogprobTerms,
    PenalizedTokens,
    Sampled,
    SamplingBatch,
)


class KernelSet(Protocol):
    """The functions of a set, which is a module. What the functions that pack return is the
    set's own, and for its own functions alone.
    """

    __name__: str

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor: ...
    def linear_silu_mul(self, x: torch.Tensor, packed: Any) -> torch.Tensor: ...
    def linear_argmax(
        self, x: torch.Tensor, packed: Any, *, mask: torch.Tensor | None = None
    ) -> Argmax: ...
    def linear_sums(self, x: torch.Tensor, packed: Any) -> torch.Tensor: ...
    def pack_linear(
        self,
        weight: Any,
        bias: torch.Tensor | None = None,
        *,
        num_parts: int = 1,
        num_sums: int = 1,
    ) -> Any: ...

    def linear_lora(
        self, x: torch.Tensor, packed: Any, rows: Sequence[LoraRows]
    ) -> torch.Tensor: ...
    def pack_lora(self, parts: Sequence[LoraPart], packed: Any) -> Any: ...
    def pack_adapter(self, layers: Sequence[LoraLayer]) -> Any: ...

    def fused_moe(self, x: torch.Tensor, packed: Any) -> torch.Tensor: ...
    def pack_moe(
        self,
        router: torch.Tensor,
        experts: Iterable[tuple[torch.Tensor, torch.Tensor]],
        *,
        top_k: int,
        renormalize: bool,
    ) -> Any: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
    def fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor: ...
    def rotary_embedding(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        cos_sin_cache: torch.Tensor,
    ) -> None: ...

    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
        scales: KVScales = NO_SCALES,
    ) -> None: ...
    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        metadata: AttentionMetadata,
        scale: float,
        *,
        window: int | None = None,
        softcap: float = 0.0,
        scales: KVScales = NO_SCALES,
    ) -> torch.Tensor: ...

    def pack_decoder(self, decoder: Decoder) -> Any: ...
    def run_decoder(
        self,
        hidden_states: torch.Tensor,
        packed: Any,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Sequence[AttentionMetadata],
        # A sequence of LoraSegments, or what the set has for the same.
        lora: Any = (),
    ) -> torch.Tensor: ...

    def logprob_terms(self, logits: torch.Tensor, chosen: torch.Tensor) -> LogprobTerms: ...
    def penalize(self, logits: torch.Tensor, tokens: PenalizedTokens) -> None: ...
    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch, *, mask: torch.Tensor | None = None
    ) -> torch.Tensor: ...
    def sample_part(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        *,
        first_id: int,
        mask: torch.Tensor | None = None,
    ) -> Sampled: ...
    def argmax(self, logits: torch.Tensor, *, mask: torch.Tensor | None = None) -> Argmax: ...
    def count_nans(self, logits: torch.Tensor) -> torch.Tensor: ...

    def kv_tile_format(self, dtype: torch.dtype, block_size: int, head_dim: int) -> str: ...
    def is_row_independent(self, dtype: torch.dtype) -> bool: ...
    def is_shard_independent(self, dtype: torch.dtype) -> bool: ...
    def is_thread_independent(self, dtype: torch.dtype, block_size: int, head_dim: int) -> bool: ...
