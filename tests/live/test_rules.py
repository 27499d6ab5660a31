"""promtool on what the chart installs: every alert fires for what it is about, and for no less."""

import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from helm_chart import EVERYTHING, of_kind, render
from monitoring import ALERTS, autoscaling_queries, panel_queries, rule_name, rules

PAGE, TICKET = "page", "ticket"


class Case(NamedTuple):
    """What releases export, by release and series, in promtool's notation of a sample a minute, and
    which severities of the alert fire for each after `minutes`.
    """

    alert: str
    minutes: int
    series: dict[str, dict[str, str]]
    fires: dict[str, set[str]]


def slow(metric: str, le: str) -> Any:
    def series(num_fast: str) -> dict[str, str]:
        return {
            f'pdserve_{metric}_bucket{{model="m", le="{le}"}}': num_fast,
            f'pdserve_{metric}_count{{model="m"}}': "0+100x400",
        }

    # One page needs more than 14.4%, a ticket more than 6%.
    return {
        "all_slow": series("0+80x400"),
        "over": series("0+90x400"),
        "as_promised": series("0+99x400"),
        "over_before": series("0+80x140 11300+100x20"),
        "over_since_5_minutes": series("0+100x145 14550+50x20"),
    }


SLOW_FIRES = {
    "all_slow": {PAGE, TICKET},
    "over": {TICKET},
    "as_promised": set(),
    # The last 5 minutes are good, the last 30 are not.
    "over_before": {TICKET},
    # It is too soon to say that it matters.
    "over_since_5_minutes": set(),
}


def workers(role: str, count: str) -> dict[str, str]:
    return {f'pdserve_workers{{role="{role}", state="ready", pod="r"}}': count}


def waits(queue: str, grant: str, usage: str) -> dict[str, str]:
    stage = "pdserve_request_stage_seconds"
    return {
        f'{stage}_sum{{stage="prefill_queue"}}': queue,
        f'{stage}_count{{stage="prefill_queue"}}': "0+60x60",
        'pdserve_kv_cache_usage_ratio{component="decode", pod="d"}': usage,
    } | ({f'{stage}_sum{{stage="grant"}}': grant} if grant else {})


def routed(local: str, prefill: str, reason: str = "no_prefill_worker") -> dict[str, str]:
    name = "pdserve_requests_routed_total"
    return {
        f'{name}{{path="disaggregated", reason=""}}': "0+90x60",
        f'{name}{{path="local", reason="{reason}"}}': local,
        **workers("prefill", prefill),
    }


def transfers(lost: str, done: str) -> dict[str, str]:
    labels = 'pod="d", peer="p"'
    done_series = {f"pdserve_kv_transfer_exposed_seconds_count{{{labels}}}": done}
    return {f'pdserve_kv_transfer_failures_total{{{labels}, reason="stall"}}': lost} | (
        done_series if done else {}
    )


def exposed(within_half_a_second: str) -> dict[str, str]:
    name, labels = "pdserve_kv_transfer_exposed_seconds_bucket", 'pod="d", peer="p"'
    return {
        f'{name}{{{labels}, le="0.5"}}': within_half_a_second,
        f'{name}{{{labels}, le="1.0"}}': "0+100x60",
        f'{name}{{{labels}, le="+Inf"}}': "0+100x60",
    }


CASES = [
    Case("PdserveTTFTBudgetBurn", 150, slow("time_to_first_token_seconds", "2.5"), SLOW_FIRES),
    Case("PdserveITLBudgetBurn", 150, slow("time_per_output_token_seconds", "0.1"), SLOW_FIRES),
    Case(
        "PdserveErrorRatio",
        10,
        {
            "failing": {
                'pdserve_requests_total{model="m", outcome="error"}': "0+2x60",
                'pdserve_requests_total{model="m", outcome="stop"}': "0+98x60",
            },
            "nearly_well": {
                'pdserve_requests_total{model="m", outcome="error"}': "0+1x60",
                'pdserve_requests_total{model="m", outcome="stop"}': "0+199x60",
            },
            "well_and_rejecting": {
                'pdserve_requests_total{model="m", outcome="error"}': "0x60",
                'pdserve_requests_total{model="m", outcome="stop"}': "0+9x60",
                'pdserve_requests_total{model="m", outcome="rejected"}': "0+90x60",
            },
            "failing_and_rejecting": {
                'pdserve_requests_total{model="m", outcome="error"}': "0+1x60",
                'pdserve_requests_total{model="m", outcome="stop"}': "0+9x60",
                'pdserve_requests_total{model="m", outcome="rejected"}': "0+900x60",
                'pdserve_requests_total{model="m", outcome="refused"}': "0+900x60",
            },
            "one_client": {
                'pdserve_requests_total{model="m", outcome="error"}': "0x6 1+1x3 4x60",
                'pdserve_requests_total{model="m", outcome="stop"}': "0+18x60",
            },
        },
        {"failing": {PAGE}, "failing_and_rejecting": {PAGE}},
    ),
    Case(
        "PdserveRequestsRefused",
        10,
        {
            "all": {
                'pdserve_requests_total{model="m", outcome="refused"}': "0+600x60",
                'pdserve_requests_total{model="m", outcome="stop"}': "0x60",
            },
            "many": {
                'pdserve_requests_total{model="m", outcome="refused"}': "0+20x60",
                'pdserve_requests_total{model="m", outcome="stop"}': "0+80x60",
            },
            "now_and_then": {
                'pdserve_requests_total{model="m", outcome="refused"}': "0+5x60",
                'pdserve_requests_total{model="m", outcome="stop"}': "0+95x60",
            },
            "one_client": {
                'pdserve_requests_total{model="m", outcome="refused"}': "0x6 1+1x3 4x60",
                'pdserve_requests_total{model="m", outcome="stop"}': "0+1x60",
            },
            "wrong_in_themselves": {
                'pdserve_requests_total{model="m", outcome="refused"}': "0x60",
                'pdserve_requests_total{model="m", outcome="rejected"}': "0+600x60",
                'pdserve_requests_total{model="m", outcome="stop"}': "0x60",
            },
        },
        {"all": {PAGE}, "many": {PAGE}},
    ),
    Case(
        "PdserveNoReadyWorker",
        10,
        {
            "no_decode": workers("decode", "1x7 0x60"),
            "no_prefill": workers("prefill", "1x7 0x60") | workers("decode", "1x60"),
            "decode_alone": workers("prefill", "0x60") | workers("decode", "1x60"),
            "whole": workers("prefill", "1x60") | workers("decode", "1x60"),
        },
        {"no_decode": {PAGE}, "no_prefill": {PAGE}},
    ),
    Case(
        "PdserveNoRouter",
        80,
        {
            "down": {'up{component="router", pod="r"}': "1x5 0x100"},
            "one_of_two_down": {
                'up{component="router", pod="r"}': "1x5 0x100",
                'up{component="router", pod="s"}': "1x100",
            },
            "never_up": {'up{component="router", pod="r"}': "0x100"},
            "gone": {'up{component="router", pod="r"}': "1x60"},
            "gone_for_an_hour": {'up{component="router", pod="r"}': "1x15"},
            "replaced": {
                'up{component="router", pod="r"}': "1x60",
                'up{component="router", pod="s"}': "_x60 1x40",
            },
            "of_others": {'up{component="database", pod="r"}': "1x5 0x100"},
        },
        {"down": {PAGE}, "never_up": {PAGE}, "gone": {PAGE}},
    ),
    Case(
        "PdserveTargetDown",
        10,
        {
            "dead": {'up{component="prefill", pod="p"}': "1x5 0x60"},
            "restarted": {'up{component="prefill", pod="p"}': "1x8 0 1x60"},
            "of_others": {'up{component="database", pod="p"}': "0x60"},
        },
        {"dead": {TICKET}},
    ),
    Case(
        "PdserveRestartLoop",
        50,
        {
            "looping": {
                'process_start_time_seconds{component="decode", pod="d"}': "1x9 2x9 3x9 4x60"
            },
            "replaced": {'process_start_time_seconds{component="decode", pod="d"}': "1x9 2x9 3x60"},
            "of_others": {
                'process_start_time_seconds{component="database", pod="d"}': "1x9 2x9 3x9 4x60"
            },
        },
        {"looping": {PAGE}},
    ),
    Case(
        "PdserveDowngrade",
        10,
        {
            "lost": routed("0+10x60", "1x3 0x60"),
            "unproven": routed("0+10x60", "1x60", "no_proven_pair"),
            "queueing": routed("0+10x60", "1x60", "prefill_queue"),
            "now_and_then": routed("0+4x60", "1x60"),
            "on_purpose": routed("0+90x60", "1x60", "cached_prompt"),
            "decode_alone": routed("0+10x60", "0x60"),
        },
        {"lost": {TICKET}, "unproven": {TICKET}, "queueing": {TICKET}},
    ),
    Case(
        "PdservePrefillQueue",
        10,
        {
            "full": {
                'pdserve_waiting_tokens{component="prefill", pod="p"}': "11000x60",
                'pdserve_engine_step_tokens_sum{component="prefill", pod="p"}': "0+60000x60",
            },
            "hung": {
                'pdserve_waiting_tokens{component="prefill", pod="p"}': "100x60",
                'pdserve_engine_step_tokens_sum{component="prefill", pod="p"}': "5x60",
            },
            "fast": {
                'pdserve_waiting_tokens{component="prefill", pod="p"}': "11000x60",
                'pdserve_engine_step_tokens_sum{component="prefill", pod="p"}': "0+70000x60",
            },
            "idle": {
                'pdserve_waiting_tokens{component="prefill", pod="p"}': "0x60",
                'pdserve_engine_step_tokens_sum{component="prefill", pod="p"}': "5x60",
            },
        },
        {"full": {TICKET}, "hung": {TICKET}},
    ),
    Case(
        "PdservePrefillDecodeImbalance",
        30,
        {
            "short_of_prefill": waits("0+60x60", "0+6x60", "0.2x60"),
            "short_of_prefill_without_grants": waits("0+60x60", "", "0.2x60"),
            "short_of_decode": waits("0+60x60", "0+50x60", "0.95x60"),
            "short_of_both": waits("0+60x60", "0+6x60", "0.8x60"),
            "balanced": waits("0+6x60", "0+3x60", "0.2x60"),
        },
        {
            "short_of_prefill": {TICKET},
            "short_of_prefill_without_grants": {TICKET},
            "short_of_decode": {TICKET},
        },
    ),
    Case(
        "PdserveDecodeKVPressure",
        20,
        {
            "full": {'pdserve_kv_cache_usage_ratio{component="decode", pod="d"}': "0.95x60"},
            "busy": {'pdserve_kv_cache_usage_ratio{component="decode", pod="d"}': "0.85x60"},
            "prefill": {'pdserve_kv_cache_usage_ratio{component="prefill", pod="p"}': "0.99x60"},
        },
        {"full": {TICKET}},
    ),
    Case(
        "PdserveTransferFailures",
        10,
        {
            "losing": transfers("0+2x60", "0+98x60"),
            "losing_all": transfers("0+2x60", ""),
            "nearly_well": transfers("0+1x60", "0+200x60"),
        },
        {"losing": {TICKET}, "losing_all": {TICKET}},
    ),
    Case(
        "PdserveTransferSlow",
        20,
        {"slow": exposed("0+98x60"), "fast": exposed("0+100x60")},
        {"slow": {TICKET}},
    ),
    Case(
        "PdserveSessionsExpiredOrFenced",
        10,
        {
            "expired": {'pdserve_kv_sessions_ended_total{pod="p", reason="expired"}': "0x5 1x60"},
            "fenced": {'pdserve_kv_sessions_ended_total{pod="p", reason="fenced"}': "0x5 1x60"},
            "released": {'pdserve_kv_sessions_ended_total{pod="p", reason="released"}': "0+9x60"},
        },
        {"expired": {TICKET}, "fenced": {TICKET}},
    ),
    Case(
        "PdserveDuplicateTokenMismatch",
        10,
        {
            "wrong": {'pdserve_duplicate_tokens_total{match="false"}': "0x5 1x60"},
            "right": {
                'pdserve_duplicate_tokens_total{match="false"}': "0x60",
                'pdserve_duplicate_tokens_total{match="true"}': "0+9x60",
            },
        },
        {"wrong": {PAGE}},
    ),
    Case(
        "PdserveCorruptBlocks",
        10,
        {
            "damaged": {'pdserve_kv_checksum_mismatches_total{pod="d"}': "0x5 3x60"},
            "well": {'pdserve_kv_checksum_mismatches_total{pod="d"}': "0x60"},
        },
        {"damaged": {PAGE}},
    ),
]


def promtool(*args: str | Path) -> None:
    done = subprocess.run(
        ["promtool", *args], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rendered_rules_are_valid(tmp_path: Path) -> None:
    (manifest,) = of_kind(render(EVERYTHING), "PrometheusRule")
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(manifest["spec"]))
    promtool("check", "rules", path)
    assert manifest["spec"] == yaml.safe_load(ALERTS.read_text())


def test_queries_of_panels_and_autoscaling_are_valid(tmp_path: Path) -> None:
    queries = [*panel_queries(), *autoscaling_queries()]
    group = {
        "name": "queries",
        "rules": [{"record": f"query:{i}", "expr": q.expr} for i, q in enumerate(queries)],
    }
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [group]}))
    promtool("check", "rules", path)


def test_every_alert_has_a_case() -> None:
    assert {case.alert for case in CASES} == {rule_name(r) for r in rules() if "alert" in r}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_alerts_fire_when_they_should_and_only_then(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(unit_test(case)))
    promtool("test", "rules", path)


def unit_test(case: Case) -> dict[str, Any]:
    """Return a file for `promtool test rules`."""
    names = ("alertname", "release", "severity")
    expected = [
        {"labels": _labels(names, (case.alert, release, severity)), "value": 1}
        for release, severities in case.fires.items()
        for severity in severities
    ]
    firing = (
        f'group by ({", ".join(names)}) (ALERTS{{alertstate="firing", alertname="{case.alert}"}})'
    )
    return {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": _of_release(series, release), "values": values}
                    for release, exported in case.series.items()
                    for series, values in exported.items()
                ],
                "promql_expr_test": [
                    {"expr": firing, "eval_time": f"{case.minutes}m", "exp_samples": expected}
                ],
            }
        ],
    }


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    pairs = (f'{name}="{value}"' for name, value in zip(names, values, strict=True))
    return "{" + ", ".join(pairs) + "}"


def _of_release(series: str, release: str) -> str:
    return series.replace("{", f'{{namespace="n", release="{release}", ')
