"""Experts in Triton: on a GPU, or interpreted if TRITON_INTERPRET=1."""

import pytest
import torch
from expert_models import SHAPES, make_experts, moe_in_fp64

from pdserve_kernels.reference.moe import SharedExpert, route
from pdserve_kernels.reference.quantization import quantize
from support.triton_kernels import DEVICE, DTYPES, ON_GPU_OR_INTERPRETED, assert_close

pytestmark = ON_GPU_OR_INTERPRETED


def packed_of(kernels, experts):
    shared = experts.shared
    if shared is not None:
        shared = SharedExpert(*(weight.to(DEVICE) for weight in shared))
    return kernels.pack_moe(
        experts.router.to(DEVICE),
        [(gate_up.to(DEVICE), down.to(DEVICE)) for gate_up, down in experts.mlps],
        **experts.options | {"shared": shared},
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_agree_with_fp64_and_a_row_has_its_bits_in_any_batch(kernels, dtype, shape):
    experts = make_experts(shape, dtype)
    packed = packed_of(kernels, experts)
    # So many that an expert has more than a block of them.
    x = torch.randn(150, shape.hidden).to(dtype)
    together = kernels.fused_moe(x.to(DEVICE), packed)
    assert_close(together, moe_in_fp64(x, experts).to(dtype), dtype)
    for rows in (slice(0, 1), slice(149, 150), slice(17, 40)):
        assert torch.equal(kernels.fused_moe(x[rows].to(DEVICE), packed), together[rows]), rows
    assert kernels.fused_moe(x[:0].to(DEVICE), packed).shape == (0, shape.hidden)


@pytest.mark.parametrize("shared", [0, 16])
@pytest.mark.parametrize("renormalize", [False, True])
def test_routes_are_those_of_the_reference_with_equal_logits(kernels, renormalize, shared):
    from pdserve_kernels.triton import moe

    shape = SHAPES[0]._replace(renormalize=renormalize, shared=shared)
    experts = make_experts(shape, torch.float32)
    # Small numbers: products are exact, and often equal.
    router = torch.randint(-1, 2, experts.router.shape).float()
    experts = experts._replace(router=router)
    x = torch.randint(-1, 2, (40, router.shape[1])).float()
    weights, ids = moe._route(x.to(DEVICE), packed_of(kernels, experts))
    expected_weights, expected_ids = route(x @ router.T, experts.top_k, renormalize=renormalize)
    expected_ids, order = expected_ids.sort()
    assert torch.equal(ids.cpu().long(), expected_ids)
    expected_weights = expected_weights.gather(1, order)
    if experts.shared is not None:
        share = (x @ experts.shared.gate.T).sigmoid()
        expected_weights = torch.cat((expected_weights, share), 1)
    torch.testing.assert_close(weights.cpu(), expected_weights)


def test_quantized_experts_are_refused(kernels):
    experts = make_experts(SHAPES[3], torch.float32)
    gate_up, down = (quantize(w, bits=8, group_size=None) for w in experts.mlps[0])
    for changed in (
        experts._replace(mlps=[(gate_up, down), *experts.mlps[1:]]),
        experts._replace(
            shared=experts.shared._replace(
                down=quantize(experts.shared.down, bits=8, group_size=None)
            )
        ),
    ):
        with pytest.raises(ValueError, match="experts are quantized, those of this set are dense"):
            packed_of(kernels, changed)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]])
def test_a_row_of_nan_leaves_its_neighbours_alone(kernels, shape):
    experts = make_experts(shape, torch.float32)
    packed = packed_of(kernels, experts)
    x = torch.randn(5, shape.hidden)
    clean = kernels.fused_moe(x.to(DEVICE), packed)
    x[2] = torch.nan
    found = kernels.fused_moe(x.to(DEVICE), packed)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], clean[others])
