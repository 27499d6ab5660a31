"""Turns what an engine's steps brought into Prometheus metrics."""

from collections.abc import Iterable

from pdserve_common.engine_types import EngineCoreOutput, SchedulerStats
from pdserve_common.metrics import EngineMetrics


class EngineStatsRecorder:
    """Feeds EngineMetrics after every step. Counters grow by the difference to the last stats."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._last = SchedulerStats()

    def __call__(
        self, stats: SchedulerStats, outputs: Iterable[EngineCoreOutput], has_computed: bool
    ) -> None:
        """Take in one step; `has_computed` tells whether it ran the model."""
        self._record_load(stats)
        if has_computed:
            self._metrics.step_duration.observe(stats.step_duration_s)
            self._metrics.step_tokens.observe(stats.step_num_tokens)
        for output in outputs:
            self._record_output(output)

    def _record_load(self, stats: SchedulerStats) -> None:
        metrics, last = self._metrics, self._last
        metrics.requests_running.set(stats.num_running_reqs)
        metrics.requests_waiting.set(stats.num_waiting_reqs)
        metrics.requests_waiting_for_decode.set(stats.num_waiting_for_decode_reqs)
        metrics.waiting_tokens.set(stats.num_waiting_tokens)
        metrics.slots.labels(state="used").set(stats.num_running_reqs)
        metrics.slots.labels(state="free").set(stats.num_slots - stats.num_running_reqs)
        metrics.slot_usage.set(stats.slot_usage)
        used = stats.num_total_blocks - stats.num_free_blocks
        metrics.kv_blocks.labels(state="used").set(used)
        metrics.kv_blocks.labels(state="free").set(stats.num_free_blocks - stats.num_cached_blocks)
        metrics.kv_blocks.labels(state="cached").set(stats.num_cached_blocks)
        metrics.kv_cache_usage.set(stats.kv_cache_usage)
        metrics.prefix_cache_queries.inc(stats.prefix_cache_queries - last.prefix_cache_queries)
        metrics.prefix_cache_hits.inc(stats.prefix_cache_hits - last.prefix_cache_hits)
        metrics.common_prefix_blocks.set(stats.num_common_prefix_blocks)
        metrics.preemptions.inc(stats.num_preemptions - last.num_preemptions)
        self._last = stats

    def _record_output(self, output: EngineCoreOutput) -> None:
        if output.finish_reason is not None:
            self._metrics.engine_requests.labels(outcome=str(output.finish_reason)).inc()
        if output.prefill_stats is not None:
            self._metrics.queue_duration.observe(output.prefill_stats.queue_s)
        if output.num_nans_in_logits:
            self._metrics.nan_logits.inc(output.num_nans_in_logits)
