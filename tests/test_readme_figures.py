"""The README's figures are those of benchmarks/RESULTS.md."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = " ".join((ROOT / "README.md").read_text().split())
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()

Row = dict[str, str]


def tables(heading: str) -> list[list[Row]]:
    """Return the tables of a section, each a list of rows by column. An empty first cell is that
    of the row above.
    """
    _, section = re.split(rf"^#+ {re.escape(heading)}$", RESULTS, maxsplit=1, flags=re.M)
    lines = re.split(r"^#", section, maxsplit=1, flags=re.M)[0].splitlines()
    found: list[list[Row]] = []
    columns: list[str] = []
    first = ""
    for line in lines:
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip().replace("*", "") for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells
            found.append([])
        elif set(line) - set("|-"):
            cells[0] = first = cells[0] or first
            found[-1].append(dict(zip(columns, cells, strict=True)))
    return found


def figures(pattern: str) -> list[float]:
    """Return the numbers that the README has where a pattern has %; percent signs are left out."""
    match = re.search(pattern.replace("%", r"([\d.]*\d)"), README.replace("%", ""))
    assert match is not None, f"the README says nothing like {pattern!r}"
    return [float(figure) for figure in match.groups()]


def number(text: str) -> float:
    """Return the first number of a cell, 7.0 of '7.0 (8)'."""
    match = re.search(r"[\d.]*\d", text.replace(",", ""))
    assert match is not None, text
    return float(match[0])


def column(rows: list[Row], name: str, **where: str) -> list[float]:
    """Return a column's numbers of the rows that have such a beginning in each column named."""
    return [
        number(row[name])
        for row in rows
        if all(row[key].startswith(value) for key, value in where.items())
    ]


def spread(values: list[float]) -> list[float]:
    return [min(values), max(values)]


def test_cpu_against_vllm() -> None:
    cases = tables("The CPU kernels against vLLM's CPU backend and transformers")[0]
    decode, prefill = (
        spread(column(cases, "ratio to vLLM", case=kind)) for kind in ("decode", "prefill")
    )
    pattern = r"a decode step is % to % times as fast and a prefill % to % times"
    assert figures(pattern) == decode + prefill
    missed = [case for case in cases if number(case["ratio to vLLM"]) < number(case["goal"])]
    assert figures(r"% of % goals were missed") == [len(missed), len(cases)]


def test_the_pair_against_vllm_s_pair() -> None:
    (rows,) = tables("The pair against vLLM's pair")
    short, long = (
        {row["system"]: row for row in rows if row["in:out:rate"].startswith(length)}
        for length in ("128", "512")
    )
    assert number(short["vLLM"]["goodput req/s"]) == 0
    assert number(long["pdserve"]["goodput req/s"]) == number(long["vLLM"]["goodput req/s"]) == 0
    throughput = number(long["pdserve"]["req/s"]) / number(long["vLLM"]["req/s"])
    pattern = (
        r"128 tokens % requests/s within the objectives.*with 512 tokens % times the throughput"
    )
    assert figures(pattern) == [number(short["pdserve"]["goodput req/s"]), round(throughput, 1)]


def test_kv_that_prefill_does_not_hide() -> None:
    (percent,) = figures(r"KV that prefill does not hide adds under % to the time")
    for rows in tables("The handoff"):
        assert max(column(rows, "exposed / TTFT")) < percent


def test_what_a_router_takes() -> None:
    rows = tables("The router")[0]
    http = column(rows, "us a token", **{"": "SSE"})
    grpc = column(rows, "us a token", **{"": "gRPC"})
    messages = column(rows, "tokens a message")
    pattern = r"takes % us of CPU time a token over HTTP and % over gRPC; % and % where its loop is"
    pattern += r" behind and a message has % and % tokens"
    assert figures(pattern) == [http[0], grpc[0], http[1], grpc[1], messages[1], messages[3]]


def test_one_gpu() -> None:
    decode, prefill, *_ = tables("One GPU")
    shares = column(decode, "share of the copy's rate", decode="8B shape")
    pattern = r"decoding runs at % \(batch 1\) and % \(batch 64\) .* prefill at % to % of the rate"
    assert figures(pattern) == shares + spread(column(prefill, "share of the product's rate"))
