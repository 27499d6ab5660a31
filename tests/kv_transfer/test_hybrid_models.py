"""The handoff of a model with sliding windows, between the block managers of P and D: of a sliding
group only what the token after the prompt sees is handed over.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pdserve_engine.kv.block_pool import NULL_BLOCK_ID, BlockPool
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv.kv_groups import group_layers
from pdserve_engine.kv_transfer.ports import PullFinished, PullLost, StartAllowed
from pdserve_engine.request.request import Request, RequestStatus
from support.handoff import NUM_BLOCKS, SPEC, Pair

BLOCK_SIZE = 16
WINDOW = 20
CHUNK = 30


class ManagedBlocks:
    """What a worker's scheduler does with its blocks."""

    def __init__(self, windows: Sequence[int | None], num_blocks: int) -> None:
        pool = BlockPool(num_blocks, enable_caching=True)
        self.kv = KVCacheManager(pool, BLOCK_SIZE, windows)

    @property
    def free(self) -> list[int]:
        self.kv.check_integrity()
        return [block.block_id for block in self.kv.block_pool.blocks if block.ref_cnt == 0]

    def give(self, block_ids: Sequence[int]) -> None:
        self.kv.free_block_ids(block_ids)

    def give_all(self, request: Request, kept: frozenset[int]) -> None:
        taken = [block.block_id for block in self.kv.take(request)]
        self.give([block_id for block_id in taken if block_id not in kept])

    def end(self, connector: Any, request: Request, status: RequestStatus) -> frozenset[int]:
        request.status = status
        table = self.kv.get_block_ids(request.request_id)
        kept: frozenset[int] = connector.request_finished(request, table)
        self.give_all(request, kept)
        return kept


class Hybrid:
    """A pair whose model has two full and four sliding layers: one full group, two sliding ones."""

    def __init__(self, kind: str) -> None:
        windows = [WINDOW, WINDOW, None, WINDOW, WINDOW, None]
        spec = replace(SPEC, groups=group_layers(windows))
        self.pair = Pair(kind, spec)
        self.p, self.d = (ManagedBlocks(spec.windows, NUM_BLOCKS) for _ in range(2))
        self.pair.p_blocks, self.pair.d_blocks = self.p, self.d
        self.pair.reserve, self.pair.give_d = self.reserve, self.d.give_all
        self.pair.connect()

    def prefill(self, num_tokens: int, request_id: str = "r0") -> tuple[list[int], ...]:
        """P computes a prompt in chunks; returns its tables, with the blocks that it has given
        back meanwhile.
        """
        request = self.pair.ask(request_id, num_tokens=num_tokens)
        self.pair.wait_for(StartAllowed, request_id)
        assert self.pair.p.on_started(request)
        for end in [*range(CHUNK, num_tokens, CHUNK), num_tokens]:
            assert self.p.kv.allocate_slots(request, end) is not None
            self.p.kv.remove_skipped_blocks(request, end)
            self.pair.p.on_blocks_computed(request, end, self.p.kv.get_block_ids(request_id))
        tables = self.p.kv.get_block_ids(request_id)
        request.append_output_token_ids((77,))
        self.p.end(self.pair.p, request, RequestStatus.FINISHED_LENGTH_CAPPED)
        return tables

    def reserve(self, request: Request) -> bool:
        """D's scheduler answers a claim."""
        num_prompt = request.num_prompt_tokens
        computed, num_hit = self.d.kv.get_computed_blocks(request, num_prompt)
        added = self.d.kv.allocate_slots(
            request, num_prompt, computed, num_remote_tokens=num_prompt
        )
        assert added is not None
        tables = self.d.kv.get_block_ids(request.request_id)
        return bool(self.pair.d.grant(request, tables, num_hit))

    def end_d(self, request: Request) -> frozenset[int]:
        return self.d.end(self.pair.d, request, RequestStatus.FINISHED_ABORTED)


@pytest.fixture
def hybrid(kind: str) -> Iterator[Hybrid]:
    hybrid = Hybrid(kind)
    yield hybrid
    hybrid.pair.close()


def first_visible_block(group: int, num_tokens: int) -> int:
    return max(num_tokens - WINDOW + 1, 0) // BLOCK_SIZE if group else 0


@pytest.mark.parametrize("num_tokens", [1, 16, 20, 35, 36, 100, 128])
def test_what_the_next_token_sees_is_handed_over_and_nothing_else(
    hybrid: Hybrid, num_tokens: int
) -> None:
    pair = hybrid.pair
    request = pair.ticket(num_tokens=num_tokens)
    expected = pair.d_pool.tensor.clone()
    p_tables = hybrid.prefill(num_tokens)
    stats = pair.wait_for(PullFinished).stats
    d_tables = hybrid.d.kv.get_block_ids("r0")
    num_blocks = 0
    for group, (theirs, ours) in enumerate(zip(p_tables, d_tables, strict=True)):
        first = first_visible_block(group, num_tokens)
        assert set(ours[:first]) <= {NULL_BLOCK_ID}
        expected[ours[first:]] = pair.p_pool.tensor[theirs[first:]]
        num_blocks += len(ours) - first
    assert torch.equal(pair.d_pool.tensor, expected)
    assert stats.num_blocks == num_blocks
    assert not hybrid.end_d(request)
    pair.check_baseline()


def test_what_d_has_cached_is_not_pulled_in_any_group(hybrid: Hybrid) -> None:
    pair = hybrid.pair
    cached = pair.request("d", "before", 40)
    assert hybrid.d.kv.allocate_slots(cached, 40) is not None
    hybrid.d.kv.cache_blocks(cached, 40)
    request = pair.ticket(num_tokens=50)  # the token at 50 sees 31 to 50: block 1 on
    before = pair.d_pool.tensor.clone()
    hybrid.prefill(50)
    assert pair.wait_for(PullFinished).stats.num_blocks == 2 + 2 + 2
    tables = hybrid.d.kv.get_block_ids("r0")
    unread = [i for i in range(64) if i not in {i for ids in tables for i in ids[2:]}]
    assert torch.equal(pair.d_pool.tensor[unread], before[unread])
    hybrid.d.kv.free(cached)
    hybrid.end_d(request)
    pair.check_baseline()


def test_blocks_under_a_read_come_back_without_the_null_ones(hybrid: Hybrid) -> None:
    pair = hybrid.pair
    request = pair.ticket(num_tokens=100)
    pair.transport.is_holding = True
    hybrid.prefill(100)
    pair.pump()
    assert NULL_BLOCK_ID in hybrid.d.kv.get_block_ids("r0")[1]
    kept = hybrid.end_d(request)
    assert len(kept) == 7 + 2 * 2, "READs may still write into them"
    pair.collect()
    assert len(hybrid.p.free) == 64, "P does not wait for D"
    assert len(hybrid.d.free) == 64 - len(kept)
    pair.transport.let_go()
    pair.check_baseline()


def test_p_frees_what_is_released_without_the_null_blocks(hybrid: Hybrid) -> None:
    """The first chunks have no blocks of the sliding groups that are read."""
    pair = hybrid.pair
    request = pair.ticket(num_tokens=100)
    pair.transport.is_holding = True
    hybrid.prefill(100)
    pair.pump()
    assert [len(held[1]) for held in pair.transport.held] == [1, 2, 2, 2 + 2 * 2]
    for _ in range(3):
        pair.transport.land()
    pair.collect()
    assert len(hybrid.p.free) == 64 - 2 - 2 * 2
    pair.transport.land()
    pair.wait_for(PullFinished)
    hybrid.end_d(request)
    pair.check_baseline()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ids: ids[:2], "announced 2 KV groups, the layout has 3"),
        (lambda ids: (*ids, ids[0]), "announced 4 KV groups, the layout has 3"),
        (lambda ids: (ids[0], ids[1][1:], ids[2]), "unequal numbers of them"),
        (lambda ids: (ids[0], ids[1], (*ids[2][:-1], 64)), "block id 64 of a pool of 64"),
    ],
)
def test_an_announcement_that_does_not_fit_the_groups_loses_the_pull(
    hybrid: Hybrid, change: Any, says: str
) -> None:
    pair = hybrid.pair
    request = pair.ticket(num_tokens=100)
    hybrid.prefill(100)
    ready = pair.to_d.messages.popleft()
    pair.d.on_message(pair.d_link, replace(ready, block_ids=change(ready.block_ids)))
    lost = pair.wait_for(PullLost).lost
    assert lost.reason == "protocol"
    assert says in lost.message
    hybrid.end_d(request)
    pair.check_baseline()
