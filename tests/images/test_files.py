"""Dockerfile, compose.yaml and what it mounts, as far as they can be checked without Docker."""

import dataclasses
import re
from typing import Any

import pytest
import yaml
from containers import ROOT, VERSION

from pdserve_client.stack import END_MARGIN_S
from pdserve_decode.config import DecodeConfig
from pdserve_prefill.config import PrefillConfig
from pdserve_router.config import RouterConfig

CONFIGS = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
FILES = ["compose.yaml", "deploy/compose.shm.yaml", "deploy/compose.cuda.yaml"]


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_all_say_the_same_version() -> None:
    assert f"ARG VERSION={VERSION}\n" in (ROOT / "Dockerfile").read_text()
    compose = (ROOT / "compose.yaml").read_text()
    assert set(re.findall(r"\$\{PDSERVE_VERSION:-([^}]+)\}", compose)) == {VERSION}
    assert load("helm/Chart.yaml")["appVersion"] == VERSION


@pytest.mark.parametrize("path", FILES)
def test_settings_of_services_are_fields_of_their_config(path: str) -> None:
    for name, config in CONFIGS.items():
        fields = {field.name for field in dataclasses.fields(config)}
        environment = load(path)["services"].get(name, {}).get("environment", {})
        assert {key.removeprefix("PDSERVE_").lower() for key in environment} <= fields


def test_variables_are_documented() -> None:
    compose = (ROOT / "compose.yaml").read_text()
    page = (ROOT / "docs" / "docker.md").read_text()
    table = page.partition("| variable | default | |")[2].partition("\n\n")[0]
    variables = set(re.findall(r"\$\{(PDSERVE_\w+)", compose))
    environments = [
        service.get("environment", {}) for service in load("compose.yaml")["services"].values()
    ]
    variables |= {key for names in environments for key, value in names.items() if value is None}
    assert variables == set(re.findall(r"`(PDSERVE_\w+)`", table))


def test_the_size_of_the_kv_pool_is_left_to_the_worker() -> None:
    for name in ("prefill", "decode"):
        environment = load("compose.yaml")["services"][name]["environment"]
        assert environment["PDSERVE_KV_CACHE_MEMORY_MIB"] is None  # unset, if it is unset outside


def test_the_grace_period_outlasts_the_drain() -> None:
    for name in CONFIGS:
        service = load("compose.yaml")["services"][name]
        drain_s = int(service["environment"]["PDSERVE_DRAIN_TIMEOUT_S"])
        assert int(service["stop_grace_period"].removesuffix("s")) >= drain_s + END_MARGIN_S


def test_services_cannot_write_or_gain_rights() -> None:
    for name, service in load("compose.yaml")["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if name != "grafana":
            assert service["read_only"], name
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_what_is_mounted_is_there() -> None:
    for service in load("compose.yaml")["services"].values():
        for volume in service.get("volumes", ()):
            path = ROOT / volume.split(":")[0]
            assert volume.startswith("prometheus:") or path.is_file() or any(path.iterdir()), path


def test_grafana_finds_the_dashboards_of_the_chart() -> None:
    (provider,) = load("deploy/grafana/dashboards/pdserve.yaml")["providers"]
    volumes = load("compose.yaml")["services"]["grafana"]["volumes"]
    assert f"./helm/dashboards:{provider['options']['path']}:ro" in volumes
