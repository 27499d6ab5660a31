"""What a request's handoff from prefill to decode has come to."""

import dataclasses
from typing import NamedTuple

from pdserve_common.types.engine import KVTransferStats
from pdserve_engine.request.progress import ScheduledTokens
from pdserve_engine.request.sched_output import ModelRunnerOutput


class HeldResult(NamedTuple):
    """What a speculative first step brought; `token_ids` follow the computed ones."""

    scheduled: ScheduledTokens
    token_ids: tuple[int, ...]
    result: ModelRunnerOutput
    since: float


class Handoff:
    """Most is decode's, where its own methods write. Times are by the engine's clock."""

    __slots__ = (
        "decode_queue_s",
        "held_result",
        "held_up_before_s",
        "kv_ready_time",
        "kv_transfer_stats",
        "needs_remote_kv",
        "pulled_token_ids",
    )

    def __init__(self, *, needs_remote_kv: bool) -> None:
        # Decode: the prompt's KV still has to be pulled, or its release to be acknowledged by
        # prefill. A step that runs nevertheless is speculative (rule K4). Once the pull is over, a
        # preemption has the prompt computed here.
        self.needs_remote_kv = needs_remote_kv
        # What prefill has sampled, and what a step has brought, while the release is not
        # acknowledged.
        self.pulled_token_ids: tuple[int, ...] = ()
        self.held_result: HeldResult | None = None
        self.kv_ready_time: float | None = None
        self.kv_transfer_stats: KVTransferStats | None = None
        # Prefill, by `RemoteDecodes`: how long decode, being full, held up its queue until this
        # came, and then this.
        self.held_up_before_s = self.decode_queue_s = 0.0

    def landed(self, time: float, token_ids: tuple[int, ...]) -> None:
        """All KV is here, and the tokens that prefill has sampled."""
        self.kv_ready_time = time
        self.pulled_token_ids = token_ids

    def accepted(self, stats: KVTransferStats) -> None:
        """Prefill has acknowledged the release."""
        self.needs_remote_kv = False
        self.kv_transfer_stats = stats

    def hold(self, held: HeldResult | None) -> None:
        """Keep what the speculative first step brought; None: it is applied, or does not count."""
        self.held_result = held

    def take_pulled_token_ids(self) -> tuple[int, ...]:
        """Return prefill's tokens, which become the request's own."""
        token_ids, self.pulled_token_ids = self.pulled_token_ids, ()
        return token_ids

    def take_kv_transfer_stats(
        self, now: float, first_scheduled_time: float | None
    ) -> KVTransferStats | None:
        """Return what the pull cost, once, with the way to decode's first own token filled in."""
        stats, self.kv_transfer_stats = self.kv_transfer_stats, None
        if stats is None or self.kv_ready_time is None:
            return None
        admitted = now if first_scheduled_time is None else first_scheduled_time
        computed = now if self.held_result is None else self.held_result.since
        return dataclasses.replace(
            stats,
            decode_admit_s=admitted - self.kv_ready_time,
            first_decode_step_s=computed - admitted,
            release_ack_s=now - computed,
        )
