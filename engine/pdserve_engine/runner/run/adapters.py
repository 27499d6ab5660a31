"""The LoRA adapters of a runner in this process."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from pdserve_common.processes.call_thread import CallThread
from pdserve_engine.core.executor import PackedAdapter
from pdserve_engine.lora.adapter import LoraAdapter
from pdserve_engine.lora.adapter_config import Targets
from pdserve_engine.models.base import SupportsLora

# Added to the process's: steps come first where cores are few.
NICENESS = 10
CLOSE_TIMEOUT_S = 10.0


class AdapterOwner(Protocol):
    """What runs steps; ModelRunner does."""

    # That packs adapters.
    model: Any

    def add_adapter(self, digest: str, adapter: Any) -> None: ...
    def remove_adapter(self, digest: str) -> None: ...


class RunnerAdapters:
    """Implements core.executor.AdapterStore."""

    def __init__(
        self,
        runner: AdapterOwner,
        read_adapter: Callable[[Path, Targets], LoraAdapter],
        behind_steps: Callable[[Callable[[], None]], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._read_adapter = read_adapter
        self._behind_steps = behind_steps
        self._clock = clock
        self._num_threads = torch.get_num_threads()
        # Those under way; a caller may have given up one of them.
        self._threads: list[CallThread] = []

    def read(self, folder: Path) -> "Future[PackedAdapter]":
        # A thread that ends: OpenMP keeps a team for every thread that has used one.
        thread = CallThread("lora", niceness=NICENESS)
        model: SupportsLora = self._runner.model
        reading = thread.submit(partial(self._pack, folder, model))
        self._threads = [each for each in (*self._threads, thread) if not each.close(0)]
        return reading

    def close(self) -> None:
        """Wait for what is read, CLOSE_TIMEOUT_S at most for all: a thread must not be in C++ when
        the process ends.
        """
        deadline = self._clock() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.close(max(0.0, deadline - self._clock()))

    def add(self, adapter: PackedAdapter) -> None:
        # The same one may be about to be forgotten.
        self._behind_steps(partial(self._runner.add_adapter, adapter.digest, adapter.weights))

    def discard(self, reading: "Future[PackedAdapter]") -> None:
        """It goes with the future."""

    def remove(self, digest: str) -> None:
        self._behind_steps(partial(self._runner.remove_adapter, digest))

    def _pack(self, folder: Path, model: SupportsLora) -> PackedAdapter:
        torch.set_num_threads(1)  # those of the steps are busy
        try:
            adapter = self._read_adapter(folder, model.lora_targets)
            return PackedAdapter(adapter.digest, adapter.rank, model.pack_adapter(adapter))
        finally:
            # New threads take it over. Not as it was: another adapter may be read as well.
            torch.set_num_threads(self._num_threads)
