"""Triton against the reference: on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1.

`test_triton_without_gpu.py` starts the second in a process of its own, because Triton reads the
variable when a kernel is defined.
"""

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adapters import make_adapter, make_parts
from decoder_models import Chunk, Model, Shape
from integer_weights import KINDS, exact, make_weight
from sampling_batches import make_logits, make_sampling_batch, pack_mask

from pdserve_kernels import reference
from pdserve_kernels.kv_scales import FP8, FP8_MAX, NO_SCALES, KVScales
from pdserve_kernels.lora import LoraRows, LoraSegment
from support.interpreted import convert_fp8_as_gpus_do
from support.triton_kernels import DEVICE, INTERPRETED, on_device

# The interpreter truncates to bf16 where a GPU rounds, and its bf16 tl.dot returns nonsense.
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]
# Interpreted, windows take long; what a dtype changes the cases without one show.
WINDOW_DTYPES = DTYPES[:1] if INTERPRETED else DTYPES
VOCAB_SIZES = [1, 31, 1000, 3001] if INTERPRETED else [1, 31, 1000, 3001, 128_256, 151_936]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
    ),
]


@pytest.fixture(autouse=True)
def fp8_of_gpus(monkeypatch):
    if INTERPRETED:
        convert_fp8_as_gpus_do(monkeypatch)


@pytest.fixture
def prepare_heads():
    from pdserve_kernels.triton.heads import prepare_heads

    return prepare_heads


@pytest.fixture
def kernels():
    from pdserve_kernels import triton

    return triton


def assert_close(actual, expected, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


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
    drawn = kernels.sample(on_device[0], batch, mask=on_device[1])
    assert torch.equal(drawn.cpu(), reference.sample(logits, batch, mask=mask))
    best = kernels.argmax(on_device[0], mask=on_device[1])
    expected = reference.argmax(logits, mask=mask)
    assert torch.equal(best.token_ids.cpu(), expected.token_ids)
    assert torch.equal(best.values.cpu(), expected.values)
    weight, x = torch.randn(vocab_size, 64).to(dtype), torch.randn(4, 64).to(dtype)
    packed = kernels.pack_linear(weight.to(DEVICE))
    best = kernels.linear_argmax(x.to(DEVICE), packed, mask=on_device[1])
    assert bool(is_allowed[1:].gather(1, best.token_ids.cpu()[1:, None]).all())


def draw_requests(n, vocab_size):
    """n rows, each with other filters; the first ones are greedy and unfiltered."""
    generator = np.random.default_rng(vocab_size)
    wanted = {
        "temperature": generator.choice([0.6, 1.0, 1.7], n),
        "top_k": generator.choice([0, 0, 1, 20, vocab_size - 1, vocab_size, vocab_size + 7], n),
        "top_p": generator.choice([1.0, 1.0, 0.95, 0.5, 1e-9, 1.0 - 1e-12], n),
        "min_p": generator.choice([0.0, 0.0, 0.02, 1.0], n),
        "seeds": generator.integers(-(2**63), 2**63, n),
        "positions": generator.integers(0, 2**20, n),
    }
    wanted["temperature"][0] = wanted["top_k"][1] = wanted["min_p"][1] = 0.0
    wanted["top_p"][1] = 1.0
    return wanted


def check_tokens(kernels, logits, mask=None, **wanted):
    batch = make_sampling_batch(len(logits), **wanted)
    drawn = kernels.sample(logits.to(DEVICE), batch, mask=None if mask is None else mask.to(DEVICE))
    assert drawn.tolist() == reference.sample(logits, batch, mask=mask).tolist()


@pytest.mark.parametrize("first_id", [0, 32, 2048])
@pytest.mark.parametrize("has_mask", [False, True])
def test_draws_of_a_part_of_the_vocabulary_are_those_of_the_reference(kernels, first_id, has_mask):
    generator = np.random.default_rng(first_id)
    logits = make_logits(8, 1500)
    logits[3] = 0.0  # many are equal
    batch = make_sampling_batch(
        8,
        temperature=[0.0, 0.7, 1.0, 0.0, 1.0, 2.0, 1e-6, 1.0],
        seeds=generator.integers(2**62, size=8),
    )
    mask = pack_mask(torch.rand(8, 1500) < 0.1) if has_mask else None
    expected = reference.sample_part(logits, batch, first_id=first_id, mask=mask)
    mask = None if mask is None else mask.to(DEVICE)
    drawn = kernels.sample_part(logits.to(DEVICE), batch, first_id=first_id, mask=mask)
    assert torch.equal(drawn.token_ids.cpu(), expected.token_ids)
    assert torch.equal(drawn.values.cpu(), expected.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_draws_are_those_of_the_reference(kernels, dtype, vocab_size):
    n = 10 if INTERPRETED else 64
    logits = make_logits(n, vocab_size).to(dtype)
    check_tokens(kernels, logits, **draw_requests(n, vocab_size))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_filters_keep_what_the_reference_keeps(kernels, vocab_size):
    from pdserve_kernels.reference.filters import find_candidates
    from pdserve_kernels.reference.sampling import build_filters
    from pdserve_kernels.triton.device_batch import DeviceSamplingBatch
    from pdserve_kernels.triton.filters import find_thresholds

    n = 10 if INTERPRETED else 64
    batch = make_sampling_batch(n, **draw_requests(n, vocab_size)).select(np.arange(1, n))
    # Coarse enough for ties.
    scaled = (make_logits(n - 1, vocab_size) * 8).round() / 8
    logits = scaled * torch.from_numpy(batch.divisors())[:, None]
    scaled = logits / torch.from_numpy(batch.divisors())[:, None]
    staged = DeviceSamplingBatch.stage(batch, torch.device(DEVICE))
    thresholds = find_thresholds(logits.to(DEVICE), None, staged).cpu()
    candidates = find_candidates(scaled, build_filters(batch, vocab_size, torch.device("cpu")))
    kept = torch.zeros(n - 1, vocab_size, dtype=torch.bool)
    kept.scatter_(1, candidates.vocab_ids, candidates.logits > -torch.inf)
    # What lies further below cannot be drawn.
    kept &= scaled >= scaled.amax(1, keepdim=True) - 28.0
    is_within = scaled >= torch.maximum(thresholds[:, None], scaled.amax(1, keepdim=True) - 28.0)
    assert torch.equal(is_within, kept)


def test_draws_among_the_allowed_are_those_of_the_reference(kernels):
    n, vocab_size = 8, 2500
    is_allowed = torch.rand(n, vocab_size) < torch.tensor([0.002, 0.5]).repeat(n // 2)[:, None]
    is_allowed[:, 77] = True
    mask = pack_mask(is_allowed, past_end=True)
    check_tokens(kernels, make_logits(n, vocab_size), mask, **draw_requests(n, vocab_size))


@pytest.mark.parametrize(
    "wanted", [{"top_k": [1, 2, 700, 0]}, {"top_p": [0.7, 0.999, 0.1, 1.0]}], ids=str
)
def test_draws_among_ties_are_those_of_the_reference(kernels, wanted):
    logits = torch.full((4, 1500), -torch.inf)
    logits[:, 5::7] = make_logits(4, 214, scale=2.0).round()
    logits[1, :1490], logits[1, 1490:] = -torch.inf, 1.5
    logits[2] = torch.where(torch.rand(1500) < 0.5, 0.0, -0.0)
    check_tokens(kernels, logits, **wanted)
    for spread in (0.0, 1e-4, 200.0):
        crowd = make_logits(4, 1500, scale=spread)
        crowd[:, 17] = 5.0
        check_tokens(kernels, crowd, **wanted)


def test_rows_with_nothing_to_choose_get_valid_ids(kernels):
    from pdserve_kernels.triton.device_batch import DeviceSamplingBatch
    from pdserve_kernels.triton.sampling import sample_staged

    logits = make_logits(8, 1100)
    logits[0, ::3], logits[1, 9], logits[2:4], logits[4:6] = np.nan, -np.nan, np.nan, -np.inf
    logits[6:, 70:90] = np.inf
    for wanted in ({"top_k": 3, "min_p": 0.1}, {"top_p": 0.9}, {"temperature": [0.0, 1.0] * 4}):
        drawn = kernels.sample(logits.to(DEVICE), make_sampling_batch(8, **wanted))
        assert all(0 <= token_id < 1100 for token_id in drawn.tolist())
    best = kernels.argmax(logits.to(DEVICE))
    assert all(0 <= token_id < 1100 for token_id in best.token_ids.tolist())
    assert best.token_ids[6:].tolist() == [70, 70]
    num_nans = reference.count_nans(logits).tolist()
    assert best.num_nans.tolist() == num_nans
    assert kernels.count_nans(logits.to(DEVICE)).tolist() == num_nans
    staged = DeviceSamplingBatch.stage(make_sampling_batch(8, top_p=0.9), torch.device(DEVICE))
    assert sample_staged(logits.to(DEVICE), staged)[1].tolist() == num_nans


def test_argmax_takes_the_lowest_of_equals_wherever_rows_lie(kernels):
    logits = make_logits(6, 3001, scale=1.0).round()
    logits[4] = torch.where(torch.rand(3001) < 0.5, 0.0, -0.0)
    for view in (logits, logits[::2], logits.T.contiguous().T):
        best = kernels.argmax(view.to(DEVICE))
        assert best.token_ids.tolist() == view.argmax(-1).tolist()
    assert kernels.argmax(logits[:0].to(DEVICE)).token_ids.tolist() == []
    assert kernels.sample(logits[:0].to(DEVICE), make_sampling_batch(0)).tolist() == []


def test_a_staged_batch_draws_for_what_was_copied_last(kernels):
    from pdserve_kernels.triton.device_batch import DeviceSamplingBatch
    from pdserve_kernels.triton.sampling import sample_staged

    logits, device = make_logits(4, 1000), torch.device(DEVICE)
    wanted = {"top_k": [0, 3, 2**40, 0], "top_p": [0.9, 1.0, 1.0, 0.3], "seeds": -7}
    batches = [make_sampling_batch(4, **columns) for columns in ({"temperature": 0}, {}, wanted)]
    staged = DeviceSamplingBatch.stage(batches[0], device)
    for batch in batches:
        new = DeviceSamplingBatch.stage(batch, device)
        for field in fields(new):
            getattr(staged, field.name).copy_(getattr(new, field.name))
        expected = reference.sample(logits, batch).tolist()
        assert sample_staged(logits.to(device), staged)[0].tolist() == expected


def test_a_mask_that_does_not_fit_is_refused(kernels):
    mask = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"the mask is torch\.int64"):
        kernels.sample(torch.zeros(3, 50, device=DEVICE), make_sampling_batch(3), mask=mask)
    with pytest.raises(ValueError, match=r"the mask is torch\.int64"):
        kernels.argmax(torch.zeros(3, 50, device=DEVICE), mask=mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 20, 65])
def test_linears_of_integers_agree_with_fp64(kernels, dtype, kind, num_rows):
    for rows, columns in ((70, 200), (20, 1100)):
        weight = replace(make_weight(rows, columns, *kind), dtype=dtype)
        bias = torch.randn(rows).to(dtype)
        x = torch.randn(num_rows, columns).to(dtype) * columns**-0.5
        packed = kernels.pack_linear(on_device(weight), bias.to(DEVICE))
        out = kernels.linear(x.to(DEVICE), packed)
        expected = x.double() @ exact(weight).T + bias.double()
        assert_close(out, expected.to(dtype), dtype)
        sums = kernels.linear_sums(x.to(DEVICE), packed)
        assert_close(sums.double(), expected - bias.double(), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_linears_of_some_inputs_of_integers_agree_with_fp64(kernels, kind):
    """A rank's part, which is no memory of its own."""
    whole = replace(make_weight(70, 768, *kind), dtype=torch.float32)
    part = whole.columns(slice(384, 768))
    x = torch.randn(3, 384) * 384**-0.5
    out = kernels.linear(x.to(DEVICE), kernels.pack_linear(on_device(part)))
    expected = x.double() @ exact(whole)[:, 384:].T
    assert_close(out, expected.float(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_features", [60, 1500])
def test_adapters_add_what_merged_weights_do(kernels, dtype, in_features):
    sizes, num_rows = [(70, True), (34, False), (140, True)], 60
    weight = torch.randn(244, in_features).to(dtype) * in_features**-0.5
    x = torch.randn(num_rows, in_features).to(dtype)
    packed = kernels.pack_linear(weight.to(DEVICE))
    parts = [make_parts(sizes, in_features, rank, dtype, seed=rank) for rank in (5, 40)]
    adapters = [kernels.pack_lora(each, packed) for each in parts]
    rows = [LoraRows(1, 40, adapters[0]), LoraRows(45, 46, adapters[1]), LoraRows(46, 60, None)]
    out = kernels.linear_lora(x.to(DEVICE), packed, rows)
    base = kernels.linear(x.to(DEVICE), packed)
    alone = [0, *range(40, 45), *range(46, 60)]
    assert torch.equal(out[alone], base[alone])
    for (begin, end, _), of_adapter in zip(rows, parts, strict=False):
        merged = weight.double()
        for part in of_adapter:
            change = part.scale * part.b.double() @ part.a.double()
            merged[part.first_output : part.first_output + len(part.b)] += change
        expected = x[begin:end].double() @ merged.T
        assert_close(out[begin:end].double(), expected, dtype)
        # Whatever neighbours it has.
        for row in (begin, end - 1):
            one = LoraRows(0, 1, adapters[of_adapter is parts[1]])
            by_itself = kernels.linear_lora(x[row : row + 1].to(DEVICE), packed, [one])
            assert_close(by_itself[0].double(), expected[row - begin], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decoder_with_adapters_agrees_with_the_reference(kernels, dtype):
    outputs = []
    for module, place in ((reference, lambda value: value), (kernels, on_device)):
        model = Model(Shape(head_dim=64), module, dtype)
        model.decoder = place(model.decoder)
        states, positions, metadata = model.step([Chunk(1, 0, 1), Chunk(0, 0, 33), Chunk(2, 0, 9)])
        first, second = (make_adapter(module, model, rank, dtype) for rank in (8, 20))
        lora = [LoraSegment(0, 1, first), LoraSegment(34, 43, second)]
        inputs = (positions, model.new_cache(), metadata)
        packed = module.pack_decoder(model.decoder)
        outputs.append(module.run_decoder(place(states), packed, *map(place, inputs), lora).cpu())
    # Of two layers; each rounds as often as a kernel does.
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=4 * TOLERANCE[dtype])
