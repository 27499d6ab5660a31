"""docs/features.md names tests that exist, for every row."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = [
    f"{group}{number}"
    for group, numbers in (
        ("B", range(1, 7)),
        ("C", range(1, 4)),
        ("D", range(1, 8)),
        ("E", range(1, 6)),
        ("F", range(1, 8)),
        ("G", (*range(1, 9), *range(10, 13), *range(14, 18))),
    )
    for number in numbers
]
LINE = re.compile(r"\| (?P<row>[A-Z]\d+)? ?\| (?P<kind>has|in|test|later) \| (?P<text>.+) \|")
TEST = re.compile(r"`(?P<path>[\w/]+\.py)::(?P<name>test_\w+)`")


def table() -> dict[str, list[tuple[str, str]]]:
    """Row -> (kind, text) of each of its lines."""
    lines = (ROOT / "docs" / "features.md").read_text().splitlines()
    found: dict[str, list[tuple[str, str]]] = {}
    row = ""
    for line in lines[lines.index("|---|---|---|") + 1 :]:
        match = LINE.fullmatch(line)
        assert match, f"not a line of the table: {line}"
        if match["row"]:
            row = match["row"]
            assert row not in found, f"{row} comes twice"
        found.setdefault(row, []).append((match["kind"], match["text"]))
    return found


def functions_of(path: Path) -> set[str]:
    """Names of the functions at the top of a file."""
    nodes = ast.parse(path.read_text()).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in nodes if isinstance(node, kinds)}


def test_every_row_is_there_and_has_a_test() -> None:
    rows = table()
    assert list(rows) == ROWS
    for row, lines in rows.items():
        kinds = [kind for kind, _ in lines]
        assert kinds[:2] == ["has", "in"], row
        assert "test" in kinds, f"{row} has no test"


def test_the_named_tests_exist() -> None:
    wrong = []
    for row, lines in table().items():
        for kind, text in lines:
            if kind != "test":
                continue
            match = TEST.fullmatch(text)
            assert match, f"{row}: {text} is not `file::test`"
            path = ROOT / "tests" / match["path"]
            if not path.is_file() or match["name"] not in functions_of(path):
                wrong.append(f"{row}: {text}")
    assert not wrong, "\n".join(wrong)


def test_the_named_modules_exist() -> None:
    missing = [
        f"{row}: {path}"
        for row, lines in table().items()
        for kind, text in lines
        if kind == "in"
        for path in re.findall(r"`([^`]+)`", text)
        if not (ROOT / path).exists()
    ]
    assert not missing, "\n".join(missing)
