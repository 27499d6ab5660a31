"""Our reader of safetensors against the library of the format: files that it writes, and others."""

import json
import random

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from pdserve_engine.lora.safetensors_file import (
    DTYPES,
    MAX_DIMS,
    MAX_HEADER_BYTES,
    parse_safetensors,
)
from support.samples import seeds


def parse(content: bytes) -> dict[str, torch.Tensor]:
    return parse_safetensors(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def make(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("seed", seeds(60))
def test_it_reads_what_the_library_reads(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tensors = {}
    for number in range(rng.randint(0, 8)):
        shape = [rng.randint(0, 5) for _ in range(rng.randint(0, 3))]
        dtype = rng.choice([*DTYPES.values()])
        tensors[f"{number} \u00e4"] = torch.randn(shape, generator=generator).to(dtype)
    content = save(tensors, {"a": "b"} if rng.random() < 0.5 else None)
    if rng.random() < 0.5:
        # With another length of the header tensors are not aligned.
        size = int.from_bytes(content[:8], "little")
        text = content[8 : 8 + size].rstrip() + b" " * rng.randint(0, 7)
        content = make(text, content[8 + size :])
    expected, found = load(content), parse(content)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("seed", seeds(200))
def test_it_reads_nothing_that_the_library_refuses(seed: int) -> None:
    rng = random.Random(seed)
    content = bytearray(save({name: torch.ones(rng.randint(1, 4), 3) for name in "abc"}))
    for _ in range(rng.randint(1, 3)):
        # Mostly in the header.
        at = rng.randrange(len(content) if rng.random() < 0.2 else 200)
        content[at] = rng.choice(b'0123456789abc[]{},:" ')
    try:
        expected = load(bytes(content))
    except SafetensorError:
        with pytest.raises(ValueError, match=r"."):
            parse(bytes(content))
        return
    # It may refuse more: other dtypes, and keys that the format does not have.
    try:
        found = parse(bytes(content))
    except ValueError:
        return
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        make({}, length=1),
        make({}, length=2**64 - 1),
        make([]),
        make(b"[" * 100_000),
        make(b"{}".ljust(MAX_HEADER_BYTES)),
        make(b"{"),
        make(b"\xff"),
        make({"a": 1}),
        make({"a": ENTRY}),
        make({"a": ENTRY}, bytes(5)),
        make({"a": ENTRY, "b": ENTRY}, bytes(4)),
        make({"a": {**ENTRY, "dtype": "I32"}}, bytes(4)),
        make({"a": {**ENTRY, "dtype": ["F32"]}}, bytes(4)),
        make({"a": {**ENTRY, "shape": [2]}}, bytes(4)),
        make({"a": {**ENTRY, "shape": [-1]}}, bytes(4)),
        make({"a": {**ENTRY, "shape": [True]}}, bytes(4)),
        make({"a": {**ENTRY, "shape": [1.0]}}, bytes(4)),
        make({"a": {**ENTRY, "shape": [10**30]}}, bytes(4)),
        make({"a": {**ENTRY, "shape": "1"}}, bytes(4)),
        make({"a": {**ENTRY, "shape": [1 << 47, 1 << 47, 0], "data_offsets": [0, 0]}}),
        make({"a": {**ENTRY, "data_offsets": [0, 4, 4]}}, bytes(4)),
        make({"a": {**ENTRY, "data_offsets": [4, 0]}}, bytes(4)),
        make({"a": {**ENTRY, "data_offsets": [4, 8]}}, bytes(8)),
        make({"a": {**ENTRY, "more": 1}}, bytes(4)),
        make(b'{"a": %b, "a": %b}' % ((json.dumps(ENTRY).encode(),) * 2), bytes(4)),
    ],
)
def test_what_is_no_such_file_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(content)


def test_a_tensor_has_few_dimensions() -> None:
    """The product of as many sizes as a header has room for would take seconds."""
    content = bytes(4)
    most = {"a": {**ENTRY, "shape": [1] * MAX_DIMS}}
    assert parse(make(most, content))["a"].dim() == MAX_DIMS
    for size in (1, (1 << 48) - 1):
        more = {"a": {**ENTRY, "shape": [size] * (MAX_DIMS + 1)}}
        with pytest.raises(ValueError, match=f"'a' has {MAX_DIMS + 1} dimensions, at most"):
            parse(make(more, content))
