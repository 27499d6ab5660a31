"""What the chart makes of a release that runs, whose objects it looks up in the cluster."""

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_chart import CHART, helm

# Of the Deployments that the cluster has.
REPLICAS = {"demo-pdserve-prefill": 0, "demo-pdserve-decode": 4}
APPS = "/apis/apps/v1"
DEPLOYMENT = {"name": "deployments", "kind": "Deployment", "namespaced": True, "verbs": ["get"]}


class ApiServer(http.server.BaseHTTPRequestHandler):
    """As much of Kubernetes' API as `lookup` asks for."""

    def do_GET(self) -> None:
        answer = json.dumps(self._answer()).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _answer(self) -> dict[str, object]:
        path = self.path.partition("?")[0]
        if path == APPS:
            return {"kind": "APIResourceList", "groupVersion": "apps/v1", "resources": [DEPLOYMENT]}
        name = path.removeprefix(f"{APPS}/namespaces/serving/deployments/")
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "namespace": "serving"},
            "spec": {"replicas": REPLICAS[name]},
        }

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Access to a cluster with REPLICAS."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ApiServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with helm().Config(namespace="serving", kubeconfig_content=kubeconfig(url)) as config:
            yield config
        server.shutdown()


def kubeconfig(url: str) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "demo",
            "contexts": [{"name": "demo", "context": {"cluster": "demo", "user": "demo"}}],
            "users": [{"name": "demo", "user": {}}],
            "clusters": [{"name": "demo", "cluster": {"server": url}}],
        }
    )


def test_autoscaling_starts_from_the_pods_that_there_are(cluster: Any) -> None:
    values = {"autoscaling": {"kind": "hpa"}, "prefill": {"replicas": 2}}
    texts = cluster.render(helm().Chart.load(str(CHART)), values, name="demo", namespace="serving")
    (workers,) = (text for path, text in texts.items() if path.endswith("/workers.yaml"))
    replicas = {
        manifest["metadata"]["name"]: manifest["spec"].get("replicas")
        for manifest in yaml.safe_load_all(workers)
        if manifest is not None and manifest["kind"] == "Deployment"
    }
    # A HorizontalPodAutoscaler leaves a Deployment of 0 alone: that one starts anew.
    assert replicas == {"demo-pdserve-prefill": None, "demo-pdserve-decode": 4}
