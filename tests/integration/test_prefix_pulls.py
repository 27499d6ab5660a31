"""Chats of many turns over real workers and NIXL: P reads from D what D has cached of them."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import SamplingParams
from support.metrics import total

BLOCK_SIZE = 16
NUM_CHATS, NUM_TURNS = 4, 10
NUM_ANSWERED, NUM_NEW = 21, 7
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_ANSWERED, ignore_eos=True)
# However busy the machine is.
FLAGS = ("--prefix-pulls", "--prefix-pull-timeout-s=20")
WORKERS = ("prefill-0", "decode-0", "decode-1")

Chats = list[list[int]]


@pytest.fixture(scope="module")
def stack(make_served_model: Callable[..., Path], start_stack: Any) -> Iterator[Any]:
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=1024)
    with start_stack(
        model=model,
        dtype="bfloat16",
        num_threads=1,
        decode=2,
        flags=dict.fromkeys(WORKERS, FLAGS),
        is_to_survive=False,
    ) as running:
        yield running


def words(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(3, 290), k=num_tokens)


@asynccontextmanager
async def client_of(stack: Any) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(stack.grpc_address)
    try:
        yield client
    finally:
        await client.close()


async def ask(client: AsyncClient, prompt: list[int]) -> list[int]:
    token_ids: list[int] = []
    async for message in client.generate(prompt, PARAMS, timeout_s=120):
        for completion in message.outputs:
            assert not completion.HasField("error"), completion.error
            token_ids += completion.token_ids
    return token_ids


async def take_turn(client: AsyncClient, chats: Chats, turn: int) -> None:
    """Each chat says something new and is answered, all at the same time."""
    for number, chat in enumerate(chats):
        chat += words(100 * turn + number, NUM_NEW)
    answers = await asyncio.gather(*(ask(client, chat) for chat in chats))
    for chat, token_ids in zip(chats, answers, strict=True):
        assert len(token_ids) == NUM_ANSWERED
        chat += token_ids


def num_computed(stack: Any) -> float:
    """Prompt tokens that P has not found in its cache."""
    samples = stack.metrics("prefill-0")
    queries = total(samples, "pdserve_prefix_cache_queries_total")
    return queries - total(samples, "pdserve_prefix_cache_hits_total")


def num_prefix_tokens(stack: Any, outcome: str) -> float:
    return stack.metrics("prefill-0")[f'pdserve_kv_prefix_tokens_total{{outcome="{outcome}"}}']


async def check_answers(stack: Any, start_router: Any, chats: Chats) -> None:
    """The last ones are what a decode worker that has nothing cached says alone."""
    async with start_router(stack, decode="decode-0", disaggregation=False) as alone:
        for chat in chats:
            start = len(chat) - NUM_ANSWERED
            token_ids, _ = await alone.ask(chat[:start], PARAMS, cache_salt="another")
            assert token_ids == chat[start:]


async def test_no_block_of_a_chat_is_computed_twice(stack: Any, start_router: Any) -> None:
    chats = [words(number, 3 * BLOCK_SIZE) for number in range(NUM_CHATS)]
    before = num_computed(stack)
    async with client_of(stack) as client:
        for turn in range(NUM_TURNS):
            await take_turn(client, chats, turn)
    num_first = NUM_CHATS * 3 * BLOCK_SIZE
    # Of an answer the last token is sampled, and has no KV yet.
    num_new = NUM_CHATS * (NUM_NEW + 1) * NUM_TURNS
    num_spare = NUM_CHATS * BLOCK_SIZE * NUM_TURNS
    assert num_computed(stack) - before <= num_first + num_new + num_spare
    num_pulled = num_prefix_tokens(stack, "pulled")
    assert num_pulled >= NUM_CHATS * (NUM_TURNS - 1) * (NUM_ANSWERED - BLOCK_SIZE)
    assert num_prefix_tokens(stack, "failed") == num_prefix_tokens(stack, "given_up") == 0
    print(f"{num_computed(stack) - before:g} prompt tokens computed, {num_pulled:g} pulled")
    await check_answers(stack, start_router, chats)
    stack.check_alive()
    stack.assert_idle()


async def test_a_decode_worker_dies_that_has_the_chats(stack: Any, start_router: Any) -> None:
    """The last one of this stack."""
    chats = [words(50 + number, 20 * BLOCK_SIZE) for number in range(NUM_CHATS)]
    async with client_of(stack) as client:
        await take_turn(client, chats, 0)
        turn = asyncio.create_task(take_turn(client, chats, 1))
        await asyncio.sleep(0.05)
        stack.kill_process("decode-1")
        await turn
        await take_turn(client, chats, 2)
    stack.assert_idle(without="decode-1")
    await check_answers(stack, start_router, chats)
