# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""min-p, top-k and top-p on CUDA: each row's threshold, without a sort.

min-p's threshold follows from the row's highest logit. top-k's and top-p's are the lowest value
above which tokens come to less than a limit: in number, or in weight. There is a round for each of
the two, top-k's first, and a round narrows the keys [low, high] between which its threshold is:

    steps    sums up what lies above each of 8 steps below the highest
    pivots   sums up what lies above each of 32 values of tokens between low and high, picked all
             over the row: some 2/33 of the tokens there are left, however their values are spread.
             Only where there are more than one program can hold
    gather   writes down the values from low up to below high, and sums up those at high: of values
             that many tokens have, one is a pivot
    search   halves what is left in one program, which holds all of it in registers

So many times a filtered draw reads the logits, the draw itself included, whatever they are:

    min-p                   2
    top-k or top-p          4, or 5 with pivots
    top-k and top-p         6, or 8 with pivots twice

A launch of which no row has need costs some microseconds. All sums are of integers: no result
depends on the order in which programs add.
"""

import torch
import triton
import triton.language as tl

from pdserve_kernels.triton.exact_math import exp_to_fixed_point
from pdserve_kernels.triton.sampling.device_batch import DeviceSamplingBatch
from pdserve_kernels.triton.sampling.masks import from_key, load_scaled, to_key

BLOCK = 1024
# A device has room for about as many; of few rows each is looked at by several.
MAX_PROGRAMS = 2048
# What one program has in registers.
SEARCH_BLOCK = 8192
NUM_STEPS = tl.constexpr(8)
# What lies 28 below the highest has no weight in fixed point, nor can it be drawn: noise is between
# -2.9 and 22.9.
STEP = tl.constexpr(3.5)
NUM_PIVOTS = tl.constexpr(32)
# Tokens of which a pivot is picked.
PIVOT_RUN = tl.constexpr(16)
# Makes keys positive, so that memory of zeros is below all.
KEY_BIAS = tl.constexpr(2**31)
# What a round knows of a row, int64: sums over all programs, and the pivots.
COUNTS = tl.constexpr(0)  # [NUM_STEPS]
WEIGHTS = tl.constexpr(8)  # [NUM_STEPS]
PIVOTS = tl.constexpr(16)  # [NUM_PIVOTS] keys
ABOVE_PIVOTS = tl.constexpr(48)  # [NUM_PIVOTS]
AT_HIGH = tl.constexpr(80)
NUM_VALUES = tl.constexpr(81)
RECORD = tl.constexpr(96)


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
    sizes = [num_rows * RECORD.value, num_rows * RECORD.value, num_rows]
    sums = torch.zeros(sum(sizes), dtype=torch.int64, device=logits.device)
    *rounds, highest = torch.split(sums, sizes)
    row = (logits, logits if mask is None else mask, logits.stride(0), vocab_size)
    wanted = (batch.divisors, batch.top_k, batch.top_p, batch.log_min_p, highest)
    options = {"HAS_MASK": mask is not None, "BLOCK": BLOCK, "enable_fp_fusion": False}
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    grid = (num_rows, min(num_blocks, max(1, MAX_PROGRAMS // num_rows)))
    highest_kernel[grid](*row, *wanted, **options)
    for by_weight, record in zip((False, True), rounds, strict=True):
        state = (record, thresholds)
        options |= {"BY_WEIGHT": by_weight}
        steps_kernel[grid](*row, *wanted, *state, num_warps=8, **options)
        options |= {"SEARCH_BLOCK": SEARCH_BLOCK}
        pivots_kernel[grid](*row, *wanted, *state, num_warps=8, **options)
        gather_kernel[grid](*row, *wanted, *state, values, **options)
        search_kernel[(num_rows,)](
            vocab_size,
            *wanted,
            *state,
            values,
            BY_WEIGHT=by_weight,
            SEARCH_BLOCK=SEARCH_BLOCK,
            num_warps=16,
            enable_fp_fusion=False,
        )
        del options["SEARCH_BLOCK"]
    return thresholds


@triton.jit
def _has_top_k(top_k_ptr, vocab_size, row):
    top_k = tl.load(top_k_ptr + row)
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def _has_round(top_k_ptr, top_p_ptr, vocab_size, row, BY_WEIGHT: tl.constexpr):
    if BY_WEIGHT:
        return tl.load(top_p_ptr + row) < 1.0
    else:
        return _has_top_k(top_k_ptr, vocab_size, row)


@triton.jit
def _has_filter(top_k_ptr, top_p_ptr, log_min_p_ptr, vocab_size, row):
    has_min_p = tl.load(log_min_p_ptr + row) > float("-inf")
    has_top_p = tl.load(top_p_ptr + row) < 1.0
    return _has_top_k(top_k_ptr, vocab_size, row) | has_top_p | has_min_p


@triton.jit
def _load_highest(highest_ptr, row):
    return from_key((tl.load(highest_ptr + row) - KEY_BIAS).to(tl.int32))


@triton.jit
def _load_lowest(highest, log_min_p_ptr, thresholds_ptr, row, BY_WEIGHT: tl.constexpr):
    """The key of the lowest value that filters before this round keep."""
    if BY_WEIGHT:
        lowest = tl.load(thresholds_ptr + row)
    else:
        lowest = highest + tl.maximum(tl.load(log_min_p_ptr + row), -NUM_STEPS * STEP)
    return to_key(lowest)


@triton.jit
def _measure(x, highest, BY_WEIGHT: tl.constexpr):
    """What each token adds to a sum, int64: 1, or its weight."""
    if BY_WEIGHT:
        return exp_to_fixed_point(x - highest)
    else:
        return tl.full(x.shape, 1, tl.int64)


@triton.jit
def _sum_above(key, measure, pivots):
    """What the tokens [n] above each of the pivots come to together."""
    return tl.sum(tl.where(key[None, :] > pivots[:, None], measure[None, :], 0), axis=1)


@triton.jit
def _step_pivots(highest, lowest):
    """Keys [NUM_STEPS] just below the steps' ends; above the last is all that may be kept."""
    ends = highest - (tl.arange(0, NUM_STEPS) + 1).to(tl.float32) * STEP
    ends = tl.maximum(to_key(ends), lowest)
    return tl.where(tl.arange(0, NUM_STEPS) == NUM_STEPS - 1, lowest, ends) - 1


@triton.jit
def _narrow(low, high, above, limit, pivots, above_pivots):
    """The keys between which the threshold is, and what is above the higher, by sums of pivots."""
    is_inside = (pivots >= low) & (pivots < high)
    is_low = is_inside & (above_pivots.to(tl.float64) >= limit)
    is_high = is_inside & (above_pivots.to(tl.float64) < limit)
    new_low = tl.max(tl.where(is_low, pivots + 1, low), axis=0)
    new_high = tl.min(tl.where(is_high, pivots, high), axis=0)
    return new_low, new_high, tl.max(tl.where(is_high, above_pivots, above), axis=0)


@triton.jit
def _narrow_by_steps(
    record_ptr, top_k_ptr, top_p_ptr, highest, lowest, row, BY_WEIGHT: tl.constexpr
):
    """(low, high, above, limit, how many tokens may be between low and high).

    The threshold is the lowest key from low up above which tokens come to less than the limit.
    """
    steps = tl.arange(0, NUM_STEPS)
    pivots = _step_pivots(highest, lowest)
    counts = tl.load(record_ptr + COUNTS + steps)
    if BY_WEIGHT:
        sums = tl.load(record_ptr + WEIGHTS + steps)
        limit = tl.load(top_p_ptr + row) * tl.max(sums, axis=0).to(tl.float64)
    else:
        sums = counts
        limit = tl.load(top_k_ptr + row).to(tl.float64)
    high = to_key(highest)
    # All are kept where they do not come to the limit together.
    high = tl.where(tl.max(sums, axis=0).to(tl.float64) < limit, lowest, high)
    low, high, above = _narrow(lowest, high, tl.zeros((), tl.int64), limit, pivots, sums)
    num_above = tl.max(tl.where(pivots >= high, counts, 0), axis=0)
    num_from_low = tl.max(tl.where(pivots >= low - 1, counts, 0), axis=0)
    return low, high, above, limit, num_from_low - num_above


@triton.jit
def _narrow_by_all(
    record_ptr,
    top_k_ptr,
    top_p_ptr,
    highest,
    lowest,
    row,
    BY_WEIGHT: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    """The same by steps and by pivots, where there are any."""
    low, high, above, limit, num_between = _narrow_by_steps(
        record_ptr, top_k_ptr, top_p_ptr, highest, lowest, row, BY_WEIGHT
    )
    if num_between > SEARCH_BLOCK:
        index = tl.arange(0, NUM_PIVOTS)
        pivots = tl.load(record_ptr + PIVOTS + index).to(tl.int32)
        sums = tl.load(record_ptr + ABOVE_PIVOTS + index)
        low, high, above = _narrow(low, high, above, limit, pivots, sums)
    return low, high, above, limit


@triton.jit
def highest_kernel(
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
    if _has_filter(top_k_ptr, top_p_ptr, log_min_p_ptr, vocab_size, row):
        divisor = tl.load(divisors_ptr + row)
        highest = tl.full((BLOCK,), -(2**31), tl.int32)
        for start in range(tl.program_id(1) * BLOCK, vocab_size, tl.num_programs(1) * BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = load_scaled(
                logits_ptr, mask_ptr, stride_row, vocab_size, row, token, divisor, HAS_MASK
            )
            highest = tl.maximum(highest, to_key(x))
        highest = tl.max(highest, axis=0).to(tl.int64) + KEY_BIAS
        tl.atomic_max(highest_ptr + row, highest, sem="relaxed")


@triton.jit
def steps_kernel(
    logits_ptr,
    mask_ptr,
    stride_row,
    vocab_size,
    divisors_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    highest_ptr,
    records_ptr,
    thresholds_ptr,
    HAS_MASK: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if _has_round(top_k_ptr, top_p_ptr, vocab_size, row, BY_WEIGHT):
        divisor = tl.load(divisors_ptr + row)
        highest = _load_highest(highest_ptr, row)
        lowest = _load_lowest(highest, log_min_p_ptr, thresholds_ptr, row, BY_WEIGHT)
        pivots = _step_pivots(highest, lowest)
        counts = tl.zeros((NUM_STEPS,), tl.int64)
        weights = tl.zeros((NUM_STEPS,), tl.int64)
        for start in range(tl.program_id(1) * BLOCK, vocab_size, tl.num_programs(1) * BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = load_scaled(
                logits_ptr, mask_ptr, stride_row, vocab_size, row, token, divisor, HAS_MASK
            )
            key = to_key(x)
            # Some blocks have nothing near the highest.
            if tl.max(key, axis=0) >= lowest:
                is_token = (x > float("-inf")).to(tl.int32)
                counts += _sum_above(key, is_token, pivots)
                if BY_WEIGHT:
                    weights += _sum_above(key, exp_to_fixed_point(x - highest), pivots)
        record_ptr = records_ptr + row * RECORD + tl.arange(0, NUM_STEPS)
        tl.atomic_add(record_ptr + COUNTS, counts, sem="relaxed")
        if BY_WEIGHT:
            tl.atomic_add(record_ptr + WEIGHTS, weights, sem="relaxed")


@triton.jit
def _pick_pivots(
    logits_ptr, mask_ptr, stride_row, vocab_size, row, divisor, low, high, HAS_MASK: tl.constexpr
):
    """Keys [NUM_PIVOTS] of tokens that lie from low up to below high: of each of as many runs of
    tokens the last one, or low - 1 where there is none.
    """
    place = tl.arange(0, PIVOT_RUN)[None, :]
    first = tl.arange(0, NUM_PIVOTS).to(tl.int64) * vocab_size // NUM_PIVOTS
    token = first.to(tl.int32)[:, None] + place
    x = load_scaled(logits_ptr, mask_ptr, stride_row, vocab_size, row, token, divisor, HAS_MASK)
    key = to_key(x)
    is_between = (key >= low) & (key < high)
    last = tl.max(tl.where(is_between, place, -1), axis=1)
    return tl.max(tl.where(place == last[:, None], key, low - 1), axis=1)


@triton.jit
def pivots_kernel(
    logits_ptr,
    mask_ptr,
    stride_row,
    vocab_size,
    divisors_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    highest_ptr,
    records_ptr,
    thresholds_ptr,
    HAS_MASK: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if _has_round(top_k_ptr, top_p_ptr, vocab_size, row, BY_WEIGHT):
        record_ptr = records_ptr + row * RECORD
        highest = _load_highest(highest_ptr, row)
        lowest = _load_lowest(highest, log_min_p_ptr, thresholds_ptr, row, BY_WEIGHT)
        low, high, _, _, num_between = _narrow_by_steps(
            record_ptr, top_k_ptr, top_p_ptr, highest, lowest, row, BY_WEIGHT
        )
        if num_between > SEARCH_BLOCK:
            divisor = tl.load(divisors_ptr + row)
            pivots = _pick_pivots(
                *(logits_ptr, mask_ptr, stride_row, vocab_size, row, divisor),
                *(low, high, HAS_MASK),
            )
            sums = tl.zeros((NUM_PIVOTS,), tl.int64)
            for start in range(tl.program_id(1) * BLOCK, vocab_size, tl.num_programs(1) * BLOCK):
                token = start + tl.arange(0, BLOCK)
                x = load_scaled(
                    logits_ptr, mask_ptr, stride_row, vocab_size, row, token, divisor, HAS_MASK
                )
                key = to_key(x)
                if tl.max(key, axis=0) > low:
                    sums += _sum_above(key, _measure(x, highest, BY_WEIGHT), pivots)
            index = tl.arange(0, NUM_PIVOTS)
            tl.atomic_add(record_ptr + ABOVE_PIVOTS + index, sums, sem="relaxed")
            if tl.program_id(1) == 0:
                tl.store(record_ptr + PIVOTS + index, pivots.to(tl.int64))


@triton.jit
def gather_kernel(
    logits_ptr,
    mask_ptr,
    stride_row,
    vocab_size,
    divisors_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    highest_ptr,
    records_ptr,
    thresholds_ptr,
    values_ptr,
    HAS_MASK: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """values [n, vocab_size] get the scaled logits from low up to below high, in any order."""
    row = tl.program_id(0)
    if _has_round(top_k_ptr, top_p_ptr, vocab_size, row, BY_WEIGHT):
        record_ptr = records_ptr + row * RECORD
        highest = _load_highest(highest_ptr, row)
        lowest = _load_lowest(highest, log_min_p_ptr, thresholds_ptr, row, BY_WEIGHT)
        low, high, _, _ = _narrow_by_all(
            *(record_ptr, top_k_ptr, top_p_ptr, highest, lowest, row, BY_WEIGHT, SEARCH_BLOCK)
        )
        if low < high:
            divisor = tl.load(divisors_ptr + row)
            values_ptr += row.to(tl.int64) * vocab_size
            num_at_high = tl.zeros((BLOCK,), tl.int32)
            for start in range(tl.program_id(1) * BLOCK, vocab_size, tl.num_programs(1) * BLOCK):
                token = start + tl.arange(0, BLOCK)
                x = load_scaled(
                    logits_ptr, mask_ptr, stride_row, vocab_size, row, token, divisor, HAS_MASK
                )
                key = to_key(x)
                num_at_high += (key == high).to(tl.int32)
                is_taken = (key >= low) & (key < high)
                num_taken = tl.sum(is_taken.to(tl.int32), axis=0)
                if num_taken > 0:
                    num_values = num_taken.to(tl.int64)
                    first = tl.atomic_add(record_ptr + NUM_VALUES, num_values, sem="relaxed")
                    place = first + tl.cumsum(is_taken.to(tl.int32), axis=0) - 1
                    tl.store(values_ptr + place, x, mask=is_taken)
            at_high = tl.sum(num_at_high, axis=0).to(tl.int64)
            tl.atomic_add(record_ptr + AT_HIGH, at_high, sem="relaxed")


@triton.jit
def _load_values(values_ptr, index, num_values, highest, BY_WEIGHT: tl.constexpr):
    """Keys of values, and what each adds to a sum."""
    x = tl.load(values_ptr + index, mask=index < num_values, other=float("-inf"))
    return to_key(x), tl.where(index < num_values, _measure(x, highest, BY_WEIGHT), 0)


@triton.jit
def _search(
    values_ptr,
    num_values,
    highest,
    low,
    high,
    above,
    limit,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The lowest key from low to high above which tokens come to less than the limit; `above` is
    what those come to that are above all values.
    """
    index = tl.arange(0, BLOCK)
    keys, measures = _load_values(values_ptr, index, num_values, highest, BY_WEIGHT)
    while low < high:
        # Half way, where low + high could overflow.
        key = (low & high) + ((low ^ high) >> 1)
        sums = tl.where(keys > key, measures, 0)
        for start in range(BLOCK, num_values, BLOCK):
            more, others = _load_values(values_ptr, start + index, num_values, highest, BY_WEIGHT)
            sums += tl.where(more > key, others, 0)
        is_low = (above + tl.sum(sums, axis=0)).to(tl.float64) >= limit
        low = tl.where(is_low, key + 1, low)
        high = tl.where(is_low, high, key)
    return high


@triton.jit
def search_kernel(
    vocab_size,
    divisors_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    highest_ptr,
    records_ptr,
    thresholds_ptr,
    values_ptr,
    BY_WEIGHT: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if _has_round(top_k_ptr, top_p_ptr, vocab_size, row, BY_WEIGHT):
        record_ptr = records_ptr + row * RECORD
        values_ptr += row.to(tl.int64) * vocab_size
        highest = _load_highest(highest_ptr, row)
        lowest = _load_lowest(highest, log_min_p_ptr, thresholds_ptr, row, BY_WEIGHT)
        low, high, above, limit = _narrow_by_all(
            *(record_ptr, top_k_ptr, top_p_ptr, highest, lowest, row, BY_WEIGHT, SEARCH_BLOCK)
        )
        if low < high:
            num_values = tl.load(record_ptr + NUM_VALUES).to(tl.int32)
            at_high = tl.load(record_ptr + AT_HIGH)
            if BY_WEIGHT:
                at_high *= exp_to_fixed_point(from_key(high) - highest)
            above += at_high
            if above.to(tl.float64) < limit:
                high = _search(
                    *(values_ptr, num_values, highest, low, high - 1, above, limit),
                    *(BY_WEIGHT, SEARCH_BLOCK),
                )
        # It is where the threshold before was, which not all warps may have read yet.
        tl.debug_barrier()
        tl.store(thresholds_ptr + row, from_key(high))
    elif not BY_WEIGHT:
        # The threshold of min-p, or none.
        threshold = tl.full((), float("-inf"), tl.float32)
        if _has_filter(top_k_ptr, top_p_ptr, log_min_p_ptr, vocab_size, row):
            highest = _load_highest(highest_ptr, row)
            lowest = _load_lowest(highest, log_min_p_ptr, thresholds_ptr, row, BY_WEIGHT)
            threshold = from_key(lowest)
        tl.store(thresholds_ptr + row, threshold)
