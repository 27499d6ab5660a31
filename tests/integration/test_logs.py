"""What a real stack writes to its logs."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx
import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve.v1 import inference_service_pb2_grpc as pb2_grpc

# Several blocks, so that it crosses the handoff.
PROMPT = "a secret of mine " * 8
# Of what has to happen, however busy the machine is.
DEADLINE_S = 60.0
GENERATE = "/pdserve.v1.InferenceService/Generate"

Entry = dict[str, Any]


@pytest.fixture
async def stub(stack: Any) -> Any:
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        yield pb2_grpc.InferenceServiceStub(channel)


@pytest.fixture
async def http(stack: Any) -> Any:
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{stack.http_port}", timeout=120
    ) as client:
        yield client


def request(request_id: str, **params: Any) -> pb2.GenerateRequest:
    params["ignore_eos"] = True
    return pb2.GenerateRequest(text=PROMPT, request_id=request_id, sampling_params=params)


async def read_all(call: Any) -> None:
    async for _ in call:
        pass


async def nothing() -> None:
    """Only wait."""


async def line(
    stack: Any,
    name: str,
    is_it: Callable[[Entry], bool],
    again: Callable[[], Awaitable[None]] = nothing,
) -> Entry:
    """Wait for a line of a process's log, with `again` before each look; every one of them is
    JSON.
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        await again()
        # One may be half there.
        whole, _, _ = stack.log(name).rpartition("\n")
        entries = map(json.loads, whole.splitlines())
        if (found := next(filter(is_it, entries), None)) is not None:
            return dict(found)
        assert time.monotonic() < deadline, f"{name} has not logged it"
        await asyncio.sleep(0.1)


async def end_of(
    stack: Any, request_id: str, ask: Callable[[], Awaitable[None]] = nothing
) -> Entry:
    """Wait for a request's line. One that is refused is asked here, until it has a line: refusals
    of a second have few, and those of the test before may have taken them.
    """
    return await line(
        stack, "router", lambda e: e.get("request_id") == request_id and "path" in e, ask
    )


async def test_a_request_over_http(stack: Any, http: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "by-http"})
    assert answer.status_code == 200
    entry = await end_of(stack, "by-http")
    assert (entry["level"], entry["worker_id"]) == ("INFO", "router")
    assert entry["msg"].startswith("POST /v1/completions 200, request by-http, ")
    assert entry["num_prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert (entry["num_output_tokens"], entry["finish_reason"]) == (5, "length")
    assert 0 < entry["ttft_ms"] <= entry["e2e_ms"]
    assert (entry["route"], entry["num_redrives"]) == ("disaggregated", 0)
    assert (entry["prefill"], entry["decode"]) == ("prefill-0", "decode-0")
    for name in ("router", *stack.worker_names()):
        assert "a secret of mine" not in stack.log(name)


async def test_requests_over_grpc(stack: Any, stub: Any) -> None:
    await read_all(stub.Generate(request("by-grpc", max_tokens=2)))
    entry = await end_of(stack, "by-grpc")
    assert (entry["path"], entry["status"]) == (GENERATE, "OK")
    assert (entry["route"], entry["num_output_tokens"]) == ("disaggregated", 2)
    left = stub.Generate(request("left", max_tokens=4000))
    await left.read()
    left.cancel()
    entry = await end_of(stack, "left")
    assert (entry["status"], entry["finish_reason"]) == ("CANCELLED", "abort")
    assert entry["num_output_tokens"] > 0

    async def ask() -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(stub.Generate(request("refused-by-grpc", top_p=7)))

    entry = await end_of(stack, "refused-by-grpc", ask)
    assert (entry["path"], entry["status"]) == (GENERATE, "INVALID_ARGUMENT")
    assert entry["field"] == "top_p"


async def test_every_process_says_what_it_has_to_do(stack: Any, stub: Any) -> None:
    await read_all(stub.Generate(request("", max_tokens=8)))
    rates = [
        ("router", "prompt_tokens_per_s"),
        ("router", "generation_tokens_per_s"),
        ("prefill-0", "prompt_tokens_per_s"),
        ("decode-0", "generation_tokens_per_s"),
    ]
    for name, rate in rates:
        entry = await line(stack, name, lambda e, rate=rate: e.get(rate, 0) > 0)  # type: ignore[misc]
        assert entry["msg"].startswith("load: ")
