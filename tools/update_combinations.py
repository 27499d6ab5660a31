"""Writes docs/combinations.md from the table in `pdserve_engine/combinations.py`."""

from itertools import groupby
from pathlib import Path

from pdserve_engine.combinations import EXCLUDED

DOC = Path(__file__).parent.parent / "docs" / "combinations.md"
HEAD = """# What goes with what

A worker is refused at its start, with both settings and the reason, if it is asked for two of
these together. Every other pair is served: tests start an engine with each that a CPU can run.
Written by `tools/update_combinations.py`.

| | not with | because |
|---|---|---|
"""


def render() -> str:
    """Return the page: a row for each feature and reason."""
    rows = []
    for (first, reason), pairs in groupby(EXCLUDED, key=lambda pair: (pair.first, pair.reason)):
        others = ", ".join(pair.second.value for pair in pairs)
        rows.append(f"| {first.value} | {others} | {reason} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    DOC.write_text(render(), encoding="utf-8")
