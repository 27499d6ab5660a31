"""Dense layers, with weights packed once for oneDNN, which is fast and treats all rows alike."""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pdserve_kernels.groups import check_num_sums
from pdserve_kernels.reference.layers import silu_and_mul
from pdserve_kernels.reference.quantization import QuantizedWeight

# Row count that oneDNN is told to pack for: decode batches are small and bound by weight reads.
PACK_FOR_ROWS = 8
# oneDNN sums fewer rows in another order when in_features > 1024, so that a row's bits would depend
# on its neighbours. Padded to this many they do not (measured for 1 to 2048 rows, with 1 and 2
# threads), and one bf16 row even gets faster. MKL, behind F.linear in fp32, has more exceptions.
MIN_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearWeight:
    """A weight ready for `linear`: [out_features, in_features], or oneDNN's if `is_packed`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    is_packed: bool


def pack_linear(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    num_parts: int = 1,
    num_sums: int = 1,
) -> LinearWeight:
    """Prepare weight [out_features, in_features] and bias [out_features] for `linear`.

    A gate and an up projection in one weight, one after the other, are two parts, which some sets
    keep apart: `linear_silu_mul` wants that. num_sums says in how many parts the inputs are added
    up, where a set can tell (`is_shard_independent`): see `groups.NUM_SUMS`. Here it is one whole
    product. A bf16 or fp32 weight on CPU is copied into oneDNN's layout and not kept; drop yours to
    free its memory. A quantized weight is dequantized here: it saves nothing in this set, and its
    product is that of the weight rounded to its dtype.
    """
    del num_parts
    check_num_sums(num_sums, weight.shape[1])
    weight = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.detach()
    is_packed = _can_pack(weight)
    return LinearWeight(
        weight=torch.ops.mkldnn._reorder_linear_weight(weight, PACK_FOR_ROWS)
        if is_packed
        else weight,
        bias=None if bias is None else bias.detach(),
        out_features=weight.shape[0],
        in_features=weight.shape[1],
        is_packed=is_packed,
    )


def linear(x: torch.Tensor, packed: LinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T + bias -> [..., out_features], in x's dtype; fp32 sums.

    If the weight is packed, a row's bits do not depend on the number of rows. Never synchronises.
    """
    num_rows = x.numel() // packed.in_features
    if packed.is_packed and 0 < num_rows < MIN_ROWS:
        padded = x.new_zeros(MIN_ROWS, packed.in_features)
        padded[:num_rows] = x.reshape(num_rows, packed.in_features)
        return _linear(padded, packed)[:num_rows].reshape(*x.shape[:-1], packed.out_features)
    return _linear(x, packed)


def linear_sums(x: torch.Tensor, packed: LinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T -> fp32 [..., out_features], without the bias.

    What ranks add up that have a part of the inputs each. It is the product of the operands in
    fp32, at the price of turning the weight into fp32 at every call: of bf16 products each rank's
    would be rounded, and the sum of s ranks sqrt(s) times as wrong as one product.
    """
    weight = packed.weight.to_dense() if packed.is_packed else packed.weight
    return F.linear(x.float(), weight.float())


def linear_silu_mul(x: torch.Tensor, packed: LinearWeight) -> torch.Tensor:
    """x [T, in_features] -> silu(gate) * up, where linear(x, packed) = [gate | up].

    The weight has two parts. gate, up and silu are rounded to x's dtype.
    """
    return silu_and_mul(linear(x, packed))


def _linear(x: torch.Tensor, packed: LinearWeight) -> torch.Tensor:
    if not packed.is_packed:
        return F.linear(x, packed.weight, packed.bias)
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        x, packed.weight, packed.bias, "none", [], ""
    )
    return output


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and _has_fast_gemm(weight.dtype)
    )


def is_row_independent(dtype: torch.dtype) -> bool:
    """Whether on a CPU the kernels of this set give a row of `dtype` the same bits in any batch.

    For one number of threads, and as measured by tests/kernels/test_row_independence.py. In fp32 it
    also takes an MKL that does so here (see `pdserve_kernels`), which is tried. In bf16 it takes a
    processor with avx512_bf16 and without AMX: where oneDNN emulates the one, and where it uses the
    other, sums depend on the number of rows.
    """
    if not _can_pack(torch.empty(0, dtype=dtype)):
        return False
    if dtype == torch.float32:
        return _has_row_independent_products()
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") and not capabilities.get("amx_bf16"))


@functools.cache
def _has_row_independent_products() -> bool:
    """Whether scores of a few queries are the same bits as among many, at common head dimensions;
    takes a millisecond.
    """
    generator = torch.Generator().manual_seed(0)
    for head_dim in (64, 96, 128, 256):
        query = torch.randn(1, 64, head_dim, generator=generator)
        key_t = torch.randn(1, 64, head_dim, generator=generator).transpose(1, 2)
        together = torch.bmm(query, key_t)
        for num_rows in (4, 8, 32):
            if not torch.equal(torch.bmm(query[:, :num_rows], key_t), together[:, :num_rows]):
                return False
    return True


def is_shard_independent(dtype: torch.dtype) -> bool:
    """Whether a model in `dtype` has the same bits however many ranks it is cut into, of 1, 2, 4
    and `groups.NUM_SUMS`: an output's bits do not depend on how many others its weight has, and
    inputs are added up as `pack_linear` is told. Never here: neither holds.
    """
    del dtype
    return False


def is_thread_independent(dtype: torch.dtype, block_size: int, head_dim: int) -> bool:
    """Whether the bits of a decoder in `dtype`, with KV in such blocks, are the same for any number
    of CPU threads. Never here: MKL and oneDNN cut sums by threads.
    """
    del dtype, block_size, head_dim
    return False


def _has_fast_gemm(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
