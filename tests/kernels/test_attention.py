"""Paged attention. All sets keep one contract, the C++ on every instruction set: close to fp64, and
nothing is read that a row does not see. In C++ each row is besides computed by itself.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from pdserve_kernels import cpu, reference
from support.kernels import ISAS, use_isa

# One position, the borders of vectors, of blocks and of spans, and what lies between.
LENGTHS = [1, 15, 16, 17, 127, 128, 129, 511, 512, 513, 1100]
MIX = {
    "query_lens": [1, 1, 1, 1, 64, 5, 100, 600, 3, 700],
    "seq_lens": [513, 3, 1124, 16, 65, 517, 1124, 1400, 1025, 700],
    "num_decodes": 3,
}


def as_it_is(batch):
    return batch


def packed(batch):
    """The batch with its row-major tiles packed, as the format is defined."""
    cache = batch.kv_cache
    *outer, block_size, head_dim = cache[:, :, :, 0].shape
    key, value = cache.unbind(3)
    key = key.reshape(*outer, block_size // 16, 16, head_dim // 2, 2).transpose(-3, -2)
    value = value.reshape(*outer, block_size // 2, 2, head_dim).transpose(-2, -1)
    tiles = [tile.reshape(*outer, block_size, head_dim) for tile in (key, value)]
    return replace(batch, kv_cache=torch.stack(tiles, 3))


@dataclass(frozen=True)
class Attention:
    """One set's, in one dtype, and how far it may be from fp64."""

    kernels: Any
    dtype: torch.dtype
    rtol: float
    atol: float
    pack: Callable[[Any], Any] = as_it_is

    def attend(self, batch):
        return self.pack(batch).attend(self.kernels.paged_attention)

    def assert_near(self, actual, expected):
        torch.testing.assert_close(actual.double(), expected, rtol=self.rtol, atol=self.atol)


# bf16: the output is rounded to 2**-9, and so were the probabilities before P @ V, by the reference
# once more.
IN_CPP = Attention(cpu, torch.bfloat16, rtol=8e-3, atol=6e-3, pack=packed)
REFERENCE = [
    pytest.param(Attention(reference, torch.float32, rtol=5e-6, atol=5e-6), id="reference fp32"),
    pytest.param(Attention(reference, torch.bfloat16, rtol=1.5e-2, atol=1.5e-2), id="reference"),
]


@pytest.fixture(params=[*REFERENCE, *ISAS])
def attention(request, monkeypatch):
    if isinstance(request.param, Attention):
        return request.param
    use_isa(request.param, monkeypatch)
    return IN_CPP


@pytest.fixture
def make(attention, make_batch):
    """make(...) -> a batch in the dtype of the attention that is tested."""
    return lambda *args, **options: make_batch(*args, dtype=attention.dtype, **options)


# ---- all sets


@pytest.mark.parametrize(
    "options",
    [
        *({"num_heads": heads, "num_kv_heads": kv_heads} for heads, kv_heads in ((4, 4), (7, 1))),
        *({"block_size": block_size} for block_size in (16, 32, 64)),
    ],
    ids=str,
)
def test_decodes_match_dense_attention(attention, make, dense_attention, options):
    count = len(LENGTHS)
    batch = make([1] * count, LENGTHS, num_decodes=count, **options)
    attention.assert_near(attention.attend(batch), dense_attention(batch))


def test_whole_prompts_match_dense_attention(attention, make, dense_attention):
    batch = make(LENGTHS, LENGTHS, num_decodes=0)
    attention.assert_near(attention.attend(batch), dense_attention(batch))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_a_mix_of_decodes_and_chunks_matches_dense_attention(
    attention, make, dense_attention, head_dim
):
    batch = make(**MIX, head_dim=head_dim)
    attention.assert_near(attention.attend(batch), dense_attention(batch))


@pytest.mark.parametrize("window", [1, 16, 100, 512, 513, 1024])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_window_and_a_softcap_match_dense_attention(
    attention, make, dense_attention, window, softcap
):
    batch = make(**MIX, window=window, softcap=softcap)
    attention.assert_near(attention.attend(batch), dense_attention(batch))


@pytest.mark.parametrize(("query_len", "num_decodes"), [(1, 1), (1, 0), (40, 0), (600, 0)])
@pytest.mark.parametrize("window", [1, 100, 512, 600])
def test_blocks_before_the_window_are_never_read(attention, make, query_len, num_decodes, window):
    batch = make([query_len], [1300], num_decodes=num_decodes, window=window)
    expected = attention.attend(batch)
    num_stale = (1300 - query_len + 1 - window) // 16
    # Block 0 is all NaN.
    batch.metadata.block_table[:, : max(0, num_stale)] = 0
    assert torch.equal(attention.attend(batch.on("cpu")), expected)


def test_query_rows_that_are_padding_come_back_as_zeros(attention, make):
    batch = make([1, 3], [9, 20], num_decodes=1)
    query = torch.cat((batch.query, torch.full_like(batch.query[:2], float("nan"))))
    output = attention.attend(replace(batch, query=query))
    assert torch.equal(output[:4], attention.attend(batch))
    assert torch.equal(output[4:], torch.zeros_like(output[4:]))


def test_a_query_may_be_a_part_of_a_wider_tensor(attention, make):
    batch = make([1, 40], [9, 50], num_decodes=1)
    wide = torch.randn(41, 4 * 64 + 128).to(batch.query.dtype)
    wide[:, :256] = batch.query.reshape(41, 256)
    inner = replace(batch, query=wide[:, :256].view(41, 4, 64))
    apart = replace(batch, query=batch.query.repeat_interleave(2, 1)[:, ::2])
    for other in (inner, apart):
        assert torch.equal(attention.attend(other), attention.attend(batch))


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (-1, 0.0), (None, -1.0)])
def test_a_window_or_softcap_out_of_range_is_refused(attention, make, window, softcap):
    batch = make([1], [9], num_decodes=1, window=window, softcap=softcap)
    with pytest.raises(ValueError, match=r"window must be >= 1.* softcap >= 0"):
        attention.attend(batch)


# ---- the reference alone


def test_one_step_may_meet_caches_of_several_shapes(make_batch, dense_attention):
    batch, other = (
        make_batch([1, 40], [9, 50], num_decodes=1, dtype=torch.float32, num_kv_heads=heads)
        for heads in (2, 4)
    )
    batch.attend(reference.paged_attention)
    shared = replace(other, metadata=batch.metadata).attend(reference.paged_attention)
    torch.testing.assert_close(shared.double(), dense_attention(other), rtol=5e-6, atol=5e-6)


def test_a_cache_of_another_dtype_is_refused(make_batch):
    batch = make_batch([1], [9], num_decodes=1, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"kv_cache is torch\.bfloat16, must be torch\.float32"):
        replace(batch, kv_cache=batch.kv_cache.bfloat16()).attend(reference.paged_attention)


# ---- C++ alone

in_cpp = pytest.mark.usefixtures("each_isa")


@pytest.fixture
def make_bf16(make_batch):
    return lambda *args, **options: make_batch(*args, dtype=torch.bfloat16, **options)


attend, assert_near = IN_CPP.attend, IN_CPP.assert_near


@in_cpp
@pytest.mark.parametrize("group_size", [1, 3, 4, 5, 7, 8, 16, 50])
def test_any_number_of_heads_share_keys(make_bf16, dense_attention, group_size):
    lengths = {"query_lens": [1, 1, 40, 3], "seq_lens": [530, 77, 140, 1030], "num_decodes": 2}
    num_kv_heads = 2 if group_size < 16 else 1
    heads = {"num_heads": group_size * num_kv_heads, "num_kv_heads": num_kv_heads}
    batch = make_bf16(**lengths, **heads)
    assert_near(attend(batch), dense_attention(batch))


def dense_query(query):
    return query


def query_within_wider_rows(query):
    """Heads follow each other, as in the rows of a fused QKV projection."""
    num_tokens, num_heads, head_dim = query.shape
    wide = torch.full((num_tokens, num_heads * head_dim + 48), torch.nan, dtype=query.dtype)
    return wide[:, 16:-32].view(query.shape).copy_(query)


def query_with_heads_apart(query):
    return query.repeat_interleave(2, 1)[:, ::2]


@in_cpp
@pytest.mark.parametrize("layout", [dense_query, query_within_wider_rows, query_with_heads_apart])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 112, 128, 256])
def test_any_batch(make_bf16, dense_attention, head_dim, layout):
    rng = random.Random(f"{head_dim} {layout.__name__}")
    num_decodes, num_chunks = rng.randint(0, 4), rng.randint(0, 3)
    seq_lens = [rng.choice(LENGTHS) for _ in range(num_decodes + num_chunks + 1)]
    query_lens = [1] * num_decodes + [rng.randint(0, n) for n in seq_lens[num_decodes:]]
    # One without tokens, and one that has nothing to compute.
    seq_lens += [0, rng.choice(LENGTHS)]
    query_lens += [0, 0]
    group_size, num_kv_heads = rng.choice([1, 2, 3, 7]), rng.randint(1, 3)
    batch = make_bf16(
        query_lens,
        seq_lens,
        num_decodes=num_decodes,
        num_heads=group_size * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=rng.choice([16, 32, 48, 64]),
        window=rng.choice([None, None, rng.randint(1, 600)]),
        softcap=rng.choice([0.0, 0.0, 20.0]),
    )
    batch = replace(batch, query=layout(batch.query))
    assert_near(attend(batch), dense_attention(batch))


@in_cpp
def test_great_scores_do_not_overflow(make_bf16, dense_attention):
    batch = make_bf16(**MIX)
    batch = replace(batch, scale=30.0)
    assert_near(attend(batch), dense_attention(batch))


@in_cpp
def test_the_weights_of_values_add_up_to_one(make_bf16):
    batch = make_bf16(**MIX)
    batch.kv_cache[:, :, :, 1] = torch.where(batch.kv_cache[:, :, :, 1].isnan(), torch.nan, 0.7)
    output = attend(batch)
    assert torch.equal(output, torch.full_like(output, 0.7))


ALONE = [
    {},
    {"num_heads": 7, "num_kv_heads": 1, "head_dim": 80},
    {"window": 100, "softcap": 5.0},
    {"window": 513, "block_size": 64},
]


@in_cpp
@pytest.mark.parametrize("options", ALONE, ids=str)
def test_a_row_gets_the_same_bits_in_any_chunk_or_alone(make_bf16, options):
    query_lens, seq_lens = [1, 1, 600, 1100], [1100, 513, 1300, 1100]
    batch = make_bf16(query_lens, seq_lens, num_decodes=2, **options)
    rows = attend(batch).split(query_lens)
    for request in (0, 1):
        assert torch.equal(attend(batch.only(request)), rows[request])
    for request in (2, 3):
        for first, last in [(0, 1), (0, 17), (5, 300), (210, 216), (211, 213), (599, 600)]:
            part = batch.only(request, first=first, last=last)
            assert torch.equal(attend(part), rows[request][first:last]), (request, first, last)
            if last == first + 1:
                assert torch.equal(attend(part.as_decodes()), rows[request][first:last])


@in_cpp
@pytest.mark.parametrize("options", ALONE, ids=str)
def test_threads_leave_the_bits_alone(make_bf16, set_threads, options):
    batch = packed(make_bf16(**MIX, **options))
    decodes = packed(make_bf16([1], [2000], num_decodes=1, **options))
    outputs = []
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        outputs.append([b.attend(cpu.paged_attention) for b in (batch, decodes)])
    for other in outputs[1:]:
        assert all(torch.equal(*pair) for pair in zip(outputs[0], other, strict=True))


@in_cpp
def test_requests_without_query_tokens_are_passed_over(make_bf16):
    batch = make_bf16([1, 0, 5], [9, 20, 30], num_decodes=1)
    seq_lens = torch.tensor([9, 0, 30], dtype=torch.int32)
    metadata = replace(batch.metadata, seq_lens=seq_lens, seq_lens_host=(9, 0, 30))
    assert torch.equal(attend(replace(batch, metadata=metadata)), attend(batch))


@in_cpp
@pytest.mark.parametrize("options", [{"dtype": torch.float32}, {"head_dim": 40}])
def test_row_major_tiles_go_to_the_reference(make_batch, dense_attention, options):
    batch = make_batch(**MIX, **{"dtype": torch.bfloat16, **options})
    tolerance = 5e-6 if batch.query.dtype == torch.float32 else 1.5e-2
    actual = batch.attend(cpu.paged_attention).double()
    torch.testing.assert_close(actual, dense_attention(batch), rtol=tolerance, atol=tolerance)


@in_cpp
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(4, 3, 64).bfloat16()}, "does not fit"),
        ({"query": torch.zeros(4, 4, 64)}, "dtype"),
        ({"query": torch.zeros(3, 4, 64).bfloat16()}, "query has 3 tokens, the batch 4"),
    ],
)
def test_what_does_not_fit_is_refused(make_bf16, change, message):
    batch = make_bf16([1, 3], [9, 20], num_decodes=1)
    with pytest.raises(ValueError, match=message):
        attend(replace(batch, **change))


@in_cpp
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "block_table has 16 positions"),
        ({"seq_lens": torch.tensor([9, 20])}, "seq_lens must be dense int32"),
        ({"seq_lens_host": (9, 2)}, "query_lens must be at most seq_lens"),
        (
            {"seq_lens_host": (9, 21)},
            r"seq_lens is \[9, 20\], by the lengths on the host \[9, 21\]",
        ),
        ({"block_table": torch.full((2, 2), 99, dtype=torch.int32)}, "blocks are 0 to 99, must be"),
    ],
)
def test_metadata_that_the_kernels_cannot_read_is_refused(make_bf16, change, message):
    batch = make_bf16([1, 3], [9, 20], num_decodes=1)
    with pytest.raises(ValueError, match=message):
        attend(replace(batch, metadata=replace(batch.metadata, **change)))


@in_cpp
def test_a_layer_the_cache_lacks_is_refused(make_bf16):
    batch = packed(make_bf16([1], [9], num_decodes=1))
    with pytest.raises(ValueError, match="layer must be in"):
        cpu.paged_attention(batch.query, batch.kv_cache, 2, batch.metadata, batch.scale)


@in_cpp
@pytest.mark.parametrize("seq_len", [1, 16, 512, 513, 520, 1030])
def test_nan_in_the_last_keys_shows(make_bf16, seq_len):
    """Also if they are all that a row sees of a span."""
    batch = make_bf16([1], [seq_len], num_decodes=1)
    first = (seq_len - 1) // 16
    batch.kv_cache[batch.metadata.block_table[0, first], :, :, 0] = torch.nan
    assert attend(batch).isnan().all()
