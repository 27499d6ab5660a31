"""Turns what an engine's steps brought into Prometheus metrics."""

import logging
from collections.abc import Iterable, Mapping

from pdserve_common.metrics.services import EngineMetrics
from pdserve_common.observability import defects
from pdserve_common.observability.load_log import LoadLog
from pdserve_common.types.engine import EngineCoreOutput, SchedulerStats

logger = logging.getLogger(__name__)


class EngineStatsRecorder:
    """Feeds EngineMetrics after every step, and logs the load."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._last = SchedulerStats()
        self._num_computed_tokens = 0
        self._num_generation_tokens = 0
        self._load_log = LoadLog(self._totals, self._report)

    def __call__(
        self, stats: SchedulerStats, outputs: Iterable[EngineCoreOutput], has_computed: bool
    ) -> None:
        """Take in one step; `has_computed` tells whether it ran the model."""
        with defects.contained("metrics", "a step's figures"):
            if has_computed:
                self._load_log.note()
            self._last = stats
            self._metrics.stats.record(stats, has_computed=has_computed)
            self._num_computed_tokens += has_computed * stats.step_num_tokens
            for output in outputs:
                self._record_output(output)

    def _record_output(self, output: EngineCoreOutput) -> None:
        self._num_generation_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            self._metrics.engine_requests.labels(outcome=str(output.finish_reason)).inc()
        if output.prefill_stats is not None:
            self._metrics.queue_duration.observe(output.prefill_stats.queue_s)
        for drafts in output.draft_stats:
            self._metrics.drafts.record(drafts)
        if output.num_nans_in_logits:
            self._metrics.nan_logits.inc(output.num_nans_in_logits)

    def _totals(self) -> Mapping[str, float]:
        return {
            "computed_tokens": self._num_computed_tokens,
            "generation_tokens": self._num_generation_tokens,
            "prefix_cache_queries": self._last.prefix_cache_queries,
            "prefix_cache_hits": self._last.prefix_cache_hits,
        }

    def _report(self, per_s: Mapping[str, float]) -> bool:
        stats = self._last
        computed, generated = per_s["computed_tokens"], per_s["generation_tokens"]
        hits, queries = per_s["prefix_cache_hits"], per_s["prefix_cache_queries"]
        logger.info(
            "load: %(num_running)d running, %(num_waiting)d waiting, KV usage "
            "%(kv_cache_usage_percent).1f%%; per second %(prompt_tokens_per_s).1f prompt tokens, "
            "%(generation_tokens_per_s).1f generated; prefix cache hits "
            "%(prefix_cache_hit_percent).1f%%",
            {
                "num_running": stats.num_running_reqs,
                "num_waiting": stats.num_waiting_reqs,
                "kv_cache_usage_percent": round(100 * stats.kv_cache_usage, 1),
                # All but those that bring the next one.
                "prompt_tokens_per_s": round(max(0.0, computed - generated), 3),
                "generation_tokens_per_s": round(generated, 3),
                "prefix_cache_hit_percent": round(100 * hits / queries, 1) if queries else 0.0,
            },
        )
        return bool(stats.num_running_reqs or stats.num_waiting_reqs)
