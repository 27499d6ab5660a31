"""The MLP of a layer with experts, of which a router chooses some for each token."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pdserve_kernels.reference.linear import LinearWeight, linear, linear_silu_mul, pack_linear
from pdserve_kernels.reference.quantization import QuantizedWeight

# Of an expert: dense, or integers or FP8 for activations of the router's dtype.
ExpertWeight = torch.Tensor | QuantizedWeight


class SharedExpert(NamedTuple):
    """The weights of an expert that all rows have, of a size of its own.

    gate: [1, hidden_size], of which its share is the sigmoid; gate_up: [2 * size, hidden_size];
    down: [hidden_size, size].
    """

    gate: torch.Tensor
    gate_up: ExpertWeight
    down: ExpertWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeight:
    """Experts ready for `fused_moe`, in the order of their ids, and the router of as many outputs.

    gate_up: [2 * intermediate_size, hidden_size] each, in two parts; down: [hidden_size,
    intermediate_size] each. With a shared expert, the router has one output more, its gate.
    """

    router: LinearWeight
    gate_up: tuple[LinearWeight, ...]
    down: tuple[LinearWeight, ...]
    # Gate and up, and down, or None.
    shared: tuple[LinearWeight, LinearWeight] | None
    top_k: int
    renormalize: bool


def pack_moe(
    router: torch.Tensor,
    experts: Iterable[tuple[ExpertWeight, ExpertWeight]],
    *,
    top_k: int,
    renormalize: bool,
    shared: SharedExpert | None = None,
) -> MoeWeight:
    """Prepare a router [num_experts, hidden_size] and its experts for `fused_moe`.

    experts brings for each, in the order of ids, gate and up [2 * intermediate_size, hidden_size],
    and down [hidden_size, intermediate_size]; each is packed before the next is asked for, and not
    kept. Quantized ones are what `pack_linear` makes of them; the router and a gate are dense.
    Raises ValueError for numbers, shapes and dtypes that do not fit together.
    """
    check_top_k(top_k, len(router))
    check_shared(router, shared)
    packed = [
        (pack_linear(gate_up, num_parts=2), pack_linear(down))
        for gate_up, down in checked_experts(router, experts)
    ]
    gate_ups, downs = zip(*packed, strict=True)
    return MoeWeight(
        router=pack_linear(with_gate(router, shared)),
        gate_up=gate_ups,
        down=downs,
        shared=shared and (pack_linear(shared.gate_up, num_parts=2), pack_linear(shared.down)),
        top_k=top_k,
        renormalize=renormalize,
    )


def fused_moe(x: torch.Tensor, packed: MoeWeight) -> torch.Tensor:
    """Return for each row of x [T, hidden_size] the weighted sum of its experts' gated MLPs, in
    x's dtype.

    A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538) routed as Mixtral's (Jiang et al.
    2024, arXiv:2401.04088). The router's logits are rounded to x's dtype. The top_k highest are
    chosen, among equal ones those of the lowest ids. Weights are their softmax in fp32, over all
    experts, or with renormalize over the chosen ones, and stay in fp32. An expert is
    down(silu(gate) * up) without biases, as `linear_silu_mul` and `linear` have it. Its outputs
    times weights are added up in fp32 in the order of ids, and their sum is rounded. A shared
    expert (as of Qwen2-MoE) comes after them: its weight is the sigmoid in fp32 of its gate's
    logit, which is rounded as the router's are. So a row's bits depend on the row alone where those
    of linears do. Experts that no row has are not read.

    Here an expert's outputs are rounded to x's dtype before, as `linear` brings them. Kernels of
    their own (`cpu/csrc/moe.cpp`, `triton/moe.py`) keep down's sums in fp32, and round once.
    """
    logits = linear(x, packed.router)
    num_experts = len(packed.down)
    weights, ids = route(logits[:, :num_experts], packed.top_k, renormalize=packed.renormalize)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(ids.flatten().tolist())):
        rows, places = torch.nonzero(ids == expert, as_tuple=True)
        activated = linear_silu_mul(x[rows], packed.gate_up[expert])
        # A row has an expert once: the order of additions is that of experts.
        parts = linear(activated, packed.down[expert]).float()
        out.index_add_(0, rows, parts.mul_(weights[rows, places].unsqueeze(1)))
    if packed.shared is not None:
        gate_up, down = packed.shared
        part = linear(linear_silu_mul(x, gate_up), down).float()
        out.add_(part.mul_(torch.sigmoid(logits[:, num_experts:].float())))
    return out.to(x.dtype)


def route(
    logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's weights, fp32 [T, top_k], and the ids of its experts, int64 [T, top_k],
    highest logit first, given logits [T, num_experts].
    """
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.softmax(logits.float(), dim=-1).gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raise ValueError unless so many experts can be chosen."""
    if not 0 < top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}, must be 1 to {num_experts}, the number of experts")


def check_shared(router: torch.Tensor, shared: SharedExpert | None) -> None:
    """Raise ValueError unless shapes and dtypes of a shared expert fit the router [num_experts,
    hidden_size].
    """
    if shared is None:
        return
    hidden_size, size = router.shape[1], shared.down.shape[-1]
    expected = [(1, hidden_size), (2 * size, hidden_size), (hidden_size, size)]
    found = [tuple(weight.shape) for weight in shared]
    if found != expected or {weight.dtype for weight in shared} != {router.dtype}:
        dtypes = ", ".join(str(weight.dtype) for weight in shared)
        raise ValueError(
            f"the shared expert has {dtypes} of shapes {found}, must have {router.dtype} of"
            f" {expected}"
        )


def with_gate(router: torch.Tensor, shared: SharedExpert | None) -> torch.Tensor:
    """Return the router [num_experts, hidden_size], bf16 or fp32, with the gate of a shared expert
    as one more row, of the same dtype: their logits are one product.
    """
    return router if shared is None else torch.cat((router, shared.gate))


def checked_experts(
    router: torch.Tensor, experts: Iterable[tuple[ExpertWeight, ExpertWeight]]
) -> Iterator[tuple[ExpertWeight, ExpertWeight]]:
    """Pass on experts, of each gate and up [2 * intermediate_size, hidden_size] and down
    [hidden_size, intermediate_size]; raise ValueError for one whose shapes or dtype do not fit
    those of the router [num_experts, hidden_size] and of the first one, and unless there are
    num_experts.
    """
    num_experts, hidden_size = router.shape
    count, intermediate_size = 0, 0
    for gate_up, down in experts:
        intermediate_size = intermediate_size or down.shape[-1]
        expected = [(2 * intermediate_size, hidden_size), (hidden_size, intermediate_size)]
        found = [tuple(weight.shape) for weight in (gate_up, down)]
        if found != expected or {gate_up.dtype, down.dtype} != {router.dtype}:
            raise ValueError(
                f"expert {count} has {gate_up.dtype} {found[0]} and {down.dtype} {found[1]}, must"
                f" have {router.dtype} {expected[0]} and {expected[1]}"
            )
        count += 1
        if count <= num_experts:
            yield gate_up, down
    if count != num_experts:
        raise ValueError(f"there are {count} experts, the router chooses from {num_experts}")
