"""`pdserve advise`: which split of workers for a trace, by simulation from a measured profile."""

import argparse
import asyncio
import dataclasses
import datetime
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from pdserve_client.advisor.cost_profile import CostProfile, load_profile, save_profile
from pdserve_client.advisor.flags import (
    MAX_WORKERS,
    add_choice_flags,
    add_profile_flags,
    add_trace_flags,
)
from pdserve_client.advisor.profiler import Plan, Profiler, check_reachable, get_info
from pdserve_client.advisor.progress import Progress
from pdserve_client.advisor.report import as_json, limit_of, table, verdict, why_missed
from pdserve_client.advisor.routing import RoutingRules
from pdserve_client.advisor.search import Goodput, Objectives, RateResult, at_rate, find_goodput
from pdserve_client.advisor.simulator import Outcome, Simulation, Split
from pdserve_client.advisor.trace import Trace, draw_trace, read_trace
from pdserve_client.client import AsyncClient
from pdserve_client.config import api_key, tls_of
from pdserve_common.rpc.tls import Tls

DESCRIPTION = """\
Say which split of workers into prefill and decode serves a trace at the highest rate within
objectives, and by how much it differs from mixed workers, which do both. Nothing is started: the
trace is simulated with the costs that `pdserve advise profile` has measured. docs/advisor.md says
what the simulation leaves out."""


def add_advise_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `pdserve advise`, and the subcommand `profile`."""
    add_trace_flags(parser.add_argument_group("the trace: a file, or drawn"))
    add_choice_flags(parser.add_argument_group("workers, objectives and routing"))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    commands = parser.add_subparsers(metavar="profile")
    profile = commands.add_parser(
        "profile",
        help="measure the cost profile of workers that are up",
        description="Measure what steps and handoffs cost, through a router with one decode worker "
        "and one or no prefill worker, which nobody else uses meanwhile; write it as JSON.",
    )
    add_profile_flags(profile)
    profile.set_defaults(command=run_profile)


# ---- profile


def run_profile(args: argparse.Namespace) -> int:
    """Measure, write the profile and print it. Raises ValueError, OSError or grpc.RpcError."""
    plan = Plan(
        max_prompt_tokens=args.max_prompt_tokens,
        max_batch=args.max_batch,
        repeats=args.repeats,
        timeout_s=args.timeout_s,
        seed=args.seed,
    )
    with Progress() as progress:
        profile = asyncio.run(_measure(args, plan, tls_of(args), progress.say))
    save_profile(profile, args.out)
    print("\n".join(profile_lines(profile)))
    print(f"written to {args.out}")
    return 0


async def _measure(
    args: argparse.Namespace, plan: Plan, tls: Tls | None, say: Callable[[str], None]
) -> CostProfile:
    infos = [
        _info(address, tls) if address else None
        for address in (args.decode_worker, args.prefill_worker)
    ]
    decode, prefill = infos
    assert decode is not None
    client = AsyncClient(args.address.split(","), tls=tls, api_key=api_key())
    try:
        profiler = Profiler(client, decode, prefill, plan, say)
        now = datetime.datetime.now(datetime.timezone.utc)
        machine = args.machine or f"{decode.kernels}, {decode.dtype}"
        return await profiler.measure(machine, now.isoformat(timespec="seconds"))
    finally:
        await client.close()


def _info(address: str, tls: Tls | None) -> Any:
    try:
        return get_info(address, tls)
    except grpc.RpcError as error:
        raise check_reachable(error, address) from error


def profile_lines(profile: CostProfile) -> list[str]:
    """Return it for people: times in microseconds, and how well they were fitted."""
    lines = [f"{'model':<24}{profile.model}", f"{'machine':<24}{profile.machine}"]
    parts: list[Any] = [profile.step, profile.handoff] if profile.handoff else [profile.step]
    for part in parts:
        for name, value in dataclasses.asdict(part).items():
            is_time = name.endswith("_s")
            shown = f"{value * 1e6:.4g} us" if is_time else f"{value:.4g}"
            lines.append(f"{name.removesuffix('_s'):<24}{shown}")
    lines.append(f"{'overhead':<24}{profile.overhead_s * 1e6:.4g} us")
    for name, (median, largest) in profile.residuals.items():
        lines.append(f"{'fit of ' + name:<24}off by {median:.1%} (median), {largest:.1%} (most)")
    return lines


# ---- advise


def run_advise(args: argparse.Namespace) -> int:
    """Simulate and print the advice. Raises ValueError or OSError."""
    if args.profile is None:
        raise ValueError("--profile is missing; `pdserve advise profile` measures one")
    if not (math.isfinite(args.precision) and 0.001 <= args.precision <= 1):
        raise ValueError(f"precision is {args.precision}, must be 0.001 to 1")
    if args.at_rate is not None and not (math.isfinite(args.at_rate) and args.at_rate >= 0):
        raise ValueError(f"at_rate is {args.at_rate}, must be a number of at least 0")
    profile = _changed(load_profile(args.profile), args.decode_max_num_batched_tokens)
    trace = trace_of(args)
    limits = {
        each.name: getattr(args, each.name) or None for each in dataclasses.fields(Objectives)
    }
    objectives = Objectives(**limits)
    splits = args.splits or all_splits(args.workers, has_handoff=profile.handoff is not None)
    with Progress() as progress:
        advisor = Advisor(args, trace, profile, objectives, progress)
        lines, values = (
            advisor.tell_rate(splits) if args.at_rate is not None else advisor.search(splits)
        )
    print(json.dumps(values) if args.json else "\n".join(lines))
    return 0


def _changed(profile: CostProfile, num_batched_tokens: int | None) -> CostProfile:
    if num_batched_tokens is None:
        return profile
    limits = dataclasses.replace(profile.decode_worker, max_num_batched_tokens=num_batched_tokens)
    return dataclasses.replace(profile, decode_worker=limits)


def all_splits(num_workers: int, *, has_handoff: bool) -> list[Split]:
    """Return mixed workers alone, and each split with at least one of both roles."""
    if not 1 <= num_workers <= MAX_WORKERS:
        raise ValueError(f"workers is {num_workers}, must be 1 to {MAX_WORKERS}")
    most = num_workers if has_handoff else 1
    return [Split(num_prefill, num_workers - num_prefill) for num_prefill in range(most)]


def trace_of(args: argparse.Namespace) -> Trace:
    """Return what the flags say. Raises ValueError or OSError."""
    if args.trace is None:
        return draw_trace(
            num_requests=args.num_requests,
            rate=1.0,
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            num_prefixes=args.num_prefixes,
            prefix_tokens=args.prefix_tokens,
            seed=args.seed,
        )
    trace = read_trace(args.trace, hash_block_tokens=args.hash_block_tokens)
    if args.max_requests is None:
        return trace
    if args.max_requests < 2:
        raise ValueError(f"max_requests is {args.max_requests}, must be at least 2")
    return dataclasses.replace(trace, requests=trace.requests[: args.max_requests])


class Advisor:
    """Simulates splits, and says what came of them: as lines for people, and as values for JSON."""

    def __init__(
        self,
        args: argparse.Namespace,
        trace: Trace,
        profile: CostProfile,
        objectives: Objectives,
        progress: Progress,
    ) -> None:
        if not math.isfinite(trace.rate):
            raise ValueError("all requests of the trace arrive at once: it has no rate")
        self._trace, self._profile, self._objectives = trace, profile, objectives
        self._rules = RoutingRules(
            routing_policy=args.routing_policy,
            disaggregation_threshold_tokens=args.disaggregation_threshold_tokens,
            max_prefill_queue_tokens=args.max_prefill_queue_tokens,
        )
        self._seed, self._precision, self._rate = args.seed, args.precision, args.at_rate
        self._progress = progress

    def search(self, splits: Sequence[Split]) -> tuple[list[str], dict[str, Any]]:
        """Find each split's highest rate."""
        found: list[Goodput] = []
        # A split is not far from the one before it.
        start_rate = self._trace.rate
        for number, split in enumerate(splits):
            self._progress.begin(f"{split}", number, len(splits))
            found.append(
                find_goodput(
                    split,
                    self._simulate(split),
                    self._objectives,
                    start_rate=start_rate,
                    precision=self._precision,
                )
            )
            start_rate = found[-1].rate or start_rate
        rows = [(str(each.split), each.best, limit_of(each)) for each in found]
        lines = [*self._heading(), *table(rows), "", *verdict(found, self._precision)]
        return lines, {
            **self._inputs(),
            "verdict": verdict(found, self._precision),
            "splits": [
                {
                    **dataclasses.asdict(each.split),
                    "goodput": as_json(each.best),
                    "above": as_json(each.above),
                    "limit": limit_of(each),
                }
                for each in found
            ],
        }

    def tell_rate(self, splits: Sequence[Split]) -> tuple[list[str], dict[str, Any]]:
        """Run each split at one rate."""
        rate = self._rate or self._trace.rate
        results: list[RateResult] = []
        for number, split in enumerate(splits):
            self._progress.begin(f"{split}", number, len(splits))
            results.append(at_rate(split, rate, self._simulate(split), self._objectives))
        remarks = ["meets the objectives" if each.is_met else why_missed(each) for each in results]
        rows = list(zip(map(str, splits), results, remarks, strict=True))
        return [*self._heading(), *table(rows)], {
            **self._inputs(),
            "splits": [
                {**dataclasses.asdict(split), "result": as_json(each), "remark": remark}
                for split, each, remark in zip(splits, results, remarks, strict=True)
            ],
        }

    def _simulate(self, split: Split) -> Callable[[float], Outcome]:
        def simulate(rate: float) -> Outcome:
            def on_progress(number: int) -> None:
                share = number / len(self._trace.requests)
                self._progress.at(share, f"{split} at {rate:.2f} requests/s")

            trace = self._trace.at_rate(rate)
            return Simulation(
                trace,
                self._profile,
                split,
                self._rules,
                seed=self._seed,
                on_progress=on_progress,
            ).run()

        return simulate

    def _heading(self) -> list[str]:
        requests = self._trace.requests
        prompt = sum(each.num_prompt_tokens for each in requests) / len(requests)
        output = sum(each.num_output_tokens for each in requests) / len(requests)
        limits = dataclasses.asdict(self._objectives).items()
        return [
            f"{len(requests)} requests, on average {prompt:.0f} + {output:.0f} tokens; "
            f"simulated with costs of {self._profile.model} on {self._profile.machine}, measured "
            f"{self._profile.measured_at}",
            "objectives: "
            + ", ".join(f"{name} {limit:g}" for name, limit in limits if limit is not None),
            "",
        ]

    def _inputs(self) -> dict[str, Any]:
        return {
            "simulated": True,
            "num_requests": len(self._trace.requests),
            "trace_requests_per_s": self._trace.rate,
            "objectives": dataclasses.asdict(self._objectives),
            "routing": dataclasses.asdict(self._rules),
            "seed": self._seed,
            "profile": dataclasses.asdict(self._profile),
        }
