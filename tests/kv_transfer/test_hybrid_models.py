"""The handoff of a model with sliding windows, between the block managers of P and D: of a sliding
group only what the token after the prompt sees is handed over.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve_common.engine_types import ErrorCode
from pdserve_common.kv_types import BlocksReady, Release
from pdserve_engine.core.block_pool import NULL_BLOCK_ID, BlockPool
from pdserve_engine.core.kv_cache_manager import KVCacheManager
from pdserve_engine.core.request import Request, RequestStatus
from pdserve_engine.kv_groups import group_layers

pytestmark = pytest.mark.slow

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

    def end(self, connector: Any, request: Request, status: RequestStatus) -> bool:
        request.status = status
        is_kept = connector.request_finished(request, self.kv.get_block_ids(request.request_id))
        if is_kept:
            self.kv.take(request)
        else:
            self.kv.free(request)
        return bool(is_kept)


class Hybrid:
    """A pair whose model has two full and four sliding layers: one full group, two sliding ones."""

    def __init__(self, kind: str, kit: SimpleNamespace) -> None:
        windows = [WINDOW, WINDOW, None, WINDOW, WINDOW, None]
        spec = replace(kit.SPEC, groups=group_layers(windows))
        self.pair = kit.Pair(kind, spec)
        self.p, self.d = (ManagedBlocks(spec.windows, kit.NUM_BLOCKS) for _ in range(2))
        self.pair.p_blocks, self.pair.d_blocks = self.p, self.d
        self.pair.connect()

    def prefill(self, num_tokens: int, request_id: str = "r0") -> tuple[list[int], ...]:
        """P computes a prompt in chunks; returns its tables."""
        request = self.pair.request("p", request_id, num_tokens)
        self.pair.p.on_new_request(request)
        for end in [*range(CHUNK, num_tokens, CHUNK), num_tokens]:
            assert self.p.kv.allocate_slots(request, end) is not None
            self.p.kv.remove_skipped_blocks(request, end)
        tables = self.p.kv.get_block_ids(request_id)
        request.append_output_token_ids((77,))
        assert self.p.end(self.pair.p, request, RequestStatus.FINISHED_LENGTH_CAPPED)
        return tables

    def load(self, request: Request) -> tuple[list[int], ...]:
        """D allocates and starts the pull; returns its tables."""
        num_prompt = request.num_prompt_tokens
        computed, num_hit = self.d.kv.get_computed_blocks(request, num_prompt)
        num_external, _ = self.pair.d.get_num_new_matched_tokens(request, num_hit)
        added = self.d.kv.allocate_slots(
            request, num_prompt, computed, num_remote_tokens=num_prompt
        )
        assert added is not None
        self.pair.d.update_state_after_alloc(request, added, num_external)
        self.pair.d.start_load_kv(self.pair.d.build_connector_meta())
        return added

    def end_d(self, request: Request) -> bool:
        return self.d.end(self.pair.d, request, RequestStatus.FINISHED_ABORTED)


@pytest.fixture
def hybrid(kind: str, kit: SimpleNamespace) -> Iterator[Hybrid]:
    hybrid = Hybrid(kind, kit)
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
    p_tables = hybrid.prefill(num_tokens)
    pair.pump()
    expected = pair.d_pool.tensor.clone()
    d_tables = hybrid.load(request)
    stats = pair.finish().finished_recving["r0"]
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
    hybrid.prefill(50)
    pair.pump()
    before = pair.d_pool.tensor.clone()
    tables = hybrid.load(request)
    assert pair.finish().finished_recving["r0"].num_blocks == 2 + 2 + 2
    unread = [i for i in range(64) if i not in {i for ids in tables for i in ids[2:]}]
    assert torch.equal(pair.d_pool.tensor[unread], before[unread])
    hybrid.d.kv.free(cached)
    hybrid.end_d(request)
    pair.check_baseline()


def test_blocks_under_a_read_come_back_without_the_null_ones(hybrid: Hybrid) -> None:
    pair = hybrid.pair
    request = pair.ticket(num_tokens=100)
    hybrid.prefill(100)
    pair.pump()
    pair.transport.is_holding = True
    tables = hybrid.load(request)
    assert NULL_BLOCK_ID in tables[1]
    assert hybrid.end_d(request), "a READ may still write into them"
    pair.pump()
    pair.collect()
    assert len(hybrid.p.free) == 64, "P does not wait for D"
    assert len(hybrid.d.free) == 64 - 7 - 2 * 2
    pair.transport.let_go()
    pair.check_baseline()


def test_p_frees_an_early_release_without_the_null_blocks(hybrid: Hybrid) -> None:
    pair = hybrid.pair
    request = pair.ticket(num_tokens=100)
    hybrid.prefill(100)
    ready = pair.to_d.messages[0]
    pair.pump()
    pair.p.on_message(pair.p_link, Release(session=ready.session, through_block=6))
    pair.collect()
    assert len(hybrid.p.free) == 64 - 3, "of the last logical block there is one per group"
    pair.to_d.messages.clear()
    hybrid.end_d(request)
    pair.check_baseline()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ids: ids[:2], "announces 2 KV groups, the layout has 3"),
        (lambda ids: (*ids, ids[0]), "announces 4 KV groups, the layout has 3"),
        (lambda ids: (ids[0], ids[1][1:], ids[2]), "unequal numbers of blocks"),
        (lambda ids: (ids[0], ids[1], (*ids[2][:-1], 64)), "block 64 of a pool of 64"),
        (lambda ids: tuple(group[:-1] for group in ids), "announced 6 blocks for 100 tokens"),
    ],
)
def test_an_announcement_that_does_not_fit_the_groups_fails_the_request(
    hybrid: Hybrid, change: Any, says: str
) -> None:
    pair = hybrid.pair
    request = pair.ticket(num_tokens=100)
    hybrid.prefill(100)
    ready, done = pair.to_d.messages
    assert isinstance(ready, BlocksReady)
    pair.to_d.messages.clear()
    pair.d.on_message(pair.d_link, replace(ready, block_ids=change(ready.block_ids)))
    pair.d.on_message(pair.d_link, done)
    error = pair.finish().failed_recving["r0"]
    assert error.code is ErrorCode.KV_TRANSFER_FAILED
    assert says in error.message
    hybrid.end_d(request)
    pair.check_baseline()
