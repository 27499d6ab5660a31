"""Run the suite part by part and end with one summary: what failed, what was skipped and why, and
where the time went.

What pytest prints of a part goes to .tests/PART.log. A part fails if a test does, if it collects
none, or if one of its processes dies; the others run all the same.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LOGS = ROOT / ".tests"
DURATIONS = ROOT / "tests" / "durations.json"
# A name a line; the cause, if it is known, follows " # ". They are not tried again.
FLAKY = ROOT / "tests" / "flaky.txt"
MAX_RETRIED = 3
# A test that hangs ends its process, which prints where its threads are. So long takes none.
HANG_S = 1800
# --fast leaves out the files that take longer in all.
FAST_FILE_S = 5.0
# Tests below this are recorded with their file only, and never listed as slower than recorded.
RECORDED_S = 1.0
MAX_GROWTH = 2.0
NUM_SLOWEST = 10
LINE_EVERY_S = 60.0
NOT_HERE = "not soak and not images and not clients"


class Part(NamedTuple):
    """Tests that run together, over so many processes."""

    name: str
    paths: tuple[str, ...]
    num_processes: int
    marks: str = "not live and not interpreted"
    ignored: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    has_fast: bool = True


COMPUTING = ("tests/kernels", "tests/engine")
WAITING = ("tests/engine/grammar",)
STACKS = ("tests/integration", "tests/faults")
PARTS = (
    Part("engine", COMPUTING, 2, ignored=WAITING),
    Part(
        "interpreted",
        COMPUTING,
        2,
        marks="interpreted",
        env=(("TRITON_INTERPRET", "1"),),
        has_fast=False,
    ),
    # They mostly wait, for processes and for each other.
    Part("services", ("tests", *WAITING), 4, ignored=(*COMPUTING, *STACKS)),
    Part("stacks", STACKS, 3, has_fast=False),
)
LIVE = Part("live", ("tests/live",), 0, marks="live", has_fast=False)


@dataclass
class Test:
    """What became of a test; `text` is of its failure, or why it was skipped."""

    outcome: str = "passed"
    seconds: float = 0.0
    text: str = ""


@dataclass
class Result:
    """What became of a part. A problem is what is wrong besides failed tests."""

    part: Part
    num_collected: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    tests: dict[str, Test] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        return [name for name, test in self.tests.items() if test.outcome == "failed"]

    def count(self) -> Counter[str]:
        return Counter(test.outcome for test in self.tests.values())


class Recorded:
    """The seconds that tests took before, on an idle machine."""

    def __init__(self) -> None:
        self._files = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        self.total_s = sum(file["seconds"] for file in self._files.values())

    def seconds(self, name: str) -> float:
        """Return what a test is to take, a mean of its file's short ones if it is one of them."""
        path, _, test = name.partition("::")
        file = self._files.get(path)
        if file is None:
            return 0.1
        tests = file.get("tests", {})
        short_s = file["seconds"] - sum(tests.values())
        return tests.get(test, max(0.0, short_s) / max(1, file["count"] - len(tests)))

    def listed(self, name: str) -> float | None:
        """Return what a test took; None if nothing is known of its file."""
        path, _, test = name.partition("::")
        file = self._files.get(path)
        return None if file is None else file.get("tests", {}).get(test, RECORDED_S)

    def slow_files(self) -> list[str]:
        """Return the files that --fast leaves out."""
        return [path for path, file in self._files.items() if file["seconds"] > FAST_FILE_S]

    def write(self, results: Sequence[Result]) -> None:
        """Record what ran anew, and keep what did not."""
        files: dict[str, dict[str, object]] = {}
        for result in results:
            for name, test in result.tests.items():
                path, _, case = name.partition("::")
                file = files.setdefault(path, {"seconds": 0.0, "count": 0, "tests": {}})
                file["seconds"] = round(file["seconds"] + test.seconds, 2)  # type: ignore[operator]
                file["count"] += 1  # type: ignore[operator]
                if test.seconds >= RECORDED_S:
                    file["tests"][case] = round(test.seconds, 1)  # type: ignore[index]
        known = {path: file for path, file in self._files.items() if (ROOT / path).exists()}
        DURATIONS.write_text(json.dumps(known | files, indent=1, sort_keys=True) + "\n")


class Progress:
    """A bar with the time left on a terminal; elsewhere a line a minute."""

    def __init__(self, part: Part, recorded: Recorded) -> None:
        self._part = part
        self._recorded = recorded
        self._started = self._told = time.monotonic()
        self._all_s = self._done_s = 0.0

    def collected(self, names: Sequence[str]) -> None:
        self._all_s = sum(map(self._recorded.seconds, names))

    def done(self, name: str) -> None:
        self._done_s += self._recorded.seconds(name)

    def show(self, result: Result) -> None:
        now = time.monotonic()
        if not sys.stdout.isatty() and now - self._told < LINE_EVERY_S:
            return
        self._told = now
        share = min(1.0, self._done_s / self._all_s) if self._all_s else 0.0
        left = ""
        if share > 0.02:
            left = f", {clock((now - self._started) * (1 - share) / share)} left"
        num_failed = len(result.failed)
        failed = f", {num_failed} failed" if num_failed else ""
        text = f"{len(result.tests)} of {result.num_collected}{failed}{left}"
        if sys.stdout.isatty():
            bar = "#" * round(30 * share)
            print(f"\r\033[K{self._part.name:12}[{bar:.<30}] {text}", end="", flush=True)
        else:
            print(f"{self._part.name:12}{share:4.0%}  {text}", flush=True)

    def clear(self) -> None:
        if sys.stdout.isatty():
            print("\r\033[K", end="")


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def pytest_command(part: Part, options: argparse.Namespace, log: Path) -> list[str]:
    marks = f"({part.marks}) and {NOT_HERE}"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--run-log={log}"]
    command += ["-o", "faulthandler_exit_on_timeout=true", "-o", f"faulthandler_timeout={HANG_S}"]
    slow = Recorded().slow_files() if options.fast else ()
    command += [f"--ignore={path}" for path in (*part.ignored, *slow)]
    if part.num_processes:
        command += ["--forks", str(part.num_processes)]
    if options.shuffle is not None:
        command.append(f"--shuffle={options.shuffle}")
    return command + options.pytest


def environment(part: Part) -> dict[str, str]:
    # A process of tests that waits for threads of another's must not spin meanwhile. gRPC's own
    # lines about peers that go are what many tests are about.
    quiet = {"OMP_WAIT_POLICY": "passive", "GRPC_VERBOSITY": "NONE"}
    return os.environ | quiet | dict(part.env)


class Pytest:
    """A run of pytest: it collects at once, and runs tests when it is their turn."""

    def __init__(self, part: Part, options: argparse.Namespace, paths: Sequence[str], name: str):
        self.log = LOGS / f"{name}.jsonl"
        self._output = self.log.with_suffix(".log")
        self._turn = self.log.with_suffix(".turn")
        for path in (self.log, self._turn):
            path.unlink(missing_ok=True)
        command = [*pytest_command(part, options, self.log), f"--turn={self._turn}", *paths]
        with self._output.open("wb") as printed:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment(part), stdout=printed, stderr=subprocess.STDOUT
            )

    def run(
        self, result: Result, progress: Progress, on_collected: Callable[[], None] = lambda: None
    ) -> None:
        """Run it to its end; add what becomes of its tests to the result."""
        started, cpu_s = time.monotonic(), children_cpu_s()
        self._turn.touch()
        try:
            for line in read_lines(self.log, self._process):
                if line is not None:
                    take_line(line, result, progress)
                    if "ids" in line:
                        on_collected()
                progress.show(result)
        except KeyboardInterrupt:
            result.problems.append("interrupted")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            self._process.kill()
        status = self._process.wait()
        result.seconds += time.monotonic() - started
        result.cpu_s += children_cpu_s() - cpu_s
        # 5 is no test at all, which is told in better words.
        if status not in (0, 1, 5):
            tail = self._output.read_text(errors="replace").splitlines()[-60:]
            result.problems.append("\n".join([f"pytest ended with status {status}:", *tail]))
        progress.clear()

    def kill(self) -> None:
        """End it before its turn has come."""
        self._process.kill()
        self._process.wait()


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def read_lines(path: Path, process: "subprocess.Popen[bytes]") -> Iterator[dict | None]:
    """Yield what is written to the log until the process has ended, and None now and then."""
    read = ""
    file = None
    while True:
        has_ended = process.poll() is not None
        if file is None and path.exists():
            file = path.open()
        if file is not None:
            read += file.read()
            *lines, read = read.split("\n")
            yield from map(json.loads, lines)
        yield None
        if has_ended:
            return
        time.sleep(0.3)


def take_line(line: dict, result: Result, progress: Progress) -> None:
    if "ids" in line:
        result.num_collected = len(line["ids"])
        progress.collected(line["ids"])
    else:
        name = line["id"]
        test = result.tests.setdefault(name, Test())
        test.seconds += line["seconds"]
        outcome = line.get("outcome", "passed")
        if outcome == "failed" and test.outcome != "failed":
            progress.clear()
            print(f"FAILED {name}", flush=True)
        if outcome != "passed" and test.outcome != "failed":
            test.outcome, test.text = outcome, line["text"]
        if line.get("is_last"):
            progress.done(name)


def run_parts(
    parts: Sequence[Part], options: argparse.Namespace, recorded: Recorded
) -> Iterator[Result]:
    """Run one after the other; the next one collects meanwhile."""
    started: dict[str, Pytest] = {}

    def start(part: Part | None) -> None:
        if part is not None and part.name not in started:
            paths = [path for path in part.paths if (ROOT / path).exists()]
            started[part.name] = Pytest(part, options, paths, part.name)

    for part, following in zip(parts, [*parts[1:], None], strict=True):
        start(part)
        result = Result(part)
        started[part.name].run(result, Progress(part, recorded), partial(start, following))
        if not result.tests:
            result.problems.append("no test was collected")
        counts = result.count()
        told = ", ".join(f"{counts[key]} {key}" for key in ("passed", "failed", "skipped"))
        print(f"{part.name:12}{told} in {clock(result.seconds)}", flush=True)
        yield result
        if "interrupted" in result.problems:
            if following is not None and following.name in started:
                started[following.name].kill()
            return


def retry(results: Sequence[Result], options: argparse.Namespace, recorded: Recorded) -> None:
    """Try what failed once more, if it is little; what passes then is flaky, and passes."""
    failed = [(result, name) for result in results for name in result.failed]
    listed = flaky_names()
    if any(result.problems for result in results) or len(failed) > MAX_RETRIED:
        return
    for result, name in failed:
        if name in listed:
            continue
        part = result.part._replace(num_processes=0, ignored=())
        again = Result(part)
        Pytest(part, options, [name], "retry").run(again, Progress(part, recorded))
        if again.tests.get(name, Test("failed")).outcome == "passed" and not again.problems:
            print(f"--- {name}, the first time:\n{result.tests[name].text}")
            result.tests[name].outcome = "flaky"


def flaky_names() -> set[str]:
    """Return the tests that are known to fail at times."""
    lines = FLAKY.read_text().splitlines() if FLAKY.exists() else []
    return {line.partition(" # ")[0] for line in lines if line and not line.startswith("#")}


def summarize(results: Sequence[Result], recorded: Recorded) -> bool:
    """Print what a reader has to know; return whether all is well."""
    tests = {name: test for result in results for name, test in result.tests.items()}
    counts = Counter(test.outcome for test in tests.values())
    for name, test in tests.items():
        if test.outcome == "failed":
            print(f"\n{'=' * 8} {name}\n{test.text}")
    for result in results:
        for problem in result.problems:
            print(f"\n{'=' * 8} {result.part.name}: {problem}")
    print_skips(tests)
    print(f"\nThe {NUM_SLOWEST} slowest:")
    slowest = sorted(tests.items(), key=lambda item: -item[1].seconds)
    for name, test in slowest[:NUM_SLOWEST]:
        print(f"{test.seconds:7.1f} s  {name}")
    print_grown(tests, recorded)
    print(f"\n{'part':12}{'tests':>7}{'wall':>8}{'CPU':>8}")
    for result in results:
        print(
            f"{result.part.name:12}{len(result.tests):7}{clock(result.seconds):>8}"
            f"{clock(result.cpu_s):>8}"
        )
    for name, test in tests.items():
        if test.outcome in ("failed", "flaky"):
            last = test.text.strip().splitlines()[-1] if test.text.strip() else ""
            print(f"{test.outcome.upper()} {name} - {last}")
    order = ("passed", "failed", "flaky", "skipped")
    told = ", ".join(f"{counts[key]} {key}" for key in order if counts[key] or key != "flaky")
    problems = sum(len(result.problems) for result in results)
    told += f", {problems} parts with problems" if problems else ""
    print(f"{told} in {clock(sum(result.seconds for result in results))}")
    return not (counts["failed"] or problems)


def print_skips(tests: dict[str, Test]) -> None:
    reasons = Counter(test.text for test in tests.values() if test.outcome == "skipped")
    if reasons:
        print("\nSkipped:")
    for reason, count in reasons.most_common():
        print(f"{count:5}  {reason}")


def print_grown(tests: dict[str, Test], recorded: Recorded) -> None:
    """Name the tests whose share of all seconds is more than twice what it was."""
    known = {name: s for name in tests if (s := recorded.listed(name)) is not None}
    all_s = sum(tests[name].seconds for name in known)
    expected_s = sum(map(recorded.seconds, known))
    if not all_s or not expected_s:
        return
    pace = all_s / expected_s
    grown = []
    for name, listed_s in known.items():
        expected_s = max(RECORDED_S, listed_s * pace)
        if tests[name].seconds > MAX_GROWTH * expected_s:
            grown.append((tests[name].seconds, expected_s, name))
    if grown:
        print("\nMore than twice the recorded share (time never changes the verdict):")
    for seconds, was_s, name in sorted(grown, reverse=True):
        print(f"{seconds:7.1f} s, not {was_s:.1f}  {name}")


@contextlib.contextmanager
def busy_cores(num_loops: int) -> Iterator[None]:
    """Keep so many cores busy meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_all(parts: Sequence[Part], options: argparse.Namespace) -> list[Result]:
    recorded = Recorded()
    results = list(run_parts(parts, options, recorded))
    if options.retry:
        retry(results, options, recorded)
    return results


def find_flaky(parts: Sequence[Part], options: argparse.Namespace) -> bool:
    """Run all so many times in random order beside busy cores; list what failed in any."""
    failures: Counter[str] = Counter()
    with busy_cores(os.cpu_count() or 1):
        for number in range(options.flaky):
            options.shuffle = options.seed + number
            print(f"--- run {number + 1} of {options.flaky}, --shuffle={options.shuffle}")
            results = run_all(parts, options)
            summarize(results, Recorded())
            for result in results:
                failures.update(result.failed)
                failures.update(f"{result.part.name} (the part)" for _ in result.problems[:1])
            if any("interrupted" in result.problems for result in results):
                break
    print(f"\nFailed at least once in {options.flaky} runs: {len(failures)}")
    for name, count in failures.most_common():
        print(f"{count:4}  {name}")
    return not failures


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [part.name for part in (*PARTS, LIVE)]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(names)}")
    parser.add_argument(
        "--fast", action="store_true", help=f"leave out files of more than {FAST_FILE_S:.0f} s"
    )
    parser.add_argument("--live", action="store_true", help="with the tests of a real Prometheus")
    parser.add_argument(
        "--retry",
        action="store_true",
        help=f"try what failed once more, at most {MAX_RETRIED} tests; none of {FLAKY.name}",
    )
    parser.add_argument("--record", action="store_true", help=f"write {DURATIONS.name} anew")
    parser.add_argument(
        "--flaky", type=int, metavar="N", help="run N times in random order beside busy cores"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first order of --flaky")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="run in an order of this seed")
    parser.add_argument("--busy", action="store_true", help="keep every core busy meanwhile")
    parser.add_argument(
        "--pytest", nargs=argparse.REMAINDER, default=[], help="all that follows goes to pytest"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(names):
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        )
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    parts = [
        part
        for part in (*PARTS, LIVE)
        if (part.name in options.parts if options.parts else part is not LIVE or options.live)
        and (part.has_fast or not options.fast)
    ]
    LOGS.mkdir(exist_ok=True)
    if options.flaky:
        return 0 if find_flaky(parts, options) else 1
    with busy_cores((os.cpu_count() or 1) if options.busy else 0):
        results = run_all(parts, options)
    is_well = summarize(results, Recorded())
    if options.record:
        Recorded().write(results)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
