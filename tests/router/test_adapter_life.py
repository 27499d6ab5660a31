"""Adapters that come and go on the workers of a router."""

import asyncio
import time

import grpc
import pytest

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import ErrorCode, ErrorFault, WorkerRole
from pdserve_common.types.lora import LoRAAdapter, LoRAAdapters
from support.fake_worker import EOS, Running, decode, prefill
from support.router_stack import ANSWER_TEXT, Stack, StartStack, tokens_of
from support.waiting import until

TOKENS = pb2.TokenPrompt(token_ids=range(10, 30))
OLD, NEW = (LoRAAdapter(name="a", digest=c * 64, rank=8) for c in "bc")
# OLD, when its name stands for another one.
NAMELESS = LoRAAdapter(name="", digest=OLD.digest, rank=8)
HELD = {"adapters": (OLD,), "adapters_version": 1}


def request(name: str = "a", **fields: object) -> pb2.GenerateRequest:
    params = core.SamplingParams(seed=7)
    return pb2.GenerateRequest(tokens=TOKENS, sampling_params=params, lora_name=name, **fields)


@pytest.fixture
def answer(tokenizer) -> list[int]:
    return [*tokenizer.backend.encode(ANSWER_TEXT).ids, EOS]


def tell(stack: Stack, version: int, *adapters: LoRAAdapter) -> None:
    for worker in stack.workers:
        worker.adapters = LoRAAdapters(version=version, adapters=adapters)


async def follows(stack: Stack, version: int) -> None:
    clients = (*stack.server.pool.prefill, *stack.server.pool.decode)
    await until(lambda: all(c.info and c.info.adapters_version == version for c in clients))


def names(stack: Stack) -> list[str]:
    return [each.name for each in stack.server.pool.listed_adapters()]


def digests_asked(stack: Stack) -> list[str]:
    asked = [leg.lora_request for leg in stack.decode.requests]
    return [lora.digest for lora in asked if lora is not None]


async def test_the_router_follows_what_heartbeats_tell(start_stack: StartStack) -> None:
    async with start_stack(info=HELD) as stack:
        await until(lambda: names(stack) == ["a"])
        await stack.generate(request())
        tell(stack, 2, NEW, NAMELESS)
        await follows(stack, 2)
        await stack.generate(request())
        assert digests_asked(stack) == [OLD.digest, NEW.digest]
        # What is older, as on a stream that was late, is not believed.
        tell(stack, 1, OLD)
        num_beats = stack.decode.num_heartbeats
        await until(lambda: stack.decode.num_heartbeats > num_beats + 3)
        assert names(stack) == ["a"]
        await stack.generate(request())
        assert digests_asked(stack)[-1] == NEW.digest
        tell(stack, 3)
        await follows(stack, 3)
        assert names(stack) == []
        with pytest.raises(grpc.aio.AioRpcError, match="'a' is no adapter") as refusal:
            await stack.generate(request())
        assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
        await stack.generate(request(""))


async def test_a_name_is_listed_when_a_proven_pair_has_it(start_stack: StartStack) -> None:
    async with start_stack() as stack:
        stack.decode.adapters = LoRAAdapters(version=1, adapters=(NEW,))
        client = stack.server.pool.decode[0]
        await until(lambda: client.info is not None and client.info.adapters == (NEW,))
        assert names(stack) == []
        # Decode workers can work alone.
        await stack.generate(request())
        assert (len(stack.prefill.requests), digests_asked(stack)) == (0, [NEW.digest])
        tell(stack, 2, NEW)
        await until(lambda: names(stack) == ["a"])
        await stack.generate(request())
        assert len(stack.prefill.requests) == 1


def refuse(running: Running) -> None:
    running.fail(
        ErrorCode.FAILED_PRECONDITION, "not held", is_retryable=True, fault=ErrorFault.WORKER
    )


async def refuses(running: Running) -> None:
    if running.request.lora_request is not None:
        refuse(running)
    else:
        is_prefill = running.worker.info.role is WorkerRole.PREFILL
        await (prefill if is_prefill else decode)(running)


@pytest.mark.parametrize("role", ["prefills", "decodes"])
async def test_who_refuses_the_digest_is_passed_over(
    start_stack: StartStack, answer: list[int], role: str
) -> None:
    async with start_stack(prefill=2, decode=2, info=HELD, routing_policy="round_robin") as stack:
        getattr(stack, role)[0].behave = refuses
        for _ in range(6):
            assert tokens_of(await stack.generate(request())) == answer
        assert getattr(stack, role)[0].requests
        redrives = [
            stack.metric("pdserve_redrives_total", reason="failed_precondition", path=path)
            for path in ("disaggregated", "local")
        ]
        # These decode workers do without what a prefill worker has refused.
        assert bool(sum(redrives)) is (role == "decodes")
        # It is in order all the same.
        assert stack.metric("pdserve_workers_failing", role=role[:-1]) == 0


async def test_a_request_whose_adapter_nobody_holds_any_more_ends_soon(
    start_stack: StartStack,
) -> None:
    async with start_stack(prefill=0, info=HELD) as stack:
        begun, gone = asyncio.Event(), asyncio.Event()

        async def lose(running: Running) -> None:
            if running.request.lora_request is None:
                await decode(running)
                return
            running.emit(5, 6, 7, at=0)
            begun.set()
            await gone.wait()
            refuse(running)

        stack.decode.behave = lose
        began = time.monotonic()
        call = asyncio.create_task(stack.generate(request(), timeout=60))
        await begun.wait()
        tell(stack, 2)
        await follows(stack, 2)
        gone.set()
        outputs = await call
        (last,) = outputs[-1].outputs
        assert last.error.code == core.ERROR_CODE_FAILED_PRECONDITION
        assert "the adapter 'a' (bbbb" in last.error.message
        # By far before its deadline, and before a worker would be waited for.
        assert time.monotonic() - began < 30


async def test_a_resumed_answer_goes_on_with_the_adapter_that_began_it(
    start_stack: StartStack, answer: list[int]
) -> None:
    async with start_stack(info=HELD) as stack:
        outputs = await stack.generate(request())
        (model_version,) = {part.model_version for output in outputs for part in output.outputs}
        assert model_version.endswith("." + OLD.digest[:16])
        tell(stack, 2, NEW, NAMELESS)
        await follows(stack, 2)
        begun = {"index": 0, "token_ids": answer[:3], "model_version": model_version}
        outputs = await stack.generate(request(resume=[begun]))
        assert tokens_of(outputs) == answer[3:]
        assert {part.model_version for output in outputs for part in output.outputs} == {
            model_version
        }
        assert digests_asked(stack) == [OLD.digest, OLD.digest]
        await stack.generate(request())
        assert digests_asked(stack)[-1] == NEW.digest
        # Nobody goes on with another one, or with none.
        plain = model_version.rpartition(".")[0]
        for name, wrong in (("", model_version), ("a", plain)):
            with pytest.raises(
                grpc.aio.AioRpcError, match=r"lora_name is .*, resume\.model_version"
            ) as e:
                await stack.generate(request(name, resume=[{**begun, "model_version": wrong}]))
            assert e.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        tell(stack, 3, NEW)
        await follows(stack, 3)
        with pytest.raises(grpc.aio.AioRpcError, match="which is not held here") as refusal:
            await stack.generate(request(resume=[begun]))
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
