"""LangChain against a router: langchain_chat.py URL MODEL"""

import sys
from typing import Any

from checks import run_checks
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

URL, MODEL = sys.argv[1:]
SHARED: dict[str, Any] = {
    "base_url": f"{URL}/v1",
    "api_key": "unused",
    "model": MODEL,
    "max_retries": 0,
    "timeout": 60,
}

chat = ChatOpenAI(**SHARED, max_completion_tokens=8, temperature=0)


def invoke() -> None:
    answer = chat.invoke([SystemMessage("Be brief."), HumanMessage("Tell me a story.")])
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


def names() -> None:
    first = chat.invoke([HumanMessage("I am Ann.", name="ann")])
    history = [HumanMessage("I am Ann.", name="ann"), first, HumanMessage("And you?", name="ann")]
    assert chat.invoke(history).content


def a_speaker_of_several() -> None:
    assert chat.invoke([HumanMessage("hi"), AIMessage("yes", name="bob"), HumanMessage("go on")])


def batch() -> None:
    answers = chat.batch([[HumanMessage(f"Story {i}", name="ann")] for i in range(4)])
    assert all(answer.content for answer in answers)


def stream() -> None:
    parts = list(chat.stream("Tell me a story."))
    assert "".join(str(part.content) for part in parts)


def stream_usage() -> None:
    parts = list(chat.stream("Tell me a story.", stream_usage=True))
    assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) > 0


def completions() -> None:
    """Several prompts are one request to /v1/completions."""
    answers = OpenAI(**SHARED, max_tokens=8, temperature=0).generate(["Once", "There was"])
    assert len(answers.generations) == 2


run_checks(
    "langchain-openai",
    invoke,
    names,
    a_speaker_of_several,
    batch,
    stream,
    stream_usage,
    completions,
)
