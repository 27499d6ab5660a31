"""What the chart makes is valid for Kubernetes, and its parts fit together."""

import functools
import re
from typing import Any

import kubernetes_validate
import pytest
from helm_chart import (
    CHART,
    MATRIX,
    ROOT,
    Manifest,
    component_of,
    container,
    find,
    helm,
    of_kind,
    pod_specs,
)

from pdserve_client.stack import END_MARGIN_S
from pdserve_common.config import ENV_PREFIX, parse_config
from pdserve_common.rpc.channels import LIVENESS_SERVICE
from pdserve_decode.config import DecodeConfig
from pdserve_prefill.config import PrefillConfig
from pdserve_router.config import RouterConfig
from pdserve_router.workers.discovery import DnsSource

# Else it reads megabytes for each manifest.
kubernetes_validate.utils.schema_contents = functools.cache(
    kubernetes_validate.utils.schema_contents
)
KUBERNETES_VERSIONS = ("1.30", "1.33", "1.37")
# test_operators.py checks these.
CUSTOM = {"Certificate", "PodMonitor", "PrometheusRule", "ScaledObject"}
CONFIGS: dict[str, type[Any]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
# What the downward API would say.
REQUESTED_CPUS = "4"
# Kubernetes' for names that become labels or host names.
MAX_NAME = 63
# CoreDNS' default, for names that are missing as well.
DNS_CACHE_S = 30
WARNING = 2


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Labels and spec of each component's Pods."""
    return {component_of(m): m["spec"]["template"] for m in of_kind(manifests, "Deployment")}


def selected(manifests: list[Manifest], labels: dict[str, str]) -> set[str]:
    """Components whose Pods have these labels."""
    return {
        component
        for component, pod in pods(manifests).items()
        if labels.items() <= pod["metadata"]["labels"].items()
    }


def port_names(pod: Manifest) -> set[str]:
    return {port["name"] for each in pod["spec"]["containers"] for port in each["ports"]}


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_helm_finds_nothing_to_warn_of(values: dict[str, Any]) -> None:
    found = helm().lint(str(CHART), values, strict=True)["messages"]
    assert not [message for message in found if message["severity"] >= WARNING]


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_kubernetes_knows_every_field(manifests: list[Manifest], version: str) -> None:
    volumes = [v for spec in pod_specs(manifests) for v in spec.get("volumes", ())]
    if version == "1.30" and any("image" in volume for volume in volumes):
        pytest.skip("image volumes came later")
    for manifest in manifests:
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_kinds_are_known_and_names_unique_and_short(manifests: list[Manifest]) -> None:
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(names) == len(set(names))
    assert all(len(name) <= MAX_NAME for _, name in names)
    assert all(m["metadata"]["namespace"] == "serving" for m in manifests)
    # None with rights: nothing here talks to Kubernetes' API.
    assert not {kind for kind, _ in names if "Role" in kind}


def test_selectors_find_their_own_pods(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        kind, spec = manifest["kind"], manifest.get("spec", {})
        if kind in ("Deployment", "PodDisruptionBudget"):
            labels = spec["selector"]["matchLabels"]
        elif kind == "Service":
            labels = spec["selector"]
        elif kind == "NetworkPolicy":
            labels = spec["podSelector"]["matchLabels"]
        elif kind == "PodMonitor":
            assert selected(manifests, spec["selector"]["matchLabels"]) == set(CONFIGS)
            continue
        else:
            continue
        assert selected(manifests, labels) == {component_of(manifest)}, manifest["metadata"]["name"]


def test_ports_that_are_named_are_there(manifests: list[Manifest]) -> None:
    by_component = pods(manifests)
    for service in of_kind(manifests, "Service"):
        targets = {port["targetPort"] for port in service["spec"]["ports"]}
        assert targets <= port_names(by_component[component_of(service)])
    for monitor in of_kind(manifests, "PodMonitor"):
        ports = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        assert all(ports <= port_names(pod) for pod in by_component.values())


def test_policies_open_ports_by_number(manifests: list[Manifest]) -> None:
    """All that the Pods have to those who come, to those who are asked, and DNS."""
    numbers = {
        component: {
            port["containerPort"] for each in pod["spec"]["containers"] for port in each["ports"]
        }
        for component, pod in pods(manifests).items()
    }
    policies = {component_of(policy): policy for policy in of_kind(manifests, "NetworkPolicy")}
    for component, policy in policies.items():
        opened = {p["port"] for r in policy["spec"]["ingress"] for p in r.get("ports", ())}
        assert opened == numbers[component]
        dns = policy["spec"]["egress"][0]["ports"]
        expected = {(port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")}
        assert {(port["port"], port["protocol"]) for port in dns} == expected
    if "router" in policies:
        (to_workers,) = (r for r in policies["router"]["spec"]["egress"] if "podSelector" in str(r))
        (port,) = to_workers["ports"]
        grpc = {
            p["containerPort"]
            for role in ("prefill", "decode")
            for each in pods(manifests)[role]["spec"]["containers"]
            for p in each["ports"]
            if p["name"] == "grpc"
        }
        assert grpc == {port["port"]}


def test_only_pods_that_run_are_scraped(manifests: list[Manifest]) -> None:
    for monitor in of_kind(manifests, "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        phase = {"sourceLabels": ["__meta_kubernetes_pod_phase"], "regex": "Running"}
        assert phase | {"action": "keep"} in endpoint["relabelings"]


def config_of(component: str, process: dict[str, Any]) -> Any:
    """What a component's process makes of its flags and environment."""
    model = f"--model={ROOT / 'models' / 'pdserve-tiny'}"
    args = [model if arg.startswith("--model=") else arg for arg in process["args"]]
    environ = {
        each["name"]: each.get("value", REQUESTED_CPUS)
        for each in process["env"]
        if each["name"].startswith(ENV_PREFIX)
    }
    return parse_config(CONFIGS[component], args, prog=component, environ=environ)


@pytest.mark.parametrize("component", CONFIGS)
def test_processes_accept_their_flags_and_listen_where_they_are_looked_for(
    manifests: list[Manifest], component: str
) -> None:
    process = container(find(manifests, "Deployment", component))
    assert process["command"] == [f"pdserve-{component}"]
    config = config_of(component, process)
    expected = {"metrics": config.metrics_port}
    if component == "router":
        expected |= {"grpc": config.grpc_port, "http": config.http_port}
    else:
        expected |= {"grpc": config.port}
        assert config.num_threads == int(REQUESTED_CPUS)
        (cpus,) = (each for each in process["env"] if each["name"] == "PDSERVE_NUM_THREADS")
        source = cpus["valueFrom"]["resourceFieldRef"]
        assert source == {"containerName": component, "resource": "requests.cpu"}
    assert {port["name"]: port["containerPort"] for port in process["ports"]} == expected
    assert config.host == "0.0.0.0"


@pytest.mark.parametrize("component", CONFIGS)
def test_probes_ask_the_health_services_that_there_are(
    manifests: list[Manifest], component: str
) -> None:
    process = container(find(manifests, "Deployment", component))
    probes = [process[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    # Neither a router without workers nor a paused worker is to be restarted.
    if config_of(component, process).tls_cert_file is None:
        ports = {port["name"]: port["containerPort"] for port in process["ports"]}
        assert {probe["grpc"]["port"] for probe in probes} == {ports["grpc"]}
        services = [probe["grpc"].get("service", "") for probe in probes]
        assert services == [LIVENESS_SERVICE, "", LIVENESS_SERVICE]
    else:
        assert {probe["httpGet"]["port"] for probe in probes} == {"metrics"}
        paths = [probe["httpGet"]["path"] for probe in probes]
        assert paths == ["/live", "/ready", "/live"]


@pytest.mark.parametrize("component", CONFIGS)
def test_pods_are_not_killed_while_they_drain(manifests: list[Manifest], component: str) -> None:
    deployment = find(manifests, "Deployment", component)
    process = container(deployment)
    sleep_s = process.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    drain_s = config_of(component, process).drain_timeout_s
    grace_s = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= sleep_s + drain_s + END_MARGIN_S
    if component == "router":
        assert sleep_s > 0, "load balancers send to it for a while"


def test_old_routers_are_gone_before_their_decode_workers_are(manifests: list[Manifest]) -> None:
    """After a change of the revision neither finds the other's successors: time keeps order."""
    router, decode = (find(manifests, "Deployment", each) for each in ("router", "decode"))
    # New routers all wait already when the first new decode worker gets ready.
    assert router["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": "100%", "maxUnavailable": 0}
    process = container(router)
    taking_over_s = (
        DNS_CACHE_S
        + DnsSource.interval_s
        + process["readinessProbe"]["periodSeconds"]
        + router["spec"]["minReadySeconds"]
        + process["lifecycle"]["preStop"]["sleep"]["seconds"]
    )
    assert decode["spec"]["minReadySeconds"] > taking_over_s


def test_routers_look_for_workers_where_services_list_them(manifests: list[Manifest]) -> None:
    args = container(find(manifests, "Deployment", "router"))["args"]
    matches = (re.fullmatch(r"--(\w+)=dns://(.+)", arg) for arg in args)
    sources = {match[1]: match[2] for match in matches if match}
    assert "decode" in sources
    for role, source in sources.items():
        service = find(manifests, "Service", role)
        (port,) = service["spec"]["ports"]
        assert source == f"{service['metadata']['name']}:{port['port']}"
        assert service["spec"]["clusterIP"] == "None"
        worker = container(find(manifests, "Deployment", role))
        ports = {each["name"]: each["containerPort"] for each in worker["ports"]}
        assert ports["grpc"] == port["port"], "DNS gives addresses, no ports"


def test_routers_answer_to_the_names_of_their_service(manifests: list[Manifest]) -> None:
    service = find(manifests, "Service", "router")["metadata"]
    name, namespace = service["name"], service["namespace"]
    hosts = config_of("router", container(find(manifests, "Deployment", "router"))).allowed_hosts
    suffixes = ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local")
    assert {"localhost", *(name + suffix for suffix in suffixes)} <= set(hosts)


def test_pods_have_no_rights_and_no_writable_root(manifests: list[Manifest]) -> None:
    for spec in pod_specs(manifests):
        assert spec["automountServiceAccountToken"] is False
        # A Service named pdserve would set PDSERVE_PORT.
        assert spec["enableServiceLinks"] is False
        security = spec["securityContext"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security["runAsNonRoot"] is (security.get("runAsUser") != 0)
        ids = {security.get(name) for name in ("runAsUser", "runAsGroup", "fsGroup")}
        assert len(ids) == 1, "files of Secrets are their group's"
        for each in (*spec["containers"], *spec.get("initContainers", ())):
            own = each["securityContext"]
            assert own["readOnlyRootFilesystem"] is True
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"]["drop"] == ["ALL"]


def test_volumes_that_are_mounted_are_there(manifests: list[Manifest]) -> None:
    for spec in pod_specs(manifests):
        volumes = [volume["name"] for volume in spec.get("volumes", ())]
        assert len(volumes) == len(set(volumes))
        for each in (*spec["containers"], *spec.get("initContainers", ())):
            mounts = each.get("volumeMounts", ())
            assert {mount["name"] for mount in mounts} <= set(volumes)
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts)


def test_what_scales_a_pool_is_there_and_sets_its_replicas_alone(manifests: list[Manifest]) -> None:
    scalers = of_kind(manifests, "HorizontalPodAutoscaler") + of_kind(manifests, "ScaledObject")
    scaled = {scaler["spec"]["scaleTargetRef"]["name"] for scaler in scalers}
    deployments = {m["metadata"]["name"]: m["spec"] for m in of_kind(manifests, "Deployment")}
    assert scaled <= set(deployments)
    for name, spec in deployments.items():
        assert ("replicas" in spec) is (name not in scaled)
    assert not [scaler for scaler in scalers if component_of(scaler) not in pools_in_use(manifests)]


def pools_in_use(manifests: list[Manifest]) -> set[str]:
    """Roles whose workers routers look for."""
    args = container(find(manifests, "Deployment", "router"))["args"]
    return {match[1] for arg in args if (match := re.match("--(prefill|decode)=", arg))}


def test_workers_that_no_router_looks_for_are_none(manifests: list[Manifest]) -> None:
    for role in {"prefill", "decode"} - pools_in_use(manifests):
        assert find(manifests, "Deployment", role)["spec"]["replicas"] == 0


def test_routers_require_the_transport_that_both_pools_require(manifests: list[Manifest]) -> None:
    configs = {
        component: config_of(component, container(find(manifests, "Deployment", component)))
        for component in CONFIGS
    }
    of_workers = {configs[role].require_transport for role in ("prefill", "decode")}
    assert {configs["router"].require_transport} == of_workers


def test_the_test_hook_generates_through_the_router(manifests: list[Manifest]) -> None:
    (pod,) = of_kind(manifests, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (process,) = pod["spec"]["containers"]
    assert process["command"] == ["pdserve", "generate"]
    (address,) = (a.removeprefix("--address=") for a in process["args"] if "--address=" in a)
    service = find(manifests, "Service", "router")
    assert address == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"


def test_routers_let_the_test_hook_in_whoever_the_clients_are(manifests: list[Manifest]) -> None:
    (pod,) = of_kind(manifests, "Pod")
    labels = pod["metadata"]["labels"].items()
    for policy in of_kind(manifests, "NetworkPolicy"):
        if component_of(policy) == "router":
            (rule,) = (r for r in policy["spec"]["ingress"] if {"port": 50051} in r["ports"])
            own = [peer["podSelector"] for peer in rule.get("from", ()) if "podSelector" in peer]
            assert "from" not in rule or any(each["matchLabels"].items() <= labels for each in own)


def test_all_show_one_certificate_and_look_for_the_name_in_it(manifests: list[Manifest]) -> None:
    configs = [
        config_of(component, container(find(manifests, "Deployment", component)))
        for component in CONFIGS
    ]
    (settings,) = {(c.tls_cert_file, c.tls_key_file, c.tls_ca_file) for c in configs}
    (name,) = {config.tls_server_name for config in configs}
    if name is None:
        assert set(settings) == {None}
        assert not of_kind(manifests, "Certificate")
        return
    for manifest in of_kind(manifests, "Deployment"):
        mounts = {mount["name"]: mount for mount in container(manifest)["volumeMounts"]}
        assert "subPath" not in mounts["tls"], "it would not follow the Secret"
        paths = [f"{mounts['tls']['mountPath']}/{key}" for key in ("tls.crt", "tls.key", "ca.crt")]
        assert list(settings) == paths
    secrets = {
        volume["secret"]["secretName"]
        for spec in pod_specs(manifests)
        for volume in spec["volumes"]
        if volume["name"] == "tls"
    }
    for certificate in of_kind(manifests, "Certificate"):
        assert secrets == {certificate["spec"]["secretName"]}
        assert name in certificate["spec"]["dnsNames"]
        assert {"server auth", "client auth"} <= set(certificate["spec"]["usages"])


def test_the_test_hook_shows_what_routers_ask_for(manifests: list[Manifest]) -> None:
    config = config_of("router", container(find(manifests, "Deployment", "router")))
    (pod,) = of_kind(manifests, "Pod")
    (process,) = pod["spec"]["containers"]
    shown = {each["name"] for each in process.get("env", ())}
    assert shown == ({"PDSERVE_API_KEY"} if config.api_keys_file else set())
    flags = dict(arg[2:].split("=", 1) for arg in process["args"])
    assert flags.get("tls-server-name") == config.tls_server_name
    assert flags.get("tls-ca-file") == config.tls_ca_file
    # The key of the certificate is none of a client's business.
    for volume in pod["spec"].get("volumes", ()):
        assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
