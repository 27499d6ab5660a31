"""Which adapters an engine holds: names and contents, requests that keep them, who has to go."""

import random
from concurrent.futures import Future
from pathlib import Path

import pytest

from pdserve_common.errors import FailedPreconditionError
from pdserve_common.types.lora import LoRARequest
from pdserve_engine.core.executor import PackedAdapter
from pdserve_engine.core.features.adapter_pool import NAMES_PER_ADAPTER, AdapterPool
from pdserve_engine.request.request import Request
from support.clock import Clock
from support.requests import held_request
from support.samples import seeds


class Store:
    """What an executor holds."""

    def __init__(self) -> None:
        self.digests: set[str] = set()

    def read(self, folder: Path) -> "Future[PackedAdapter]":
        raise AssertionError("the pool reads nothing")

    def close(self) -> None:
        pass

    def discard(self, reading: "Future[PackedAdapter]") -> None:
        raise AssertionError("the pool reads nothing")

    def add(self, adapter: PackedAdapter) -> None:
        assert adapter.digest not in self.digests
        self.digests.add(adapter.digest)

    def remove(self, digest: str) -> None:
        self.digests.remove(digest)


class Stage:
    def __init__(self, max_loras: int = 3) -> None:
        self.store, self.clock = Store(), Clock()
        self.pool = AdapterPool(self.store, max_loras=max_loras, clock=self.clock)
        self.num_requests = 0

    def add(self, name: str, digest: str) -> None:
        self.clock.now_s += 1
        self.pool.add(name, PackedAdapter(digest, 8, None))

    def request(self, digest: str) -> Request:
        self.clock.now_s += 1
        self.num_requests += 1
        lora = LoRARequest(lora_name="", digest=digest)
        return held_request(f"r{self.num_requests}", lora_request=lora)

    def begin(self, digest: str) -> Request:
        request = self.request(digest)
        assert self.pool.acquire(request)
        return request

    def takes(self, digest: str) -> bool:
        request = self.request(digest)
        is_taken = self.pool.acquire(request)
        self.pool.release(request)
        return is_taken

    @property
    def listed(self) -> dict[str, str]:
        """By digest, the name: empty of those that no name stands for."""
        return {each.digest: each.name for each in self.pool.listed.adapters}


def test_a_removed_adapter_takes_no_request_and_goes_with_its_last() -> None:
    stage = Stage()
    stage.add("a", "1")
    requests = [stage.begin("1"), stage.begin("1")]
    stage.pool.remove("a")
    assert stage.listed == {}
    assert not stage.pool.acquire(stage.request("1"))
    (left,) = stage.pool.loaded()
    assert (left.adapter.digest, left.is_removed, left.num_requests) == ("1", True, 2)
    stage.pool.release(requests[0])
    assert stage.store.digests == {"1"}
    stage.pool.release(requests[1])
    assert stage.store.digests == set()
    assert stage.pool.loaded() == ()
    for call in (stage.pool.remove, stage.pool.pin, stage.pool.unpin):
        with pytest.raises(FailedPreconditionError, match="lora_name is 'a', no adapter"):
            call("a")


def test_a_name_stands_for_the_new_content_and_old_requests_keep_theirs() -> None:
    stage = Stage()
    stage.add("a", "1")
    old = stage.begin("1")
    versions = [stage.pool.listed.version]
    stage.add("a", "2")
    versions.append(stage.pool.listed.version)
    assert versions == [1, 2]
    assert stage.listed == {"1": "", "2": "a"}
    assert stage.takes("1"), "its next attempt may come here"
    stage.pool.release(old)
    stage.add("b", "3")
    # What no name stands for any more goes first, however lately it was used.
    stage.add("c", "4")
    assert stage.listed == {"2": "a", "3": "b", "4": "c"}
    assert stage.pool.num_evictions == 1
    # And back.
    stage.add("a", "3")
    stage.add("a", "2")
    assert stage.listed == {"2": "a", "3": "b", "4": "c"}
    stage.pool.remove("a")
    assert stage.store.digests == {"3", "4"}


def test_one_of_a_names_adapters_goes_and_it_stands_for_the_one_before() -> None:
    stage = Stage()
    stage.add("a", "1")
    stage.add("a", "2")
    with pytest.raises(FailedPreconditionError, match="'a' does not stand for '3'"):
        stage.pool.remove("a", "3")
    stage.pool.remove("a", "2")
    assert stage.listed == {"1": "a"}
    stage.pool.remove("a", "1")
    assert stage.listed == {}
    assert stage.store.digests == set()


def test_what_was_not_used_for_longest_goes_and_never_what_is_pinned_or_in_use() -> None:
    stage = Stage()
    for name in "abc":
        stage.add(name, name * 2)
    assert stage.takes("aa")
    stage.pool.pin("b")
    stage.add("d", "dd")
    assert stage.listed == {"aa": "a", "bb": "b", "dd": "d"}
    running = stage.begin("aa")
    stage.add("e", "ee")
    assert stage.listed == {"aa": "a", "bb": "b", "ee": "e"}
    also_running = stage.begin("ee")
    with pytest.raises(FailedPreconditionError, match=r"3 adapters .* at most 3 may be"):
        stage.add("f", "ff")
    assert stage.listed == {"aa": "a", "bb": "b", "ee": "e"}
    assert [each.is_pinned for each in stage.pool.loaded()] == [False, True, False]
    stage.add("f", "aa")  # another name needs no room
    for request in (running, also_running):
        stage.pool.release(request)
    # A pin is the name's: what it stood for before is free.
    stage.add("b", "gg")
    assert stage.listed == {"ee": "e", "bb": "", "gg": "b"}
    stage.add("h", "hh")
    assert stage.listed == {"ee": "e", "gg": "b", "hh": "h"}
    stage.pool.unpin("b")
    stage.pool.unpin("b")
    for digest in ("ii", "jj", "kk"):
        stage.add(digest[0], digest)
    assert stage.listed == {"ii": "i", "jj": "j", "kk": "k"}


def test_requests_without_adapters_and_a_pool_without_a_store() -> None:
    pool = AdapterPool()
    plain = held_request()
    assert pool.acquire(plain)
    pool.release(plain)
    assert not pool.acquire(Stage().request("1"))


@pytest.mark.parametrize("seed", seeds(20))
def test_in_any_order_no_request_loses_its_adapter_and_memory_is_bounded(seed: int) -> None:
    rng = random.Random(seed)
    stage = Stage(max_loras=4)
    running: list[Request] = []
    for _ in range(400):
        name, digest = rng.choice("abcde"), rng.choice("123456789")
        kind = rng.choice(("add", "add", "remove", "pin", "unpin", "begin", "begin", "end"))
        try:
            if kind == "add":
                stage.add(name, digest)
                assert stage.listed[digest], "it has a name"
            elif kind == "remove":
                stage.pool.remove(name)
            elif kind == "pin" and rng.random() < 0.1:
                stage.pool.pin(name)
            elif kind == "unpin":
                stage.pool.unpin(name)
            elif kind == "begin":
                request = stage.request(digest)
                assert stage.pool.acquire(request) == (digest in stage.listed)
                running += [request] if digest in stage.listed else []
            elif kind == "end" and running:
                stage.pool.release(running.pop(rng.randrange(len(running))))
        except FailedPreconditionError:
            pass
        assert len(stage.store.digests) == len(stage.pool) <= 4
        assert {request.adapter for request in running} <= stage.store.digests
        assert stage.listed.keys() <= stage.store.digests
        loaded = stage.pool.loaded()
        assert {each.adapter.digest for each in loaded} == stage.store.digests
        assert sum(each.num_requests for each in loaded) >= len(running)
    while running:
        stage.pool.release(running.pop())
    for name in {each.name for each in stage.pool.listed.adapters if each.name}:
        stage.pool.remove(name)
    assert stage.store.digests == set()


def test_names_are_bounded() -> None:
    stage = Stage(max_loras=1)
    for number in range(NAMES_PER_ADAPTER):
        stage.add(f"{number}", "x")
    for digest in ("x", "y"):
        with pytest.raises(FailedPreconditionError, match="'more' is one too many"):
            stage.add("more", digest)
    stage.add("0", "x")
    stage.pool.remove("1")
    stage.add("more", "x")
    assert len(stage.pool.listed.adapters) == NAMES_PER_ADAPTER
