"""What the chart makes of one choice or another."""

import re
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_chart import (
    CHART,
    MATRIX,
    ROOT,
    Manifest,
    container,
    find,
    of_kind,
    render,
)


def pod(manifests: list[Manifest], component: str) -> Manifest:
    """Labels and spec of a component's Pods."""
    return dict(find(manifests, "Deployment", component)["spec"]["template"])


def test_pools_scale_on_metrics_that_exist() -> None:
    documented = (ROOT / "docs" / "metrics.md").read_text()
    for kind in ("hpa", "keda"):
        scaling = {"kind": kind, "prometheusAddress": "http://prometheus:9090"}
        manifests = render({"autoscaling": scaling})
        scalers = of_kind(manifests, "HorizontalPodAutoscaler" if kind == "hpa" else "ScaledObject")
        assert len(scalers) == 2
        for scaler in scalers:
            names = set(re.findall(r"pdserve_\w+", str(scaler["spec"])))
            assert names >= {
                "pdserve_waiting_tokens",
                "pdserve_kv_cache_usage_ratio",
                "pdserve_build_info",
            }
            is_decode = "decode" in scaler["metadata"]["name"]
            assert ("pdserve_slot_usage_ratio" in names) is is_decode
            assert all(f"`{name}`" in documented for name in names)


def test_a_pool_grows_with_the_other_one() -> None:
    scaling = {"kind": "keda", "prometheusAddress": "http://prometheus:9090"}
    manifests = render({"autoscaling": scaling, "decode": {"autoscaling": {"maxPeers": 2}}})
    triggers = find(manifests, "ScaledObject", "decode")["spec"]["triggers"]
    by_query = {
        trigger["metadata"]["query"]: trigger["metadata"]["threshold"] for trigger in triggers
    }
    selector = 'namespace="serving",release="demo",component='
    assert by_query == {
        f'sum(pdserve_waiting_tokens{{{selector}"decode"}})': "4096",
        f'sum(pdserve_kv_cache_usage_ratio{{{selector}"decode"}})': "0.8",
        f'(sum(pdserve_slots{{{selector}"decode",state="used"}}) + '
        'sum(pdserve_requests_waiting_for_decode{namespace="serving",release="demo"})) / '
        f'sum(pdserve_slots{{{selector}"decode"}}) * '
        f'count(pdserve_slot_usage_ratio{{{selector}"decode"}})': "0.8",
        f'count(pdserve_build_info{{{selector}"prefill"}})': "2",
    }


def test_a_pool_of_none_is_not_scaled_and_nobodys_peer() -> None:
    for kind, found in (("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        scaling = {"kind": kind, "prometheusAddress": "http://prometheus:9090"}
        manifests = render({"autoscaling": scaling, "prefill": {"replicas": 0}})
        (scaler,) = of_kind(manifests, found)
        assert scaler["spec"]["scaleTargetRef"]["name"] == "demo-pdserve-decode"
        assert "pdserve_build_info" not in str(scaler["spec"])
        assert find(manifests, "Deployment", "prefill")["spec"]["replicas"] == 0


def required_transports(values: dict[str, Any]) -> list[str]:
    """What router, prefill and decode are told, in this order; nothing for one that is not."""
    manifests = render(values)
    processes = (
        container(find(manifests, "Deployment", each)) for each in ("router", "prefill", "decode")
    )
    flag = "--require-transport="
    return ["".join(arg for arg in process["args"] if flag in arg) for process in processes]


@pytest.mark.parametrize("kind", ["none", "hpa", "keda"])
def test_a_model_that_pools_has_prefill_workers_alone(kind: str) -> None:
    scaling = {"kind": kind, "prometheusAddress": "http://prometheus:9090"}
    manifests = render(
        {
            "worker": {"config": {"runner": "pooling", "convert": "embed"}},
            "decode": {"replicas": 0},
            "autoscaling": scaling,
        }
    )
    assert find(manifests, "Deployment", "decode")["spec"]["replicas"] == 0
    prefill = find(manifests, "Deployment", "prefill")
    (container,) = prefill["spec"]["template"]["spec"]["containers"]
    assert {"--runner=pooling", "--convert=embed"} <= set(container["args"])
    (container,) = find(manifests, "Deployment", "router")["spec"]["template"]["spec"]["containers"]
    assert any(arg.startswith("--prefill=dns://") for arg in container["args"])
    assert not any(arg.startswith("--decode") for arg in container["args"])


def test_who_asks_for_rdma_devices_requires_rdma_unless_told_otherwise() -> None:
    rdma, other = "--require-transport=rdma", "--require-transport=any"
    devices = {"rdma": {"resource": "rdma/hca"}}
    unset: dict[str, Any] = {"config": {"require_transport": "any"}}
    assert required_transports({}) == ["", "", ""]
    assert required_transports({"worker": devices}) == [rdma, rdma, rdma]
    assert required_transports({"decode": devices}) == ["", "", rdma]
    assert required_transports({"worker": devices | unset}) == ["", other, other]
    assert required_transports({"worker": devices, "router": unset}) == [other, rdma, rdma]


def revision(values: dict[str, Any]) -> str:
    manifests = render(values)
    labels = pod(manifests, "prefill")["metadata"]["labels"]
    name = find(manifests, "Service", "prefill")["metadata"]["name"]
    assert name.endswith(labels["pdserve/revision"])
    return str(labels["pdserve/revision"])


def test_workers_of_another_model_are_other_workers() -> None:
    others: list[dict[str, Any]] = [
        {"model": {"path": "/models/other"}},
        {"model": {"image": {"reference": "registry/other:1"}}},
        {"model": {"hub": {"repository": "Qwen/other"}}},
        {"model": {"hub": {"revision": "0123abc"}}},
        {"model": {"pvc": {"subPath": "other"}}},
        {"worker": {"config": {"dtype": "float32"}}},
        {"worker": {"config": {"quantization": "int8"}}},
        {"worker": {"config": {"kv_cache_dtype": "fp8", "device": "cuda"}}},
        {"decode": {"config": {"block_size": 32}}},
        {"revision": "2"},
        {"tls": {"source": "secret", "secretName": "certificates"}},
    ]
    same: list[dict[str, Any]] = [
        {"decode": {"replicas": 3}},
        {"worker": {"config": {"max_num_seqs": 2}}},
        {"model": {"image": {"pullPolicy": "Always"}}},
        {"model": {"hub": {"tokenSecret": "hub", "sizeLimit": "9Gi"}}},
        {"model": {"hub": {"resources": {"limits": {"memory": "8Gi"}}}}},
    ]
    old = revision({})
    assert all(revision(values) != old for values in others)
    assert all(revision(values) == old for values in same)


def test_names_that_look_like_numbers_stay_names() -> None:
    values = {
        # A Service's begins with a letter.
        "fullnameOverride": "first",
        "serviceAccount": {"name": "7"},
        "autoscaling": {"kind": "hpa"},
        "revision": "1",
    }
    for manifest in render(values, name="12"):
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_pools_take_what_they_share_and_then_their_own() -> None:
    manifests = render(
        {
            "worker": {
                "config": {"max_num_seqs": 8, "async_scheduling": True},
                "minReadySeconds": 9,
            },
            "prefill": {"config": {"max_num_seqs": 4}, "replicas": 0},
            "decode": {"config": {"async_scheduling": False}, "minReadySeconds": 0},
        }
    )
    prefill, decode = (find(manifests, "Deployment", role) for role in ("prefill", "decode"))
    assert {"--max-num-seqs=4", "--async-scheduling"} <= set(container(prefill)["args"])
    assert {"--max-num-seqs=8", "--no-async-scheduling"} <= set(container(decode)["args"])
    assert (prefill["spec"]["replicas"], prefill["spec"]["minReadySeconds"]) == (0, 9)
    assert (decode["spec"]["replicas"], decode["spec"]["minReadySeconds"]) == (1, 0)
    router_args = container(find(manifests, "Deployment", "router"))["args"]
    assert not [arg for arg in router_args if arg.startswith("--prefill=")]


def test_gpus_are_asked_for_where_the_device_is_one() -> None:
    for device, size, count in (("cuda", 1, 1), ("cuda", 4, 4), ("cpu", 2, None)):
        config = {"device": device, "tensor_parallel_size": size}
        manifests = render({"worker": {"config": config, "gpu": {"count": count or 1}}})
        limits = container(find(manifests, "Deployment", "decode"))["resources"]["limits"]
        assert limits.get("nvidia.com/gpu") == count


def test_models_that_are_not_in_the_images_are_mounted_where_their_path_is() -> None:
    for name in ("everything", "hub_and_hpa", "image"):
        manifests = render(MATRIX[name])
        for component in ("router", "prefill", "decode"):
            mounts = container(find(manifests, "Deployment", component))["volumeMounts"]
            (model,) = (mount for mount in mounts if mount["name"] == "model")
            assert (model["mountPath"], model["readOnly"]) == ("/models", True)


def test_the_download_goes_where_the_processes_read() -> None:
    manifests = render(MATRIX["hub_and_hpa"])
    for component in ("router", "prefill", "decode"):
        spec = pod(manifests, component)["spec"]
        (download,) = spec["initContainers"]
        assert "--local-dir=/models/qwen" in download["command"]
        assert "--model=/models/qwen" in spec["containers"][0]["args"]
        mounts = [m for m in download["volumeMounts"] if m["name"] == "model"]
        assert mounts == [{"name": "model", "mountPath": "/models"}]
        assert {"requests", "limits"} <= download["resources"].keys(), "quotas refuse Pods without"


def test_workers_that_load_adapters_from_the_hub_reach_it() -> None:
    manifests = render(
        {
            "decode": {"config": {"lora_hub": True}},
            "model": {"hub": {"tokenSecret": "hub", "tokenSecretKey": "key"}},
        }
    )
    for component, has_hub in (("router", False), ("prefill", False), ("decode", True)):
        egress = find(manifests, "NetworkPolicy", component)["spec"]["egress"]
        assert ({"ports": [{"port": 443}]} in egress) is has_hub, component
        environment = container(find(manifests, "Deployment", component))["env"]
        tokens = [each["valueFrom"] for each in environment if each["name"] == "HF_TOKEN"]
        expected = [{"secretKeyRef": {"name": "hub", "key": "key"}}] if has_hub else []
        assert tokens == expected, component


def test_all_send_spans_to_the_collector_and_may() -> None:
    endpoint = "http://otel-collector.monitoring:4318"
    for values, is_sent in (({}, False), ({"tracing": {"otlpTracesEndpoint": endpoint}}, True)):
        manifests = render(values)
        for component in ("router", "prefill", "decode"):
            args = container(find(manifests, "Deployment", component))["args"]
            assert (f"--otlp-traces-endpoint={endpoint}" in args) is is_sent
            egress = find(manifests, "NetworkPolicy", component)["spec"]["egress"]
            assert ({"ports": [{"port": 4318}]} in egress) is is_sent


def test_routers_read_api_keys_where_the_secret_is_mounted() -> None:
    manifests = render({"apiKeys": {"secretName": "keys", "secretKey": "clients"}})
    spec = pod(manifests, "router")["spec"]
    (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "api-keys")
    (item,) = volume["secret"]["items"]
    assert (volume["secret"]["secretName"], item["key"]) == ("keys", "clients")
    (mount,) = (m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "api-keys")
    assert "subPath" not in mount, "it would not follow the Secret"
    flag = f"--api-keys-file={mount['mountPath']}/{item['path']}"
    assert flag in spec["containers"][0]["args"]
    for role in ("prefill", "decode"):
        assert "api-keys" not in str(pod(manifests, role)), "workers ask for certificates"


def test_dashboards_and_alerts_arrive_as_they_are(tmp_path: Path) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    dashboard = '{"title": "Overview", "legend": "{{pod}} $__rate_interval"}'
    (chart / "dashboards").mkdir(exist_ok=True)
    (chart / "dashboards" / "sample.json").write_text(dashboard + "\n")
    rules = {
        "groups": [
            {
                "name": "sample",
                "rules": [
                    {
                        "alert": "PdserveTargetDown",
                        "expr": "up == 0",
                        "annotations": {"summary": "{{ $labels.pod }} is down"},
                    }
                ],
            }
        ]
    }
    (chart / "files" / "rules.yaml").write_text(yaml.safe_dump(rules))
    manifests = render({"prometheusRule": {"enabled": True}}, chart=chart)
    found = {m["metadata"]["name"]: m for m in manifests}
    assert found["demo-pdserve-sample"]["kind"] == "ConfigMap"
    (config_map,) = (m for m in of_kind(manifests, "ConfigMap") if "sample.json" in m["data"])
    assert config_map["data"]["sample.json"].strip() == dashboard
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert [m["spec"] for m in of_kind(manifests, "PrometheusRule")] == [rules]


@pytest.mark.parametrize("base", ["https://wiki.example.com/pdserve", "http://wiki/"])
def test_alerts_link_to_their_runbooks_where_somebody_serves_them(base: str) -> None:
    expected = yaml.safe_load((CHART / "alerts" / "pdserve.yaml").read_text())
    for rule in (rule for group in expected["groups"] for rule in group["rules"]):
        if "alert" in rule:
            url = f"{base.rstrip('/')}/{rule['annotations']['runbook']}"
            rule["annotations"] |= {"runbook_url": url}
    manifests = render({"prometheusRule": {"enabled": True, "runbookBaseUrl": base}})
    assert [m["spec"] for m in of_kind(manifests, "PrometheusRule")] == [expected]


@pytest.mark.parametrize(
    ("values", "users"),
    [
        ({}, {"router": 10001, "prefill": 10001, "decode": 10001}),
        ({"worker": {"runAsUser": 0}}, {"router": 10001, "prefill": 0, "decode": 0}),
        ({"worker": {"runAsUser": None}}, {"router": 10001, "prefill": None, "decode": None}),
        ({"router": {"runAsUser": None}}, {"router": None, "prefill": 10001, "decode": 10001}),
        ({"prefill": {"runAsUser": None}}, {"router": 10001, "prefill": None, "decode": 10001}),
        (
            {"worker": {"runAsUser": 5}, "decode": {"runAsUser": None}, "router": {"runAsUser": 6}},
            {"router": 6, "prefill": 5, "decode": None},
        ),
    ],
)
def test_a_user_that_is_null_is_the_platforms_and_never_root(
    values: dict[str, Any], users: dict[str, int | None]
) -> None:
    manifests = render(values)
    for component, user in users.items():
        security = pod(manifests, component)["spec"]["securityContext"]
        assert security.get("runAsUser") == user
        assert ("runAsUser" in security) == (user is not None)
        assert security["runAsNonRoot"] is (user != 0)
    (test,) = of_kind(manifests, "Pod")
    assert test["spec"]["securityContext"].get("runAsUser") == users["router"]
