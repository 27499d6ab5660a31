"""The flags of `pdserve advise`."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, get_args

from pdserve_client.advisor.profiler import Plan
from pdserve_client.advisor.routing import Policy, RoutingRules
from pdserve_client.advisor.search import Objectives
from pdserve_client.advisor.simulator import Split
from pdserve_client.advisor.trace import HASH_BLOCK_TOKENS, Lengths, parse_lengths
from pdserve_common.config import add_config_flags
from pdserve_common.rpc.tls import TlsConfig

MAX_WORKERS = 64


def add_trace_flags(group: Any) -> None:
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSONL: our own (arrival_s, num_prompt_tokens, num_output_tokens, prefix_id, "
        "num_prefix_tokens; `pdserve bench --save-requests` writes it) or Mooncake's (timestamp, "
        "input_length, output_length, hash_ids)",
    )
    group.add_argument(
        "--hash-block-tokens",
        type=int,
        default=HASH_BLOCK_TOKENS,
        metavar="N",
        help="prompt tokens for each of Mooncake's hash_ids (%(default)s)",
    )
    group.add_argument(
        "--max-requests", type=int, metavar="N", help="of the file: the first N; all if unset"
    )
    group.add_argument("--num-requests", type=int, default=2000, help="drawn (%(default)s)")
    group.add_argument(
        "--prompt-tokens",
        type=_lengths,
        default="lognormal:1024:1",
        metavar="LENGTHS",
        help="drawn: N, uniform:LOW:HIGH, or lognormal:MEAN:CV (%(default)s)",
    )
    group.add_argument(
        "--output-tokens",
        type=_lengths,
        default="lognormal:256:1",
        metavar="LENGTHS",
        help="the same of answers (%(default)s)",
    )
    group.add_argument(
        "--num-prefixes",
        type=int,
        default=0,
        help="drawn: so many shared texts, one before each prompt (%(default)s)",
    )
    group.add_argument(
        "--prefix-tokens", type=int, default=0, help="tokens of each of them (%(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, help="of all that is drawn (%(default)s)")


def add_choice_flags(group: Any) -> None:
    group.add_argument(
        "--profile", type=Path, metavar="FILE", help="what `pdserve advise profile` has written"
    )
    group.add_argument(
        "--workers",
        type=int,
        default=4,
        help=f"to be split in all ways, 1 to {MAX_WORKERS} (%(default)s)",
    )
    group.add_argument(
        "--splits",
        type=_splits,
        metavar="P:D,...",
        help="only these instead, like 0:4,1:3; 0:N are mixed workers",
    )
    group.add_argument(
        "--decode-max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens in a step of decode and mixed workers; the profile's if unset. Fewer make the "
        "steps shorter in which mixed workers compute prompts",
    )
    defaults = Objectives()
    for each in dataclasses.fields(Objectives):
        default = getattr(defaults, each.name)
        shown = "none" if default is None else f"{default:g}"
        group.add_argument(
            "--" + each.name.replace("_", "-"),
            type=float,
            default=default,
            metavar="MS",
            help=f"objective, 0: none ({shown})",
        )
    group.add_argument(
        "--at-rate",
        type=float,
        metavar="RATE",
        help="tell how each split does at this rate instead of its highest one; 0: the trace's own",
    )
    group.add_argument(
        "--precision",
        type=float,
        default=0.05,
        help="the search ends when rates are this close, as a share (%(default)s)",
    )
    rules = RoutingRules()
    group.add_argument(
        "--routing-policy",
        choices=get_args(Policy),
        default=rules.routing_policy,
        help="the router's (%(default)s)",
    )
    group.add_argument(
        "--disaggregation-threshold-tokens",
        type=int,
        default=rules.disaggregation_threshold_tokens,
        metavar="N",
        help="the router's: prompts up to N uncached tokens stay on decode (%(default)s)",
    )
    group.add_argument(
        "--max-prefill-queue-tokens",
        type=int,
        default=rules.max_prefill_queue_tokens,
        metavar="N",
        help="the router's: prompts stay on decode while more tokens wait on all prefill workers; "
        "0: never (%(default)s)",
    )


def add_profile_flags(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("address", metavar="ROUTER", help="a router's gRPC host:port")
    parser.add_argument(
        "--decode-worker", required=True, metavar="HOST:PORT", help="its decode worker's gRPC port"
    )
    parser.add_argument(
        "--prefill-worker", metavar="HOST:PORT", help="its prefill worker's, if it has one"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="what is written")
    parser.add_argument(
        "--machine", default="", help="what it is called; what the worker says if empty"
    )
    parser.add_argument(
        "--max-prompt-tokens",
        type=int,
        default=plan.max_prompt_tokens,
        help="the longest prompt, within the model's limit (%(default)s)",
    )
    parser.add_argument(
        "--max-batch",
        type=int,
        default=plan.max_batch,
        help="the largest batch, within the worker's limit (%(default)s)",
    )
    parser.add_argument(
        "--repeats", type=int, default=plan.repeats, help="of each measurement (%(default)s)"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=plan.timeout_s, help="of each request (%(default)g)"
    )
    parser.add_argument("--seed", type=int, default=plan.seed, help="of prompts (%(default)s)")
    add_config_flags(parser, TlsConfig)


def _lengths(text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _splits(text: str) -> list[Split]:
    found = []
    for part in text.split(","):
        num_prefill, _, num_decode = part.partition(":")
        try:
            split = Split(int(num_prefill), int(num_decode))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{part!r} must be P:D with D above 0") from error
        if split.num_prefill + split.num_decode > MAX_WORKERS:
            raise argparse.ArgumentTypeError(f"{part!r} has more than {MAX_WORKERS} workers")
        found.append(split)
    return found
