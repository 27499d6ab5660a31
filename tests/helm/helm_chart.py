"""Renders the chart with Helm's own engine, and finds things in what comes out."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "helm"
CPU_VALUES: dict[str, Any] = yaml.safe_load((CHART / "values-cpu.yaml").read_text())
# In C where PyYAML has it, which is fifteen times as quick.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Manifest = dict[str, Any]

EVERYTHING: dict[str, Any] = {
    "fullnameOverride": "a-name-that-is-longer-than-what-fits-before-a-revision",
    "revision": "2",
    "imagePullSecrets": [{"name": "registry"}],
    "model": {
        "source": "pvc",
        "path": "/models/qwen",
        "servedName": "qwen",
        "pvc": {"claimName": "models", "subPath": "llms"},
    },
    "router": {
        "config": {
            "require_disaggregation": True,
            "disaggregation": True,
            "max_body_bytes": 8388608,
            "drain_timeout_s": 90.5,
            "routing_policy": "power_of_two",
        },
        "service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}},
        "podAnnotations": {"example.com/a": "b"},
        "podLabels": {"team": "serving"},
        "env": [{"name": "TZ", "value": "UTC"}],
        "priorityClassName": "high",
        "affinity": {"podAntiAffinity": {}},
    },
    "worker": {
        "config": {"require_transport": "rdma", "enable_chunked_prefill": False},
        "gpu": {"count": 1, "resource": "example.com/gpu"},
        "rdma": {"resource": "rdma/hca", "count": 2},
        "ipcLock": True,
        "runAsUser": 0,
        "shmSize": "8Gi",
        "kvOffload": {"diskBytes": 500_000_000_000},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"},
    },
    "prefill": {"config": {"max_num_batched_tokens": 8192}, "autoscaling": {"maxReplicas": 16}},
    "decode": {"config": {"max_num_seqs": 256}, "preStopSeconds": 3},
    "autoscaling": {"kind": "keda", "prometheusAddress": "http://prometheus.monitoring:9090"},
    "tls": {
        "source": "certManager",
        "certManager": {
            "issuer": {"name": "private", "kind": "ClusterIssuer"},
            "dnsNames": ["llm.example.com"],
        },
    },
    "apiKeys": {"secretName": "keys", "testSecretKey": "probe"},
    "tracing": {"otlpTracesEndpoint": "https://otel-collector.monitoring:4317"},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"clients": "yes"}}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"monitoring": "yes"}}}],
        "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
    },
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboards": {"annotations": {"grafana_folder": "pdserve"}},
}
MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "cpu": CPU_VALUES,
    "everything": EVERYTHING,
    "hub_and_hpa": {
        "model": {
            "source": "hub",
            "path": "/models/qwen",
            "hub": {"repository": "Qwen/Qwen3-8B", "tokenSecret": "hub"},
        },
        "autoscaling": {"kind": "hpa"},
    },
    "image": {
        "model": {"source": "image", "path": "/models", "image": {"reference": "registry/qwen:1"}}
    },
    "tls_from_a_secret": {
        **CPU_VALUES,
        "tls": {"source": "secret", "secretName": "certificates", "serverName": "llm.internal"},
    },
    "users_of_the_platform": {
        "router": {"runAsUser": None},
        "worker": {"runAsUser": None},
        "tls": {"source": "secret", "secretName": "certificates"},
    },
    "decode_alone_scales": {
        "prefill": {"replicas": 0},
        "worker": {"autoscaling": {"maxPeers": 1}},
        "autoscaling": {"kind": "keda", "prometheusAddress": "http://prometheus.monitoring:9090"},
    },
    "decode_alone_without_extras": {
        "prefill": {"replicas": 0},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False},
        "dashboards": {"enabled": False},
        "worker": {"podDisruptionBudget": {"enabled": False}, "topologySpread": []},
    },
}


def helm() -> Any:
    """Return helm_python. Go starts threads when that is imported, and does not survive a fork: so
    nobody does before the processes of tests are forked.
    """
    return importlib.import_module("helm_python")


def render(
    values: Mapping[str, Any] | None = None, *, chart: Path = CHART, name: str = "demo"
) -> list[Manifest]:
    """Return all manifests, those of `helm test` as well. Raises helm_python.HelmError."""
    texts = helm().Chart.load(str(chart)).render(dict(values or {}), name=name, namespace="serving")
    documents = [
        document
        for path, text in sorted(texts.items())
        if path.endswith(".yaml")
        for document in yaml.load_all(text, Loader=LOADER)
    ]
    return [document for document in documents if document is not None]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def component_of(manifest: Manifest) -> str:
    return str(manifest["metadata"]["labels"]["app.kubernetes.io/component"])


def find(manifests: list[Manifest], kind: str, component: str) -> Manifest:
    """Return the only one of its kind of a component."""
    (found,) = (m for m in of_kind(manifests, kind) if component_of(m) == component)
    return found


def pod_specs(manifests: list[Manifest]) -> Iterator[dict[str, Any]]:
    for manifest in of_kind(manifests, "Deployment"):
        yield manifest["spec"]["template"]["spec"]
    for manifest in of_kind(manifests, "Pod"):
        yield manifest["spec"]


def container(deployment: Manifest) -> dict[str, Any]:
    """Return a Deployment's only container."""
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)
