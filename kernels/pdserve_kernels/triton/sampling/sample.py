# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Choosing tokens on CUDA: the reference's tokens, without waiting for the device.

A row is looked at by many programs, of which each leaves its best token. A token and its value are
one integer: of the highest values the lowest id is the highest integer.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from pdserve_kernels.sampling_batch import Argmax, Sampled, SamplingBatch
from pdserve_kernels.triton.linears.linear import AnyLinearWeight, linear
from pdserve_kernels.triton.sampling.device_batch import DeviceSamplingBatch, has_filter
from pdserve_kernels.triton.sampling.filters import find_thresholds
from pdserve_kernels.triton.sampling.gumbel import gumbel_noise
from pdserve_kernels.triton.sampling.masks import from_key, load_logits, readable, scaled, to_key

__all__ = [
    "argmax",
    "count_nans",
    "linear_argmax",
    "sample",
    "sample_part",
    "sample_part_staged",
    "sample_staged",
]

BLOCK = 1024
# Below all tokens.
NO_TOKEN = tl.constexpr(-(2**63))
MAX_ID = tl.constexpr(2**31 - 1)


def argmax(logits: torch.Tensor, *, mask: torch.Tensor | None = None) -> Argmax:
    """See the reference."""
    logits, mask = readable(logits, mask)
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, BLOCK)
    best, nans, chosen = _parts_and_results(num_rows, num_parts, logits.device)
    values = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        argmax_kernel[(num_rows, num_parts)](
            logits,
            logits if mask is None else mask,
            logits.stride(0),
            vocab_size,
            best,
            nans,
            HAS_MASK=mask is not None,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
        _choose(best, nans, chosen, values)
    return Argmax(chosen[0], chosen[1], values)


def count_nans(logits: torch.Tensor) -> torch.Tensor:
    """See the reference."""
    return argmax(logits).num_nans


def linear_argmax(
    x: torch.Tensor, packed: AnyLinearWeight, *, mask: torch.Tensor | None = None
) -> Argmax:
    """See the reference."""
    return argmax(linear(x, packed), mask=mask)


def sample(
    logits: torch.Tensor, batch: SamplingBatch, *, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """See the reference."""
    staged = DeviceSamplingBatch.stage(batch, logits.device)
    is_filtered = has_filter(batch, logits.shape[1])
    return sample_staged(logits, staged, mask=mask, is_filtered=is_filtered)[0]


def sample_staged(
    logits: torch.Tensor,
    batch: DeviceSamplingBatch,
    *,
    mask: torch.Tensor | None = None,
    is_filtered: bool = True,
) -> torch.Tensor:
    """Return int64 [2, n]: what `sample` does, and how many NaNs each row has among the logits that
    the mask allows. Nothing that the host does depends on what the batch holds.

    Unless `is_filtered`, no row of the batch may have a filter.
    """
    return _draw(logits, batch, mask, is_filtered=is_filtered)


def sample_part(
    logits: torch.Tensor,
    batch: SamplingBatch,
    *,
    first_id: int,
    mask: torch.Tensor | None = None,
) -> Sampled:
    """See the reference."""
    staged = DeviceSamplingBatch.stage(batch, logits.device)
    best = sample_part_staged(logits, staged, first_id=first_id, mask=mask)
    return Sampled(best.token_ids, best.values)


def sample_part_staged(
    logits: torch.Tensor,
    batch: DeviceSamplingBatch,
    *,
    first_id: int,
    mask: torch.Tensor | None = None,
) -> Argmax:
    """Return what `sample_part` does of logits [n, k], of any float dtype, and how many NaNs each
    row has among the logits that the mask, int32 [n, ceil(k / 32)], allows. Nothing that the host
    does depends on what the batch holds.
    """
    values = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    chosen = _draw(logits, batch, mask, is_filtered=False, first_id=first_id, values=values)
    return Argmax(chosen[0], chosen[1], values)


def _draw(
    logits: torch.Tensor,
    batch: DeviceSamplingBatch,
    mask: torch.Tensor | None,
    *,
    is_filtered: bool,
    first_id: int = 0,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    logits, mask = readable(logits, mask)
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, BLOCK)
    best, nans, chosen = _parts_and_results(num_rows, num_parts, logits.device)
    if num_rows:
        draw_kernel[(num_rows, num_parts)](
            logits,
            logits if mask is None else mask,
            logits.stride(0),
            vocab_size,
            first_id,
            batch.divisors,
            batch.seeds,
            batch.positions,
            find_thresholds(logits, mask, batch) if is_filtered else batch.divisors,
            best,
            nans,
            HAS_MASK=mask is not None,
            IS_FILTERED=is_filtered,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
        _choose(best, nans, chosen, values)
    return chosen


def _parts_and_results(
    num_rows: int, num_parts: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Yield room for each part's best token, for its NaNs and for the rows' results [2, n]: apart,
    so that all are aligned as kernels are compiled for.
    """
    for shape in ((num_rows, num_parts), (num_rows, num_parts), (2, num_rows)):
        yield torch.empty(shape, dtype=torch.int64, device=device)


def _choose(
    best: torch.Tensor, nans: torch.Tensor, chosen: torch.Tensor, values: torch.Tensor | None
) -> None:
    num_rows, num_parts = best.shape
    choose_kernel[(num_rows,)](
        best,
        nans,
        chosen,
        best if values is None else values,
        num_parts,
        HAS_VALUES=values is not None,
        BLOCK=triton.next_power_of_2(num_parts),
        enable_fp_fusion=False,
    )


@triton.jit
def _find_best(x, token, vocab_size):
    """The best token, as one int64: the key of its value, and what is left up to MAX_ID."""
    packed = (to_key(x).to(tl.int64) << 32) | (token ^ MAX_ID).to(tl.int64)
    return tl.max(tl.where(token < vocab_size, packed, NO_TOKEN), axis=0)


@triton.jit
def _count_nans(x):
    return tl.sum((x != x).to(tl.int32), axis=0).to(tl.int64)


@triton.jit
def argmax_kernel(
    logits_ptr,
    mask_ptr,
    stride_row,
    vocab_size,
    best_ptr,
    nans_ptr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits_ptr, mask_ptr, stride_row, vocab_size, row, token, HAS_MASK)
    part = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + part, _find_best(x, token, vocab_size))
    tl.store(nans_ptr + part, _count_nans(x))


@triton.jit
def draw_kernel(
    logits_ptr,
    mask_ptr,
    stride_row,
    vocab_size,
    first_id,
    divisors_ptr,
    seeds_ptr,
    positions_ptr,
    thresholds_ptr,
    best_ptr,
    nans_ptr,
    HAS_MASK: tl.constexpr,
    IS_FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    token = first + tl.arange(0, BLOCK)
    divisor = tl.load(divisors_ptr + row)
    is_random = divisor > 0.0
    divisor = tl.where(is_random, divisor, 1.0)
    x = load_logits(logits_ptr, mask_ptr, stride_row, vocab_size, row, token, HAS_MASK)
    num_nans = _count_nans(x)
    x = scaled(x, divisor)
    if IS_FILTERED:
        x = tl.where(x < tl.load(thresholds_ptr + row), float("-inf"), x)
    # Filters and grammars leave nothing of most blocks.
    if is_random & (tl.max(x, axis=0) > float("-inf")):
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        x += gumbel_noise(seed, position, first_id + first, BLOCK)
    part = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + part, _find_best(x, token, vocab_size))
    tl.store(nans_ptr + part, num_nans)


@triton.jit
def choose_kernel(
    best_ptr,
    nans_ptr,
    chosen_ptr,
    values_ptr,
    num_parts,
    HAS_VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    inside = part < num_parts
    best = tl.load(best_ptr + row * num_parts + part, mask=inside, other=NO_TOKEN)
    best = tl.max(best, axis=0)
    tl.store(chosen_ptr + row, (best & MAX_ID) ^ MAX_ID)
    nans = tl.load(nans_ptr + row * num_parts + part, mask=inside, other=0)
    tl.store(chosen_ptr + tl.num_programs(0) + row, tl.sum(nans, axis=0))
    if HAS_VALUES:
        tl.store(values_ptr + row, from_key((best >> 32).to(tl.int32)))
