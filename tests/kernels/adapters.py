"""Random adapters for random decoders."""

import torch
from decoder_models import Model

from pdserve_kernels.lora import LoraLayer, LoraPart


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
    """One without a part in some linears."""
    shape, layers = model.shape, []
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for index, layer in enumerate(model.decoder.layers):
        has_all = index == 0
        sizes = {
            "qkv": ([(heads, True), (kv_heads, has_all), (kv_heads, True)], shape.hidden),
            "attention_output": ([(shape.hidden, has_all)], heads),
            "gate_up": ([(shape.intermediate, has_all), (shape.intermediate, True)], shape.hidden),
            "down": ([(shape.hidden, True)], shape.intermediate),
        }
        packed = {
            name: kernels.pack_lora(
                make_parts(*size, rank, dtype, seed=rank + 10 * index), getattr(layer, name)
            )
            for name, size in sizes.items()
        }
        layers.append(LoraLayer(**packed))
    return kernels.pack_adapter(layers)
