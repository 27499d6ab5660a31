"""The processes as the CPU profile starts them, probed as kubelet does it, without Kubernetes; in
plain text, and with TLS and API keys.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helm_chart import CPU_VALUES, ROOT, Manifest, container, find, of_kind, render

from support.samples import sampled

# What Pods have addresses of their own for.
ADDRESSES = {"prefill": "127.0.0.52", "decode": "127.0.0.53", "router": "127.0.0.51"}
BIN = Path(sys.executable).parent
START_S = 90.0
API_KEY = "key-of-the-test-hook"
CHOICES = {
    "plain": CPU_VALUES,
    "guarded": {
        **CPU_VALUES,
        "tls": {"source": "secret", "secretName": "certificates"},
        "apiKeys": {"secretName": "keys"},
    },
}


class Pod(NamedTuple):
    """A component's container as a process."""

    process: "subprocess.Popen[bytes]"
    container: dict[str, Any]
    grace_s: int
    address: str

    def probe(self, name: str) -> bool:
        probe = self.container[f"{name}Probe"]
        return self._get(probe["httpGet"]) if "httpGet" in probe else self._check(probe["grpc"])

    def _get(self, probe: dict[str, Any]) -> bool:
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        url = f"http://{self.address}:{ports[probe['port']]}{probe['path']}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _check(self, grpc_probe: dict[str, Any]) -> bool:
        check = health_pb2.HealthCheckRequest(service=grpc_probe.get("service", ""))
        with grpc.insecure_channel(f"{self.address}:{grpc_probe['port']}") as channel:
            try:
                status = health_pb2_grpc.HealthStub(channel).Check(check, timeout=30).status
            except grpc.RpcError:
                return False
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + START_S
        while not self.probe(name):
            assert self.process.poll() is None, "it has ended"
            assert time.monotonic() < deadline, f"no {name} within {START_S:g} s"
            time.sleep(0.1)


@pytest.fixture(params=sampled(CHOICES, "guarded"))
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(CHOICES[request.param])


@pytest.fixture
def secrets(tmp_path: Path, make_certificate_authority: Callable[[], Any]) -> Path:
    """A folder with what is mounted below /etc/pdserve."""
    authority = make_certificate_authority()
    for name in ("tls", "api-keys"):
        (tmp_path / name).mkdir()
    # The Pods' addresses are not in it: the name that the chart has them look for is.
    cert, key = authority.issue("pods", "DNS:demo-pdserve.serving.svc")
    for source, name in ((authority.ca_file, "ca.crt"), (cert, "tls.crt"), (key, "tls.key")):
        shutil.copy(source, tmp_path / "tls" / name)
    (tmp_path / "api-keys" / "keys").write_text(f"hook:{API_KEY}\n")
    return tmp_path


@pytest.fixture
def pods(manifests: list[Manifest], secrets: Path) -> Iterator[dict[str, Pod]]:
    started: dict[str, Pod] = {}
    try:
        for component, address in ADDRESSES.items():
            started[component] = start(manifests, component, address, secrets)
        yield started
    finally:
        for pod in started.values():
            pod.process.kill()
            pod.process.wait(timeout=60)


def start(manifests: list[Manifest], component: str, address: str, home: Path) -> Pod:
    deployment = find(manifests, "Deployment", component)
    only = container(deployment)
    (command,) = only["command"]
    args = [local(arg, manifests, own=address, secrets=home) for arg in only["args"]]
    environ = {**os.environ, "PDSERVE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [BIN / command, *args],
        env=environ,
        cwd=home,
        stdout=(home / component).open("wb"),
        stderr=subprocess.STDOUT,
    )
    spec = deployment["spec"]["template"]["spec"]
    return Pod(process, only, spec["terminationGracePeriodSeconds"], address)


def local(arg: str, manifests: list[Manifest], *, own: str, secrets: Path) -> str:
    """Put addresses for names of Services, and folders here for folders there."""
    for service in of_kind(manifests, "Service"):
        component = service["metadata"]["labels"]["app.kubernetes.io/component"]
        arg = arg.replace(f"{service['metadata']['name']}:", f"{ADDRESSES[component]}:")
    arg = arg.replace("/models/pdserve-tiny", str(ROOT / "models" / "pdserve-tiny"))
    arg = arg.replace("/etc/pdserve", str(secrets))
    return arg.replace("0.0.0.0", own).replace("$(POD_NAME)", "router-0")


def test_the_cpu_profile_starts_generates_and_drains(
    pods: dict[str, Pod], manifests: list[Manifest], secrets: Path
) -> None:
    router = pods["router"]
    router.wait_for("startup")
    for name in ("prefill", "decode"):
        pods[name].wait_for("startup")
        pods[name].wait_for("readiness")
    router.wait_for("readiness")
    assert all(pod.probe("liveness") for pod in pods.values())
    (hook,) = (manifest["spec"]["containers"][0] for manifest in of_kind(manifests, "Pod"))
    args = [local(arg, manifests, own="", secrets=secrets) for arg in hook["args"]]
    done = subprocess.run(
        [BIN / hook["command"][0], *hook["command"][1:], *args],
        env={**os.environ, **{each["name"]: API_KEY for each in hook.get("env", ())}},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "path             disaggregated" in done.stdout
    # Without workers a router is not ready, and not to be restarted.
    for name in ("prefill", "decode"):
        stop(pods[name])
    deadline = time.monotonic() + START_S
    while router.probe("readiness"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert router.probe("liveness")
    stop(router)


def stop(pod: Pod) -> None:
    pod.process.send_signal(signal.SIGTERM)
    assert pod.process.wait(timeout=pod.grace_s) == 0
