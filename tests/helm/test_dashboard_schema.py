"""The dashboards against Grafana's own types of one, which Grafana itself only reads leniently."""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helm_chart import ROOT
from jsonschema import Draft7Validator
from monitoring import DASHBOARDS

PACKAGES = ROOT / ".crds" / "node_modules"
GENERATOR = PACKAGES / ".bin" / "ts-json-schema-generator"
TYPES = PACKAGES / "@grafana/schema/dist/esm/raw/dashboard/x/dashboard_types.gen.d.ts"

pytestmark = pytest.mark.skipif(
    not GENERATOR.exists() or not TYPES.exists(), reason="needs Grafana's types: make crds"
)


@pytest.fixture(scope="module")
def validator() -> Draft7Validator:
    command = [GENERATOR, "--path", TYPES, "--type", "Dashboard", "--no-type-check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return Draft7Validator(json.loads(done.stdout))


def problems_of(dashboard: dict[str, Any], validator: Draft7Validator) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(dashboard)]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_grafana_knows_every_key(path: Path, validator: Draft7Validator) -> None:
    assert problems_of(json.loads(path.read_text()), validator) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda dashboard: dashboard.update(refreshh="30s"),
        lambda dashboard: dashboard["panels"][1].update(titel="Requests"),
        lambda dashboard: dashboard["panels"][1]["gridPos"].update(w="wide"),
        lambda dashboard: dashboard["panels"][1].pop("type"),
    ],
    ids=["unknown key", "unknown key of a panel", "wrong type", "missing key"],
)
def test_what_is_wrong_is_found(change: Any, validator: Draft7Validator) -> None:
    dashboard = copy.deepcopy(json.loads(DASHBOARDS[0].read_text()))
    change(dashboard)
    assert problems_of(dashboard, validator)
