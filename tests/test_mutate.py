"""`tools/mutate.py`: what it changes, which tests it runs, and what it tells."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import mutate
import mutations
import run_tests

# What a function's body is, and what else it can be.
CHANGES = {
    "return a < b": {"return a <= b", "return None"},
    "return a is not b": {"return a is b", "return None"},
    "return a and (b or c)": {"return a or (b or c)", "return a and (b and c)", "return None"},
    "return not a": {"return a", "return None"},
    "return a - b": {"return a + b", "return None"},
    "return max(a, b)": {"return min(a, b)", "return None"},
    "return a if b else c": {"return a", "return c", "return None"},
    "a += 2": {"a -= 2", "a += 3"},
    "a = True": {"a = False"},
    "a.b = c": {"pass"},
    "await a(b)": {"pass"},
    "del a[b]": {"pass"},
    "if a:\n        b = c": {"if True:\n        b = c", "if False:\n        b = c"},
    "while a:\n        break": {"while False:\n        break", "while a:\n        continue"},
    "a = [b for b in c if d]": {"a = [b for b in c]"},
    "a = f'{b + 1}'": set(),
    "a = b + 'text'": set(),
    "assert a < b": set(),
    "raise ValueError(a + 1)": set(),
    "'''A docstring: 1 < 2.'''": set(),
    "logger.info('text %d', 1)": set(),
    "a: Literal[1]": set(),
    "return None": set(),
    "return True": {"return False"},
    "while True:\n        a = b": {"while False:\n        a = b"},
}
PRODUCT = """\
LIMIT = 3


def is_large(number: int) -> bool:
    if number > LIMIT:
        return True
    return False


def bounded(number: int) -> int:
    return min(number, 3)


def unused() -> int:
    return 1
"""
TESTS = """
from pdserve_sums.sums import bounded, is_large

def test_bounded(): assert bounded(2) == 2 and bounded(9) < 9
def test_large(): assert is_large(5)
def test_small(): assert not is_large(2)
def test_limit(): assert not is_large(3)
def test_fails(): assert is_large(0)
"""
# Starts a process in a session of its own, tells of it, and hangs.
HANGS = """
import subprocess, sys, time
sleep = "import time; time.sleep(600)"
print(subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True).pid, flush=True)
exec(sleep)
"""
RUN = """
import sys
from pathlib import Path
import mutate
mutate.ROOT = Path.cwd()
mutate.KEPT = mutate.ROOT / "tests" / "mutants.json"
mutate.PRELOADED = ()
mutate.AREAS = {"sums": mutate.Area(("lib/pdserve_sums/*.py",), ("test_*.py",))}
sys.exit(mutate.main())
"""

Run = Callable[..., tuple[int, str]]


@pytest.mark.parametrize("body", CHANGES)
def test_a_change_is_of_one_place(body: str) -> None:
    def function(body: str) -> str:
        return ast.unparse(ast.parse(f"async def function():\n    {body}")) + "\n"

    source = function(body)
    found = {mutations.apply(source, site.change) for site in mutations.sites(source)}
    if "while True" in body:
        found.discard(source)
    assert found == set(map(function, CHANGES[body]))


def test_what_is_no_behaviour_is_left_as_it_is() -> None:
    source = (
        "LIMIT = 1 + 2\n@d(1)\nclass C:\n    a: int = 1\n    def __repr__(self): return 1\n"
        "def f(a: Literal[1] = 1) -> Literal[1]: pass\n"
    )
    assert mutations.sites(source) == []


def test_a_change_is_found_again_after_others() -> None:
    source = Path(run_tests.__file__).read_text()
    changes = [site.change for site in mutations.sites(source)]
    assert len(set(changes)) == len(changes) > 100
    later = [site.change for site in mutations.sites(f"# More.\n\nA = 1\n{source}")]
    assert later == changes
    for change in changes[::40]:
        changed = mutations.apply(source, change)
        assert changed is not None
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
    assert mutations.apply(source, changes[0]._replace(nth=9)) is None


@pytest.mark.parametrize("name", mutate.AREAS)
def test_an_area_s_files_and_tests_are_there(name: str) -> None:
    area = mutate.AREAS[name]
    tests = mutate.ROOT / "tests"
    for root, globs in ((mutate.ROOT, area.files), (tests, (*area.tests, *area.elsewhere))):
        for glob in globs:
            assert mutate.find(root, [glob.lstrip("!")]), glob


def test_the_same_seed_draws_the_same() -> None:
    drawn = mutate.draw(mutate.ROOT, ["cuda", "lora"], 1, 5)
    assert [each.area for each in drawn] == ["cuda", "lora", "cuda", "lora", "cuda"]
    assert drawn == mutate.draw(mutate.ROOT, ["cuda", "lora"], 1, 5)
    assert drawn != mutate.draw(mutate.ROOT, ["cuda", "lora"], 2, 5)
    assert [mutate.Mutant.from_json(each.as_json()) for each in drawn] == drawn


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(*flags) -> the exit status and what is printed, of a tree with one area."""
    for name, text in {
        "lib/pdserve_sums/sums.py": PRODUCT,
        "tests/test_sums.py": TESTS,
        ".gitignore": "/.mutants/\n__pycache__/\n",
        "pytest.ini": "[pytest]\naddopts = --import-mode=importlib -p no:hypothesispytest\n"
        f"markers =\n{''.join(f'    {each}' + chr(10) for each in MARKS)}",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def run_command(*flags: str) -> tuple[int, str]:
        tools = str(Path(mutate.__file__).parent)
        ended = subprocess.run(
            [sys.executable, "-c", RUN, *flags],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": tools},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return ended.returncode, ended.stdout

    return run_command


MARKS = ("soak", "images", "clients", "live", "interpreted")


def results(path: Path) -> dict[str, str]:
    mutants = json.loads(path.read_text())["mutants"]
    return {f"{each['before']} -> {each['after']}": each["result"] for each in mutants}


def test_changes_that_no_test_notices_are_told(run: Run, tmp_path: Path) -> None:
    status, out = run("--number=100", "--keep=kept.json")
    assert status == 0, out
    assert "test_fails fails without a change" in out
    kept = results(tmp_path / "kept.json")
    assert {change for change, result in kept.items() if result == "survived"} == {"3 -> 4"}
    assert {change for change, result in kept.items() if result == "unreached"} == {
        "return 1 -> return None",
        "1 -> 2",
    }
    assert kept["number > LIMIT -> number >= LIMIT"] == "killed"
    assert (tmp_path / "lib/pdserve_sums/sums.py").read_text() == PRODUCT
    assert not list(tmp_path.rglob("__pycache__"))


def test_what_was_noticed_and_is_no_longer_fails(run: Run, tmp_path: Path) -> None:
    """A place that has moved is found again."""
    product, tests = tmp_path / "lib/pdserve_sums/sums.py", tmp_path / "tests/test_sums.py"
    product.write_text(f"# Each place is further down.\n\n{PRODUCT}")
    tests.write_text(TESTS.replace("def test_limit", "def limit"))
    file = "lib/pdserve_sums/sums.py"
    mutants = [
        mutate.Mutant("sums", file, 5, mutations.Change(*change, nth=0), "killed", "test_limit")
        for change in (
            ("is_large", "compare", "number > LIMIT", "number >= LIMIT"),
            ("is_large", "constant", "True", "False"),
            ("is_large", "compare", "number == LIMIT", "number != LIMIT"),
        )
    ]
    mutate.write(tmp_path / "kept.json", 1, mutants)
    status, out = run("--against=kept.json", "--keep=again.json")
    assert status == 1
    assert f"NO LONGER NOTICED {file}:7 is_large, compare: number > LIMIT  ->  number >=" in out
    again = mutate.read(tmp_path / "again.json")
    assert [each.result for each in again] == ["survived", "killed", "gone"]


def test_of_what_hangs_nothing_is_left() -> None:
    hanging = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True)
    assert hanging.stdout is not None
    started = psutil.Process(int(hanging.stdout.readline()))
    assert mutate.wait(hanging.pid, 0.1) is None
    started.wait(60)
    hanging.stdout.close()
    hanging.returncode = 0
