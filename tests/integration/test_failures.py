"""A worker dies or hangs under a request: one typed error in bounded time, and the rest goes on."""

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import AsyncClient
from pdserve_common.engine_types import SamplingParams

PROMPT = list(range(3, 120))
LONG = SamplingParams(temperature=0.0, max_tokens=1800, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
# Silence counts as death after 5 s.
BOUND_S = 8.0

pytestmark = pytest.mark.slow


@pytest.fixture
def model(make_served_model: Callable[..., Path]) -> Path:
    return make_served_model("LlamaForCausalLM", max_position_embeddings=2048)


async def outputs_of(client: AsyncClient, params: SamplingParams) -> list[pb2.RequestOutput]:
    return [output async for output in client.generate(PROMPT, params, timeout_s=60)]


async def first_tokens(stream: Any, count: int) -> None:
    seen = 0
    async for output in stream:
        seen += sum(len(completion.token_ids) for completion in output.outputs)
        if seen >= count:
            return


def error_code(outputs: list[pb2.RequestOutput]) -> int:
    """The one error of a stream that failed after it was accepted."""
    errors = [c.error.code for o in outputs for c in o.outputs if c.HasField("error")]
    assert [output.finished for output in outputs].count(True) == 1
    assert len(errors) == 1
    return errors[0]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_decode_worker_ends_its_streams_with_one_typed_error(
    model: Path, start_stack: Any, signum: int
) -> None:
    with start_stack(model=model, is_to_survive=False) as stack:
        client = AsyncClient(stack.grpc_address)
        stream = client.generate(PROMPT, LONG, timeout_s=60)
        await first_tokens(stream, 5)
        stack.send_signal("decode-0", signum)
        lost_at = time.monotonic()
        rest = [output async for output in stream]
        assert time.monotonic() - lost_at < BOUND_S
        assert error_code(rest) == core_pb2.ERROR_CODE_ENGINE_DEAD
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await outputs_of(client, SHORT)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        stack.assert_idle(without="decode-0")
        if signum == signal.SIGSTOP:
            stack.send_signal("decode-0", signal.SIGCONT)
            await until_served(client, path="disaggregated")
            stack.assert_idle()
        await client.close()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_its_prefill_worker_a_decode_worker_serves_alone(
    model: Path, start_stack: Any, signum: int
) -> None:
    with start_stack(model=model, is_to_survive=False) as stack:
        client = AsyncClient(stack.grpc_address)
        alone = [o async for o in client.generate(PROMPT, SHORT)]
        assert alone[-1].metrics.path == "disaggregated"
        stack.send_signal("prefill-0", signum)
        lost_at = time.monotonic()
        if signum == signal.SIGSTOP:  # not noticed yet: the request ends with an error, in time
            outputs = await outputs_of(client, SHORT)
            assert time.monotonic() - lost_at < BOUND_S
            # The router or D notices first.
            assert error_code(outputs) in (
                core_pb2.ERROR_CODE_ENGINE_DEAD,
                core_pb2.ERROR_CODE_KV_TRANSFER_FAILED,
            )
        await until_served(client, path="local")
        stack.assert_idle(without="prefill-0")
        if signum == signal.SIGSTOP:
            stack.send_signal("prefill-0", signal.SIGCONT)
            await until_served(client, path="disaggregated")
            stack.assert_idle()
        await client.close()


async def until_served(client: AsyncClient, *, path: str) -> None:
    """Send requests until one is served on `path`."""
    deadline = time.monotonic() + 30
    while True:
        try:
            outputs = await outputs_of(client, SHORT)
        except grpc.aio.AioRpcError:
            outputs = []
        if (
            outputs
            and outputs[-1].metrics.path == path
            and outputs[-1].usage.num_output_tokens == 4
        ):
            return
        assert time.monotonic() < deadline, f"never served as {path}"
        await asyncio.sleep(0.2)


async def test_sigterm_lets_a_running_stream_finish(model: Path, start_stack: Any) -> None:
    with start_stack(model=model, is_to_survive=False) as stack:
        client = AsyncClient(stack.grpc_address)
        params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
        stream = client.generate(PROMPT, params, timeout_s=60)
        await first_tokens(stream, 2)
        for name in ("decode-0", "prefill-0"):
            stack.send_signal(name, signal.SIGTERM)
        rest = [output async for output in stream]
        assert rest[-1].usage.num_output_tokens == 300
        assert rest[-1].outputs[0].finish_reason == core_pb2.FINISH_REASON_LENGTH
        await client.close()
        for worker in stack.workers:
            assert worker.process is not None
            assert worker.process.wait(15) == 0
