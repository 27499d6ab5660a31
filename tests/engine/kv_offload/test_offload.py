"""Schedulers whose blocks go into a tier and come back, with blocks that hold what their hash says
and become something else as soon as they are taken for others.
"""

import random
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.kv_offload import KVOffloadMetrics
from pdserve_common.observability.defects import DEFECTS
from pdserve_engine.kv.block_copier import BlockBytes
from pdserve_engine.kv.block_pool import BlockPool, KVCacheBlock
from pdserve_engine.kv_offload.host_tier import HostTier
from pdserve_engine.kv_offload.offload import KVOffload
from pdserve_engine.request.request import RequestStatus
from support.call_sites import CallSite, call_sites, each_site, fault_at
from support.metrics import value
from support.samples import seeds
from support.scripted_engine import BLOCK_SIZE, Engine, cached_blocks, check_containers, expected
from support.waiting import wait_until

BLOCK_BYTES = 64
# A quarter of them may wait to be copied, and one is being copied.
NUM_BLOCKS = 48
PROMPT = list(range(100, 135))


class Pool:
    """The bytes of an engine's blocks, and a copier that a test can stop."""

    def __init__(self) -> None:
        self.blocks = np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        # Those that a load has filled and nobody has taken since.
        self.loaded: set[int] = set()
        self.may_read, self.may_write = threading.Event(), threading.Event()
        self.may_read.set()
        self.may_write.set()
        self.num_waiting = 0

    def read(self, block_id: int) -> BlockBytes:
        self._wait(self.may_read)
        return self.blocks[block_id].copy()

    def write(self, block_id: int, content: BlockBytes) -> None:
        self._wait(self.may_write)
        self.blocks[block_id] = content
        self.loaded.add(block_id)

    def _wait(self, event: threading.Event) -> None:
        self.num_waiting += 1
        assert event.wait(60)
        self.num_waiting -= 1


class World:
    """An engine with a host tier of `capacity` blocks."""

    def __init__(self, capacity: int = 1000) -> None:
        self.now = 1000.0
        self.bytes = Pool()
        self.offered: set[bytes] = set()
        self.metrics = KVOffloadMetrics(CollectorRegistry())
        self.tier = HostTier(num_bytes=capacity * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
        self.engine = Engine(
            num_blocks=NUM_BLOCKS, make_offload=self._make_offload, clock=lambda: self.now
        )
        self.engine.kv.block_store = self
        take = self.engine.pool.get_new_blocks

        def take_new(num_blocks: int) -> list[KVCacheBlock]:
            taken = take(num_blocks)
            for block in taken:
                self.bytes.blocks[block.block_id] = random.randrange(256)
                self.bytes.loaded.discard(block.block_id)
            return taken

        self.engine.pool.get_new_blocks = take_new  # type: ignore[method-assign]

    def _make_offload(self, pool: BlockPool) -> KVOffload:
        self.offload = KVOffload(
            [self.tier],
            block_pool=pool,
            block_size=BLOCK_SIZE,
            block_bytes=BLOCK_BYTES,
            open_copier=lambda: self.bytes,
            metrics=self.metrics,
            wakeup=lambda: None,
            clock=lambda: self.now,
        )
        return self.offload

    # ---- a BlockStore: what the model has computed is there when blocks are full

    def offer(self, hashes: Sequence[bytes], blocks: Sequence[KVCacheBlock], start: int) -> None:
        for block_hash, block in zip(hashes[start:], blocks[start:], strict=False):
            if block.block_id in self.bytes.loaded:
                assert bytes(self.bytes.blocks[block.block_id]) == content_of(block_hash)
            else:
                self.bytes.blocks[block.block_id] = np.frombuffer(
                    content_of(block_hash), dtype=np.uint8
                )
        self.offered.update(hashes[start:])
        self.offload.offer(hashes, blocks, start)

    def forget(self, hashes: Sequence[bytes]) -> None:
        self.offload.forget(hashes)

    # ---- what happens

    def settle(self) -> None:
        def is_over() -> bool:
            self.engine.step()
            pool = self.engine.pool
            is_idle = pool.num_free_blocks == pool.num_blocks and not self.offload.num_open_stores()
            return is_idle and not self.engine.scheduler.has_requests()

        wait_until(is_over)

    def ask(self, name: str, prompt: list[int]) -> None:
        self.engine.add(name, prompt, max_tokens=2)
        self.settle()

    def check(self) -> None:
        self.engine.assert_idle()
        stored = {block_hash for block_hash in self.offered if block_hash in self.tier}
        assert len(stored) == self.num_stored
        for block_hash in stored:
            block = self.tier.get(block_hash)
            assert block is not None
            assert bytes(block) == content_of(block_hash)

    @property
    def num_stored(self) -> int:
        """How many blocks the tier has."""
        return self.tier.used_bytes // BLOCK_BYTES
        for block_hash, block in cached_blocks(self.engine.pool):
            assert bytes(self.bytes.blocks[block.block_id]) == content_of(block_hash)

    def num_computed(self, name: str) -> int:
        return sum(s.num_scheduled_tokens.get(name, 0) for s in self.engine.rank.steps)

    def outcomes(self) -> dict[str, float]:
        names = ("loaded", "failed", "given_up")
        found = {name: value(self.metrics.tokens.labels(name)) for name in names}
        return {name: number for name, number in found.items() if number}

    def evict(self) -> None:
        assert self.engine.pool.reset_prefix_cache()

    def close(self) -> None:
        self.bytes.may_read.set()
        self.bytes.may_write.set()
        self.offload.close()


def content_of(block_hash: bytes) -> bytes:
    return block_hash * 2


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def test_only_what_no_tier_has_is_computed(world: World) -> None:
    world.ask("first", PROMPT)
    world.evict()
    world.ask("second", PROMPT)
    # The last block is not full.
    assert world.num_computed("second") == len(PROMPT) % BLOCK_SIZE + 1
    assert world.engine.tokens("second") == expected(PROMPT, 2)
    assert world.outcomes() == {"loaded": 32}
    world.check()


def test_the_last_token_is_computed_in_any_case(world: World) -> None:
    world.ask("first", PROMPT[:32])
    world.evict()
    world.ask("second", PROMPT[:32])
    assert world.outcomes() == {"loaded": 28}
    world.check()


def test_blocks_are_held_while_they_are_copied(world: World) -> None:
    """The engine has ended the request and others take what is free: the copy is of the block that
    was offered.
    """
    world.bytes.may_read.clear()
    world.engine.add("first", PROMPT, max_tokens=1)
    world.engine.run()
    assert world.engine.tokens("first") == expected(PROMPT, 1)
    num_held = NUM_BLOCKS - world.engine.pool.num_free_blocks
    assert 0 < num_held <= NUM_BLOCKS // 4 + 1
    world.engine.add("second", [n + 300 for n in PROMPT], max_tokens=8)
    world.engine.run()
    assert world.engine.tokens("second"), "nobody waits for a copy"
    world.bytes.may_read.set()
    world.settle()
    assert value(world.metrics.dropped_blocks) > 0
    world.check()


def test_what_was_dropped_is_offered_when_it_is_used_again(world: World) -> None:
    world.bytes.may_read.clear()
    prompt = list(range(100, 160))
    world.engine.add("first", prompt, max_tokens=1)
    world.engine.run()
    world.bytes.may_read.set()
    world.settle()
    assert world.num_stored <= NUM_BLOCKS // 4 + 1
    world.ask("second", prompt)
    world.ask("third", prompt)
    assert world.num_stored == 15
    world.check()


def test_a_load_is_waited_for_a_bounded_time(world: World) -> None:
    """It goes on while the request is computed already; its blocks stay out of use."""
    world.ask("first", PROMPT)
    world.evict()
    world.bytes.may_write.clear()
    world.engine.add("second", PROMPT, max_tokens=2)
    world.engine.step()
    wait_until(lambda: world.bytes.num_waiting)
    assert not world.engine.scheduler.has_schedulable_requests()
    assert world.engine.scheduler.next_deadline() == pytest.approx(1001.0)
    world.now += 1.1
    world.engine.run()
    assert world.engine.tokens("second") == expected(PROMPT, 2)
    assert world.outcomes() == {"given_up": 32}
    assert world.offload.num_open_sessions() == 1
    assert world.engine.pool.num_free_blocks <= NUM_BLOCKS - 8
    world.bytes.may_write.set()
    world.settle()
    assert world.offload.num_open_sessions() == 0
    world.check()


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_request_ends_while_it_is_loaded(world: World, is_begun: bool) -> None:
    world.ask("first", PROMPT)
    world.ask("other", [n + 200 for n in PROMPT])
    world.evict()
    world.bytes.may_write.clear()
    if not is_begun:
        world.engine.add("other2", [n + 200 for n in PROMPT], max_tokens=2)
        world.engine.step()
        wait_until(lambda: world.bytes.num_waiting)
    world.engine.add("second", PROMPT[:16], max_tokens=2)
    world.engine.step()
    wait_until(lambda: world.bytes.num_waiting)
    world.engine.scheduler.finish_requests(["second"], RequestStatus.FINISHED_ABORTED)
    world.engine.step()
    world.bytes.may_write.set()
    world.settle()
    world.check()


def test_what_is_forgotten_is_not_found(world: World) -> None:
    """Of a request that has failed nobody gets anything, whether stored, offered or being loaded:
    by another request, which computes it.
    """
    world.ask("first", PROMPT)
    world.evict()
    world.bytes.may_write.clear()
    world.engine.add("second", PROMPT, max_tokens=2)
    world.engine.step()
    wait_until(lambda: world.bytes.num_waiting)
    hashes = world.engine.scheduler.requests["second"].block_hashes
    world.offload.forget(hashes[2:4])
    world.bytes.may_write.set()
    world.settle()
    assert world.num_computed("second") == len(PROMPT) + 1
    world.check()


def test_stores_are_given_up_at_once(world: World) -> None:
    world.bytes.may_read.clear()
    world.engine.add("first", PROMPT, max_tokens=1)
    world.engine.run()
    wait_until(lambda: world.bytes.num_waiting)
    threading.Timer(0.05, world.bytes.may_read.set).start()
    world.engine.scheduler.cancel_stores()
    world.engine.assert_idle()
    wait_until(lambda: not world.offload.num_open_stores())
    assert world.num_stored == 0
    world.check()


def test_a_copier_that_fails_costs_a_copy_only(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.ask("first", PROMPT)
    world.evict()

    def fail(*args: object) -> BlockBytes:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(world.bytes, "write", fail)
    monkeypatch.setattr(world.bytes, "read", fail)
    world.ask("second", [*PROMPT, 1, 2, 3, 4, 5])
    assert world.outcomes() == {"failed": 32}
    assert world.num_computed("second") == len(PROMPT) + 6
    assert "a defect costs a prompt KV blocks that were stored" in caplog.text
    assert "a defect costs the copy of a KV block" in caplog.text
    world.check()


THREADS = call_sites(
    KVOffload,
    "_copy",
    "_begin_copy",
    "_is_wanted",
    "_release",
    "_drop",
    "_forget",
    "_write",
    "_load",
    "_loaded",
    "_get",
    "_end_load",
    "_events_of",
    "_show_tiers",
)


@each_site(THREADS)
def test_a_defect_at_any_call_of_the_threads_costs_no_thread(site: CallSite, world: World) -> None:
    num_defects = value(DEFECTS)
    with fault_at(site) as fault:
        world.ask("first", PROMPT)
        world.evict()
        world.ask("second", PROMPT)
        world.evict()
    assert value(DEFECTS) - num_defects == fault.has_raised
    world.ask("third", [7, *PROMPT])
    world.evict()
    num_loaded = world.outcomes().get("loaded", 0)
    world.ask("fourth", [7, *PROMPT])
    assert world.outcomes()["loaded"] > num_loaded
    world.check()


@pytest.mark.parametrize("capacity", [3, 20, 1000])
@pytest.mark.parametrize("seed", seeds(3))
def test_random_conversations(capacity: int, seed: int) -> None:
    """Requests of few prefixes come, wait, are aborted, superseded and evicted, in any order."""
    rng = random.Random(seed)
    world = World(capacity)
    chats = [[100 * n + i for i in range(rng.randrange(10, 40))] for n in range(6)]
    asked: dict[str, list[int]] = {}
    for number in range(120):
        action = rng.randrange(12)
        if action < 5:
            chat = chats[rng.randrange(len(chats))]
            prompt = chat[: rng.randrange(5, len(chat) + 1)]
            asked[f"r{number}"] = prompt
            world.engine.add(f"r{number}", prompt, max_tokens=rng.randrange(1, 5))
        elif action == 5 and world.engine.scheduler.requests:
            name = rng.choice(list(world.engine.scheduler.requests))
            world.engine.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            asked.pop(name)
        elif action == 6:
            (world.bytes.may_read if rng.random() < 0.5 else world.bytes.may_write).clear()
        elif action == 7:
            world.now += rng.choice((0.1, 2.0))
        elif action == 8:
            world.bytes.may_read.set()
            world.bytes.may_write.set()
        else:
            world.engine.step()
        check_containers(world.engine.scheduler)
    world.bytes.may_read.set()
    world.bytes.may_write.set()
    world.settle()
    for name, prompt in asked.items():
        tokens = world.engine.tokens(name)
        assert tokens == expected(prompt, len(tokens))
    world.check()
    world.close()
