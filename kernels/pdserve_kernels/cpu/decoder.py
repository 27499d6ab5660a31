"""All layers of a model in one call, which releases the GIL once and starts threads once."""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from pdserve_kernels.cpu.attention import Batch, paged_attention
from pdserve_kernels.cpu.cache import PagedKV, check_slots, has_packed_tiles, reshape_and_cache
from pdserve_kernels.cpu.compiled import address, library
from pdserve_kernels.cpu.layers import (
    as_contiguous_int64,
    check_indices,
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from pdserve_kernels.cpu.linear import (
    LinearWeight,
    PackedLinear,
    linear,
    linear_silu_mul,
    linear_sums,
)
from pdserve_kernels.cpu.lora import (
    Segment,
    expand_lora,
    linear_lora,
    segments_of,
    shrink_lora,
)
from pdserve_kernels.cpu.memory import empty_on_huge_pages
from pdserve_kernels.cpu.moe import MoeWeight, fused_moe
from pdserve_kernels.cpu.shared_group import SharedGroup
from pdserve_kernels.decoder import Decoder, DecoderLayer, DenseMlp, Mlp, MoeMlp
from pdserve_kernels.layer_functions import PlainFunctions, run_layer_by_layer
from pdserve_kernels.lora import LoraSegment
from pdserve_kernels.metadata import AttentionMetadata

FUNCTIONS = PlainFunctions(
    linear=linear,
    linear_sums=linear_sums,
    linear_silu_mul=linear_silu_mul,
    fused_moe=fused_moe,
    linear_lora=linear_lora,
    shrink_lora=shrink_lora,
    expand_lora=expand_lora,
    silu_and_mul=silu_and_mul,
    rms_norm=rms_norm,
    fused_add_rms_norm=fused_add_rms_norm,
    rotary_embedding=rotary_embedding,
    reshape_and_cache=reshape_and_cache,
    paged_attention=paged_attention,
)

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Layer(ctypes.Structure):
    """`DecoderLayer` of csrc/decoder.h."""

    _fields_ = (
        ("input_norm", _POINTER),
        ("qkv", PackedLinear),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("attention_output", PackedLinear),
        ("post_attention_norm", _POINTER),
        ("gate_up", PackedLinear),
        ("down", PackedLinear),
        ("moe", _POINTER),
        ("group", _INT),
        ("slot", _INT),
        ("window", _INT),
    )

    @classmethod
    def of(cls, layer: DecoderLayer) -> "_Layer":
        attention = layer.attention
        return cls(
            layer.input_norm.data_ptr(),
            PackedLinear.of(attention.qkv),
            address(attention.q_norm),
            address(attention.k_norm),
            PackedLinear.of(attention.output),
            layer.post_attention_norm.data_ptr(),
            *_fields_of_mlp(layer.mlp),
            attention.group,
            attention.slot,
            attention.window or 0,
        )


def _fields_of_mlp(mlp: Mlp) -> tuple[PackedLinear, PackedLinear, int | None]:
    """Return gate_up, down and the experts, of which a layer has either."""
    if isinstance(mlp, MoeMlp):
        return PackedLinear(), PackedLinear(), mlp.experts.address
    assert isinstance(mlp, DenseMlp)
    return PackedLinear.of(mlp.gate_up), PackedLinear.of(mlp.down), None


class _Decoder(ctypes.Structure):
    """`Decoder` of csrc/decoder.h."""

    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("num_layers", _INT),
        ("final_norm", _POINTER),
        ("hidden_size", _INT),
        ("intermediate_size", _INT),
        ("num_heads", _INT),
        ("eps", _FLOAT),
        ("scale", _FLOAT),
        ("cos_sin", _POINTER),
        ("rot_dim", _INT),
        ("group", _POINTER),
    )

    @classmethod
    def of(cls, decoder: Decoder) -> "_Decoder":
        group = decoder.group
        mlps = [layer.mlp for layer in decoder.layers]
        layers = (_Layer * len(decoder.layers))(*map(_Layer.of, decoder.layers))
        return cls(
            layers,
            len(layers),
            address(decoder.final_norm),
            len(decoder.layers[0].input_norm),
            next((mlp.down.in_features for mlp in mlps if isinstance(mlp, DenseMlp)), 0),
            decoder.num_heads,
            decoder.rms_norm_eps,
            decoder.scale,
            decoder.cos_sin_cache.data_ptr(),
            decoder.cos_sin_cache.shape[1],
            ctypes.addressof(group.native) if isinstance(group, SharedGroup) else None,
        )


class _Step(ctypes.Structure):
    """`Step` of csrc/decoder.h."""

    _fields_ = (
        ("kv", PagedKV),
        ("batches", ctypes.POINTER(Batch)),
        ("num_groups", _INT),
        ("num_tokens", _INT),
        ("positions", _POINTER),
        ("segments", ctypes.POINTER(Segment)),
        ("num_segments", _INT),
        ("row_ranks", _INT),
    )


@dataclass(slots=True)
class PackedDecoder:
    """A decoder, how the C++ sees it (None: it cannot run it as a whole), and what steps work in.

    The workspace grows to what the largest step needed. One thread at a time may use it.
    """

    decoder: Decoder
    native: _Decoder | None
    workspace: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


def pack_decoder(decoder: Decoder) -> PackedDecoder:
    """Prepare a decoder for `run_decoder`; it keeps pointing to the same weights."""
    return PackedDecoder(decoder, _Decoder.of(decoder) if _is_fusible(decoder) else None)


def run_decoder(
    hidden_states: torch.Tensor,
    packed: PackedDecoder,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Sequence[AttentionMetadata],
    lora: Sequence[LoraSegment] = (),
) -> torch.Tensor:
    """See the reference's contract. Bits are those of this set's functions one by one.

    Ranks in shared memory add up their sums within the call; of another group this set's functions
    run one by one. Raises RuntimeError if a rank does not come.
    """
    native = packed.native
    row_ranks = max((segment.adapter.num_ranks for segment in lora), default=0)
    if (
        native is None
        or not has_packed_tiles(kv_cache)
        or not _fits_slots(packed.decoder, row_ranks)
    ):
        return run_layer_by_layer(
            FUNCTIONS, packed.decoder, hidden_states, positions, kv_cache, metadata, lora
        )
    _check(packed.decoder, hidden_states, positions, kv_cache, metadata)
    hidden_states, positions = hidden_states.contiguous(), as_contiguous_int64(positions)
    num_tokens = len(hidden_states)
    described = (Batch.of(group, num_tokens, kv_cache) for group in metadata)
    batches = (Batch * len(metadata))(*described)
    step = _Step(PagedKV.of(kv_cache), batches, len(batches), num_tokens, positions.data_ptr())
    if lora:
        step.segments, step.num_segments = segments_of(lora, num_tokens), len(lora)
        step.row_ranks = row_ranks
    output = torch.empty_like(hidden_states)
    kernels, size = library(), _INT()
    kernels.pds_decoder_workspace_size(ctypes.byref(native), ctypes.byref(step), ctypes.byref(size))
    if size.value > len(packed.workspace):
        packed.workspace = empty_on_huge_pages(size.value, torch.uint8)
    group = packed.decoder.group
    if isinstance(group, SharedGroup):
        group.check()
    kernels.pds_run_decoder(
        ctypes.byref(native),
        ctypes.byref(step),
        hidden_states.data_ptr(),
        output.data_ptr(),
        packed.workspace.data_ptr(),
    )
    if isinstance(group, SharedGroup):
        group.check()
    return output


def _is_fusible(decoder: Decoder) -> bool:
    """Whether every weight is in bf16 and of a kind that the C++ knows, and the group, if there is
    one, too; its slots have to take a row.
    """
    group = decoder.group
    if group is not None and not isinstance(group, SharedGroup):
        return False
    if not _fits_slots(decoder):
        return False
    linears = (weight for layer in decoder.layers for weight in layer.linears.values())
    mlps = [layer.mlp for layer in decoder.layers]
    experts = [mlp.experts for mlp in mlps if isinstance(mlp, MoeMlp)]
    angles = decoder.cos_sin_cache
    return (
        all(isinstance(mlp, DenseMlp | MoeMlp) for mlp in mlps)
        and all(
            isinstance(weight, LinearWeight) and weight.in_features % 2 == 0 for weight in linears
        )
        and all(isinstance(weight, MoeWeight) for weight in experts)
        and len({weight.shape for weight in experts if isinstance(weight, MoeWeight)}) <= 1
        and all(norm.dtype == torch.bfloat16 and norm.is_contiguous() for norm in _norms(decoder))
        and angles.dtype == torch.float32
        and angles.is_contiguous()
    )


def _fits_slots(decoder: Decoder, row_ranks: int = 0) -> bool:
    """Do a group's slots take a row, and what adapters shrink of it?"""
    if not isinstance(decoder.group, SharedGroup):
        return True
    row_size = len(decoder.layers[0].input_norm) + row_ranks
    return decoder.group.slot_bytes >= row_size * torch.float32.itemsize


def _norms(decoder: Decoder) -> Iterable[torch.Tensor]:
    if decoder.final_norm is not None:
        yield decoder.final_norm
    for layer in decoder.layers:
        yield from (layer.input_norm, layer.post_attention_norm)
        of_heads = (layer.attention.q_norm, layer.attention.k_norm)
        yield from (norm for norm in of_heads if norm is not None)


def _check(
    decoder: Decoder,
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Sequence[AttentionMetadata],
) -> None:
    """Raise ValueError for what would have the C++ read or write elsewhere."""
    num_groups = 1 + max(layer.attention.group for layer in decoder.layers)
    if len(metadata) != num_groups:
        raise ValueError(f"metadata is of {len(metadata)} KV groups, the decoder has {num_groups}")
    num_tokens = len(hidden_states)
    shapes = {
        "hidden_states": (hidden_states.shape, (num_tokens, len(decoder.layers[0].input_norm))),
        "positions": (positions.shape, (num_tokens,)),
        "a block's heads": (kv_cache.shape[1:2], (decoder.num_kv_heads,)),
        "a block's head_dim": (kv_cache.shape[5:], (decoder.head_dim,)),
    } | {
        f"slot_mapping of group {index}": (group.slot_mapping.shape, (num_tokens,))
        for index, group in enumerate(metadata)
    }
    for name, (shape, expected) in shapes.items():
        if tuple(shape) != expected:
            raise ValueError(f"{name}: shape is {tuple(shape)}, must be {expected}")
    if hidden_states.dtype != torch.bfloat16:
        raise ValueError(f"hidden_states is {hidden_states.dtype}, must be bfloat16")
    check_indices("positions", positions, end=len(decoder.cos_sin_cache))
    num_slots = kv_cache.shape[2]
    if (highest := max(layer.attention.slot for layer in decoder.layers)) >= num_slots:
        raise ValueError(f"a layer is in slot {highest}, blocks have {num_slots}")
    for group in metadata:
        _check_group(decoder, group, kv_cache)


def _check_group(decoder: Decoder, group: AttentionMetadata, kv_cache: torch.Tensor) -> None:
    slots, longest = group.slot_mapping, group.max_seq_len
    if slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(
            f"slot_mapping is {slots.dtype} with strides {slots.stride()}, must be dense int64"
        )
    check_slots(slots, kv_cache)
    num_places = min(group.block_table.shape[1] * kv_cache.shape[4], len(decoder.cos_sin_cache))
    if longest > num_places:
        raise ValueError(
            f"a request has {longest} tokens, block_table and positions go to {num_places}"
        )
