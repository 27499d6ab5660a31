"""Our engine on a CPU against vLLM, transformers and this machine's limits, in one run.

    make bench-cpu
    python benchmarks/bench_cpu.py [--peers transformers] [--rounds N]
    python benchmarks/bench_cpu.py --served

All systems are started once and then take turns case by case, each in a process of its own that is
stopped (SIGSTOP) while it is not its turn. Decode is the median step at that context, prefill the
time until all requests have a token, start-up the time from a process's start to its first token,
the second time: what a system compiles is cached by then. Of the rounds' figures the median counts,
and of their ratios: the other's time, or the shortest one that is possible, by ours.

With --served whole servers get the same load over HTTP instead: our decode service alone and vLLM's
server, each with all cores, and our prefill and decode pair with one core each.

Each writes its part of benchmarks/results/cpu.json, times in seconds.
"""

import argparse
import datetime
import json
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.metadata import Distribution, version
from pathlib import Path
from typing import NamedTuple

from bench_pair import ours
from cpu_limits import Limits, LimitsMeter, decode_work, prefill_work
from http_load import add_load_flags, max_model_len, print_header, run_loads
from machine import describe, free_ports
from make_model import DEFAULT_MODEL, make_model
from offline_system import Command, OfflineSystem
from peers.offline import Case
from peers.vllm_servers import variables, vllm_server

from pdserve_common.processes.cores import format_cores, usable_cores
from pdserve_common.version import VERSION
from pdserve_engine.models.config import LlamaConfig
from pdserve_engine.models.registry import read_model_config

HERE = Path(__file__).parent
RESULTS = HERE / "results/cpu.json"
PEERS = Path(".venv-peers")
LOG_DIR = Path(".bench/cpu")
CORES = sorted(usable_cores())
OURS = "pdserve"
VLLM, TRANSFORMERS = PEER_NAMES = ("vllm", "transformers")
# Batch and prompt tokens.
CASES = {
    "1x64": (1, 64),
    "1x512": (1, 512),
    "1x2048": (1, 2048),
    "8x128": (8, 128),
    "32x128": (32, 128),
}
FIGURES = [f"decode_{name}" for name in CASES] + ["prefill_8x128", "prefill_1x2048", "startup"]
LIMITS_S = 0.5  # of measuring, in each round
# What `vllm serve` gets as well; the rest are its defaults.
VLLM_FLAGS = {
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "block_size": 128,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_prefix_caching": False,
    "seed": 0,
}

# Seconds by figure.
Seconds = Mapping[str, float]


class Round(NamedTuple):
    """What one round brought: each system's seconds, and the shortest ones that are possible."""

    seconds: Mapping[str, Seconds]
    shortest: Seconds
    limits: Limits


def main() -> None:
    args = _parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # stops what was started
    if args.model == DEFAULT_MODEL:
        make_model(args.model)
    LOG_DIR.mkdir(parents=True, exist_ok=True)
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": describe("torch"),
        "versions": versions(args.peers),
        "model": args.model.name,
        "threads": len(CORES),
    }
    print("".join(f"{name}: {value}\n" for name, value in facts.items()))
    part = {"served": facts | run_served(args)} if args.served else facts | run_offline(args)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results | part, indent=2) + "\n")


def versions(peers: Sequence[str]) -> dict[str, str]:
    """Return our version and the peers'; vLLM's is in its own environment."""
    known = {OURS: VERSION, TRANSFORMERS: version("transformers")}
    if VLLM in peers:
        folders = [str(folder) for folder in PEERS.glob("lib/python*/site-packages")]
        found = Distribution.discover(name=VLLM, path=folders)
        known[VLLM] = next(iter(found)).version
    return {name: known[name] for name in (OURS, *peers)}


def run_offline(args: argparse.Namespace) -> dict[str, object]:
    """Time all systems, print a table and return what the JSON file says of it."""
    model = read_model_config(args.model)
    is_ours = isinstance(model, LlamaConfig) and model.experts is None
    assert is_ours, f"{args.model} is not one of our own models without experts"
    meter = LimitsMeter(CORES)
    with ExitStack() as stack:
        systems = {name: stack.enter_context(start(name, args)) for name in (OURS, *args.peers)}
        rounds = [run_round(systems, model, meter, args.steps) for _ in range(args.rounds)]
    mine = [r.seconds[OURS] for r in rounds]
    ratios = {
        f"ratio_to_{name}": median_ratio([r.seconds[name] for r in rounds], mine)
        for name in args.peers
    }
    ratios["ratio_to_limit"] = median_ratio([r.shortest for r in rounds], mine)
    limits = {name: spread([getattr(r.limits, name) for r in rounds]) for name in Limits._fields}
    seconds = summarize(rounds)
    print_table(seconds, ratios)
    return ratios | {"limits_per_s": limits, "seconds": seconds}


def start(name: str, args: argparse.Namespace) -> OfflineSystem:
    """Start a system as often as asked, and return the last one: others have filled its caches."""
    command, log = command_of(name, args.model), LOG_DIR / f"{name}.log"
    for _ in range(args.starts - 1):
        with OfflineSystem(command, log):
            pass
    system = OfflineSystem(command, log)
    print(f"{name} makes its first token after {system.startup_s:.1f} s", file=sys.stderr)
    return system


def command_of(name: str, model: Path) -> Command:
    cores = format_cores(CORES)
    if name == VLLM:
        script, flags = HERE / "peers/vllm_offline.py", json.dumps(VLLM_FLAGS)
        return Command([PEERS / "bin/python", script, model, flags], variables(PEERS, cores))
    if name == TRANSFORMERS:
        script = HERE / "peers/transformers_offline.py"
        affinity = {"GOMP_CPU_AFFINITY": cores}
        return Command([sys.executable, script, model, len(CORES)], affinity)
    return Command([sys.executable, HERE / "pdserve_offline.py", model, cores], {})


def run_round(
    systems: Mapping[str, OfflineSystem], model: LlamaConfig, meter: LimitsMeter, num_steps: int
) -> Round:
    """Let the systems time every case, in turns."""
    limits = meter.measure(LIMITS_S)
    seconds = {name: {"startup": system.startup_s} for name, system in systems.items()}
    shortest = {}
    for name, shape in CASES.items():
        case = Case(*shape, num_steps)
        shortest[f"decode_{name}"] = limits.seconds(decode_work(model, case))
        shortest[f"prefill_{name}"] = limits.seconds(prefill_work(model, case))
        for system_name, system in systems.items():
            times = system.run(case)
            seconds[system_name][f"decode_{name}"] = statistics.median(times.step_s)
            seconds[system_name][f"prefill_{name}"] = times.prefill_s
    return Round(seconds, shortest, limits)


def median_ratio(theirs: Sequence[Seconds], mine: Sequence[Seconds]) -> dict[str, float]:
    """Return how many times as long as ours the others take, as far as they have a figure."""
    return {
        figure: statistics.median(a[figure] / b[figure] for a, b in zip(theirs, mine, strict=True))
        for figure in FIGURES
        if figure in theirs[0]
    }


def summarize(rounds: Sequence[Round]) -> dict[str, dict[str, dict[str, float]]]:
    """Return median, min and max of each system's seconds."""
    return {
        name: {figure: spread([r.seconds[name][figure] for r in rounds]) for figure in FIGURES}
        for name in rounds[0].seconds
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def print_table(
    seconds: Mapping[str, Mapping[str, Mapping[str, float]]],
    ratios: Mapping[str, Mapping[str, float]],
) -> None:
    print(f"| | {' | '.join((*seconds, *ratios))} |\n|{'---|' * (1 + len(seconds) + len(ratios))}")
    for figure in FIGURES:
        cells = [shown(figure, system[figure]["median"]) for system in seconds.values()]
        cells += [f"{ratio[figure]:.2f}" if figure in ratio else "-" for ratio in ratios.values()]
        print(f"| {figure} | {' | '.join(cells)} |")


def shown(figure: str, seconds: float) -> str:
    """Return seconds in the figure's usual unit."""
    kind, _, name = figure.partition("_")
    if kind == "prefill":
        batch, prompt_len = CASES[name]
        return f"{batch * prompt_len / seconds:.0f} tok/s"
    return f"{seconds:.1f} s" if kind == "startup" else f"{seconds * 1e3:.1f} ms"


def run_served(args: argparse.Namespace) -> dict[str, object]:
    """Put every kind of server under the loads, print a table and return the figures."""
    flags = ["--no-enable-prefix-caching", f"--max-model-len={max_model_len(args)}"]
    cores, model = format_cores(CORES), args.model
    servers: dict[str, AbstractContextManager[str]] = {
        "pdserve alone": ours(args, num_prefill=0, num_threads=len(CORES)),
        "vllm alone": vllm_server(PEERS, model, cores, free_ports(1)[0], LOG_DIR, flags),
        "pdserve pair": ours(args),
    }
    print_header()
    figures = {}
    for name, server in servers.items():
        with server as url:
            figures[name] = run_loads(name, url, args)
    return {
        name: {":".join(map(str, load)): row for load, row in rows.items()}
        for name, rows in figures.items()
    }


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="the default is made")
    parser.add_argument("--peers", nargs="*", choices=PEER_NAMES, default=PEER_NAMES)
    parser.add_argument("--rounds", type=int, default=3, help="of all cases (%(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="decode steps timed (%(default)s)")
    parser.add_argument(
        "--starts", type=int, default=2, help="of each system, the last one counts (%(default)s)"
    )
    parser.add_argument("--served", action="store_true", help="time servers under load instead")
    add_load_flags(parser, [(512, 64, 0.25), (512, 64, 0.5), (512, 64, 1.0)])
    return parser.parse_args()


if __name__ == "__main__":
    main()
