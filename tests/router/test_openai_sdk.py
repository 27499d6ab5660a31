"""OpenAI's own client, against a running router."""

import openai
import pytest

from pdserve_common.types.engine import ErrorCode
from support.fake_worker import EOS
from support.router_stack import ANSWER_TEXT
from support.waiting import until

MESSAGES = [{"role": "user", "content": "hello"}]


STACK = {"http": True}


async def test_chat_over_several_turns(client) -> None:
    messages = list(MESSAGES)
    for _ in range(2):
        answer = await client.chat.completions.create(model="tiny", messages=messages)
        assert answer.choices[0].message.content == ANSWER_TEXT
        messages += [answer.choices[0].message, MESSAGES[0]]


async def test_streamed_chat_with_usage(client) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert ANSWER_TEXT.startswith(
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    )
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 3


def joined_bytes(content) -> bytes:
    return bytes(byte for token in content for byte in token.bytes)


async def test_chat_logprobs(client, tokenizer) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    token_ids = [*tokenizer.backend.encode(ANSWER_TEXT).ids, EOS]
    assert [token.token for token in content] == list(map(tokenizer.token_text, token_ids))
    assert [token.logprob for token in content] == [-token_id / 64 for token_id in token_ids]
    assert joined_bytes(content) == ANSWER_TEXT.encode() + b"<|eos|>"
    for token in content:
        assert [(top.token, top.logprob) for top in token.top_logprobs] == [
            (tokenizer.token_text(4), -1.0),
            (tokenizer.token_text(5), -2.0),
        ]


async def test_streamed_chat_logprobs_are_complete(start_stack, tokenizer) -> None:
    """Also those of parts of characters, whose chunks have no text."""
    text = "😀𐍈"
    async with (
        start_stack(http=True, answer=text) as stack,
        openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused") as client,
    ):
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, logprobs=True, stream=True
        )
        choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == text
    content = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert len(content) == len(tokenizer.backend.encode(text).ids) + 1
    assert joined_bytes(content) == text.encode() + b"<|eos|>"
    assert all(token.top_logprobs == [] for token in content)


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(client, tokenizer, stream) -> None:
    answer = await client.completions.create(
        model="tiny", prompt="hello", max_tokens=50, logprobs=1, stream=stream
    )
    answers = [chunk async for chunk in answer] if stream else [answer]
    parts = [answer.choices[0].logprobs for answer in answers if answer.choices[0].logprobs]
    token_ids = tokenizer.backend.encode(ANSWER_TEXT).ids
    tokens = [token for part in parts for token in part.tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert "".join(tokens[:-1]) == ANSWER_TEXT
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert parts[0].token_logprobs[0] == -token_ids[0] / 64
    assert parts[0].top_logprobs[0] == {tokens[0]: -token_ids[0] / 64, tokenizer.token_text(4): -1}


async def test_completion_logprobs_of_parts_of_characters(start_stack) -> None:
    """Each has a name of its own, and stands where its character begins."""
    async with (
        start_stack(http=True, answer="a𐍈b") as stack,
        openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused") as client,
    ):
        answer = await client.completions.create(model="tiny", prompt="hello", logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "a𐍈b"
    assert "".join(logprobs.tokens) == r"abytes:\xf0bytes:\x90bytes:\x8dbytes:\x88b<|eos|>"
    assert logprobs.text_offset == [0, 1, 1, 1, 1, 2, 3]


async def test_scoring_a_prompt(client) -> None:
    answer = await client.completions.create(
        model="tiny", prompt="hello", max_tokens=0, echo=True, logprobs=0
    )
    assert answer.choices[0].text == "hello"
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == answer.usage.prompt_tokens == answer.usage.total_tokens
    assert logprobs.token_logprobs[0] is None


async def test_errors_are_the_sdks_own(client, stack) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    await stack.decode.stop()
    await until(lambda: not stack.server.router.is_ready)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model="tiny", prompt="x")
    assert caught.value.status_code == 503


async def test_an_error_in_mid_stream_is_raised(client, stack) -> None:
    async def die(running) -> None:
        await until(lambda: stack.metric("pdserve_generation_tokens_total", model="tiny") == 1)
        running.fail(ErrorCode.INTERNAL, "the model was lost")

    stack.decode.behave = die
    stream = await client.completions.create(model="tiny", prompt="hello", stream=True)
    with pytest.raises(openai.APIError, match="was lost"):
        async for _ in stream:
            pass
