"""Change the product in one place at a time, run the tests that reach that place, and tell which
changes no test notices.

Works in a copy of the tree. Which tests reach which lines is found out once for each area, and kept
in .mutants as long as the area's files and tests stay as they are. A test that hangs has noticed.
"""

import argparse
import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import psutil
import pytest

import mutations
from run_tests import NOT_HERE, clock

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "tests" / "mutants.json"
OUTPUT = ".mutants"
# Imported once, before the tests' processes are forked.
PRELOADED = ("grpc", "hypothesis", "numpy", "torch", "transformers")
LINE_EVERY_S = 60.0
MAP_TIMEOUT_S = 3600.0
# Of a mutant's tests there is besides five times what they took.
MIN_TIMEOUT_S = 60.0
PR_SET_PDEATHSIG = 1


class Area(NamedTuple):
    """Code that is changed, and the tests that decide: globs, from the root and from tests/. One
    that begins with ! takes away.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    # Those that run the code in processes of their own; for what no other test reaches.
    elsewhere: tuple[str, ...] = ()
    is_interpreted: bool = False


ENGINE = "engine/pdserve_engine"
ROUTER = "router/pdserve_router"
WORKER = "worker/pdserve_worker"
AREAS = {
    "scheduler": Area(
        (
            f"{ENGINE}/core/**/*.py",
            f"{ENGINE}/request/*.py",
            f"{ENGINE}/kv/block_pool.py",
            f"{ENGINE}/kv/kv_cache_manager.py",
            f"!{ENGINE}/core/handoff/*grant*.py",
            f"!{ENGINE}/core/dump.py",
        ),
        (
            "engine/test_async_scheduling.py",
            "engine/test_block_pool.py",
            "engine/test_draft*.py",
            "engine/test_encoder_cache_manager.py",
            "engine/test_fencing.py",
            "engine/test_forks.py",
            "engine/test_inproc_client.py",
            "engine/test_kv_cache_manager.py",
            "engine/test_outputs.py",
            "engine/test_po*.py",
            "engine/test_prefixes.py",
            "engine/test_re*.py",
            "engine/test_sche*.py",
            "engine/test_decode_slots.py",
            "engine/test_speculative_first_step.py",
            "engine/test_step_*.py",
            "engine/test_stop.py",
            "engine/test_uniproc_executor.py",
            "engine/test_waiting_for_fsm.py",
            "engine/lora/test_adapter_pool.py",
            "engine/kv_offload/test_engine.py",
            "!engine/test_draft_model.py",
        ),
    ),
    "handoff": Area(
        (
            f"{ENGINE}/kv_transfer/**/*.py",
            f"{ENGINE}/core/handoff/*grant*.py",
            f"{WORKER}/kv_link/*.py",
            "common/pdserve_common/wire/kv_link.py",
            *(
                f"!{ENGINE}/kv_transfer/transport/{name}.py"
                for name in ("cuda_ipc", "net_devices", "rdma")
            ),
        ),
        (
            "kv_transfer/**/test_*.py",
            "common/test_wire.py",
            "engine/test_fencing.py",
            "engine/test_handoff_engines.py",
            "engine/test_*grant*.py",
            "engine/test_prefixes.py",
            "engine/test_speculative_first_step.py",
        ),
    ),
    "router": Area(
        (
            f"{ROUTER}/requests/**/*.py",
            f"{ROUTER}/workers/**/*.py",
            f"{ROUTER}/router.py",
        ),
        (
            "router/test_*.py",
            *(
                f"!router/test_{name}.py"
                for name in (
                    "descriptors",
                    "edge_processes",
                    "http_*",
                    "large_messages",
                    "openai_*",
                    "processes",
                    "responses",
                    "slow_clients",
                    "structured_outputs",
                    "tools",
                )
            ),
        ),
    ),
    "lora": Area(
        (
            f"{ENGINE}/lora/*.py",
            f"{ENGINE}/core/features/adapter_pool.py",
            f"{ENGINE}/runner/run/adapter*.py",
        ),
        ("engine/lora/test_*.py",),
    ),
    "speculation": Area(
        (
            f"{ENGINE}/spec_decode/*.py",
            f"{ENGINE}/core/features/draft*.py",
            f"{ENGINE}/runner/draft/*.py",
        ),
        ("engine/spec_decode/test_*.py", "engine/test_draft*.py", "engine/test_grammar_drafts.py"),
    ),
    "ranks": Area(
        (
            f"{ENGINE}/executor/*.py",
            f"{ENGINE}/runner/sample/sharded_head.py",
            f"{ENGINE}/runner/rank_*.py",
            f"{ENGINE}/runner/sample/rank_*.py",
        ),
        ("engine/test_ranks.py", "engine/test_*_executor.py", "engine/test_step_sockets.py"),
        elsewhere=("engine/test_multiproc_executor.py", "engine/test_parallel_models.py"),
    ),
    "grammar": Area(
        (f"{ENGINE}/grammar/*.py", f"{ENGINE}/core/features/waiting_for_fsm.py"),
        ("engine/grammar/test_*.py", "engine/test_waiting_for_fsm.py"),
        elsewhere=("engine/grammar/test_compiler.py", "engine/grammar/test_manager.py"),
    ),
    "cuda": Area(
        (f"{ENGINE}/runner/run/cuda_*.py", f"{ENGINE}/runner/sample/device_sampler.py"),
        ("engine/test_cuda_*.py",),
        is_interpreted=True,
    ),
}


Key = tuple[str, mutations.Change]


class Mutant(NamedTuple):
    """A change of the product, and what became of it."""

    area: str
    file: str
    line: int
    change: mutations.Change
    # killed, survived, or unreached: no test runs its statement.
    result: str = ""
    by: str = ""
    # Why it need not be noticed; a person writes it into the list that is kept.
    why: str = ""

    @property
    def key(self) -> Key:
        return self.file, self.change

    @property
    def text(self) -> str:
        where, kind, before, after, _ = self.change
        return f"{self.file}:{self.line} {where}, {kind}: {before}  ->  {after}"

    def as_json(self) -> dict[str, object]:
        fields = self._asdict()
        fields |= fields.pop("change")._asdict()
        return {name: value for name, value in fields.items() if value or name == "line"}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Mutant":
        texts = {name: fields[name] for name in ("where", "kind", "before", "after")}
        change = mutations.Change(**texts, nth=fields.get("nth", 0))
        names = ("area", "file", "line", "result", "by", "why")
        return cls(change=change, **{name: fields[name] for name in names if name in fields})


def find(root: Path, globs: Sequence[str]) -> list[str]:
    """Return the paths, from the root on, that globs give and none with a ! before takes away."""
    found: dict[str, None] = {}
    for glob in globs:
        paths = sorted(str(path.relative_to(root)) for path in root.glob(glob.lstrip("!")))
        for path in paths:
            if glob.startswith("!"):
                found.pop(path, None)
            else:
                found[path] = None
    return list(found)


def test_files(root: Path, globs: Sequence[str]) -> list[str]:
    return [f"tests/{path}" for path in find(root / "tests", globs)]


def draw(root: Path, areas: Sequence[str], seed: int, number: int) -> list[Mutant]:
    """Return so many mutants, as many of each area; the same ones of the same code and seed."""
    drawn: list[list[Mutant]] = []
    for index, name in enumerate(areas):
        mutants = [
            Mutant(name, file, site.line, site.change)
            for file in find(root, AREAS[name].files)
            for site in mutations.sites((root / file).read_text())
        ]
        share = (number + len(areas) - 1 - index) // len(areas)
        drawn.append(random.Random(f"{seed} {name}").sample(mutants, min(share, len(mutants))))
    # In turns, so that a run that is ended has some of each.
    turns = max(map(len, drawn), default=0)
    return [each[turn] for turn in range(turns) for each in drawn if turn < len(each)]


# ---- Runs of pytest


class Reached:
    """A plugin of pytest: which lines of some files each test runs, in this process.

    `lines` has for each file and line the tests' places among `tests`.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self.tests: list[str] = []
        self.lines: dict[str, dict[int, list[int]]] = {file: defaultdict(list) for file in files}
        self._files = {str(Path.cwd() / file): file for file in files}
        self._left: dict[CodeType, set[int]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._left = {}
        self.tests.append(item.nodeid)
        threading.settrace(self._call)
        sys.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        left = self._left.get(code)
        if left is None:
            left = self._left[code] = {line for *_, line in code.co_lines() if line}
            left.discard(code.co_firstlineno)
        return self._line if left else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        left, line = self._left.get(frame.f_code), frame.f_lineno
        if event == "line" and left and line in left:
            left.discard(line)
            self.lines[self._files[frame.f_code.co_filename]][line].append(len(self.tests) - 1)
        return self._line


class Report:
    """A plugin of pytest that writes a line for each test that ended, and runs chosen ones only."""

    def __init__(self, path: Path, chosen: Sequence[str] | None) -> None:
        self._file = path.open("w", buffering=1)
        self._chosen = None if chosen is None else {name: at for at, name in enumerate(chosen)}
        self._seconds = 0.0
        self._outcome = "passed"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._chosen is not None:
            items[:] = [item for item in items if item.nodeid in self._chosen]
            items.sort(key=lambda item: self._chosen[item.nodeid])  # type: ignore[index]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._file.write(json.dumps([report.nodeid, "failed", 0.0]) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.outcome != "passed" and self._outcome != "failed":
            self._outcome = report.outcome
        if report.when == "teardown":
            line = [report.nodeid, self._outcome, round(self._seconds, 3)]
            self._file.write(json.dumps(line) + "\n")
            self._seconds, self._outcome = 0.0, "passed"


class Run(NamedTuple):
    """What a run of pytest has told: of each test that ended its outcome and its seconds."""

    tests: dict[str, tuple[str, float]]
    # None if it was ended.
    status: int | None


class Copy:
    """A copy of the working tree, in which tests find the product that is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = ROOT / OUTPUT / "pytest.log"
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    @contextlib.contextmanager
    def changed(self, file: str, source: str) -> Iterator[None]:
        path = self.folder / file
        original = path.read_bytes()
        try:
            self._write(path, source.encode())
            yield
        finally:
            self._write(path, original)

    def _write(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        # It could be of the same size, and written in the same second.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def run(
        self,
        area: Area,
        files: Sequence[str],
        timeout_s: float,
        *,
        chosen: Sequence[str] | None = None,
        reached: Path | None = None,
    ) -> Run:
        """Run tests of files, all or the chosen ones in that order, in a process forked from this.

        All run to their end where `reached` is to get which lines they reach; else the first one
        that fails is the last.
        """
        report = self.log.with_suffix(".report")
        report.unlink(missing_ok=True)
        marks = f"({NOT_HERE}) and not live and {'' if area.is_interpreted else 'not '}interpreted"
        arguments = ["-q", "-p", "no:cacheprovider", "-m", marks, *files]
        child = os.fork()
        if child == 0:
            self._run_here(area, arguments, report, chosen, reached)
        status = wait(child, timeout_s)
        lines = report.read_text().splitlines() if report.exists() else []
        ended = [json.loads(line) for line in lines]
        return Run({name: (outcome, seconds) for name, outcome, seconds in ended}, status)

    def _run_here(
        self,
        area: Area,
        arguments: list[str],
        report: Path,
        chosen: Sequence[str] | None,
        reached: Path | None,
    ) -> None:
        """Become the process of tests."""
        status = 3
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.chdir(self.folder)
            with self.log.open("wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            roots = [str(path) for path in {each.parent for each in self.folder.glob("*/pdserve*")}]
            sys.path[:0] = roots
            os.environ["PYTHONPATH"] = os.pathsep.join(roots)
            os.environ |= {"OMP_WAIT_POLICY": "passive", "GRPC_VERBOSITY": "NONE"}
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
            sys.dont_write_bytecode = False
            if area.is_interpreted:
                os.environ["TRITON_INTERPRET"] = "1"
            if reached is None:
                status = pytest.main(["-x", *arguments], [Report(report, chosen)])
            else:
                lines = Reached(find(self.folder, area.files))
                status = pytest.main(arguments, [Report(report, chosen), lines])
                reached.write_text(json.dumps({"tests": lines.tests, "lines": lines.lines}))
        finally:
            sys.stdout.flush()
            os._exit(status)


def wait(child: int, timeout_s: float) -> int | None:
    """Return a process's status; None if its time is over, and then nothing of it is left."""
    end = time.monotonic() + timeout_s
    try:
        while time.monotonic() < end:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
    except (KeyboardInterrupt, SystemExit):
        kill(child)
        raise
    kill(child)
    return None


def kill(child: int) -> None:
    """Kill a process and all that it has started, also in sessions of their own."""
    started = psutil.Process(child).children(recursive=True)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


# ---- Which tests decide


class Reaching(NamedTuple):
    """Of an area: the seconds of each test that passes, and which tests reach which lines."""

    seconds: dict[str, float]
    tests: list[str]
    lines: dict[str, dict[str, list[int]]]

    def of(self, file: str, lines: tuple[int, int]) -> set[str]:
        """Return what reaches any of the lines, from the first to the last."""
        of_file = self.lines.get(file, {})
        numbers = {
            test for line in range(lines[0], lines[1] + 1) for test in of_file.get(str(line), ())
        }
        return {self.tests[number] for number in numbers} & self.seconds.keys()

    def quickest(self, names: set[str], budget_s: float) -> list[str]:
        """Return the quickest first, and at least one of them, as long as the budget lasts."""
        chosen: list[str] = []
        for name in sorted(names, key=lambda name: (self.seconds[name], name)):
            budget_s -= self.seconds[name]
            if chosen and budget_s < 0:
                break
            chosen.append(name)
        return chosen


def reaching(tree: Copy, name: str) -> Reaching:
    """Return what is kept of an area, or run its tests once to find it out."""
    area = AREAS[name]
    files = test_files(tree.folder, (*area.tests, *area.elsewhere))
    digest = hashlib.sha256()
    for file in (*find(tree.folder, area.files), *files):
        digest.update(file.encode() + (tree.folder / file).read_bytes())
    kept = ROOT / OUTPUT / f"reached-{name}.json"
    if kept.exists():
        content = json.loads(kept.read_text())
        if content["digest"] == digest.hexdigest():
            return Reaching(content["seconds"], content["tests"], content["lines"])
    print(f"{name}: which lines do tests reach?", flush=True)
    lines = tree.log.with_suffix(".lines")
    lines.unlink(missing_ok=True)
    started = time.monotonic()
    run = tree.run(area, files, MAP_TIMEOUT_S, reached=lines)
    if not lines.exists():
        raise SystemExit(f"{name}: the tests ended with status {run.status}, see {tree.log}")
    passed = {test: s for test, (outcome, s) in run.tests.items() if outcome == "passed"}
    failed = [test for test, (outcome, _) in run.tests.items() if outcome == "failed"]
    for test in failed:
        print(f"{name}: {test} fails without a change, and is left out")
    print(f"{name}: {len(passed)} tests in {clock(time.monotonic() - started)}", flush=True)
    found = Reaching(passed, **json.loads(lines.read_text()))
    kept.write_text(json.dumps({"digest": digest.hexdigest()} | found._asdict()))
    return found


def judge(tree: Copy, mutant: Mutant, reached: Reaching, budget_s: float) -> Mutant:
    """Return the mutant with what the tests make of it; its result is "gone" if it has no place."""
    path = tree.folder / mutant.file
    source = path.read_text() if path.exists() else ""
    site = next((each for each in mutations.sites(source) if each.change == mutant.change), None)
    changed = mutations.apply(source, mutant.change)
    if site is None or changed is None:
        return mutant._replace(result="gone", by="")
    area = AREAS[mutant.area]
    names = reached.of(mutant.file, site.lines)
    if not names:
        elsewhere = test_files(tree.folder, area.elsewhere)
        names = {name for name in reached.seconds if name.partition("::")[0] in elsewhere}
    if not names:
        return mutant._replace(line=site.line, result="unreached", by="")
    chosen = reached.quickest(names, budget_s)
    files = sorted({name.partition("::")[0] for name in chosen})
    timeout_s = MIN_TIMEOUT_S + 5 * sum(reached.seconds[name] for name in chosen)
    with tree.changed(mutant.file, changed):
        run = tree.run(area, files, timeout_s, chosen=chosen)
    result, by = "killed", ""
    failed = [name for name, (outcome, _) in run.tests.items() if outcome == "failed"]
    if run.status == 0:
        result, by = "survived", f"{len(chosen)} of {len(names)} tests"
    elif failed:
        by = failed[0]
    elif run.status is None:
        by = "a hang"
    else:
        by = f"an end of pytest with status {run.status}"
    return mutant._replace(line=site.line, result=result, by=by)


# ---- The command


def read(path: Path) -> list[Mutant]:
    return [Mutant.from_json(fields) for fields in json.loads(path.read_text())["mutants"]]


def write(path: Path, seed: int | None, mutants: Sequence[Mutant]) -> None:
    lines = ",\n".join(json.dumps(mutant.as_json(), separators=(",", ":")) for mutant in mutants)
    path.write_text(f'{{"seed":{json.dumps(seed)},"mutants":[\n{lines}\n]}}\n')


class Progress:
    """A bar with the time left on a terminal; elsewhere a line a minute."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._started = self._told = time.monotonic()

    def show(self, judged: Sequence[Mutant]) -> None:
        now = time.monotonic()
        done = len(judged)
        if not sys.stdout.isatty() and done < self._total and now - self._told < LINE_EVERY_S:
            return
        self._told = now
        counts = Counter(mutant.result for mutant in judged)
        told = ", ".join(f"{count} {result}" for result, count in counts.most_common())
        left = clock((now - self._started) * (self._total - done) / done)
        text = f"{done} of {self._total}: {told}, {left} left"
        if sys.stdout.isatty():
            bar = "#" * round(30 * done / self._total)
            print(f"\r\033[K[{bar:.<30}] {text}", end="\n" if done == self._total else "")
            sys.stdout.flush()
        else:
            print(text, flush=True)


def summarize(judged: Sequence[Mutant], before: dict[Key, Mutant]) -> bool:
    """Print what no test noticed, and why if that is known; return whether that is all as it was
    before.
    """
    for result, title in (("survived", "No test notices"), ("unreached", "No test reaches")):
        listed = [mutant for mutant in judged if mutant.result == result]
        if listed:
            print(f"\n{title}:")
        for mutant in listed:
            told = f" ({mutant.by})" if mutant.by else ""
            print(f"  {mutant.text}{told}" + (f"\n      {mutant.why}" if mutant.why else ""))
    results = ("killed", "survived", "unreached", "gone")
    print(f"\n{'area':12}" + "".join(f"{result:>11}" for result in results))
    for area in dict.fromkeys(mutant.area for mutant in judged):
        counts = Counter(mutant.result for mutant in judged if mutant.area == area)
        print(f"{area:12}" + "".join(f"{counts[result]:11}" for result in results))
    lost = [
        mutant
        for mutant in judged
        if mutant.result in ("survived", "unreached")
        and mutant.key in before
        and before[mutant.key].result == "killed"
    ]
    for mutant in lost:
        print(f"NO LONGER NOTICED {mutant.text}\n    was by {before[mutant.key].by}")
    return not lost


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"some of {', '.join(AREAS)}")
    parser.add_argument("--seed", type=int, default=1, help="by which mutants are drawn")
    parser.add_argument("--number", type=int, default=40, help="how many, over all areas")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after so many")
    parser.add_argument(
        "--budget", type=float, default=120.0, help="seconds of tests for a mutant, quickest first"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the list there as well")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="try a list again instead; fails if what was killed survives now",
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.areas) - AREAS.keys():
        parser.error(f"no area is called {', '.join(sorted(unknown))}; there are {list(AREAS)}")
    if options.number < 1:
        parser.error(f"--number is {options.number}, must be 1 or more")
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    known = {mutant.key: mutant for mutant in read(KEPT)} if KEPT.exists() else {}
    before: dict[Key, Mutant] = {}
    areas = options.areas or list(AREAS)
    if options.against:
        mutants = [each for each in read(options.against) if each.area in areas]
        before = {mutant.key: mutant for mutant in mutants}
    else:
        drawn = draw(ROOT, areas, options.seed, options.number)
        mutants = [
            each._replace(why=known[each.key].why if each.key in known else "") for each in drawn
        ]
    # So that what is at work ends as well, and the copy is gone.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name in PRELOADED:
        importlib.import_module(name)
    (ROOT / OUTPUT).mkdir(exist_ok=True)
    output = ROOT / OUTPUT / (f"seed-{options.seed}.json" if not before else "again.json")
    judged: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Copy(Path(folder))
        reached = {area: reaching(tree, area) for area in dict.fromkeys(m.area for m in mutants)}
        end = time.monotonic() + 60 * options.minutes
        progress = Progress(len(mutants))
        for mutant in mutants:
            if time.monotonic() > end:
                break
            judged.append(judge(tree, mutant, reached[mutant.area], options.budget))
            for path in filter(None, (output, options.keep)):
                write(path, None if before else options.seed, judged)
            progress.show(judged)
    is_well = summarize(judged, before)
    print(f"{len(judged)} of {len(mutants)} mutants; the list is {output}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
