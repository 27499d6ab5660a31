"""OpenAI's Python SDK against a router: openai_sdk.py URL MODEL"""

import functools
import sys
from typing import Any

import openai
from checks import error_of, run_checks

URL, MODEL = sys.argv[1:]
QUESTION: list[Any] = [{"role": "user", "content": "Tell me a story."}]

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0, timeout=60)


def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def chat() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 8


def chat_stream() -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_completion_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert last.usage is not None
    assert last.choices == []


def chat_stream_helper() -> None:
    """The SDK's accumulating stream, which accepts an answer only if it ended by itself."""
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, max_completion_tokens=64, temperature=0, stop=["e"]
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == text


def several_turns() -> None:
    """With the SDK's own objects as messages, and the newer roles."""
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, *QUESTION]
    for _ in range(2):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, max_completion_tokens=8
        )
        messages += [answer.choices[0].message, *QUESTION]
    dumped = answer.choices[0].message.model_dump()
    client.chat.completions.create(model=MODEL, messages=[*messages, dumped, *QUESTION])


def optional_fields() -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=[{**QUESTION[0], "name": "ann"}, {"role": "assistant", "content": None}],
        max_completion_tokens=4,
        metadata={"team": "a"},
        user="u",
        store=True,
        prompt_cache_key="k",
        verbosity="low",
        safety_identifier="s",
        service_tier="auto",
        tool_choice="none",
        parallel_tool_calls=True,
        response_format={"type": "text"},
    )


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=8, logprobs=2)
    assert answer.choices[0].text
    assert answer.choices[0].logprobs is not None


def completions_of_several_prompts() -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    stream = client.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=4, stream=True, temperature=0
    )
    assert {choice.index for chunk in stream for choice in chunk.choices} == {0, 1}


def completions_stream() -> None:
    stream = client.completions.create(model=MODEL, prompt="Once", max_tokens=8, stream=True)
    assert "".join(choice.text for chunk in stream for choice in chunk.choices)


def errors() -> None:
    unknown = error_of(
        openai.NotFoundError, lambda: client.completions.create(model="other", prompt="x")
    )
    assert unknown.code == "model_not_found"
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for fields in ({"temperature": -1}, {"tools": tools}):
        ask = functools.partial(client.chat.completions.create, model=MODEL, messages=QUESTION)
        refused = error_of(openai.BadRequestError, functools.partial(ask, **fields))
        assert refused.param in fields


run_checks(
    "openai",
    models,
    chat,
    chat_stream,
    chat_stream_helper,
    several_turns,
    optional_fields,
    completions,
    completions_of_several_prompts,
    completions_stream,
    errors,
)
