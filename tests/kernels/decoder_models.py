"""Random decoders, whole or a rank's part, and the steps of a few requests."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from pdserve_kernels import cpu
from pdserve_kernels.decoder import Attention, Decoder, DecoderLayer, DenseMlp, MoeMlp
from pdserve_kernels.groups import NUM_SUMS
from pdserve_kernels.lora import LoraSegment
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.reference.moe import ExpertWeight, SharedExpert
from pdserve_kernels.reference.quantization import QuantizedWeight, quantize, quantize_fp8

BLOCKS_PER_REQUEST = 40
NUM_REQUESTS = 4
LENGTH = 90
QUANTIZE = {
    "int8": partial(quantize, bits=8, group_size=None),
    "int4": partial(quantize, bits=4, group_size=16),
    "fp8": quantize_fp8,
}


class Shape(NamedTuple):
    hidden: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 160
    has_bias: bool = False
    has_qk_norm: bool = True
    windows: tuple[int | None, ...] = (None, None)
    # The last layer has so many, of which tokens have two each, in place of an MLP.
    num_experts: int = 0
    # The size of one more that all tokens have, 0: there is none.
    shared_size: int = 0


class Chunk(NamedTuple):
    """Positions [start, end) of a request."""

    request: int
    start: int
    end: int


class Model:
    """Random layers, and the prompts of a few requests as embedded tokens.

    `group`: whose rank's part of the weights and heads it has. `kind`: bf16, int8, int4 or fp8.
    """

    def __init__(
        self, shape: Shape, kernels=cpu, dtype=torch.bfloat16, *, kind="bf16", group=None
    ) -> None:
        self.shape, self._dtype, self._kernels = shape, dtype, kernels
        self._kind = kind
        self.rank, self.size = (0, 1) if group is None else (group.rank, group.size)
        self._generator = torch.Generator().manual_seed(0)
        inverse = 10000.0 ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(200.0), inverse)
        layers = [self._layer(layer, window) for layer, window in enumerate(shape.windows)]
        self.decoder = Decoder(
            layers=tuple(layers),
            final_norm=self._norm(shape.hidden),
            num_heads=shape.num_heads // self.size,
            num_kv_heads=shape.num_kv_heads // self.size,
            head_dim=shape.head_dim,
            rms_norm_eps=1e-6,
            cos_sin_cache=torch.cat((angles.cos(), angles.sin()), -1),
            group=group,
        )
        self.embedded = [self._random(LENGTH, shape.hidden) for _ in range(NUM_REQUESTS)]

    def _layer(self, layer: int, window: int | None) -> DecoderLayer:
        shape = self.shape
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        has_experts = shape.num_experts > 0 and layer == len(shape.windows) - 1
        return DecoderLayer(
            input_norm=self._norm(shape.hidden),
            attention=Attention(
                qkv=self._cut_by_outputs((heads, kv_heads, kv_heads), shape.hidden),
                q_norm=self._norm(shape.head_dim) if shape.has_qk_norm else None,
                k_norm=self._norm(shape.head_dim) if shape.has_qk_norm else None,
                output=self._cut_by_inputs(shape.hidden, heads),
                group=0 if window is None else 1,
                slot=shape.windows[:layer].count(window),
                window=window,
            ),
            post_attention_norm=self._norm(shape.hidden),
            mlp=MoeMlp(experts=self._experts()) if has_experts else self._mlp(),
        )

    def _mlp(self) -> DenseMlp:
        hidden, size = self.shape.hidden, self.shape.intermediate
        return DenseMlp(
            gate_up=self._cut_by_outputs((size, size), hidden, num_parts=2),
            down=self._cut_by_inputs(hidden, size),
        )

    def _experts(self):
        shape = self.shape

        def mlp(size: int) -> tuple[ExpertWeight, ExpertWeight]:
            return self._weight(2 * size, shape.hidden)[0], self._weight(shape.hidden, size)[0]

        mlps = [mlp(shape.intermediate // 2) for _ in range(shape.num_experts)]
        router, shared = self._dense_weight(shape.num_experts, shape.hidden), None
        if shape.shared_size:
            gate = self._dense_weight(1, shape.hidden)
            shared = SharedExpert(gate, *mlp(shape.shared_size))
        return self._kernels.pack_moe(router, mlps, top_k=2, renormalize=True, shared=shared)

    def _cut_by_outputs(self, parts: Sequence[int], columns: int, **options: int):
        weight, bias = self._weight(sum(parts), columns)
        rows = torch.cat(
            [part.chunk(self.size)[self.rank] for part in torch.arange(sum(parts)).split(parts)]
        )
        bias = None if bias is None else bias[rows]
        return self._kernels.pack_linear(slice_of(weight, rows=rows), bias, **options)

    def _cut_by_inputs(self, rows: int, columns: int):
        weight, bias = self._weight(rows, columns)
        num_sums = 1 if columns % (2 * NUM_SUMS) else NUM_SUMS // self.size
        inputs = range(columns)[self.rank * columns // self.size :][: columns // self.size]
        weight = slice_of(weight, columns=slice(inputs.start, inputs.stop))
        return self._kernels.pack_linear(weight, bias, num_sums=num_sums)

    def _weight(self, rows: int, columns: int):
        weight = self._dense_weight(rows, columns)
        bias = self._random(rows) if self.shape.has_bias else None
        if self._kind == "bf16":
            return weight, bias
        return QUANTIZE[self._kind](weight), bias

    def _dense_weight(self, rows: int, columns: int) -> torch.Tensor:
        weight = (self._random(rows, columns) * columns**-0.5).to(torch.bfloat16)
        return weight.to(self._dtype)

    def _norm(self, size: int) -> torch.Tensor:
        return (1 + 0.1 * self._random(size)).to(torch.bfloat16).to(self._dtype)

    def _random(self, *shape: int) -> torch.Tensor:
        """The same numbers in every dtype."""
        random = torch.randn(shape, generator=self._generator)
        return random.to(torch.bfloat16).to(self._dtype)

    def new_cache(self, block_size: int = 16) -> torch.Tensor:
        """Blocks of NaN, each with room for the layers of one group."""
        shape = self.shape
        num_groups = len(set(shape.windows))
        slots = max(shape.windows.count(window) for window in set(shape.windows))
        num_blocks = NUM_REQUESTS * BLOCKS_PER_REQUEST * num_groups
        num_heads = shape.num_kv_heads // self.size
        size = (num_blocks, num_heads, slots, 2, block_size, shape.head_dim)
        return torch.full(size, torch.nan, dtype=self._dtype)

    def step(self, chunks: Sequence[Chunk], block_size: int = 16):
        """The hidden states, positions and metadata of a step, decodes first."""
        positions = torch.cat([torch.arange(c.start, c.end) for c in chunks])
        hidden_states = torch.cat([self.embedded[c.request][c.start : c.end] for c in chunks])
        groups = range(len(set(self.shape.windows)))
        return hidden_states, positions, tuple(describe(chunks, g, block_size) for g in groups)


def describe(chunks: Iterable[Chunk], group: int, block_size: int) -> AttentionMetadata:
    chunks = list(chunks)
    lengths = [c.end - c.start for c in chunks]
    order = torch.randperm(
        NUM_REQUESTS * BLOCKS_PER_REQUEST, generator=torch.Generator().manual_seed(group)
    )
    tables = (order + group * len(order)).view(NUM_REQUESTS, -1)
    slots = [
        tables[c.request][positions // block_size] * block_size + positions % block_size
        for c in chunks
        for positions in [torch.arange(c.start, c.end)]
    ]
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor([c.end for c in chunks], dtype=torch.int32),
        block_table=tables[[c.request for c in chunks]].to(torch.int32),
        slot_mapping=torch.cat(slots),
        query_lens_host=tuple(lengths),
        seq_lens_host=tuple(c.end for c in chunks),
        num_decodes=lengths.count(1),
    )


def slice_of(weight, rows=slice(None), columns=slice(None)):
    """Some rows and columns; integers are cut between groups of inputs, or within the only one."""
    if not isinstance(weight, QuantizedWeight):
        return weight[rows][:, columns]
    start, stop, _ = columns.indices(weight.shape[1])
    groups = slice(0, 1)
    if weight.scales.shape[1] > 1:
        groups = slice(start // weight.group_size, -(-stop // weight.group_size))
    return dataclasses.replace(
        weight,
        values=weight.values[rows][:, columns],
        scales=weight.scales[rows][:, groups],
        zeros=None if weight.zeros is None else weight.zeros[rows][:, groups],
    )


def check_chunks(
    model: Model,
    packed,
    lora_of: Callable[[Sequence[Chunk]], Sequence[LoraSegment]] = lambda chunks: (),
) -> None:
    """All requests have the bits, computed in random chunks and beside random others, that each has
    whole and alone.
    """
    cache, chance = model.new_cache(), random.Random(0)
    done, parts = [0] * NUM_REQUESTS, [[] for _ in range(NUM_REQUESTS)]
    while min(done) < LENGTH:
        sizes = [min(chance.choice([1, 1, 3, 17, 40]), LENGTH - start) for start in done]
        chunks = [
            Chunk(request, done[request], done[request] + size)
            for request, size in enumerate(sizes)
            if size and (request == 0 or done[0] == LENGTH or chance.random() < 0.7)
        ]
        chunks.sort(key=lambda chunk: chunk.end - chunk.start > 1)
        rows = _run(model, packed, chunks, cache, lora_of)
        for chunk, part in zip(chunks, rows, strict=True):
            parts[chunk.request].append(part)
            done[chunk.request] = chunk.end
    for request, of_request in enumerate(parts):
        whole = [Chunk(request, 0, LENGTH)]
        (alone,) = _run(model, packed, whole, model.new_cache(), lora_of)
        assert torch.equal(torch.cat(of_request), alone)


def _run(model: Model, packed, chunks: Sequence[Chunk], cache: torch.Tensor, lora_of):
    """The states of each chunk."""
    states, positions, metadata = model.step(chunks)
    output = cpu.run_decoder(states, packed, positions, cache, metadata, lora_of(chunks))
    return output.split([chunk.end - chunk.start for chunk in chunks])
