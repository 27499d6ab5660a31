"""The bundled model answers from its context, so a wrong KV block shows as a wrong answer."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pdserve_client.client import AsyncClient
from pdserve_common.engine_types import EngineCoreRequest
from pdserve_common.metrics import KVTransferMetrics
from pdserve_common.sampling_params import SamplingParams
from pdserve_engine.clients.loading import LoadedEngine, load_engine
from pdserve_engine.config import EngineConfig
from tiny_model_data import make_recall_prompt

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parent.parent.parent / "models/pdserve-tiny"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
NUM_PROMPTS = 60


async def test_recall_survives_the_handoff(start_stack: Any) -> None:
    prompts = [
        make_recall_prompt(num_tokens, seed=1000 + i)
        for i, num_tokens in enumerate([100, 300, 320] * (NUM_PROMPTS // 3))
    ]
    with start_stack(model=MODEL) as stack:
        client = AsyncClient(stack.grpc_address)
        try:
            answers = await asyncio.gather(*(answer(client, p.messages) for p in prompts))
        finally:
            await client.close()
        assert stack.metrics("router")['pdserve_handoffs_total{outcome="completed"}'] > 50
    right = sum(a == prompt.answer for a, prompt in zip(answers, prompts, strict=True))
    assert right >= 0.95 * NUM_PROMPTS, f"{right} of {NUM_PROMPTS}"


async def answer(client: AsyncClient, messages: Any) -> str:
    text = ""
    async for output in client.generate(messages, GREEDY, timeout_s=60):
        text += "".join(completion.text for completion in output.outputs)
    return text


@pytest.fixture(scope="module")
def engine() -> Any:
    config = EngineConfig(
        model=str(MODEL), num_threads=1, kv_connector="none", kv_cache_memory_mib=64
    )
    metrics = KVTransferMetrics(CollectorRegistry())
    loaded = load_engine(config, role="decode", engine_id="recall", metrics=metrics)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("is_corrupted", [False, True])
def test_a_corrupted_block_shows_as_a_wrong_answer(
    engine: LoadedEngine, is_corrupted: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompts = [make_recall_prompt(300, seed=i) for i in range(20)]
    right = 0
    for prompt in prompts:
        token_ids = tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, return_dict=False
        )
        fact = fact_position(tokenizer, token_ids, prompt.answer)
        text = tokenizer.decode(
            generate(engine, token_ids, fact if is_corrupted else None), skip_special_tokens=True
        )
        right += text == prompt.answer
    assert right <= 4 if is_corrupted else right >= 19, f"{right} of {len(prompts)}"


def fact_position(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], answer: str
) -> tuple[int, int]:
    """Return the token range of the fact that the question asks for."""
    for start in range(len(token_ids)):
        for end in range(start + 1, min(start + 16, len(token_ids))):
            if tokenizer.decode(token_ids[start:end]).strip() == answer.strip():
                return start, end
    raise AssertionError(f"{answer!r} is not in the prompt")


def generate(
    engine: LoadedEngine, token_ids: list[int], corrupted: tuple[int, int] | None
) -> list[int]:
    """Prefill, then overwrite the blocks that hold the `corrupted` tokens, then decode."""
    core = engine.core
    params = dataclasses.replace(GREEDY, max_tokens=12)
    core.scheduler.kv.block_pool.reset_prefix_cache()
    core.add_request(
        EngineCoreRequest(
            request_id="r",
            prompt_token_ids=tuple(token_ids),
            sampling_params=params,
            eos_token_id=engine.info.eos_token_ids[0],
        )
    )
    executor: Any = core.executor
    tokens: list[int] = []
    is_clean = corrupted is not None
    while core.has_work():
        for output in core.step().outputs.get(0, ()):
            tokens.extend(output.new_token_ids)
        if tokens and is_clean and corrupted is not None:
            (block_ids,) = core.scheduler.kv.get_block_ids("r")
            size = engine.info.block_size
            for index in range(corrupted[0] // size, (corrupted[1] - 1) // size + 1):
                executor.rank.kv_cache.tensor[block_ids[index]].normal_()
            is_clean = False
    return tokens[:-1]
