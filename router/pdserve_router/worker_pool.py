"""The workers of a router: which can be used, which fit together, and who takes a request."""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve_common.engine_types import EngineCoreRequest, EngineInfo, WorkerRole
from pdserve_common.errors import NoWorkerError
from pdserve_common.metrics import RouterMetrics
from pdserve_router.routing import ROUTING_POLICIES, RoutingPolicy
from pdserve_router.worker_client import LinkTimings, WorkerClient, WorkerState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What every ready worker can take."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    # Names of logits processors that all of them have.
    logits_processors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The workers of one request. Without `prefill`, decode does it all for `reason`."""

    decode: WorkerClient
    prefill: WorkerClient | None = None
    reason: str = ""

    @property
    def path(self) -> str:
        return "local" if self.prefill is None else "disaggregated"


class WorkerPool:
    """A fixed list of workers, each attached as long as it lives."""

    def __init__(
        self,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        router_id: str,
        routing_policy: str,
        metrics: RouterMetrics,
        on_change: Callable[[], None],
        timings: LinkTimings | None = None,
    ) -> None:
        self._metrics = metrics
        self._notify = on_change
        epoch = secrets.token_hex(16)

        def client(address: str, role: WorkerRole) -> WorkerClient:
            return WorkerClient(
                address,
                role=role,
                router_id=router_id,
                router_epoch=epoch,
                on_change=self._on_change,
                timings=timings,
            )

        self.prefill = tuple(client(address, WorkerRole.PREFILL) for address in prefill)
        self.decode = tuple(client(address, WorkerRole.DECODE) for address in decode)
        self._policies: dict[WorkerRole, RoutingPolicy] = {
            role: ROUTING_POLICIES[routing_policy]() for role in WorkerRole
        }
        self.limits: ModelLimits | None = None
        self._pairs: dict[WorkerClient, tuple[WorkerClient, ...]] = {}
        self._is_mismatch_logged = False
        self._namesakes: frozenset[str] = frozenset()
        self._refresh()

    @property
    def is_ready(self) -> bool:
        """True if a request could be served now: decode workers can also work alone."""
        return any(worker.is_ready for worker in self.decode)

    def start(self) -> None:
        for worker in (*self.prefill, *self.decode):
            worker.start()

    async def close(self) -> None:
        for worker in (*self.prefill, *self.decode):
            await worker.close()

    def model_limits(self) -> ModelLimits:
        """Return what requests are checked against. Raises NoWorkerError if no decode worker is
        ready.
        """
        if self.limits is None or not self.is_ready:
            states = ", ".join(f"{w.address} {w.state.value}" for w in self.decode)
            raise NoWorkerError(f"no decode worker is ready ({states})", retry_after_ms=1000)
        return self.limits

    def route(self, request: EngineCoreRequest, *, enable_disaggregation: bool) -> Route:
        """Choose the workers of a request. Raises NoWorkerError if no decode worker is ready."""
        params = request.sampling_params
        if params is not None and params.use_beam_search:
            return self._local(request, "beam_search")
        if params is not None and params.max_tokens == 1:
            return self._local(request, "max_tokens_1")
        if not enable_disaggregation:
            return self._local(request, "disabled")
        if not self._pairs:
            return self._local(request, "no_prefill_worker")
        prefill = self._policies[WorkerRole.PREFILL].pick(tuple(self._pairs), request)
        decode = self._policies[WorkerRole.DECODE].pick(self._pairs[prefill], request)
        return Route(prefill=prefill, decode=decode)

    def _local(self, request: EngineCoreRequest, reason: str) -> Route:
        self.model_limits()
        ready = [worker for worker in self.decode if worker.is_ready]
        return Route(decode=self._policies[WorkerRole.DECODE].pick(ready, request), reason=reason)

    def _on_change(self) -> None:
        self._refresh()
        self._notify()

    def _refresh(self) -> None:
        workers = (*self.decode, *self.prefill)
        infos = [w.info for w in workers if w.is_ready and w.info is not None]
        self.limits = _limits(infos)
        # Workers know their links by engine_id: two of one name would be taken for each other.
        counts = Counter(info.engine_id for info in infos)
        self._log_namesakes(frozenset(name for name, count in counts.items() if count > 1))
        ready = [worker for worker in self.decode if worker.is_ready]
        pairs = {
            prefill: tuple(
                decode
                for decode in ready
                if _can_pair(prefill, decode) and not self._namesakes & _names(prefill, decode)
            )
            for prefill in self.prefill
            if prefill.is_ready
        }
        self._pairs = {prefill: decodes for prefill, decodes in pairs.items() if decodes}
        self._log_mismatch(bool(ready and pairs) and not self._pairs)
        for role, workers in (("prefill", self.prefill), ("decode", self.decode)):
            for state in WorkerState:
                count = sum(worker.state is state for worker in workers)
                self._metrics.workers.labels(role=role, state=state.value).set(count)

    def _log_namesakes(self, names: frozenset[str]) -> None:
        for name in sorted(names - self._namesakes):
            logger.error(
                "several workers call themselves %s: no handoffs for them, set their --engine-id",
                name,
            )
        self._namesakes = names

    def _log_mismatch(self, is_mismatch: bool) -> None:
        if is_mismatch and not self._is_mismatch_logged:
            logger.warning(
                "no prefill worker has the kv_compatibility_hash of a decode worker: "
                "decode workers serve alone"
            )
        self._is_mismatch_logged = is_mismatch


def _limits(infos: Sequence[EngineInfo]) -> ModelLimits | None:
    if not infos:
        return None
    return ModelLimits(
        max_model_len=min(info.max_model_len for info in infos),
        vocab_size=min(info.vocab_size for info in infos),
        eos_token_ids=infos[0].eos_token_ids,
        logits_processors=tuple(
            name
            for name in infos[0].logits_processors
            if all(name in info.logits_processors for info in infos)
        ),
    )


def _names(*workers: WorkerClient) -> set[str]:
    return {worker.info.engine_id for worker in workers if worker.info is not None}


def _can_pair(prefill: WorkerClient, decode: WorkerClient) -> bool:
    if prefill.info is None or decode.info is None:
        return False
    return prefill.info.kv_compatibility_hash == decode.info.kv_compatibility_hash
