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
        "one_slow_request": {
            f'pdserve_{metric}_bucket{{model="m", le="{le}"}}': "0x400",
            f'pdserve_{metric}_count{{model="m"}}': "0x145 1x200",
        },
        "a_slow_one_now_and_then": {
            f'pdserve_{metric}_bucket{{model="m", le="{le}"}}': "0x400",
            f'pdserve_{metric}_count{{model="m"}}': "0x29 1x29 2x29 3x29 4x29 5x29",
        },
    }


SLOW_FIRES = {
    "all_slow": {PAGE, TICKET},
    "over": {TICKET},
    "as_promised": set(),
    # The last 5 minutes are good, the last 30 are not.
    "over_before": {TICKET},
    # It is too soon to say that it matters.
    "over_since_5_minutes": set(),
    "one_slow_request": set(),
    "a_slow_one_now_and_then": set(),
}


def workers(role: str, count: str, state: str = "ready", pod: str = "r") -> dict[str, str]:
    return {f'pdserve_workers{{role="{role}", state="{state}", pod="{pod}"}}': count}


# A release that could serve once, and one that is still being installed.
SERVED = workers("decode", "1 0x400")
LOADING = workers("decode", "0x400")


def outcomes(**counts: str) -> dict[str, str]:
    """Each one's samples."""
    name = "pdserve_requests_total"
    return {f'{name}{{model="m", outcome="{key}"}}': value for key, value in counts.items()}


def waits(
    prefill: str, decode: str, usage: str, count: str = "0+60x60", kv_usage: str = "0.3x60"
) -> dict[str, str]:
    """Seconds that requests wait for each pool, and the use of decode's slots and KV blocks."""
    stage = "pdserve_request_stage_seconds"
    sums = {"prefill_queue": prefill, "decode_queue": decode}
    return {
        **{f'{stage}_sum{{stage="{name}"}}': values for name, values in sums.items()},
        **{f'{stage}_count{{stage="{name}"}}': count for name in sums},
        'pdserve_slot_usage_ratio{component="decode", pod="d"}': usage,
        'pdserve_kv_cache_usage_ratio{component="decode", pod="d"}': kv_usage,
    }


def slots(usage: str, waiting: str) -> dict[str, str]:
    return {
        'pdserve_slot_usage_ratio{component="decode", pod="d"}': usage,
        'pdserve_requests_waiting_for_decode{component="prefill", pod="p"}': waiting,
        'pdserve_requests_waiting_for_decode{component="decode", pod="d"}': "0x60",
    }


def routed(
    local: str,
    prefill: str,
    reason: str = "no_prefill_worker",
    disaggregated: str = "0+90x60",
) -> dict[str, str]:
    name = "pdserve_requests_routed_total"
    return {
        f'{name}{{path="disaggregated", reason=""}}': disaggregated,
        f'{name}{{path="local", reason="{reason}"}}': local,
        **workers("prefill", prefill),
    }


def transfers(lost: str, done: str) -> dict[str, str]:
    labels = 'pod="d", peer="p"'
    done_series = {f"pdserve_kv_transfer_exposed_seconds_count{{{labels}}}": done}
    return {f'pdserve_kv_transfer_failures_total{{{labels}, reason="stall"}}': lost} | (
        done_series if done else {}
    )


def exposed(within_half_a_second: str, count: str = "0+100x60") -> dict[str, str]:
    name, labels = "pdserve_kv_transfer_exposed_seconds", 'pod="d", peer="p"'
    return {
        f'{name}_bucket{{{labels}, le="0.5"}}': within_half_a_second,
        f'{name}_bucket{{{labels}, le="1.0"}}': count,
        f'{name}_bucket{{{labels}, le="+Inf"}}': count,
        f"{name}_count{{{labels}}}": count,
    }


def queue(waiting_tokens: str, waiting: str, computed: str) -> dict[str, str]:
    labels = 'component="prefill", pod="p"'
    return {
        f"pdserve_waiting_tokens{{{labels}}}": waiting_tokens,
        f"pdserve_requests_waiting{{{labels}}}": waiting,
        f"pdserve_engine_step_tokens_sum{{{labels}}}": computed,
    }


def starts(component: str) -> dict[str, str]:
    labels = f'component="{component}", pod="d"'
    return {f"process_start_time_seconds{{{labels}}}": "1x9 2x9 3x9 4x60"}


def pairs(router: str = "r", **counts: str) -> dict[str, str]:
    """Each state's samples."""
    name = "pdserve_worker_pairs"
    return {f'{name}{{state="{key}", pod="{router}"}}': value for key, value in counts.items()}


CASES = [
    Case("PdserveTTFTBudgetBurn", 150, slow("time_to_first_token_seconds", "2.5"), SLOW_FIRES),
    Case("PdserveFirstITLBudgetBurn", 150, slow("first_inter_token_seconds", "0.5"), SLOW_FIRES),
    Case("PdserveITLBudgetBurn", 150, slow("time_per_output_token_seconds", "0.1"), SLOW_FIRES),
    Case(
        "PdserveErrorRatio",
        10,
        {
            "failing": outcomes(error="0+2x60", stop="0+98x60") | SERVED,
            "nearly_well": outcomes(error="0+1x60", stop="0+199x60") | SERVED,
            "well_and_rejecting": outcomes(error="0x60", stop="0+9x60", rejected="0+90x60")
            | SERVED,
            "failing_and_rejecting": outcomes(
                error="0+1x60", stop="0+9x60", rejected="0+900x60", refused="0+900x60"
            )
            | SERVED,
            "one_client": outcomes(error="0x6 1+1x3 4x60", stop="0+18x60") | SERVED,
            "loading": outcomes(error="0+2x60", stop="0+98x60") | LOADING,
        },
        {"failing": {PAGE}, "failing_and_rejecting": {PAGE}},
    ),
    Case(
        "PdserveRequestsRefused",
        10,
        {
            "all": outcomes(refused="0+600x60", stop="0x60") | SERVED,
            "many": outcomes(refused="0+20x60", stop="0+80x60") | SERVED,
            "now_and_then": outcomes(refused="0+5x60", stop="0+95x60") | SERVED,
            "one_client": outcomes(refused="0x6 1+1x3 4x60", stop="0+1x60") | SERVED,
            "wrong_in_themselves": outcomes(refused="0x60", rejected="0+600x60", stop="0x60")
            | SERVED,
            "loading": outcomes(refused="0+600x60", stop="0x60") | LOADING,
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
            "loading": workers("prefill", "0x60") | LOADING,
            "decode_still_loading": workers("prefill", "0x3 1x60") | LOADING,
        },
        {"no_decode": {PAGE}, "no_prefill": {PAGE}},
    ),
    Case(
        "PdserveNoRouter",
        80,
        {
            "down": {'up{component="router", pod="r"}': "1x5 0x100"} | SERVED,
            "one_of_two_down": {
                'up{component="router", pod="r"}': "1x5 0x100",
                'up{component="router", pod="s"}': "1x100",
            }
            | SERVED,
            "never_up": {'up{component="router", pod="r"}': "0x100"},
            "down_while_workers_load": {'up{component="router", pod="r"}': "1x5 0x100"} | LOADING,
            "gone": {'up{component="router", pod="r"}': "1x60"} | SERVED,
            "gone_for_an_hour": {'up{component="router", pod="r"}': "1x15"} | SERVED,
            "replaced": {
                'up{component="router", pod="r"}': "1x60",
                'up{component="router", pod="s"}': "_x60 1x40",
            }
            | SERVED,
            "of_others": {'up{component="database", pod="r"}': "1x5 0x100"} | SERVED,
        },
        {"down": {PAGE}, "gone": {PAGE}},
    ),
    Case(
        "PdserveTargetDown",
        10,
        {
            "dead": {'up{component="prefill", pod="p"}': "1x5 0x60"} | SERVED,
            "restarted": {'up{component="prefill", pod="p"}': "1x8 0 1x60"} | SERVED,
            "of_others": {'up{component="database", pod="p"}': "0x60"} | SERVED,
            "installing": {'up{component="prefill", pod="p"}': "0x60"} | LOADING,
        },
        {"dead": {TICKET}},
    ),
    Case(
        "PdserveRestartLoop",
        50,
        {
            "looping": starts("decode") | SERVED,
            "replaced": {'process_start_time_seconds{component="decode", pod="d"}': "1x9 2x9 3x60"}
            | SERVED,
            "of_others": starts("database") | SERVED,
            "installing": starts("decode") | LOADING,
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
            "one_request": routed("0x5 1x60", "1x60", "no_proven_pair", "0x60"),
        },
        {"lost": {TICKET}, "unproven": {TICKET}, "queueing": {TICKET}},
    ),
    Case(
        "PdservePrefillQueue",
        10,
        {
            "full": queue("11000x60", "30x60", "0+60000x60"),
            "hung": queue("100x60", "3x60", "5x60"),
            "fast": queue("11000x60", "30x60", "0+70000x60"),
            "idle": queue("0x60", "0x60", "5x60"),
            "one_long_prompt": queue("90000x60", "1x60", "0+60000x60"),
        },
        {"full": {TICKET}, "hung": {TICKET}},
    ),
    Case(
        "PdservePrefillDecodeImbalance",
        30,
        {
            "short_of_prefill": waits("0+54x60", "0+6x60", "0.2x60"),
            "short_of_decode": waits("0+6x60", "0+54x60", "1x60"),
            # A burst of prompts, before decode's blocks were full.
            "short_of_decode_with_free_slots": waits(
                "0+40x60", "0+54x60", "0.8x60", kv_usage="0.9x60"
            ),
            # Grants take their time, as decode's steps are long.
            "decode_is_idle": waits("0+6x60", "0+54x60", "0.04x60", kv_usage="0.11x60"),
            # More prefill would find no room on decode.
            "short_of_blocks": waits("0+54x60", "0+6x60", "0.2x60", kv_usage="0.9x60"),
            # More prefill would only have more wait for decode.
            "short_of_both": waits("0+40x60", "0+20x60", "1x60"),
            "balanced": waits("0+6x60", "0+3x60", "0.2x60"),
            "one_request": waits("0x23 5x60", "0x60", "0.2x60", count="0x23 1x60"),
            "one_request_for_decode": waits("0x23 5x60", "0x23 5x60", "0.2x60", "0x23 1x60"),
        },
        {
            "short_of_prefill": {TICKET},
            "short_of_decode": {TICKET},
            "short_of_decode_with_free_slots": {TICKET},
        },
    ),
    Case(
        "PdserveDecodeSlots",
        20,
        {
            "full": slots("1x60", "20x60"),
            "well_used": slots("1x60", "0x60"),
            "full_of_long_prompts": slots("0.5x60", "20x60"),
        },
        {"full": {TICKET}},
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
            "one_request": transfers("0x6 1x60", "0x60"),
        },
        {"losing": {TICKET}, "losing_all": {TICKET}},
    ),
    Case(
        "PdserveTransferSlow",
        20,
        {
            "slow": exposed("0+98x60"),
            "fast": exposed("0+100x60"),
            "a_slow_one_now_and_then": exposed("0x60", "0x5 1x4 2x4 3x4 4x4 5x60"),
        },
        {"slow": {TICKET}},
    ),
    Case(
        "PdserveWorkerUnused",
        20,
        {
            "of_other_weights": workers("decode", "3x60") | workers("decode", "1x60", "mismatched"),
            "with_a_name_that_is_taken": workers("prefill", "1x60", "duplicate"),
            "at_one_router": workers("decode", "1x60", "mismatched")
            | workers("decode", "0x60", "mismatched", pod="s"),
            "a_rollout_that_passes": workers("decode", "0x3 1x5 3x5 0x60", "mismatched"),
            "gone": workers("decode", "3x60", "down") | workers("decode", "0x60", "mismatched"),
        },
        {
            "of_other_weights": {TICKET},
            "with_a_name_that_is_taken": {TICKET},
            "at_one_router": {TICKET},
        },
    ),
    Case(
        "PdservePairFailed",
        10,
        {
            "beside_others": pairs(failed="1x60", proven="3x60"),
            "at_one_router": pairs(failed="1x60", proven="3x60")
            | pairs("s", failed="0x60", proven="4x60"),
            "for_a_moment": pairs(failed="0x7 1x60", proven="4x60"),
            "new_ones": pairs(failed="0x60", unproven="4x60", mismatched="4x60"),
        },
        {"beside_others": {TICKET}, "at_one_router": {TICKET}},
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
    Case(
        "PdserveDefect",
        10,
        {
            "one": {'pdserve_defects_total{pod="d", loop="kv_link"}': "0x5 1x60"},
            "none": {'pdserve_defects_total{pod="d", loop="kv_link"}': "0x60"},
        },
        {"one": {TICKET}},
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
