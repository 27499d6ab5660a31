"""Reading a layer's weights from a checkpoint, and packing them for a kernel set."""

from dataclasses import dataclass
from typing import Any

import torch

from pdserve_engine.models.quantization import Quantization
from pdserve_engine.models.weights.loader import Checkpoint, WeightPart
from pdserve_engine.models.weights.projection import Projection
from pdserve_engine.models.weights.quantized import read_projection
from pdserve_kernels import KernelSet
from pdserve_kernels.reference.quantization import QuantizedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReader:
    """Where weights come from, who packs them, and in which dtype. Raises ModelError."""

    checkpoint: Checkpoint
    kernels: KernelSet
    quantization: Quantization | None
    dtype: torch.dtype
    device: torch.device

    def tensor(self, *weights: str | WeightPart) -> torch.Tensor:
        """Return weights as they are, stacked by rows: [rows, ...] in the model's dtype."""
        return self.checkpoint.read(*weights, dtype=self.dtype, device=self.device)

    def weight(self, prefix: str, projection: Projection) -> torch.Tensor | QuantizedWeight:
        """Return this rank's part of a projection's weight, [out_features, in_features] for
        activations of the model's dtype.
        """
        return read_projection(
            self.checkpoint,
            projection.weights(prefix),
            self.quantization,
            dtype=self.dtype,
            device=self.device,
        )

    def linear(self, prefix: str, projection: Projection, *, num_parts: int = 1) -> Any:
        """Return this rank's part of a projection, packed."""
        weight = self.weight(prefix, projection)
        bias = self.tensor(*projection.biases(prefix)) if projection.has_bias else None
        return self.kernels.pack_linear(
            weight, bias, num_parts=num_parts, num_sums=projection.num_sums
        )
