"""What an engine gives back while it sleeps: its KV pool's memory and its weights."""

import gc
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

import torch

from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.kv.memory import release_unused, used_bytes


class ModelOwner(Protocol):
    """Holds the only lasting reference to the model; ModelRunner does."""

    model: Any


class SleepingMemory:
    """Releases and restores an engine's memory. Used while nothing runs and no block is held."""

    def __init__(
        self,
        owner: ModelOwner,
        kv_cache: KVCache,
        *,
        device: torch.device,
        load_model: Callable[[], object],
    ) -> None:
        """`load_model` reads the weights again and raises ValueError or OSError."""
        self._owner = owner
        self._kv_cache = kv_cache
        self._device = device
        self._load_model = load_model
        self._is_pool_released = False
        # Weights that lie in host memory, by the storage they came from.
        self._on_host: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    @property
    def is_complete(self) -> bool:
        """Is nothing given back?"""
        has_weights = self._owner.model is not None and not self._on_host
        return has_weights and not self._is_pool_released

    def release(self, level: int, *, keeps_pool: bool = False) -> int:
        """Give back what `level` says and return how many bytes the device got back. No transport
        may have registered the pool, unless it stays.
        """
        before = used_bytes(self._device)
        if not keeps_pool:
            self._kv_cache.release()
            self._is_pool_released = True
        if level == 1 and self._device.type != "cpu":
            self._move_weights_to_host()
        elif level >= 2:
            self._owner.model = None
        gc.unfreeze()  # weights and pool were frozen when they were loaded
        release_unused(self._device)
        return max(0, before - used_bytes(self._device))

    def restore_weights(self) -> None:
        """Take the weights back; no-op if they are there. Raises what `load_model` raises."""
        if self._owner.model is None:
            self._owner.model = self._load_model()
            release_unused(self._device)
        for storage, host in self._on_host:
            storage.resize_(host.nbytes())
            storage.copy_(host)
        self._on_host = []

    def restore_kv_cache(self) -> None:
        """Take the pool's memory back, zeroed; no-op if it is there."""
        if self._is_pool_released:
            self._kv_cache.restore()
            self._is_pool_released = False

    def _move_weights_to_host(self) -> None:
        """By storage, so that tensors that share one still do afterwards."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors_of(self._owner.model)
            if tensor.device.type == self._device.type
        }
        for storage in storages.values():
            self._on_host.append((storage, storage.cpu()))  # type: ignore[no-untyped-call]
            storage.resize_(0)


def tensors_of(root: object) -> Iterator[torch.Tensor]:
    """Yield every tensor, of any shape [...] and dtype, that can be reached from `root` through
    attributes and containers.
    """
    seen: set[int] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list | tuple | set):
            stack.extend(value)
        elif not isinstance(value, type | ModuleType):
            stack.extend(_attributes(value))


def _attributes(value: object) -> list[object]:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    found = [getattr(value, name) for name in slots if hasattr(value, name)]
    return [*found, *getattr(value, "__dict__", {}).values()]
