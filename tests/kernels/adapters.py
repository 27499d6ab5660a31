"""Random adapters for random decoders."""

import torch
from decoder_models import Model

from pdserve_kernels.lora import LoraPart, LoraSegment


def make_parts(sizes, in_features, rank, dtype, *, seed=0):
    """For each size a part with so many outputs, or None for a gap."""
    generator = torch.Generator().manual_seed(seed)
    parts, first = [], 0
    for index, (size, has_part) in enumerate(sizes):
        if has_part:
            a = torch.randn(rank + index, in_features, generator=generator) * in_features**-0.5
            b = torch.randn(size, rank + index, generator=generator) * rank**-0.5
            a, b = (x.bfloat16().to(dtype) for x in (a, b))
            parts.append(LoraPart(first, a, b, 0.5 + index))
        first += size
    return parts


def make_adapter(kernels, model: Model, rank: int, dtype=torch.bfloat16):
    """One without a part in some linears; of a model that is a rank's part, that part of it."""
    shape, layers = model.shape, []
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for index, layer in enumerate(model.decoder.layers):
        has_all, seed = index == 0, rank + 10 * index
        qkv = [(heads, True), (kv_heads, has_all), (kv_heads, True)]
        gate_up = [(shape.intermediate, has_all), (shape.intermediate, True)]
        parts = {
            "qkv": cut_by_outputs(model, qkv, shape.hidden, rank, dtype, seed),
            "attention_output": cut_by_inputs(
                model, [(shape.hidden, has_all)], heads, rank, dtype, seed
            ),
            "gate_up": cut_by_outputs(model, gate_up, shape.hidden, rank, dtype, seed),
            "down": cut_by_inputs(
                model, [(shape.hidden, True)], shape.intermediate, rank, dtype, seed
            ),
        }
        linears = layer.linears.items()
        layers.append({name: kernels.pack_lora(parts[name], weight) for name, weight in linears})
    return kernels.pack_adapter(layers)


def cut_by_outputs(model: Model, sizes, in_features, rank, dtype, seed):
    parts = make_parts(sizes, in_features, rank, dtype, seed=seed)
    return [
        part._replace(
            first_output=part.first_output // model.size,
            b=part.b.chunk(model.size)[model.rank],
        )
        for part in parts
    ]


def cut_by_inputs(model: Model, sizes, in_features, rank, dtype, seed):
    parts = make_parts(sizes, in_features, rank, dtype, seed=seed)
    return [part._replace(a=part.a.chunk(model.size, 1)[model.rank]) for part in parts]


def segments(chunks, adapters) -> list[LoraSegment]:
    """Return the rows of chunks whose requests have one of the adapters, which may be None."""
    found, begin = [], 0
    for chunk in chunks:
        end = begin + chunk.end - chunk.start
        if adapters[chunk.request] is not None:
            found.append(LoraSegment(begin, end, adapters[chunk.request]))
        begin = end
    return found
