"""The page at the end: what became of the tests, and each figure beside its goal and its limit."""

from collections.abc import Iterator
from typing import Any, NamedTuple

WIDTH = 100


class Goal(NamedTuple):
    """Of a field of the records whose names begin like this: at least `least`.

    `limit` is what it is a share of, a record of `limits`.
    """

    part: str
    record: str
    field: str
    least: float | None = None
    limit: str = ""


COPY, MATRIX = "copy, bytes read and written", "matrix, bf16"
GOALS = (
    Goal("handoff", "1P1D", "exposed ms"),
    Goal("handoff", "1P1D", "raw transfer ms"),
    Goal("handoff", "1P1D", "TTFT ms"),
    Goal("handoff", "alone", "TTFT ms"),
    Goal("decode", "decode 8B batch 1,", "share_of_copy", 0.70, COPY),
    Goal("decode", "decode 8B batch 64,", "share_of_copy", 0.70, COPY),
    Goal("decode", "decode 0.6B", "share_of_copy", None, COPY),
    Goal("prefill", "prefill 8B", "share_of_matrix", 0.60, MATRIX),
    Goal("attention", "decode 8B 64 x", "share_of_copy", 0.85, COPY),
    Goal("attention", "decode 8B 1 x", "share_of_copy", 0.75, COPY),
    Goal("attention", "prefill 8B 1 x", "share_of_matrix", 0.60, MATRIX),
    Goal("attention", "prefill 8B 8 x", "share_of_matrix", None, MATRIX),
    Goal("attention", "decode 8B", "flash_attn_share", None, COPY),
    Goal("attention", "prefill 8B", "flash_attn_share", None, MATRIX),
    Goal("hf", "transformers generate", "ours_is_x", 5.0),
)

Results = dict[str, dict[str, Any]]


def print_page(results: Results, limits: dict[str, Any] | None, machine: list[str]) -> None:
    """Print the results of the parts that ran. `limits` is that part's, perhaps of another run."""
    print("=" * WIDTH)
    for line in machine:
        print(line)
    for record in limits["records"] if limits else ():
        if record["name"] in ("machine", "GPU"):
            print(f"{record['name']}: {record['what']}")
    print()
    for name, result in results.items():
        print(f"{name:<12}{result['status']:<28}{result['seconds']:>6.0f} s  {_counts(result)}")
    lines = list(_figures(results, limits))
    if lines:
        print(f"\n{'figure':<56}{'value':>9}  {'goal':>8}  {'':<9}limit")
    for line in lines:
        print(line)
    for line in _failures(results):
        print(line)
    print("=" * WIDTH, flush=True)


def _counts(result: dict[str, Any]) -> str:
    tests = [record for record in result["records"] if record["name"] == "tests"]
    if not tests:
        return ""
    counts = {name: n for name, n in tests[0].items() if name not in ("name", "reasons")}
    text = ", ".join(f"{n} {name}" for name, n in counts.items())
    reasons = "; ".join(tests[0].get("reasons", {}))
    return f"{text} ({reasons})" if reasons else text


def _figures(results: Results, limits: dict[str, Any] | None) -> Iterator[str]:
    for goal in GOALS:
        for record in results.get(goal.part, {"records": []})["records"]:
            if record["name"].startswith(goal.record) and goal.field in record:
                yield _figure(goal, record, limits)


def _figure(goal: Goal, record: dict[str, Any], limits: dict[str, Any] | None) -> str:
    value = record[goal.field]
    wanted, verdict = "", ""
    if goal.least is not None:
        wanted = _shown(goal, goal.least)
        verdict = "reached" if value >= goal.least else "MISSED"
    name = f"{goal.part}: {record['name']}, {goal.field.replace('_', ' ')}"
    limit = _limit(goal, limits)
    return f"{name[:56]:<56}{_shown(goal, value):>9}  {wanted:>8}  {verdict:<9}{limit}".rstrip()


def _shown(goal: Goal, value: float) -> str:
    return f"{value:.0%}" if "share" in goal.field else f"{value:.4g}"


def _limit(goal: Goal, limits: dict[str, Any] | None) -> str:
    for record in limits["records"] if limits and goal.limit else ():
        if record["name"].startswith(goal.limit):
            if "gb_s" in record:
                return f"copies: {record['gb_s']:,.0f} GB/s"
            return f"products: {record['tflops']:,.0f} TFLOP/s"
    return ""


def _failures(results: Results) -> Iterator[str]:
    """The cases that failed, each with the last line of what it said."""
    for part, result in results.items():
        for record in result["records"]:
            if "error" in record:
                case = str(record.get("case", "")).rpartition("/")[2]
                error = [line for line in record["error"] if line.strip()]
                said = error[-1].strip() if error else ""
                yield f"{part}: {record['name']} {case}: {said}"[: 2 * WIDTH]
