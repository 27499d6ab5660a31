"""One GPU: its limits, our kernels and engine against them, transformers, and the handoff.

    python benchmarks/bench_gpu.py [--only limits,attention,...] [--output FILE]

Takes some minutes on a machine with torch, triton and nixl, and prints one page. Each section is a
process of its own with a time limit: what fails or hangs costs no other section its result, and
results are written as they come. Models have the named shapes and random weights, which are drawn
where they would be read. Shares are of what the same run measures: bytes of its copies, FLOPs of
its largest matrix product.

    python benchmarks/bench_gpu.py --device cpu --tiny

runs the same code on small shapes, to see that it runs.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEFAULT_OUTPUT = HERE / "results" / "gpu.json"
# The sections and how many seconds each may take. One is the module of its name in gpu/, of which
# `run` is called, and is only imported there: what does not import costs no other section either.
LIMITS_S = {
    "limits": 60.0,
    "attention": 120.0,
    "layers": 120.0,
    "decode": 180.0,
    "prefill": 120.0,
    "hf": 150.0,
    "handoff": 180.0,
}


def main() -> None:
    """Run the sections one after another, each in a process of its own."""
    args = _parse_args()
    if args.part is not None:
        _run_here(args)
        return
    results: dict[str, Any] = {}
    if args.output.exists():
        results = json.loads(args.output.read_text())  # of other sections they stay
    for name in args.only:
        print(f"{name}: {_first_sentence(name)}", flush=True)
        results[name] = _run_apart(name, args)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    if any(results[name]["status"] != "ok" for name in args.only):
        sys.exit(1)


def _run_apart(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a section in another process; return what the results file says of it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "records.json"
        arguments = [*sys.argv[1:], "--only", name, "--part", str(part)]
        status = _status_of([sys.executable, __file__, *arguments], args.limit_s or LIMITS_S[name])
        records = json.loads(part.read_text()) if part.exists() else []
    elapsed_s = time.monotonic() - started
    if any(record["name"] == "failed" for record in records):
        status = "failed"
    print(f"  [{name}: {status}, {elapsed_s:.0f} s]\n", flush=True)
    return {
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "status": status,
        "seconds": round(elapsed_s, 1),
        "records": records,
    }


def _status_of(command: list[str], limit_s: float) -> str:
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return "ok" if process.wait(limit_s) == 0 else "failed"
    except subprocess.TimeoutExpired:
        return f"took more than {limit_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and all that it has started
        process.wait()


def _run_here(args: argparse.Namespace) -> None:
    from gpu.bench import Bench, last_lines  # imports torch, without which help is there at once

    (name,) = args.only
    bench = Bench(args, args.part)
    try:
        if name != "handoff":
            # Before an engine takes the memory.
            bench.attempt(lambda bench: bench.limits)
        importlib.import_module(f"gpu.{name}").run(bench)
    except Exception as error:  # whatever it may be, the next section is none the worse
        bench.record("failed", error=last_lines(error))
        sys.exit(1)


def _first_sentence(name: str) -> str:
    """What a section's module says that it is, without importing it."""
    module = ast.parse((HERE / "gpu" / f"{name}.py").read_text())
    return " ".join((ast.get_docstring(module) or "").split()).partition(".")[0]


def _parse_args() -> argparse.Namespace:
    sections = "\n".join(f"  {name:<10} {_first_sentence(name)}" for name in LIMITS_S)
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nsections:\n{sections}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", type=_section_names, default=list(LIMITS_S), help="sections, comma between them"
    )
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="(%(default)s)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="NAME=VALUE",
        help="of the engines' EngineConfig, as often as you like: async_scheduling=False",
    )
    parser.add_argument("--limit-s", type=float, help="of each section, instead of its own")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _section_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in LIMITS_S:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(LIMITS_S)}")
    return names


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a plain word
        return name, value


if __name__ == "__main__":
    main()
