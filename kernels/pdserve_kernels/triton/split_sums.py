# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Adding up what programs with a part of the inputs each have made of a product."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


def add_splits(sums: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of fp32 [splits, rows, outputs], in order, and bias [outputs], rounded once to
    dtype: [rows, outputs].
    """
    num_splits, num_rows, num_outputs = sums.shape
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=sums.device)
    if num_rows:
        sum_kernel[(num_rows, triton.cdiv(num_outputs, BLOCK))](
            sums,
            out if bias is None else bias,
            out,
            num_rows,
            num_outputs,
            NUM_SPLITS=num_splits,
            HAS_BIAS=bias is not None,
            BLOCK=BLOCK,
            enable_fp_fusion=True,
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def sum_kernel(
    sums_ptr,
    bias_ptr,
    output_ptr,
    num_rows,
    num_outputs,
    NUM_SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output[row] = the sums of all splits, in order, and the bias."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = outputs < num_outputs
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(
            sums_ptr + (split * num_rows + row) * num_outputs + outputs, mask=mask, other=0.0
        )
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        output_ptr + row * num_outputs + outputs, total.to(output_ptr.dtype.element_ty), mask=mask
    )
