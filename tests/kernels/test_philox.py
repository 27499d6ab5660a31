"""Philox4x32-10 against the known answers of the Random123 library."""

import pytest
import torch

from pdserve_kernels.reference.sampling.philox import philox4x32, split_seed

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox4x32(
        tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([k]) for k in key)
    )
    assert tuple(int(word) for word in words) == expected


def test_broadcasting_gives_what_each_counter_gives_alone() -> None:
    counters, positions = torch.arange(50).unsqueeze(0), torch.tensor([[3], [4]])
    zero, key = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[11], [12]])
    together = philox4x32((counters, positions, zero, zero), (key, key))
    alone = philox4x32(
        (torch.tensor(7), torch.tensor(4), torch.tensor(0), torch.tensor(0)),
        (torch.tensor(12), torch.tensor(12)),
    )
    assert [int(word[1, 7]) for word in together] == [int(word) for word in alone]


def test_a_seed_splits_into_its_two_words() -> None:
    low, high = split_seed(torch.tensor([0x123456789, -1]))
    assert low.tolist() == [0x23456789, ONES]
    assert high.tolist() == [1, ONES]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_draws_the_same_bits() -> None:
    counters = torch.arange(10_000)
    zero, key = torch.tensor(5), torch.tensor(99)
    on_cpu = philox4x32((counters, zero, zero, zero), (key, key))
    counters, zero, key = counters.cuda(), zero.cuda(), key.cuda()
    on_cuda = philox4x32((counters, zero, zero, zero), (key, key))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, on_cuda, strict=True))
