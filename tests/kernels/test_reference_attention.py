import pytest
import torch

from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.reference import attention_plan, paged_attention

LENGTHS = [1, 15, 16, 17, 511, 512, 513, 1100]
DTYPES = [torch.float32, torch.bfloat16]
# bf16: the output's own rounding is 2**-9, and probabilities are rounded once more before P @ V.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2}


def attend(batch):
    return paged_attention(batch.query, batch.kv_cache, 1, batch.metadata, batch.scale)


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
@pytest.mark.parametrize("head_dim", [16, 64, 128])
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
def test_a_request_gets_the_same_bits_alone_and_in_a_batch(make_batch, dtype):
    query_lens = [1] * len(LENGTHS) + [70, 30]
    batch = make_batch(
        query_lens, [*LENGTHS, 600, 30], num_decodes=len(LENGTHS), dtype=dtype, head_dim=128
    )
    together = attend(batch)
    row = 0
    for request, query_len in enumerate(query_lens):
        assert torch.equal(attend(batch.only(request)), together[row : row + query_len])
        row += query_len


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [1, 17, 255, 512, 513, 699])
def test_a_prompt_gets_the_same_bits_whole_and_in_chunks(make_batch, dtype, cut):
    batch = make_batch([700], [700], num_decodes=0, dtype=dtype, head_dim=128)
    chunks = [attend(batch.only(0, last=cut)), attend(batch.only(0, first=cut))]
    assert torch.equal(torch.cat(chunks), attend(batch))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [0, 16, 200, 511, 512, 699])
def test_a_token_gets_the_same_bits_as_a_decode_and_within_a_prompt(make_batch, dtype, position):
    batch = make_batch([700], [700], num_decodes=0, dtype=dtype, head_dim=128)
    token = batch.only(0, first=position, last=position + 1)
    metadata = token.metadata
    decode = AttentionMetadata(
        query_start_loc=metadata.query_start_loc,
        seq_lens=metadata.seq_lens,
        block_table=metadata.block_table,
        slot_mapping=metadata.slot_mapping,
        query_lens_host=metadata.query_lens_host,
        seq_lens_host=metadata.seq_lens_host,
        num_decodes=1,
    )
    decoded = paged_attention(token.query, batch.kv_cache, 1, decode, batch.scale)
    assert torch.equal(decoded[0], attend(batch)[position])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_get_the_same_bits_however_they_are_grouped(make_batch, monkeypatch, dtype):
    batch = make_batch([1] * len(LENGTHS), LENGTHS, num_decodes=len(LENGTHS), dtype=dtype)
    together = attend(batch)
    monkeypatch.setattr(attention_plan, "GROUP_BYTES", 3 * 512 * 64 * 2 * dtype.itemsize)
    assert torch.equal(attend(batch.on("cpu")), together)


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
    with pytest.raises(ValueError, match="dtype"):
        paged_attention(batch.query, batch.kv_cache.bfloat16(), 1, batch.metadata, batch.scale)
