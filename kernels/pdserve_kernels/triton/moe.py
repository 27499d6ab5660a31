# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Experts on CUDA, the same for all sets of Triton's: one tile for any number of rows, inputs added
up in one order, and a row's experts in the order of their ids, without atomics. So a row's bits
depend on the row alone. A shared expert is multiplied by the same tiles, as one that all rows have.

Rows are sorted by experts on the device, as vLLM's fused_moe does it: a program multiplies rows of
one expert. Launches depend on the number of rows alone, so that a CUDA graph records them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pdserve_kernels.reference.moe import (
    ExpertWeight,
    SharedExpert,
    check_shared,
    check_top_k,
    checked_experts,
    with_gate,
)
from pdserve_kernels.triton.experts import (
    ExpertStack,
    ExpertStacker,
    multiply_dense,
    multiply_expert,
    stack_of_one,
)

# The rows of the router's tile; a program has all experts' logits.
ROUTED_ROWS = 16
# With fewer a row of many experts does not fit into registers.
ROUTE_WARPS = 8
# The shared memory that its tiles wait in.
ROUTE_BYTES = 64 * 1024
BLOCK_ROWS = 64
BLOCK_OUT = 64
SUM_BLOCK = 1024
# Below all logits that count, and above what is masked: a row of NaN has experts, too.
LOWEST = tl.constexpr(-3e38)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeight:
    """router: [num_experts, hidden_size], with a shared expert [num_experts + 1, hidden_size];
    gate_up: of 2 * intermediate_size outputs; down: of hidden_size outputs.
    """

    router: torch.Tensor
    gate_up: ExpertStack
    down: ExpertStack
    # The same of one expert, of a size of its own, or None.
    shared: tuple[ExpertStack, ExpertStack] | None
    top_k: int
    renormalize: bool


class _Sorted(NamedTuple):
    """Pairs of a row and one of its experts, row * top_k + place, sorted by experts."""

    # int64 [rows * top_k]
    order: torch.Tensor
    # int32 [num_experts + 1]: where an expert's pairs begin, and its blocks of BLOCK_ROWS pairs.
    first_pairs: torch.Tensor
    first_blocks: torch.Tensor
    # As many blocks as there may be.
    max_blocks: int


def pack_moe(
    router: torch.Tensor,
    experts: Iterable[tuple[ExpertWeight, ExpertWeight]],
    *,
    top_k: int,
    renormalize: bool,
    shared: SharedExpert | None = None,
) -> MoeWeight:
    """See the reference's contract. Shares the memory of a dense shared expert, and of a router
    alone. Raises ValueError also for experts that are not all stored alike.
    """
    num_experts = len(router)
    check_top_k(top_k, num_experts)
    check_shared(router, shared)
    gate_up, down = ExpertStacker(num_experts), ExpertStacker(num_experts)
    for gate_up_weight, down_weight in checked_experts(router, experts):
        gate_up.add(gate_up_weight)
        down.add(down_weight)
    return MoeWeight(
        router=with_gate(router, shared).detach().contiguous(),
        gate_up=gate_up.finish(),
        down=down.finish(),
        shared=shared and (stack_of_one(shared.gate_up), stack_of_one(shared.down)),
        top_k=top_k,
        renormalize=renormalize,
    )


def fused_moe(x: torch.Tensor, packed: MoeWeight) -> torch.Tensor:
    """See the reference's contract. Never synchronises."""
    x = x.contiguous()
    num_rows, hidden_size = x.shape
    out = torch.empty_like(x)
    if num_rows == 0:
        return out
    weights, ids = _route(x, packed)
    pairs = _sort(ids, packed.down.num_experts)
    parts = _multiply_pairs(x, packed.gate_up, packed.down, pairs, packed.top_k)
    shared_parts = parts
    if packed.shared is not None:
        shared_parts = _multiply_pairs(x, *packed.shared, _all_rows(x), 1)
    sum_experts_kernel[(num_rows, triton.cdiv(hidden_size, SUM_BLOCK))](
        parts,
        shared_parts,
        weights,
        out,
        hidden_size,
        TOP_K=packed.top_k,
        NUM_SHARED=0 if packed.shared is None else 1,
        BLOCK=SUM_BLOCK,
        enable_fp_fusion=True,
    )
    return out


def _multiply_pairs(
    x: torch.Tensor, gate_up: ExpertStack, down: ExpertStack, pairs: _Sorted, top_k: int
) -> torch.Tensor:
    """Return what experts bring their rows, fp32 [pairs, hidden_size], in the order of pairs."""
    num_experts, hidden_size, intermediate_size = (
        down.num_experts,
        down.out_features,
        down.in_features,
    )
    num_pairs = len(pairs.order)
    constants = {
        "NUM_EXPERTS": num_experts,
        "BLOCK_EXPERTS": triton.next_power_of_2(num_experts),
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_OUT": BLOCK_OUT,
        "BLOCK_K": 32 if x.dtype == torch.float32 else 64,
        "num_stages": 3,
        "enable_fp_fusion": True,
    }
    places = (pairs.order, pairs.first_pairs, pairs.first_blocks)
    activated = x.new_empty(num_pairs, intermediate_size)
    gate_up_kernel[(pairs.max_blocks * triton.cdiv(intermediate_size, BLOCK_OUT),)](
        x,
        *gate_up.tensors,
        *places,
        activated,
        TOP_K=top_k,
        NUM_OUTPUTS=intermediate_size,
        **gate_up.constants,
        num_warps=8,
        **constants,
    )
    parts = torch.empty(num_pairs, hidden_size, dtype=torch.float32, device=x.device)
    down_kernel[(pairs.max_blocks * triton.cdiv(hidden_size, BLOCK_OUT),)](
        activated,
        *down.tensors,
        *places,
        parts,
        NUM_OUTPUTS=hidden_size,
        **down.constants,
        num_warps=4,
        **constants,
    )
    return parts


def _route(x: torch.Tensor, packed: MoeWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's weights, fp32 [rows, top_k], and experts, int32 [rows, top_k], by ascending
    ids. With a shared expert weights are [rows, top_k + 1], its own the last one.
    """
    num_rows, num_shared = len(x), 0 if packed.shared is None else 1
    weights = torch.empty(num_rows, packed.top_k + num_shared, dtype=torch.float32, device=x.device)
    ids = torch.empty(num_rows, packed.top_k, dtype=torch.int32, device=x.device)
    route_kernel[(triton.cdiv(num_rows, ROUTED_ROWS),)](
        x,
        packed.router,
        weights,
        ids,
        num_rows,
        TOP_K=packed.top_k,
        RENORMALIZE=packed.renormalize,
        NUM_INPUTS=x.shape[1],
        NUM_EXPERTS=packed.down.num_experts,
        NUM_SHARED=num_shared,
        **route_tile(len(packed.router), x.dtype),
        num_warps=ROUTE_WARPS,
        enable_fp_fusion=True,
    )
    return weights, ids


def route_tile(num_logits: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the router's tile, which fits the shared memory of all GPUs that this code runs on."""
    block_experts, num_stages = max(16, triton.next_power_of_2(num_logits)), 3
    input_bytes = (ROUTED_ROWS + block_experts) * dtype.itemsize * num_stages
    block_k = 64
    while block_k > 16 and block_k * input_bytes > ROUTE_BYTES:
        block_k //= 2
    return {
        "BLOCK_ROWS": ROUTED_ROWS,
        "BLOCK_EXPERTS": block_experts,
        "BLOCK_K": block_k,
        "num_stages": num_stages,
    }


def _sort(ids: torch.Tensor, num_experts: int) -> _Sorted:
    """Sort pairs by their experts, int32 [rows, top_k], on the device."""
    found, order = torch.sort(ids.flatten(), stable=True)
    edges = torch.arange(num_experts + 1, dtype=torch.int32, device=ids.device)
    first_pairs = torch.searchsorted(found, edges, out_int32=True)
    num_blocks = (first_pairs.diff() + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    first_blocks = torch.zeros_like(first_pairs)
    torch.cumsum(num_blocks, 0, dtype=torch.int32, out=first_blocks[1:])
    # Each expert that has pairs may have a block that is not full.
    num_pairs, num_used = len(order), min(len(order), num_experts)
    max_blocks = num_used + (num_pairs - num_used) // BLOCK_ROWS
    return _Sorted(order, first_pairs, first_blocks, max_blocks)


def _all_rows(x: torch.Tensor) -> _Sorted:
    """Of one expert that all rows of x [rows, hidden_size] have."""
    num_rows = len(x)
    num_blocks = triton.cdiv(num_rows, BLOCK_ROWS)
    edges = torch.arange(2, dtype=torch.int32, device=x.device)
    order = torch.arange(num_rows, device=x.device)
    return _Sorted(order, edges * num_rows, edges * num_blocks, num_blocks)


@triton.jit(do_not_specialize=["num_rows"])
def route_kernel(
    x_ptr,
    router_ptr,
    weights_ptr,
    ids_ptr,
    num_rows,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The experts of some rows, by ascending ids, and their weights, the shared one's behind them;
    its gate is the router's last output.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    experts = tl.arange(0, BLOCK_EXPERTS)
    is_row, is_expert = rows < num_rows, experts < NUM_EXPERTS
    x_rows = x_ptr + rows[:, None].to(tl.int64) * NUM_INPUTS
    router_rows = router_ptr + experts[:, None] * NUM_INPUTS
    is_output = experts < NUM_EXPERTS + NUM_SHARED
    logits = multiply_dense(
        x_rows, router_rows, is_row, is_output, NUM_INPUTS, BLOCK_ROWS, BLOCK_EXPERTS, BLOCK_K
    )
    logits = logits.to(x_ptr.dtype.element_ty).to(tl.float32)
    first_weights = rows.to(tl.int64) * (TOP_K + NUM_SHARED)
    if NUM_SHARED > 0:
        gate = tl.sum(tl.where(experts[None, :] == NUM_EXPERTS, logits, 0.0), axis=1)
        tl.store(weights_ptr + first_weights + TOP_K, 1.0 / (1.0 + tl.exp(-gate)), mask=is_row)
    logits = tl.where(is_expert[None, :], logits, float("-inf"))
    left = tl.where(is_expert[None, :] & (logits > LOWEST), logits, LOWEST)
    left = tl.where(is_expert[None, :], left, float("-inf"))
    chosen = tl.zeros((BLOCK_ROWS, BLOCK_EXPERTS), dtype=tl.int32)
    for _ in range(TOP_K):
        best = tl.argmax(left, axis=1, tie_break_left=True)
        is_best = experts[None, :] == best[:, None]
        chosen = tl.where(is_best, 1, chosen)
        left = tl.where(is_best, float("-inf"), left)
    shares = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    of_all = tl.where(chosen > 0, shares, 0.0) if RENORMALIZE else shares
    weights = shares / tl.sum(of_all, axis=1)[:, None]
    places = tl.cumsum(chosen, axis=1) - 1
    mask = is_row[:, None] & (chosen > 0)
    tl.store(weights_ptr + first_weights[:, None] + places, weights, mask=mask)
    ids = tl.broadcast_to(experts[None, :], (BLOCK_ROWS, BLOCK_EXPERTS))
    tl.store(ids_ptr + rows[:, None].to(tl.int64) * TOP_K + places, ids, mask=mask)


@triton.jit
def gate_up_kernel(
    x_ptr,
    gate_up_ptr,
    scales_ptr,
    zeros_ptr,
    order_ptr,
    first_pairs_ptr,
    first_blocks_ptr,
    output_ptr,
    TOP_K: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """output[place] = silu(gate) * up of the pair that is sorted to this place."""
    output_blocks: tl.constexpr = tl.cdiv(NUM_OUTPUTS, BLOCK_OUT)
    block = tl.program_id(0) // output_blocks
    expert, places, is_place = _find_block(
        block, first_pairs_ptr, first_blocks_ptr, NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_ROWS
    )
    if expert == NUM_EXPERTS:
        return
    outputs = tl.program_id(0) % output_blocks * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_output = outputs < NUM_OUTPUTS
    rows = tl.load(order_ptr + places, mask=is_place, other=0) // TOP_K
    x_rows = x_ptr + rows[:, None] * NUM_INPUTS
    gates = expert.to(tl.int64) * 2 * NUM_OUTPUTS + outputs
    gate = multiply_expert(
        x_rows, gate_up_ptr, scales_ptr, zeros_ptr, gates, is_place, is_output,
        NUM_INPUTS, NUM_GROUPS, GROUP_SIZE, BITS, IS_FP8, HAS_ZEROS, BLOCK_ROWS, BLOCK_OUT, BLOCK_K,
    )  # fmt: skip
    up = multiply_expert(
        x_rows, gate_up_ptr, scales_ptr, zeros_ptr, gates + NUM_OUTPUTS, is_place, is_output,
        NUM_INPUTS, NUM_GROUPS, GROUP_SIZE, BITS, IS_FP8, HAS_ZEROS, BLOCK_ROWS, BLOCK_OUT, BLOCK_K,
    )  # fmt: skip
    dtype = output_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    result = (activated * up.to(dtype).to(tl.float32)).to(dtype)
    targets = output_ptr + places[:, None].to(tl.int64) * NUM_OUTPUTS + outputs[None, :]
    tl.store(targets, result, mask=is_place[:, None] & is_output[None, :])


@triton.jit
def down_kernel(
    x_ptr,
    down_ptr,
    scales_ptr,
    zeros_ptr,
    order_ptr,
    first_pairs_ptr,
    first_blocks_ptr,
    parts_ptr,
    NUM_INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """parts[pair] = what the pair's expert brings, without its weight."""
    output_blocks: tl.constexpr = tl.cdiv(NUM_OUTPUTS, BLOCK_OUT)
    block = tl.program_id(0) // output_blocks
    expert, places, is_place = _find_block(
        block, first_pairs_ptr, first_blocks_ptr, NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_ROWS
    )
    if expert == NUM_EXPERTS:
        return
    outputs = tl.program_id(0) % output_blocks * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_output = outputs < NUM_OUTPUTS
    x_rows = x_ptr + places[:, None].to(tl.int64) * NUM_INPUTS
    total = multiply_expert(
        x_rows, down_ptr, scales_ptr, zeros_ptr, expert.to(tl.int64) * NUM_OUTPUTS + outputs,
        is_place, is_output,
        NUM_INPUTS, NUM_GROUPS, GROUP_SIZE, BITS, IS_FP8, HAS_ZEROS, BLOCK_ROWS, BLOCK_OUT, BLOCK_K,
    )  # fmt: skip
    pairs = tl.load(order_ptr + places, mask=is_place, other=0)
    targets = parts_ptr + pairs[:, None] * NUM_OUTPUTS + outputs[None, :]
    tl.store(targets, total, mask=is_place[:, None] & is_output[None, :])


@triton.jit
def sum_experts_kernel(
    parts_ptr,
    shared_parts_ptr,
    weights_ptr,
    output_ptr,
    num_outputs,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output[row] = the row's parts times their weights, added up by ascending ids, and behind them
    the shared expert's.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_outputs
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    row_weights = weights_ptr + row * (TOP_K + NUM_SHARED)
    for place in range(TOP_K):
        pair = row * TOP_K + place
        part = tl.load(parts_ptr + pair * num_outputs + column, mask=inside, other=0.0)
        total += part * tl.load(row_weights + place)
    if NUM_SHARED > 0:
        part = tl.load(shared_parts_ptr + row * num_outputs + column, mask=inside, other=0.0)
        total += part * tl.load(row_weights + TOP_K)
    result = total.to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + row * num_outputs + column, result, mask=inside)


@triton.jit
def _find_block(
    block, first_pairs_ptr, first_blocks_ptr, NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Whose block it is, NUM_EXPERTS if nobody's, its places among the sorted pairs, and which of
    them are its own.
    """
    experts = tl.arange(0, BLOCK_EXPERTS)
    is_expert = experts < NUM_EXPERTS
    ends = tl.load(first_blocks_ptr + 1 + experts, mask=is_expert, other=0)
    expert = tl.sum((is_expert & (ends <= block)).to(tl.int32), axis=0)
    first_pair = tl.load(first_pairs_ptr + expert)
    end = tl.load(first_pairs_ptr + tl.minimum(expert + 1, NUM_EXPERTS))
    first_block = tl.load(first_blocks_ptr + expert)
    places = first_pair + (block - first_block) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return expert, places, places < end
