"""What every worker of a set of weights can take."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve_common.errors import ModelNotFoundError
from pdserve_common.types.capabilities import NO_EXTRAS, Capabilities
from pdserve_common.types.engine import EngineInfo, WorkerRole
from pdserve_common.types.lora import LoRAAdapter, LoRARequest
from pdserve_common.types.pooling_params import GENERATE
from pdserve_router.workers.worker import Worker


def answering_role(info: EngineInfo) -> WorkerRole:
    """Return whose workers end requests for such a worker's model: decode workers, or of a model
    that pools prefill workers, each alone.
    """
    return WorkerRole.DECODE if GENERATE in info.tasks else WorkerRole.PREFILL


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What every ready worker can take."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    # What all of them serve besides.
    capabilities: Capabilities = NO_EXTRAS
    # The block size of their caches; 0 if they have none, or differ.
    block_size: int = 0
    # Adapters that clients can ask for: what any worker holds that ends requests, one of a name.
    adapters: tuple[LoRAAdapter, ...] = ()
    # Digests of all that any of them holds, those without a name among them.
    held: frozenset[str] = frozenset()
    # Numbers in a pooled vector; 0 of models that generate.
    embedding_size: int = 0
    # The ranks of the largest data-parallel group that ends requests.
    data_parallel_size: int = 1

    def adapter(self, name: str) -> LoRAAdapter | None:
        """Return the adapter that clients call so; None if there is none."""
        return next((each for each in self.adapters if each.name == name), None)

    def lora_request(self, name: str) -> LoRARequest:
        """Return what a request carries that names an adapter. Raises ModelNotFoundError."""
        if (adapter := self.adapter(name)) is None:
            raise ModelNotFoundError(
                f"lora_name {name[:256]!r} is no adapter that is served here", field="lora_name"
            )
        return LoRARequest(lora_name=name, digest=adapter.digest)

    @classmethod
    def of(cls, info: EngineInfo) -> "ModelLimits":
        is_answering = info.role is answering_role(info)
        return cls(
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            capabilities=Capabilities.of(info),
            block_size=info.block_size if info.has_prefix_caching else 0,
            adapters=tuple(each for each in info.adapters if each.name) if is_answering else (),
            held=info.adapter_digests if is_answering else frozenset(),
            embedding_size=info.embedding_size,
            # Older workers say 0.
            data_parallel_size=max(1, info.data_parallel_size) if is_answering else 1,
        )


class SharedLimits:
    """The limits of each set of weights, counted as workers come and go."""

    def __init__(self) -> None:
        self._each: dict[Worker, tuple[str, ModelLimits]] = {}
        self._counts: defaultdict[str, Counter[ModelLimits]] = defaultdict(Counter)
        self._step_tokens: dict[Worker, int] = {}
        self._step_tokens_of_role: Counter[WorkerRole] = Counter()

    @property
    def num_step_tokens(self) -> int:
        """How many prompt tokens all workers that compute prompts take in one step each."""
        of_role = self._step_tokens_of_role
        return of_role[WorkerRole.PREFILL] or of_role[WorkerRole.DECODE]

    def set(self, worker: Worker, name: str) -> None:
        """Take a worker whose weights are `name`; empty: it takes no requests."""
        limits = ModelLimits.of(worker.info) if name and worker.info is not None else None
        entry = (name, limits) if limits is not None else None
        before = self._each.pop(worker, None)
        if entry is not None:
            self._each[worker] = entry
            self._counts[entry[0]][entry[1]] += 1
        if before is not None:
            self._remove(*before)
        num_tokens = worker.info.max_num_batched_tokens if name and worker.info is not None else 0
        self._step_tokens_of_role[worker.role] += num_tokens - self._step_tokens.pop(worker, 0)
        if num_tokens:
            self._step_tokens[worker] = num_tokens

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
            held=frozenset().union(*(each.held for each in every)),
            embedding_size=max(each.embedding_size for each in every),
            data_parallel_size=max(each.data_parallel_size for each in every),
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
    holders: Counter[tuple[str, str]] = Counter()
    known: dict[tuple[str, str], LoRAAdapter] = {}
    for limits, num_workers in every.items():
        for adapter in limits.adapters:
            key = (adapter.name, adapter.digest)
            holders[key] += num_workers
            # Not all of them know where it can be had.
            known[key] = max(known.get(key, adapter), adapter, key=lambda each: each.path)
    chosen: dict[str, LoRAAdapter] = {}
    for key in sorted(holders, key=lambda each: (-holders[each], each)):
        chosen.setdefault(key[0], known[key])
    return tuple(sorted(chosen.values(), key=lambda each: each.name))
