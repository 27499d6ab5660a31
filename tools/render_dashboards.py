"""Draws the dashboards from what a Prometheus knows: `python tools/render_dashboards.py URL OUT`.

For pictures where no Grafana is: titles, places, units, stacking, thresholds and queries are those
of helm/dashboards, the numbers are Prometheus'; the drawing is matplotlib's, which is no dependency
of pdserve (`pip install matplotlib`).
"""

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter
from PIL import Image

matplotlib.use("Agg")

FOLDER = Path(__file__).parent.parent / "helm" / "dashboards"
# Grafana's grid: 24 columns, and rows of 30 pixels.
INCHES = {"column": 0.55, "row": 0.28}
VARIABLES = {"$namespace": ".*", "$release": ".*", "$model": ".*"}
UNITS = {"s": "s", "bytes": "B", "Bps": "B/s", "reqps": "req/s", "ops": "/s", "x": "x"}
TIMEOUT_S = 30.0
# Half the size, and nothing that one would see.
COLORS = 256

# By their times, in minutes before the end: a legend's samples.
Lines = dict[str, dict[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of Prometheus")
    parser.add_argument("out", type=Path, help="folder for the pictures")
    parser.add_argument("--minutes", type=float, default=5.0, help="how far back")
    parser.add_argument("--rate-interval", default="15s", help="four scrapes at least")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.end = time.time()
    for path in sorted(FOLDER.glob("*.json")):
        draw(json.loads(path.read_text()), args, args.out / f"{path.stem}.png")


def draw(dashboard: dict[str, Any], args: argparse.Namespace, out: Path) -> None:
    """Write the picture of one dashboard."""
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    width_in, height_in = 24 * INCHES["column"], height * INCHES["row"]
    figure = pyplot.figure(figsize=(width_in, height_in), dpi=80)
    for panel in panels:
        place = panel["gridPos"]
        top = 1 - (place["y"] + 0.9) / height
        bottom = 1 - (place["y"] + place["h"] - 1.1) / height
        box = (
            (place["x"] + 1.3) / 24,
            bottom,
            (place["w"] - 1.6) / 24,
            top - bottom,
        )
        draw_panel(figure.add_axes(box), panel, read(panel, args), minutes=args.minutes)
    figure.savefig(out)
    pyplot.close(figure)
    with Image.open(out) as picture:
        picture.convert("RGB").quantize(COLORS).save(out, optimize=True)


def draw_panel(axes: Axes, panel: dict[str, Any], lines: Lines, *, minutes: float) -> None:
    """Draw curves over the last minutes, or the newest number of a stat."""
    defaults = panel["fieldConfig"]["defaults"]
    axes.set_title(panel["title"], fontsize=8, loc="left")
    axes.tick_params(labelsize=6)
    unit = defaults["unit"]
    form = PercentFormatter(1.0) if unit == "percentunit" else EngFormatter(UNITS.get(unit, ""))
    axes.yaxis.set_major_formatter(form)
    if panel["type"] == "stat":
        axes.axis("off")
        newest = [line[max(line)] for line in lines.values() if line]
        axes.text(0, 0.3, form(newest[0]) if newest else "no data", fontsize=16)
        return
    if not lines:
        axes.text(0.5, 0.5, "no data", fontsize=8, ha="center")
        return
    times = sorted({at for line in lines.values() for at in line})
    curves = [[line.get(at, math.nan) for at in times] for line in lines.values()]
    if defaults["custom"]["stacking"]["mode"] == "normal":
        filled = [[0.0 if math.isnan(value) else value for value in curve] for curve in curves]
        axes.stackplot(times, filled, labels=list(lines), alpha=0.7)
    else:
        for legend, curve in zip(lines, curves, strict=True):
            axes.plot(times, curve, linewidth=1, label=legend)
    _, high = axes.get_ylim()
    for step in defaults["thresholds"]["steps"][1:]:
        if step["value"] < high:
            axes.axhline(step["value"], color="red", linewidth=0.7, linestyle="--")
    # Curves at zero and at the top stay visible.
    axes.set_ylim(-0.02 * high, 1.05 * high)
    axes.set_xlim(-minutes, 0)
    axes.legend(fontsize=5, loc="upper left", framealpha=0.6)


def read(panel: dict[str, Any], args: argparse.Namespace) -> Lines:
    """Ask the queries of a panel."""
    lines: Lines = {}
    for target in panel["targets"]:
        expr = target["expr"].replace("$__rate_interval", args.rate_interval)
        for variable, value in VARIABLES.items():
            expr = expr.replace(variable, value)
        for series in ask(args.url, expr, end=args.end, minutes=args.minutes):
            legend = target["legendFormat"]
            for label, value in series["metric"].items():
                legend = legend.replace(f"{{{{{label}}}}}", value)
            # Prometheus leaves out what is empty.
            legend = re.sub(r"\{\{\w+\}\}", "", legend)
            samples = (((at - args.end) / 60, float(value)) for at, value in series["values"])
            lines[legend] = {at: value for at, value in samples if math.isfinite(value)}
    return {legend: line for legend, line in lines.items() if line}


def ask(url: str, expr: str, *, end: float, minutes: float) -> list[dict[str, Any]]:
    """Return the series of a range query, a sample every two seconds."""
    parameters = {"query": expr, "start": end - 60 * minutes, "end": end, "step": 2}
    address = f"{url}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(address, timeout=TIMEOUT_S) as response:
        result: list[dict[str, Any]] = json.load(response)["data"]["result"]
    return result


if __name__ == "__main__":
    main()
