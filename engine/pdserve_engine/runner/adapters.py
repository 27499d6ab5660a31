"""The LoRA adapters of a runner in this process."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from pdserve_common.call_thread import CallThread
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
    adapters: dict[str, Any]


class RunnerAdapters:
    """Implements core.executor.AdapterStore."""

    def __init__(
        self,
        runner: AdapterOwner,
        read_adapter: Callable[[Path, Targets], LoraAdapter],
        behind_steps: Callable[[Callable[[], None]], object],
    ) -> None:
        self._runner = runner
        self._read_adapter = read_adapter
        self._behind_steps = behind_steps
        self._reading: Future[PackedAdapter] | None = None

    def read(self, folder: Path) -> "Future[PackedAdapter]":
        # A thread that ends: OpenMP keeps a team for every thread that has used one.
        thread = CallThread("lora", niceness=NICENESS)
        model: SupportsLora = self._runner.model
        self._reading = thread.submit(partial(self._pack, folder, model))
        thread.close(0)
        return self._reading

    def close(self) -> None:
        """Wait for what is read: a thread must not be in C++ when the process ends."""
        if self._reading is not None:
            wait([self._reading], CLOSE_TIMEOUT_S)

    def add(self, adapter: PackedAdapter) -> None:
        # The same one may be about to be forgotten.
        self._behind_steps(partial(self._keep, adapter))

    def discard(self, reading: "Future[PackedAdapter]") -> None:
        """It goes with the future."""

    def remove(self, digest: str) -> None:
        self._behind_steps(partial(self._forget, digest))

    def _pack(self, folder: Path, model: SupportsLora) -> PackedAdapter:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # those of the steps are busy
        try:
            adapter = self._read_adapter(folder, model.lora_targets)
            return PackedAdapter(adapter.digest, adapter.rank, model.pack_adapter(adapter))
        finally:
            torch.set_num_threads(num_threads)  # new threads take it over

    def _keep(self, adapter: PackedAdapter) -> None:
        self._runner.adapters[adapter.digest] = adapter.weights

    def _forget(self, digest: str) -> None:
        self._runner.adapters.pop(digest, None)
