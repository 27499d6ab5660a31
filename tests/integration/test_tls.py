"""A whole stack over TLS with API keys, as its clients, its operator and unknown clients see it."""

import os
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve_client.client import Client
from pdserve_common.rpc.channels import open_blocking_channel
from pdserve_common.rpc.tls import Tls
from pdserve_common.types.sampling_params import SamplingParams

NAMES = "IP:127.0.0.1,DNS:pdserve"
KEY = "integration-test-key"
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def ca(make_certificate_authority: Callable[[], Any]) -> Any:
    return make_certificate_authority()


@pytest.fixture(scope="module")
def stack(
    ca: Any,
    make_served_model: Callable[..., Path],
    start_stack: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    cert, key = ca.issue("pdserve", NAMES)
    keys = tmp_path_factory.mktemp("keys") / "api-keys"
    keys.write_text(f"tests:{KEY}\n")
    with start_stack(
        model=make_served_model("LlamaForCausalLM", max_position_embeddings=256),
        dtype="float32",
        require_disaggregation=True,
        tls_cert_file=cert,
        tls_key_file=key,
        tls_ca_file=ca.ca_file,
        api_keys_file=str(keys),
    ) as running:
        yield running


def generate(stack: Any, tls: Tls | None, key: str | None = KEY) -> list[int]:
    tokens: list[int] = []
    with Client(stack.grpc_address, tls=tls, api_key=key) as client:
        for output in client.generate([5, 6, 7], PARAMS, timeout_s=60):
            tokens += output.outputs[0].token_ids
    assert output.metrics.path == "disaggregated"
    return tokens


def sdk(stack: Any, ca: Any, key: str) -> openai.OpenAI:
    context = ssl.create_default_context(cafile=ca.ca_file)
    return openai.OpenAI(
        base_url=f"https://127.0.0.1:{stack.http_port}/v1",
        api_key=key,
        max_retries=0,
        http_client=httpx.Client(verify=context),
    )


def worker_of(stack: Any, role: str) -> Any:
    (worker,) = [worker for worker in stack.workers if worker.name.startswith(role)]
    return worker


def engine_id(port: int, tls: Tls | None) -> str:
    """What a worker says to whoever dials it so."""
    with open_blocking_channel(f"127.0.0.1:{port}", tls) as channel:
        stub = service_grpc.EngineCoreServiceStub(channel)
        return str(stub.GetInfo(service_pb2.GetInfoRequest(), timeout=30).info.engine_id)


def test_clients_generate_through_the_handoff(stack: Any, ca: Any) -> None:
    assert len(generate(stack, Tls(ca_file=ca.ca_file))) == PARAMS.max_tokens
    with sdk(stack, ca, KEY) as client:
        stream = client.completions.create(
            model=client.models.list().data[0].id, prompt="hello", max_tokens=8, stream=True
        )
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("length", "stop")


def test_a_wrong_key_is_refused(stack: Any, ca: Any) -> None:
    unknown = sdk(stack, ca, "another-key-0123456789")
    with unknown, pytest.raises(openai.AuthenticationError):
        unknown.completions.create(model="m", prompt="hello")
    with pytest.raises(grpc.RpcError) as error:
        generate(stack, Tls(ca_file=ca.ca_file), key=None)
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_refuse_who_has_no_certificate(
    stack: Any, ca: Any, make_certificate_authority: Callable[[], Any], role: str
) -> None:
    worker = worker_of(stack, role)
    cert, key = ca.issue("operator", "DNS:operator")
    assert engine_id(worker.port, Tls(ca_file=ca.ca_file, cert_file=cert, key_file=key))
    cert, key = make_certificate_authority().issue("unknown", "DNS:operator")
    for tls in (
        None,
        Tls(ca_file=ca.ca_file),
        Tls(ca_file=ca.ca_file, cert_file=cert, key_file=key),
    ):
        with pytest.raises(grpc.RpcError) as error:
            engine_id(worker.port, tls)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_renewed_certificate_is_served_without_a_restart(stack: Any, ca: Any) -> None:
    ports = [stack.grpc_port, stack.http_port, *(worker.port for worker in stack.workers)]
    before = [ssl.get_server_certificate(("127.0.0.1", port)) for port in ports]
    ca.issue("pdserve", NAMES)
    after = [ssl.get_server_certificate(("127.0.0.1", port)) for port in ports]
    assert all(new != old for new, old in zip(after, before, strict=True))
    assert len(set(after)) == 1
    assert len(generate(stack, Tls(ca_file=ca.ca_file))) == PARAMS.max_tokens


def test_the_command_takes_files_by_flag_and_the_key_from_the_environment(
    stack: Any, ca: Any
) -> None:
    cert, key = ca.issue("operator", "DNS:operator")
    flags = (f"--tls-ca-file={ca.ca_file}", "--tls-server-name=pdserve")
    address = f"--address={stack.grpc_address}"
    done = run("generate", address, "--raw", "--prompt=a story", *flags)
    assert (done.returncode, "disaggregated" in done.stdout) == (0, True), done
    own = (f"--tls-cert-file={cert}", f"--tls-key-file={key}")
    load = run("ctl", *flags, *own, f"127.0.0.1:{stack.workers[0].port}", "load")
    assert load.returncode == 0, load.stderr
    missing = run("generate", address, "--tls-ca-file=/nowhere")
    assert missing.returncode == 1
    assert (
        missing.stderr
        == "pdserve: tls_ca_file /nowhere cannot be read: No such file or directory\n"
    )


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pdserve_client", *args],
        env={**os.environ, "PDSERVE_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
