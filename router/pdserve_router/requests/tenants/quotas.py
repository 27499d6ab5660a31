"""What each tenant may ask for: requests and tokens per minute, requests at a time, priority; and
whose turn it is.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType

from pdserve_common.metrics.quotas import ACCEPTED, QuotaMetrics
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.tenants.fair_queue import FairQueue
from pdserve_router.requests.tenants.part_slots import PartSlots
from pdserve_router.requests.tenants.tenant_account import (
    Account,
    TenantLimits,
    duration_text,
    is_pooled,
    num_tokens_reserved,
)

_NOBODY: Mapping[str, TenantLimits] = {}


def no_limits() -> Mapping[str, TenantLimits]:
    """Nobody has limits."""
    return _NOBODY


class Quotas:
    """Holds tenants to their limits; who is not named in them has none."""

    def __init__(
        self,
        limits: Callable[[], Mapping[str, TenantLimits]],
        *,
        num_parts: int,
        turns: FairQueue,
        metrics: QuotaMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limits` returns those of now by tenant, the same object until they change. This router
        gives one of `num_parts` equal parts of them. `turns` are of prompt tokens.
        """
        self._read_limits = limits
        self._num_parts = num_parts
        self._turns = turns
        self._metrics = metrics
        self._clock = clock
        self._limits: Mapping[str, TenantLimits] = {}
        # The accounts of those in the limits.
        self._accounts: dict[str, Account] = {}
        self._follow()

    def admit(self, tenant: str, *, num_slots: int) -> "Admission":
        """Let a call in of which nothing is known but whose it is, and that so many more requests
        may wait. Raises OverloadedError if its tenant has too many of them already, RateLimitError
        also if there is not one token for it: then nobody has to make tokens of it.
        """
        account = self._account(tenant)
        account.check_waiting(1, num_slots)
        account.take(num_requests=1, num_tokens=0, num_running=1)
        account.num_waiting += 1
        return Admission(account, self._turns, self._clock)

    def num_at_once(self, tenant: str, num_parts: int, *, num_slots: int) -> int:
        """Return how many parts of a call that was let in may run at once, while so many more
        requests may wait; at least one.
        """
        return self._account(tenant).num_at_once(num_parts, num_slots)

    def admit_part(self, tenant: str, slots: PartSlots) -> "Admission":
        """Let in one more part of a call, in the slot of one that has ended. It is no request of
        its own, and is not refused for want of tokens, as the call would have been in vain: the
        tenant's next call waits longer instead.
        """
        account = self._account(tenant)
        if not slots.take(account):
            account.num_running += 1
        account.num_waiting += 1
        return Admission(account, self._turns, self._clock)

    def headers(self, tenant: str) -> dict[str, str]:
        """Return OpenAI's x-ratelimit headers: what this router would let a tenant have now."""
        account = self._account(tenant)
        headers: dict[str, str] = {}
        for kind, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            if bucket.size is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(math.floor(bucket.size))
                headers[f"x-ratelimit-remaining-{kind}"] = str(math.floor(bucket.left()))
                headers[f"x-ratelimit-reset-{kind}"] = duration_text(bucket.fill_s())
        return headers

    def _account(self, tenant: str) -> Account:
        self._follow()
        return self._accounts.get(tenant) or self._new_account()

    def _new_account(self) -> Account:
        return Account(self._num_parts, self._metrics, self._clock)

    def _follow(self) -> None:
        limits = self._read_limits()
        if limits is self._limits:
            return
        self._metrics.begin(each.name for each in limits.values())
        before, self._accounts, self._limits = self._accounts, {}, limits
        for tenant, each in limits.items():
            self._accounts[tenant] = before.get(tenant) or self._new_account()
            self._accounts[tenant].set_limits(tenant, each)


class Admission:
    """A call that was let in, until its requests have begun. Use as a context manager: if it is
    left by an exception, what the call has taken is given back, but for its requests per minute.
    """

    def __init__(self, account: Account, turns: FairQueue, clock: Callable[[], float]) -> None:
        self._account = account
        self._turns = turns
        self._clock = clock
        self._reservations: list[Reservation] = []

    def reserve(
        self,
        requests: Sequence[ProcessedInput],
        *,
        num_slots: int,
        slots: PartSlots | None = None,
    ) -> None:
        """Take what the call's requests may need; `slots` are for those that follow them. Raises
        what `admit` raises, and InvalidRequestError for what there will never be enough of.
        """
        self._account.check(requests)
        num_tokens = [num_tokens_reserved(each) for each in requests]
        num_more = len(requests) - 1
        self._account.check_waiting(num_more, num_slots)
        self._account.take(
            # The inputs of a call for vectors are one request.
            num_requests=0 if is_pooled(requests) else num_more,
            num_tokens=sum(num_tokens),
            num_running=num_more,
        )
        self._account.num_waiting += num_more
        self._account.count(ACCEPTED, len(requests))
        self._reservations = [Reservation(self._account, each, slots) for each in num_tokens]

    def reserve_part(self, request: ProcessedInput, slots: PartSlots) -> None:
        """As `reserve`, of a part that `admit_part` let in. Raises nothing."""
        num_tokens = num_tokens_reserved(request)
        self._account.tokens.take(num_tokens)
        self._account.count(ACCEPTED)
        self._reservations = [Reservation(self._account, num_tokens, slots)]

    def with_priority(self, request: ProcessedInput) -> ProcessedInput:
        """Return one of the requests with the priority that it has with its tenant's limits."""
        return self._account.with_priority(request)

    async def turn(self, index: int, request: ProcessedInput) -> "Reservation":
        """Wait until one of the requests may go to its workers: each has a turn of its own, so that
        a call of many does not pass all at once. Return what it holds until it ends. Raises
        DeadlineExceededError.
        """
        reservation = self._reservations[index]
        if not self._account.tenant:
            return reservation
        work = len(request.core_request.prompt_token_ids)
        deadline = request.core_request.deadline
        await self._turns.begin(
            self._account.tenant,
            work,
            share=self._account.share,
            timeout_s=None if deadline is None else max(0.0, deadline - self._clock()),
        )
        reservation.on_token = partial(self._turns.end, work)
        return reservation

    def __enter__(self) -> "Admission":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._reservations:
            self._account.num_running -= 1
            self._account.num_waiting -= 1
        elif exc_type is not None:
            for each in self._reservations:
                each.settle()


class Reservation:
    """What a request holds of its tenant's limits until it ends."""

    __slots__ = ("_account", "_is_settled", "_is_waiting", "_num_tokens", "_slots", "on_token")

    def __init__(self, account: Account, num_tokens: int, slots: PartSlots | None) -> None:
        self._account = account
        self._num_tokens = num_tokens
        self._slots = slots
        self._is_waiting = True
        self._is_settled = False
        # Its prompt is computed.
        self.on_token: Callable[[], None] | None = None

    def note_token(self) -> None:
        """The request has its first token. Does nothing the second time."""
        if self._is_waiting:
            self._is_waiting = False
            self._account.num_waiting -= 1
            if self.on_token is not None:
                self.on_token()

    def settle(self, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """The request has ended, and used so many tokens. Does nothing the second time."""
        if self._is_settled:
            return
        self._is_settled = True
        self.note_token()
        account = self._account
        if self._slots is None or not self._slots.leave(account):
            account.num_running -= 1
        account.tokens.take(num_prompt_tokens + num_output_tokens - self._num_tokens)
        account.count_tokens(num_prompt_tokens, num_output_tokens)
