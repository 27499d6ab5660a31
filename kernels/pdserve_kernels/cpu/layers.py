"""Norms, rotary embedding and activation in C++ for bf16; contracts are those of the reference.

A row's bits depend on the row alone, not on the number of rows or threads. Other dtypes go to the
reference.
"""

import torch

from pdserve_kernels import reference
from pdserve_kernels.cpu.compiled import library


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the reference; x may have any strides but within its rows."""
    if not _are_bf16(x, weight):
        return reference.rms_norm(x, weight, eps)
    _check_weight(weight, x)
    # Heads of a wider tensor have three dimensions, which need not collapse into two.
    rows = _with_dense_rows(x if x.ndim in (2, 3) else x.reshape(-1, x.shape[-1]))
    outer, inner = rows.shape[0], rows.shape[1] if rows.ndim == 3 else 1
    output = torch.empty(x.shape, dtype=x.dtype)
    library().pds_rms_norm(
        rows.data_ptr(),
        outer,
        inner,
        rows.stride(0),
        rows.stride(1) if rows.ndim == 3 else 0,
        x.shape[-1],
        weight.data_ptr(),
        eps,
        output.data_ptr(),
    )
    return output


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference."""
    if not _are_bf16(x, residual, weight):
        return reference.fused_add_rms_norm(x, residual, weight, eps)
    _check_weight(weight, x)
    if x.shape != residual.shape:
        raise ValueError(f"x is {tuple(x.shape)}, residual must be, too: {tuple(residual.shape)}")
    x, size = x.contiguous(), x.shape[-1]
    output, new_residual = (
        torch.empty_like(x),
        residual.clone(memory_format=torch.contiguous_format),
    )
    library().pds_add_rms_norm(
        x.data_ptr(),
        new_residual.data_ptr(),
        x.numel() // size,
        size,
        weight.data_ptr(),
        eps,
        output.data_ptr(),
    )
    return output, new_residual


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
) -> None:
    """See the reference."""
    if not _are_bf16(query, key) or cos_sin_cache.dtype != torch.float32:
        reference.rotary_embedding(positions, query, key, cos_sin_cache)
        return
    rot_dim = cos_sin_cache.shape[1]
    if not cos_sin_cache.is_contiguous() or rot_dim % 2 or rot_dim > query.shape[2]:
        raise ValueError(
            f"cos_sin_cache {tuple(cos_sin_cache.shape)} must be contiguous, of an even width"
            f" within head_dim {query.shape[2]}"
        )
    check_indices("positions", positions, end=len(cos_sin_cache))
    positions = as_contiguous_int64(positions)
    for heads in (query, key):
        if heads.stride(2) != 1 or heads.shape[0] != len(positions):
            raise ValueError(
                f"query and key must have {len(positions)} tokens and dense heads, got"
                f" {tuple(heads.shape)} with strides {heads.stride()}"
            )
        library().pds_rotary_embedding(
            cos_sin_cache.data_ptr(),
            rot_dim,
            positions.data_ptr(),
            heads.data_ptr(),
            *heads.shape[:2],
            heads.stride(0),
            heads.stride(1),
        )


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See the reference."""
    if not _are_bf16(x):
        return reference.silu_and_mul(x)
    num_tokens, width = x.shape[0], x.shape[1] // 2
    x = _with_dense_rows(x)
    output = x.new_empty(num_tokens, width)
    library().pds_silu_and_mul(x.data_ptr(), x.stride(0), num_tokens, width, output.data_ptr())
    return output


def as_contiguous_int64(indices: torch.Tensor) -> torch.Tensor:
    """Return positions or slots [num_tokens], of any integer dtype, as the kernels read them:
    int64.
    """
    return indices.to(torch.int64).contiguous()


def check_indices(name: str, indices: torch.Tensor, *, first: int = 0, end: int) -> None:
    """Raise ValueError unless all indices [n], of any integer dtype, are in [first, end): the
    kernels go wherever they point.
    """
    if not are_within(indices, first, end):
        low, high = map(int, torch.aminmax(indices))
        raise ValueError(f"{name} are {low} to {high}, must be in [{first}, {end})")


def are_within(indices: torch.Tensor, first: int, end: int) -> bool:
    """Whether all indices [n], of any integer dtype, are in [first, end); takes microseconds."""
    if not indices.numel():
        return True
    low, high = torch.aminmax(indices)
    return first <= int(low) and int(high) < end


def _are_bf16(*tensors: torch.Tensor) -> bool:
    return all(tensor.dtype == torch.bfloat16 for tensor in tensors)


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_weight(weight: torch.Tensor, x: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:] or not weight.is_contiguous():
        raise ValueError(f"weight is {tuple(weight.shape)}, must be contiguous {x.shape[-1:]}")
