"""n completions of one request are those of n requests, from one prefill and shared blocks."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import SamplingParams
from support.samples import sampled

NUM_TOKENS = 16
SEED = 11
N = 4
BLOCK_SIZE = 16
PROMPT_LENS = (2, 48, 270)
USED_BLOCKS = 'pdserve_kv_blocks{state="used"}'


def random_prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, 190) for _ in range(length)]


async def generate(
    client: AsyncClient, prompt: list[int], **params: Any
) -> tuple[list[list[int]], list[str], Any]:
    """Return each completion's tokens and text, and the last message."""
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": SEED, **params}
    tokens: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    async for output in client.generate(prompt, SamplingParams(**fields), timeout_s=120):
        for completion in output.outputs:
            assert not completion.HasField("error"), completion.error
            tokens.setdefault(completion.index, []).extend(completion.token_ids)
            texts[completion.index] = texts.get(completion.index, "") + completion.text
    order = range(len(tokens))
    return [tokens[i] for i in order], [texts[i] for i in order], output


async def separately(client: AsyncClient, prompt: list[int], **params: Any) -> Any:
    calls = (generate(client, prompt, **params, seed=SEED + i) for i in range(N))
    answers = await asyncio.gather(*calls)
    return [tokens for (tokens,), _, _ in answers], [text for _, (text,), _ in answers]


@pytest.fixture(scope="module")
def uncached_stack(bf16_stack: Any, start_stack: Any) -> Iterator[Any]:
    """Without a prefix cache only forks share."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PDSERVE_ENABLE_PREFIX_CACHING", "false")
        with start_stack(model=bf16_stack.config.model, dtype="bfloat16", num_threads=1) as stack:
            yield stack


@pytest.fixture(
    params=sampled(["bf16_stack", "uncached_stack"], "bf16_stack"), ids=["cached", "uncached"]
)
def stack(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each test leaves it idle."""
    stack: Any = request.getfixturevalue(request.param)
    yield stack
    stack.assert_idle()


@pytest.fixture
async def client(stack: Any) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(stack.grpc_address)
    yield client
    await client.close()


@pytest.mark.parametrize("length", PROMPT_LENS)
@pytest.mark.parametrize(
    ("num_tokens", "path"), [(NUM_TOKENS, "disaggregated"), (1, "local")], ids=["many", "one"]
)
async def test_n_completions_are_those_of_n_requests(
    client: AsyncClient, length: int, num_tokens: int, path: str
) -> None:
    prompt = random_prompt(length)
    for temperature in (0.0, 1.0):
        params = {"temperature": temperature, "max_tokens": num_tokens}
        together, texts, last = await generate(client, prompt, n=N, **params)
        assert (together, texts) == await separately(client, prompt, **params), temperature
        if num_tokens > 1:
            assert len({*map(tuple, together)}) == (N if temperature else 1)
        assert last.metrics.path == path
        assert last.usage.num_prompt_tokens == length
        assert last.usage.num_output_tokens == N * num_tokens


async def test_the_prompt_is_computed_once_and_its_blocks_are_shared(
    stack: Any, client: AsyncClient
) -> None:
    prompt = random_prompt(1030)
    num_prompt_blocks = len(prompt) // BLOCK_SIZE
    handoffs = 'pdserve_handoffs_total{outcome="completed"}'
    num_handoffs = stack.metrics("router").get(handoffs, 0)
    used = []
    task = asyncio.create_task(generate(client, prompt, n=N, max_tokens=100))
    while not task.done():
        metrics = await asyncio.to_thread(stack.metrics, "decode-0")
        used.append(metrics[USED_BLOCKS])
        await asyncio.sleep(0.02)
    tokens, _, _ = await task
    assert [len(each) for each in tokens] == [100] * N
    num_own_blocks = N * (2 + 100 // BLOCK_SIZE)
    assert num_prompt_blocks < max(used) <= num_prompt_blocks + num_own_blocks
    assert stack.metrics("router")[handoffs] == num_handoffs + 1


@pytest.mark.parametrize("num_read", [0, 1, 30])
async def test_blocks_return_after_a_request_of_many_is_cancelled(
    stack: Any, client: AsyncClient, num_read: int
) -> None:
    params = SamplingParams(n=N, max_tokens=7000, ignore_eos=True)
    finished = 'pdserve_engine_requests_total{outcome="length"}'
    num_finished = stack.metrics("decode-0").get(finished, 0)
    call = client.generate(random_prompt(200), params, timeout_s=60)
    for _ in range(num_read):
        await anext(call)
    if not num_read:
        reading = asyncio.ensure_future(anext(call))
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await call.aclose()
    await asyncio.to_thread(stack.assert_idle)
    assert stack.metrics("decode-0").get(finished, 0) == num_finished


async def test_best_of_returns_the_likeliest_of_its_seeds(client: AsyncClient) -> None:
    prompt = random_prompt(40)
    calls = (generate(client, prompt, logprobs=0, seed=SEED + i) for i in range(N))
    answers = await asyncio.gather(*calls)
    alone = [(last.outputs[0].cumulative_logprob, tokens) for (tokens,), _, last in answers]
    best, _, last = await generate(client, prompt, n=2, best_of=N)
    assert best == [tokens for _, tokens in sorted(alone, reverse=True)[:2]]
    assert last.usage.num_output_tokens == N * NUM_TOKENS
