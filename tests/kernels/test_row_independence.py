"""A row's bits depend on nothing but the row: what exact determinism on a CPU rests on."""

import itertools
import os
import subprocess
import sys

import pytest
import torch

from pdserve_kernels import reference
from pdserve_kernels.reference import attention_plan, paged_attention
from support.samples import sampled

DTYPES = [torch.float32, torch.bfloat16]
NUM_ROWS = 600
# All small counts, where GEMMs choose other paths, and the borders of their blocks.
ROW_COUNTS = [*range(1, 34), 47, 63, 64, 65, 96, 127, 129, 191, 255, 257, 383, 384, 500, 512, 599]
LENGTHS = [1, 15, 16, 17, 190, 200, 330, 511, 512, 513, 1100]
ATTENTION = [
    pytest.param({}, id="gqa"),
    pytest.param({"num_heads": 3, "num_kv_heads": 3, "head_dim": 80}, id="mha"),
    pytest.param({"num_heads": 7, "num_kv_heads": 1, "head_dim": 128}, id="mqa"),
    pytest.param({"head_dim": 96, "window": 100, "softcap": 5.0}, id="window and softcap"),
    pytest.param({"head_dim": 256, "window": 513}, id="long window"),
]


@pytest.fixture(
    params=[pytest.param(1, id="1 thread"), pytest.param(2, id="2 threads")],
    autouse=True,
)
def _threads(request, set_threads):
    set_threads(request.param)


@pytest.fixture
def _told(dtype):
    if not reference.is_row_independent(dtype):
        # A fact of the machine: workers on it say "consistent".
        pytest.skip(f"on this CPU products in {dtype} depend on the number of rows")


def assert_rows_stay(function, x, row_counts=ROW_COUNTS):
    """The first and the last rows of x, so many at a time, get what they get among all of x."""
    together = function(x)
    for count in row_counts:
        assert torch.equal(function(x[:count]), together[:count]), f"the first {count} rows"
        assert torch.equal(function(x[-count:]), together[-count:]), f"the last {count} rows"


@pytest.mark.usefixtures("_told")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(64, 192), (100, 60), (896, 128), (4864, 32), (3072, 256)]
)
def test_linear(dtype, in_features, out_features):
    torch.manual_seed(0)
    weight, bias = torch.randn(out_features, in_features), torch.randn(out_features)
    packed = reference.pack_linear(weight.to(dtype), bias.to(dtype))
    x = torch.randn(NUM_ROWS, in_features).to(dtype)
    assert_rows_stay(lambda rows: reference.linear(rows, packed), x)


# Prints whether products are row-independent, and whether the kernels say so.
PRODUCTS = """
import torch
from pdserve_kernels import reference
is_told = reference.is_row_independent(torch.float32)
same = True
for head_dim in (64, 96, 128, 256):
    query, key_t = torch.randn(1, 64, head_dim), torch.randn(1, 64, head_dim).transpose(1, 2)
    together = torch.bmm(query, key_t)
    for rows in range(4, 64, 4):
        same = same and torch.equal(torch.bmm(query[:, :rows], key_t), together[:, :rows])
print(same, is_told)
"""


@pytest.mark.parametrize("mode", sampled([None, "AUTO"], None))
def test_products_that_depend_on_the_number_of_rows_are_not_called_independent(mode):
    """On Intel's processors MKL's are, unless it is strict."""
    env = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    if mode is not None:
        env["MKL_CBWR"] = mode
    command = [sys.executable, "-c", PRODUCTS]
    run = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    same, is_told = run.stdout.split()
    assert same == "True" or is_told == "False"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [80, 1000, 5120])
def test_norms(dtype, hidden):
    torch.manual_seed(0)
    x, weight = torch.randn(NUM_ROWS, hidden).to(dtype), torch.randn(hidden).to(dtype)
    counts = [1, 2, 3, 17, 255]
    assert_rows_stay(lambda rows: reference.rms_norm(rows, weight, 1e-6), x, counts)
    assert_rows_stay(
        lambda rows: reference.fused_add_rms_norm(rows, rows, weight, 1e-6)[0], x, counts
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_norms_of_heads_in_a_wider_tensor(dtype, head_dim):
    torch.manual_seed(0)
    qkv, weight = torch.randn(NUM_ROWS, 5, head_dim).to(dtype), torch.rand(head_dim).to(dtype)
    assert_rows_stay(
        lambda rows: reference.rms_norm(rows[:, :3], weight, 1e-6), qkv, [1, 2, 3, 17, 255]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rot_dim", [32, 80, 128])
def test_rotary_embedding(dtype, rot_dim):
    torch.manual_seed(0)
    cache = torch.rand(NUM_ROWS, rot_dim) * 2 - 1
    heads = torch.randn(NUM_ROWS, 3, 128).to(dtype)
    positions = torch.randperm(NUM_ROWS)

    def rotate(rows):
        query, key = heads[rows, :2].clone(), heads[rows, 2:].clone()
        reference.rotary_embedding(positions[rows], query, key, cache)
        return torch.cat((query, key), 1)

    assert_rows_stay(rotate, torch.arange(NUM_ROWS), [1, 2, 3, 17, 255])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 1100, 4864])
def test_silu_and_mul(dtype, width):
    torch.manual_seed(0)
    x = torch.randn(NUM_ROWS, 2 * width).to(dtype)
    assert_rows_stay(reference.silu_and_mul, x, [1, 2, 3, 5, 17, 33, 255])


def test_silu_of_every_bf16_number_is_the_same_alone_in_a_row_and_among_all_in_one():
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    ones = torch.ones_like(every)
    alone = reference.silu_and_mul(torch.stack((every, ones), 1))[:, 0]
    together = reference.silu_and_mul(torch.cat((every, ones))[None])[0]
    assert torch.equal(alone.nan_to_num(7.0), together.nan_to_num(7.0))


@pytest.mark.usefixtures("_told")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ATTENTION)
def test_attention_of_a_request_alone_and_in_a_batch(make_batch, dtype, shape):
    query_lens = [1] * len(LENGTHS) + [70, 30, 5]
    batch = make_batch(
        query_lens, [*LENGTHS, 600, 30, 900], num_decodes=len(LENGTHS), dtype=dtype, **shape
    )
    together = batch.attend(paged_attention).split(query_lens)
    for request, expected in enumerate(together):
        assert torch.equal(batch.only(request).attend(paged_attention), expected), request


@pytest.mark.usefixtures("_told")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ATTENTION)
def test_attention_of_a_prompt_whole_in_chunks_and_by_single_tokens(make_batch, dtype, shape):
    batch = make_batch([620], [620], num_decodes=0, dtype=dtype, **shape)
    whole = batch.attend(paged_attention)
    for edges in ([0, 1, 17, 18, 21, 255, 512, 620], [0, 330, 513, 516, 619, 620]):
        for first, last in itertools.pairwise(edges):
            chunk = batch.only(0, first=first, last=last).attend(paged_attention)
            assert torch.equal(chunk, whole[first:last]), (first, last)
    for position in (0, 16, 99, 100, 200, 320, 511, 512, 513, 611, 612, 619):
        token = batch.only(0, first=position, last=position + 1)
        assert torch.equal(token.as_decodes().attend(paged_attention)[0], whole[position]), position


@pytest.mark.usefixtures("_told")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ATTENTION)
def test_attention_of_decodes_however_they_are_grouped(make_batch, monkeypatch, dtype, shape):
    batch = make_batch([1] * len(LENGTHS), LENGTHS, num_decodes=len(LENGTHS), dtype=dtype, **shape)
    together = batch.attend(paged_attention)
    monkeypatch.setattr(attention_plan, "GROUP_BYTES", 3 * 512 * 64 * 2 * dtype.itemsize)
    assert torch.equal(batch.on("cpu").attend(paged_attention), together)
