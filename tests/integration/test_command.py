"""The `pdserve` command as a person uses it: what it prints, and how it fails."""

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from pdserve_client.config import StackConfig
from pdserve_client.stack import Stack
from pdserve_common.model_files.model_folder import is_hub_id
from support.hub import FakeHub
from support.samples import sampled

# Of what has to happen, however busy the machine is.
DEADLINE_S = 300.0
PDSERVE = [sys.executable, "-m", "pdserve_client"]


@pytest.fixture(scope="module")
def model(make_served_model: Callable[..., Path]) -> str:
    return str(make_served_model("LlamaForCausalLM", max_position_embeddings=256))


def run(*args: str, cwd: Path, timeout_s: float = DEADLINE_S) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PDSERVE, *args], cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_run_answers_and_shows_where_the_time_went(model: str, tmp_path: Path) -> None:
    # Ready only when it hands over, which may come after both workers are.
    # With a seed that does not end the answer at once.
    flags = ["--require-disaggregation", "--prompt", "hi", "--max-tokens", "8", "--seed", "1"]
    for _ in range(10):
        result = run("run", "--model", model, *flags, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        # Where the machine is busy the second token may come with the first one.
        if "first ITL" in result.stdout:
            break
    for expected in (
        "time to first token (TTFT)",
        "prefill queue",
        "decode queue",
        "first to second token (first ITL)",
        "release acknowledged",
        "into decode's batch",
        "first decode step",
        "GB/s over",
        "under prefill",
        "determinism      exact",
        "mean ITL",
        "disaggregated: prefill-0 -> decode-0",
    ):
        assert expected in result.stdout
    assert "ready after" in result.stderr


class Up:
    """`pdserve up` as a process, on ports of its own choice, and what it prints."""

    def __init__(
        self, model: str, folder: Path, *flags: str, environment: Mapping[str, str] = os.environ
    ) -> None:
        ports = [f"--{name}-port=0" for name in ("grpc", "http", "metrics", "worker")]
        self._model = model if is_hub_id(model) else Path(model).name
        self._errors = folder / "errors"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*PDSERVE, "up", "--model", model, *ports, *flags],
                cwd=folder,
                env={
                    name: value for name, value in environment.items() if name != "UCX_NET_DEVICES"
                },
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        self.lines: list[str] = []
        while "Ctrl-C" not in (self.lines[-1] if self.lines else ""):
            self.lines.append(self.process.stdout.readline())
            assert self.lines[-1], f"pdserve up ended early: {self.errors()}"
        (http,) = [line.split()[1] for line in self.lines if line.startswith("HTTP")]
        self.url = http.removesuffix("/v1")

    def services(self) -> dict[str, psutil.Process]:
        """Return its children by name; before exec they are still called `pdserve up`."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                arguments = child.cmdline()
                if is_service(arguments):
                    ids = [flag for flag in arguments if flag.startswith("--engine-id=")]
                    found[ids[0].split("=")[1] if ids else "router"] = child
        return found

    def errors(self) -> str:
        return self._errors.read_text()

    def wait_for_error(self, text: str) -> None:
        until(self, lambda: text in self.errors())

    def generate(self) -> bool:
        """Say whether a request was answered."""
        body = json.dumps({"model": self._model, "prompt": "hi", "max_tokens": 2}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                return bool(response.status == 200)
        except OSError:
            return False


@pytest.fixture
def up(model: str, tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """up(*flags) -> a running `pdserve up`; what it has started ends with the test."""
    started: list[Up] = []

    def start(*flags: str) -> Up:
        started.append(Up(model, tmp_path, *flags))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def test_up_serves_under_the_name_it_is_told_until_it_is_asked_to_stop(
    up: Callable[..., Up],
) -> None:
    running = up("--served-model-name", "some/name")
    running.wait_until_ready()
    assert "model    some/name\n" in running.lines
    with urllib.request.urlopen(
        f"{running.url}/v1/models/some/name", timeout=DEADLINE_S
    ) as response:
        assert json.load(response)["id"] == "some/name"
    with urllib.request.urlopen(f"{running.url}/health", timeout=DEADLINE_S) as response:
        assert response.status == 200
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(DEADLINE_S) == 0


def test_up_downloads_a_model_once_and_serves_it_under_the_hubs_name(
    hub: FakeHub, tmp_path: Path
) -> None:
    running = Up(hub.model, tmp_path, environment=hub.environment)
    try:
        running.wait_until_ready()
        assert f"model    {hub.model}\n" in running.lines
        assert running.generate()
        with urllib.request.urlopen(f"{running.url}/v1/models", timeout=DEADLINE_S) as response:
            (model,) = json.load(response)["data"]
        assert model["id"] == hub.model
        downloads = [request for request in hub.requests if request.startswith("GET /some-owner")]
        assert sorted(set(downloads)) == sorted(downloads)
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(DEADLINE_S) == 0
    finally:
        running.process.kill()
        running.process.wait()


def test_ctrl_c_ends_a_download_at_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.holds_files = True
    running = Up(hub.model, tmp_path, environment=hub.environment)
    try:
        until(running, lambda: any("GET /some-owner" in request for request in hub.requests))
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(DEADLINE_S) == -signal.SIGINT
    finally:
        hub.holds_files = False
        running.process.kill()
        running.process.wait()


def test_a_model_of_the_hub_that_cannot_be_had_is_one_clear_line(
    hub: FakeHub, tmp_path: Path
) -> None:
    environment = {**hub.environment, "HF_HUB_OFFLINE": "1"}
    commands = [("pdserve_client", command) for command in ("up", "run")]
    commands += [(f"pdserve_{name}", "--metrics-port=0") for name in ("prefill", "decode")]
    commands += [("pdserve_router", "--decode=127.0.0.1:1")]
    flagged = [(*command, "--model", hub.model) for command in commands]
    for status, _, errors in run_at_once(flagged, tmp_path, environment):
        assert status == 1
        assert f"run `hf download {hub.model}` on a machine with network" in errors
        assert "Traceback" not in errors


def test_up_starts_services_again_that_end(up: Callable[..., Up]) -> None:
    """On the same ports, with the same flags, while the others go on."""
    running = up()
    running.wait_until_ready()
    for name in ("prefill-0", "router"):
        services = kill_one_and_see_it_again(running, name)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(DEADLINE_S) == 0
    assert not psutil.wait_procs(services.values(), timeout=0)[1]


def kill_one_and_see_it_again(running: Up, name: str) -> dict[str, psutil.Process]:
    """Return all services, the new one among them."""
    before = running.services()
    flags = before[name].cmdline()
    before[name].kill()
    running.wait_for_error(f"pdserve: {name} ended with SIGKILL")
    if name != "router":
        assert running.generate()
    until(running, lambda: running.services().get(name) not in (None, before[name]))
    after = running.services()
    new = after[name]
    assert new.cmdline() == flags
    assert {**after, name: before[name]} == before
    until(running, lambda: ports_of(flags) <= listening_ports(new))
    until(running, running.generate)
    return after


def until(running: Up, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert running.process.poll() is None, running.errors()
        assert time.monotonic() < deadline, running.errors()
        time.sleep(0.05)


def ports_of(flags: Sequence[str]) -> set[int]:
    pairs = (flag.partition("=") for flag in flags)
    return {
        int(value)
        for name, _, value in pairs
        if name.endswith(("--port", "-port")) and value.isdigit()
    }


def listening_ports(process: psutil.Process) -> set[int]:
    return {c.laddr.port for c in process.net_connections() if c.status == "LISTEN"}


@pytest.mark.parametrize("engine_process", sampled(["inproc", "subprocess"], "subprocess"))
def test_on_loopback_nobody_listens_anywhere_else(
    up: Callable[..., Up], engine_process: str
) -> None:
    # Ready when KV has travelled.
    running = up("--require-disaggregation", f"--engine-process={engine_process}")
    running.wait_until_ready()
    assert running.generate()
    for name, addresses in listening_addresses(running).items():
        assert addresses, name
        assert all(address.is_loopback for address in addresses), (name, addresses)


def test_on_an_address_workers_listen_on_its_device_only(up: Callable[..., Up]) -> None:
    host, device = an_address_of_this_machine()
    running = up("--require-disaggregation", f"--host={host}")
    running.wait_until_ready()
    assert running.generate()
    for name, addresses in listening_addresses(running).items():
        assert addresses, name
        assert addresses <= device, name


IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def an_address_of_this_machine() -> tuple[str, set[IpAddress]]:
    """Return one that is not loopback, and all of its device. Skips the test without one."""
    for name, addresses in psutil.net_if_addrs().items():
        found = [a.address for a in addresses if a.family == socket.AF_INET]
        if name != "lo" and found and psutil.net_if_stats()[name].isup:
            return found[0], {ipaddress.ip_address(address) for address in found}
    pytest.skip("this machine has no address but loopback's")


def listening_addresses(running: Up) -> dict[str, set[IpAddress]]:
    """Return where each service listens, its engine process included."""
    return {
        name: {
            mapped_or_itself(connection.laddr.ip)
            for process in (service, *service.children(recursive=True))
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
        }
        for name, service in running.services().items()
    }


def mapped_or_itself(text: str) -> IpAddress:
    """Return an address without the IPv6 form that gRPC gives to IPv4's."""
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


@pytest.mark.parametrize("signum", sampled([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_up_stops_between_an_end_and_the_new_start(
    up: Callable[..., Up], signum: signal.Signals
) -> None:
    running = up("--prefill=0")
    running.wait_until_ready()
    services = running.services()
    services["decode-0"].kill()
    running.wait_for_error("starting it again in")
    running.process.send_signal(signum)
    assert running.process.wait(DEADLINE_S) == 0
    assert not psutil.wait_procs(services.values(), timeout=0)[1]


def test_up_ends_with_its_service_if_others_restart_it(up: Callable[..., Up]) -> None:
    running = up("--prefill=0", "--no-restart")
    running.wait_until_ready()
    services = running.services()
    services["decode-0"].kill()
    assert running.process.wait(DEADLINE_S) == 1
    assert "pdserve: decode-0 ended with SIGKILL" in running.errors()
    assert not psutil.wait_procs(services.values(), timeout=0)[1]


def test_up_ends_if_a_service_cannot_start(up: Callable[..., Up]) -> None:
    running = up("--kv-cache-memory-mib=0")
    assert running.process.wait(DEADLINE_S) == 1
    errors = running.errors()
    assert "before it was ready: correct what its last lines say and start again" in errors
    assert "kv_cache_memory_mib" in errors.split("start again")[1]
    assert "starting it again" not in errors


def test_a_second_signal_ends_what_a_drain_waits_for(up: Callable[..., Up]) -> None:
    running = up("--drain-timeout-s=600")
    running.wait_until_ready()
    services = running.services()
    services["router"].suspend()  # which keeps it from draining
    running.process.send_signal(signal.SIGINT)
    running.wait_for_error("stopping")
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(DEADLINE_S) == 0
    assert not psutil.wait_procs(services.values(), timeout=0)[1]


def test_a_killed_up_leaves_no_process_behind(up: Callable[..., Up]) -> None:
    running = up()
    deadline = time.monotonic() + DEADLINE_S
    while len(children := running.services()) < 3:
        assert time.monotonic() < deadline, children
        time.sleep(0.05)
    running.process.kill()
    running.process.wait()
    _, alive = psutil.wait_procs(children.values(), timeout=DEADLINE_S)
    assert not alive


def is_service(arguments: Sequence[str]) -> bool:
    return not {"pdserve_prefill", "pdserve_decode", "pdserve_router"}.isdisjoint(arguments[:3])


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    result = run("up", "--model", "nowhere", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == (
        "pdserve: no model at 'nowhere': it has no config.json; pass --model DIR, or OWNER/NAME on "
        "the Hugging Face hub\n"
    )


def test_a_port_in_use_is_one_clear_line(model: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("up", "--model", model, f"--http-port={port}", cwd=tmp_path)
    assert result.returncode == 1
    assert f"cannot use 127.0.0.1:{port}: Address already in use" in result.stderr
    assert "pass --http-port" in result.stderr


def test_a_stack_takes_no_port_twice(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.sample", lambda ports, count: list(ports)[:count])
    config = StackConfig(
        model=model, grpc_port=0, http_port=0, worker_port=0, metrics_port=0, log_dir=str(tmp_path)
    )
    stack = Stack(config)
    ports = [port for process in stack.processes for port in (process.port, process.metrics_port)]
    ports.append(stack.http_port)
    assert len(ports) == len(set(ports)) == 7


def test_engines_run_where_a_stack_is_told(model: str, tmp_path: Path) -> None:
    ports = dict.fromkeys(("grpc_port", "http_port", "metrics_port", "worker_port"), 0)
    config = StackConfig(model=model, engine_process="subprocess", log_dir=str(tmp_path), **ports)  # type: ignore[arg-type]
    for worker in Stack(config).workers:
        assert "--engine-process=subprocess" in worker.flags


def test_no_router_is_one_clear_line(tmp_path: Path) -> None:
    result = run("generate", "--address", "127.0.0.1:9", "--timeout-s", "30", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("pdserve: UNAVAILABLE")


def test_a_service_with_a_bad_setting_says_what_to_do(tmp_path: Path) -> None:
    services = ("pdserve_prefill", "pdserve_decode", "pdserve_router")
    flags = ("--model", "nowhere", "--metrics-port", "0")
    for status, _, errors in run_at_once([(service, *flags) for service in services], tmp_path):
        assert status in (1, 2)
        assert "nowhere" in errors
        assert "Traceback" not in errors


def test_help_is_complete(tmp_path: Path) -> None:
    services = ("pdserve_prefill", "pdserve_decode", "pdserve_router")
    commands = [("pdserve_client", *verb) for verb in [(), ("up",), ("run",), ("bench",)]]
    commands += [(service,) for service in services]
    for status, text, _ in run_at_once([(*each, "--help") for each in commands], tmp_path):
        assert status == 0
        assert "usage:" in text


def run_at_once(
    commands: Sequence[Sequence[str]], cwd: Path, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[int, str, str]]:
    """Run modules with their arguments; yield their exit statuses, and what they print."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=cwd,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    for process in processes:
        output, errors = process.communicate(timeout=DEADLINE_S)
        yield process.returncode, output, errors
