"""The router's index of cached blocks, against sets of blocks."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pdserve_common.block_hash import ROOT_HASH, hash_block, truncated_hashes
from pdserve_common.engine_types import (
    EngineCoreRequest,
    MultiModalFeatureSpec,
    SamplingParams,
)
from pdserve_common.prefix_index_metrics import PrefixIndexMetrics
from pdserve_router.workers.prefix_index import PrefixIndex, prefix_hashes

WORKERS = ("a", "b", "c", "d")
CHAINS = [[random.Random(n).getrandbits(64) for n in range(k, k + 12)] for k in (0, 100, 200)]

lengths = st.dictionaries(st.sampled_from(WORKERS), st.integers(0, 12), min_size=1)
operations = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "cleared", "forget"]),
        st.sampled_from(WORKERS),
        st.sampled_from(CHAINS),
        st.integers(0, 12),
    ),
    max_size=60,
)


def num_leading(chain: Sequence[int], blocks: set[int]) -> int:
    return next((n for n, block in enumerate(chain) if block not in blocks), len(chain))


@settings(max_examples=200, deadline=None)
@given(operations=operations)
def test_it_says_what_pools_have_that_evict_chains_from_their_end(
    operations: list[tuple[str, str, list[int], int]],
) -> None:
    index = PrefixIndex[str](num_shards=4)
    pools: dict[str, set[int]] = {worker: set() for worker in WORKERS}
    for name, worker, chain, length in operations:
        blocks = chain[:length] if name == "stored" else chain[length:]
        if name == "stored":
            pools[worker].update(blocks)
        elif name == "removed":
            pools[worker].difference_update(blocks)
        else:
            pools[worker].clear()
        getattr(index, name)(worker, *([blocks] if name in ("stored", "removed") else []))
        for each in CHAINS:
            expected = {worker: num_leading(each, pool) for worker, pool in pools.items()}
            found = {worker: num for worker, num in expected.items() if num}
            assert index.num_cached(each) == found
            assert index.num_cached(each[:5]) == {w: min(5, num) for w, num in found.items()}


@settings(max_examples=100, deadline=None)
@given(operations=operations)
def test_of_holes_it_says_at_most_what_is_behind_them(
    operations: list[tuple[str, str, list[int], int]],
) -> None:
    """A worker has the first block and the last of those that are counted, and lacks the next."""
    index = PrefixIndex[str](num_shards=4)
    blocks: set[int] = set()
    for name, _, chain, length in operations:
        some = chain[length : length + 3]
        (index.stored if name == "stored" else index.removed)("a", some)
        (blocks.update if name == "stored" else blocks.difference_update)(some)
    for chain in CHAINS:
        num = index.num_cached(chain).get("a", 0)
        if chain[0] not in blocks:
            assert num == 0
        else:
            assert chain[num - 1] in blocks
            assert num == len(chain) or chain[num] not in blocks


def test_what_was_forgotten_is_gone_when_its_bit_is_anothers() -> None:
    index = PrefixIndex[int](num_shards=4)
    for worker in range(200):
        index.stored(worker, CHAINS[0][: 1 + worker % 12])
        assert index.num_cached(CHAINS[0]) == {worker: 1 + worker % 12}
        index.forget(worker)
    assert index.num_cached(CHAINS[0]) == {}
    index.stored(-1, [])
    masks = index._live.bit_length()
    assert masks <= 12, "bits are used again"
    for _ in range(12):
        index.stored(-1, [])
    assert len(index) == 0


def test_a_call_that_forgets_looks_at_no_block() -> None:
    index = PrefixIndex[int](num_shards=1024)
    index.stored(0, range(20_000))
    index.forget(0)
    assert len(index) == 20_000, "their masks are swept later"
    assert index.num_cached([0]) == {}
    for _ in range(1025):
        before = len(index)
        index.stored(1, [])
        assert before - len(index) <= 20, "a shard at a time"
    assert len(index) == 0


def test_of_too_many_blocks_those_go_that_were_stored_longest_ago() -> None:
    metrics = PrefixIndexMetrics(CollectorRegistry())
    index = PrefixIndex[str](max_blocks=8, num_shards=2, metrics=metrics)
    index.stored("a", range(8))
    index.stored("b", [0, 1])
    index.stored("a", [8, 9])
    assert len(index) == 8
    assert metrics.evictions._value.get() == 2
    assert [bool(index.num_cached([n])) for n in range(10)] == [True] * 2 + [False] * 2 + [True] * 6


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_hashes_of_a_request_are_the_engine_s(salt: str | None) -> None:
    request = EngineCoreRequest(
        request_id="a",
        prompt_token_ids=(1, 2, 3, 4, 5),
        resume_output_token_ids=(6, 7),
        sampling_params=SamplingParams(),
        cache_salt=salt,
        mm_features=(
            MultiModalFeatureSpec(modality="image", identifier="x", position=3, length=2),
        ),
    )
    parent, expected = ROOT_HASH, []
    for block in range(3):
        tokens = b"".join(n.to_bytes(4, "little") for n in (2 * block + 1, 2 * block + 2))
        keys = [("salt", salt)] if salt and block == 0 else []
        if block > 0:
            position = 2 * block
            keys = [("feature", "image", "x", 2, position - 3)]
        parent = hash_block(parent, tokens, keys)
        expected.append(parent)
    assert prefix_hashes(request, 2) == truncated_hashes(expected)
