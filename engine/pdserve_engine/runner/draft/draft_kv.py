"""Which tokens the draft model has the KV of: it lies in the pool's blocks, under the same ids, but
nobody else knows of it.

A block's content is what its tokens and all before them say. So each block has a key that is made
of those, whoever computed it, and keeps it until the draft model writes something else into it:
requests that share a prefix, that come back after a preemption or from another worker find what is
there. A mistake costs accepted drafts, never a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdserve_engine.sampling.logits_rows import Rows

BlockIds = npt.NDArray[np.int32]


@dataclass(slots=True)
class Progress:
    """How far the draft model is with a request. A number for each full block of its tokens."""

    num_computed_tokens: int = 0
    keys: list[int] = field(default_factory=list)
    # Leading blocks whose keys the pool knows.
    num_keyed_blocks: int = 0
    # What it computed behind the known tokens, and in blocks of the request's own.
    drafts: tuple[int, ...] = ()


class DraftKV:
    """The keys of a pool's blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._keys: list[int | None] = [None] * num_blocks

    def forget(self) -> None:
        """The pool's content is lost."""
        self._keys = [None] * len(self._keys)

    def catch_up(self, progress: Progress, token_ids: Rows, block_ids: BlockIds) -> None:
        """Count what is there of a request's known tokens, int64 [num_tokens]: drafts that were
        accepted, and blocks that others have computed. block_ids is int32 [num_blocks].
        """
        self._accept_drafts(progress, token_ids)
        self._extend_keys(progress, token_ids)
        num_blocks = min(len(progress.keys), len(block_ids))
        index = progress.num_computed_tokens // self._block_size
        while index < num_blocks and self._keys[block_ids[index]] == progress.keys[index]:
            index += 1
            progress.num_computed_tokens = max(
                progress.num_computed_tokens, index * self._block_size
            )

    def store(
        self, progress: Progress, block_ids: BlockIds, end: int, drafts: Sequence[int] = ()
    ) -> None:
        """The KV of the request's first `end` tokens is there, and that of drafts behind them, as
        far as its blocks, int32 [num_blocks], go.
        """
        num_slots = len(block_ids) * self._block_size
        num_kept = max(0, num_slots - end)
        progress.num_computed_tokens = min(end, num_slots)
        progress.drafts = tuple(drafts[:num_kept])
        written = progress.num_computed_tokens + len(progress.drafts)
        num_full = progress.num_computed_tokens // self._block_size
        for index in range(progress.num_keyed_blocks, -(-written // self._block_size)):
            is_full = index < num_full
            self._keys[block_ids[index]] = progress.keys[index] if is_full else None
        progress.num_keyed_blocks = num_full

    def _accept_drafts(self, progress: Progress, token_ids: Rows) -> None:
        start = progress.num_computed_tokens
        for draft, token_id in zip(progress.drafts, token_ids[start:].tolist(), strict=False):
            if draft != token_id:
                break
            progress.num_computed_tokens += 1
        progress.drafts = ()

    def _extend_keys(self, progress: Progress, token_ids: Rows) -> None:
        keys, size = progress.keys, self._block_size
        for index in range(len(keys), len(token_ids) // size):
            content = token_ids[index * size : (index + 1) * size].tobytes()
            keys.append(hash((keys[-1] if keys else 0, content)))
