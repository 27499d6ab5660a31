"""The MLP of a layer with experts, of which a router chooses some for each token."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from pdserve_kernels.reference.linear import LinearWeight, linear, linear_silu_mul, pack_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeight:
    """Experts ready for `fused_moe`, in the order of their ids, and the router of as many outputs.

    gate_up: [2 * intermediate_size, hidden_size] each, in two parts; down: [hidden_size,
    intermediate_size] each.
    """

    router: LinearWeight
    gate_up: tuple[LinearWeight, ...]
    down: tuple[LinearWeight, ...]
    top_k: int
    renormalize: bool


def pack_moe(
    router: torch.Tensor,
    experts: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    top_k: int,
    renormalize: bool,
) -> MoeWeight:
    """Prepare a router [num_experts, hidden_size] and its experts for `fused_moe`.

    experts brings for each, in the order of ids, gate and up [2 * intermediate_size, hidden_size],
    and down [hidden_size, intermediate_size]; each is packed before the next is asked for, and not
    kept. Raises ValueError for numbers, shapes and dtypes that do not fit together.
    """
    check_top_k(top_k, len(router))
    packed = [
        (pack_linear(gate_up, num_parts=2), pack_linear(down))
        for gate_up, down in checked_experts(router, experts)
    ]
    gate_ups, downs = zip(*packed, strict=True)
    return MoeWeight(
        router=pack_linear(router),
        gate_up=gate_ups,
        down=downs,
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
    times weights are added up in fp32 in the order of ids, and their sum is rounded. So a row's
    bits depend on the row alone where those of linears do. Experts that no row has are not read.

    Here an expert's outputs are rounded to x's dtype before, as `linear` brings them. Kernels of
    their own (`cpu/csrc/moe.cpp`, `triton/moe.py`) keep down's sums in fp32, and round once.
    """
    weights, ids = route(linear(x, packed.router), packed.top_k, renormalize=packed.renormalize)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(ids.flatten().tolist())):
        rows, places = torch.nonzero(ids == expert, as_tuple=True)
        activated = linear_silu_mul(x[rows], packed.gate_up[expert])
        # A row has an expert once: the order of additions is that of experts.
        parts = linear(activated, packed.down[expert]).float()
        out.index_add_(0, rows, parts.mul_(weights[rows, places].unsqueeze(1)))
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


def checked_experts(
    router: torch.Tensor, experts: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
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
