import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_common.types.kv import KVCacheEvents
from pdserve_engine.kv.block_pool import BlockPool
from support.scripted_engine import apply_events, cached_in


def block_hash(value: int) -> bytes:
    return value.to_bytes(8, "little") + bytes(24)


def test_takes_the_least_recently_freed_block_first() -> None:
    pool = BlockPool(4, enable_caching=True)
    blocks = pool.get_new_blocks(4)
    for index, block in enumerate(blocks):
        pool.cache_block(block, bytes([index]))
    pool.free_blocks([blocks[2]])
    pool.free_blocks([blocks[0]])
    assert [block.block_id for block in pool.get_new_blocks(2)] == [2, 0]


def test_reuses_blocks_without_a_hash_before_cached_ones() -> None:
    pool = BlockPool(2, enable_caching=True)
    cached, plain = pool.get_new_blocks(2)
    pool.cache_block(cached, b"h")
    pool.free_blocks([cached])
    pool.free_blocks([plain])
    assert pool.get_new_blocks(1) == [plain]
    assert pool.get_cached_block(b"h") is cached


def test_freeing_twice_is_a_programming_error() -> None:
    pool = BlockPool(1, enable_caching=True)
    (block,) = pool.get_new_blocks(1)
    pool.free_blocks([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free_blocks([block])


def test_blocks_are_dead_once_nobody_can_ask_for_their_content() -> None:
    dead: list[list[int]] = []
    pool = BlockPool(3, enable_caching=True, on_dead=lambda ids: dead.append(list(ids)))
    blocks = pool.get_new_blocks(3)
    pool.cache_block(blocks[0], b"h")
    pool.touch([blocks[0]])
    pool.free_blocks(blocks)
    assert dead == [[1, 2]], "the first is held and cached"
    pool.free_blocks([blocks[0]])
    assert dead == [[1, 2]], "the first is cached"
    pool.get_new_blocks(3)
    assert dead == [[1, 2], [0]], "evicted; the others had died before"
    pool.free_blocks(blocks[1:])
    pool.cache_block(blocks[0], b"g")
    pool.free_blocks(blocks[:1])
    assert pool.reset_prefix_cache()
    assert dead == [[1, 2], [0], [1, 2], [0]]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["take", "free", "cache", "touch", "forget", "reset", "listen", "tell"]
            ),
            st.integers(0, 30),
        ),
        max_size=60,
    )
)
def test_any_sequence_of_operations_keeps_the_pool_consistent(
    operations: list[tuple[str, int]],
) -> None:
    pool = BlockPool(8, enable_caching=True)
    held = []
    said: set[int] = set()
    is_heard = False

    def tell() -> None:
        events = pool.take_events()
        assert events is None or is_heard
        apply_events(said, events or KVCacheEvents())

    for operation, value in operations:
        if operation == "take" and value % 4 <= pool.num_free_blocks:
            held.extend(pool.get_new_blocks(value % 4))
        elif operation == "free" and held:
            pool.free_blocks([held.pop(value % len(held))])
        elif operation == "cache" and held:
            pool.cache_block(held[value % len(held)], block_hash(value))
        elif operation == "touch":
            block = pool.get_cached_block(block_hash(value))
            if block is not None:
                pool.touch([block])
                held.append(block)
        elif operation == "reset":
            assert pool.reset_prefix_cache() == (not held)
        elif operation == "forget":
            pool.forget([block_hash(value), block_hash(value + 1)])
        elif operation == "listen":
            pool.record_events()
            is_heard = True
        elif operation == "tell":
            tell()
            assert said == (cached_in(pool) if is_heard else set())
        pool.check_integrity()
        assert pool.num_free_blocks == 8 - len({block.block_id for block in held})


def test_blocks_that_are_held_are_not_counted_as_cached_ones_to_take_back() -> None:
    pool = BlockPool(4, enable_caching=True)
    (block,) = pool.get_new_blocks(1)
    pool.cache_block(block, b"a")
    assert (pool.num_cached_blocks, pool.num_free_cached_blocks) == (1, 0)
    pool.free_blocks([block])
    assert (pool.num_free_blocks, pool.num_free_cached_blocks) == (4, 1)


def test_events_name_a_block_once_for_all_groups_and_none_that_came_and_went() -> None:
    pool = BlockPool(4, enable_caching=True)
    pool.record_events()
    assert pool.take_events() == KVCacheEvents(all_blocks_cleared=True)
    first, second, third = pool.get_new_blocks(3)
    pool.cache_block(first, block_hash(1))
    pool.cache_block(second, block_hash(1) + b"\0\1")
    pool.cache_block(third, block_hash(2))
    pool.forget([block_hash(2)])
    assert pool.take_events() == KVCacheEvents(blocks_stored=(1,), blocks_removed=(2,))
    assert pool.take_events() is None
