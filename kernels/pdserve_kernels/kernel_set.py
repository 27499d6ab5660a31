"""What every kernel set has: functions with the contracts of `pdserve_kernels.reference`."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from pdserve_kernels.decoder import Decoder
from pdserve_kernels.kv_scales import NO_SCALES, KVScales
from pdserve_kernels.lora import LoraLayer, LoraPart, LoraRows
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.reference.moe import ExpertWeight, SharedExpert
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

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """Return x [..., in_features] @ weight^T + bias, [..., out_features] in x's dtype, bf16 or
        fp32.
        """

    def linear_silu_mul(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """Return silu(gate) * up of linear(x, packed) = [gate | up], [num_tokens, out_features / 2]
        in x's dtype, bf16 or fp32.
        """

    def linear_argmax(
        self, x: torch.Tensor, packed: Any, *, mask: torch.Tensor | None = None
    ) -> Argmax:
        """Return argmax(linear(x, packed)) for x [n, in_features], bf16 or fp32; mask as in
        `argmax`.
        """

    def linear_sums(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """Return x [..., in_features] @ weight^T without the bias, fp32 [..., out_features]."""

    def pack_linear(
        self,
        weight: Any,
        bias: torch.Tensor | None = None,
        *,
        num_parts: int = 1,
        num_sums: int = 1,
    ) -> Any:
        """Prepare a weight [out_features, in_features], bf16, fp32 or a QuantizedWeight, and a bias
        [out_features]. Raises ValueError.
        """

    def linear_lora(self, x: torch.Tensor, packed: Any, rows: Sequence[LoraRows]) -> torch.Tensor:
        """Return linear(x, packed) [n, out_features], in x's dtype, with what the rows' adapters
        add.
        """

    def pack_lora(self, parts: Sequence[LoraPart], packed: Any) -> Any: ...
    def pack_adapter(self, layers: Sequence[LoraLayer]) -> Any: ...

    def fused_moe(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """Return the weighted sum of the MLPs that each row of x [num_tokens, hidden_size] is
        routed to, of the same shape and dtype, bf16 or fp32.
        """

    def pack_moe(
        self,
        router: torch.Tensor,
        experts: Iterable[tuple[ExpertWeight, ExpertWeight]],
        *,
        top_k: int,
        renormalize: bool,
        shared: SharedExpert | None = None,
    ) -> Any:
        """Prepare a router [num_experts, hidden_size] and for each expert gate and up [2 *
        intermediate_size, hidden_size] and down [hidden_size, intermediate_size], all of one dtype,
        experts perhaps quantized. A shared one is had by all rows. Raises ValueError.
        """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the norm of x [..., hidden_size], of its shape and dtype, times weight
        [hidden_size].
        """

    def fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rms_norm(x + residual), x + residual), both [..., hidden_size] in x's dtype."""

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(x[:, :I]) * x[:, I:] of x [num_tokens, 2 * I]: [num_tokens, I] in x's own
        dtype, bf16 or fp32.
        """

    def rotary_embedding(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        cos_sin_cache: torch.Tensor,
    ) -> None:
        """Rotate query [num_tokens, num_heads, head_dim] and key [num_tokens, num_kv_heads,
        head_dim] in place. positions are int64 [num_tokens], cos_sin_cache [max_position, rot_dim]
        is fp32 or of query's dtype.
        """

    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
        scales: KVScales = NO_SCALES,
    ) -> None:
        """Write key and value [num_tokens, num_kv_heads, head_dim] to the slots of slot_mapping,
        int64 [num_tokens], -1 for padding. kv_cache is [num_blocks, num_kv_heads, num_slots, 2,
        block_size, head_dim], of key's dtype or fp8.
        """

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
    ) -> torch.Tensor:
        """Return what query [num_tokens, num_heads, head_dim] finds in kv_cache [num_blocks,
        num_kv_heads, num_slots, 2, block_size, head_dim], of query's dtype or fp8, in query's shape
        and dtype. Raises ValueError.
        """

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
    ) -> torch.Tensor:
        """Return the normed states [num_tokens, hidden_size] behind the last layer, of
        hidden_states' shape and dtype; positions are int64 [num_tokens], kv_cache is as in
        `paged_attention`.
        """

    def logprob_terms(self, logits: torch.Tensor, chosen: torch.Tensor) -> LogprobTerms:
        """Return the terms of fp32 logits [n, vocab_size] and chosen tokens, int64 [n]. Raises
        ValueError.
        """

    def penalize(self, logits: torch.Tensor, tokens: PenalizedTokens) -> None:
        """Penalise fp32 logits [n, vocab_size] in place. Raises ValueError."""

    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch, *, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a token for each row of logits [n, vocab_size], of any float dtype, as int64 [n];
        mask as in `argmax`.
        """

    def sample_part(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        *,
        first_id: int,
        mask: torch.Tensor | None = None,
    ) -> Sampled:
        """Return the tokens that would win among those from first_id on, of logits [n, k], of any
        float dtype, numbered within them. mask is int32 [n, ceil(k / 32)].
        """

    def argmax(self, logits: torch.Tensor, *, mask: torch.Tensor | None = None) -> Argmax:
        """Return the best token of each row of logits [n, vocab_size], of any float dtype; mask is
        int32 [n, ceil(vocab_size / 32)], a bit for each token that is allowed.
        """

    def count_nans(self, logits: torch.Tensor) -> torch.Tensor:
        """Return how many NaN each row of logits [n, vocab_size], of any float dtype, has: int64
        [n].
        """

    def kv_tile_format(self, dtype: torch.dtype, block_size: int, head_dim: int) -> str: ...
    def is_row_independent(self, dtype: torch.dtype) -> bool: ...
    def is_shard_independent(self, dtype: torch.dtype) -> bool: ...
    def is_thread_independent(self, dtype: torch.dtype, block_size: int, head_dim: int) -> bool: ...
