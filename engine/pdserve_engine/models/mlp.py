"""What a layer does with each token by itself: a protocol, and the kind that is not of experts."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, Protocol

from pdserve_engine.models.config import LlamaConfig
from pdserve_engine.models.shard import Shard
from pdserve_engine.models.weights.layer_reader import LayerReader
from pdserve_engine.models.weights.projection import Projection
from pdserve_kernels.decoder import DenseMlp, Mlp


class MlpWeights(Protocol):
    """The weights of a layer's mlp as the checkpoint names them, below the layer's prefix."""

    @property
    def projections(self) -> Mapping[str, Projection]:
        """Those that adapters may change, by the names of the mlp's `linears`."""

    def shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield what a dense checkpoint must have, and its whole shape."""

    @property
    def never_quantized(self) -> Collection[str]:
        """What is dense in every checkpoint."""

    def read(self, reader: LayerReader, prefix: str) -> Mlp:
        """Return the mlp, packed."""


class DenseMlpWeights(NamedTuple):
    """Gate and up in one product, and down."""

    gate_up: Projection
    down: Projection

    @classmethod
    def of(cls, config: LlamaConfig, shard: Shard) -> "DenseMlpWeights":
        hidden, size = config.hidden_size, config.intermediate_size
        rows, has_bias = shard.part(size), config.has_mlp_bias
        gate_up = (("mlp.gate_proj", size, rows), ("mlp.up_proj", size, rows))
        down = (("mlp.down_proj", hidden, slice(0, hidden)),)
        return cls(
            gate_up=Projection(gate_up, hidden, has_bias),
            down=Projection(down, size, has_bias, rows, shard.num_sums(size)),
        )

    @property
    def projections(self) -> Mapping[str, Projection]:
        return {"gate_up": self.gate_up, "down": self.down}

    def shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for projection in self.projections.values():
            yield from projection.shapes(prefix)

    @property
    def never_quantized(self) -> Collection[str]:
        return ()

    def read(self, reader: LayerReader, prefix: str) -> DenseMlp:
        return DenseMlp(
            gate_up=reader.linear(prefix, self.gate_up, num_parts=2),
            down=reader.linear(prefix, self.down),
        )
