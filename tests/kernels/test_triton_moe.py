"""Experts in Triton: on a GPU, or interpreted if TRITON_INTERPRET=1."""

from functools import partial

import pytest
import torch
from expert_models import SHAPES, dequantized, make_experts, make_quantized, moe_in_fp64
from integer_weights import KINDS, make_fp8_weight, make_weight

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


QUANTIZED = [*KINDS, pytest.param("fp8", id="fp8"), pytest.param("fp8 by 128", id="fp8 by 128")]


def make_of(kind):
    """Return what makes a weight of a kind."""
    if isinstance(kind, str):
        return partial(make_fp8_weight, group_size=128 if "128" in kind else None)
    return lambda *shape: make_weight(*shape, *kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_experts_are_their_dense_twins(kernels, kind, dtype):
    shape = SHAPES[3]._replace(num_experts=3, top_k=2, hidden=200, shared=40)
    experts = make_quantized(shape, make_of(kind), dtype)
    packed, twin = packed_of(kernels, experts), packed_of(kernels, dequantized(experts))
    x = torch.randn(20, shape.hidden).to(dtype).to(DEVICE)
    together, expected = kernels.fused_moe(x, packed), kernels.fused_moe(x, twin)
    assert torch.equal(together, expected)
    assert torch.equal(kernels.fused_moe(x[5:6], packed), together[5:6])


def test_zero_points_that_some_experts_lack_are_0(kernels):
    shape, dtype = SHAPES[0]._replace(num_experts=3), DTYPES[1]
    made = [
        make_quantized(shape, make_of((4, 32, torch.float32, has_zeros)), dtype)
        for has_zeros in (False, True)
    ]
    experts = made[0]._replace(mlps=[made[i].mlps[i] for i in (0, 1)] + [made[0].mlps[2]])
    x = torch.randn(9, shape.hidden).to(dtype).to(DEVICE)
    found = kernels.fused_moe(x, packed_of(kernels, experts))
    assert torch.equal(found, kernels.fused_moe(x, packed_of(kernels, dequantized(experts))))


def test_experts_that_are_stored_otherwise_than_the_first_are_refused(kernels):
    experts = make_experts(SHAPES[3], torch.float32)
    quantized = tuple(quantize(w, bits=8, group_size=None) for w in experts.mlps[1])
    changed = experts._replace(mlps=[experts.mlps[0], quantized, *experts.mlps[2:]])
    with pytest.raises(ValueError, match=r"expert 1 is int8 in .*, the first one is torch"):
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
