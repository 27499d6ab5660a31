"""Who takes a request: a prefill and a decode worker, or a decode worker alone and why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve_common.engine_types import EngineCoreRequest, WorkerRole
from pdserve_common.errors import NoWorkerError, OverloadedError, PdserveError
from pdserve_router.workers.pairs import Pairs
from pdserve_router.workers.prefix_index import PrefixIndex, num_known_tokens, prefix_hashes
from pdserve_router.workers.routing_policy import ROUTING_POLICIES, RoutingPolicy
from pdserve_router.workers.worker_client import WorkerClient

_RETRY_AFTER_MS = 1000

# Where a request goes, and why it stays on D; values of metrics' labels.
RoutePath = Literal["disaggregated", "local"]
LocalReason = Literal[
    "beam_search", "max_tokens_1", "disabled", "short_prompt", "cached_prompt",
    "no_prefill_worker", "no_proven_pair", "prefill_queue",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRules:
    """What RouterConfig's flags of the same names say."""

    routing_policy: str = "round_robin"
    disaggregation: bool = True
    require_disaggregation: bool = False
    require_transport: str = "any"
    require_determinism: str = "any"
    disaggregation_threshold_tokens: int = 0
    max_prefill_queue_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The workers of one request. Without `prefill`, decode does it all for `reason`."""

    decode: WorkerClient
    prefill: WorkerClient | None = None
    # Forks follow their source, what is sent again may go to whoever holds its blocks.
    reason: LocalReason | Literal["", "fork", "recovery"] = ""

    @property
    def path(self) -> RoutePath:
        return "local" if self.prefill is None else "disaggregated"

    @property
    def workers(self) -> tuple[WorkerClient, ...]:
        """Prefill first, if there is one."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def epochs(self) -> tuple[str, ...]:
        """Which starts of the workers' processes these are, as of now."""
        return tuple(worker.epoch for worker in self.workers)


class RouteChooser:
    """Applies the rules in this order: what need not cross the handoff (beam_search, max_tokens_1,
    disabled, short_prompt) stays on D; so do, unless disaggregation is required, what D has
    cached (cached_prompt) and what cannot cross it (no_prefill_worker, no_proven_pair,
    prefill_queue); all else is disaggregated.
    """

    def __init__(self, rules: RoutingRules, pairs: Pairs, index: PrefixIndex[WorkerClient]) -> None:
        self._rules = rules
        self._pairs = pairs
        self._index = index
        self._policies: dict[WorkerRole, RoutingPolicy] = {
            role: ROUTING_POLICIES[rules.routing_policy](role) for role in WorkerRole
        }

    def choose(
        self,
        request: EngineCoreRequest,
        *,
        prefill: Sequence[WorkerClient],
        decode: Sequence[WorkerClient],
    ) -> Route:
        """Choose among ready workers; see WorkerPool.route."""
        prefill = [worker for worker in prefill if not worker.breaker.is_open]
        return self._choose(request, prefill, _working(decode))

    def _choose(
        self,
        request: EngineCoreRequest,
        prefill: Sequence[WorkerClient],
        decode: Sequence[WorkerClient],
    ) -> Route:
        if reason := self._reason_to_stay(request):
            return self._local(request, decode, reason)
        if cached := self._with_prompt_cached(request, decode):
            return self._local(request, cached, "cached_prompt")
        partners = self._partners(prefill, decode)
        if not partners:
            missing: LocalReason = "no_proven_pair" if prefill else "no_prefill_worker"
            return self._downgrade(request, decode, missing, NoWorkerError)
        free = {p: decodes for p, decodes in partners.items() if not self._is_queue_full(p)}
        if not free:
            return self._downgrade(request, decode, "prefill_queue", OverloadedError)
        chosen = self._policies[WorkerRole.PREFILL].pick(tuple(free), request)
        return Route(
            prefill=chosen, decode=self._policies[WorkerRole.DECODE].pick(free[chosen], request)
        )

    def _reason_to_stay(self, request: EngineCoreRequest) -> LocalReason | None:
        """Return why the request needs no prefill worker; None if it does."""
        params = request.sampling_params
        num_done = len(request.resume_output_token_ids)
        if params is not None and params.use_beam_search:
            return "beam_search"
        if params is not None and params.max_tokens == num_done + 1:
            return "max_tokens_1"
        if not self._rules.disaggregation:
            return "disabled"
        # One token is computed sooner than its block is moved.
        threshold = max(self._rules.disaggregation_threshold_tokens, 1)
        return "short_prompt" if num_known_tokens(request) <= threshold else None

    def _with_prompt_cached(
        self, request: EngineCoreRequest, decode: Sequence[WorkerClient]
    ) -> list[WorkerClient]:
        """Return the decode workers that have little left to compute. They may have evicted some
        of it meanwhile, so nobody relies on it where disaggregation is required.
        """
        threshold = self._rules.disaggregation_threshold_tokens
        params = request.sampling_params
        # Logprobs of a prompt have it computed whole.
        is_read = params is None or params.prompt_logprobs is None
        if threshold == 0 or not is_read or self._rules.require_disaggregation:
            return []
        num_known = num_known_tokens(request)
        cached = self._num_cached_tokens(request, decode)
        return [worker for worker in decode if num_known - cached.get(worker, 0) <= threshold]

    def _num_cached_tokens(
        self, request: EngineCoreRequest, workers: Sequence[WorkerClient]
    ) -> dict[WorkerClient, int]:
        """Return how many of the request's known tokens workers have, in whole blocks."""
        sizes = {worker.info.block_size for worker in workers if worker.info is not None}
        return {
            worker: num_blocks * size
            for size in sizes
            for worker, num_blocks in self._index.num_cached(prefix_hashes(request, size)).items()
            if worker.info is not None and worker.info.block_size == size
        }

    def _partners(
        self, prefill: Sequence[WorkerClient], decode: Sequence[WorkerClient]
    ) -> dict[WorkerClient, tuple[WorkerClient, ...]]:
        """Return those of `prefill` that can be used, with those of `decode` they work with."""
        usable, ready = self._pairs.usable(), frozenset(decode)
        partners = {p: tuple(d for d in usable.get(p, ()) if d in ready) for p in prefill}
        return {p: decodes for p, decodes in partners.items() if decodes}

    def _is_queue_full(self, prefill: WorkerClient) -> bool:
        limit = self._rules.max_prefill_queue_tokens
        waiting = prefill.stats.num_waiting_tokens if prefill.stats is not None else 0
        return 0 < limit < waiting

    def _downgrade(
        self,
        request: EngineCoreRequest,
        decode: Sequence[WorkerClient],
        reason: LocalReason,
        error: Callable[..., PdserveError],
    ) -> Route:
        if self._rules.require_disaggregation:
            raise error(
                f"--require-disaggregation: {_REASONS[reason]}", retry_after_ms=_RETRY_AFTER_MS
            )
        return self._local(request, decode, reason)

    def _local(
        self, request: EngineCoreRequest, decode: Sequence[WorkerClient], reason: LocalReason
    ) -> Route:
        chosen = self._policies[WorkerRole.DECODE].pick(decode, request)
        return Route(decode=chosen, reason=reason)


_REASONS: dict[LocalReason, str] = {
    "no_prefill_worker": "no prefill worker with the weights that serve is ready",
    "no_proven_pair": "no prefill worker has proven to work with a ready decode worker",
    "prefill_queue": "every prefill worker has more waiting tokens than --max-prefill-queue-tokens",
}


def _working(decode: Sequence[WorkerClient]) -> list[WorkerClient]:
    """Raises NoWorkerError if none is left, or all that are keep failing."""
    working = [worker for worker in decode if not worker.breaker.is_open]
    if not working:
        wait_s = min((worker.breaker.retry_in_s for worker in decode), default=0.0)
        why = f"{len(decode)} keep failing, the next trial is in {wait_s:.1f} s" if decode else ""
        raise NoWorkerError(
            f"no decode worker is left for this request{why and ': '}{why}",
            retry_after_ms=max(round(wait_s * 1000), _RETRY_AFTER_MS),
        )
    return working
