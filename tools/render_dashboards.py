"""Draws panels of the dashboards as a page of SVG, from what a Prometheus knows.

For pictures where no Grafana is: titles, places, names, units, stacking, thresholds and queries are
those of helm/dashboards, the numbers are Prometheus'; the drawing is ours.
"""

import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from pdserve_client.waterfall import FIRST_ITL_STAGES, TTFT_STAGES

FOLDER = Path(__file__).parent.parent / "helm" / "dashboards"
COLUMNS = 24
VARIABLES = {"namespace": ".*", "release": ".*", "model": ".*"}
UNITS = {"s": "s", "bytes": "B", "Bps": "B/s", "reqps": "/s", "ops": "/s", "x": "x"}
PREFIXES = {-6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G"}
# Told apart by people who do not tell red from green, too.
COLORS = [
    "#4477aa",
    "#ee7733",
    "#228833",
    "#ccbb44",
    "#aa3377",
    "#66ccee",
    "#bbbbbb",
    "#222255",
    "#994f00",
    "#009988",
]
# Both end with one of the same name.
STAGES = {name: at for at, name in enumerate([*TTFT_STAGES.values(), *FIRST_ITL_STAGES.values()])}
MAX_LEGENDS = 8
STEP_S = 2
TIMEOUT_S = 30.0
# Around a panel's curves, in pixels.
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 8, 18

STYLE = """
body { margin: 0; padding: 14px; font: 12px system-ui, "DejaVu Sans", sans-serif; color: #1f2328 }
h1 { font-size: 16px; margin: 0 0 2px } p { margin: 0 0 10px; color: #59636e }
main { display: grid; grid-template-columns: repeat(24, 1fr); gap: 10px }
h2 { grid-column: 1 / -1; font-size: 13px; margin: 4px 0 -4px }
section { border: 1px solid #d1d9e0; border-radius: 6px; padding: 7px 9px 4px; min-width: 0 }
h3 { font-size: 12px; margin: 0 0 3px } .stat { font-size: 22px; padding: 2px 0 5px }
.legend { line-height: 1.35 } .legend span { margin-right: 9px; white-space: nowrap }
.legend i { display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 4px }
svg { display: block } text { font-size: 10.5px; fill: #59636e }
"""

# By their times, in seconds since the first: a legend's samples.
Lines = dict[str, dict[float, float]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a Prometheus saw in the seconds before `end`."""

    url: str
    seconds: float
    # Four scrapes at least.
    rate_interval: str
    # The values of variables that are not to match everything.
    chosen: Mapping[str, str] = field(default_factory=dict)
    end: float = field(default_factory=time.time)

    def read(self, panel: dict[str, Any]) -> Lines:
        """Ask the queries of a panel."""
        lines: Lines = {}
        shown_as = {
            override["matcher"]["options"]: override["properties"][0]["value"]
            for override in panel["fieldConfig"]["overrides"]
        }
        for target in panel["targets"]:
            for labels, samples in self._ask(target["expr"]):
                legend = target["legendFormat"]
                for label, value in labels.items():
                    legend = legend.replace(f"{{{{{label}}}}}", value)
                # Prometheus leaves out what is empty.
                legend = re.sub(r"\{\{\w+\}\}", "", legend)
                start = self.end - self.seconds
                line = {at - start: value for at, value in samples if math.isfinite(value)}
                if line:
                    lines[shown_as.get(legend, legend)] = line
        return dict(sorted(lines.items(), key=_by_stage))

    def _ask(self, expr: str) -> Iterator[tuple[dict[str, str], list[tuple[float, float]]]]:
        variables = VARIABLES | {"__rate_interval": self.rate_interval} | self.chosen
        for variable, value in variables.items():
            expr = expr.replace(f"${variable}", value)
        parameters = {"start": self.end - self.seconds, "end": self.end, "step": STEP_S}
        query = urllib.parse.urlencode({"query": expr, **parameters})
        with urllib.request.urlopen(
            f"{self.url}/api/v1/query_range?{query}", timeout=TIMEOUT_S
        ) as response:
            for series in json.load(response)["data"]["result"]:
                yield series["metric"], [(at, float(value)) for at, value in series["values"]]


def _by_stage(item: tuple[str, object]) -> int:
    return STAGES.get(item[0], -1)


def panels_of(name: str, titles: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the panels of a dashboard's file, all or those with the titles, in their order."""
    panels: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())["panels"]
    if not titles:
        return panels
    by_title = {panel["title"]: panel for panel in panels}
    return [by_title[title] for title in titles]


def page(title: str, note: str, panels: list[dict[str, Any]], source: Source, width: int) -> str:
    """Return HTML of `width` pixels."""
    colors: dict[str, str] = {}
    column = (width - 28 + 10) / COLUMNS
    sections = []
    for panel in panels:
        if panel["type"] == "row":
            sections.append(f"<h2>{escape(panel['title'])}</h2>")
            continue
        span = panel["gridPos"]["w"]
        lines = source.read(panel)
        body = _stat if panel["type"] == "stat" else _chart
        inner = body(panel, lines, colors, int(span * column) - 30, source.seconds)
        sections.append(
            f'<section style="grid-column: span {span}"><h3>{escape(panel["title"])}</h3>'
            f"{inner}</section>"
        )
    head = f"<h1>{escape(title)}</h1><p>{escape(note)}</p>"
    return (
        f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style>{head}'
        f"<main>{''.join(sections)}</main>"
    )


def _stat(
    panel: dict[str, Any], lines: Lines, _colors: dict[str, str], _width: int, _seconds: float
) -> str:
    newest = [line[max(line)] for line in lines.values()]
    text = _number(newest[0], panel["fieldConfig"]["defaults"]["unit"]) if newest else "no data"
    return f'<div class="stat">{text}</div>'


def _chart(
    panel: dict[str, Any], lines: Lines, colors: dict[str, str], width: int, seconds: float
) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    height = 150 if width > 300 else 130
    if not lines:
        return f'<svg width="{width}" height="{height}"><text x="8" y="60">no data</text></svg>'
    lines = dict(list(lines.items())[:MAX_LEGENDS])
    is_stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    times = sorted({at for line in lines.values() for at in line})
    high = max(
        sum(line.get(at, 0.0) for line in lines.values())
        if is_stacked
        else max(line.get(at, 0.0) for line in lines.values())
        for at in times
    )
    step = _tick(high or 1.0)
    room = 1.0 if defaults["unit"] == "percentunit" else 1.02
    top = max(step * math.ceil(room * high / step - 1e-9), step)

    def x(at: float) -> float:
        return LEFT + (width - LEFT - RIGHT) * at / seconds

    def y(value: float) -> float:
        return height - BOTTOM - (height - TOP - BOTTOM) * value / top

    marks = []
    for index in range(round(top / step) + 1):
        at = y(index * step)
        marks.append(f'<path d="M{LEFT} {at:.1f}H{width - RIGHT}" stroke="#e4e8ec"/>')
        label = _number(index * step, defaults["unit"])
        marks.append(f'<text x="{LEFT - 5}" y="{at + 3.5:.1f}" text-anchor="end">{label}</text>')
    for minute in range(int(seconds // 60) + 1):
        label = f"{minute} min" if minute else "0"
        place = f'x="{x(60 * minute):.0f}" y="{height - 4}" text-anchor="middle"'
        marks.append(f"<text {place}>{label}</text>")
    bases = dict.fromkeys(times, 0.0)
    legend = []
    for name, line in lines.items():
        color = colors.setdefault(name, COLORS[len(colors) % len(COLORS)])
        legend.append(f'<span><i style="background: {color}"></i>{escape(name)}</span>')
        if is_stacked:
            tops = {at: bases[at] + line.get(at, 0.0) for at in times}
            edge = [(x(at), y(tops[at])) for at in times]
            edge += [(x(at), y(bases[at])) for at in reversed(times)]
            marks.append(f'<path d="{_path(edge)}Z" fill="{color}" fill-opacity="0.75"/>')
            bases = tops
        else:
            curve = [(x(at), y(line[at])) for at in times if at in line]
            marks.append(
                f'<path d="{_path(curve)}" fill="none" stroke="{color}" stroke-width="2"/>'
            )
    for bad in defaults["thresholds"]["steps"][1:]:
        if bad["value"] < top:
            line_at = f"M{LEFT} {y(bad['value']):.1f}H{width - RIGHT}"
            marks.append(f'<path d="{line_at}" stroke="#d1242f" stroke-dasharray="4 3"/>')
    return (
        f'<svg width="{width}" height="{height}">{"".join(marks)}</svg>'
        f'<div class="legend">{"".join(legend)}</div>'
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _tick(high: float) -> float:
    """A round number of which three to five make up `high`."""
    power = 10.0 ** math.floor(math.log10(high / 3))
    return max(power * factor for factor in (1, 2, 2.5, 5) if power * factor <= high / 3)


def _number(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    exponent = 3 * math.floor(math.log10(abs(value)) / 3 + 1e-9) if value else 0
    exponent = min(max(exponent, min(PREFIXES)), max(PREFIXES))
    # Nobody counts thousandths of requests.
    if exponent < 0 and unit != "s":
        exponent = 0
    name = UNITS.get(unit, "")
    space = " " if name and name[0] not in "/x" else ""
    return f"{value / 10.0**exponent:.3g}{space}{PREFIXES[exponent]}{name}"
