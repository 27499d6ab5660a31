"""Writes Grafana's dashboards into helm/dashboards: `python tools/update_dashboards.py`.

A panel is a call that says what is shown, in which unit, what is bad and what to do then; all else
of Grafana's JSON follows from it. Queries filter by the target labels `namespace` and `release`,
and tell workers apart by `component` and `pod`; by default all variables match everything, targets
without these labels included.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pdserve_client.waterfall import FIRST_ITL_STAGES, TTFT_STAGES

FOLDER = Path(__file__).parent.parent / "helm" / "dashboards"
SCHEMA_VERSION = 41  # of Grafana 11.6
COLUMNS = 24
HEIGHT = {"timeseries": 8, "stat": 4}

RELEASE = 'namespace=~"$namespace", release=~"$release"'
MODEL = f'{RELEASE}, model=~"$model"'
STAGES = TTFT_STAGES | FIRST_ITL_STAGES
QUANTILES = (0.5, 0.95, 0.99)
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel. `description` ends with what to do when it is bad, which is from `bad` on."""

    title: str
    unit: str
    # By their legends, which are Grafana's templates.
    queries: dict[str, str]
    description: str
    bad: float | None = None
    kind: Literal["timeseries", "stat"] = "timeseries"
    is_stacked: bool = False
    width: int = 8


@dataclass(frozen=True, kw_only=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """One file, `pdserve-<name>.json`."""

    name: str
    title: str
    description: str
    rows: Sequence[Row]
    # Variables of this dashboard alone: their values, of which the first is chosen by default.
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)


# ---- PromQL


def rate(metric: str, labels: str = RELEASE) -> str:
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def with_engine_process(query: Callable[[str], str]) -> str:
    """Add an engine's own process to its worker's, where it has one: `query` of the prefix of the
    metrics' names.
    """
    worker, engine = query(""), query("engine_")
    return f"{worker} + {engine} or {worker}"


def sum_rate(metric: str, labels: str = RELEASE, *, by: str = "") -> str:
    return f"sum {_by(by)}({rate(metric, labels)})"


def mean(metric: str, labels: str = RELEASE, *, by: str = "") -> str:
    """The mean of a histogram's observations."""
    total, count = (sum_rate(f"{metric}_{part}", labels, by=by) for part in ("sum", "count"))
    return f"{total} / {count}"


def quantile(q: float, metric: str, labels: str = RELEASE, *, by: str = "") -> str:
    buckets = sum_rate(f"{metric}_bucket", labels, by=", ".join(filter(None, [by, "le"])))
    return f"histogram_quantile({q:g}, {buckets})"


def quantiles(metric: str, labels: str = RELEASE) -> dict[str, str]:
    return {f"p{100 * q:g}": quantile(q, metric, labels) for q in QUANTILES}


def _by(labels: str) -> str:
    return f"by ({labels}) " if labels else ""


def of_component(component: str) -> str:
    return f'{RELEASE}, component="{component}"'


def of_stages(*stages: str) -> str:
    return f'{RELEASE}, stage=~"{"|".join(stages)}"'


def mean_stages(*stages: str, counted: str) -> str:
    """Each stage's share of the mean over all requests that have the stage `counted`."""
    count = sum_rate("pdserve_request_stage_seconds_count", of_stages(counted))
    total = sum_rate("pdserve_request_stage_seconds_sum", of_stages(*stages), by="stage")
    return f"{total} / scalar({count})"


# ---- the dashboards


def overview() -> Dashboard:
    errors = sum_rate("pdserve_requests_total", f'{MODEL}, outcome="error"')
    taken = sum_rate("pdserve_requests_total", f'{MODEL}, outcome!~"refused|rejected"')
    error_ratio = f"{errors} / {taken}"
    refused = sum_rate("pdserve_requests_total", f'{MODEL}, outcome="refused"')
    takeable = sum_rate("pdserve_requests_total", f'{MODEL}, outcome!="rejected"')
    ttft = "pdserve_time_to_first_token_seconds"
    itl = "pdserve_time_per_output_token_seconds"
    now = Row(
        title="Now",
        panels=[
            Panel(
                title="Requests",
                unit="reqps",
                kind="stat",
                width=4,
                queries={"": sum_rate("pdserve_requests_total", MODEL)},
                description=(
                    "Requests that ended. None though clients send some: see the router's workers."
                ),
            ),
            Panel(
                title="Errors",
                unit="percentunit",
                kind="stat",
                width=4,
                bad=0.01,
                queries={"": error_ratio},
                description=(
                    "Share of requests that ended with an error. Above 1%: see the runbook of "
                    "PdserveErrorRatio."
                ),
            ),
            Panel(
                title="TTFT, p95",
                unit="s",
                kind="stat",
                width=4,
                bad=2.5,
                queries={"": quantile(0.95, ttft, MODEL)},
                description=(
                    "Time to the first token. Above the objective: the waterfall says which stage "
                    "it is."
                ),
            ),
            Panel(
                title="Time per token, p95",
                unit="s",
                kind="stat",
                width=4,
                bad=0.1,
                queries={"": quantile(0.95, itl, MODEL)},
                description=(
                    "Mean time between a request's tokens. Above the objective: see steps in the "
                    "decode pool."
                ),
            ),
            Panel(
                title="Ready prefill workers",
                unit="short",
                kind="stat",
                width=4,
                queries={"": _ready("prefill")},
                description=(
                    "As the router that knows most of them sees it. Fewer than replicas: see the "
                    "router's workers."
                ),
            ),
            Panel(
                title="Ready decode workers",
                unit="short",
                kind="stat",
                width=4,
                queries={"": _ready("decode")},
                description=(
                    "As the router that knows most of them sees it. None: every request is refused."
                ),
            ),
        ],
    )
    red = Row(
        title="Rate, errors, duration",
        panels=[
            Panel(
                title="Requests by outcome",
                unit="reqps",
                is_stacked=True,
                queries={"{{outcome}}": sum_rate("pdserve_requests_total", MODEL, by="outcome")},
                description=(
                    "How requests ended. `refused`: overload or no worker, the answers say which. "
                    "`rejected`: they were wrong. Many `abort`: clients give up, look at TTFT."
                ),
            ),
            Panel(
                title="Error ratio",
                unit="percentunit",
                bad=0.01,
                queries={"errors": error_ratio},
                description=(
                    "Errors that recovery could not hide. Above 1%: find their request ids in the "
                    "router's log."
                ),
            ),
            Panel(
                title="Refused ratio",
                unit="percentunit",
                bad=0.1,
                queries={"refused": f"{refused} / {takeable}"},
                description=(
                    "429 and 503, of all requests but those that were wrong. Above 10%: see the "
                    "runbook of PdserveRequestsRefused."
                ),
            ),
            Panel(
                title="In flight",
                unit="short",
                queries={
                    "in flight": f"sum(pdserve_requests_in_flight{{{RELEASE}}})",
                    "wait for a worker": f"sum(pdserve_redrives_waiting{{{RELEASE}}})",
                },
                description=(
                    "Accepted requests that are not finished, and those whose worker was lost and "
                    "that wait for another. Growing without end: more comes in than is served, "
                    "scale the pool that queues."
                ),
            ),
            Panel(
                title="Time to first token",
                unit="s",
                bad=2.5,
                queries=quantiles(ttft, MODEL),
                description=(
                    "From a request's arrival to its first token. Above the objective: open the "
                    "waterfall, and look at the largest stage."
                ),
            ),
            Panel(
                title="First to second token",
                unit="s",
                bad=0.5,
                queries=quantiles("pdserve_first_inter_token_seconds", MODEL),
                description=(
                    "What a stream is silent for behind its first token. Above the objective: the "
                    "waterfall says which stage it is."
                ),
            ),
            Panel(
                title="Time per output token",
                unit="s",
                bad=0.1,
                queries=quantiles(itl, MODEL),
                description=(
                    "Mean time between the tokens of a request after its first. Above the "
                    "objective: decode batches are too large, or workers were lost; see the decode"
                    " pool."
                ),
            ),
            Panel(
                title="Request duration",
                unit="s",
                queries=quantiles("pdserve_request_duration_seconds", MODEL),
                description=(
                    "From arrival to the last token; grows with the length of answers. Longer at "
                    "equal length: see the two panels to the left."
                ),
            ),
        ],
    )
    slo = Row(
        title="Objectives and alerts",
        panels=[
            Panel(
                title="Budget burn",
                unit="x",
                bad=14.4,
                queries={
                    f"{name}, {window}": f"pdserve:{rule}_over_target:ratio_rate{window}"
                    f"{{{MODEL}}} / 0.01"
                    for rule, name in (
                        ("ttft", "TTFT"),
                        ("first_itl", "first to second token"),
                        ("itl", "time per token"),
                    )
                    for window in ("5m", "1h", "6h")
                },
                description=(
                    "How many times faster than allowed the budget of 1% slow requests goes: of "
                    "late first tokens, of pauses behind them, and of slow answers. 1 uses it up "
                    "in its period, 14.4 in two days: see the runbooks of the burn alerts."
                ),
            ),
            Panel(
                title="Alerts that fire",
                unit="short",
                is_stacked=True,
                queries={
                    "{{alertname}} ({{severity}})": "sum by (alertname, severity) "
                    f'(ALERTS{{alertname=~"Pdserve.*", alertstate="firing", {RELEASE}}})'
                },
                description=(
                    "Empty is good. Each has a section of its name in docs/operations/runbooks.md."
                ),
            ),
            Panel(
                title="Tokens",
                unit="short",
                queries={
                    "prompt": sum_rate("pdserve_prompt_tokens_total", MODEL),
                    "generated": sum_rate("pdserve_generation_tokens_total", MODEL),
                },
                description=(
                    "Tokens a second of accepted prompts and to clients; their ratio says how many"
                    " P a D needs. A drop at equal requests: shorter prompts or answers, or less "
                    "is served."
                ),
            ),
        ],
    )
    return Dashboard(
        name="overview",
        title="pdserve / Overview",
        description="What clients see: rate, errors, duration, and the objectives.",
        rows=[now, red, slo],
    )


def _ready(role: str) -> str:
    return f'max(pdserve_workers{{{RELEASE}, role="{role}", state="ready"}})'


def waterfall() -> Dashboard:
    stage = "pdserve_request_stage_seconds"
    raw, exposed = (
        sum_rate(f"{stage}_sum", of_stages(name)) for name in ("kv_transfer", "kv_transfer_exposed")
    )
    first = Row(
        title="To the first token",
        panels=[
            Panel(
                title="TTFT by stage, mean",
                unit="s",
                is_stacked=True,
                width=12,
                queries={"{{stage}}": mean_stages(*TTFT_STAGES, counted="return")},
                description=(
                    "Stages exclude each other: the stack is the mean TTFT. Look at the largest. "
                    "Prefill queue: more prefill; decode queue: more decode, it has no free slots "
                    "or no room for KV; prefill: shorter prompts or faster workers; return: "
                    "network, or requests that were sent again."
                ),
            ),
            Panel(
                title="TTFT by stage, p99",
                unit="s",
                width=12,
                queries={"{{stage}}": quantile(0.99, stage, of_stages(*TTFT_STAGES), by="stage")},
                description=(
                    "1% of requests spend more in this stage; these do not sum. One stage far "
                    "above its mean: bursts, or one slow worker; see the pools by Pod."
                ),
            ),
            Panel(
                title="What requests wait for, mean",
                unit="s",
                width=12,
                bad=0.5,
                queries={
                    "{{stage}}": mean_stages("prefill_queue", "decode_queue", counted="return")
                },
                description=(
                    "Prefill queue: add prefill workers. Decode queue: decode is full, add decode "
                    "workers; *Slots in use* and *KV blocks held* in the decode pool say of what."
                ),
            ),
            Panel(
                title="Requests by path",
                unit="reqps",
                is_stacked=True,
                width=12,
                queries={"{{path}}": sum_rate("pdserve_requests_routed_total", by="path")},
                description=(
                    "`local` requests have no handoff and no stages of one. More than short "
                    "prompts explain: see the reasons on the router's dashboard."
                ),
            ),
        ],
    )
    second = Row(
        title="To the second token: the handoff",
        panels=[
            Panel(
                title="First ITL by stage, mean",
                unit="s",
                is_stacked=True,
                width=12,
                queries={"{{stage}}": mean_stages(*FIRST_ITL_STAGES, counted="decode_return")},
                description=(
                    "Stages exclude each other: the stack is the mean time from the first to the "
                    "second token. KV transfer: see its dashboard; into decode's batch: fewer "
                    "slots got free than was foreseen; return: network, or all of it for requests "
                    "without a handoff."
                ),
            ),
            Panel(
                title="First ITL by stage, p99",
                unit="s",
                width=12,
                queries={
                    "{{stage}}": quantile(0.99, stage, of_stages(*FIRST_ITL_STAGES), by="stage")
                },
                description=(
                    "1% of requests spend more in this stage; these do not sum. Prefill confirms "
                    "late: its thread for transfers is busy, or the way between the pair is long."
                ),
            ),
            Panel(
                title="Transfer, raw and exposed, p95",
                unit="s",
                width=12,
                queries={
                    "raw (runs under the prefill)": quantile(0.95, stage, of_stages("kv_transfer")),
                    "exposed (clients wait)": quantile(
                        0.95, stage, of_stages("kv_transfer_exposed")
                    ),
                },
                bad=0.5,
                description=(
                    "Raw far above exposed is good: the prefill hides the transfer. Both alike: "
                    "prompts are shorter than a chunk (max_num_batched_tokens), or decode had no "
                    "room meanwhile. Both high: network or transport."
                ),
            ),
            Panel(
                title="Transfer that the prefill hides",
                unit="percentunit",
                width=12,
                queries={"hidden": f"clamp_min(1 - {exposed} / {raw}, 0)"},
                description=(
                    "Share of the transfer's time that nobody waits for. Low with long prompts: "
                    "smaller chunks on prefill, or a faster transport."
                ),
            ),
        ],
    )
    return Dashboard(
        name="waterfall",
        title="pdserve / Waterfall",
        description="Where requests' time went. docs/metrics.md says what each stage is.",
        rows=[first, second],
    )


def pool() -> Dashboard:
    labels = of_component("$pool")
    tokens = sum_rate("pdserve_engine_step_tokens_sum", labels, by="pod")
    hits, lookups = (
        sum_rate(f"pdserve_prefix_cache_{name}_total", labels, by="pod")
        for name in ("hits", "queries")
    )
    queue_is_bad = (
        "Prefill, above 10 s: add prefill workers. Decode: it computes prompts itself, the "
        "router's dashboard says why."
    )
    work = Row(
        title="Utilization and saturation",
        panels=[
            Panel(
                title="Running requests",
                unit="short",
                queries={"{{pod}}": f"pdserve_requests_running{{{labels}}}"},
                description=(
                    "Requests in the batch, at most max_num_seqs. One Pod far from the others: "
                    "routing or that Pod."
                ),
            ),
            Panel(
                title="Waiting requests",
                unit="short",
                queries={"{{pod}}": f"pdserve_requests_waiting{{{labels}}}"},
                description=(
                    "Requests in the waiting queue, those that wait for the other pool as well. "
                    "Growing: this pool is too small, or the other is; the waterfall tells."
                ),
            ),
            Panel(
                title="Slots in use",
                unit="percentunit",
                bad=0.95,
                queries={"{{pod}}": f"pdserve_slot_usage_ratio{{{labels}}}"},
                description=(
                    "Places in the batch (max_num_seqs) that requests have. All in use on decode, "
                    "and requests wait for decode: add decode workers, or raise max_num_seqs if "
                    "steps are short enough."
                ),
            ),
            Panel(
                title="Slots by state",
                unit="short",
                is_stacked=True,
                queries={"{{state}}": f"sum by (state) (pdserve_slots{{{labels}}})"},
                description=(
                    "Places in the batches of all Pods. None `free` on decode for minutes: it is "
                    "too small, or max_num_seqs is."
                ),
            ),
            Panel(
                title="Waiting for decode",
                unit="short",
                queries={"{{pod}}": f"pdserve_requests_waiting_for_decode{{{labels}}}"},
                description=(
                    "Waiting requests that decode has no slot or no room for. On prefill: more "
                    "prefill workers do not help them."
                ),
            ),
            Panel(
                title="Time to work off the queue",
                unit="s",
                bad=10,
                queries={
                    "all": f"sum(pdserve_waiting_tokens{{{labels}}}) / "
                    + sum_rate("pdserve_engine_step_tokens_sum", labels)
                },
                description="Tokens that wait for this pool, at its present speed. " + queue_is_bad,
            ),
            Panel(
                title="Tokens computed",
                unit="short",
                queries={"{{pod}}": tokens},
                description=(
                    "Tokens a second through the model. Flat while requests wait: this is the "
                    "Pod's limit."
                ),
            ),
            Panel(
                title="Step duration, p99",
                unit="s",
                queries={
                    "{{pod}}": quantile(
                        0.99, "pdserve_engine_step_duration_seconds", labels, by="pod"
                    )
                },
                description=(
                    "Forward pass and sampling, without planning. High: too many tokens or requests"
                    " in a step (max_num_batched_tokens, max_num_seqs), or others use the Pod's "
                    "cores."
                ),
            ),
            Panel(
                title="Tokens per step, mean",
                unit="short",
                queries={"{{pod}}": mean("pdserve_engine_step_tokens", labels, by="pod")},
                description=(
                    "How full steps are. At max_num_batched_tokens on prefill: saturated. Near 1 "
                    "on decode: idle."
                ),
            ),
            Panel(
                title="Time in the queue, p99",
                unit="s",
                queries={
                    "{{pod}}": quantile(0.99, "pdserve_engine_queue_seconds", labels, by="pod")
                },
                description="From arrival at the engine to being scheduled. " + queue_is_bad,
            ),
            Panel(
                title="CPU",
                unit="short",
                queries={
                    "{{pod}}": with_engine_process(
                        lambda prefix: sum_rate(
                            f"{prefix}process_cpu_seconds_total", labels, by="pod"
                        )
                    )
                },
                description=(
                    "Cores in use by the worker and its engine process. At its limit without a "
                    "GPU: it is saturated."
                ),
            ),
            Panel(
                title="Memory",
                unit="bytes",
                queries={
                    "{{pod}}": with_engine_process(
                        lambda prefix: (
                            f"sum by (pod) ({prefix}process_resident_memory_bytes{{{labels}}})"
                        )
                    )
                },
                description=(
                    "Resident memory of the worker and its engine process. Growing for hours under "
                    "steady load: report it; near the limit: raise it."
                ),
            ),
        ],
    )
    kv = Row(
        title="KV cache",
        panels=[
            Panel(
                title="KV blocks held",
                unit="percentunit",
                bad=0.9,
                queries={"{{pod}}": f"pdserve_kv_cache_usage_ratio{{{labels}}}"},
                description=(
                    "Share of all blocks that requests and sessions hold. Above 90%: add workers "
                    "to this pool or memory for KV (kv_cache_memory_mib, gpu_memory_utilization)."
                ),
            ),
            Panel(
                title="KV blocks by state",
                unit="short",
                is_stacked=True,
                queries={"{{state}}": f"sum by (state) (pdserve_kv_blocks{{{labels}}})"},
                description=(
                    "`cached` blocks hold prefixes and are free when needed. No `cached` ones "
                    "left: prefixes are evicted before they are used again."
                ),
            ),
            Panel(
                title="Preemptions",
                unit="ops",
                bad=0.1,
                queries={"{{pod}}": sum_rate("pdserve_preemptions_total", labels, by="pod")},
                description=(
                    "Running requests that lost their blocks and are computed anew. More than now "
                    "and then: too little KV memory for max_num_seqs."
                ),
            ),
            Panel(
                title="Prefix cache hits",
                unit="percentunit",
                queries={"{{pod}}": f"{hits} / {lookups}"},
                description=(
                    "Share of looked-up prompt tokens found. Low though prompts share prefixes: "
                    "the cache is too small, or routing spreads them (routing_policy)."
                ),
            ),
            Panel(
                title="Blocks shared by the whole batch",
                unit="short",
                queries={"{{pod}}": f"pdserve_common_prefix_blocks{{{labels}}}"},
                description=(
                    "Leading blocks that all running requests share, such as a system prompt's. "
                    "Nothing to do."
                ),
            ),
            Panel(
                title="Sessions by state",
                unit="short",
                is_stacked=True,
                queries={"{{state}}": f"sum by (state) (pdserve_kv_sessions{{{labels}}})"},
                description=(
                    "Handoffs that are not over. Growing without requests: they leak or the other "
                    "side is gone; see the KV transfer."
                ),
            ),
        ],
    )
    ends = Row(
        title="Ends and errors",
        panels=[
            Panel(
                title="Requests ended",
                unit="reqps",
                is_stacked=True,
                width=12,
                queries={
                    "{{outcome}}": sum_rate("pdserve_engine_requests_total", labels, by="outcome")
                },
                description=(
                    "Requests this pool ended, by finish reason. `error`: the worker's log has "
                    "each one."
                ),
            ),
            Panel(
                title="NaN logits",
                unit="ops",
                width=12,
                bad=1e-9,
                queries={"{{pod}}": sum_rate("pdserve_nan_logits_total", labels, by="pod")},
                description=(
                    "Any is bad: their requests failed. Check the weights and the dtype; on one "
                    "Pod only: its hardware."
                ),
            ),
        ],
    )
    grammars = Row(
        title="Structured outputs",
        panels=[
            Panel(
                title="Grammars asked for",
                unit="reqps",
                is_stacked=True,
                queries={
                    "{{outcome}}": sum_rate(
                        "pdserve_grammar_compilations_total", labels, by="outcome"
                    )
                },
                description=(
                    "`refused` are clients' mistakes. `overloaded` for minutes: one client sends "
                    "too many costly ones; `failed`: something kills the compiler, see the Pod's "
                    "memory."
                ),
            ),
            Panel(
                title="Compile time, p99",
                unit="s",
                bad=5,
                queries={
                    "{{pod}}": quantile(0.99, "pdserve_grammar_compile_seconds", labels, by="pod")
                },
                description=(
                    "Of grammars that are not cached, with the wait for others. The compiler has "
                    "the lowest priority: above seconds the Pod has no core to spare."
                ),
            ),
            Panel(
                title="Waiting for a grammar",
                unit="short",
                queries={"{{pod}}": f"pdserve_requests_waiting_for_fsm{{{labels}}}"},
                description=(
                    "Requests that could start but for their grammar. Growing: see the compile "
                    "time."
                ),
            ),
            Panel(
                title="Late masks",
                unit="ops",
                queries={"{{pod}}": sum_rate("pdserve_late_grammar_masks_total", labels, by="pod")},
                description=(
                    "Rows left out of a step because their grammar was not ready with what may "
                    "come next. Near the rate of steps: a grammar that is slow to match, or a Pod "
                    "without a core to spare."
                ),
            ),
        ],
    )
    adapters = Row(
        title="LoRA adapters",
        panels=[
            Panel(
                title="Adapters in memory",
                unit="short",
                queries={"{{pod}}": f"pdserve_loras{{{labels}}}"},
                description=(
                    "Pods that differ for long: an adapter was loaded on some of them, or one was "
                    "restarted, and has only those of its settings."
                ),
            ),
            Panel(
                title="Loads and evictions",
                unit="ops",
                queries={
                    "loads": sum_rate("pdserve_lora_loads_total", labels),
                    "evictions": sum_rate("pdserve_lora_evictions_total", labels),
                },
                description=(
                    "Evictions beside loads: more adapters are wanted than max_loras has room for."
                ),
            ),
            Panel(
                title="Share of steps with an adapter",
                unit="percentunit",
                queries={
                    "{{pod}}": sum_rate("pdserve_lora_steps_total", labels, by="pod")
                    + " / "
                    + sum_rate("pdserve_engine_step_duration_seconds_count", labels, by="pod")
                },
                description="Steps in which some request has an adapter take longer.",
            ),
        ],
    )
    pictures = Row(
        title="Pictures",
        panels=[
            Panel(
                title="Tensors held",
                unit="bytes",
                queries={"{{pod}}": f"pdserve_tensor_cache_bytes{{{labels}}}"},
                description=(
                    "Pixels of pictures that routers have put. At tensor_cache_bytes the least "
                    "recently used make room, which costs nothing."
                ),
            ),
            Panel(
                title="Tensors put",
                unit="ops",
                is_stacked=True,
                queries={
                    "{{outcome}}": sum_rate("pdserve_tensor_puts_total", labels, by="outcome"),
                    "evicted": sum_rate("pdserve_tensor_evictions_total", labels),
                    "missing": sum_rate("pdserve_tensors_missing_total", labels),
                },
                description=(
                    "no_room: more pictures are on their way than tensor_cache_bytes holds; raise "
                    "it. missing: requests came after their pictures had made room."
                ),
            ),
            Panel(
                title="Bytes put",
                unit="Bps",
                queries={"{{pod}}": sum_rate("pdserve_tensor_put_bytes_total", labels, by="pod")},
                description="Pixels that came over the network; what is held already does not.",
            ),
        ],
    )
    drafts = Row(
        title="Speculation",
        panels=[
            Panel(
                title="Drafts",
                unit="ops",
                width=6,
                queries={
                    "{{source}}": sum_rate(
                        "pdserve_spec_decode_num_drafts_total", labels, by="source"
                    )
                },
                description=(
                    "Requests and steps with guessed tokens, by who has guessed. Near the rate of "
                    "generated tokens: most steps have some. Nothing to do."
                ),
            ),
            Panel(
                title="Draft tokens",
                unit="ops",
                width=6,
                queries={
                    "{{source}}": sum_rate(
                        "pdserve_spec_decode_num_draft_tokens_total", labels, by="source"
                    )
                },
                description=(
                    "Guessed by who has guessed. None: the workers have no --speculation, or it is "
                    "not worth it, as many requests run or their texts do not repeat."
                ),
            ),
            Panel(
                title="Accepted draft tokens",
                unit="ops",
                width=6,
                queries={
                    "{{source}}": sum_rate(
                        "pdserve_spec_decode_num_accepted_tokens_total", labels, by="source"
                    )
                },
                description=(
                    "Of those, the ones that became tokens of answers: each has saved a step. Few "
                    "for hours: --speculation is of no use here."
                ),
            ),
            Panel(
                title="Accepted by place in the draft",
                unit="ops",
                width=6,
                queries={
                    "{{position}}": sum_rate(
                        "pdserve_spec_decode_num_accepted_tokens_per_pos_total",
                        labels,
                        by="position",
                    )
                },
                description=(
                    "The last places as high as the first: more are worth trying "
                    "(num_speculative_tokens)."
                ),
            ),
        ],
    )
    return Dashboard(
        name="pool",
        title="pdserve / Pool",
        description="The prefill or the decode workers, by Pod.",
        rows=[work, kv, grammars, adapters, pictures, drafts, ends],
        choices={"pool": ("prefill", "decode")},
    )


def _tiers() -> Row:
    by_tier = "sum by (tier, direction)"
    return Row(
        title="Tiers of KV besides the pools (--kv-offload-...)",
        panels=[
            Panel(
                title="Prompt tokens that tiers were to have",
                unit="short",
                queries={"{{outcome}}": sum_rate("pdserve_kv_offload_tokens_total", by="outcome")},
                description=(
                    "A second: loaded, or computed after all because a block was gone or damaged "
                    "(failed), or came too late (given_up): then see the disk, or raise "
                    "--kv-offload-timeout-s."
                ),
            ),
            Panel(
                title="Wait for a tier, p99",
                unit="s",
                queries={
                    "{{outcome}}": quantile(0.99, "pdserve_kv_offload_load_seconds", by="outcome")
                },
                description=(
                    "Before a request is queued. If that takes longer than computing, the disk is "
                    "too slow for tiers to help."
                ),
            ),
            Panel(
                title="Bytes stored and loaded",
                unit="Bps",
                queries={
                    "{{tier}} {{direction}}": (
                        f"{by_tier} ({rate('pdserve_kv_offload_bytes_total')})"
                    )
                },
                description="Far more stored than loaded: conversations do not come back.",
            ),
            Panel(
                title="KV in tiers",
                unit="bytes",
                queries={"{{pod}} {{tier}}": f"pdserve_kv_offload_used_bytes{{{RELEASE}}}"},
                description=(
                    "Full is normal: what was not used for longest goes. Many tokens computed that "
                    "were here once: make it larger."
                ),
            ),
            Panel(
                title="Blocks not stored, or not used",
                unit="ops",
                queries={
                    "dropped": sum_rate("pdserve_kv_offload_dropped_blocks_total"),
                    "{{tier}} {{reason}}": sum_rate(
                        "pdserve_kv_offload_bad_blocks_total", by="tier, reason"
                    ),
                },
                description=(
                    "Dropped: the disk is slower than prompts are computed. Of stored blocks those "
                    "that were gone, unreadable or damaged (mismatch): see the disk."
                ),
            ),
            Panel(
                title="Tiers that store no more",
                unit="short",
                bad=1,
                queries={"{{pod}} {{tier}}": f"1 - pdserve_kv_offload_writable{{{RELEASE}}}"},
                description=(
                    "The disk was full, read-only or gone; the worker's log says which. It stores "
                    "again after a restart."
                ),
            ),
        ],
    )


def kv_transfer() -> Dashboard:
    duration, pair = "pdserve_kv_transfer_duration_seconds", "{{peer}} → {{pod}}"
    both = 'component=~"prefill|decode"'
    moved = Row(
        title="What moves, by pair: prefill → decode",
        panels=[
            Panel(
                title="Bytes",
                unit="Bps",
                queries={
                    f"{pair} ({{{{transport}}}})": sum_rate(
                        "pdserve_kv_transfer_bytes_total", by="peer, pod, transport"
                    )
                },
                description=(
                    "KV read from prefill workers. `tcp` where RDMA was meant: set "
                    "require_transport, see the runbook of PdserveTransferSlow."
                ),
            ),
            Panel(
                title="Speed of a transfer",
                unit="Bps",
                queries={
                    pair: sum_rate("pdserve_kv_transfer_bytes_total", by="peer, pod")
                    + " / "
                    + sum_rate(f"{duration}_sum", by="peer, pod")
                },
                description=(
                    "Bytes by the time during which they travelled. One pair slower than others: "
                    "its network."
                ),
            ),
            Panel(
                title="Transfer, raw, p99",
                unit="s",
                queries={pair: quantile(0.99, duration, by="peer, pod")},
                description=(
                    "Time during which a request's blocks travelled, mostly under the prefill. "
                    "High on one pair: its network; on all pairs of a prefill worker: that worker "
                    "is busy."
                ),
            ),
            Panel(
                title="Transfer, exposed, p99",
                unit="s",
                bad=0.5,
                queries={
                    pair: quantile(0.99, "pdserve_kv_transfer_exposed_seconds", by="peer, pod")
                },
                description=(
                    "What clients wait for after the prefill. Above 0.5 s: see the runbook of "
                    "PdserveTransferSlow."
                ),
            ),
            Panel(
                title="Release acknowledged, p99",
                unit="s",
                queries={pair: quantile(0.99, "pdserve_kv_release_ack_seconds", by="peer, pod")},
                description=(
                    "From the last block to prefill's acknowledgement; the first step "
                    "hides most of it. High: prefill's host is overloaded."
                ),
            ),
            Panel(
                title="Grant, p99",
                unit="s",
                bad=0.5,
                queries={
                    "{{pod}} → {{peer}}": quantile(
                        0.99, "pdserve_kv_grant_wait_seconds", by="pod, peer"
                    )
                },
                description=(
                    "How long prefill waits for decode's blocks. High: decode is full, add workers"
                    " or KV memory."
                ),
            ),
        ],
    )
    wrong = Row(
        title="What goes wrong",
        panels=[
            Panel(
                title="Lost transfers",
                unit="ops",
                bad=1e-9,
                queries={
                    f"{pair} ({{{{reason}}}})": sum_rate(
                        "pdserve_kv_transfer_failures_total", by="peer, pod, reason"
                    )
                    + " > 0"
                },
                description=(
                    "Pulls that were given up; empty is good. Their requests go on elsewhere. See "
                    "the runbook of PdserveTransferFailures for each reason."
                ),
            ),
            Panel(
                title="Answers to prefill's asking",
                unit="ops",
                is_stacked=True,
                queries={"{{answer}}": sum_rate("pdserve_kv_grants_total", by="answer")},
                description=(
                    "`later`: decode had no room. As many as `granted`: decode is too small. "
                    "`revoked`: decode took a grant back, it drains or its request has ended."
                ),
            ),
            Panel(
                title="Sessions ended",
                unit="ops",
                is_stacked=True,
                queries={"{{reason}}": sum_rate("pdserve_kv_sessions_ended_total", by="reason")},
                description=(
                    "`released` is the good end, `finished` one that needed no decode. `expired` "
                    "or `fenced`: see the runbook of PdserveSessionsExpiredOrFenced."
                ),
            ),
            Panel(
                title="Releases",
                unit="ops",
                is_stacked=True,
                queries={"valid: {{valid}}": sum_rate("pdserve_kv_release_acks_total", by="valid")},
                description=(
                    "`false`: prefill no longer held the blocks; decode dropped what it had read, "
                    "nothing wrong got out. Many: sessions end too early."
                ),
            ),
            Panel(
                title="Sessions by state",
                unit="short",
                queries={
                    "{{component}} {{state}}": "sum by (component, state) "
                    f"(pdserve_kv_sessions{{{RELEASE}, {both}}})"
                },
                description=(
                    "Handoffs that are not over, at both ends. Growing on prefill alone: decode "
                    "does not fetch."
                ),
            ),
            Panel(
                title="READs given up that may still land",
                unit="short",
                bad=1,
                queries={"{{pod}}": f"pdserve_kv_unlanded_reads{{{RELEASE}, {both}}}"},
                description=(
                    "Their blocks stay out of use. A worker with too many or too old ones restarts"
                    " by itself: look at the transport to the pair."
                ),
            ),
            Panel(
                title="READs given up",
                unit="ops",
                queries={
                    "{{pod}}": sum_rate(
                        "pdserve_kv_abandoned_reads_total", f"{RELEASE}, {both}", by="pod"
                    )
                },
                description=(
                    "Before they had landed, most for a moment only: their requests were aborted, "
                    "preempted or lost meanwhile."
                ),
            ),
            Panel(
                title="Damaged blocks",
                unit="ops",
                bad=1e-9,
                queries={
                    "{{pod}}": sum_rate(
                        "pdserve_kv_checksum_mismatches_total", f"{RELEASE}, {both}", by="pod"
                    )
                },
                description=(
                    "Only counted with --kv-checksums. Any is a defect of hardware or software: "
                    "see the runbook of PdserveCorruptBlocks."
                ),
            ),
            Panel(
                title="Late messages",
                unit="ops",
                queries={
                    "{{pod}}": sum_rate(
                        "pdserve_kv_late_messages_total", f"{RELEASE}, {both}", by="pod"
                    )
                },
                description=(
                    "Messages for sessions that are over: some are normal when requests are "
                    "aborted. Many: workers lose each other again and again."
                ),
            ),
            Panel(
                title="Links",
                unit="short",
                queries={"{{pod}}": f"pdserve_kv_links{{{RELEASE}, {both}}}"},
                description=(
                    "Open control links to the other pool. Fewer than its workers though requests "
                    "flow: see the network between the pools, and both ends' logs."
                ),
            ),
        ],
    )
    prefixes = Row(
        title="Prefixes that prefill reads from decode's caches",
        panels=[
            Panel(
                title="Prefix tokens, by outcome",
                unit="short",
                queries={
                    "{{outcome}}": sum_rate("pdserve_kv_prefix_tokens_total", RELEASE, by="outcome")
                },
                description=(
                    "Prompt tokens a second that a decode worker was to have cached: pulled, or "
                    "computed after all, because it had them no more (not_cached), a worker or a "
                    "transfer broke (failed), or it took too long (given_up)."
                ),
            ),
            Panel(
                title="Wait for a prefix, p99",
                unit="s",
                queries={
                    "{{outcome}}": quantile(0.99, "pdserve_kv_prefix_wait_seconds", by="outcome")
                },
                description=(
                    "Before prefill asks for a grant. It ends with --prefix-pull-timeout-s at the "
                    "latest, and the time of the bytes."
                ),
            ),
        ],
    )
    return Dashboard(
        name="kv-transfer",
        title="pdserve / KV transfer",
        description="The handoff, by pair of prefill and decode worker.",
        rows=[moved, prefixes, _tiers(), wrong],
    )


def router() -> Dashboard:
    stage, labels = "pdserve_request_stage_seconds", of_component("router")
    routes = Row(
        title="Routes and recovery",
        panels=[
            Panel(
                title="Routes",
                unit="reqps",
                is_stacked=True,
                queries={
                    "{{path}} {{reason}}": sum_rate(
                        "pdserve_requests_routed_total", by="path, reason"
                    )
                },
                description=(
                    "Where requests went first, and why they stayed on decode. no_prefill_worker, "
                    "no_proven_pair or prefill_queue: see the runbook of PdserveDowngrade."
                ),
            ),
            Panel(
                title="Pooling requests by task",
                unit="reqps",
                is_stacked=True,
                queries={
                    "{{task}} {{outcome}}": sum_rate(
                        "pdserve_pooling_requests_total", by="task, outcome"
                    )
                },
                description="Embeddings, classes and scores: each input is a request.",
            ),
            Panel(
                title="Prompt tokens pooled",
                unit="short",
                is_stacked=True,
                queries={"{{task}}": sum_rate("pdserve_pooling_prompt_tokens_total", by="task")},
                description="Prompt tokens a second of accepted pooling requests.",
            ),
            Panel(
                title="Pictures",
                unit="ops",
                queries={"pictures": sum_rate("pdserve_pictures_total")},
                description="Pictures a second of accepted requests, on this router.",
            ),
            Panel(
                title="Pixels of requests under way",
                unit="bytes",
                queries={"{{pod}}": f"pdserve_router_tensor_bytes{{{RELEASE}}}"},
                description="What the router keeps of pictures, to send a request again.",
            ),
            Panel(
                title="Requests by LoRA adapter",
                unit="reqps",
                is_stacked=True,
                queries={"{{adapter}}": sum_rate("pdserve_lora_requests_total", by="adapter")},
                description="By the name clients ask for: the 50 most used, the others together.",
            ),
            Panel(
                title="LoRA adapters added for their load",
                unit="ops",
                queries={"{{outcome}}": sum_rate("pdserve_lora_scale_outs_total", by="outcome")},
                description=(
                    "Added to another pair as all workers that hold them have much to do; refused: "
                    "a worker has no room for another one, or not the same folders."
                ),
            ),
            Panel(
                title="Handoffs",
                unit="reqps",
                is_stacked=True,
                queries={"{{outcome}}": sum_rate("pdserve_handoffs_total", by="outcome")},
                description=(
                    "How handoffs ended. prefill_failed or decode_failed: the request was sent "
                    "again or failed; look at that pool."
                ),
            ),
            Panel(
                title="Requests sent again",
                unit="reqps",
                queries={
                    "{{reason}} → {{path}}": sum_rate("pdserve_redrives_total", by="reason, path")
                    + " > 0"
                },
                description=(
                    "By what was lost and the new path; empty is good. Clients see a pause. "
                    "Steady: find the worker that is lost again and again."
                ),
            ),
            Panel(
                title="Wait for another worker",
                unit="short",
                bad=1,
                queries={"{{pod}}": f"pdserve_redrives_waiting{{{RELEASE}}}"},
                description=(
                    "Their worker was lost and no other has room. Above 0 for long: requests "
                    "are about to fail (redrive_wait_s, max_redrives); add workers."
                ),
            ),
            Panel(
                title="Unknown fields",
                unit="reqps",
                queries={
                    "{{field}}": "topk(10, "
                    + sum_rate("pdserve_http_unknown_fields_total", by="field")
                    + ")"
                },
                description=(
                    "Fields of HTTP requests that nobody here knows, by name; they are ignored. A "
                    "client may expect something of one: docs/http.md has what is served."
                ),
            ),
            Panel(
                title="Large requests",
                unit="reqps",
                is_stacked=True,
                queries={
                    "{{outcome}}": sum_rate("pdserve_large_requests_total", by="outcome") + " > 0"
                },
                description=(
                    "Parsed and tokenized in processes of their own, by how that ended. `timeout` "
                    "and `crashed` are clients that send what takes 30 s or 256 MiB; `refused`: "
                    "more than the processes get done."
                ),
            ),
            Panel(
                title="Recovered requests",
                unit="reqps",
                is_stacked=True,
                queries={
                    "{{outcome}}": sum_rate("pdserve_recovered_requests_total", by="outcome")
                    + " > 0"
                },
                description=(
                    "How requests that were sent again ended; empty is good. `error`: there was no"
                    " worker left, or max_redrives were not enough."
                ),
            ),
            Panel(
                title="Repeated tokens",
                unit="ops",
                queries={
                    "the same: {{match}}": sum_rate("pdserve_duplicate_tokens_total", by="match")
                },
                description=(
                    "Tokens that a second worker repeated; one for each handoff is normal. Any "
                    "`false` is a defect: see the runbook of PdserveDuplicateTokenMismatch."
                ),
            ),
        ],
    )
    workers = Row(
        title="Workers as routers see them",
        panels=[
            Panel(
                title="Workers",
                unit="short",
                queries={
                    "{{role}} {{state}}": f"max by (role, state) (pdserve_workers{{{RELEASE}}}) > 0"
                },
                description=(
                    "`down` or long `connecting`: that Pod, or the network to it. `reattaching` "
                    "for more than seconds: routers are about to give it up. `mismatched` but for "
                    "a rollout, or `duplicate`: see the runbook of PdserveWorkerUnused."
                ),
            ),
            Panel(
                title="Workers that keep failing",
                unit="short",
                bad=1,
                queries={"{{role}}": f"max by (role) (pdserve_workers_failing{{{RELEASE}}})"},
                description=(
                    "They get no requests, because several in a row failed, until a generation "
                    "of the router's own succeeds. Never the last one of a role. Look at their "
                    "logs; replace the Pod."
                ),
            ),
            Panel(
                title="Pairs",
                unit="short",
                queries={"{{state}}": f"max by (state) (pdserve_worker_pairs{{{RELEASE}}})"},
                description=(
                    "`unproven` after seconds or `failed`: no generation passes over this pair, "
                    "see the network between them. `mismatched`: other weights, dtype or layout, "
                    "as in a rollout."
                ),
            ),
            Panel(
                title="Discovery errors",
                unit="ops",
                bad=1e-9,
                queries={"{{role}}": sum_rate("pdserve_discovery_errors_total", by="role")},
                description=(
                    "A list of workers could not be read or resolved; known workers stay. Check "
                    "the DNS name or file in the router's flags."
                ),
            ),
        ],
    )
    caches = Row(
        title="What workers have cached",
        panels=[
            Panel(
                title="Blocks in the index",
                unit="short",
                width=6,
                queries={"{{pod}}": f"pdserve_prefix_index_blocks{{{RELEASE}}}"},
                description=(
                    "KV blocks that this router's workers have cached, each once. At its limit "
                    "the router knows too little of them: more routers or smaller cells."
                ),
            ),
            Panel(
                title="Events of caches",
                unit="ops",
                width=6,
                queries={"{{event}}": sum_rate("pdserve_kv_cache_events_total", by="event")},
                description=(
                    "Blocks that workers stored and removed, and times that they cleared all. As "
                    "many removed as stored: the pools are full, which is as it should be."
                ),
            ),
            Panel(
                title="Gaps and evictions",
                unit="ops",
                width=6,
                queries={
                    "gaps": sum_rate("pdserve_kv_cache_resyncs_total"),
                    "evicted blocks": sum_rate("pdserve_prefix_index_evictions_total"),
                },
                description=(
                    "A gap in a worker's events has all that it caches told again. Steady gaps: "
                    "report it. Evictions: the index is full."
                ),
            ),
            Panel(
                title="Lookups",
                unit="s",
                width=6,
                queries=quantiles("pdserve_prefix_index_lookup_seconds"),
                description="How long finding the workers that have a prompt's prefix takes.",
            ),
        ],
    )
    itself = Row(
        title="The router itself",
        panels=[
            Panel(
                title="Its stages, p99",
                unit="s",
                width=6,
                queries={
                    "{{stage}}": quantile(
                        0.99, stage, of_stages("router_queue", "tokenize", "dispatch"), by="stage"
                    )
                },
                description=(
                    "What the router adds before a worker has the request. High with a core in "
                    "full use: more routers."
                ),
            ),
            Panel(
                title="CPU",
                unit="short",
                width=6,
                bad=0.9,
                queries={"{{pod}}": rate("process_cpu_seconds_total", labels)},
                description="A router works on one core. Near 1: add routers.",
            ),
            Panel(
                title="Memory and descriptors",
                unit="short",
                width=6,
                queries={
                    "{{pod}} bytes": f"process_resident_memory_bytes{{{labels}}}",
                    "{{pod}} open files": f"process_open_fds{{{labels}}}",
                },
                description="Growing for hours under steady load: report it.",
            ),
            Panel(
                title="Refused without a key",
                unit="reqps",
                width=6,
                queries={
                    "{{api}} {{reason}}": sum_rate(
                        "pdserve_requests_unauthorized_total", by="api, reason"
                    )
                },
                description=(
                    "Requests without a valid API key. Many `unknown`: a client has an old key, or"
                    " somebody guesses."
                ),
            ),
            Panel(
                title="Refused or cut at the ports",
                unit="ops",
                queries={
                    "{{component}} {{server}} {{limit}}": "topk(10, "
                    + sum_rate("pdserve_connection_limits_total", by="component, server, limit")
                    + ")"
                },
                description=(
                    "Connections, calls and messages beyond a limit of docs/security.md. Steady: "
                    "a client is broken or hostile, or a limit is too low for those who are not."
                ),
            ),
            Panel(
                title="Large requests",
                unit="short",
                queries={
                    "waiting": f"sum(pdserve_large_requests_waiting{{{RELEASE}}})",
                    "MB held": f"sum(pdserve_large_request_bytes{{{RELEASE}}}) / 1e6",
                    "{{outcome}}/s": sum_rate("pdserve_large_requests_total", by="outcome"),
                },
                description=(
                    "Prepared in processes of their own. `refused`: too many at a time, add "
                    "routers. `timeout` or `crashed`: see the router's log for the request."
                ),
            ),
            Panel(
                title="Tokens by API key",
                unit="short",
                is_stacked=True,
                queries={"{{api_key}}": sum_rate("pdserve_api_key_tokens_total", by="api_key")},
                description=(
                    "Prompts and answers of requests that have ended, by the key's name: the first "
                    "100, the others together."
                ),
            ),
            Panel(
                title="Waiting for the turn of an API key",
                unit="short",
                queries={"tokens": f"sum(pdserve_fair_queue_tokens{{{RELEASE}}})"},
                description=(
                    "Prompt tokens that wait at routers while workers have enough to do. Nothing "
                    "where fair_queue_steps is 0."
                ),
            ),
            Panel(
                title="Refused by limits of API keys",
                unit="reqps",
                is_stacked=True,
                queries={
                    "{{api_key}} {{outcome}}": sum_rate(
                        "pdserve_api_key_requests_total",
                        f'{RELEASE}, outcome!="accepted"',
                        by="api_key, outcome",
                    )
                },
                description=(
                    "By the key's name and the limit that it had used up. Not a sign of overload."
                ),
            ),
            Panel(
                title="Spans of traces",
                unit="ops",
                queries={
                    "{{component}} {{outcome}}": sum_rate(
                        "pdserve_trace_spans_total", by="component, outcome"
                    )
                },
                description=(
                    "Of all processes, nothing where otlp_traces_endpoint is unset. Anything but "
                    "`exported` is lost: the collector is away or slow, or OTEL_BSP_MAX_QUEUE_SIZE "
                    "is too small."
                ),
            ),
            Panel(
                title="Defects",
                unit="ops",
                width=24,
                queries={
                    "{{pod}} {{loop}}": sum_rate("pdserve_defects_total", by="pod, loop"),
                },
                description=(
                    "Exceptions that nobody expected, of all processes. The log says what each has "
                    "cost: see the runbook of PdserveDefect."
                ),
            ),
            Panel(
                title="Processes",
                unit="short",
                width=24,
                queries={
                    "{{role}} {{version}} {{kernels}}": "sum by (role, version, model, kernels) "
                    f"(pdserve_build_info{{{MODEL}}})"
                },
                description=(
                    "How many processes of which version run. `reference` kernels: a CPU worker "
                    "without compiled kernels, several times slower. Two versions outside a "
                    "rollout: one did not finish."
                ),
            ),
        ],
    )
    return Dashboard(
        name="router",
        title="pdserve / Router",
        description="What routers decide, and which workers they know.",
        rows=[routes, workers, caches, itself],
    )


# ---- Grafana's JSON


def dashboards() -> list[Dashboard]:
    return [overview(), waterfall(), pool(), kv_transfer(), router()]


def to_json(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": f"pdserve-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["pdserve"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [_LINKS],
        "templating": {
            "list": [
                _DATASOURCES,
                *map(_variable, ("namespace", "release", "model")),
                *(_choice(name, values) for name, values in dashboard.choices.items()),
            ]
        },
        "panels": list(_laid_out(dashboard.rows)),
    }


_LINKS = {
    "type": "dashboards",
    "title": "pdserve",
    "icon": "external link",
    "tooltip": "The other dashboards of pdserve, with the same choice",
    "tags": ["pdserve"],
    "targetBlank": False,
    "asDropdown": True,
    "includeVars": True,
    "keepTime": True,
}
_DATASOURCES = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
}


def _variable(label: str) -> dict[str, Any]:
    """A variable of a label's values; `model` knows only those of the chosen releases."""
    selector = f"{{{RELEASE}}}" if label == "model" else ""
    query = f"label_values(pdserve_build_info{selector}, {label})"
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _choice(name: str, values: Sequence[str]) -> dict[str, Any]:
    """A variable that is one of `values`."""
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "custom",
        "query": ", ".join(values),
        "multi": False,
        "includeAll": False,
        "current": {"text": values[0], "value": values[0]},
    }


def _laid_out(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Panels from left to right and from top to bottom; those of a line are equally high."""
    panel_id, y = 1, 0
    for row in rows:
        yield {
            "id": panel_id,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
        }
        panel_id, y, x, height = panel_id + 1, y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + height
            height = HEIGHT[panel.kind]
            place = {"h": height, "w": panel.width, "x": x, "y": y}
            yield {"id": panel_id, "gridPos": place, **_panel(panel)}
            panel_id, x = panel_id + 1, x + panel.width
        y += height


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    """Show stages by the names that `pdserve run` prints."""
    if "{{stage}}" not in panel.queries:
        return []
    return [
        {
            "matcher": {"id": "byName", "options": stage},
            "properties": [{"id": "displayName", "value": name}],
        }
        for stage, name in STAGES.items()
        if stage != name and stage in panel.queries["{{stage}}"]
    ]


def _panel(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.bad is not None:
        steps.append({"color": "red", "value": panel.bad})
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 40 if panel.is_stacked else 0,
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "off" if panel.bad is None else "line"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": _overrides(panel)},
        "options": _OPTIONS[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": expr,
                "legendFormat": legend,
                "range": True,
            }
            for index, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


_OPTIONS = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "calcs": [], "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "area",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
}


def rendered() -> dict[str, str]:
    """Return what is in helm/dashboards, by the files' names."""
    return {
        f"pdserve-{dashboard.name}.json": json.dumps(
            to_json(dashboard), indent=1, ensure_ascii=False
        )
        + "\n"
        for dashboard in dashboards()
    }


def main() -> None:
    """Write the files, and remove those of dashboards that are no more."""
    files = rendered()
    for path in FOLDER.glob("*.json"):
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
