"""The `pdserve` command as a person uses it: what it prints, and how it fails."""

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from pdserve_client.config import StackConfig
from pdserve_client.stack import Stack

pytestmark = pytest.mark.slow

PDSERVE = [sys.executable, "-m", "pdserve_client"]


@pytest.fixture(scope="module")
def model(make_served_model: Callable[..., Path]) -> str:
    return str(make_served_model("LlamaForCausalLM", max_position_embeddings=256))


def run(*args: str, cwd: Path, timeout_s: float = 180) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PDSERVE, *args], cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_run_answers_and_shows_where_the_time_went(model: str, tmp_path: Path) -> None:
    # Ready only when it hands over, which may come after both workers are.
    flags = ["--require-disaggregation", "--prompt", "hi", "--max-tokens", "8"]
    result = run("run", "--model", model, *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for expected in (
        "time to first token (TTFT)",
        "prefill queue",
        "waiting for D's blocks",
        "first to second token (first ITL)",
        "waiting for P's word",
        "into D's batch",
        "first decode step",
        "GB/s over",
        "under prefill",
        "determinism      exact",
        "mean ITL",
        "disaggregated: prefill-0 -> decode-0",
    ):
        assert expected in result.stdout
    assert "ready after" in result.stderr


def test_up_serves_until_it_is_asked_to_stop(model: str, tmp_path: Path) -> None:
    flags = ["--grpc-port=0", "--http-port=0", "--metrics-port=0", "--worker-port=0"]
    process = subprocess.Popen(
        [*PDSERVE, "up", "--model", model, *flags], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = []
        while "Ctrl-C" not in (lines[-1] if lines else ""):
            lines.append(process.stdout.readline())
            assert lines[-1], "pdserve up ended early"
        (http,) = [line.split()[1] for line in lines if line.startswith("HTTP")]
        with urllib.request.urlopen(http.removesuffix("/v1") + "/health", timeout=30) as response:
            assert response.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_killed_up_leaves_no_process_behind(model: str, tmp_path: Path) -> None:
    flags = ["--grpc-port=0", "--http-port=0", "--metrics-port=0", "--worker-port=0"]
    process = subprocess.Popen(
        [*PDSERVE, "up", "--model", model, *flags], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    # Before they become services they ask for the signal.
    while len(children) < 3 or not all(map(is_service, children)):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)
        children = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def is_service(process: psutil.Process) -> bool:
    return any(argument.startswith("pdserve_") for argument in process.cmdline()[:3])


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    result = run("up", "--model", "nowhere", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == (
        "pdserve: no model at 'nowhere': it has no config.json; pass --model DIR\n"
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


def test_a_wrong_flag_shows_the_usage(tmp_path: Path) -> None:
    result = run("up", "--modle", "x", cwd=tmp_path)
    assert result.returncode == 2
    assert "unrecognized arguments: --modle" in result.stderr


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


def run_at_once(commands: Sequence[Sequence[str]], cwd: Path) -> Iterator[tuple[int, str, str]]:
    """Run modules with their arguments; yield their exit statuses, and what they print."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    for process in processes:
        output, errors = process.communicate(timeout=180)
        yield process.returncode, output, errors
