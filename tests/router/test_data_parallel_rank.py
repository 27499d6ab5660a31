"""Requests that name a data-parallel rank: its decode workers answer them, or nobody does."""

from collections import Counter
from typing import Any

import grpc
import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import WorkerRole
from support.refusals import refused
from support.waiting import until

COMPLETION = {"prompt": "hello", "max_tokens": 3}


def two_groups(role: WorkerRole, number: int) -> dict[str, object]:
    """Of decode workers; prefill workers are in none."""
    is_decode = role is WorkerRole.DECODE
    return {"data_parallel_size": 2, "data_parallel_rank": number % 2} if is_decode else {}


@pytest.fixture
async def stack(start_stack: Any) -> Any:
    async with start_stack(http=True, prefill=2, decode=4, info=two_groups) as stack:
        yield stack


async def post(stack: Any, rank: object) -> Any:
    headers = {"x-data-parallel-rank": str(rank)}
    return await stack.api.post("/v1/completions", json=COMPLETION, headers=headers)


async def test_the_ranks_of_all_groups_answer_and_no_others(stack: Any) -> None:
    for rank in (0, 1):
        answers = [await post(stack, rank) for _ in range(8)]
        assert {answer.status_code for answer in answers} == {200}
        names = {f"decode-{rank}", f"decode-{rank + 2}"}
        assert {answer.headers["pdserve-decode-engine-id"] for answer in answers} <= names
    request = pb2.GenerateRequest(text="hello", data_parallel_rank=1)
    metrics = [each.output.metrics async for each in stack.stub.Generate(request, timeout=30)][-1]
    assert metrics.decode_engine_id in ("decode-1", "decode-3")
    assert metrics.path == "disaggregated"


async def test_decode_is_told_the_rank_and_prefill_is_not(stack: Any) -> None:
    assert (await post(stack, 1)).status_code == 200
    ranks = {
        role: Counter(
            request.data_parallel_rank for worker in workers for request in worker.requests
        )
        for role, workers in (("prefill", stack.prefills), ("decode", stack.decodes))
    }
    assert ranks == {"prefill": {None: 1}, "decode": {1: 1}}


async def test_a_rank_outside_the_group_is_refused_with_the_range(stack: Any) -> None:
    answer = await post(stack, 2)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "data_parallel_rank"
    assert answer.json()["error"]["message"] == "data_parallel_rank is 2, must be 0 to 1"
    request = pb2.GenerateRequest(text="hello", data_parallel_rank=2)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "data_parallel_rank is 2, must be 0 to 1"):
        await anext(aiter(stack.stub.Generate(request, timeout=30)))


@pytest.mark.parametrize("value", ["-1", "one", "1.0", "9" * 10])
async def test_a_header_that_is_no_number_is_refused(start_stack: Any, value: str) -> None:
    async with start_stack(http=True) as stack:
        answer = await post(stack, value)
    message = f"x-data-parallel-rank is {value!r}, must be a number from 0"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


async def test_nobody_answers_for_a_rank_that_is_lost(stack: Any) -> None:
    for worker in stack.decodes[1::2]:
        await worker.stop()
    await until(lambda: sum(client.is_ready for client in stack.server.pool.decode) == 2)
    answer = await post(stack, 1)
    assert answer.status_code == 503
    message = answer.json()["error"]["message"]
    assert message == "no decode worker of the data-parallel rank 1 is ready"
    assert (await post(stack, 0)).status_code == 200
