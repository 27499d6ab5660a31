"""The process: ready, drained, closed, and what a taken port does."""

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import WorkerRole
from pdserve_router.api.grpc.service import SERVICE_NAME
from pdserve_router.config import RouterConfig
from pdserve_router.server import RouterServer
from support.fake_worker import FakeWorker
from support.router_stack import ANSWER_TEXT, TIMINGS, replace_file
from support.waiting import until


async def read_all(call) -> list[pb2.RequestOutput]:
    return [response.output async for response in call]


async def hang(running) -> None:
    running.emit(*running.worker.answer[:1], at=0)
    await asyncio.Event().wait()


async def log_until(process: asyncio.subprocess.Process, words: str) -> str:
    """Read the log up to the line that says this."""
    lines = [""]
    while words not in lines[-1]:
        lines.append((await process.stderr.readline()).decode())
        assert lines[-1], f"it ended: {''.join(lines)}"
    return "".join(lines)


def mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def start_and_stop(config: RouterConfig) -> None:
    server = RouterServer(config, timings=TIMINGS)
    try:
        await server.start()
    finally:
        await server.stop(0)


async def test_draining_finishes_what_is_under_way_and_takes_nothing_later(start_stack) -> None:
    async with (
        start_stack(http=True) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=30) as http,
    ):
        may_end = asyncio.Event()
        stack.decode.before_token = lambda running, num_tokens: may_end.wait()
        running = asyncio.create_task(read_all(stack.stub.Generate(pb2.GenerateRequest(text="a"))))
        await until(lambda: stack.decode.num_running == 1)
        drain = asyncio.create_task(stack.server.router.drain(60))
        await until(lambda: stack.server.router.is_draining)
        assert (await http.get("/health")).json()["reason"] == "draining"
        body = {"model": "tiny", "prompt": "x", "max_tokens": 50}
        late = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: stack.decode.num_running == 2)
        may_end.set()
        outputs = await running
        assert "".join(output.outputs[0].text for output in outputs) == ANSWER_TEXT
        assert (await late).json()["choices"][0]["text"] == ANSWER_TEXT
        await drain
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"


async def test_the_drain_timeout_ends_the_rest_with_a_typed_error(start_stack) -> None:
    async with start_stack() as stack:
        stack.decode.behave = hang
        running = asyncio.create_task(read_all(stack.stub.Generate(pb2.GenerateRequest(text="a"))))
        await until(lambda: stack.metric("pdserve_generation_tokens_total", model="tiny") == 1)
        await stack.server.stop(0.1)
        outputs = await running
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].error.code == core.ERROR_CODE_DRAINING
        assert outputs[-1].outputs[0].error.retryable
        await until(lambda: len(stack.decode.aborted) == 1)


async def test_the_router_logs_its_load(start_stack, monkeypatch, caplog) -> None:
    monkeypatch.setattr("pdserve_common.observability.load_log.INTERVAL_S", 0.05)
    caplog.set_level(logging.INFO, logger="pdserve_router.router")

    def loads() -> list[dict]:
        return [each.args for each in caplog.records if each.getMessage().startswith("load: ")]

    async with start_stack(http=True) as stack:
        assert not loads()
        stack.decode.behave = hang
        call = stack.stub.Generate(pb2.GenerateRequest(text="a"))
        await call.read()
        async with httpx.AsyncClient(base_url=stack.url, timeout=300) as http:
            await http.post("/v1/completions", json={"prompt": "a", "top_p": 7})
        await until(lambda: bool(loads()) and loads()[-1]["num_in_flight"] == 1)
        assert loads()[-1]["num_queued"] == 0
        call.cancel()
        await stack.assert_idle()
        await until(lambda: loads()[-1]["num_in_flight"] == 0)
        for name in ("prompt_tokens", "generation_tokens", "ended", "not_taken"):
            assert any(load[f"{name}_per_s"] > 0 for load in loads())
        assert (loads()[-1]["num_ready_prefill"], loads()[-1]["num_ready_decode"]) == (1, 1)


def hold_back(stack, monkeypatch) -> asyncio.Event:
    """Requests stay in the tokenizer until it is set."""
    may_go = asyncio.Event()
    processor = stack.server.router.input_processor
    tokenize = processor.tokenize

    async def tokenize_later(**prompt: object) -> object:
        await may_go.wait()
        return await tokenize(**prompt)

    monkeypatch.setattr(processor, "tokenize", tokenize_later)
    return may_go


async def test_draining_waits_for_what_is_still_arriving(start_stack, monkeypatch) -> None:
    async with start_stack() as stack:
        may_go = hold_back(stack, monkeypatch)
        running = asyncio.create_task(read_all(stack.stub.Generate(pb2.GenerateRequest(text="a"))))
        await until(lambda: stack.server.router.num_queued == 1)
        drain = asyncio.create_task(stack.server.router.drain(30))
        await asyncio.sleep(0.05)
        assert not drain.done()
        may_go.set()
        outputs = await running
        assert "".join(output.outputs[0].text for output in outputs) == ANSWER_TEXT
        await drain


async def test_what_arrives_behind_the_drain_timeout_is_not_sent(start_stack, monkeypatch) -> None:
    async with start_stack() as stack:
        may_go = hold_back(stack, monkeypatch)
        running = asyncio.create_task(read_all(stack.stub.Generate(pb2.GenerateRequest(text="a"))))
        await until(lambda: stack.server.router.num_queued == 1)
        await stack.server.router.drain(0.01)
        may_go.set()
        with pytest.raises(grpc.aio.AioRpcError, match="shut down before the request was sent"):
            await running
        assert not any(worker.requests for worker in stack.workers)


async def test_readiness_ends_before_anything_else(start_stack) -> None:
    async with start_stack(close_grace_s=0.1) as stack:
        health = health_pb2_grpc.HealthStub(stack.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=60)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        may_end = asyncio.Event()
        stack.decode.before_token = lambda running, num_tokens: may_end.wait()
        running = asyncio.create_task(read_all(stack.stub.Generate(pb2.GenerateRequest(text="a"))))
        await until(lambda: stack.decode.num_running == 1)
        stopping = asyncio.create_task(stack.server.stop(3600))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not running.done()
        may_end.set()
        outputs = await running
        # Those who watch are not waited for until the drain timeout.
        await asyncio.wait_for(stopping, 20)
        assert "".join(output.outputs[0].text for output in outputs) == ANSWER_TEXT


async def test_what_is_required_is_refused_rather_than_done_otherwise(start_stack) -> None:
    async with start_stack(require_disaggregation=True) as stack:
        await stack.prefill.stop()
        await until(lambda: not stack.server.router.is_ready)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(stack.stub.Generate(pb2.GenerateRequest(text="hello")))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (
            "--require-disaggregation: no prefill worker with the weights that serve is ready"
            in caught.value.details()
        )


async def test_a_router_without_workers_is_not_ready_and_takes_those_that_come(
    start_stack, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("pdserve_router.workers.discovery.FileSource.interval_s", 0.02)
    path = tmp_path / "decode"
    path.write_text("")
    async with start_stack(decode=1, wait=False) as stack:
        config = dataclasses.replace(stack.server.config, prefill=(), decode=(f"file://{path}",))
        server = RouterServer(config, timings=TIMINGS)
        await server.start()
        try:
            assert not server.router.is_ready
            replace_file(path, stack.decode.address)
            await until(lambda: server.router.is_ready)
        finally:
            await server.stop(0)


async def test_metrics_are_served(start_stack, model_dir, monkeypatch) -> None:
    from pdserve_common.metrics.port import MetricsServer

    monkeypatch.setattr("pdserve_router.server.MetricsServer", MetricsServer)
    config = RouterConfig(
        model=str(model_dir),
        decode=("127.0.0.1:1",),
        host="127.0.0.1",
        grpc_port=0,
        http_port=0,
        metrics_port=0,
    )
    server = RouterServer(config, timings=TIMINGS)
    await server.start()
    try:
        url = f"http://127.0.0.1:{server.metrics_port}/metrics"
        response = await asyncio.to_thread(urllib.request.urlopen, url, timeout=30)
        text = response.read().decode()
        assert 'pdserve_build_info{kernels="",model="tiny",role="router"' in text
        assert 'pdserve_workers{role="decode",state="ready"} 0.0' in text
        for counted in (
            'requests_total{model="tiny",outcome="rejected"}',
            'requests_routed_total{path="local",reason="no_proven_pair"}',
            'redrives_total{path="disaggregated",reason="kv_lost"}',
            'recovered_requests_total{outcome="error"}',
            'handoffs_total{outcome="decode_failed"}',
        ):
            assert f"pdserve_{counted} 0.0" in text, "else rates miss its first sample"
    finally:
        await server.stop(0)


@pytest.mark.parametrize("port", ["grpc_port", "http_port", "metrics_port"])
async def test_a_taken_port_is_an_error_and_leaves_nothing_open(model_dir, port) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"grpc_port": 0, "http_port": 0, "metrics_port": 0}
        ports[port] = taken.getsockname()[1]
        config = RouterConfig(
            model=str(model_dir), decode=("127.0.0.1:1",), host="127.0.0.1", **ports
        )
        with pytest.raises(OSError, match=r"cannot listen|in use"):
            await start_and_stop(config)


async def test_sigterm_drains_and_exits_with_zero(model_dir, tokenizer) -> None:
    answer = tokenizer.backend.encode(ANSWER_TEXT).ids
    worker = FakeWorker(WorkerRole.DECODE, vocab_size=tokenizer.vocab_size, answer=answer)
    may_answer = asyncio.Event()
    worker.before_token = lambda running, num_tokens: may_answer.wait()
    await worker.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdserve_router", f"--model={model_dir}",
        f"--decode={worker.address}", "--host=127.0.0.1", "--http-port=0",
        "--grpc-port=0", "--metrics-port=0",
        stderr=asyncio.subprocess.PIPE, env={**os.environ},
    )  # fmt: skip
    try:
        log = await asyncio.wait_for(log_until(process, "HTTP on "), 60)
        port = int(log.rpartition("HTTP on ")[2].partition(",")[0])
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
            log += await asyncio.wait_for(log_until(process, "the router is ready"), 60)
            assert (await http.get("/health")).status_code == 200
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 50}
            request = asyncio.create_task(http.post("/v1/completions", json=body))
            await until(lambda: worker.num_running == 1)
            # It is installed here, and the tokenizer's library would import it.
            assert "libtorch" not in mapped_files(process.pid)
            process.send_signal(signal.SIGTERM)
            may_answer.set()
            assert (await request).json()["choices"][0]["text"] == ANSWER_TEXT
        _, rest = await asyncio.wait_for(process.communicate(), 60)
        log += rest.decode()
        assert process.returncode == 0, log
        assert log.count("config: RouterConfig(") == 1
        assert "hello" not in log
        assert "Traceback" not in log
        assert "PyTorch" not in log
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await worker.close()
