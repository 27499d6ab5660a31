"""What a tenant has used of its limits, and what it may not ask for at all."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pdserve_common.errors import InvalidRequestError, OverloadedError
from pdserve_common.metrics.quotas import QuotaMetrics
from pdserve_common.types.engine import Generate, Pool
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.tenants.token_bucket import TokenBucket

# What an answer is taken to need whose request leaves max_tokens unset: it may have all that fits.
UNSET_MAX_TOKENS = 1024
# While as many requests run as may: nobody knows when one ends.
BUSY_RETRY_AFTER_S = 1.0
# A tenant may have so many times as many requests waiting as there are slots left (dynamic
# thresholds: Choudhury and Hahne, 1998): one alone three quarters of all.
_WAITING_PER_SLOT = 3


class RateLimitError(OverloadedError):
    """A tenant has used up what it may have for now. Retryable after a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may have of all routers together; None: no limit."""

    # In metrics; "": not in them.
    name: str = ""
    requests_per_minute: int | None = None
    # Prompts and answers count.
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    # As EngineCoreRequest has it: lower is better.
    best_priority: int | None = None
    # The share of busy workers, beside the other tenants' shares.
    share: int = 1


class Account:
    """What a tenant has used of its limits: a few numbers, whatever it sends."""

    def __init__(self, num_parts: int, metrics: QuotaMetrics, clock: Callable[[], float]) -> None:
        # "": nobody whom anybody knows.
        self.tenant = ""
        self._limits = TenantLimits()
        self._num_parts = num_parts
        self._metrics = metrics
        self._max_running: int | None = None
        self.num_running = 0
        # The part of those without a token yet.
        self.num_waiting = 0
        self.requests = TokenBucket(clock)
        self.tokens = TokenBucket(clock)

    @property
    def share(self) -> int:
        return self._limits.share

    def set_limits(self, tenant: str, limits: TenantLimits) -> None:
        """From now on; what was used stays used."""
        self.tenant = tenant
        self._limits = limits
        self.requests.resize(self._part(limits.requests_per_minute))
        self.tokens.resize(self._part(limits.tokens_per_minute))
        max_running = self._part(limits.max_concurrent_requests)
        self._max_running = None if max_running is None else math.ceil(max_running)

    def take(self, *, num_requests: int, num_tokens: int, num_running: int) -> None:
        """Take all of it. Raises RateLimitError and takes nothing if not all of it is there, or
        not one token.
        """
        most = self._max_running
        if num_running and most is not None and self.num_running + num_running > most:
            left = max(0, most - self.num_running)
            raise self._refusal(
                "max_concurrent_requests", left, most, num_running, BUSY_RETRY_AFTER_S
            )
        for name, bucket, amount in (
            ("requests_per_minute", self.requests, num_requests),
            ("tokens_per_minute", self.tokens, max(1, num_tokens)),
        ):
            if bucket.size is not None and (wait_s := bucket.wait_s(amount)):
                raise self._refusal(name, bucket.left(), bucket.size, amount, wait_s)
        self.num_running += num_running
        self.requests.take(num_requests)
        self.tokens.take(num_tokens)

    def check_waiting(self, num_more: int, num_slots: int) -> None:
        """Raise OverloadedError if as many more would leave others too few slots to wait."""
        most = _WAITING_PER_SLOT * num_slots
        if self.tenant and num_more and self.num_waiting + num_more > most:
            raise OverloadedError(
                f"{self.num_waiting} requests of this API key wait for their first token, at most "
                f"{most} may while {num_slots} slots are left",
                retry_after_ms=math.ceil(1000 * BUSY_RETRY_AFTER_S),
            )

    def num_at_once(self, num_parts: int, num_slots: int) -> int:
        """Return how many parts of a call may run at once, which has taken one slot, while so many
        more requests may wait; at least one, and no more than there are.
        """
        num_more = num_parts - 1
        if self._max_running is not None:
            num_more = min(num_more, self._max_running - self.num_running)
        if self.tenant:
            num_more = min(num_more, _WAITING_PER_SLOT * num_slots - self.num_waiting)
        return 1 + max(0, min(num_more, num_slots))

    def check(self, requests: Sequence[ProcessedInput]) -> None:
        """Raise InvalidRequestError for what a call may never ask for."""
        best = self._limits.best_priority
        priority = min(each.core_request.priority for each in requests)
        # 0 is none of its own.
        if best is not None and priority and priority < best:
            raise InvalidRequestError(
                f"priority is {priority}, must be at least {best} with this API key",
                field="priority",
            )
        for name, limit in (
            ("requests per minute", self._limits.requests_per_minute),
            ("concurrent requests", self._max_running),
        ):
            if limit is not None and len(requests) > limit and not is_pooled(requests):
                raise InvalidRequestError(
                    f"prompt has {len(requests)} prompts, at most {limit} {name} with this API key",
                    field="prompt",
                )
        if self._limits.tokens_per_minute is not None:
            _check_num_tokens(requests, self._limits.tokens_per_minute)

    def with_priority(self, request: ProcessedInput) -> ProcessedInput:
        """Return a request that was checked, with the best priority that it may have if it has none
        of its own.
        """
        best = self._limits.best_priority
        if best is None or best <= 0 or request.core_request.priority:
            return request
        return replace(request, core_request=replace(request.core_request, priority=best))

    def count(self, outcome: str, number: int = 1) -> None:
        self._metrics.count_requests(self._limits.name, outcome, number)

    def count_tokens(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._metrics.count_tokens(self._limits.name, num_prompt_tokens, num_output_tokens)

    def _part(self, limit: int | None) -> float | None:
        """Return what this router gives of a limit."""
        return None if limit is None else max(1.0, limit / self._num_parts)

    def _refusal(
        self, name: str, left: float, most: float, amount: int, wait_s: float
    ) -> RateLimitError:
        self.count(name)
        where = "" if self._num_parts == 1 else " at this router"
        return RateLimitError(
            f"{name} of this API key is {math.floor(most)}{where}, {math.floor(left)} are left, "
            f"{amount} are needed: try again in {duration_text(wait_s)}",
            retry_after_ms=math.ceil(1000 * wait_s),
        )


def is_pooled(requests: Sequence[ProcessedInput]) -> bool:
    """Are these the inputs of a call for vectors?"""
    return isinstance(requests[0].core_request.task, Pool)


def num_tokens_reserved(request: ProcessedInput) -> int:
    """Return how many tokens a request may need; of an answer without max_tokens, a guess."""
    core_request = request.core_request
    num_prompt_tokens = len(core_request.prompt_token_ids)
    if isinstance(core_request.task, Pool):
        return num_prompt_tokens
    params = core_request.task.sampling_params
    assert params.max_tokens is not None, "the input processor sets it"
    most = params.max_tokens if request.has_max_tokens else UNSET_MAX_TOKENS
    return num_prompt_tokens + (params.best_of or params.n) * min(params.max_tokens, most)


def _check_num_tokens(requests: Sequence[ProcessedInput], most: int) -> None:
    """Raise InvalidRequestError if a call asks for more tokens than it may have in a minute."""
    num_prompt_tokens = sum(len(each.core_request.prompt_token_ids) for each in requests)
    if num_prompt_tokens > most:
        raise InvalidRequestError(
            f"prompt has {num_prompt_tokens} tokens, at most {most} per minute with this API key",
            field="prompt",
        )
    num_tokens = sum(map(num_tokens_reserved, requests))
    task = requests[0].core_request.task
    if num_tokens > most and requests[0].has_max_tokens and isinstance(task, Generate):
        raise InvalidRequestError(
            f"max_tokens is {task.sampling_params.max_tokens}: with the prompt that may be "
            f"{num_tokens} tokens, at most {most} per minute with this API key",
            field="max_tokens",
        )


def duration_text(seconds: float) -> str:
    """Return a duration as OpenAI's headers have it: 250ms, 1.5s, 6m0s."""
    if (milliseconds := math.ceil(1000 * seconds)) < 1000:
        return f"{milliseconds}ms"
    if (rounded := max(1.0, float(f"{seconds:.4g}"))) < 60:
        return f"{rounded:g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"
