import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from pdserve_kernels import reference

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_has_the_bits_of_transformers_and_of_each_row_alone(dtype):
    torch.manual_seed(0)
    x, norm = torch.randn(33, 1024).to(dtype), LlamaRMSNorm(1024, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    weight = norm.weight.detach()
    actual = reference.rms_norm(x, weight, 1e-6)
    assert torch.equal(actual, norm(x).detach())
    assert torch.equal(actual[7:8], reference.rms_norm(x[7:8], weight, 1e-6))


def test_rms_norm_takes_more_than_two_dimensions_and_leaves_its_input():
    x, weight = torch.randn(3, 4, 64), torch.rand(64)
    before = x.clone()
    flat = reference.rms_norm(x.view(12, 64), weight, 1e-5)
    assert torch.equal(reference.rms_norm(x, weight, 1e-5).view(12, 64), flat)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_rms_norm_adds_in_the_model_dtype_before_it_normalises(dtype):
    x, residual = torch.randn(2, 5, 64).to(dtype).unbind()
    weight = torch.rand(64).to(dtype)
    normed, new_residual = reference.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(normed, reference.rms_norm(x + residual, weight, 1e-6))


def make_rotary(num_tokens, rot_dim, dtype):
    positions = torch.randint(0, 4096, (num_tokens,))
    inverse = 10000.0 ** (-torch.arange(0, rot_dim, 2) / rot_dim)
    angle = torch.arange(4096)[:, None] * inverse
    return positions, torch.cat((angle.cos(), angle.sin()), -1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_has_the_bits_of_transformers_with_a_cache_in_the_model_dtype(dtype):
    torch.manual_seed(0)
    positions, cache = make_rotary(33, 128, dtype)
    query, key = torch.randn(33, 16, 128).to(dtype), torch.randn(33, 8, 128).to(dtype)
    cos, sin = (part.repeat(1, 2) for part in cache[positions].chunk(2, -1))
    expected = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=1)
    one = query[7:8].clone()
    reference.rotary_embedding(positions[7:8], one, key[7:8].clone(), cache)
    reference.rotary_embedding(positions, query, key, cache)
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])
    assert torch.equal(one, query[7:8])


def test_rotary_embedding_leaves_entries_past_rot_dim_and_writes_into_slices():
    positions, cache = make_rotary(5, 32, torch.float32)
    qkv = torch.randn(5, 6 * 64)
    before = qkv.clone()
    query, key = qkv[:, :256].view(5, 4, 64), qkv[:, 256:].view(5, 2, 64)
    reference.rotary_embedding(positions, query, key, cache)
    assert torch.equal(query[..., 32:], before[:, :256].view(5, 4, 64)[..., 32:])
    norms = torch.linalg.vector_norm
    torch.testing.assert_close(norms(qkv, dim=-1), norms(before, dim=-1))
    assert not torch.equal(key[..., :32], before[:, 256:].view(5, 2, 64)[..., :32])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_gates_the_second_half_with_the_first(dtype):
    x = torch.randn(33, 2 * 3072).to(dtype)
    actual = reference.silu_and_mul(x)
    expected = F.silu(x[:, :3072]) * x[:, 3072:]
    if dtype == torch.bfloat16:
        assert torch.equal(actual, expected)
    torch.testing.assert_close(actual, expected)


def test_silu_of_large_numbers_does_not_overflow():
    x = torch.tensor([[-1e30, -100.0, 100.0, 1e30, 1.0, 1.0, 1.0, 1.0]])
    assert torch.equal(reference.silu_and_mul(x), torch.tensor([[0.0, 0.0, 100.0, 1e30]]))


def test_reshape_and_cache_writes_one_layer_and_skips_padding():
    cache = torch.zeros(4, 2, 3, 2, 16, 8)
    key, value = torch.randn(2, 3, 2, 8).unbind()
    reference.reshape_and_cache(key, value, cache, 1, torch.tensor([3 * 16 + 5, -1, 16]))
    assert torch.equal(cache[3, :, 1, 0, 5], key[0])
    assert torch.equal(cache[3, :, 1, 1, 5], value[0])
    assert torch.equal(cache[1, :, 1, 0, 0], key[2])
    assert cache.count_nonzero() == 4 * 2 * 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_linear_equals_f_linear(dtype, has_bias):
    torch.manual_seed(0)
    weight, x = torch.randn(192, 128).to(dtype), torch.randn(40, 128).to(dtype)
    bias = torch.randn(192).to(dtype) if has_bias else None
    packed = reference.pack_linear(weight, bias)
    assert (packed.out_features, packed.in_features) == (192, 128)
    torch.testing.assert_close(reference.linear(x, packed), F.linear(x, weight, bias))


@pytest.mark.skipif(
    not reference.pack_linear(torch.zeros(16, 16, dtype=torch.bfloat16)).is_packed,
    reason="this CPU or torch build has no bf16 packing",
)
def test_a_packed_weight_does_not_keep_the_original_alive():
    weight = torch.randn(192, 128).bfloat16()
    alive = weakref.ref(weight)
    packed = reference.pack_linear(weight)
    del weight
    gc.collect()
    assert alive() is None
    assert packed.is_packed
