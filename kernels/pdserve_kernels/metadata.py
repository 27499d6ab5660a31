"""What attention kernels are told about a batch: where each request's tokens and KV blocks are."""

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class StepMemo:
    """What a kernel set derives from the metadata once per step and reuses in every layer.

    Private to the kernel set that filled it; it dies with its `AttentionMetadata`, so nothing can
    be stale. Only the thread that runs the forward pass may touch it.
    """

    plans: dict[tuple[object, ...], object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One forward pass over `num_reqs` requests whose tokens lie one after another.

    Requests are ordered so that the first `num_decodes` have exactly one query token each; the rest
    are prefill chunks (which may also be one token long). Request i owns query rows
    [query_start_loc[i], query_start_loc[i + 1]); its last query token is at position
    seq_lens[i] - 1. The KV of all its positions, the chunk's own included, is read through the
    block table, so the cache write must precede attention. Query rows past the last request's are
    padding: attention leaves zeros there.
    """

    # [num_reqs + 1] int32, on the device.
    query_start_loc: torch.Tensor
    # [num_reqs] int32: tokens in the cache after this step's write.
    seq_lens: torch.Tensor
    # [num_reqs, max_blocks] int32; entries past a request's last block may be anything. All others
    # are blocks of the cache; those before a window may be stale, they are not read.
    block_table: torch.Tensor
    # [num_tokens] int64: block_id * block_size + offset; -1 means the token is padding and is not
    # written.
    slot_mapping: torch.Tensor
    # Host copies, so that no kernel wrapper has to synchronise with the device.
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]
    num_decodes: int
    memo: StepMemo = field(default_factory=StepMemo, init=False, repr=False, compare=False)

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens_host)

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens_host)
