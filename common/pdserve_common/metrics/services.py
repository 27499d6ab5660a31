"""The metrics of routers, workers and engines, each declared once, with its buckets taken from a
named family. Those of one feature are in the modules beside this one, those of stats with their
fields in types/engine.py.

Each process builds the groups of its role on its own registry. Labels are bounded; request ids
never are labels.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve_common.limits.names import LIMITS
from pdserve_common.metrics.buckets import (
    REQUEST_BUCKETS,
    STAGE_BUCKETS,
    TOKEN_BUCKETS,
    TTFT_BUCKETS,
)
from pdserve_common.metrics.drafts import DraftMetrics
from pdserve_common.metrics.lora import RouterLoraMetrics
from pdserve_common.metrics.pooling import PoolingMetrics
from pdserve_common.metrics.prefix_index import PrefixIndexMetrics
from pdserve_common.metrics.quotas import QuotaMetrics
from pdserve_common.metrics.stats_fields import figures_of
from pdserve_common.metrics.tensors import PictureMetrics
from pdserve_common.types.engine import FinishReason, SchedulerStats

# It takes a figure's value out of stats.
_Value: TypeAlias = Callable[[Any], float]
FINISH_REASONS = tuple(map(str, FinishReason))

# Peers without a link whose series a worker keeps: the last ones, whose ends are to be scraped.
MAX_PEERS_AWAY = 64


def begin(counter: Counter, **values: Iterable[str]) -> None:
    """Make all combinations' series, at 0: to `rate` the first sample of one is no increase."""
    for combination in itertools.product(*values.values()):
        counter.labels(**dict(zip(values, combination, strict=True)))


def total(metric: Counter | Gauge | Histogram, **labels: str) -> float:
    """Return the sum over its series with these labels; a histogram's of what it has observed."""
    suffix = {Counter: "_total", Histogram: "_sum"}.get(type(metric), "")
    return sum(
        sample.value
        for family in metric.collect()
        for sample in family.samples
        if sample.name == family.name + suffix and labels.items() <= sample.labels.items()
    )


class BuildMetrics:
    """Every process: what it is. `kernels` is EngineInfo's, empty where nothing computes."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        role: str,
        version: str,
        model: str,
        kernels: str = "",
    ) -> None:
        info = Gauge(
            "pdserve_build_info",
            "Always 1; what this process is",
            ["role", "version", "model", "kernels"],
            registry=registry,
        )
        info.labels(role=role, version=version, model=model, kernels=kernels).set(1)


class LimitMetrics:
    """Every process: what its ports refused or cut."""

    def __init__(self, registry: CollectorRegistry, *servers: str) -> None:
        """`servers` are those of LIMITS that this process has."""
        self._hits = Counter(
            "pdserve_connection_limits_total",
            "Connections, calls and messages that a port refused or cut, by its server and why",
            ["server", "limit"],
            registry=registry,
        )
        for server in servers:
            begin(self._hits, server=(server,), limit=LIMITS[server])

    def count(self, server: str, limit: str) -> None:
        """From any thread."""
        self._hits.labels(server=server, limit=limit).inc()


LARGE_REQUEST_OUTCOMES = ("done", "refused", "timeout", "crashed", "abandoned")


class RouterMetrics:
    """The router: what clients see, and where the time went."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "pdserve_requests_total",
            "Requests by how they ended: stop, length, repetition, abort, error, refused, rejected",
            ["model", "outcome"],
            registry=registry,
        )
        self.requests_unauthorized = Counter(
            "pdserve_requests_unauthorized_total",
            "Requests refused for want of an API key, by api (grpc, http): missing or unknown",
            ["api", "reason"],
            registry=registry,
        )
        begin(self.requests_unauthorized, api=("grpc", "http"), reason=("missing", "unknown"))
        self.http_unknown_fields = Counter(
            "pdserve_http_unknown_fields_total",
            "HTTP requests with a field that is not known here and was ignored, by the first "
            "names seen; all later ones are other",
            ["field"],
            registry=registry,
        )
        begin(self.http_unknown_fields, field=("other",))
        self.requests_in_flight = Gauge(
            "pdserve_requests_in_flight",
            "Accepted requests that are not finished",
            registry=registry,
        )
        self.request_duration = Histogram(
            "pdserve_request_duration_seconds",
            "From arrival to the last token",
            ["model"],
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "pdserve_time_to_first_token_seconds",
            "From arrival to the first token",
            ["model", "path"],
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.time_per_output_token = Histogram(
            "pdserve_time_per_output_token_seconds",
            "Mean time between the tokens of a request after its first",
            ["model"],
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self.first_itl = Histogram(
            "pdserve_first_inter_token_seconds",
            "Between the first and the second token",
            ["model"],
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self.stage = Histogram(
            "pdserve_request_stage_seconds",
            "Exclusive stages; those of ttft sum to it, those of first_itl likewise",
            ["stage"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "pdserve_prompt_tokens_total",
            "Prompt tokens of accepted requests",
            ["model"],
            registry=registry,
        )
        self.generation_tokens = Counter(
            "pdserve_generation_tokens_total",
            "Tokens sent to clients",
            ["model"],
            registry=registry,
        )
        self.pooling = PoolingMetrics(registry)
        self.pictures = PictureMetrics(registry)
        self.requests_routed = Counter(
            "pdserve_requests_routed_total",
            "Requests by path: disaggregated, pooling or local, with the reason for local",
            ["path", "reason"],
            registry=registry,
        )
        self.lora = RouterLoraMetrics(registry)
        self.quotas = QuotaMetrics(registry)
        self.handoffs = Counter(
            "pdserve_handoffs_total",
            "Disaggregated requests by how the handoff ended",
            ["outcome"],
            registry=registry,
        )
        self.workers = Gauge(
            "pdserve_workers", "Workers this router knows", ["role", "state"], registry=registry
        )
        self.workers_failing = Gauge(
            "pdserve_workers_failing",
            "Workers that get no requests because several in a row failed",
            ["role"],
            registry=registry,
        )
        self.discovery_errors = Counter(
            "pdserve_discovery_errors_total",
            "Times that a list of workers could not be read or resolved",
            ["role"],
            registry=registry,
        )
        begin(self.discovery_errors, role=("prefill", "decode"))
        self.redrives = Counter(
            "pdserve_redrives_total",
            "Requests sent to workers again after a failure, by its reason and the new path",
            ["reason", "path"],
            registry=registry,
        )
        self.redrives_waiting = Gauge(
            "pdserve_redrives_waiting",
            "Requests that wait for a worker to go on",
            registry=registry,
        )
        self.recovered_requests = Counter(
            "pdserve_recovered_requests_total",
            "Requests that were sent again at least once, by how they ended",
            ["outcome"],
            registry=registry,
        )
        begin(self.recovered_requests, outcome=FINISH_REASONS)
        self.pairs = Gauge(
            "pdserve_worker_pairs",
            "Pairs of prefill and decode workers: proven, unproven, failed or mismatched",
            ["state"],
            registry=registry,
        )
        self.duplicate_tokens = Counter(
            "pdserve_duplicate_tokens_total",
            "Tokens that a second worker repeated, by whether they matched (rule K7)",
            ["match"],
            registry=registry,
        )
        begin(self.duplicate_tokens, match=("true", "false"))
        self.large_requests = Counter(
            "pdserve_large_requests_total",
            "Requests prepared in a process of their own, by how that ended: done, refused, "
            "timeout, crashed, abandoned",
            ["outcome"],
            registry=registry,
        )
        begin(self.large_requests, outcome=LARGE_REQUEST_OUTCOMES)
        self.large_requests_waiting = Gauge(
            "pdserve_large_requests_waiting",
            "Large requests that wait for a process",
            registry=registry,
        )
        self.large_request_bytes = Gauge(
            "pdserve_large_request_bytes",
            "Bytes of large requests that arrive, wait or are prepared",
            registry=registry,
        )
        self.prefix_index = PrefixIndexMetrics(registry)


GRAMMAR_OUTCOMES = ("compiled", "cached", "refused", "overloaded", "failed")


class GrammarMetrics:
    """A prefill or decode worker: the compiler of its engine's grammars."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._compilations = Counter(
            "pdserve_grammar_compilations_total",
            "Grammars that requests asked for, by what came of it",
            ["outcome"],
            registry=registry,
        )
        begin(self._compilations, outcome=GRAMMAR_OUTCOMES)
        self._duration = Histogram(
            "pdserve_grammar_compile_seconds",
            "From asking for a grammar that is not cached until it is compiled",
            buckets=STAGE_BUCKETS,
            registry=registry,
        )

    def observe(self, outcome: str, duration_s: float) -> None:
        """Note an outcome. Any thread."""
        self._compilations.labels(outcome=outcome).inc()
        if outcome == "compiled":
            self._duration.observe(duration_s)


class StatsMetrics:
    """The metrics of a kind of stats, as its figures say."""

    def __init__(self, stats: type, registry: CollectorRegistry) -> None:
        self._last = stats()
        self._gauges: list[tuple[_Value, Gauge]] = []
        self._counters: list[tuple[_Value, Counter]] = []
        self._histograms: list[tuple[_Value, Histogram]] = []
        by_name: dict[str, Gauge] = {}
        for name, figure in figures_of(stats).items():
            value, about = attrgetter(name), (figure.metric, figure.help)
            if figure.kind == "counter":
                self._counters.append((value, Counter(*about, registry=registry)))
            elif figure.kind == "histogram":
                made = Histogram(*about, buckets=figure.buckets, registry=registry)
                self._histograms.append((value, made))
            else:
                labels = ["state"] if figure.state else []
                if figure.metric not in by_name:
                    by_name[figure.metric] = Gauge(*about, labels, registry=registry)
                gauge = by_name[figure.metric]
                series = gauge.labels(state=figure.state) if labels else gauge
                self._gauges.append((value, series))

    def record(self, stats: Any, *, has_computed: bool) -> None:
        """Show the stats after a step: counters grow by the difference to the last ones, and
        histograms observe a step that ran the model.
        """
        last, self._last = self._last, stats
        for value, gauge in self._gauges:
            gauge.set(value(stats))
        for value, counter in self._counters:
            counter.inc(value(stats) - value(last))
        if has_computed:
            for value, histogram in self._histograms:
                histogram.observe(value(stats))


class EngineMetrics:
    """A prefill or decode worker: its engine."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.stats = StatsMetrics(SchedulerStats, registry)
        self.drafts = DraftMetrics(registry)
        self.engine_requests = Counter(
            "pdserve_engine_requests_total",
            "Requests this engine ended, by finish reason",
            ["outcome"],
            registry=registry,
        )
        begin(self.engine_requests, outcome=FINISH_REASONS)
        self.queue_duration = Histogram(
            "pdserve_engine_queue_seconds",
            "From arrival at the engine to being scheduled",
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self.nan_logits = Counter(
            "pdserve_nan_logits_total", "NaN values seen in logits", registry=registry
        )


class KVTransferMetrics:
    """A worker's side of the handoff. `peer` is the other worker's engine_id."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Where what else of KV there is can register its own.
        self.registry = registry
        # Without a link; who has been so for longest comes first.
        self._peers_away: OrderedDict[str, None] = OrderedDict()
        self.transfer_bytes = Counter(
            "pdserve_kv_transfer_bytes_total",
            "Bytes read from peers",
            ["peer", "transport"],
            registry=registry,
        )
        self.transfer_duration = Histogram(
            "pdserve_kv_transfer_duration_seconds",
            "Time during which a request's blocks travelled",
            ["peer"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self.transfer_exposed = Histogram(
            "pdserve_kv_transfer_exposed_seconds",
            "What the prefill did not hide of it: from prefill's PrefillDone to the last block",
            ["peer"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self.release_ack_duration = Histogram(
            "pdserve_kv_release_ack_seconds",
            "From the last block to prefill's acknowledgement of the last release, hidden or not",
            ["peer"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self.grant_wait = Histogram(
            "pdserve_kv_grant_wait_seconds",
            "On prefill, from asking decode for blocks to its grant",
            ["peer"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self.grants = Counter(
            "pdserve_kv_grants_total",
            "Answers to prefill's asking for blocks: granted, later or revoked",
            ["answer"],
            registry=registry,
        )
        self.transfer_failures = Counter(
            "pdserve_kv_transfer_failures_total",
            "Pulls that were lost",
            ["peer", "reason"],
            registry=registry,
        )
        self.sessions = Gauge(
            "pdserve_kv_sessions",
            "Sessions (prefill) and pulls (decode) that are not over, by state",
            ["state"],
            registry=registry,
        )
        self.sessions_ended = Counter(
            "pdserve_kv_sessions_ended_total",
            "KV sessions by how they ended",
            ["reason"],
            registry=registry,
        )
        self.release_acks = Counter(
            "pdserve_kv_release_acks_total",
            "On prefill, releases by whether it still held the blocks",
            ["valid"],
            registry=registry,
        )
        begin(self.release_acks, valid=("true", "false"))
        self.unlanded_reads = Gauge(
            "pdserve_kv_unlanded_reads",
            "Given-up READs that have not landed yet",
            registry=registry,
        )
        # The gauge misses those that land between two scrapes.
        self.abandoned_reads = Counter(
            "pdserve_kv_abandoned_reads_total",
            "READs that were given up before they had landed",
            registry=registry,
        )
        self.checksum_mismatches = Counter(
            "pdserve_kv_checksum_mismatches_total",
            "Blocks that arrived otherwise than prefill had announced them",
            registry=registry,
        )
        self.late_messages = Counter(
            "pdserve_kv_late_messages_total",
            "Messages for sessions that are over or unknown",
            registry=registry,
        )
        self.prefix_tokens = Counter(
            "pdserve_kv_prefix_tokens_total",
            "On prefill, prompt tokens whose KV was asked of another's prefix cache, by outcome",
            ["outcome"],
            registry=registry,
        )
        self.prefix_duration = Histogram(
            "pdserve_kv_prefix_wait_seconds",
            "On prefill, how long a request waited for its prefix from another worker",
            ["outcome"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self.links = Gauge("pdserve_kv_links", "Open KvLinks", registry=registry)
        self._of_peers = (
            self.transfer_bytes,
            self.transfer_duration,
            self.transfer_exposed,
            self.release_ack_duration,
            self.grant_wait,
            self.transfer_failures,
        )

    def peer_came(self, peer: str) -> None:
        """There is a link to the peer: its series stay."""
        self._peers_away.pop(peer, None)

    def peer_went(self, peer: str) -> None:
        """There is no link to the peer: its series stay until MAX_PEERS_AWAY others have gone."""
        self._peers_away[peer] = None
        self._peers_away.move_to_end(peer)
        if len(self._peers_away) > MAX_PEERS_AWAY:
            oldest, _ = self._peers_away.popitem(last=False)
            for metric in self._of_peers:
                metric.remove_by_labels({"peer": oldest})
