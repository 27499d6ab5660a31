"""What every worker of a set of weights can take."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve_common.capabilities import NO_EXTRAS, Capabilities
from pdserve_common.engine_types import EngineInfo, LoRAAdapter, WorkerRole
from pdserve_router.workers.worker_client import WorkerClient


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What every ready worker can take."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    # What all of them serve besides.
    capabilities: Capabilities = NO_EXTRAS
    # Of their caches; 0 if they have none, or differ.
    block_size: int = 0
    # Adapters that clients can ask for: what any decode worker holds, one of a name.
    adapters: tuple[LoRAAdapter, ...] = ()

    def adapter(self, name: str) -> LoRAAdapter | None:
        """Return the adapter that clients call so; None if there is none."""
        return next((each for each in self.adapters if each.name == name), None)

    @classmethod
    def of(cls, info: EngineInfo) -> "ModelLimits":
        return cls(
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            capabilities=Capabilities.of(info),
            block_size=info.block_size if info.has_prefix_caching else 0,
            adapters=info.adapters if info.role is WorkerRole.DECODE else (),
        )


class SharedLimits:
    """The limits of each set of weights, counted as workers come and go."""

    def __init__(self) -> None:
        self._each: dict[WorkerClient, tuple[str, ModelLimits]] = {}
        self._counts: defaultdict[str, Counter[ModelLimits]] = defaultdict(Counter)

    def set(self, worker: WorkerClient, name: str) -> None:
        """Take a worker whose weights are `name`; empty: it takes no requests."""
        limits = ModelLimits.of(worker.info) if name and worker.info is not None else None
        entry = (name, limits) if limits is not None else None
        before = self._each.pop(worker, None)
        if entry is not None:
            self._each[worker] = entry
            self._counts[entry[0]][entry[1]] += 1
        if before is not None:
            self._remove(*before)

    def of(self, name: str) -> ModelLimits | None:
        """Return what all workers of these weights can take; None if there are none."""
        every = self._counts.get(name)
        if not every:
            return None
        if len(every) == 1:
            return next(iter(every))
        sizes = {each.block_size for each in every}
        return ModelLimits(
            max_model_len=min(each.max_model_len for each in every),
            vocab_size=min(each.vocab_size for each in every),
            eos_token_ids=next(iter(every)).eos_token_ids,
            capabilities=Capabilities.shared(each.capabilities for each in every),
            block_size=sizes.pop() if len(sizes) == 1 else 0,
            adapters=_adapters_of(every),
        )

    def _remove(self, name: str, limits: ModelLimits) -> None:
        counts = self._counts[name]
        counts[limits] -= 1
        if not counts[limits]:
            del counts[limits]
        if not counts:
            del self._counts[name]


def _adapters_of(every: Mapping[ModelLimits, int]) -> tuple[LoRAAdapter, ...]:
    """Return the adapter of each name; where workers differ, the one that most of them hold."""
    holders: Counter[LoRAAdapter] = Counter()
    for limits, num_workers in every.items():
        for adapter in limits.adapters:
            holders[adapter] += num_workers
    chosen: dict[str, LoRAAdapter] = {}
    for adapter in sorted(holders, key=lambda each: (-holders[each], each.name, each.digest)):
        chosen.setdefault(adapter.name, adapter)
    return tuple(sorted(chosen.values(), key=lambda each: each.name))
