"""KVCacheManager alone: what each verb does to block tables and pool, with and without sliding
groups, and a random walk in which every token must find in memory what it sees.
"""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_common.types.lora import LoRARequest
from pdserve_engine.kv.block_pool import NULL_BLOCK, NULL_BLOCK_ID, BlockPool
from pdserve_engine.kv.kv_cache_manager import ComputedBlocks, KVCacheManager
from pdserve_engine.request.request import Request
from support.requests import held_request

BLOCK_SIZE = 4
NULL = NULL_BLOCK_ID
Windows = tuple[int | None, ...]
FULL: Windows = (None,)
# What group_layers makes of layers with windows [8, 8, 8, None].
HYBRID: Windows = (None, 8, 8, 8)


def make_manager(
    windows: Windows, num_blocks: int = 64, *, enable_caching: bool = True, **options: int
) -> KVCacheManager:
    pool = BlockPool(num_blocks, enable_caching=enable_caching)
    return KVCacheManager(pool, BLOCK_SIZE, windows, **options)


def run(manager: KVCacheManager, request: Request, num_tokens: int) -> None:
    """Compute the request's first `num_tokens` tokens in one step."""
    assert manager.allocate_slots(request, num_tokens) is not None
    manager.cache_blocks(request, num_tokens)
    manager.remove_skipped_blocks(request, num_tokens)


def is_null(block_ids: tuple[list[int], ...]) -> list[str]:
    """Show tables as strings: 'x' for a block, '.' for a null one."""
    return ["".join(".x"[block_id != NULL] for block_id in ids) for ids in block_ids]


def test_allocation_that_does_not_fit_changes_nothing() -> None:
    manager = make_manager(HYBRID, num_blocks=9)
    request = held_request("a", list(range(20)))
    assert manager.allocate_slots(request, 9) is None
    assert manager.num_blocks_of("a") == 0
    assert manager.allocate_slots(request, 8) is not None
    before = manager.get_block_ids("a")
    assert manager.allocate_slots(request, 9) is None
    assert manager.get_block_ids("a") == before
    assert manager.block_pool.num_free_blocks == 1
    manager.check_integrity()


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 30])
@pytest.mark.parametrize("step", [1, 3, 10])
def test_a_pool_of_the_blocks_needed_is_enough_and_hardly_more(window: int, step: int) -> None:
    windows = (None, window, window)
    for num_tokens in (9, 40, 57):
        needed = make_manager(windows, max_tokens_in_flight=step).num_blocks_needed(num_tokens)
        peak = 0
        for start in range(1, step + 1):  # steps may begin anywhere in a block
            manager = make_manager(windows, needed, max_tokens_in_flight=step)
            request = held_request("a", list(range(num_tokens)))
            assert manager.can_allocate(num_tokens)
            assert not manager.can_allocate(num_tokens, num_spare=1)
            for end in [*range(start, num_tokens, step), num_tokens]:
                assert manager.allocate_slots(request, end) is not None
                peak = max(peak, manager.num_blocks_of("a"))
                manager.remove_skipped_blocks(request, end)
        assert needed - peak <= 2, "at most a block per sliding group, for steps cut otherwise"


def test_without_sliding_groups_a_request_needs_its_tokens_blocks() -> None:
    manager = make_manager(FULL, max_tokens_in_flight=4)
    assert [manager.num_blocks_needed(n) for n in (1, 4, 5, 400)] == [1, 1, 2, 100]


def test_a_request_fits_if_its_cached_blocks_are_counted_once() -> None:
    manager = make_manager(FULL, num_blocks=4)
    donor = held_request("donor", list(range(8)))
    run(manager, donor, 8)
    request = held_request("a", [*range(8), 100, 101, 102])
    computed, num_hit = manager.get_computed_blocks(request, 10)
    assert num_hit == 8
    assert manager.can_allocate(16, computed), "two are held by the donor"
    assert not manager.can_allocate(17, computed)
    assert not manager.can_allocate(16, computed, num_spare=1)
    manager.free(donor)
    assert manager.can_allocate(16, computed), "the two are free now, and count as used"
    assert not manager.can_allocate(17, computed)


def test_a_salt_cannot_be_taken_for_another_salt_and_adapter() -> None:
    manager = make_manager(FULL)

    def make(salt: str, adapter: str) -> Request:
        lora = LoRARequest(lora_name="a", digest=adapter)
        return held_request("a", list(range(12)), cache_salt=salt, lora_request=lora)

    run(manager, make("a\0b", "c"), 12)
    assert manager.get_computed_blocks(make("a\0b", "c"), 11)[1] == 8
    assert manager.get_computed_blocks(make("a", "b\0c"), 11)[1] == 0


def test_a_hit_takes_over_only_what_sliding_groups_see() -> None:
    manager = make_manager(HYBRID)
    donor = held_request("donor", list(range(32)))
    run(manager, donor, 32)
    manager.free(donor)
    request = held_request("a", [*range(24), 100, 101])
    computed, num_hit = manager.get_computed_blocks(request, 25)
    assert num_hit == 24
    # The token at 24 sees 17 to 24.
    assert [sum(b is not NULL_BLOCK for b in blocks) for blocks in computed] == [6, 2, 2, 2]
    assert manager.allocate_slots(request, 26, computed) is not None
    assert is_null(manager.get_block_ids("a")) == ["xxxxxxx", "....xxx", "....xxx", "....xxx"]
    assert manager.num_blocks_of("a") == 7 + 9
    manager.check_integrity()


def test_a_hole_in_a_sliding_group_shortens_the_prefix_to_where_nobody_sees_it() -> None:
    manager = make_manager((None, 8), num_blocks=16)
    donor = held_request("donor", list(range(32)))
    assert manager.allocate_slots(donor, 32) is not None
    manager.cache_blocks(donor, 32)
    hole = manager.block_pool.blocks[manager.get_block_ids("donor")[1][5]]
    manager.free(donor)
    manager.block_pool.touch([block for block in manager.block_pool.blocks if block is not hole])
    manager.block_pool.get_new_blocks(1)  # takes the only free one
    same = held_request("a", list(range(32)))
    # A prefix of 8 blocks needs block 6 on, those of 7 and 6 need block 5.
    assert manager.get_computed_blocks(same, 32)[1] == 32
    assert manager.get_computed_blocks(same, 31)[1] == 20
    assert manager.get_computed_blocks(same, 24)[1] == 20


def test_tokens_from_a_remote_worker_get_blocks_only_where_the_next_token_sees_them() -> None:
    manager = make_manager(HYBRID, num_blocks=10 + 3 * 3)
    request = held_request("a", list(range(38)))
    added = manager.allocate_slots(request, 38, num_remote_tokens=38)
    assert added == manager.get_block_ids("a")
    # The token at 38 sees 31 to 38.
    assert is_null(added) == ["x" * 10] + ["." * 7 + "xxx"] * 3
    assert manager.num_blocks_of("a") == 19
    manager.cache_blocks(request, 38)
    manager.check_integrity()
    manager.free(request)
    again = held_request("b", [*range(36), 1, 2, 3])
    computed, num_hit = manager.get_computed_blocks(again, 38)
    assert num_hit == 36
    assert manager.allocate_slots(again, 38, computed, num_remote_tokens=38) is not None
    assert is_null(manager.get_block_ids("b")) == ["x" * 10] + ["." * 7 + "xxx"] * 3
    manager.check_integrity()


@given(st.lists(st.integers(0, 6 * BLOCK_SIZE), max_size=4), st.integers(1, 7 * BLOCK_SIZE))
def test_the_common_prefix_is_what_all_tables_begin_with(lengths: list[int], length: int) -> None:
    """Forks share blocks of their source; none is counted of one request alone."""
    manager = make_manager(FULL)
    requests = [held_request("0", list(range(length)))]
    manager.allocate_slots(requests[0], length)
    for index, num_shared in enumerate(lengths, 1):
        requests.append(held_request(str(index), []))
        if not manager.fork(requests[0], requests[-1], num_shared) or index % 2:
            manager.allocate_slots(requests[-1], num_shared + BLOCK_SIZE)
    tables = [manager.get_block_ids(request.request_id)[0] for request in requests]
    columns = list(zip(*tables, strict=False))
    num_common = next((i for i, ids in enumerate(columns) if len(set(ids)) > 1), len(columns))
    for order in (requests, requests[::-1]):
        assert manager.num_common_prefix_blocks(order) == (num_common if lengths else 0,)


def test_a_fork_caches_what_its_source_has_not() -> None:
    manager = make_manager(HYBRID)
    source, fork = (held_request(name, list(range(30))) for name in "ab")
    assert manager.allocate_slots(source, 30) is not None
    manager.fork(source, fork, 30)
    manager.free(source)
    manager.cache_blocks(fork, 28)
    assert manager.get_computed_blocks(held_request("c", list(range(30))), 29)[1] == 28


def test_a_fork_has_its_sources_blocks_forgotten() -> None:
    manager = make_manager(HYBRID)
    source, fork = (held_request(name, list(range(30))) for name in "ab")
    run(manager, source, 30)
    manager.fork(source, fork, 30)
    manager.forget_blocks(fork)
    assert manager.block_pool.num_cached_blocks == 0
    manager.check_integrity()


def test_integrity_finds_a_table_whose_block_nobody_holds() -> None:
    manager = make_manager(HYBRID)
    request = held_request("a", list(range(30)))
    run(manager, request, 30)
    manager.block_pool.free_blocks([manager.block_pool.blocks[manager.get_block_ids("a")[2][-1]]])
    with pytest.raises(AssertionError, match="more tables than hold them"):
        manager.check_integrity()


def states_of(request: Request) -> list[int]:
    """For each position, what stands for the tokens up to it."""
    return list(accumulate(request.all_token_ids, lambda state, token: hash((state, token))))


class Walk:
    """A manager, and the memory under it: which token of which group lies where."""

    def __init__(self, windows: Windows, num_blocks: int, **options: int) -> None:
        self.windows = windows
        self.manager = make_manager(windows, num_blocks, **options)
        # By block and offset. A token's KV depends on its group and on all tokens up to it.
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}
        self.requests: dict[str, Request] = {}
        self.num_computed: dict[str, int] = {}
        self.num_started = 0

    def visible(self, group: int, position: int) -> range:
        window = self.windows[group]
        return range(max(position - window + 1, 0) if window else 0, position + 1)

    def find_prefix(self, request: Request, limit: int) -> int:
        """The longest prefix that is cached, by the memory's content alone."""
        cached = {
            self.memory[block.block_id, BLOCK_SIZE - 1]
            for block in self.manager.block_pool.blocks
            if block.block_hash is not None
        }
        states = states_of(request)
        for length in range(limit // BLOCK_SIZE, 0, -1):
            position = length * BLOCK_SIZE
            if all(
                (group, states[(index + 1) * BLOCK_SIZE - 1]) in cached
                for group in range(len(self.windows))
                for index in range(self.visible(group, position)[0] // BLOCK_SIZE, length)
            ):
                return position
        return 0

    def start(self, token_ids: list[int]) -> Request:
        request = held_request(f"r{self.num_started}", token_ids)
        self.num_started += 1
        return request

    def admit(self, token_ids: list[int], step: int) -> None:
        request = self.start(token_ids)
        limit = request.num_tokens - 1
        computed, num_hit = self.manager.get_computed_blocks(request, limit)
        assert num_hit == self.find_prefix(request, limit)
        self.keep(request, num_hit, num_hit + step, computed)

    def receive(self, token_ids: list[int]) -> None:
        """As on D: the prompt comes from elsewhere but for what is cached."""
        request = self.start(token_ids)
        num_tokens = request.num_tokens
        computed, num_hit = self.manager.get_computed_blocks(request, num_tokens)
        ids = self.manager.allocate_slots(
            request, num_tokens, computed, num_remote_tokens=num_tokens
        )
        if ids is None:
            return
        for group in range(len(self.windows)):  # whole blocks come
            start = self.visible(group, num_tokens)[0] // BLOCK_SIZE * BLOCK_SIZE
            self.write(request, group, range(max(start, num_hit), num_tokens))
        self.requests[request.request_id] = request
        self.num_computed[request.request_id] = num_tokens
        self.manager.cache_blocks(request, num_tokens)
        request.append_output_token_ids((0,))

    def keep(
        self, request: Request, num_computed: int, target: int, computed: ComputedBlocks = ()
    ) -> None:
        """Compute up to `target` tokens, if there is room; a request without room is dropped."""
        self.requests[request.request_id] = request
        target = min(target, request.num_tokens)
        if self.manager.allocate_slots(request, target, computed) is None:
            self.drop(request.request_id)
        else:
            self.compute(request, num_computed, target)

    def compute(self, request: Request, start: int, end: int) -> None:
        for group in range(len(self.windows)):
            self.write(request, group, range(start, end))
        states = states_of(request)
        for group, table in enumerate(self.manager.get_block_ids(request.request_id)):
            for position in range(start, end):
                for seen in self.visible(group, position):
                    place = table[seen // BLOCK_SIZE], seen % BLOCK_SIZE
                    assert self.memory[place] == (group, states[seen]), (position, seen)
        self.num_computed[request.request_id] = end

    def write(self, request: Request, group: int, positions: range) -> None:
        states = states_of(request)
        table = self.manager.get_block_ids(request.request_id)[group]
        for position in positions:
            block_id = table[position // BLOCK_SIZE]
            assert block_id != NULL, (request.request_id, group, position)
            self.memory[block_id, position % BLOCK_SIZE] = group, states[position]

    def grow(self, request_id: str, step: int) -> None:
        request, num_computed = self.requests[request_id], self.num_computed[request_id]
        if num_computed == request.num_tokens:
            request.append_output_token_ids((step % 2,))
        self.keep(request, num_computed, num_computed + step)

    def fork(self, request_id: str, step: int) -> None:
        source = self.requests[request_id]
        num_computed = self.num_computed[request_id]
        fork = self.start([*source.all_token_ids, step % 2])
        num_shared = self.manager.fork(source, fork, num_computed)
        if set(self.windows) == {None}:
            assert num_shared == num_computed // BLOCK_SIZE * BLOCK_SIZE
        self.keep(fork, num_shared, num_shared + step)

    def drop(self, request_id: str) -> None:
        self.num_computed.pop(request_id, None)
        self.manager.free(self.requests.pop(request_id))

    def hand_off(self, request_id: str) -> None:
        """As on P: somebody else gives the blocks back."""
        tables = self.manager.get_block_ids(request_id)
        self.manager.take(self.requests.pop(request_id))
        del self.num_computed[request_id]
        self.manager.free_block_ids([i for ids in tables for i in ids if i != NULL])

    def check_pool(self) -> None:
        self.manager.check_integrity()
        held = set()
        for request_id in self.requests:
            tables = self.manager.get_block_ids(request_id)
            ids = [i for table in tables for i in table if i != NULL]
            assert self.manager.num_blocks_of(request_id) == len(ids) == len(set(ids))
            held |= set(ids)
        pool = self.manager.block_pool
        assert pool.num_free_blocks == pool.num_blocks - len(held)


OPERATIONS = ["admit", "receive", "grow", "grow", "cache", "skip", "fork", "drop", "hand off"]


@settings(max_examples=100, deadline=None)
@given(
    windows=st.sampled_from([FULL, (6,), (1,), HYBRID, (None, None, 5, 9)]),
    num_blocks=st.integers(6, 60),
    operations=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 30), st.integers(1, 12)), max_size=40
    ),
)
def test_whatever_happens_every_token_finds_what_it_sees(
    windows: Windows, num_blocks: int, operations: list[tuple[str, int, int]]
) -> None:
    walk = Walk(windows, num_blocks)
    for operation, value, step in operations:
        if operation in ("admit", "receive"):
            # Few different prompts, so that prefixes are shared.
            token_ids = [0] * (value % 25 + 1)
            token_ids[value % 7 :: 9] = [1] * len(token_ids[value % 7 :: 9])
            if operation == "admit":
                walk.admit(token_ids, step)
            else:
                walk.receive(token_ids)
        elif walk.requests:
            request_id = sorted(walk.requests)[value % len(walk.requests)]
            request = walk.requests[request_id]
            if operation == "grow":
                walk.grow(request_id, step)
            elif operation == "cache":
                walk.manager.cache_blocks(request, walk.num_computed[request_id])
            elif operation == "skip":
                walk.manager.remove_skipped_blocks(request, walk.num_computed[request_id])
            elif operation == "fork":
                walk.fork(request_id, step)
            elif operation == "drop":
                walk.drop(request_id)
            else:
                walk.hand_off(request_id)
        walk.check_pool()
    for request_id in list(walk.requests):
        walk.drop(request_id)
    walk.check_pool()
