# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Norms, rotary embedding and activation; one row per program, whatever the batch."""

import torch
import triton
import triton.language as tl

SILU_BLOCK = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension; see the reference's contract."""
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_rms_norm(x, None, weight, output, None, eps)
    return output


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual); see the reference's contract."""
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    new_residual = torch.empty_like(output)
    _launch_rms_norm(x, residual, weight, output, new_residual, eps)
    return output, new_residual


def _launch_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    output: torch.Tensor,
    new_residual: torch.Tensor | None,
    eps: float,
) -> None:
    hidden = x.shape[-1]
    num_rows = x.numel() // hidden
    if num_rows == 0:
        return
    x = x.contiguous()
    rms_norm_kernel[(num_rows,)](
        x,
        x if residual is None else residual.contiguous(),
        weight,
        output,
        output if new_residual is None else new_residual,
        eps,
        HIDDEN=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        ADD_RESIDUAL=residual is not None,
        enable_fp_fusion=True,
    )


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    output_ptr,
    new_residual_ptr,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    dtype = x.dtype
    if ADD_RESIDUAL:
        residual = tl.load(residual_ptr + row + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(new_residual_ptr + row + column, x, mask=inside)
    x = x.to(tl.float32)
    mean_square = tl.sum(x * x, axis=0) / HIDDEN
    normed = (x * (1.0 / tl.sqrt_rn(mean_square + eps))).to(dtype)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    result = normed.to(tl.float32) * weight.to(tl.float32)
    tl.store(output_ptr + row + column, result.to(dtype), mask=inside)


def add_rms_norm_(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x [T, hidden] to residual in place and return rms_norm(residual), both contiguous, of one
    dtype.
    """
    output = torch.empty_like(x)
    _launch_rms_norm(x, residual, weight, output, residual, eps)
    return output


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
) -> None:
    """Rotate query and key in place, in fp32; see the reference's contract."""
    num_tokens, num_heads, _ = query.shape
    if query.stride(2) != 1 or key.stride(2) != 1 or not cos_sin_cache.is_contiguous():
        raise ValueError("query, key and cos_sin_cache must be contiguous in their last dimension")
    half = cos_sin_cache.shape[1] // 2
    if num_tokens == 0:
        return
    rotary_kernel[(num_tokens, num_heads + key.shape[1])](
        positions,
        query,
        key,
        cos_sin_cache,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        NUM_HEADS=num_heads,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        enable_fp_fusion=True,
    )


@triton.jit
def rotary_kernel(
    positions_ptr,
    query_ptr,
    key_ptr,
    cos_sin_ptr,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK_HALF)
    inside = column < HALF
    angle = tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    cos = tl.load(cos_sin_ptr + angle + column, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin_ptr + angle + HALF + column, mask=inside, other=0.0).to(tl.float32)
    if head < NUM_HEADS:
        row_ptr = query_ptr + token * stride_query_token + head * stride_query_head
    else:
        row_ptr = key_ptr + token * stride_key_token + (head - NUM_HEADS) * stride_key_head
    first = tl.load(row_ptr + column, mask=inside, other=0.0)
    second = tl.load(row_ptr + HALF + column, mask=inside, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    tl.store(row_ptr + column, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(row_ptr + HALF + column, (second * cos + first * sin).to(dtype), mask=inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I] -> silu(x[:, :I]) * x[:, I:]; see the reference's contract."""
    num_tokens, width = x.shape[0], x.shape[1] // 2
    output = x.new_empty(num_tokens, width)
    if num_tokens == 0:
        return output
    if x.stride(1) != 1:
        raise ValueError("x must be contiguous in its last dimension")
    grid = (num_tokens, triton.cdiv(width, SILU_BLOCK))
    silu_and_mul_kernel[grid](
        x, output, x.stride(0), width, BLOCK=SILU_BLOCK, enable_fp_fusion=True
    )
    return output


@triton.jit
def silu_and_mul_kernel(x_ptr, output_ptr, stride_x, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + token * stride_x + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + token * stride_x + width + column, mask=inside, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype)
    result = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(output_ptr + token * width + column, result.to(dtype), mask=inside)
