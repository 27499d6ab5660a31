"""Every other kernel of a layer against what its bytes or FLOPs take."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from gpu.bench import Bench
from gpu.cases import Case, record_case
from gpu.shapes import BLOCK_SIZE, WEIGHT_STD, Shape

from pdserve_kernels import select
from pdserve_kernels.decoder import Attention, Decoder, DecoderLayer, DenseMlp
from pdserve_kernels.reference.quantization import QuantizedWeight, quantize, quantize_fp8

EPS = 1e-5
# Of the rotary embedding's table.
NUM_POSITIONS = 4096


def _in_blocks(weight: torch.Tensor) -> QuantizedWeight:
    """Round to FP8 with a scale for every 128 inputs, as checkpoints of blocks have it."""
    rounded = quantize_fp8(weight)
    groups = -(-weight.shape[1] // 128)
    scales = rounded.scales.expand(-1, groups).contiguous()
    return replace(rounded, scales=scales, group_size=128)


# What linears are timed with.
WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor | QuantizedWeight]] = {
    "bf16": lambda weight: weight,
    "int8": functools.partial(quantize, bits=8, group_size=None),
    "fp8": quantize_fp8,
    "fp8 in blocks": _in_blocks,
}


def run(bench: Bench) -> None:
    """See the module."""
    for rows in (1, 64):
        bench.attempt(_small_kernels, bench.large, rows)
    for rows in bench.sizes.linear_rows:
        bench.attempt(_linears, bench.large, rows)


def _small_kernels(bench: Bench, shape: Shape, rows: int) -> None:
    for cases in (_norms, _heads, _activation):
        for case in cases(bench, shape, rows):
            record_case(bench, case, rows)


def _norms(bench: Bench, shape: Shape, rows: int) -> Iterator[Case]:
    kernels, hidden = select(bench.device), shape.hidden_size
    x, residual = (bench.normal(rows, hidden) for _ in range(2))
    weight = torch.ones_like(x[0])
    yield Case("rms_norm", lambda: kernels.rms_norm(x, weight, EPS), 2 * x.nbytes)
    yield Case(
        "fused_add_rms_norm",
        lambda: kernels.fused_add_rms_norm(x, residual, weight, EPS),
        4 * x.nbytes,
    )


def _heads(bench: Bench, shape: Shape, rows: int) -> Iterator[Case]:
    """What is done to heads between two products."""
    kernels, kv_heads, head_dim = select(bench.device), shape.num_key_value_heads, shape.head_dim
    query = bench.normal(rows, shape.num_attention_heads, head_dim)
    key, value = (bench.normal(rows, kv_heads, head_dim) for _ in range(2))
    positions = torch.arange(rows, device=bench.device)
    cos_sin = torch.randn(NUM_POSITIONS, head_dim, device=bench.device)
    yield Case(
        "rotary_embedding",
        lambda: kernels.rotary_embedding(positions, query, key, cos_sin),
        2 * (query.nbytes + key.nbytes),
    )
    # A block for each row, and more than one layer, so that rows lie apart as in a pool.
    kv_cache = bench.normal(rows, kv_heads, 4, 2, BLOCK_SIZE, head_dim)
    slots = positions * BLOCK_SIZE
    yield Case(
        "reshape_and_cache",
        lambda: kernels.reshape_and_cache(key, value, kv_cache, 1, slots),
        4 * key.nbytes,
    )
    if bench.is_cuda:  # other sets have no such kernel
        from pdserve_kernels.triton.heads import prepare_heads

        qkv = bench.normal(rows, (shape.num_attention_heads + 2 * kv_heads) * head_dim)
        decoder = _decoder(bench, shape, cos_sin)
        arguments = (qkv, decoder, decoder.layers[0].attention, positions, kv_cache, slots)
        yield Case("prepare_heads", functools.partial(prepare_heads, *arguments), 2 * qkv.nbytes)


def _decoder(bench: Bench, shape: Shape, cos_sin: torch.Tensor) -> Decoder:
    """A decoder of one layer with norms as Qwen3 has them and, for its heads, no products."""
    norm = torch.ones(shape.head_dim, dtype=torch.bfloat16, device=bench.device)
    layer = DecoderLayer(
        input_norm=norm,
        attention=Attention(
            qkv=None, q_norm=norm, k_norm=norm, output=None, group=0, slot=1, window=None
        ),
        post_attention_norm=norm,
        mlp=DenseMlp(gate_up=None, down=None),
    )
    return Decoder(
        layers=(layer,),
        final_norm=norm,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=EPS,
        cos_sin_cache=cos_sin,
    )


def _activation(bench: Bench, shape: Shape, rows: int) -> Iterator[Case]:
    kernels = select(bench.device)
    gate_up = bench.normal(rows, 2 * shape.intermediate_size)
    yield Case("silu_and_mul", lambda: kernels.silu_and_mul(gate_up), 3 * gate_up.nbytes // 2)


def _linears(bench: Bench, shape: Shape, rows: int) -> None:
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    q_size = shape.num_attention_heads * shape.head_dim
    qkv_size = q_size + 2 * shape.num_key_value_heads * shape.head_dim
    # By name, features (out, in).
    cases = {
        "qkv": (qkv_size, hidden),
        "attention output": (hidden, q_size),
        "gate, up and silu": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
    }
    if rows <= 64:  # a prompt's last row alone gets there
        cases["lm_head"] = (shape.vocab_size, hidden)
    for name, features in cases.items():
        for kind in WEIGHTS:
            _linear(bench, name, features, rows, kind)


def _linear(bench: Bench, name: str, features: tuple[int, int], rows: int, kind: str) -> None:
    kernels, (out_features, in_features) = select(bench.device), features
    weight = WEIGHTS[kind](bench.normal(*features, std=WEIGHT_STD))
    x = bench.normal(rows, in_features)
    is_mlp = name.startswith("gate")
    packed = kernels.pack_linear(weight, num_parts=2 if is_mlp else 1)
    linear = kernels.linear_silu_mul if is_mlp else kernels.linear
    timing = bench.clock.measure_replays(functools.partial(linear, x, packed))
    num_bytes = _nbytes(weight) + 2 * (x.numel() + rows * out_features)
    bytes_s = num_bytes / bench.limits.copy
    flops_s = 2 * rows * out_features * in_features / bench.limits.matrix
    suffix = "" if kind == "bf16" else f", {kind}"
    bench.record(
        f"{name} {out_features} x {in_features}, {rows} rows{suffix}",
        us=timing.device_s * 1e6,
        host_us=timing.host_s * 1e6,
        share_of_bound=max(bytes_s, flops_s) / timing.device_s,
        bound="bytes" if bytes_s >= flops_s else "FLOPs",
    )


def _nbytes(weight: torch.Tensor | QuantizedWeight) -> int:
    if isinstance(weight, torch.Tensor):
        return weight.nbytes
    return weight.values.nbytes + weight.scales.nbytes
