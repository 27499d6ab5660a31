"""The router's index of cached blocks, against sets of blocks."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.prefix_index import PrefixIndexMetrics
from pdserve_common.runtime import Runtime
from pdserve_common.tokens.block_hash import ROOT_HASH, hash_block, truncated_hashes
from pdserve_common.types.engine import EngineCoreRequest, Generate, MultiModalFeatureSpec
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.workers.routing.prefix_index import MAX_LOOKED_AT, PrefixIndex, prefix_hashes
from support.metrics import value
from support.prefix_lengths import num_cached

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
    index = PrefixIndex[str](runtime=Runtime(), num_shards=4)
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
            assert num_cached(index, each) == found
            assert num_cached(index, each[:5]) == {w: min(5, num) for w, num in found.items()}


@settings(max_examples=100, deadline=None)
@given(operations=operations)
def test_of_holes_it_says_at_most_what_is_behind_them(
    operations: list[tuple[str, str, list[int], int]],
) -> None:
    """A worker has the first block and the last of those that are counted, and lacks the next."""
    index = PrefixIndex[str](runtime=Runtime(), num_shards=4)
    blocks: set[int] = set()
    for name, _, chain, length in operations:
        some = chain[length : length + 3]
        (index.stored if name == "stored" else index.removed)("a", some)
        (blocks.update if name == "stored" else blocks.difference_update)(some)
    for chain in CHAINS:
        num = num_cached(index, chain).get("a", 0)
        if chain[0] not in blocks:
            assert num == 0
        else:
            assert chain[num - 1] in blocks
            assert num == len(chain) or chain[num] not in blocks


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), max_size=20),
    refused=st.sets(st.integers(0, 19)),
    num=st.integers(1, 5),
    above=st.integers(0, 12),
    is_asked_first=st.booleans(),
)
def test_the_longest_of_a_role_are_found(
    lengths: list[int], refused: set[int], num: int, above: int, is_asked_first: bool
) -> None:
    """Workers are numbers; the even ones are of one role, the odd ones of the other."""
    index = PrefixIndex[int](runtime=Runtime(), role_of=lambda worker: worker % 2, num_shards=4)
    for worker, length in enumerate(lengths):
        index.stored(worker, CHAINS[0][:length])
    match = index.match(CHAINS[0], 16)
    if is_asked_first:
        assert [match.num_tokens(worker) for worker in range(len(lengths))] == [
            16 * length for length in lengths
        ]
    for role in (0, 1):
        found = match.longest(role, num, lambda one: one not in refused, above=16 * above)
        allowed = set(range(role, len(lengths), 2)) - refused
        assert set(found) <= allowed
        assert len(set(found)) == len(found)
        longer = sorted((n for w in allowed if (n := lengths[w]) > above), reverse=True)
        assert [lengths[worker] for worker in found] == longer[:num]
    assert [match.num_tokens(worker) for worker in range(len(lengths))] == [
        16 * length for length in lengths
    ]


def test_of_equal_ones_any_is_found() -> None:
    index = PrefixIndex[int](runtime=Runtime())
    for worker in range(40):
        index.stored(worker, CHAINS[0][: 3 if worker % 4 else 2])
    match = index.match(CHAINS[0])
    found = Counter(
        worker for _ in range(600) for worker in match.longest(None, 2, lambda worker: True)
    )
    assert set(found) == {worker for worker in range(40) if worker % 4}
    assert max(found.values()) < 120, "40 each"


def test_a_search_gives_up_where_nobody_is_accepted() -> None:
    index = PrefixIndex[int](runtime=Runtime())
    for worker in range(3 * MAX_LOOKED_AT):
        index.stored(worker, CHAINS[0])
    asked: list[int] = []

    def refuses(worker: int) -> bool:
        asked.append(worker)
        return False

    assert index.match(CHAINS[0]).longest(None, 1, refuses) == []
    assert len(asked) == MAX_LOOKED_AT


def test_what_was_forgotten_is_gone_when_its_bit_is_anothers() -> None:
    index = PrefixIndex[int](runtime=Runtime(), num_shards=4)
    for worker in range(200):
        index.stored(worker, CHAINS[0][: 1 + worker % 12])
        assert num_cached(index, CHAINS[0]) == {worker: 1 + worker % 12}
        index.forget(worker)
    assert num_cached(index, CHAINS[0]) == {}
    index.stored(-1, [])
    assert index.bit(-1).bit_length() <= 12, "bits are used again"
    for _ in range(12):
        index.stored(-1, [])
    assert len(index) == 0


def test_a_call_that_forgets_looks_at_no_block() -> None:
    index = PrefixIndex[int](runtime=Runtime(), num_shards=1024)
    index.stored(0, range(20_000))
    index.forget(0)
    assert len(index) == 20_000, "their masks are swept later"
    assert num_cached(index, [0]) == {}
    for _ in range(1025):
        before = len(index)
        index.stored(1, [])
        assert before - len(index) <= 20, "a shard at a time"
    assert len(index) == 0


def test_of_too_many_blocks_those_go_that_were_stored_longest_ago() -> None:
    metrics = PrefixIndexMetrics(CollectorRegistry())
    index = PrefixIndex[str](runtime=Runtime(), max_blocks=8, num_shards=2, metrics=metrics)
    index.stored("a", range(8))
    index.stored("b", [0, 1])
    index.stored("a", [8, 9])
    assert len(index) == 8
    assert value(metrics.evictions) == 2
    kept = [n for n in range(10) if num_cached(index, [n])]
    assert kept == [0, 1, *range(4, 10)]


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_hashes_of_a_request_are_the_engine_s(salt: str | None) -> None:
    request = EngineCoreRequest(
        request_id="a",
        prompt_token_ids=(1, 2, 3, 4, 5),
        resume_output_token_ids=(6, 7),
        task=Generate(SamplingParams()),
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
