"""Turns what an engine's steps brought into Prometheus metrics."""

import logging
from collections.abc import Iterable, Mapping

from pdserve_common import defects
from pdserve_common.engine_types import EngineCoreOutput, SchedulerStats
from pdserve_common.load_log import LoadLog
from pdserve_common.metrics import EngineMetrics, total

logger = logging.getLogger(__name__)


class EngineStatsRecorder:
    """Feeds EngineMetrics after every step, and logs the load. Counters grow by the difference to
    the last stats.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._last = SchedulerStats()
        self._num_generation_tokens = 0
        self._load_log = LoadLog(self._totals, self._report)

    def __call__(
        self, stats: SchedulerStats, outputs: Iterable[EngineCoreOutput], has_computed: bool
    ) -> None:
        """Take in one step; `has_computed` tells whether it ran the model."""
        with defects.contained("metrics", "a step's figures"):
            if has_computed:
                self._load_log.note()
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
        metrics.requests_waiting_for_fsm.set(stats.num_waiting_for_fsm_reqs)
        metrics.requests_waiting_for_decode.set(stats.num_waiting_for_decode_reqs)
        metrics.waiting_tokens.set(stats.num_waiting_tokens)
        metrics.slots.labels(state="used").set(stats.num_used_slots)
        metrics.slots.labels(state="free").set(stats.num_slots - stats.num_used_slots)
        metrics.slot_usage.set(stats.slot_usage)
        used = stats.num_total_blocks - stats.num_free_blocks
        metrics.kv_blocks.labels(state="used").set(used)
        metrics.kv_blocks.labels(state="free").set(stats.num_free_blocks - stats.num_cached_blocks)
        metrics.kv_blocks.labels(state="cached").set(stats.num_cached_blocks)
        metrics.kv_cache_usage.set(stats.kv_cache_usage)
        metrics.prefix_cache_queries.inc(stats.prefix_cache_queries - last.prefix_cache_queries)
        metrics.prefix_cache_hits.inc(stats.prefix_cache_hits - last.prefix_cache_hits)
        metrics.common_prefix_blocks.set(stats.num_common_prefix_blocks)
        metrics.late_masks.inc(stats.num_late_masks - last.num_late_masks)
        metrics.lora.loaded.set(stats.num_loras)
        metrics.lora.loads.inc(stats.num_lora_loads - last.num_lora_loads)
        metrics.lora.evictions.inc(stats.num_lora_evictions - last.num_lora_evictions)
        metrics.lora.steps.inc(stats.num_lora_steps - last.num_lora_steps)
        metrics.preemptions.inc(stats.num_preemptions - last.num_preemptions)
        self._last = stats

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
            "computed_tokens": total(self._metrics.step_tokens),
            "generation_tokens": self._num_generation_tokens,
            "prefix_cache_queries": total(self._metrics.prefix_cache_queries),
            "prefix_cache_hits": total(self._metrics.prefix_cache_hits),
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
