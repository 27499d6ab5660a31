"""A stack whose prefill worker keeps KV on a disk: what it loads goes on to decode, and a worker
that is started again finds it.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import SamplingParams
from support.metrics import total

BLOCK_SIZE = 16
NUM_CHATS, NUM_TURNS, NUM_ANSWERED = 6, 4, 9
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_ANSWERED, ignore_eos=True)
# Of the chats two at most.
NUM_BLOCKS = 40


@pytest.fixture(scope="module")
def stack(
    make_served_model: Callable[..., Path],
    start_stack: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("kv")
    flags = (
        f"--kv-offload-disk-path={path}",
        "--kv-offload-disk-bytes=100000000",
        # However busy the machine is.
        "--kv-offload-timeout-s=60",
        f"--num-blocks={NUM_BLOCKS}",
    )
    with start_stack(
        model=make_served_model("LlamaForCausalLM", max_position_embeddings=512),
        dtype="bfloat16",
        num_threads=1,
        flags={"prefill-0": flags},
        is_to_survive=False,
    ) as running:
        yield running


def words(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(3, 290), k=num_tokens)


async def ask(client: AsyncClient, prompt: list[int]) -> list[int]:
    token_ids: list[int] = []
    async for message in client.generate(prompt, PARAMS, timeout_s=120):
        for completion in message.outputs:
            assert not completion.HasField("error"), completion.error
            token_ids += completion.token_ids
    return token_ids


def num_loaded(stack: Any) -> float:
    return stack.metrics("prefill-0")['pdserve_kv_offload_tokens_total{outcome="loaded"}']


async def test_what_is_loaded_goes_on_to_decode(stack: Any, start_router: Any) -> None:
    """Chats of which the pool holds few; then the worker is killed."""
    chats = [words(number, 10 * BLOCK_SIZE) for number in range(NUM_CHATS)]
    client = AsyncClient(stack.grpc_address)
    try:
        for turn in range(NUM_TURNS):
            for number, chat in enumerate(chats):
                chat += words(100 * turn + number, 5)
                answer = await ask(client, chat)
                assert len(answer) == NUM_ANSWERED
                chat += answer
        assert num_loaded(stack) >= NUM_CHATS * (NUM_TURNS - 1) * 8 * BLOCK_SIZE
        stack.kill_process("prefill-0")
        stack.restore()
        for number, chat in enumerate(chats[:2]):
            # Enough that decode, which has the rest cached, does not do it alone.
            chat += words(1000 + number, 4 * BLOCK_SIZE)
            chat += await ask(client, chat)
        assert num_loaded(stack) >= 2 * 9 * BLOCK_SIZE
    finally:
        await client.close()
    samples = stack.metrics("prefill-0")
    assert total(samples, "pdserve_kv_offload_bad_blocks_total") == 0
    async with start_router(stack, decode="decode-0", disaggregation=False) as alone:
        for chat in chats:
            start = len(chat) - NUM_ANSWERED
            token_ids, _ = await alone.ask(chat[:start], PARAMS, cache_salt="another")
            assert token_ids == chat[start:]
