# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""min-p, top-k and top-p on CUDA: each row's threshold, without a sort.

The row's tokens are counted and weighed in steps below its highest. The few above the step in which
the threshold must lie are gathered, and searched by one program. All sums are of integers: no
result depends on the order in which programs add.
"""

import torch
import triton
import triton.language as tl

from pdserve_kernels.triton.device_batch import DeviceSamplingBatch
from pdserve_kernels.triton.exact_math import exp_to_fixed_point
from pdserve_kernels.triton.masks import from_key, load_scaled, to_key

BLOCK = 1024
SEARCH_BLOCK = 2048
NUM_STEPS = tl.constexpr(8)
# What lies 28 below the highest has no weight in fixed point, nor can it be drawn: noise is between
# -2.9 and 22.9.
STEP = tl.constexpr(3.5)
# Makes keys positive, so that memory of zeros is below all.
KEY_BIAS = tl.constexpr(2**31)


def find_thresholds(
    logits: torch.Tensor, mask: torch.Tensor | None, batch: DeviceSamplingBatch
) -> torch.Tensor:
    """Return the lowest scaled logit each row may draw, [n] fp32; -inf for rows without a filter.

    logits [n, vocab_size] and mask are `readable`.
    """
    num_rows, vocab_size = logits.shape
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    values = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    # One fill for all that programs add to; 16 bytes aligned, as kernels are compiled for.
    num_even = num_rows + num_rows % 2
    sizes = [num_even, num_even, num_rows * NUM_STEPS.value, num_rows * NUM_STEPS.value]
    sums = torch.zeros(sum(sizes), dtype=torch.int64, device=logits.device)
    highest, num_values, counts, weights = torch.split(sums, sizes)
    row = (logits, logits if mask is None else mask, logits.stride(0), vocab_size)
    wanted = (batch.divisors, batch.top_k, batch.top_p, batch.log_min_p)
    options = {"HAS_MASK": mask is not None, "BLOCK": BLOCK, "enable_fp_fusion": False}
    grid = (num_rows, triton.cdiv(vocab_size, BLOCK))
    _highest_kernel[grid](*row, *wanted, highest, **options)
    _steps_kernel[grid](*row, *wanted, highest, counts, weights, **options)
    sums_of_row = (highest, counts, weights, num_values)
    _gather_kernel[grid](*row, *wanted, *sums_of_row, values, **options)
    _search_kernel[(num_rows,)](
        vocab_size,
        *wanted,
        *sums_of_row,
        values,
        thresholds,
        BLOCK=SEARCH_BLOCK,
        num_warps=16,
        enable_fp_fusion=False,
    )
    return thresholds


@triton.jit
def _load_filters(top_k_ptr, top_p_ptr, log_min_p_ptr, vocab_size, row):
    """What a row is filtered by: (top_k, or 0; top_p, or 1; log_min_p, or -inf)."""
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    return top_k, tl.load(top_p_ptr + row), tl.load(log_min_p_ptr + row)


@triton.jit
def _is_filtered(top_k, top_p, log_min_p):
    return (top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf"))


@triton.jit
def _load_highest(highest_ptr, row):
    return from_key((tl.load(highest_ptr + row) - KEY_BIAS).to(tl.int32))


@triton.jit
def _step_keys(highest):
    """Keys [NUM_STEPS] of where the steps below the highest end."""
    return to_key(highest - (tl.arange(0, NUM_STEPS) + 1).to(tl.float32) * STEP)


@triton.jit
def _highest_kernel(
    logits_ptr,
    mask_ptr,
    stride_row,
    vocab_size,
    divisors_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    highest_ptr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top_k, top_p, log_min_p = _load_filters(top_k_ptr, top_p_ptr, log_min_p_ptr, vocab_size, row)
    if _is_filtered(top_k, top_p, log_min_p):
        divisor = tl.load(divisors_ptr + row)
        x = load_scaled(logits_ptr, mask_ptr, stride_row, vocab_size, row, token, divisor, HAS_MASK)
        highest = tl.max(to_key(x), axis=0).to(tl.int64) + KEY_BIAS
        tl.atomic_max(highest_ptr + row, highest, sem="relaxed")


@triton.jit
def _steps_kernel(
    logits_ptr,
    mask_ptr,
    stride_row,
    vocab_size,
    divisors_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    highest_ptr,
    counts_ptr,
    weights_ptr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """counts and weights [n, NUM_STEPS] are of the tokens down to the end of each step."""
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top_k, top_p, log_min_p = _load_filters(top_k_ptr, top_p_ptr, log_min_p_ptr, vocab_size, row)
    if _is_filtered(top_k, top_p, log_min_p):
        divisor = tl.load(divisors_ptr + row)
        x = load_scaled(logits_ptr, mask_ptr, stride_row, vocab_size, row, token, divisor, HAS_MASK)
        highest = _load_highest(highest_ptr, row)
        key = to_key(x)
        weight = exp_to_fixed_point(x - highest)
        best = tl.max(key, axis=0)
        for step in tl.static_range(NUM_STEPS):
            end = to_key(highest - (step + 1) * STEP)
            # Most blocks have nothing near the highest.
            if best >= end:
                is_above = (key >= end) & (x > float("-inf"))
                if top_k > 0:
                    count = tl.sum(is_above.to(tl.int32), axis=0).to(tl.int64)
                    tl.atomic_add(counts_ptr + row * NUM_STEPS + step, count, sem="relaxed")
                if top_p < 1.0:
                    total = tl.sum(tl.where(is_above, weight, 0), axis=0)
                    tl.atomic_add(weights_ptr + row * NUM_STEPS + step, total, sem="relaxed")


@triton.jit
def _find_floor(counts_ptr, weights_ptr, row, highest, top_k, top_p, log_min_p):
    """A key no higher than the row's threshold, and the weight of all of its tokens.

    top-p is of what min-p and top-k leave, so it may raise the floor only where they are not asked
    for: what they leave has to be weighed.
    """
    steps = _step_keys(highest)
    offset = row * NUM_STEPS + tl.arange(0, NUM_STEPS)
    lowest = tl.min(steps, axis=0)
    weights = tl.load(weights_ptr + offset)
    total = tl.max(weights, axis=0)
    if (top_k > 0) | (log_min_p > float("-inf")):
        is_enough = (tl.load(counts_ptr + offset) >= top_k) & (top_k > 0)
        floor = tl.max(tl.where(is_enough, steps, lowest), axis=0)
        floor = tl.maximum(floor, to_key(highest + log_min_p))
    else:
        is_enough = weights.to(tl.float64) >= top_p * total.to(tl.float64)
        floor = tl.max(tl.where(is_enough, steps, lowest), axis=0)
    return floor, total


@triton.jit
def _gather_kernel(
    logits_ptr,
    mask_ptr,
    stride_row,
    vocab_size,
    divisors_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    highest_ptr,
    counts_ptr,
    weights_ptr,
    num_values_ptr,
    values_ptr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """values [n, vocab_size] get the scaled logits from the floor up, in any order."""
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top_k, top_p, log_min_p = _load_filters(top_k_ptr, top_p_ptr, log_min_p_ptr, vocab_size, row)
    if _is_filtered(top_k, top_p, log_min_p):
        divisor = tl.load(divisors_ptr + row)
        x = load_scaled(logits_ptr, mask_ptr, stride_row, vocab_size, row, token, divisor, HAS_MASK)
        highest = _load_highest(highest_ptr, row)
        floor, _ = _find_floor(counts_ptr, weights_ptr, row, highest, top_k, top_p, log_min_p)
        is_taken = (to_key(x) >= floor) & (x > float("-inf"))
        num_taken = tl.sum(is_taken.to(tl.int32), axis=0)
        if num_taken > 0:
            start = tl.atomic_add(num_values_ptr + row, num_taken.to(tl.int64), sem="relaxed")
            place = start + tl.cumsum(is_taken.to(tl.int32), axis=0) - 1
            place += row.to(tl.int64) * vocab_size
            tl.store(values_ptr + place, x, mask=is_taken)


@triton.jit
def _measure(values_ptr, num_values, highest, key, IS_WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """How many values reach a key, or how much they weigh: int64."""
    sums = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, num_values, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(values_ptr + index, mask=index < num_values, other=float("-inf"))
        is_above = (to_key(x) >= key) & (index < num_values)
        if IS_WEIGHED:
            sums += tl.where(is_above, exp_to_fixed_point(x - highest), 0)
        else:
            sums += is_above.to(tl.int64)
    return tl.sum(sums, axis=0)


@triton.jit
def _search(
    values_ptr, num_values, highest, low, limit, IS_WEIGHED: tl.constexpr, BLOCK: tl.constexpr
):
    """The lowest key from `low` up above which values come to less than `limit`, fp64."""
    high = tl.maximum(to_key(highest), low)
    while low < high:
        # Half way, where low + high could overflow.
        key = (low & high) + ((low ^ high) >> 1)
        above = _measure(values_ptr, num_values, highest, key + 1, IS_WEIGHED, BLOCK)
        is_low = above.to(tl.float64) >= limit
        low = tl.where(is_low, key + 1, low)
        high = tl.where(is_low, high, key)
    return high


@triton.jit
def _search_kernel(
    vocab_size,
    divisors_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    highest_ptr,
    counts_ptr,
    weights_ptr,
    num_values_ptr,
    values_ptr,
    thresholds_ptr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    top_k, top_p, log_min_p = _load_filters(top_k_ptr, top_p_ptr, log_min_p_ptr, vocab_size, row)
    if _is_filtered(top_k, top_p, log_min_p):
        highest = _load_highest(highest_ptr, row)
        key, total = _find_floor(counts_ptr, weights_ptr, row, highest, top_k, top_p, log_min_p)
        values_ptr += row.to(tl.int64) * vocab_size
        num_values = tl.load(num_values_ptr + row).to(tl.int32)
        if top_k > 0:
            limit = top_k.to(tl.float64)
            key = _search(values_ptr, num_values, highest, key, limit, False, BLOCK)
        if top_p < 1.0:
            if (top_k > 0) | (log_min_p > float("-inf")):
                total = _measure(values_ptr, num_values, highest, key, True, BLOCK)
            limit = top_p * total.to(tl.float64)
            key = _search(values_ptr, num_values, highest, key, limit, True, BLOCK)
        tl.store(thresholds_ptr + row, from_key(key))
    else:
        tl.store(thresholds_ptr + row, float("-inf"))
