"""Experts on a CPU, in C++ and in torch, against fp64."""

import pytest
import torch
from expert_models import (
    SHAPES,
    dequantized,
    make_experts,
    make_quantized,
    moe_in_fp64,
    with_weights,
)
from integer_weights import KINDS, exact, make_fp8_weight, make_weight

from pdserve_kernels import cpu, reference
from pdserve_kernels.reference.moe import SharedExpert, route

pytestmark = pytest.mark.usefixtures("each_isa")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
ROWS = [1, 2, 7, 230]


def packed_of(kernels, experts):
    return kernels.pack_moe(experts.router, experts.mlps, **experts.options)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_agree_with_fp64(kernels, dtype, shape):
    experts = make_experts(shape, dtype)
    x = torch.randn(ROWS[-1], shape.hidden).to(dtype)
    found = kernels.fused_moe(x, packed_of(kernels, experts))
    expected = moe_in_fp64(x, experts)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, expected.to(dtype), rtol=tolerance, atol=tolerance)
    assert kernels.fused_moe(x[:0], packed_of(kernels, experts)).shape == (0, shape.hidden)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_its_bits_in_any_batch_and_with_any_number_of_threads(shape, set_threads):
    packed = packed_of(cpu, make_experts(shape, torch.bfloat16))
    assert isinstance(packed, cpu.moe.MoeWeight)
    x = torch.randn(ROWS[-1], shape.hidden).bfloat16()
    set_threads(1)
    together = cpu.fused_moe(x, packed)
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        for count in ROWS:
            assert torch.equal(cpu.fused_moe(x[:count], packed), together[:count])
            assert torch.equal(cpu.fused_moe(x[-count:], packed), together[-count:])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_experts_are_their_dense_twins_in_the_reference(kind, dtype):
    experts = make_quantized(SHAPES[3], lambda *shape: make_weight(*shape, *kind), dtype)
    x = torch.randn(9, SHAPES[3].hidden).to(dtype)
    twin = reference.fused_moe(x, packed_of(reference, dequantized(experts)))
    assert torch.equal(reference.fused_moe(x, packed_of(reference, experts)), twin)
    if dtype == torch.float32:  # which has no kernel in C++
        assert torch.equal(cpu.fused_moe(x, packed_of(cpu, experts)), twin)


def test_experts_in_fp8_are_their_dense_twins():
    experts = make_quantized(SHAPES[3], make_fp8_weight)
    x = torch.randn(9, SHAPES[3].hidden).bfloat16()
    found, twin = (
        cpu.fused_moe(x, packed_of(cpu, each)) for each in (experts, dequantized(experts))
    )
    assert torch.equal(found, twin)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]])
@pytest.mark.parametrize("kind", KINDS)
def test_integer_experts_agree_with_fp64_and_a_row_has_its_bits_in_any_batch(
    kind, shape, set_threads
):
    experts = make_quantized(shape, lambda *of: make_weight(*of, *kind))
    packed = packed_of(cpu, experts)
    assert isinstance(packed, cpu.moe.MoeWeight)
    x = torch.randn(ROWS[-1], shape.hidden).bfloat16()
    set_threads(1)
    together = cpu.fused_moe(x, packed)
    expected = moe_in_fp64(x, with_weights(experts, exact)).bfloat16()
    torch.testing.assert_close(together, expected, rtol=2e-2, atol=2e-2)
    for num_threads in (1, 2):
        set_threads(num_threads)
        for count in ROWS:
            assert torch.equal(cpu.fused_moe(x[:count], packed), together[:count])


def test_integers_of_a_kind_lie_in_one_piece_and_take_no_more_than_their_bits():
    kind = (4, 32, torch.bfloat16, True)
    shape = SHAPES[0]._replace(hidden=128, intermediate=128)
    packed = packed_of(cpu, make_quantized(shape, lambda *of: make_weight(*of, *kind)))
    for weights in (packed.gate_up, packed.down):
        values = [weight.panels.values for weight in weights]
        begins = [each.data_ptr() for each in values]
        size = weights[0].out_features * weights[0].in_features // 2
        assert [each.nbytes for each in values] == [size] * shape.num_experts
        assert begins == [begins[0] + size * i for i in range(shape.num_experts)]


def test_experts_may_differ_in_how_they_are_stored():
    """As of a checkpoint that left some as they were."""
    shape = SHAPES[0]
    quantized = [
        make_quantized(shape, lambda *of, kind=kind: make_weight(*of, *kind))
        for kind in ((4, 32, torch.bfloat16, False), (8, None, torch.float32, False))
    ]
    dense = make_experts(shape, torch.bfloat16)
    for order in ([*quantized, dense], [dense, *quantized]):
        mlps = [order[i % 3].mlps[i] for i in range(shape.num_experts)]
        experts = dense._replace(mlps=mlps)
        twin = with_weights(experts, lambda w: w if isinstance(w, torch.Tensor) else exact(w))
        x = torch.randn(40, shape.hidden).bfloat16()
        found = cpu.fused_moe(x, packed_of(cpu, experts))
        expected = moe_in_fp64(x, twin).bfloat16()
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_equal_logits_choose_the_lowest_ids():
    weights, ids = route(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]]), 4, renormalize=True)
    assert ids.tolist() == [[1, 2, 4, 0]]
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    # Experts that bring their id, of a router that cannot tell them apart.
    mlps = [
        (torch.ones(4, 2).bfloat16(), torch.full((2, 2), float(i)).bfloat16()) for i in range(9)
    ]
    packed = cpu.pack_moe(torch.zeros(9, 2).bfloat16(), mlps, top_k=3, renormalize=True)
    found = cpu.fused_moe(torch.ones(1, 2).bfloat16(), packed)
    unit = cpu.fused_moe(
        torch.ones(1, 2).bfloat16(),
        cpu.pack_moe(torch.zeros(1, 2).bfloat16(), mlps[1:2], top_k=1, renormalize=True),
    )
    assert torch.equal(found, unit)  # (0 + 1 + 2) / 3


def test_shares_of_a_shared_expert_are_sigmoids_of_its_gate():
    """Of any logit; the rows' own expert brings nothing."""
    logits = torch.tensor([-200.0, -90.0, -3.0, 0.0, 0.5, 90.0, 200.0, torch.nan]).bfloat16()
    x = torch.stack((logits, torch.ones_like(logits)), 1)
    gate_up = torch.tensor([[0.0, 8.0], [0.0, 1.0]] * 2).bfloat16()[[0, 2, 1, 3]]
    down = torch.ones(2, 2).bfloat16()
    shared = SharedExpert(torch.tensor([[1.0, 0.0]]).bfloat16(), gate_up, down)
    for kernels in (cpu, reference):
        packed = kernels.pack_moe(
            torch.zeros(1, 2).bfloat16(),
            [(gate_up, torch.zeros_like(down))],
            top_k=1,
            renormalize=True,
            shared=shared,
        )
        activated = torch.nn.functional.silu(torch.tensor(8.0)).bfloat16().float()
        expected = (logits.float().sigmoid() * 2 * activated).bfloat16()
        found = kernels.fused_moe(x, packed)
        torch.testing.assert_close(found, expected[:, None].expand(8, 2), equal_nan=True)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]])
def test_a_row_of_nan_leaves_its_neighbours_alone(shape):
    packed = packed_of(cpu, make_experts(shape, torch.bfloat16))
    x = torch.randn(5, shape.hidden).bfloat16()
    clean = cpu.fused_moe(x, packed)
    x[2] = torch.nan
    found = cpu.fused_moe(x, packed)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], clean[others])


def test_what_does_not_fit_is_refused():
    experts = make_experts(SHAPES[0], torch.bfloat16)
    for kernels in (cpu, reference):
        with pytest.raises(ValueError, match="top_k is 9, must be 1 to 8"):
            packed_of(kernels, experts._replace(top_k=9))
        with pytest.raises(ValueError, match="there are 7 experts, the router chooses from 8"):
            packed_of(kernels, experts._replace(mlps=experts.mlps[1:]))
        for wrong in (experts.mlps[1][::-1], [w.half() for w in experts.mlps[1]]):
            with pytest.raises(ValueError, match=r"expert 1 has torch.*, must have torch.bfloat16"):
                packed_of(kernels, experts._replace(mlps=[experts.mlps[0], wrong]))
        gate = experts.router[:1]
        for shared in (
            SharedExpert(experts.router[:2], *experts.mlps[0]),
            SharedExpert(gate, *experts.mlps[0][::-1]),
            SharedExpert(gate, *(weight.half() for weight in experts.mlps[0])),
        ):
            with pytest.raises(ValueError, match=r"the shared expert has torch.*, must have torch"):
                packed_of(kernels, experts._replace(shared=shared))


def test_sizes_and_dtypes_without_a_kernel_go_to_the_reference():
    odd = make_experts(SHAPES[0]._replace(intermediate=33), torch.bfloat16)
    odd_shared = make_experts(SHAPES[0]._replace(shared=33), torch.bfloat16)
    for experts in (odd, odd_shared, make_experts(SHAPES[0], torch.float32)):
        packed = packed_of(cpu, experts)
        assert isinstance(packed, reference.moe.MoeWeight)
        x = torch.randn(3, SHAPES[0].hidden).to(experts.router.dtype)
        expected = reference.fused_moe(x, packed_of(reference, experts))
        assert torch.equal(cpu.fused_moe(x, packed), expected)
