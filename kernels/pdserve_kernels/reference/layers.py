"""Norms, rotary embedding and activation.

Products, sums and exponentials are separate torch ops where a fused one would round differently in
its vectorised and its scalar part: a token's result must not depend on where it lies in the batch.
(torch.exp has no scalar part: it fills up the last vector.)
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide the last dimension of x [..., hidden] by its root mean square, times weight [hidden].

    Statistics are in fp32; x * rsqrt(...) is rounded to x's dtype before the weight is applied, as
    in Hugging Face's LlamaRMSNorm, bit for bit. Returns a new tensor; never synchronises.
    """
    return F.rms_norm(x, (x.shape[-1],), None, eps).mul_(weight)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual), the sum rounded to x's dtype first."""
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
) -> None:
    """Rotate query [T, num_heads, head_dim] and key [T, num_kv_heads, head_dim] in place.

    Neox style (RoFormer, Su et al. 2021, arXiv:2104.09864, with halves instead of pairs): of the
    first rot_dim entries, i is paired with i + rot_dim / 2; the rest stay. positions int64 [T];
    cos_sin_cache [max_position, rot_dim] = [cos | sin] in fp32 (then the maths is in fp32) or in
    query's dtype. Never synchronises.
    """
    cos, sin = cos_sin_cache.index_select(0, positions)[:, None, None].chunk(2, -1)
    signed_sin = torch.cat((-sin, sin), -2)
    rot_dim = cos_sin_cache.shape[1]
    for tensor in (query, key):
        halves = tensor[..., :rot_dim].view(*tensor.shape[:-1], 2, rot_dim // 2)
        rotated = (halves * cos).add_(halves.flip(-2) * signed_sin)
        halves.copy_(rotated)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I] -> silu(x[:, :I]) * x[:, I:], [T, I]; silu is rounded to x's dtype first."""
    gate, up = x.chunk(2, -1)
    if x.dtype != torch.float32:
        # Rounded to bf16, all its values are the same in the vectorised and the scalar part.
        return F.silu(gate).mul_(up)
    divisor = gate.neg().exp_().add_(1)
    return torch.div(gate, divisor, out=divisor).mul_(up)
