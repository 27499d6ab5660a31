"""The mlp of a layer with experts: where a checkpoint has its weights, and how they are read."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from pdserve_engine.models.experts import ExpertNames, ExpertsConfig
from pdserve_engine.models.weights.layer_reader import LayerReader
from pdserve_engine.models.weights.loader import WeightPart
from pdserve_engine.models.weights.projection import Projection
from pdserve_engine.models.weights.quantized import round_at_load
from pdserve_kernels.decoder import MoeMlp
from pdserve_kernels.reference.moe import ExpertWeight, SharedExpert

# What transformers 5 calls them in memory, all experts in one tensor; some tools store that.
FUSED_MODULE = "mlp."
FUSED_GATE_UP, FUSED_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# The expert that all tokens have is stored by itself, however the others are.
SHARED_GATE, SHARED_STEM = "mlp.shared_expert_gate.weight", "mlp.shared_expert."


class _Expert(NamedTuple):
    """Gate and up in one product, and down."""

    gate_up: Projection
    down: Projection

    @classmethod
    def of(cls, stem: str, names: ExpertNames, hidden: int, size: int) -> "_Expert":
        """Of `size`, with linears that are called so below the stem."""
        gate_up = tuple((stem + name, size, slice(0, size)) for name in (names.gate, names.up))
        down = ((stem + names.down, hidden, slice(0, hidden)),)
        return cls(Projection(gate_up, hidden, False), Projection(down, size, False))

    def shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for projection in self:
            yield from projection.shapes(prefix)

    def read(self, reader: LayerReader, prefix: str) -> tuple[ExpertWeight, ExpertWeight]:
        """Return gate and up, in one, and down."""
        return reader.weight(prefix, self.gate_up), reader.weight(prefix, self.down)


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

    @property
    def never_quantized(self) -> Collection[str]:
        return (self._router, SHARED_GATE)

    def shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        count, size = self.config.num_experts, self.config.intermediate_size
        yield prefix + self._router, (count, self.hidden_size)
        if (shared := self._shared) is not None:
            yield prefix + SHARED_GATE, (1, self.hidden_size)
            yield from shared.shapes(prefix)
        if self.is_fused:
            yield prefix + FUSED_GATE_UP, (count, 2 * size, self.hidden_size)
            yield prefix + FUSED_DOWN, (count, self.hidden_size, size)
            return
        for expert in range(count):
            yield from self._expert(expert).shapes(prefix)

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
        if (shared := self._shared) is None:
            return None
        return SharedExpert(reader.tensor(prefix + SHARED_GATE), *shared.read(reader, prefix))

    def _read_expert(
        self, reader: LayerReader, prefix: str, expert: int
    ) -> tuple[ExpertWeight, ExpertWeight]:
        """Return its gate and up, in one, and its down."""
        if not self.is_fused:
            return self._expert(expert).read(reader, prefix)
        own = slice(expert, expert + 1)
        gate_up, down = (
            round_at_load(reader.tensor(WeightPart(prefix + name, own))[0], reader.quantization)
            for name in (FUSED_GATE_UP, FUSED_DOWN)
        )
        return gate_up, down

    @property
    def _router(self) -> str:
        module = FUSED_MODULE if self.is_fused else self.config.names.module
        return f"{module}gate.weight"

    def _expert(self, expert: int) -> _Expert:
        config = self.config
        stem = f"{config.names.module}experts.{expert}."
        return _Expert.of(stem, config.names, self.hidden_size, config.intermediate_size)

    @property
    def _shared(self) -> _Expert | None:
        size = self.config.shared_size
        if size is None:
            return None
        return _Expert.of(SHARED_STEM, self.config.names, self.hidden_size, size)
