"""Sampling in C++ gives the reference's tokens, each of them, on every instruction set."""

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sampling_batches import make_logits, make_sampling_batch

from pdserve_kernels import cpu, reference
from pdserve_kernels.sampling_batch import combine_argmax

VOCAB_SIZES = [1, 7, 64, 1392]
WANTED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": [0.0, 0.7, 1.0, 1.3]},
    {"top_k": 1},
    {"top_k": [50, 3, 700, 0]},
    {"top_p": 0.1},
    {"top_p": [0.9, 0.9999, 1.0, 1e-9]},
    {"min_p": 0.05},
    {"top_k": 500, "top_p": 0.95, "min_p": 0.001, "temperature": 0.6},
]


pytestmark = pytest.mark.usefixtures("each_isa")


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, set_threads: Callable[[int], None]) -> None:
    set_threads(request.param)


def check_tokens(logits: torch.Tensor, **wanted: Any) -> None:
    batch = make_sampling_batch(len(logits), seeds=np.arange(len(logits)) - 2, **wanted)
    expected = reference.sample(logits, batch)
    assert cpu.sample(logits, batch).tolist() == expected.tolist(), wanted


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_tokens_are_those_of_the_reference(vocab_size: int, wanted: dict[str, Any]) -> None:
    for scale in (0.01, 3.0):
        logits = make_logits(4, vocab_size, scale=scale)
        check_tokens(logits, **wanted)
        # Rounded, many logits are equal.
        check_tokens(logits.bfloat16(), **wanted)


@pytest.mark.parametrize("vocab_size", [32_000, 152_064])
def test_tokens_of_a_large_vocabulary_are_those_of_the_reference(vocab_size: int) -> None:
    wanted = {"temperature": [0.0, 1.0, 0.8], "top_k": [0, 0, 50], "top_p": [1.0, 1.0, 0.9]}
    check_tokens(make_logits(3, vocab_size).bfloat16(), **wanted)


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_many_rows_of_few_tokens_draw_the_same(wanted: dict[str, Any]) -> None:
    columns = {name: np.resize(value, 400) for name, value in wanted.items()}
    check_tokens(make_logits(400, 70, scale=1.0), **columns)


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_banned_tokens_and_ties_are_treated_alike(wanted: dict[str, Any]) -> None:
    logits = torch.full((4, 3000), -torch.inf)
    logits[:, 5::7] = make_logits(4, 428, scale=2.0).round()
    logits[3, :2990] = -torch.inf
    logits[3, 2990:] = 1.5
    check_tokens(logits, **wanted)


@pytest.mark.parametrize("spread", [0.0, 1e-4, 200.0])
@pytest.mark.parametrize("wanted", [{"top_k": 1500}, {"top_p": 0.7}], ids=str)
def test_logits_that_crowd_into_one_bucket(spread: float, wanted: dict[str, Any]) -> None:
    logits = make_logits(4, 3001, scale=spread)
    logits[:, 17] = 5.0
    check_tokens(logits, **wanted)


def crowd(kind: str, n: int, vocab_size: int) -> torch.Tensor:
    """Logits of which thousands lie within 1/64 of each other."""
    noise = make_logits(n, vocab_size, scale=1.0)
    if kind == "few values":
        return 1.0 + (noise * 2).round() * 2.0**-23
    if kind == "around zero":
        return noise.round() * torch.tensor([0.0, -0.0, 1e-45, 1e-38]).unsqueeze(1)
    if kind == "nested":
        # Nearer and nearer to 1, so that each round finds most of them in one bucket.
        return 1.0 - 2.0 ** -(7.0 + torch.arange(vocab_size) % 40 / 2).expand(n, -1)
    if kind == "every key":
        keys = torch.linspace(-(2**31) + 2**23, 2**31 - 2**23, vocab_size, dtype=torch.float64)
        bits = torch.where(keys < 0, keys.abs() - 2.0**31, keys).to(torch.int32)
        return bits.view(torch.float32).clamp(-1e30, 1e30).nan_to_num().expand(n, -1)
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["few values", "around zero", "nested", "every key"])
@pytest.mark.parametrize(
    "wanted",
    [
        {"top_k": [1, 1500, 4000, 5002]},
        {"top_p": [0.001, 0.3, 0.7, 0.9999]},
        {"top_k": 3000, "top_p": [0.001, 0.3, 0.7, 0.9999]},
    ],
    ids=str,
)
def test_more_than_a_list_holds_crowd_into_one_bucket(kind: str, wanted: dict[str, Any]) -> None:
    logits = crowd(kind, 4, 5003).repeat(6, 1)
    columns = {name: np.resize(value, len(logits)) for name, value in wanted.items()}
    check_tokens(logits, **columns)
    logits[:, ::7] = -torch.inf
    check_tokens(logits, **columns)
    check_tokens(logits.bfloat16(), **columns)


def test_threads_and_neighbours_change_no_token(threads: None) -> None:
    logits = make_logits(5, 5003, scale=0.5)
    columns = {"temperature": [0.0, 0.7, 1.0, 1.3, 1.0], "top_p": [1.0, 1.0, 0.9, 0.5, 1.0]}
    expected = reference.sample(logits, make_sampling_batch(5, **columns)).tolist()
    assert cpu.sample(logits, make_sampling_batch(5, **columns)).tolist() == expected
    for i in range(5):
        alone = {name: values[i] for name, values in columns.items()}
        batch = make_sampling_batch(1, positions=i, **alone)
        assert cpu.sample(logits[i : i + 1], batch).tolist() == [expected[i]]


def test_draws_follow_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0, -0.5, 1.5])
    temperature, n = 0.8, 200_000
    batch = make_sampling_batch(n, temperature=temperature, seeds=7)
    drawn = cpu.sample(logits.expand(n, -1), batch)
    expected = (logits / temperature).softmax(0) * n
    chi_square = ((torch.bincount(drawn, minlength=7) - expected) ** 2 / expected).sum()
    assert chi_square < 27.9  # the 99.99% quantile for 6 degrees of freedom


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax_takes_the_lowest_of_equals_and_counts_nans(dtype: torch.dtype) -> None:
    for vocab_size in VOCAB_SIZES:
        logits = make_logits(6, vocab_size, scale=1.0).round().to(dtype)
        logits[4], logits[5] = -torch.inf, torch.nan
        # Rows need not lie next to each other, nor the tokens of one.
        for view in (logits, logits[::2], logits.T.contiguous().T):
            best = cpu.argmax(view)
            expected = view[:-1].argmax(-1).tolist()
            assert best.token_ids[: len(expected)].tolist() == expected
            assert bool(((best.token_ids >= 0) & (best.token_ids < vocab_size)).all())
            assert best.num_nans.tolist() == view.isnan().sum(-1).tolist()


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_nan_and_infinite_logits_still_give_valid_ids(wanted: dict[str, Any]) -> None:
    logits, beside_nan = make_logits(4, 1000), make_logits(4, 1000)
    logits[0, ::3] = torch.nan
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 70:90] = torch.inf
    # The highest one has it in its lane of another vector, or of another block.
    beside_nan[:, 0] = 1e4
    beside_nan[range(4), [16, 32, 48, 64]] = torch.nan
    batch = make_sampling_batch(4, **wanted)
    for rows in (logits, beside_nan):
        assert all(0 <= token_id < 1000 for token_id in cpu.sample(rows, batch).tolist())


@pytest.mark.parametrize("num_rows", [0, 1, 2, 33, 200])
@pytest.mark.parametrize("out_features", [1, 63, 1392])
def test_linear_argmax_is_the_argmax_of_linear(
    num_rows: int, out_features: int, threads: None
) -> None:
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, 64, generator=generator).bfloat16()
    # Each row is there twice, so that every logit has an equal.
    weight[out_features // 2 :] = weight[: out_features - out_features // 2].clone()
    packed = cpu.pack_linear(weight, torch.ones(out_features).bfloat16())
    x = torch.randn(num_rows, 64, generator=generator).bfloat16()
    x[7::9, 3] = torch.nan
    best, logits = cpu.linear_argmax(x, packed), cpu.linear(x, packed)
    is_healthy = ~logits.isnan().any(1)
    assert torch.equal(best.token_ids[is_healthy], logits[is_healthy].argmax(-1))
    assert torch.equal(best.values[is_healthy], logits[is_healthy].amax(-1).float())
    assert torch.equal(best.num_nans, logits.isnan().sum(-1))
    assert bool((best.token_ids < out_features).all())


@pytest.mark.parametrize("kernels", [cpu, reference])
@pytest.mark.parametrize("cuts", [[100], [50, 50], [64, 1, 35], [1] * 100, [30, 40, 30]])
def test_parts_of_a_vocabulary_combine_to_the_argmax_of_the_whole(
    kernels: ModuleType, cuts: list[int]
) -> None:
    logits = make_logits(60, 100)
    logits[:20] = logits[:20].round()  # equals in many parts
    logits[20] = -torch.inf
    logits[21, 40:] = -torch.inf
    logits[30:40, 60] = torch.nan
    whole = kernels.argmax(logits)
    parts = [kernels.argmax(part) for part in logits.split(cuts, 1)]
    best = combine_argmax(parts, np.cumsum([0, *cuts[:-1]]).tolist())
    is_healthy = ~logits.isnan().any(1)
    for ours, theirs in zip(best, whole, strict=True):
        assert torch.equal(ours[is_healthy], theirs[is_healthy])
    assert torch.equal(best.num_nans, whole.num_nans)
    assert bool(((best.token_ids >= 0) & (best.token_ids < 100)).all())


def test_heads_cut_by_the_vocabulary_choose_what_the_whole_one_does() -> None:
    weight, bias, x = (torch.randn(shape).bfloat16() for shape in ((200, 64), (200,), (40, 64)))
    weight[150:] = weight[:50].clone()
    bias[150:] = bias[:50].clone()
    parts = [
        cpu.linear_argmax(x, cpu.pack_linear(rows, its_bias))
        for rows, its_bias in zip(weight.chunk(4), bias.chunk(4), strict=True)
    ]
    best = combine_argmax(parts, [0, 50, 100, 150])
    whole = cpu.linear_argmax(x, cpu.pack_linear(weight, bias))
    assert all(torch.equal(*pair) for pair in zip(best, whole, strict=True))


def test_fp32_linear_argmax_goes_through_the_logits() -> None:
    weight, x = torch.randn(100, 32), torch.randn(3, 32)
    best = cpu.linear_argmax(x, cpu.pack_linear(weight))
    assert torch.equal(best.token_ids, (x @ weight.T).argmax(-1))


def test_what_does_not_fit_is_refused() -> None:
    message = "logits are [3, 0] on cpu; they must be [n, vocab_size] on cpu, with a vocabulary"
    with pytest.raises(ValueError, match=re.escape(message)):
        cpu.argmax(torch.empty(3, 0))
    message = "a column of the batch is (2,); there are 3 rows"
    with pytest.raises(ValueError, match=re.escape(message)):
        cpu.sample(torch.zeros(3, 5), make_sampling_batch(2))
