"""Triton against the reference: on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1.

`test_triton_without_gpu.py` starts the second in a process of its own, because Triton reads the
variable when a kernel is defined.
"""

import os

import pytest
import torch
from sampling_batches import make_logits, make_sampling_batch, pack_mask

from pdserve_kernels import reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter truncates to bf16 where a GPU rounds, and its bf16 tl.dot returns nonsense.
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]
# Interpreted, windows take long; what a dtype changes the cases without one show.
WINDOW_DTYPES = DTYPES[:1] if INTERPRETED else DTYPES
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
    ),
]


@pytest.fixture
def kernels():
    from pdserve_kernels import triton

    return triton


def assert_close(actual, expected, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 128), (2, 2, 80)]
)
def test_attention_of_a_mixed_batch_agrees_with_dense_attention(
    kernels, make_batch, dense_attention, dtype, num_heads, num_kv_heads, head_dim
):
    batch = make_batch(
        [1, 1, 1, 1, 20, 40],
        [1, 17, 530, 5, 20, 545],
        num_decodes=3,
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
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
def test_silu_and_mul_agrees_with_the_reference(kernels, dtype):
    x = torch.randn(3, 2 * 1100).to(dtype)
    assert_close(kernels.silu_and_mul(x.to(DEVICE)), reference.silu_and_mul(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 31, 64, 1025, 3001])
def test_masked_tokens_are_those_of_the_reference(kernels, dtype, vocab_size):
    logits = make_logits(4, vocab_size).to(dtype)
    is_allowed = torch.rand(4, vocab_size) < torch.tensor([[0.0], [0.01], [0.5], [1.0]])
    is_allowed[1:, vocab_size // 2] = True
    is_allowed[2, -1] = True
    mask = pack_mask(is_allowed, past_end=vocab_size % 2 == 0)
    batch = make_sampling_batch(4, temperature=[1.0, 0.0, 0.7, 1.0], top_k=[0, 0, 0, 3])
    on_device = logits.to(DEVICE), mask.to(DEVICE)
    masked = kernels.sampling.mask_logits(*on_device)
    assert torch.equal(masked.cpu(), logits.masked_fill(~is_allowed, -torch.inf))
    drawn = kernels.sample(on_device[0], batch, mask=on_device[1])
    assert torch.equal(drawn.cpu(), reference.sample(logits, batch, mask=mask))
    best = kernels.argmax(on_device[0], mask=on_device[1])
    assert torch.equal(best.token_ids.cpu(), reference.argmax(logits, mask=mask).token_ids)
    weight, x = torch.randn(vocab_size, 64).to(dtype), torch.randn(4, 64).to(dtype)
    packed = kernels.pack_linear(weight.to(DEVICE))
    best = kernels.linear_argmax(x.to(DEVICE), packed, mask=on_device[1])
    assert bool(is_allowed[1:].gather(1, best.token_ids.cpu()[1:, None]).all())
