"""Random experts, and what they bring in fp64."""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Shape(NamedTuple):
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    renormalize: bool


SHAPES = [
    Shape(8, 2, 96, 160, True),
    Shape(20, 5, 70, 68, False),
    Shape(3, 3, 128, 64, False),
]


class Experts(NamedTuple):
    router: torch.Tensor
    # gate_up and down of each
    mlps: list[tuple[torch.Tensor, torch.Tensor]]
    top_k: int
    renormalize: bool


def make_experts(shape: Shape, dtype: torch.dtype) -> Experts:
    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) * columns**-0.5).to(dtype)

    return Experts(
        router=weight(shape.num_experts, shape.hidden) * 2,
        mlps=[
            (weight(2 * shape.intermediate, shape.hidden), weight(shape.hidden, shape.intermediate))
            for _ in range(shape.num_experts)
        ],
        top_k=shape.top_k,
        renormalize=shape.renormalize,
    )


def moe_in_fp64(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The answer with sums in fp64, routes and activations rounded as kernels have to. A row whose
    choice of experts hangs on the rounding of a sum would differ; none does here.
    """
    logits = (x.double() @ experts.router.double().T).to(x.dtype)
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, : experts.top_k]
    weights = logits.double().softmax(-1).gather(1, ids)
    if experts.renormalize:
        weights /= weights.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for expert, share in zip(ids[row].tolist(), weights[row], strict=True):
            gate_up, down = experts.mlps[expert]
            gate, up = (gate_up.double() @ x[row].double()).to(x.dtype).double().chunk(2)
            activated = (F.silu(gate).to(x.dtype).double() * up).to(x.dtype).double()
            out[row] += share * (down.double() @ activated)
    return out
