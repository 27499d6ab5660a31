"""Pictures through router, P, NIXL and D: the tokens of transformers' own processor and model."""

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from PIL import Image

from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import SamplingParams
from support.models import LLAVA, PATCH_SIZE
from support.picture_files import encoded, make_picture, picture_part

NUM_TOKENS = 100
TIMEOUT_S = 120.0
RED = encoded(make_picture(57, 40, seed=1))
BLUE = encoded(make_picture(20, 90, mode="RGBA", seed=2))

# A file, or a text.
Part = bytes | str


@functools.cache
def reference(folder: Path) -> tuple[Any, Any]:
    """Transformers' processor and model."""
    from transformers import AutoTokenizer, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    model: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return processor, model.eval()


def hf_answer(folder: Path, parts: Sequence[Part]) -> tuple[int, list[int]]:
    """Return how many tokens the prompt has, and those of the greedy answer."""
    processor, model = reference(folder)
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in parts
    ]
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    pictures = [Image.open(BytesIO(part)) for part in parts if isinstance(part, bytes)]
    inputs = processor(images=pictures or None, text=text, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
    length = inputs["input_ids"].shape[1]
    return length, tokens[0, length:].tolist()


class Served(NamedTuple):
    stack: Any
    expect: Callable[[Sequence[Part]], tuple[int, list[int]]]


@pytest.fixture(scope="module")
def served(make_served_model: Callable[..., Path], start_stack: Any) -> Iterator[Served]:
    model = make_served_model(LLAVA, max_position_embeddings=1024)
    with start_stack(
        model=model, dtype="float32", num_threads=1, decode=2, max_num_batched_tokens=32
    ) as stack:
        yield Served(stack, functools.partial(hf_answer, model))
        stack.restore()


CHATS: tuple[tuple[Part, ...], ...] = (
    (RED, "What is this?"),
    (BLUE, "What is this?"),
    ("Between ", RED, " and ", BLUE, " what has changed?"),
    ("No picture at all.",),
)


async def ask(http: httpx.AsyncClient, parts: Sequence[Part]) -> tuple[int, list[int]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else picture_part(part)
        for part in parts
    ]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["usage"]["prompt_tokens"], told["choices"][0]["token_ids"]


async def test_answers_are_those_of_transformers(served: Served) -> None:
    expected = [served.expect(parts) for parts in CHATS]
    assert len({tuple(tokens) for _, tokens in expected}) == len(CHATS)
    url = f"http://127.0.0.1:{served.stack.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        # The second time their prompts are cached.
        for _ in range(2):
            answers = await asyncio.gather(*(ask(http, parts) for parts in CHATS))
            assert list(answers) == expected
    handoffs = served.stack.metrics("router")['pdserve_handoffs_total{outcome="completed"}']
    assert handoffs >= 2 * len(CHATS)
    assert served.stack.metrics("prefill-0")["pdserve_prefix_cache_hits_total"] > 0
    served.stack.assert_idle()


async def test_an_answer_goes_on_when_its_decode_worker_dies(served: Served) -> None:
    parts = CHATS[2]
    _, expected = served.expect(parts)
    message = {
        "role": "user",
        "parts": [{"text": part} if isinstance(part, str) else {"picture": part} for part in parts],
    }
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    client = AsyncClient(served.stack.grpc_address)

    async def generate(has_begun: asyncio.Event) -> list[int]:
        tokens: list[int] = []
        async for output in client.generate([message], params, timeout_s=TIMEOUT_S):
            tokens += output.outputs[0].token_ids
            if len(tokens) > 5:
                has_begun.set()
        return tokens

    async def kill_amid_answers() -> None:
        begun = [asyncio.Event() for _ in range(4)]
        answers = [asyncio.create_task(generate(event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        await asyncio.to_thread(served.stack.kill_process, "decode-0")
        for answer in answers:
            assert await answer == expected

    await served.stack.until_redriven(kill_amid_answers)
    await client.close()
