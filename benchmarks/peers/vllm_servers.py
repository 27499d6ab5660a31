"""Runs vLLM's servers: one alone, or a prefill and decode pair over NIXL behind peers/proxy.py."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

HERE = Path(__file__).parent
# What it compiles, so that the next start is faster.
CACHE = Path(".bench/vllm-cache")
READY_S = 900.0
STOP_S = 30.0


@contextmanager
def vllm_server(
    environment: Path, model: Path, cores: str, port: int, log_dir: Path, flags: Sequence[str]
) -> Iterator[str]:
    """Start one server with a thread on each of `cores` and yield its URL.

    `environment` is what peers/install.sh has made, `flags` are more of `vllm serve`. It takes a
    minute or two: vLLM compiles the model.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    command = _serve(environment, model, port, flags)
    with _process(command, variables(environment, cores), log_dir / "vllm.log"):
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/health")
        yield url


@contextmanager
def vllm_pair(
    environment: Path, model: Path, ports: Sequence[int], log_dir: Path, flags: Sequence[str]
) -> Iterator[str]:
    """Start a pair, one core each, and yield the proxy's URL; `ports` are five free ones."""
    log_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as processes:
        urls = []
        for core, role in enumerate(("producer", "consumer")):
            port, nixl_port = ports[2 * core : 2 * core + 2]
            command = _serve(environment, model, port, [_transfer(f"kv_{role}"), *flags])
            env = {**variables(environment, str(core)), **_nixl_variables(nixl_port)}
            urls.append(f"http://127.0.0.1:{port}")
            processes.enter_context(_process(command, env, log_dir / f"vllm-{role}.log"))
        for url in urls:
            _wait_for(f"{url}/health")
        command = [environment / "bin/python", HERE / "proxy.py", ports[4], *urls]
        processes.enter_context(_process(command, {}, log_dir / "vllm-proxy.log"))
        _wait_for(f"http://127.0.0.1:{ports[4]}/")
        yield f"http://127.0.0.1:{ports[4]}"


def variables(environment: Path, cores: str) -> dict[str, str]:
    """Return what every vLLM needs in its environment to run on `cores`, like 0-1."""
    return {
        "LD_PRELOAD": str(environment.absolute() / "lib/libiomp5.so"),
        "VLLM_CACHE_ROOT": str(CACHE.absolute()),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _nixl_variables(port: int) -> dict[str, str]:
    return {
        "PYTHONPATH": str(HERE.absolute() / "shim"),
        "UCX_TLS": "tcp,sm,self",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }


def _transfer(role: str) -> str:
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
    }
    return f"--kv-transfer-config={json.dumps(config)}"


def _serve(environment: Path, model: Path, port: int, flags: Sequence[str]) -> list[object]:
    return [
        environment / "bin/vllm", "serve", model, f"--served-model-name={model.name}",
        "--dtype=bfloat16", "--host=127.0.0.1", f"--port={port}",
        "--max-num-batched-tokens=2048", "--block-size=128",
        f"--kv-cache-memory-bytes={1 << 30}", "--seed=0", *flags,
    ]  # fmt: skip


@contextmanager
def _process(command: Sequence[object], env: Mapping[str, str], log: Path) -> Iterator[None]:
    """Run a command in a session of its own, whose processes all end with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            print(f"{command[0]} does not stop within {STOP_S:g} s")
        with suppress(ProcessLookupError):  # workers may outlive the server that started them
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(url: str) -> None:
    """Wait until something answers."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        try:
            if httpx.get(url, timeout=5.0).status_code < 500:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"{url} does not answer within {READY_S:g} s; see the logs")
