# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What a captured step does first: brings the inputs of this step to where it reads them."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


def spread_block_tables(
    tables: torch.Tensor, table_size: torch.Tensor, spread: torch.Tensor
) -> None:
    """Write tables, int32 [num_groups, num_reqs, width] without gaps, to spread [num_groups,
    max_reqs, max_width], whose other entries stay as they are. table_size is int32 [2], num_reqs
    and width, on the device: a CUDA graph that replays this does not depend on them.
    """
    num_groups, max_reqs, _ = spread.shape
    spread_kernel[(num_groups, max_reqs)](
        tables, table_size, spread, spread.stride(0), spread.stride(1), BLOCK=BLOCK
    )


@triton.jit
def spread_kernel(
    tables_ptr,
    table_size_ptr,
    spread_ptr,
    stride_group,
    stride_request,
    BLOCK: tl.constexpr,
):
    group, request = tl.program_id(0), tl.program_id(1)
    num_reqs = tl.load(table_size_ptr)
    if request >= num_reqs:
        return
    width = tl.load(table_size_ptr + 1)
    table_ptr = tables_ptr + (group * num_reqs + request).to(tl.int64) * width
    row_ptr = spread_ptr + group.to(tl.int64) * stride_group + request * stride_request
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        block = tl.load(table_ptr + column, mask=column < width, other=0)
        tl.store(row_ptr + column, block, mask=column < width)
