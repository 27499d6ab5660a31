"""What the runner asks of a model, whichever code computes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch

from pdserve_engine.lora.adapter import LoraAdapter
from pdserve_engine.lora.adapter_config import Targets
from pdserve_engine.models.config import ModelConfig
from pdserve_engine.models.stage import Stage
from pdserve_kernels.groups import Group
from pdserve_kernels.lora import LoraSegment
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.sampling_batch import Argmax, SamplingBatch

if TYPE_CHECKING:  # needs Triton
    from pdserve_kernels.triton.linears.step_lora import StepLora

# The adapters of a step's tokens: segments in ascending order, or on CUDA what lies on the device,
# where a graph's replay reads it.
StepAdapters: TypeAlias = "Sequence[LoraSegment] | StepLora"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs:
    """One step's tokens, those of a request next to each other, and where their KV is."""

    # [num_tokens] int64 on the model's device.
    token_ids: torch.Tensor
    # [num_tokens] int64 on the model's device: of each token in its request.
    positions: torch.Tensor
    # [num_blocks, num_kv_heads, num_slots, 2, block_size, head_dim]
    kv_cache: torch.Tensor
    # One entry per KV group of `group_layers(config.attention_windows)`.
    metadata: tuple[AttentionMetadata, ...]
    # The tokens that have adapters, each adapter as `pack_adapter` made it. Models that cannot be
    # captured take segments alone.
    lora: StepAdapters = ()
    # What a model that sees pictures takes instead of the embeddings of the tokens at mm_rows ([n]
    # int64): [n, hidden_size]. None: there are none.
    mm_embeds: torch.Tensor | None = None
    mm_rows: torch.Tensor | None = None


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

    @property
    def can_be_captured(self) -> bool:
        """Do `forward` and `compute_logits` on CUDA only enqueue what their inputs' shapes say, so
        that a graph replays them?
        """
        ...

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Write the tokens' KV into the cache; return normed states [num_tokens, hidden_size] in
        the model's dtype.
        """
        ...

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab_size] of the n hidden rows, in fp32 or the model's dtype; of a
        classifier [n, num_labels]. A model of embeddings has none.
        """
        ...

    def choose_greedily(
        self, hidden_rows: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> Argmax:
        """Return the argmax of the n rows' logits, which need not be in memory for that.

        A mask is int32 [n, ceil(vocab_size / 32)] on the model's device: a set bit allows a token.
        """
        ...


@runtime_checkable
class ModelPart(Model, Protocol):
    """One rank's part of a model: some of its layers, of its heads and of its vocabulary."""

    @property
    def group(self) -> Group | None:
        """The ranks that have the other heads; None if there are none. With a group `forward` is
        all ranks' work, and logits are those of the rank's `vocabulary`.
        """

    @property
    def stage(self) -> Stage:
        """Which of the layers it has."""

    @property
    def vocabulary(self) -> slice:
        """The token ids whose logits it has."""

    def sample_part(
        self, hidden_rows: torch.Tensor, batch: SamplingBatch, *, mask: torch.Tensor | None = None
    ) -> Argmax:
        """Return of the rank's `vocabulary` the token that would win in each of the n rows, none of
        which has a filter, numbered within it. The mask is of its tokens alone.
        """


@runtime_checkable
class SupportsMultiModal(Protocol):
    """A model that sees pictures (`ForwardInputs.mm_embeds`)."""

    def embed_picture(self, pixels: bytes) -> torch.Tensor:
        """Return the embeddings [num_image_tokens, hidden_size], in the model's dtype, of a
        picture, RGB, row by row. Their bits depend on nothing else.
        """
        ...


@runtime_checkable
class SupportsLora(Protocol):
    """A model whose steps may have adapters (`ForwardInputs.lora`)."""

    @property
    def lora_targets(self) -> Targets:
        """The linears that adapters may change, by the names that peft knows them by."""
        ...

    def max_adapter_bytes(self, max_rank: int) -> int:
        """Return the most that an adapter takes of this rank's memory."""
        ...

    def pack_adapter(self, adapter: LoraAdapter) -> Any:
        """Return an adapter as `forward` takes it. It goes with any start of the same model."""
        ...
