"""A worker as users of its stubs see it: EngineCoreService, health, reflection, bad input."""

import asyncio
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from safetensors.torch import load_file, save_file

from pdserve.v1 import control_service_pb2 as control_pb2
from pdserve.v1 import control_service_pb2_grpc as control_grpc
from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve_common.rpc.attach_protocol import PROTOCOL_VERSION
from pdserve_common.rpc.channels import LIVENESS_SERVICE
from support.pooling_models import hf_states
from support.refusals import refused

GenerateRequest = service_pb2.EngineCoreServiceGenerateRequest
# Of calls that have to be answered, however busy the machine is.
ANSWER_S = 30.0
MAX_MODEL_LEN = 8192


@pytest.fixture
async def channel(stack: Any) -> AsyncIterator[grpc.aio.Channel]:
    (decode,) = [worker for worker in stack.workers if worker.name == "decode-0"]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{decode.port}") as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return service_grpc.EngineCoreServiceStub(channel)


def request(request_id: str = "r", **fields: Any) -> core_pb2.EngineCoreRequest:
    message = core_pb2.EngineCoreRequest(
        request_id=request_id, prompt_token_ids=fields.pop("prompt_token_ids", [5, 6, 7]), **fields
    )
    if message.WhichOneof("params") is None:
        message.sampling_params.temperature = 0.0
        message.sampling_params.max_tokens = 4
        message.sampling_params.ignore_eos = True
    return message


async def test_generate_streams_one_request(stub: Any) -> None:
    tokens: list[int] = []
    async for response in stub.Generate(GenerateRequest(request=request()), timeout=ANSWER_S):
        assert response.output.first_token_index == len(tokens)
        tokens.extend(response.output.new_token_ids)
        last = response.output
    assert len(tokens) == 4
    assert last.finish_reason == core_pb2.FINISH_REASON_LENGTH


async def test_events_and_trace_headers_reach_the_caller(stub: Any) -> None:
    message = request("traced", trace_headers={"traceparent": "00-1"})
    events: list[int] = []
    async for response in stub.Generate(GenerateRequest(request=message), timeout=ANSWER_S):
        events += [event.type for event in response.output.events]
        last = response.output
    assert events == [
        core_pb2.EngineCoreEvent.TYPE_QUEUED,
        core_pb2.EngineCoreEvent.TYPE_SCHEDULED,
    ]
    assert dict(last.trace_headers) == {"traceparent": "00-1"}


async def test_get_info_tells_what_the_worker_is(stub: Any) -> None:
    info = (await stub.GetInfo(service_pb2.GetInfoRequest(), timeout=ANSWER_S)).info
    assert info.engine_id == "decode-0"
    assert info.role == service_pb2.WORKER_ROLE_DECODE
    assert info.max_model_len == MAX_MODEL_LEN
    assert len(info.epoch) == 32
    assert len(info.tokenizer_digest) == 64


@pytest.mark.parametrize(
    ("message", "detail"),
    [
        (request(prompt_token_ids=[]), "prompt is empty"),
        (request(prompt_token_ids=[1] * MAX_MODEL_LEN), "prompt has 8192 tokens, at most 8191 fit"),
        (request(prompt_token_ids=[300]), "prompt_token_ids has 300, token ids are 0 to 299"),
        (request(request_id=""), "request_id has 0 characters"),
        (request(resumable=True), "resumable is set: not served yet"),
        (
            request(pooling_params=core_pb2.PoolingParams(task="embed")),
            "task is 'embed', the model serves generate",
        ),
        (
            request(sampling_params=core_pb2.SamplingParams(temperature=-1.0)),
            "temperature is -1.0, must be at least 0",
        ),
        (
            request(sampling_params=core_pb2.SamplingParams(early_stopping=9)),  # type: ignore[arg-type]
            "sampling_params.early_stopping is 9, known values are",
        ),
        (core_pb2.EngineCoreRequest(request_id="r"), "neither sampling_params nor pooling_params"),
    ],
)
async def test_a_bad_request_is_refused_by_name(
    stub: Any, message: core_pb2.EngineCoreRequest, detail: str
) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, detail):
        async for _ in stub.Generate(GenerateRequest(request=message), timeout=ANSWER_S):
            pass


async def test_an_oversized_message_is_refused(stub: Any) -> None:
    huge = request(prompt_token_ids=[2**32 - 1] * 4_000_000)
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        async for _ in stub.Generate(GenerateRequest(request=huge), timeout=ANSWER_S):
            pass


async def test_attach_needs_a_hello_first(stub: Any) -> None:
    call = stub.Attach(timeout=ANSWER_S)
    await call.write(service_pb2.AttachRequest(add_request=request()))
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "hello"):
        async for _ in call:
            pass


async def test_bytes_that_are_no_message_are_the_callers_fault(stack: Any) -> None:
    ports = {worker.name: worker.port for worker in stack.workers}
    calls = (
        ("prefill-0", "/pdserve.v1.EngineCoreService/Attach"),
        ("prefill-0", "/pdserve.v1.KvTransferService/KvLink"),
    )
    for name, path in calls:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports[name]}") as channel:
            call = channel.stream_stream(path)(iter([b"\xff"]), timeout=ANSWER_S)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, path
        assert "cannot be parsed" in error.value.details()
        assert '"level": "ERROR"' not in stack.log(name)


async def test_tensors_are_refused(stack: Any, stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.PutTensor(iter([service_pb2.PutTensorRequest()]), timeout=ANSWER_S)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.value.details() == "the model takes no tensors: it knows only text"
    assert '"level": "ERROR"' not in stack.log("decode-0")


async def attach(stub: Any, router_id: str) -> Any:
    call = stub.Attach(timeout=2 * ANSWER_S)
    hello = service_pb2.AttachHello(
        router_id=router_id, router_epoch="0" * 32, max_protocol_version=PROTOCOL_VERSION
    )
    await call.write(service_pb2.AttachRequest(hello=hello))
    assert (await call.read()).WhichOneof("message") == "welcome"
    return call


async def outputs_of(call: Any, request_id: str) -> list[core_pb2.EngineCoreOutput]:
    found = []
    while True:
        message = await asyncio.wait_for(call.read(), ANSWER_S)
        for output in message.outputs.outputs:
            assert output.request_id == request_id, "an output of another router's request"
            found.append(output)
            if output.finish_reason:
                return found


async def test_a_bad_request_on_attach_ends_with_a_typed_error_and_the_stream_goes_on(
    stub: Any,
) -> None:
    call = await attach(stub, "three")
    bad = request("bad", prompt_token_ids=[])
    await call.write(service_pb2.AttachRequest(add_request=bad))
    (output,) = await outputs_of(call, "bad")
    assert output.finish_reason == core_pb2.FINISH_REASON_ERROR
    assert output.error.code == core_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert "prompt is empty" in output.error.message
    await call.write(service_pb2.AttachRequest(add_request=request("good")))
    assert (await outputs_of(call, "good"))[-1].finish_reason == core_pb2.FINISH_REASON_LENGTH
    call.cancel()


def start_worker(role: str, model: Path, *flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", f"pdserve_{role}", "--model", str(model)]
    command += ["--num-threads", "1", "--kv-cache-memory-mib", "32", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def port_of(worker: "subprocess.Popen[str]") -> int:
    """Wait until the worker serves."""
    assert worker.stderr is not None
    for line in worker.stderr:
        if found := re.search(r"ready on [\d.]+:(\d+)", line):
            return int(found[1])
    raise AssertionError("it has ended")


async def test_a_drain_hands_back_what_is_left_and_tells_everyone_first(
    make_served_model: Callable[..., Path],
) -> None:
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=8192)
    worker = start_worker("decode", model, "--drain-timeout-s", "1.5")
    port = await asyncio.to_thread(port_of, worker)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = await attach(service_grpc.EngineCoreServiceStub(channel), "router")
        long = request("long")
        long.sampling_params.max_tokens = 8000
        await call.write(service_pb2.AttachRequest(add_request=long))
        await asyncio.wait_for(call.read(), ANSWER_S)
        worker.send_signal(signal.SIGTERM)
        message = await asyncio.wait_for(call.read(), ANSWER_S)
        while not message.heartbeat.draining:
            message = await asyncio.wait_for(call.read(), ANSWER_S)
        await call.write(service_pb2.AttachRequest(add_request=request("late")))
        check = health_pb2.HealthCheckRequest()
        health = await health_pb2_grpc.HealthStub(channel).Check(check, timeout=ANSWER_S)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        ends = await outputs_by_request(call)
        for request_id in ("late", "long"):
            assert ends[request_id].error.code == core_pb2.ERROR_CODE_DRAINING
            assert ends[request_id].error.retryable
        assert await call.code() is grpc.StatusCode.OK
    _, log = await asyncio.to_thread(worker.communicate, timeout=ANSWER_S)
    assert worker.returncode == 0
    assert "requests that the drain has handed back: 1" in log


async def test_a_drain_lets_what_runs_come_to_its_end(
    make_served_model: Callable[..., Path],
) -> None:
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=8192)
    worker = start_worker("decode", model, "--drain-timeout-s", "600")
    port = await asyncio.to_thread(port_of, worker)
    message = request()
    message.sampling_params.max_tokens = 400
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        generate = service_grpc.EngineCoreServiceStub(channel).Generate
        responses = aiter(generate(GenerateRequest(request=message), timeout=600))
        await anext(responses)
        worker.send_signal(signal.SIGTERM)
        *_, last = [response async for response in responses]
        assert last.output.finish_reason == core_pb2.FINISH_REASON_LENGTH
    await asyncio.to_thread(worker.communicate, timeout=ANSWER_S)
    assert worker.returncode == 0


async def test_a_drain_waits_for_kv_sessions_and_says_how_many_there_are(
    make_served_model: Callable[..., Path],
) -> None:
    worker = start_worker("prefill", make_served_model("LlamaForCausalLM"))
    port = await asyncio.to_thread(port_of, worker)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = await attach(service_grpc.EngineCoreServiceStub(channel), "router")
        for name in ("one", "two"):
            message = request(name)
            message.kv_transfer_params.do_remote_decode = True
            message.kv_transfer_params.remote_engine_id = "a decode worker that never comes"
            await call.write(service_pb2.AttachRequest(add_request=message))
        # A bad one is answered in order: by then the engine has the others.
        await call.write(service_pb2.AttachRequest(add_request=request("", prompt_token_ids=[])))
        await outputs_of(call, "")
        control = control_grpc.ControlServiceStub(channel)
        progress = [p async for p in control.Drain(control_pb2.DrainRequest(timeout_ms=1500))]
        counts = [(p.num_requests, p.num_open_kv_sessions, p.drained) for p in progress]
        assert (2, 2, False) in counts
        assert counts[-1] == (0, 0, True)
        assert progress[-1].num_handed_back == 2
        worker.send_signal(signal.SIGTERM)
        ends = await outputs_by_request(call)
        errors = {ends[name].error.code for name in ("one", "two")}
        assert errors == {core_pb2.ERROR_CODE_DRAINING}
    await asyncio.to_thread(worker.communicate, timeout=ANSWER_S)
    assert worker.returncode == 0


async def outputs_by_request(call: Any) -> dict[str, core_pb2.EngineCoreOutput]:
    """Read to the stream's end; return each request's last output."""
    last = {}
    while (message := await asyncio.wait_for(call.read(), ANSWER_S)) is not grpc.aio.EOF:
        last.update({output.request_id: output for output in message.outputs.outputs})
    return last


async def test_a_worker_pools_for_users_of_its_stubs(
    make_served_model: Callable[..., Path],
) -> None:
    model = make_served_model("Qwen3Model")
    worker = start_worker("prefill", model, "--pooler-config", '{"matryoshka_dimensions": [16]}')
    port = await asyncio.to_thread(port_of, worker)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = service_grpc.EngineCoreServiceStub(channel)
        info = (await stub.GetInfo(service_pb2.GetInfoRequest(), timeout=ANSWER_S)).info
        assert list(info.tasks) == ["embed"]
        assert (info.embedding_size, info.pooling_type) == (64, "last")
        assert (info.is_matryoshka, list(info.matryoshka_dimensions)) == (True, [16])
        call = await attach(stub, "router")
        prompt = [5 + i % 90 for i in range(100)]
        states = hf_states(model, prompt)[-1]
        for size in (None, 16):
            params = core_pb2.PoolingParams(task="embed", dimensions=size)
            message = request(f"{size}", prompt_token_ids=prompt, pooling_params=params)
            await call.write(service_pb2.AttachRequest(add_request=message))
            (output,) = await outputs_of(call, f"{size}")
            assert output.finish_reason == core_pb2.FINISH_REASON_STOP
            assert output.prefill_stats.num_prompt_tokens == 100
            assert output.prefill_stats.num_cached_tokens == (96 if size else 0)
            expected = torch.nn.functional.normalize(states[:size], dim=0)
            found = torch.tensor(list(output.pooling_output))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for message, refusal in (
            (request("tokens"), "task is 'generate', the model serves embed"),
            (
                request("size", pooling_params=core_pb2.PoolingParams(task="embed", dimensions=15)),
                "dimensions is 15, must be one of 16",
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=refusal) as error:
                async for _ in stub.Generate(GenerateRequest(request=message), timeout=ANSWER_S):
                    pass
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        worker.send_signal(signal.SIGTERM)
    await asyncio.to_thread(worker.communicate, timeout=ANSWER_S)
    assert worker.returncode == 0


def test_a_decode_worker_refuses_a_model_that_pools(make_served_model: Callable[..., Path]) -> None:
    worker = start_worker("decode", make_served_model("Qwen3Model"))
    _, log = worker.communicate(timeout=120)
    assert worker.returncode == 1
    (line,) = [line for line in log.splitlines() if "cannot start" in line]
    assert "serves embed, which prefill workers do" in line


def test_a_worker_that_computes_nonsense_does_not_start(
    make_served_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = shutil.copytree(make_served_model("LlamaForCausalLM"), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    for worker in [start_worker(role, model) for role in ("prefill", "decode")]:
        _, log = worker.communicate(timeout=120)
        assert worker.returncode == 1
        (line,) = [line for line in log.splitlines() if "cannot start" in line]
        assert "the self-check failed: logits had" in line


async def test_every_process_answers_health_and_reflection(stack: Any) -> None:
    services = {
        "router": "pdserve.v1.InferenceService",
        "prefill-0": "pdserve.v1.KvTransferService",
        "decode-0": "pdserve.v1.EngineCoreService",
    }
    for process in stack.processes:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{process.port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", LIVENESS_SERVICE, services[process.name]):
                check = health_pb2.HealthCheckRequest(service=name)
                response = await health.Check(check, timeout=ANSWER_S)
                assert response.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            answer = await reflection.ServerReflectionInfo(iter([ask]), timeout=ANSWER_S).read()
            names = {service.name for service in answer.list_services_response.service}
            assert services[process.name] in names
