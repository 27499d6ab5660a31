"""Batches over a paged cache whose every unused slot is NaN, and a dense answer for them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from pdserve_kernels import KernelSet
from pdserve_kernels.fp8 import FP8
from pdserve_kernels.kv_scales import NO_SCALES, KVScales
from pdserve_kernels.metadata import AttentionMetadata
from support.interpreted import convert_fp8_as_gpus_do
from support.kernels import ISAS, use_isa
from support.triton_kernels import INTERPRETED

sys.path.append(str(Path(__file__).parent))  # test modules import sampling_batches

BLOCK_SIZE = 16
NUM_LAYERS = 2
LAYER = 1


@dataclass(frozen=True)
class Batch:
    query: torch.Tensor
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    scale: float
    window: int | None = None
    softcap: float = 0.0
    scales: KVScales = NO_SCALES

    def attend(self, paged_attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        return paged_attention(
            self.query,
            self.kv_cache,
            LAYER,
            self.metadata,
            self.scale,
            window=self.window,
            softcap=self.softcap,
            scales=self.scales,
        )

    def in_fp8(self, scales: KVScales) -> "tuple[Batch, Batch]":
        """The same with a cache in FP8, and with one in the query's dtype that holds what this one
        stands for, if scales are powers of two.
        """
        cache = self.kv_cache.to(FP8)
        factors = torch.tensor(scales).view(2, 1, 1)
        stands_for = (cache.float() * factors).to(self.kv_cache.dtype)
        return replace(self, kv_cache=cache, scales=scales), replace(self, kv_cache=stands_for)

    def on(self, device: str) -> "Batch":
        tensors = {
            name: getattr(self.metadata, name).to(device)
            for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        }
        metadata = AttentionMetadata(
            **tensors,
            query_lens_host=self.metadata.query_lens_host,
            seq_lens_host=self.metadata.seq_lens_host,
            num_decodes=self.metadata.num_decodes,
        )
        query, kv_cache = self.query.to(device), self.kv_cache.to(device)
        return replace(self, query=query, kv_cache=kv_cache, metadata=metadata)

    def as_decodes(self) -> "Batch":
        """The same, told that each request has one query token."""
        metadata = self.metadata
        return replace(self, metadata=replace(metadata, num_decodes=metadata.num_reqs))

    def only(self, request: int, *, first: int = 0, last: int | None = None) -> "Batch":
        """The request alone, or only its query tokens [first, last) as a prefill chunk."""
        metadata = self.metadata
        query_len, seq_len = metadata.query_lens_host[request], metadata.seq_lens_host[request]
        stop = query_len if last is None else last
        row = sum(metadata.query_lens_host[:request])
        seq_len += stop - query_len
        alone = AttentionMetadata(
            query_start_loc=torch.tensor([0, stop - first], dtype=torch.int32),
            seq_lens=torch.tensor([seq_len], dtype=torch.int32),
            block_table=metadata.block_table[request : request + 1],
            slot_mapping=metadata.slot_mapping[row + first : row + stop],
            query_lens_host=(stop - first,),
            seq_lens_host=(seq_len,),
            num_decodes=1 if request < metadata.num_decodes else 0,
        )
        return replace(self, query=self.query[row + first : row + stop], metadata=alone)


def _make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_decodes: int,
    dtype: torch.dtype,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = BLOCK_SIZE,
    window: int | None = None,
    softcap: float = 0.0,
) -> Batch:
    torch.manual_seed(0)
    num_blocks = sum(-(-length // block_size) for length in seq_lens) + 5
    # Block 0, which block tables are padded with, belongs to nobody and stays NaN.
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    shape = (num_blocks, num_kv_heads, NUM_LAYERS, 2, block_size, head_dim)
    kv_cache = torch.full(shape, float("nan"), dtype=dtype)
    table = torch.zeros(len(seq_lens), -(-max(seq_lens) // block_size) + 2, dtype=torch.int32)
    slots: list[int] = []
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = [free.pop() for _ in range(-(-seq_len // block_size))]
        table[request, : len(blocks)] = torch.tensor(blocks)
        for index, block in enumerate(blocks):
            used = min(block_size, seq_len - index * block_size)
            content = torch.randn(num_kv_heads, NUM_LAYERS, 2, used, head_dim)
            kv_cache[block, :, :, :, :used] = content.to(dtype)
        slots += [
            blocks[position // block_size] * block_size + position % block_size
            for position in range(seq_len - query_len, seq_len)
        ]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots),
        query_lens_host=tuple(query_lens),
        seq_lens_host=tuple(seq_lens),
        num_decodes=num_decodes,
    )
    # With a softcap, scores that it bends.
    query = torch.randn(sum(query_lens), num_heads, head_dim) * (3.0 if softcap else 1.0)
    return Batch(query.to(dtype), kv_cache, metadata, head_dim**-0.5, window, softcap)


def _dense_attention(batch: Batch) -> torch.Tensor:
    """The same answer in fp64, one request after another, with whole K, V and scores."""
    query, kv_cache, metadata = batch.query.double(), batch.kv_cache, batch.metadata
    group_size, block_size = query.shape[1] // kv_cache.shape[1], kv_cache.shape[4]
    outputs = []
    row = 0
    for request, seq_len in enumerate(metadata.seq_lens_host):
        query_len = metadata.query_lens_host[request]
        blocks = metadata.block_table[request, : -(-seq_len // block_size)].long()
        key, value = (
            kv_cache[blocks, :, LAYER, which]
            .transpose(0, 1)
            .flatten(1, 2)[:, :seq_len]
            .repeat_interleave(group_size, 0)
            .double()
            for which in (0, 1)
        )
        scores = query[row : row + query_len].transpose(0, 1) @ key.transpose(1, 2) * batch.scale
        if batch.softcap:
            scores = batch.softcap * torch.tanh(scores / batch.softcap)
        position = torch.arange(seq_len)
        distance = position[seq_len - query_len :, None] - position
        scores.masked_fill_(distance < 0, float("-inf"))
        if batch.window is not None:
            scores.masked_fill_(distance >= batch.window, float("-inf"))
        outputs.append((scores.softmax(-1) @ value).transpose(0, 1))
        row += query_len
    return torch.cat(outputs)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random inputs do not depend on the tests that have run before."""
    torch.manual_seed(0)


@pytest.fixture(params=ISAS)
def each_isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels, for one instruction set after the other."""
    use_isa(request.param, monkeypatch)


@pytest.fixture
def kernels() -> KernelSet:
    """Triton's."""
    from pdserve_kernels import triton

    return triton


@pytest.fixture
def fp8_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        convert_fp8_as_gpus_do(monkeypatch)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    return _make_batch


@pytest.fixture(scope="session")
def dense_attention() -> Callable[[Batch], torch.Tensor]:
    return _dense_attention
