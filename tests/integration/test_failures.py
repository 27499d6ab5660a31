"""The only worker of its role dies or hangs: what waits, what comes back, and what the client sees
when nobody does.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import AsyncClient
from pdserve_common.sampling_params import SamplingParams
from support.samples import sampled

pytestmark = pytest.mark.slow

PROMPT = list(range(3, 120))
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
# A worker that goes on is attached again within some 2 s.
REDRIVE_WAIT_S = 5.0
# Silence counts as death after 5 s; a busy machine takes its time.
BOUND_S = 25.0 + REDRIVE_WAIT_S


@pytest.fixture(scope="module")
def one_of_each(make_served_model: Callable[..., Path], start_stack: Any) -> Iterator[Any]:
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=2048)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PDSERVE_REDRIVE_WAIT_S", str(REDRIVE_WAIT_S))
        # Whoever has to end in order is given the time, however busy the machine is.
        with start_stack(
            model=model, dtype="float32", num_threads=1, drain_timeout_s=60.0
        ) as stack:
            yield stack


@pytest.fixture
def stack(one_of_each: Any) -> Iterator[Any]:
    """The stack, whole again after each test."""
    yield one_of_each
    one_of_each.restore()


@pytest.fixture
async def client(stack: Any) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(stack.grpc_address)
    yield client
    await client.close()


async def outputs_of(client: AsyncClient, params: SamplingParams) -> list[pb2.RequestOutput]:
    return [output async for output in client.generate(PROMPT, params, timeout_s=60)]


async def begin(stream: Any, num_tokens: int) -> list[pb2.RequestOutput]:
    """Return a stream's outputs until it has brought so many tokens."""
    outputs: list[pb2.RequestOutput] = []
    while len(tokens_of(outputs)) < num_tokens:
        outputs.append(await anext(stream))
    return outputs


def tokens_of(outputs: list[pb2.RequestOutput]) -> list[int]:
    return [token for o in outputs for c in o.outputs for token in c.token_ids]


def error_code(outputs: list[pb2.RequestOutput]) -> int:
    """The one error of a stream that failed after it was accepted."""
    errors = [c.error.code for o in outputs for c in o.outputs if c.HasField("error")]
    assert [output.finished for output in outputs].count(True) == 1
    assert len(errors) == 1
    return errors[0]


async def until_served(client: AsyncClient, *, path: str) -> None:
    """Send requests until one is served on `path`."""
    deadline = time.monotonic() + 60
    while True:
        outputs = await outputs_of(client, SHORT)
        assert len(tokens_of(outputs)) == 4
        if outputs[-1].metrics.path == path:
            return
        assert time.monotonic() < deadline, f"never served as {path}"
        await asyncio.sleep(0.1)


async def test_if_no_decode_worker_is_left_a_stream_ends_with_one_typed_error(
    stack: Any, client: AsyncClient
) -> None:
    stream = client.generate(PROMPT, LONG, timeout_s=60)
    await begin(stream, 5)
    lost_at = time.monotonic()
    stack.kill_process("decode-0")
    rest = [output async for output in stream]
    assert REDRIVE_WAIT_S < time.monotonic() - lost_at < BOUND_S
    assert error_code(rest) == core_pb2.ERROR_CODE_ENGINE_DEAD
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await outputs_of(client, SHORT)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    await asyncio.to_thread(stack.assert_idle, without="decode-0")


async def test_a_stream_goes_on_when_the_decode_worker_that_hung_comes_back(
    stack: Any, client: AsyncClient
) -> None:
    expected = tokens_of(await outputs_of(client, LONG))
    stream = client.generate(PROMPT, LONG, timeout_s=60)
    outputs = await begin(stream, 5)
    stack.send_signal("decode-0", signal.SIGSTOP)
    await asyncio.to_thread(stack.wait_for, "router", "pdserve_redrives_waiting", 1)
    stack.send_signal("decode-0", signal.SIGCONT)
    outputs += [output async for output in stream]
    assert tokens_of(outputs) == expected
    assert outputs[-1].metrics.num_redrives == 1
    assert outputs[-1].usage.num_output_tokens == LONG.max_tokens
    stack.assert_idle()


@pytest.mark.parametrize("signum", sampled([signal.SIGKILL, signal.SIGSTOP], signal.SIGKILL))
async def test_without_its_prefill_worker_a_decode_worker_serves_alone(
    stack: Any, client: AsyncClient, signum: int
) -> None:
    expected = await outputs_of(client, SHORT)
    assert expected[-1].metrics.path == "disaggregated"
    stack.send_signal("prefill-0", signum)
    lost_at = time.monotonic()
    # Nobody may have noticed yet.
    outputs = await outputs_of(client, SHORT)
    assert time.monotonic() - lost_at < BOUND_S
    assert tokens_of(outputs) == tokens_of(expected)
    assert outputs[-1].metrics.num_redrives <= 1
    assert outputs[-1].metrics.path == "local"
    stack.assert_idle(without="prefill-0")
    if signum == signal.SIGSTOP:
        stack.send_signal("prefill-0", signal.SIGCONT)
        await until_served(client, path="disaggregated")


async def test_sigterm_lets_a_running_stream_finish(stack: Any, client: AsyncClient) -> None:
    stream = client.generate(PROMPT, LONG, timeout_s=60)
    await begin(stream, 2)
    for name in stack.worker_names():
        stack.send_signal(name, signal.SIGTERM)
    rest = [output async for output in stream]
    assert rest[-1].usage.num_output_tokens == LONG.max_tokens
    assert rest[-1].outputs[0].finish_reason == core_pb2.FINISH_REASON_LENGTH
    assert rest[-1].metrics.num_redrives == 0
    for name in stack.worker_names():
        assert stack.process(name).wait(60) == 0
