"""What the chart makes for operators, against the schemas of their custom resources."""

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helm_chart import EVERYTHING, ROOT, Manifest, of_kind, render

SCRIPT = Path(__file__).parent / "validate_custom_resources.mjs"
KINDS = ("Certificate", "PodMonitor", "PrometheusRule", "ScaledObject")
PACKAGES = ROOT / ".crds" / "node_modules"

pytestmark = pytest.mark.skipif(
    not PACKAGES.is_dir() or shutil.which("node") is None,
    reason="needs node and the operators' schemas: make crds",
)


def problems_of(manifests: list[Manifest]) -> list[str]:
    done = subprocess.run(
        ["node", SCRIPT, PACKAGES],
        input=json.dumps(manifests),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.fixture(scope="module")
def custom() -> list[Manifest]:
    manifests = render(EVERYTHING)
    return [manifest for kind in KINDS for manifest in of_kind(manifests, kind)]


def test_operators_know_every_field(custom: list[Manifest]) -> None:
    assert {manifest["kind"] for manifest in custom} == set(KINDS)
    assert problems_of(custom) == []


def test_what_is_wrong_or_unknown_is_found(custom: list[Manifest]) -> None:
    (monitor,) = of_kind(custom, "PodMonitor")
    broken: list[tuple[Any, str]] = [
        ({"interval": "soon"}, "interval"),
        ({"intervall": "5s"}, "unknown field spec.podMetricsEndpoints.0.intervall"),
        ({"relabelings": "none"}, "relabelings"),
    ]
    for change, expected in broken:
        wrong = copy.deepcopy(monitor)
        wrong["spec"]["podMetricsEndpoints"][0].update(change)
        assert expected in str(problems_of([wrong]))
