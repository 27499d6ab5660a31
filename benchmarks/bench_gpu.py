"""One GPU: the tests that need one, its limits, our kernels and engine against them, transformers,
and the handoff.

    python benchmarks/bench_gpu.py [--only kernels,attention,...] [--wheels FOLDER] [--output FILE]

Takes some minutes on a machine with torch, triton and nixl, and prints one page at the end: what
became of the tests, and each figure with its goal. Each part is a process of its own with a time
limit: what fails or hangs costs no other part its result, and results are written as they come.
Models have the named shapes and random weights, which are drawn where they would be read. Shares
are of what the same run measures: bytes of its copies, FLOPs of its largest matrix product.

What the machine lacks besides is named first. `make gpu-wheels` downloads it where there is a
network, and --wheels unpacks it for this run alone.

    python benchmarks/bench_gpu.py --device cpu --tiny --only limits,attention,...

runs the same code on small shapes, to see that it runs.
"""

import argparse
import ast
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from gpu.page import print_page
from gpu.requirements import describe_machine
from gpu.suites import run_group, run_suite

HERE = Path(__file__).parent
ROOT = HERE.parent
DEFAULT_OUTPUT = HERE / "results" / "gpu.json"
# Of all parts together; what is behind it does not run.
TOTAL_S = 560.0
# Whose folders are on the path, as nothing has to be installed.
PACKAGES = ("protos", "common", "kernels", "engine", "worker", "prefill_svc", "decode_svc")
PACKAGES += ("router", "client", "tests", "tools", "benchmarks")


class Part(NamedTuple):
    """`tests` are files, of which the tests for GPUs run. Without them it is a section: the
    module of its name in gpu/, of which `run` is called, and which is only imported there.
    """

    limit_s: float
    tests: tuple[str, ...] = ()


# In the order of what one wants to know first.
PARTS = {
    "kernels": Part(
        180,
        (
            "tests/kernels/test_triton_kernels.py",
            "tests/kernels/test_triton_sampling.py",
            "tests/kernels/test_triton_linear.py",
            "tests/kernels/test_triton_lora.py",
            "tests/kernels/test_triton_moe.py",
            "tests/kernels/test_triton_deterministic.py",
            "tests/kernels/test_philox.py",
            "tests/kernels/test_flash_attn.py",
        ),
    ),
    "transport": Part(90, ("tests/kv_transfer/test_gpu_transport.py",)),
    "engine": Part(200, ("tests/engine/test_gpu_engine.py",)),
    # Compiles what a start does, three times.
    "warm_up": Part(120, ("tests/engine/test_gpu_warm_up.py",)),
    "sleep": Part(60, ("tests/engine/test_sleep.py",)),
    "memory": Part(60, ("tests/engine/test_kv_cache.py",)),
    "limits": Part(60),
    "handoff": Part(150),
    "decode": Part(120),
    "prefill": Part(90),
    "attention": Part(90),
    "layers": Part(90),
    "sampling": Part(90),
    "hf": Part(120),
}


def main() -> None:
    """Run the parts one after another, each in a process of its own."""
    args = _parse_args()
    if args.part is not None:
        _run_here(args)
        return
    # Whoever ends it ends what it has started, and still gets the page.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        _unpack(args.wheels, folder)
        paths = [folder, *(str(ROOT / package) for package in PACKAGES)]
        old = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, old] if old else paths)
        sys.path.insert(0, folder)  # where it is looked what there is
        _run_all(args)


def _run_all(args: argparse.Namespace) -> None:
    deadline = time.monotonic() + args.total_s
    results: dict[str, Any] = {}
    if args.output.exists():
        results = json.loads(args.output.read_text())  # of other parts they stay
    machine = describe_machine(ROOT)
    print("\n".join(machine), flush=True)
    done: dict[str, Any] = {}
    try:
        for name in args.only:
            done[name] = results[name] = _run_apart(name, args, deadline - time.monotonic())
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        print_page(done, results.get("limits"), machine)
    if any(result["status"] != "ok" for result in done.values()):
        sys.exit(1)


def _run_apart(name: str, args: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Run a part in another process; return what the results file says of it."""
    print(f"{name}: {_about(name)}", flush=True)
    started = time.monotonic()
    limit_s = min(args.limit_s or PARTS[name].limit_s, left_s)
    if limit_s < 1:
        status, records = "not run: no time left", []
    elif PARTS[name].tests:
        status, records = run_suite(PARTS[name].tests, limit_s)
    else:
        status, records = _run_section(name, limit_s)
    elapsed_s = time.monotonic() - started
    print(f"  [{name}: {status}, {elapsed_s:.0f} s]\n", flush=True)
    return {
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "status": status,
        "seconds": round(elapsed_s, 1),
        "records": records,
    }


def _run_section(name: str, limit_s: float) -> tuple[str, list[dict[str, Any]]]:
    """Return its status and records."""
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "records.json"
        arguments = [*sys.argv[1:], "--only", name, "--part", str(part)]
        # The script that was started: a test adds parts in one of its own.
        exit_status = run_group([sys.executable, sys.argv[0], *arguments], limit_s)
        records = json.loads(part.read_text()) if part.exists() else []
    if exit_status is None:
        return f"took more than {limit_s:.0f} s", records
    has_failed = exit_status != 0 or any(record["name"] == "failed" for record in records)
    return "failed" if has_failed else "ok", records


def _unpack(wheels: Path | None, folder: str) -> None:
    for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


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


def _about(name: str) -> str:
    """What a part's files or its module say that they are, without importing them."""
    if files := PARTS[name].tests:
        return "the tests of " + ", ".join(Path(file).stem for file in files)
    # On the path, as a test adds modules in a folder of its own.
    path = next(path for folder in sys.path if (path := Path(folder, "gpu", f"{name}.py")).exists())
    module = ast.parse(path.read_text())
    return " ".join((ast.get_docstring(module) or "").split()).partition(".")[0]


def _parse_args() -> argparse.Namespace:
    parts = "\n".join(f"  {name:<10} {_about(name)}" for name in PARTS)
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nparts:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", type=_part_names, default=list(PARTS), help="parts, comma between them"
    )
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="(%(default)s)")
    parser.add_argument(
        "--wheels", type=Path, help="folder of packages that the machine lacks, for this run"
    )
    parser.add_argument(
        "--total-s", type=float, default=TOTAL_S, help="of all parts together (%(default)s)"
    )
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
    parser.add_argument("--limit-s", type=float, help="of each part, instead of its own")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _part_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(PARTS)}")
    return names


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a plain word
        return name, value


if __name__ == "__main__":
    main()
