"""A stand-in for FlashAttention 3: what its documentation says of paged KV, in torch, anywhere."""

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

# Of hopper/flash_attn_interface.py, flash_attn_3 3.0.0.
RECORDED = """
def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
): ...
"""
# What the stand-in knows; all else has to be as it is by default.
KNOWN = {
    *("q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"),
    *("softmax_scale", "causal", "window_size", "softcap"),
}
VENDORS_DTYPES = (torch.bfloat16, torch.float16)


def signature_of(source: str) -> inspect.Signature:
    """Return the parameters of `flash_attn_with_kvcache` as a module's source has them."""
    (function,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "flash_attn_with_kvcache"
    )
    arguments = function.args
    assert not arguments.kwonlyargs
    names = [argument.arg for argument in arguments.args]
    defaults = [ast.literal_eval(default) for default in arguments.defaults]
    without = [inspect.Parameter.empty] * (len(names) - len(defaults))
    return inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in zip(names, [*without, *defaults], strict=True)
        ]
    )


SIGNATURE = signature_of(RECORDED)


def make_flash_attn(
    dtypes: tuple[torch.dtype, ...] = VENDORS_DTYPES,
) -> Callable[..., torch.Tensor]:
    """Return a `flash_attn_with_kvcache` that takes these dtypes."""

    def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = SIGNATURE.bind(*args, **kwargs)
        for name in bound.arguments.keys() - KNOWN:
            assert bound.arguments[name] == SIGNATURE.parameters[name].default, name
        bound.apply_defaults()
        known = {name: bound.arguments[name] for name in KNOWN}
        assert known["q"].dtype in dtypes
        return _attend(**known)

    return flash_attn_with_kvcache


@contextmanager
def installed(flash_attn_with_kvcache: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Within, this is what our kernels find installed, and nobody else."""
    from pdserve_kernels.triton import flash_attn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attn, "_flash_attn_with_kvcache", lambda: flash_attn_with_kvcache)
        patch.setattr(flash_attn, "vendor_version", lambda: "3.0.0")
        yield


def _attend(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """q [total_q, heads, head_dim]; k_cache and v_cache [pages, page_size, kv_heads, head_dim]."""
    num_reqs = len(cu_seqlens_q) - 1
    for cache in (k_cache, v_cache):
        assert cache.dtype == q.dtype
        assert cache.stride(-1) == 1
        assert cache.shape[3] == q.shape[2]
    assert q.stride(-1) == 1
    assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    assert page_table.shape[0] == len(cache_seqlens) == num_reqs
    assert page_table.stride(-1) == 1
    assert cache_seqlens.is_contiguous()
    assert cu_seqlens_q.is_contiguous()
    lens = cu_seqlens_q.diff().tolist()
    assert min(lens) >= 0
    assert max(lens) <= max_seqlen_q
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = (float("inf") if far < 0 else far for far in window_size)
    if causal:
        right = 0
    output = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    for request, (query_len, seq_len) in enumerate(zip(lens, cache_seqlens.tolist(), strict=True)):
        if not query_len:
            continue
        rows = slice(int(cu_seqlens_q[request]), int(cu_seqlens_q[request]) + query_len)
        position = torch.arange(seq_len, device=q.device)
        page = page_table[request, position // k_cache.shape[1]].long()
        key, value = (
            cache[page, position % k_cache.shape[1]].float().transpose(0, 1)
            for cache in (k_cache, v_cache)
        )
        group = q.shape[1] // k_cache.shape[2]
        key, value = (x.repeat_interleave(group, 0) for x in (key, value))
        scores = q[rows].float().transpose(0, 1) @ key.transpose(1, 2) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        # Aligned to the bottom right corner.
        distance = position[None] - position[seq_len - query_len :, None]
        is_hidden = (distance > right) | (distance < -left)
        weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
        # What is hidden does not count, whatever is there: see the set's docstring.
        value = value.masked_fill(is_hidden.all(0)[:, None], 0)
        output[rows] = (weights @ value).transpose(0, 1).to(q.dtype)
    return output
