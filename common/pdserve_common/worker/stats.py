"""Turns an engine's SchedulerStats and outputs into Prometheus metrics."""

from pdserve_common.engine_types import EngineCoreOutputs, SchedulerStats
from pdserve_common.metrics import EngineMetrics


class EngineStatsRecorder:
    """Feeds EngineMetrics; counters grow by the difference to the stats before."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._last = SchedulerStats()

    def record_stats(self, stats: SchedulerStats, has_computed: bool) -> None:
        """Take in the load after a step."""
        metrics, last = self._metrics, self._last
        metrics.requests_running.set(stats.num_running_reqs)
        metrics.requests_waiting.set(stats.num_waiting_reqs)
        metrics.waiting_tokens.set(stats.num_waiting_tokens)
        used = stats.num_total_blocks - stats.num_free_blocks
        metrics.kv_blocks.labels(state="used").set(used)
        metrics.kv_blocks.labels(state="free").set(stats.num_free_blocks)
        metrics.kv_blocks.labels(state="cached").set(stats.num_cached_blocks)
        metrics.kv_cache_usage.set(stats.kv_cache_usage)
        metrics.prefix_cache_queries.inc(stats.prefix_cache_queries - last.prefix_cache_queries)
        metrics.prefix_cache_hits.inc(stats.prefix_cache_hits - last.prefix_cache_hits)
        metrics.preemptions.inc(stats.num_preemptions - last.num_preemptions)
        if has_computed:
            metrics.step_duration.observe(stats.step_duration_s)
            metrics.step_tokens.observe(stats.step_num_tokens)
        self._last = stats

    def record_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take in a step's outputs."""
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self._metrics.engine_requests.labels(outcome=str(output.finish_reason)).inc()
            if output.prefill_stats is not None:
                self._metrics.queue_duration.observe(output.prefill_stats.queue_s)
            if output.num_nans_in_logits:
                self._metrics.nan_logits.inc(output.num_nans_in_logits)
