"""The mlp of a layer with experts: where a checkpoint has its weights, and how they are read."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch

from pdserve_engine.models.experts import ExpertsConfig
from pdserve_engine.models.weights.layer_reader import LayerReader
from pdserve_engine.models.weights.loader import WeightPart
from pdserve_engine.models.weights.projection import Projection
from pdserve_kernels.decoder import MoeMlp
from pdserve_kernels.reference.moe import SharedExpert

# What transformers 5 calls them in memory, all experts in one tensor; some tools store that.
FUSED_MODULE = "mlp."
FUSED_GATE_UP, FUSED_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# The expert that all tokens have is stored by itself, however the others are.
SHARED_GATE = "mlp.shared_expert_gate.weight"
SHARED_GATE_UP = ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight")
SHARED_DOWN = "mlp.shared_expert.down_proj.weight"


class MoeWeights(NamedTuple):
    """`mlp.MlpWeights` of experts and their router. Adapters change none of them."""

    config: ExpertsConfig
    hidden_size: int
    is_fused: bool

    @classmethod
    def of(
        cls, config: ExpertsConfig, hidden_size: int, prefix: str, names: Collection[str]
    ) -> "MoeWeights":
        """Of a checkpoint that has these names, and a layer's prefix."""
        return cls(config, hidden_size, prefix + FUSED_GATE_UP in names)

    @property
    def projections(self) -> Mapping[str, Projection]:
        return {}

    def shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        count, size = self.config.num_experts, self.config.intermediate_size
        yield prefix + self._router, (count, self.hidden_size)
        if (shared_size := self.config.shared_size) is not None:
            yield prefix + SHARED_GATE, (1, self.hidden_size)
            for name in SHARED_GATE_UP:
                yield prefix + name, (shared_size, self.hidden_size)
            yield prefix + SHARED_DOWN, (self.hidden_size, shared_size)
        if self.is_fused:
            yield prefix + FUSED_GATE_UP, (count, 2 * size, self.hidden_size)
            yield prefix + FUSED_DOWN, (count, self.hidden_size, size)
            return
        for expert in range(count):
            for name in self._gate_up(expert):
                yield prefix + name, (size, self.hidden_size)
            yield prefix + self._down(expert), (self.hidden_size, size)

    def read(self, reader: LayerReader, prefix: str) -> MoeMlp:
        config = self.config
        experts = reader.kernels.pack_moe(
            reader.tensor(prefix + self._router),
            (self._read_expert(reader, prefix, index) for index in range(config.num_experts)),
            top_k=config.num_experts_per_tok,
            renormalize=config.norm_topk_prob,
            shared=self._read_shared(reader, prefix),
        )
        return MoeMlp(experts=experts)

    def _read_shared(self, reader: LayerReader, prefix: str) -> SharedExpert | None:
        if self.config.shared_size is None:
            return None
        return SharedExpert(
            gate=reader.tensor(prefix + SHARED_GATE),
            gate_up=reader.tensor(*(prefix + name for name in SHARED_GATE_UP)),
            down=reader.tensor(prefix + SHARED_DOWN),
        )

    def _read_expert(
        self, reader: LayerReader, prefix: str, expert: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return its gate and up, in one, and its down."""
        if self.is_fused:
            own = slice(expert, expert + 1)
            gate_up, down = (
                reader.tensor(WeightPart(prefix + name, own))
                for name in (FUSED_GATE_UP, FUSED_DOWN)
            )
            return gate_up[0], down[0]
        gate_up = reader.tensor(*(prefix + name for name in self._gate_up(expert)))
        return gate_up, reader.tensor(prefix + self._down(expert))

    @property
    def _router(self) -> str:
        module = FUSED_MODULE if self.is_fused else self.config.names.module
        return f"{module}gate.weight"

    def _gate_up(self, expert: int) -> tuple[str, str]:
        stem, names = self._stem(expert), self.config.names
        return f"{stem}{names.gate}.weight", f"{stem}{names.up}.weight"

    def _down(self, expert: int) -> str:
        return f"{self._stem(expert)}{self.config.names.down}.weight"

    def _stem(self, expert: int) -> str:
        return f"{self.config.names.module}experts.{expert}."
