"""The chart's values: what is refused, and that schema and README follow the code."""

from typing import Any

import pytest
import yaml
from helm_chart import CHART, CPU_VALUES, helm, pod_specs, render

import update_chart
from pdserve_common.version import VERSION
from pdserve_decode.config import DecodeConfig
from pdserve_prefill.config import PrefillConfig
from pdserve_router.config import RouterConfig

KEDA = {"kind": "keda", "prometheusAddress": "http://prometheus:9090"}


def leaves(values: Any, path: tuple[str, ...] = ()) -> Any:
    """Paths of all that is no map, or an empty one."""
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def test_the_schema_knows_the_processes_settings() -> None:
    text = (CHART / "values.schema.json").read_text()
    assert update_chart.update_schema(text) == text, "run tools/update_chart.py"


def test_the_readme_lists_the_values() -> None:
    text = (CHART / "README.md").read_text()
    assert update_chart.update_readme(text) == text, "run tools/update_chart.py"


def test_every_value_is_documented() -> None:
    text = (CHART / "values.yaml").read_text()
    documented = {tuple(value.path.split(".")) for value in update_chart.documented_values(text)}
    undocumented = [
        ".".join(path)
        for path in leaves(yaml.safe_load(text))
        if not any(path[:length] in documented for length in range(1, len(path) + 1))
    ]
    assert undocumented == []


def test_settings_of_the_chart_are_not_settable_twice() -> None:
    for cls in (RouterConfig, PrefillConfig, DecodeConfig):
        fields = set(update_chart.fields_of(cls)["properties"])
        assert fields
        assert not fields & update_chart.OWNED
        assert fields | update_chart.OWNED >= set(cls.__dataclass_fields__)


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == VERSION


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replica": 1}, "replica"),
        ({"prefill": {"config": {"max_num_seq": 1}}}, "max_num_seq"),
        ({"prefill": {"config": {"maxNumSeqs": 1}}}, "maxNumSeqs"),
        ({"decode": {"config": {"port": 1}}}, "port"),
        ({"router": {"config": {"decode": ["a:1"]}}}, "decode"),
        ({"router": {"config": {"drain_timeout_s": "long"}}}, "drain_timeout_s"),
        ({"worker": {"config": {"dtype": "float16"}}}, "dtype"),
        ({"worker": {"config": {"drain_timeout_s": None}}}, "drain_timeout_s"),
        ({"router": {"replicas": 0}}, "replicas"),
        ({"decode": {"replicas": 0}}, "decode.replicas is 0"),
        (
            {"prefill": {"config": {"runner": "pooling"}}},
            "prefill.replicas must be at least 1 and decode.replicas 0",
        ),
        (
            {
                "worker": {"config": {"runner": "pooling"}},
                "prefill": {"replicas": 0},
                "decode": {"replicas": 0},
            },
            "prefill.replicas must be at least 1",
        ),
        (
            {
                "prefill": {"replicas": 0},
                "router": {"config": {"require_disaggregation": True}},
            },
            "prefill.replicas is 0, must be at least 1 with router.config.require_disaggregation",
        ),
        ({"fullnameOverride": "1st"}, "fullnameOverride"),
        *(
            ({component: {"env": [{"name": "A", "value": value}]}}, "value")
            for component in ("router", "worker", "prefill", "decode")
            for value in (1, True)
        ),
        ({"router": {"env": [{"value": "1"}]}}, "name"),
        ({"model": {"path": "/data/qwen"}}, "path"),
        ({"model": {"path": "/models/../etc"}}, "path"),
        ({"model": {"source": "pvc"}}, "model.pvc.claimName is empty"),
        ({"model": {"source": "image"}}, "model.image.reference is empty"),
        ({"model": {"source": "hub"}}, "model.hub.repository is empty"),
        ({"tls": {"source": "secret"}}, "tls.secretName is empty"),
        ({"tls": {"source": "certManager"}}, "tls.certManager.issuer.name is empty"),
        ({"router": {"config": {"tls_cert_file": "/a"}}}, "tls_cert_file"),
        ({"model": {"source": "hub", "hub": {"repository": "--x/y"}}}, "repository"),
        ({"prometheusRule": {"runbookBaseUrl": "wiki/pdserve"}}, "runbookBaseUrl"),
        (
            {"worker": {"gpu": {"count": 2}}},
            "prefill: gpu.count is 2, must be 1 (config.tensor_parallel_size)",
        ),
        (
            {"decode": {"config": {"tensor_parallel_size": 2}}},
            "decode: gpu.count is 1, must be 2 (config.tensor_parallel_size)",
        ),
        (
            {"decode": {"config": {"data_parallel_size": 2}}},
            "decode: config.data_parallel_size is 2, must be 1: all Pods of a Deployment",
        ),
        (
            {"decode": {"config": {"pipeline_parallel_size": 2}}},
            "decode: config.pipeline_parallel_size is 2, must be 1 with device cuda",
        ),
        ({"prometheusRule": {"alerts": {"PdserveNoSuch": {"enabled": True}}}}, "PdserveNoSuch"),
        ({"prometheusRule": {"alerts": {"PdserveErrorRatio": {"minCount": None}}}}, "minCount"),
        ({"prometheusRule": {"alerts": {"PdserveNoRouter": {"minCount": 3}}}}, "minCount"),
        ({"prometheusRule": {"objectives": {"ttftSeconds": 2.7}}}, "ttftSeconds"),
        ({"prometheusRule": {"objectives": {"missedRatio": 0.2}}}, "missedRatio"),
        ({"model": {"hub": {"resources": {"request": {}}}}}, "request"),
        ({"autoscaling": {"kind": "keda"}}, "autoscaling.prometheusAddress is empty"),
        (
            {"autoscaling": KEDA, "worker": {"autoscaling": {"minReplicas": 9}}},
            "autoscaling.maxReplicas is below minReplicas",
        ),
        (
            {"autoscaling": KEDA, "worker": {"autoscaling": {"maxPeers": 1}}},
            "autoscaling.maxPeers of prefill times that of decode must be at least 2",
        ),
        (
            {"decode": {"rollingUpdate": {"maxSurge": "0%", "maxUnavailable": 0}}},
            "decode: rollingUpdate.maxSurge and maxUnavailable are both 0",
        ),
        (
            {"router": {"podDisruptionBudget": {"enabled": True, "maxUnavailable": 0}}},
            "router: podDisruptionBudget.maxUnavailable is 0",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.replace(" ", "-"),
)
def test_what_cannot_work_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm().HelmError) as error:
        render(values)
    assert message in str(error.value)


def test_the_cpu_profile_asks_for_no_gpu_and_for_the_model_of_the_image() -> None:
    assert "model" not in CPU_VALUES
    text = str(list(pod_specs(render(CPU_VALUES))))
    assert "gpu" not in text.replace("--gpu", "")
    assert "--device=cpu" in text
    assert "--model=/models/pdserve-tiny" in text


@pytest.mark.parametrize("name", ["1st", "a.b"])
def test_a_release_name_that_no_service_can_have_is_refused(name: str) -> None:
    with pytest.raises(helm().HelmError, match=f'the release is named "{name}"'):
        render(name=name)
    render({"fullnameOverride": "first"}, name=name)
