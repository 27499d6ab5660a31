"""Who takes a request, with routers of other settings over real workers: what stays on decode and
why, what is refused rather than downgraded, and workers that join, leave and do not match.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import SamplingParams
from support.refusals import refused

SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
NO_PAIR = "no prefill worker has proven to work with a ready decode worker"
NO_PREFILL = "no prefill worker with the weights that serve is ready"


@pytest.fixture(scope="module")
def two_of_each(make_served_model: Callable[..., Path], start_stack: Any) -> Iterator[Any]:
    """Neither the weights nor the KV of prefill-1 fit the others': it is in bf16."""
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=1024)
    flags = {"prefill-1": ["--dtype=bfloat16"]}
    with start_stack(
        model=model,
        dtype="float32",
        num_threads=1,
        prefill=2,
        decode=1,
        decode_data_parallel_size=2,
        flags=flags,
    ) as running:
        yield running


@pytest.fixture
def stack(two_of_each: Any) -> Iterator[Any]:
    """Each test leaves it idle."""
    yield two_of_each
    two_of_each.assert_idle()


async def ask(routed: Any, prompt: list[int]) -> pb2.RequestMetrics:
    """Return where a request went."""
    _, metrics = await routed.ask(prompt, SHORT)
    return metrics


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Shorter ones are the beginning of longer ones of the same seed."""
    return random.Random(seed).choices(range(3, 290), k=num_tokens)


async def test_a_request_that_names_a_rank_is_answered_by_it(stack: Any) -> None:
    """Decode-0 and decode-1 are a group."""
    client = AsyncClient(stack.grpc_address)
    try:
        for rank in (1, 0, 1):
            answer = client.generate(prompt_of(40, 50 + rank), SHORT, data_parallel_rank=rank)
            last = [each async for each in answer][-1]
            assert last.metrics.decode_engine_id == f"decode-{rank}"
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "data_parallel_rank is 2, must be 0 to 1"):
            await anext(client.generate(prompt_of(40), SHORT, data_parallel_rank=2))
    finally:
        await client.close()


async def test_short_and_cached_prompts_stay_on_decode(stack: Any, start_router: Any) -> None:
    async with start_router(
        stack, prefill="prefill-0", disaggregation_threshold_tokens=32
    ) as routed:
        await routed.until(1, "pdserve_worker_pairs", state="proven")
        expected = [
            (prompt_of(32, 1), "local"),
            (prompt_of(33, 2), "disaggregated"),
            (prompt_of(200, 3), "disaggregated"),
            # Begin alike.
            (prompt_of(200, 3), "local"),
            (prompt_of(220, 3), "local"),
            (prompt_of(400, 3), "disaggregated"),
        ]
        for prompt, path in expected:
            assert (await ask(routed, prompt)).path == path, len(prompt)
        for reason, number in (("short_prompt", 1), ("cached_prompt", 2)):
            name = "pdserve_requests_routed_total"
            assert routed.count(name, path="local", reason=reason) == number
        assert routed.count(name, path="disaggregated", reason="") == 3


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"require_transport": "tcp"}, NO_PAIR),
        ({"prefill": "prefill-1"}, NO_PREFILL),
        ({"prefill": "127.0.0.1:1"}, NO_PREFILL),
    ],
)
async def test_where_disaggregation_is_required_nothing_is_downgraded(
    stack: Any, start_router: Any, config: dict[str, str], reason: str
) -> None:
    config = {"prefill": "prefill-0", **config}
    async with start_router(stack, require_disaggregation=True, **config) as routed:
        if config["prefill"].startswith("prefill"):
            await routed.until(1, "pdserve_worker_pairs", state="mismatched")
        assert not routed.server.pool.is_ready
        with refused(grpc.StatusCode.UNAVAILABLE, f"--require-disaggregation: {reason}"):
            await ask(routed, prompt_of(50))
