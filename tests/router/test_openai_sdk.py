"""OpenAI's own client, against a running router."""

import openai
import pytest

from conftest import ANSWER_TEXT, until

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def stack(start_stack):
    async with start_stack(http=True) as stack:
        yield stack
        await stack.assert_idle()


@pytest.fixture
async def client(stack):
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="unused", max_retries=0
    ) as client:
        yield client


async def test_completions(client) -> None:
    answer = await client.completions.create(model="tiny", prompt="hello", max_tokens=50)
    assert answer.choices[0].text == ANSWER_TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_chat_over_several_turns(client) -> None:
    messages = list(MESSAGES)
    for _ in range(2):
        answer = await client.chat.completions.create(model="tiny", messages=messages)
        assert answer.choices[0].message.content == ANSWER_TEXT
        messages += [answer.choices[0].message, MESSAGES[0]]


async def test_streamed_completions(client) -> None:
    stream = await client.completions.create(
        model="tiny", prompt="hello", max_tokens=50, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER_TEXT


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


async def test_extra_parameters(client, stack) -> None:
    await client.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body={"top_k": 5, "ignore_eos": True}
    )
    assert stack.decode.requests[0].sampling_params.top_k == 5


async def test_models(client) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "pdserve"


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
        stack.decode.cut()

    stack.decode.behave = die
    stream = await client.completions.create(model="tiny", prompt="hello", stream=True)
    with pytest.raises(openai.APIError, match="was lost"):
        async for _ in stream:
            pass
