"""What the draft model has the KV of, against a memory of what was written where."""

import random

import numpy as np
import pytest

from pdserve_engine.runner.draft.draft_kv import DraftKV, Progress
from support.samples import seeds

BLOCK_SIZE = 4
NUM_BLOCKS = 12


class Sequence:
    """A request that owns blocks, some of them together with others."""

    def __init__(self, token_ids: list[int], block_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.block_ids = block_ids
        self.progress = Progress()


class Memory:
    """Each slot has the tokens up to and with its own, as whoever wrote it last saw them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kv = DraftKV(NUM_BLOCKS, BLOCK_SIZE)
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.num_saved = 0

    def content(self, sequence: Sequence, position: int) -> tuple[int, ...] | None:
        block, offset = divmod(position, BLOCK_SIZE)
        return self.slots.get((sequence.block_ids[block], offset))

    def write(self, sequence: Sequence, token_ids: list[int], start: int, end: int) -> None:
        for position in range(start, min(end, len(sequence.block_ids) * BLOCK_SIZE)):
            block, offset = divmod(position, BLOCK_SIZE)
            key = sequence.block_ids[block], offset
            self.slots[key] = tuple(token_ids[: position + 1])

    def compute(self, sequence: Sequence, num_drafts: int) -> None:
        """Catch up, check what is said to be there, compute some of the rest, and drafts."""
        token_ids = np.array(sequence.token_ids, dtype=np.int64)
        block_ids = np.array(sequence.block_ids, dtype=np.int32)
        self.kv.catch_up(sequence.progress, token_ids, block_ids)
        start = sequence.progress.num_computed_tokens
        assert start <= len(token_ids)
        for position in range(start):
            assert self.content(sequence, position) == tuple(sequence.token_ids[: position + 1])
        self.num_saved += start
        num_slots = len(block_ids) * BLOCK_SIZE
        end = self.random.choice([len(token_ids), self.random.randint(start, len(token_ids))])
        if end < len(token_ids):
            end, num_drafts = max(start, min(end, num_slots)), 0
        drafts = [self.random.randrange(2) for _ in range(num_drafts)]
        self.write(sequence, sequence.token_ids[:end] + drafts, start, end + num_drafts)
        self.kv.store(sequence.progress, block_ids, end, drafts)


@pytest.mark.parametrize("seed", seeds(40))
def test_what_is_said_to_be_there_is_there(seed: int) -> None:
    memory = Memory(seed)
    rng = memory.random
    sequences: list[Sequence] = []
    for _ in range(300):
        event = rng.random()
        held = {block_id for each in sequences for block_id in each.block_ids}
        free = sorted(set(range(NUM_BLOCKS)) - held)
        if event < 0.2 and len(free) >= 2:
            # Two tokens in all: prompts are often alike. A prefix may be shared.
            source = rng.choice([*sequences, None])
            shared = 0
            if source is not None:
                shared = rng.randrange(min(len(source.block_ids), len(source.token_ids) // 4) + 1)
            prefix = source.token_ids[: shared * BLOCK_SIZE] if source is not None else []
            prompt = prefix + [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
            num_blocks = -(-len(prompt) // BLOCK_SIZE) - shared
            own = rng.sample(free, num_blocks)
            blocks = (source.block_ids[:shared] if source is not None else []) + own
            sequences.append(Sequence(prompt, blocks))
        elif event < 0.3 and sequences:
            sequences.remove(rng.choice(sequences))
        elif event < 0.33:
            memory.slots.clear()
            memory.kv.forget()
            for sequence in sequences:
                sequence.progress = Progress()
        elif sequences:
            sequence = rng.choice(sequences)
            # At most one token is behind its blocks.
            room = len(sequence.block_ids) * BLOCK_SIZE + 1 - len(sequence.token_ids)
            if room <= 0 and free:
                sequence.block_ids.append(rng.choice(free))
                room += BLOCK_SIZE
            num_new = min(room, rng.randrange(4))
            sequence.token_ids += [rng.randrange(2) for _ in range(num_new)]
            memory.compute(sequence, rng.randrange(4))
    assert memory.num_saved > 100


def test_accepted_drafts_count_up_to_the_first_that_is_refused() -> None:
    kv, progress = DraftKV(4, BLOCK_SIZE), Progress()
    block_ids = np.array([2, 0, 1], dtype=np.int32)
    kv.catch_up(progress, np.array([5, 6, 7]), block_ids)
    kv.store(progress, block_ids, 3, (8, 9, 10))
    kv.catch_up(progress, np.array([5, 6, 7, 8, 9, 11, 12]), block_ids)
    assert progress.num_computed_tokens == 5
    # What comes again finds the block that its drafts have completed once it was stored.
    kv.store(progress, block_ids, 7, ())
    again = Progress()
    kv.catch_up(again, np.array([5, 6, 7, 8, 1, 1]), np.array([2, 3], dtype=np.int32))
    assert again.num_computed_tokens == 4


def test_drafts_behind_the_last_block_are_not_kept() -> None:
    kv, progress = DraftKV(4, BLOCK_SIZE), Progress()
    block_ids = np.array([2], dtype=np.int32)
    kv.catch_up(progress, np.arange(5), block_ids)
    kv.store(progress, block_ids, 5, (8, 9))
    assert progress.num_computed_tokens == 4
    kv.catch_up(progress, np.array([0, 1, 2, 3, 4, 8, 9]), np.array([2, 1], dtype=np.int32))
    assert progress.num_computed_tokens == 4
