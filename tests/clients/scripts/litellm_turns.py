"""litellm against a router: litellm_turns.py URL MODEL"""

import os
import sys
from typing import Any

# It would fetch a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from checks import error_of, run_checks

URL, MODEL = sys.argv[1:]
# Both of its ways to an OpenAI-compatible server.
PROVIDERS = ("openai", "hosted_vllm")


def ask(provider: str, messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=f"{URL}/v1",
        api_key="unused",
        messages=messages,
        max_tokens=8,
        temperature=0,
        timeout=60,
        num_retries=0,
        **fields,
    )


def three_turns() -> None:
    """The answer goes back as litellm returns it: as its object, or as a dict."""
    for provider in PROVIDERS:
        for dump in (lambda message: message, lambda message: message.model_dump()):
            messages: list[Any] = [{"role": "user", "content": "Tell me a story."}]
            for _ in range(3):
                answer = ask(provider, messages).choices[0].message
                assert answer.content
                messages += [dump(answer), {"role": "user", "content": "And then?"}]


def stream() -> None:
    for provider in PROVIDERS:
        parts = ask(provider, [{"role": "user", "content": "Go on."}], stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts)


def text() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        api_base=f"{URL}/v1",
        api_key="unused",
        prompt=["Once", "There was"],
        max_tokens=4,
    )
    assert len(answer.choices) == 2


def errors() -> None:
    messages = [{"role": "user", "content": "x"}]
    error = error_of(litellm.BadRequestError, lambda: ask("openai", messages, top_p=7))
    assert "top_p" in str(error)


run_checks("litellm", three_turns, stream, text, errors)
