"""Adapters of several ranks: all of them have one, or none has anything of it."""

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from pdserve_common.processes.calls import Answer
from pdserve_engine.core.executor import PackedAdapter
from pdserve_engine.executor.messages import AdapterCommand, ReadAdapter
from pdserve_engine.executor.rank_adapters import AdapterHost, RemoteAdapters
from pdserve_engine.lora.adapter_config import LoraError

FOLDER = Path("adapters/a")
REFUSED = LoraError("adapter a: use_dora is true")
NO_MEMORY = RuntimeError(
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
)
# What a rank's folder holds.
OUTCOMES = ("a", "b", REFUSED, NO_MEMORY)


class Store:
    """A rank's own."""

    def __init__(self, outcome: str | Exception) -> None:
        self.outcome = outcome
        self.digests: set[str] = set()

    def read(self, folder: Path) -> "Future[PackedAdapter]":
        assert folder == FOLDER
        reading: Future[PackedAdapter] = Future()
        if isinstance(self.outcome, str):
            reading.set_result(PackedAdapter(self.outcome, 8, object()))
        else:
            reading.set_exception(self.outcome)
        return reading

    def add(self, adapter: PackedAdapter) -> None:
        self.digests.add(adapter.digest)

    def discard(self, reading: "Future[PackedAdapter]") -> None:
        raise AssertionError("a rank is told which")

    def remove(self, digest: str) -> None:
        self.digests.remove(digest)

    def close(self) -> None:
        pass


class Engine:
    """The engine's end, over ranks of this process."""

    def __init__(self, outcomes: Sequence[str | Exception]) -> None:
        self.stores = [Store(outcome) for outcome in outcomes]
        self.hosts = [AdapterHost(store) for store in self.stores]
        self.adapters = RemoteAdapters(ask=self._ask, tell=self._tell)
        # Asked, and not answered yet.
        self.asked: list[tuple[ReadAdapter, Future[list[Answer]]]] = []

    def answer(self) -> None:
        for call, future in self.asked:
            future.set_result([Answer.of(host.read(call)) for host in self.hosts])
        self.asked.clear()

    def num_kept(self) -> int:
        """How many adapters, added or not, the ranks hold."""
        return sum(host.num_read for host in self.hosts) + sum(
            len(store.digests) for store in self.stores
        )

    def _ask(self, call: ReadAdapter) -> "Future[list[Answer]]":
        future: Future[list[Answer]] = Future()
        self.asked.append((call, future))
        return future

    def _tell(self, command: AdapterCommand) -> None:
        for host in self.hosts:
            host.handle(command)


@pytest.mark.parametrize("outcomes", [*itertools.product(OUTCOMES, repeat=2)])
def test_ranks_that_do_not_agree_keep_nothing(outcomes: tuple[str | Exception, ...]) -> None:
    engine = Engine(outcomes)
    reading = engine.adapters.read(FOLDER)
    engine.adapters.discard(reading)  # as when its caller has given up
    engine.answer()
    assert engine.num_kept() == 0
    first = next((outcome for outcome in outcomes if isinstance(outcome, Exception)), None)
    if first is not None:
        with pytest.raises(type(first)) as raised:
            reading.result()
        assert str(raised.value) == str(first)
    elif len(set(outcomes)) > 1:
        with pytest.raises(LoraError, match="adapters/a: its files have changed while they were"):
            reading.result()
    else:
        assert (reading.result().digest, reading.result().rank) == (outcomes[0], 8)


def test_what_is_added_stays_until_it_is_removed() -> None:
    engine = Engine(("a", "a", "a"))
    readings = [engine.adapters.read(FOLDER) for _ in range(2)]
    engine.answer()
    engine.adapters.add(readings[1].result())
    for reading in readings:
        engine.adapters.discard(reading)
    assert [store.digests for store in engine.stores] == [{"a"}] * 3
    assert engine.num_kept() == 3
    engine.adapters.remove("a")
    assert engine.num_kept() == 0


def test_another_failure_is_the_ranks() -> None:
    engine = Engine((ZeroDivisionError(),))
    engine.adapters.read(FOLDER)
    with pytest.raises(ZeroDivisionError):
        engine.answer()
