"""Adapters that are read while others are, and what is left of those that nobody wants."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve_common.processes.call_thread import CallThread
from pdserve_engine.lora.adapter import LoraAdapter
from pdserve_engine.lora.adapter_config import Targets
from pdserve_engine.runner.run.adapters import CLOSE_TIMEOUT_S, RunnerAdapters

TIMEOUT_S = 60.0
NUM_THREADS = 3


class Weights:
    """What a model packs."""


class Model:
    def __init__(self) -> None:
        self.lora_targets: Targets = {}
        self.packed: list[weakref.ref[Weights]] = []

    def pack_adapter(self, adapter: LoraAdapter) -> Weights:
        weights = Weights()
        self.packed.append(weakref.ref(weights))
        return weights


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.set_num_threads(before)


def make(read: Callable[[Path], None], model: Model, **options: Any) -> RunnerAdapters:
    def read_adapter(folder: Path, targets: Targets) -> LoraAdapter:
        read(folder)
        return LoraAdapter(digest=folder.name, rank=8, modules={})

    owner: Any = SimpleNamespace(model=model, adapters={})
    return RunnerAdapters(owner, read_adapter, lambda function: function(), **options)


def num_threads_of_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join(TIMEOUT_S)
    return found[0]


def test_nothing_is_kept_of_what_is_discarded() -> None:
    model = Model()
    adapters = make(lambda folder: None, model)
    reading = adapters.read(Path("a"))
    assert reading.result(TIMEOUT_S).digest == "a"
    adapters.close()
    adapters.discard(reading)
    del reading
    gc.collect()
    assert [each() for each in model.packed] == [None]


def test_those_that_are_read_at_once_leave_threads_as_they_are() -> None:
    goes_on = {name: threading.Event() for name in "ab"}
    begun = {name: threading.Event() for name in "ab"}

    def read(folder: Path) -> None:
        begun[folder.name].set()
        assert goes_on[folder.name].wait(TIMEOUT_S)

    adapters = make(read, Model())
    readings = {}
    for name in "ab":  # the caller of the first has given up
        readings[name] = adapters.read(Path(name))
        assert begun[name].wait(TIMEOUT_S)
    for name in "ab":
        goes_on[name].set()
        readings[name].result(TIMEOUT_S)
    adapters.close()
    assert num_threads_of_new_thread() == NUM_THREADS


def test_reads_that_hang_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of which each wait takes what it may."""
    now, go_on = 0.0, threading.Event()
    waits: list[float] = []

    def close(thread: CallThread, timeout_s: float) -> bool:
        nonlocal now
        waits.append(timeout_s)
        now += timeout_s
        return False

    def read(folder: Path) -> None:
        assert go_on.wait(TIMEOUT_S)

    adapters = make(read, Model(), clock=lambda: now)
    readings = [adapters.read(Path(str(number))) for number in range(5)]
    with monkeypatch.context() as patched:
        patched.setattr(CallThread, "close", close)
        adapters.close()
    assert (len(waits), sum(waits)) == (5, CLOSE_TIMEOUT_S)
    go_on.set()
    for reading in readings:
        reading.result(TIMEOUT_S)
    adapters.close()
