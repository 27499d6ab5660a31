"""Random experts, and what they bring in fp64."""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pdserve_kernels.reference.moe import SharedExpert


class Shape(NamedTuple):
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    renormalize: bool
    # Of the expert that all rows have, 0 if there is none.
    shared: int = 0


SHAPES = [
    Shape(8, 2, 96, 160, True),
    Shape(20, 5, 70, 68, False),
    Shape(3, 3, 128, 64, False),
    Shape(16, 4, 96, 36, False, shared=150),
    Shape(5, 1, 70, 68, True, shared=32),
]


class Experts(NamedTuple):
    router: torch.Tensor
    # gate_up and down of each
    mlps: list[tuple[torch.Tensor, torch.Tensor]]
    top_k: int
    renormalize: bool
    shared: SharedExpert | None

    @property
    def options(self) -> dict[str, Any]:
        """Of `pack_moe`."""
        return {"top_k": self.top_k, "renormalize": self.renormalize, "shared": self.shared}


def make_experts(shape: Shape, dtype: torch.dtype) -> Experts:
    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) * columns**-0.5).to(dtype)

    def mlp(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return weight(2 * size, shape.hidden), weight(shape.hidden, size)

    return Experts(
        router=weight(shape.num_experts, shape.hidden) * 2,
        mlps=[mlp(shape.intermediate) for _ in range(shape.num_experts)],
        top_k=shape.top_k,
        renormalize=shape.renormalize,
        shared=SharedExpert(weight(1, shape.hidden) * 2, *mlp(shape.shared))
        if shape.shared
        else None,
    )


def with_weights(experts: Experts, make) -> Experts:
    """The same with what `make` makes of each expert's weights, the shared one's too."""
    shared = experts.shared
    return experts._replace(
        mlps=[(make(gate_up), make(down)) for gate_up, down in experts.mlps],
        shared=shared and shared._replace(gate_up=make(shared.gate_up), down=make(shared.down)),
    )


def make_quantized(shape, make, dtype=torch.bfloat16):
    """Experts with weights that `make` makes of a shape, and a dense router."""

    def weight(dense):
        made = make(*dense.shape)
        scales = made.scales * dense.shape[1] ** -0.5
        return dataclasses.replace(made, scales=scales.to(made.scales.dtype), dtype=dtype)

    return with_weights(make_experts(shape, dtype), weight)


def dequantized(experts):
    return with_weights(experts, lambda weight: weight.dequantize())


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
            out[row] += share * _mlp_in_fp64(x[row], *experts.mlps[expert])
        if experts.shared is not None:
            gate, *mlp = experts.shared
            logit = (gate.double() @ x[row].double()).to(x.dtype).double()
            out[row] += logit.sigmoid() * _mlp_in_fp64(x[row], *mlp)
    return out


def _mlp_in_fp64(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (gate_up.double() @ x.double()).to(x.dtype).double().chunk(2)
    activated = (F.silu(gate).to(x.dtype).double() * up).to(x.dtype).double()
    return down.double() @ activated
