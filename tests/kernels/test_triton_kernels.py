"""Triton against the reference: on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1.

`test_triton_without_gpu.py` starts the second in a process of its own, because Triton reads the
variable when a kernel is defined.
"""

from types import SimpleNamespace

import pytest
import torch

from pdserve_kernels import reference
from pdserve_kernels.fp8 import FP8, FP8_MAX
from pdserve_kernels.kv_scales import NO_SCALES, KVScales
from support.triton_kernels import DEVICE, DTYPES, INTERPRETED, ON_GPU_OR_INTERPRETED, assert_close

# Interpreted, windows take long; what a dtype changes the cases without one show.
WINDOW_DTYPES = DTYPES[:1] if INTERPRETED else DTYPES

pytestmark = [*ON_GPU_OR_INTERPRETED, pytest.mark.usefixtures("fp8_of_gpus")]


@pytest.fixture
def prepare_heads():
    from pdserve_kernels.triton.heads import prepare_heads

    return prepare_heads


def assert_fp8_close(actual, expected, *, places):
    """Compare FP8 numbers, which may be `places` apart."""
    actual, expected = (x.cpu().view(torch.uint8).to(torch.int16) for x in (actual, expected))
    assert int((actual - expected).abs().max()) <= places


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(4, 2, 64, 16), (7, 1, 128, 64), (2, 2, 80, 16)],
)
def test_attention_of_a_mixed_batch_agrees_with_dense_attention(
    kernels, make_batch, dense_attention, dtype, num_heads, num_kv_heads, head_dim, block_size
):
    batch = make_batch(
        [1, 1, 1, 1, 20, 40],
        [1, 17, 530, 5, 20, 545],
        num_decodes=3,
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    expected = dense_attention(batch).to(dtype)
    assert_close(batch.on(DEVICE).attend(kernels.paged_attention), expected, dtype)


@pytest.mark.parametrize("dtype", WINDOW_DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(7, 0.0), (100, 5.0), (530, 0.0), (None, 5.0)])
def test_attention_with_a_window_and_a_softcap_agrees_with_dense_attention(
    kernels, make_batch, dense_attention, dtype, window, softcap
):
    batch = make_batch(
        [1, 1, 1, 20, 40],
        [17, 1100, 5, 20, 560],
        num_decodes=3,
        dtype=dtype,
        window=window,
        softcap=softcap,
    )
    expected = dense_attention(batch).to(dtype)
    if window is not None:
        for row, (query_len, seq_len) in enumerate(
            zip(batch.metadata.query_lens_host, batch.metadata.seq_lens_host, strict=True)
        ):
            # Block 0 is NaN.
            batch.metadata.block_table[row, : max(0, (seq_len - query_len + 1 - window) // 16)] = 0
    assert_close(batch.on(DEVICE).attend(kernels.paged_attention), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 64)])
def test_attention_over_a_cache_in_fp8_agrees_with_dense_attention(
    kernels, make_batch, dense_attention, dtype, head_dim, block_size
):
    batch = make_batch(
        [1, 1, 20, 40],
        [1, 530, 20, 105],
        num_decodes=2,
        dtype=dtype,
        head_dim=head_dim,
        block_size=block_size,
    )
    in_fp8, stands_for = batch.in_fp8(KVScales(key=0.5, value=2.0))
    expected = dense_attention(stands_for).to(dtype)
    assert_close(in_fp8.attend(reference.paged_attention), expected, dtype)
    assert_close(in_fp8.on(DEVICE).attend(kernels.paged_attention), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_writes_are_those_of_the_reference(kernels, dtype):
    torch.manual_seed(0)
    key, value = torch.randn(2, 5, 2, 64).to(dtype).unbind()
    slots = torch.tensor([3, 40, -1, 16, 0])
    expected = torch.zeros(4, 2, 3, 2, 16, 64, dtype=dtype)
    actual = expected.to(DEVICE, copy=True)
    reference.reshape_and_cache(key, value, expected, 1, slots)
    kernels.reshape_and_cache(key.to(DEVICE), value.to(DEVICE), actual, 1, slots.to(DEVICE))
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_in_fp8_holds_what_its_scales_make_of_numbers(kernels, dtype):
    key, value = torch.randn(2, 5, 2, 64).mul(100).to(dtype).unbind()
    key[0, 0, :3] = torch.tensor([torch.nan, 60_000.0, -60_000.0])
    slots = torch.tensor([3, 40, -1, 16, 0])
    scales = KVScales(key=3.0, value=0.1)
    expected = torch.zeros(4, 2, 3, 2, 16, 64, dtype=FP8)
    actual = expected.to(DEVICE, copy=True)
    reference.reshape_and_cache(key, value, expected, 1, slots, scales)
    there = key.to(DEVICE), value.to(DEVICE)
    kernels.reshape_and_cache(*there, actual, 1, slots.to(DEVICE), scales)
    assert_fp8_close(actual, expected, places=0)
    assert expected[0, 0, 1, 0, 3, :3].tolist()[1:] == [FP8_MAX, -FP8_MAX]
    assert expected.isnan().sum() == 1
    # The nearest of the numbers that there are.
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    distances = (numbers * 0.1 - value[3, 1, :, None].float().clamp(-44.8, 44.8)).abs()
    held = expected[1, 1, 1, 1, 0].float() * 0.1 - value[3, 1].float().clamp(-44.8, 44.8)
    torch.testing.assert_close(held.abs(), distances.nan_to_num(1e9).amin(1))


@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8])
def test_scales_and_other_dtypes_are_refused(kernels, cache_dtype):
    key = torch.zeros(1, 1, 16, dtype=torch.float16, device=DEVICE)
    cache = torch.zeros(1, 1, 1, 2, 16, 16, dtype=cache_dtype, device=DEVICE)
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for there in (kernels, reference):
        if cache_dtype == FP8:
            cache = cache.to(key.dtype)
            with pytest.raises(ValueError, match="scales are"):
                there.reshape_and_cache(key, key, cache, 0, slots, KVScales(2.0, 1.0))
        else:
            with pytest.raises(ValueError, match=r"kv_cache is torch.float32, must be"):
                there.reshape_and_cache(key, key, cache, 0, slots)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_agree_with_the_reference(kernels, dtype):
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in [(3, 2, 96)] * 2 + [(96,)])
    there = [tensor.to(DEVICE) for tensor in (x, residual, weight)]
    normed = kernels.rms_norm(there[0], there[2], 1e-6)
    assert_close(normed, reference.rms_norm(x, weight, 1e-6), dtype)
    expected = reference.fused_add_rms_norm(x, residual, weight, 1e-6)
    actual = kernels.fused_add_rms_norm(*there, 1e-6)
    assert_close(actual[0], expected[0], dtype)
    assert torch.equal(actual[1].cpu(), expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rot_dim", [48, 64])
def test_rotary_embedding_agrees_with_the_reference(kernels, dtype, rot_dim):
    torch.manual_seed(0)
    qkv = torch.randn(5, 6 * 64).to(dtype)
    positions, cache = torch.randint(0, 99, (5,)), torch.rand(99, rot_dim)
    there = qkv.to(DEVICE, copy=True)
    for tensor, op, device in ((qkv, reference, "cpu"), (there, kernels, DEVICE)):
        query, key = tensor[:, :256].view(5, 4, 64), tensor[:, 256:].view(5, 2, 64)
        op.rotary_embedding(positions.to(device), query, key, cache.to(device))
    assert_close(there, qkv, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("has_norm", "rot_dim"), [(True, 64), (False, 64), (True, 48)])
@pytest.mark.parametrize("scales", [NO_SCALES, KVScales(key=0.5, value=3.0)])
def test_prepared_heads_are_those_of_the_functions_one_by_one(
    prepare_heads, dtype, has_norm, rot_dim, scales
):
    cache_dtype = dtype if scales == NO_SCALES else FP8
    num_heads, num_kv_heads, head_dim = 6, 2, 64
    qkv = torch.randn(5, 10 * head_dim).to(dtype)
    q_norm, k_norm = torch.randn(2, head_dim).to(dtype).unbind()
    positions, slots = torch.randint(0, 99, (5,)), torch.tensor([3, 40, -1, 16, 0])
    cache, cos_sin = (
        torch.zeros(4, num_kv_heads, 3, 2, 16, head_dim, dtype=cache_dtype),
        torch.rand(99, rot_dim),
    )
    there = {
        name: value.to(DEVICE, copy=True)
        for name, value in locals().items()
        if isinstance(value, torch.Tensor)
    }
    query, key, value = qkv.view(5, 10, head_dim).split(
        (num_heads, num_kv_heads, num_kv_heads), dim=1
    )
    if has_norm:
        query, key = reference.rms_norm(query, q_norm, 1e-6), reference.rms_norm(key, k_norm, 1e-6)
    reference.rotary_embedding(positions, query, key, cos_sin)
    reference.reshape_and_cache(key, value, cache, 1, slots, scales)
    prepared = prepare_heads(
        there["qkv"],
        SimpleNamespace(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=1e-6,
            cos_sin_cache=there["cos_sin"],
        ),
        SimpleNamespace(
            q_norm=there["q_norm"] if has_norm else None,
            k_norm=there["k_norm"] if has_norm else None,
            slot=1,
            kv_scales=scales,
        ),
        there["positions"],
        there["cache"],
        there["slots"],
    )
    assert_close(prepared, query, dtype)
    if cache_dtype == dtype:
        assert_close(there["cache"], cache, dtype)
    else:
        assert_fp8_close(there["cache"], cache, places=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_agrees_with_the_reference(kernels, dtype):
    x = torch.randn(3, 2 * 1100).to(dtype)
    assert_close(kernels.silu_and_mul(x.to(DEVICE)), reference.silu_and_mul(x), dtype)
