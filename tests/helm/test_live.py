"""The processes as the CPU profile starts them, probed as kubelet does it, without Kubernetes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helm_chart import CPU_VALUES, ROOT, Manifest, container, find, of_kind, render

pytestmark = pytest.mark.slow

# What Pods have addresses of their own for.
ADDRESSES = {"prefill": "127.0.0.52", "decode": "127.0.0.53", "router": "127.0.0.51"}
BIN = Path(sys.executable).parent
START_S = 90.0


class Pod(NamedTuple):
    """A component's container as a process."""

    process: "subprocess.Popen[bytes]"
    container: dict[str, Any]
    grace_s: int
    address: str

    def probe(self, name: str) -> bool:
        grpc_probe = self.container[f"{name}Probe"]["grpc"]
        check = health_pb2.HealthCheckRequest(service=grpc_probe.get("service", ""))
        with grpc.insecure_channel(f"{self.address}:{grpc_probe['port']}") as channel:
            try:
                status = health_pb2_grpc.HealthStub(channel).Check(check, timeout=5).status
            except grpc.RpcError:
                return False
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + START_S
        while not self.probe(name):
            assert self.process.poll() is None, "it has ended"
            assert time.monotonic() < deadline, f"no {name} within {START_S:g} s"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(CPU_VALUES)


@pytest.fixture
def pods(manifests: list[Manifest], tmp_path: Path) -> Iterator[dict[str, Pod]]:
    started: dict[str, Pod] = {}
    try:
        for component, address in ADDRESSES.items():
            started[component] = start(manifests, component, address, tmp_path)
        yield started
    finally:
        for pod in started.values():
            pod.process.kill()
            pod.process.wait(timeout=10)


def start(manifests: list[Manifest], component: str, address: str, home: Path) -> Pod:
    deployment = find(manifests, "Deployment", component)
    only = container(deployment)
    (command,) = only["command"]
    args = [local(arg, manifests, own=address) for arg in only["args"]]
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


def local(arg: str, manifests: list[Manifest], *, own: str) -> str:
    """Put addresses for names of Services, and the bundled model's folder here for there."""
    for service in of_kind(manifests, "Service"):
        component = service["metadata"]["labels"]["app.kubernetes.io/component"]
        arg = arg.replace(f"{service['metadata']['name']}:", f"{ADDRESSES[component]}:")
    arg = arg.replace("/models/pdserve-tiny", str(ROOT / "models" / "pdserve-tiny"))
    return arg.replace("0.0.0.0", own).replace("$(POD_NAME)", "router-0")


def test_the_cpu_profile_starts_generates_and_drains(
    pods: dict[str, Pod], manifests: list[Manifest]
) -> None:
    router = pods["router"]
    router.wait_for("startup")
    for name in ("prefill", "decode"):
        pods[name].wait_for("startup")
        pods[name].wait_for("readiness")
    router.wait_for("readiness")
    assert all(pod.probe("liveness") for pod in pods.values())
    (hook,) = (manifest["spec"]["containers"][0] for manifest in of_kind(manifests, "Pod"))
    args = [local(arg, manifests, own="") for arg in hook["args"]]
    done = subprocess.run(
        [BIN / hook["command"][0], *hook["command"][1:], *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "path             disaggregated" in done.stdout
    # Without workers a router is not ready, and not to be restarted.
    for name in ("prefill", "decode"):
        stop(pods[name])
    deadline = time.monotonic() + 10
    while router.probe("readiness"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert router.probe("liveness")
    stop(router)


def stop(pod: Pod) -> None:
    pod.process.send_signal(signal.SIGTERM)
    assert pod.process.wait(timeout=pod.grace_s) == 0
