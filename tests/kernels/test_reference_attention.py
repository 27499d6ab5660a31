import pytest
import torch

from pdserve_kernels.reference import paged_attention

pytestmark = pytest.mark.slow

LENGTHS = [1, 15, 16, 17, 511, 512, 513, 1100]
DTYPES = [torch.float32, torch.bfloat16]
# bf16: the output's own rounding is 2**-9, and probabilities are rounded once more before P @ V.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2}


def attend(batch):
    return batch.attend(paged_attention)


def assert_matches(actual, expected, dtype):
    torch.testing.assert_close(
        actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (7, 1)])
def test_decodes_match_dense_attention(make_batch, dense_attention, dtype, num_heads, num_kv_heads):
    batch = make_batch(
        [1] * len(LENGTHS),
        LENGTHS,
        num_decodes=len(LENGTHS),
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )
    assert_matches(attend(batch), dense_attention(batch), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_prompts_match_dense_attention(make_batch, dense_attention, dtype):
    batch = make_batch(LENGTHS, LENGTHS, num_decodes=0, dtype=dtype)
    assert_matches(attend(batch), dense_attention(batch), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_a_mix_of_decodes_and_chunk_continuations_matches_dense_attention(
    make_batch, dense_attention, dtype, head_dim
):
    batch = make_batch(
        [1, 1, 1, 1, 64, 5, 100, 600],
        [513, 3, 1100, 16, 65, 517, 1124, 1400],
        num_decodes=3,
        dtype=dtype,
        head_dim=head_dim,
    )
    assert_matches(attend(batch), dense_attention(batch), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 16, 100, 512, 513, 1024])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_window_and_a_softcap_match_dense_attention(
    make_batch, dense_attention, dtype, window, softcap
):
    batch = make_batch(
        [1, 1, 1, 1, 64, 5, 700, 600],
        [513, 3, 1124, 16, 65, 1100, 700, 1400],
        num_decodes=4,
        dtype=dtype,
        window=window,
        softcap=softcap,
    )
    assert_matches(attend(batch), dense_attention(batch), dtype)


@pytest.mark.parametrize(("query_len", "num_decodes"), [(1, 1), (1, 0), (40, 0), (600, 0)])
@pytest.mark.parametrize("window", [1, 100, 512, 600])
def test_blocks_before_the_window_are_never_read(make_batch, query_len, num_decodes, window):
    batch = make_batch(
        [query_len], [1300], num_decodes=num_decodes, dtype=torch.float32, window=window
    )
    expected = attend(batch)
    num_stale = (1300 - query_len + 1 - window) // 16
    # There is no such block: reading it is an IndexError.
    batch.metadata.block_table[:, : max(0, num_stale)] = 2**31 - 1
    assert torch.equal(attend(batch.on("cpu")), expected)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (-1, 0.0), (None, -1.0)])
def test_a_window_or_softcap_out_of_range_is_refused(make_batch, window, softcap):
    batch = make_batch([1], [9], num_decodes=1, dtype=torch.float32, window=window, softcap=softcap)
    with pytest.raises(ValueError, match="window must be >= 1"):
        attend(batch)


def test_one_step_may_meet_caches_of_several_shapes(make_batch, dense_attention):
    batch, other = (
        make_batch([1, 40], [9, 50], num_decodes=1, dtype=torch.float32, num_kv_heads=heads)
        for heads in (2, 4)
    )
    attend(batch)
    shared = paged_attention(other.query, other.kv_cache, 1, batch.metadata, other.scale)
    assert_matches(shared, dense_attention(other), torch.float32)


def test_query_rows_that_are_padding_come_back_as_zeros(make_batch):
    batch = make_batch([1, 3], [9, 20], num_decodes=1, dtype=torch.float32)
    padded = torch.cat((batch.query, torch.full_like(batch.query[:2], float("nan"))))
    output = paged_attention(padded, batch.kv_cache, 1, batch.metadata, batch.scale)
    assert torch.equal(output[:4], attend(batch))
    assert torch.equal(output[4:], torch.zeros_like(output[4:]))


def test_a_query_may_be_a_slice_of_a_wider_tensor(make_batch):
    batch = make_batch([1, 40], [9, 50], num_decodes=1, dtype=torch.float32)
    wide = torch.randn(41, 4 * 64 + 128)
    wide[:, :256] = batch.query.reshape(41, 256)
    query = wide[:, :256].view(41, 4, 64)
    output = paged_attention(query, batch.kv_cache, 1, batch.metadata, batch.scale)
    assert torch.equal(output, attend(batch))


def test_a_cache_of_another_dtype_is_refused(make_batch):
    batch = make_batch([1], [9], num_decodes=1, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"kv_cache is torch\.bfloat16, must be torch\.float32"):
        paged_attention(batch.query, batch.kv_cache.bfloat16(), 1, batch.metadata, batch.scale)
