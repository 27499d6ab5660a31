"""Who takes a request: a prefill and a decode worker, or a decode worker alone and why."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import ClassVar, Literal

from pdserve_common.errors import NoWorkerError, OverloadedError
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import EngineCoreRequest, KVPrefixSource, Pool, WorkerRole
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.workers.routing.candidates import Candidates
from pdserve_router.workers.routing.prefix_index import MAX_LOOKED_AT, PrefixIndex, num_known_tokens
from pdserve_router.workers.routing.prefix_policy import RoutingWeights
from pdserve_router.workers.routing.prefix_source import find_prefix_source, may_lend
from pdserve_router.workers.routing.route_table import RouteTable
from pdserve_router.workers.routing.routing_policy import ROUTING_POLICIES, load
from pdserve_router.workers.worker import Worker

_RETRY_AFTER_MS = 1000

# Where a request goes, and why it stays on decode; values of metrics' labels.
RoutePath = Literal["disaggregated", "local", "pooling"]
LocalReason = Literal[
    "beam_search", "max_tokens_1", "disabled", "short_prompt", "cached_prompt",
    "no_prefill_worker", "no_proven_pair", "prefill_queue",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRules(RoutingWeights):
    """What RouterConfig's flags of the same names say."""

    routing_policy: str = "prefix"
    disaggregation: bool = True
    require_disaggregation: bool = False
    require_transport: str = "any"
    require_determinism: str = "any"
    disaggregation_threshold_tokens: int = 0
    max_prefill_queue_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The workers of one request. Without `prefill`, decode does it all for `reason`."""

    decode: Worker
    prefill: Worker | None = None
    # Forks follow their source, what is sent again may go to whoever holds its blocks.
    reason: LocalReason | Literal["", "fork", "recovery"] = ""
    # Where prefill reads the start of the prompt.
    prefix_source: KVPrefixSource | None = None

    @property
    def path(self) -> RoutePath:
        return "local" if self.prefill is None else "disaggregated"

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Prefill first, if there is one."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def prompt_worker(self) -> Worker:
        """Who computes the prompt."""
        return self.prefill or self.decode

    @property
    def epochs(self) -> tuple[str, ...]:
        """Which starts of the workers' processes these are, as of now."""
        return tuple(worker.epoch for worker in self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRoute:
    """The one worker of a pooling request, a prefill worker."""

    prompt_worker: Worker
    path: ClassVar[RoutePath] = "pooling"
    reason: ClassVar[Literal[""]] = ""

    @property
    def workers(self) -> tuple[Worker, ...]:
        """It alone."""
        return (self.prompt_worker,)

    @property
    def epochs(self) -> tuple[str, ...]:
        """Which start of its process this is, as of now."""
        return (self.prompt_worker.epoch,)


AnyRoute = Route | PoolingRoute


class RouteChooser:
    """Applies the rules in this order: what need not cross the handoff (beam_search, max_tokens_1,
    disabled, short_prompt) stays on decode; so do, unless disaggregation is required, what decode
    has cached (cached_prompt) and what cannot cross it (no_prefill_worker, no_proven_pair,
    prefill_queue); all else is disaggregated.
    """

    def __init__(
        self,
        rules: RoutingRules,
        table: RouteTable,
        index: PrefixIndex[Worker],
        runtime: Runtime,
    ) -> None:
        self._rules = rules
        self._table = table
        self._index = index
        self._policy = ROUTING_POLICIES[rules.routing_policy](rules, runtime)
        self._rng = runtime.rng

    def choose(
        self,
        request: EngineCoreRequest,
        *,
        name: str,
        exclude: AbstractSet[Worker] = frozenset(),
        decode: Worker | None = None,
        session: str = "",
        hashes: Sequence[int] = (),
    ) -> AnyRoute:
        """Choose among the workers placed under `name`; see WorkerPool.route."""
        task = request.task
        if decode is None and request.data_parallel_rank is not None:
            decode = self._of_rank(request.data_parallel_rank, name, exclude)
        candidates = Candidates(
            self._table,
            name,
            index=self._index,
            rng=self._rng,
            hashes=hashes,
            exclude=exclude,
            only_decode=decode,
            max_queue_tokens=self._rules.max_prefill_queue_tokens,
            is_pooling=isinstance(task, Pool),
        )
        if isinstance(task, Pool):
            return self._pooling(request, candidates, session)
        if reason := self._reason_to_stay(request, task.sampling_params):
            return self._local(request, candidates, reason, session)
        if cached := self._with_prompt_cached(request, task.sampling_params, candidates):
            return Route(decode=min(cached, key=load), reason="cached_prompt")
        pair = self._policy.pick_pair(request, candidates, session=session)
        if pair is not None:
            source = self._prefix_source(request, candidates, *pair, exclude)
            return Route(prefill=pair[0], decode=pair[1], prefix_source=source)
        return self._downgrade(request, candidates, session)

    def _of_rank(self, rank: int, name: str, exclude: AbstractSet[Worker]) -> Worker:
        """Return the decode worker with the least load of those with a data-parallel rank, of which
        each group has one. Raises NoWorkerError if there is none.
        """
        workers = [
            worker
            for worker in self._table.workers(WorkerRole.DECODE, name).items
            if worker.info is not None
            and worker.info.data_parallel_rank == rank
            and worker not in exclude
        ]
        if not workers:
            raise NoWorkerError(f"no decode worker of the data-parallel rank {rank} is ready")
        return min(workers, key=load)

    def _pooling(
        self, request: EngineCoreRequest, candidates: Candidates, session: str
    ) -> PoolingRoute:
        """Raises NoWorkerError if no prefill worker is left, or all that are keep failing;
        OverloadedError if too much waits on them.
        """
        worker = self._policy.pick_prefill(request, candidates, session=session)
        if worker is not None:
            return PoolingRoute(prompt_worker=worker)
        if candidates.has_prefill():
            raise OverloadedError(_REASONS["prefill_queue"], retry_after_ms=_RETRY_AFTER_MS)
        raise NoWorkerError(
            "no prefill worker is left for this request", retry_after_ms=_RETRY_AFTER_MS
        )

    def _prefix_source(
        self,
        request: EngineCoreRequest,
        candidates: Candidates,
        prefill: Worker,
        decode: Worker,
        exclude: AbstractSet[Worker],
    ) -> KVPrefixSource | None:
        """Return where prefill reads what it has not cached itself, if it reads at all."""
        if prefill.info is None or not prefill.info.has_prefix_pulls:
            return None
        cached = candidates.cached(request)
        own = cached.num_tokens(prefill)

        def lends(worker: Worker) -> bool:
            return worker not in exclude and may_lend(worker, prefill)

        lenders = cached.longest(WorkerRole.DECODE, 1, lends, above=own)
        if lenders and lends(decode):
            lenders.append(decode)
        return find_prefix_source(decode, {each: cached.num_tokens(each) for each in lenders})

    def _reason_to_stay(
        self, request: EngineCoreRequest, params: SamplingParams
    ) -> LocalReason | None:
        """Return why the request needs no prefill worker; None if it does."""
        num_done = len(request.resume_output_token_ids)
        if params.use_beam_search:
            return "beam_search"
        if params.max_tokens == num_done + 1:
            return "max_tokens_1"
        if not self._rules.disaggregation:
            return "disabled"
        # One token is computed sooner than its block is moved.
        threshold = max(self._rules.disaggregation_threshold_tokens, 1)
        return "short_prompt" if num_known_tokens(request) <= threshold else None

    def _with_prompt_cached(
        self, request: EngineCoreRequest, params: SamplingParams, candidates: Candidates
    ) -> list[Worker]:
        """Return the decode workers that have little left to compute. They may have evicted some
        of it meanwhile, so nobody relies on it where disaggregation is required.
        """
        threshold = self._rules.disaggregation_threshold_tokens
        # Logprobs of a prompt have it computed whole.
        is_read = params.prompt_logprobs is None
        if threshold == 0 or not is_read or self._rules.require_disaggregation:
            return []
        num_known = num_known_tokens(request)
        return candidates.cached(request).longest(
            WorkerRole.DECODE,
            MAX_LOOKED_AT,
            candidates.allows_decode,
            above=num_known - threshold - 1,
        )

    def _downgrade(self, request: EngineCoreRequest, candidates: Candidates, session: str) -> Route:
        """There is no pair to use."""
        reason: LocalReason = "prefill_queue"
        if not candidates.has_pair():
            reason = "no_proven_pair" if candidates.has_prefill() else "no_prefill_worker"
        route = self._local(request, candidates, reason, session)
        if self._rules.require_disaggregation:
            error = OverloadedError if reason == "prefill_queue" else NoWorkerError
            raise error(
                f"--require-disaggregation: {_REASONS[reason]}", retry_after_ms=_RETRY_AFTER_MS
            )
        return route

    def _local(
        self,
        request: EngineCoreRequest,
        candidates: Candidates,
        reason: LocalReason,
        session: str,
    ) -> Route:
        """Raises NoWorkerError if no decode worker is left, or all that are keep failing."""
        if (decode := self._policy.pick_decode(request, candidates, session=session)) is None:
            raise NoWorkerError(
                "no decode worker is left for this request", retry_after_ms=_RETRY_AFTER_MS
            )
        return Route(decode=decode, reason=reason)


_REASONS: dict[LocalReason, str] = {
    "no_prefill_worker": "no prefill worker with the weights that serve is ready",
    "no_proven_pair": "no prefill worker has proven to work with a ready decode worker",
    "prefill_queue": "the prefill workers looked at have more waiting tokens than "
    "--max-prefill-queue-tokens",
}
