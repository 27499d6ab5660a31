"""docs/features.md has every row, and the files that it names exist."""

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
        ("F", range(1, 9)),
        ("G", (*range(1, 9), *range(10, 18))),
    )
    for number in numbers
]
LINE = re.compile(r"\| (?P<row>[A-Z]\d+)? ?\| (?P<kind>has|in|test|later) \| (?P<text>.+) \|")
PATHS = re.compile(r"`[^`]+`(, `[^`]+`)*")


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


def paths_of(kind: str) -> list[tuple[str, str]]:
    """(row, path) of each file that the lines of a kind name; they hold nothing else."""
    found = []
    for row, lines in table().items():
        for text in (text for other, text in lines if other == kind):
            assert PATHS.fullmatch(text), f"{row}: {text} is not a list of files"
            found += [(row, path) for path in re.findall(r"`([^`]+)`", text)]
    return found


def test_every_row_is_there_and_has_a_test() -> None:
    rows = table()
    assert list(rows) == ROWS
    for row, lines in rows.items():
        kinds = [kind for kind, _ in lines]
        assert kinds[:2] == ["has", "in"], row
        assert "test" in kinds, f"{row} has no test"


def test_the_named_tests_exist() -> None:
    wrong = []
    for row, path in paths_of("test"):
        file = ROOT / "tests" / path
        if not file.is_file() or not re.search(r"^(async )?def test_", file.read_text(), re.M):
            wrong.append(f"{row}: {path}")
    assert not wrong, "\n".join(wrong)


def test_the_named_modules_exist() -> None:
    missing = [f"{row}: {path}" for row, path in paths_of("in") if not (ROOT / path).exists()]
    assert not missing, "\n".join(missing)
