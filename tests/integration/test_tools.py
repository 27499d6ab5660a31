"""Calls of tools and reasoning by a real model, through router, P, NIXL and D."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import openai
import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.chat_formats.registry import FORMATS
from support.chat_models import MARKERS, make_chat_model
from support.cut_proxy import cut_proxies
from support.grammars import EOS
from support.stack import RunningStack

NUM_SEEDS = 2
QUESTION = [{"role": "user", "content": "Mia found a kite. What is the weather by the sea?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
# Takes some hundred tokens.
STORY = {
    "type": "object",
    "properties": {
        "words": {
            "type": "array",
            "items": {"enum": ["Mia found", "a kite", "Theo a boat"]},
            "minItems": 60,
            "maxItems": 80,
        }
    },
    "required": ["words"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "now": NOW, "tell": STORY}
# Of an answer that is to be long.
BEGUN_CHARS = 50


def named(name: str, **fields: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = {name: named(name, parameters=each, strict=True) for name, each in SCHEMAS.items()}
SHORT = [TOOLS["get_weather"], TOOLS["now"]]
FORCED = {"tools": SHORT, "tool_choice": "required"}


class Call(NamedTuple):
    id: str | None
    name: str
    arguments: str


class Answer(NamedTuple):
    """What a client has of a chat."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]
    finish_reason: str | None


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """All have one name."""
    return lambda name: make_chat_model(tmp_path_factory.mktemp(name) / "tiny", name)


@pytest.fixture(scope="module")
def stack(start_stack: Any, make_model: Callable[[str], Path]) -> Iterator[RunningStack]:
    with start_stack(
        model=make_model("hermes"), num_threads=1, decode=2, max_num_batched_tokens=32
    ) as stack:
        yield stack


@pytest.fixture
async def client(stack: RunningStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(stack.http_port) as client:
        yield client


def client_of(port: int) -> openai.AsyncOpenAI:
    url = f"http://127.0.0.1:{port}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0)


def thinking(prompt_end: str) -> dict[str, Any]:
    return {"extra_body": {"chat_template_kwargs": {"thinking": prompt_end}}}


# The prompt says that there is no reasoning.
AT_ONCE = thinking("<think>\n\n</think>\n\n")


def make_body(name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ids of calls depend on the request's name."""
    headers = {"x-request-id": name}
    fields = {"model": "tiny", "messages": QUESTION, "max_completion_tokens": 1000}
    return {**fields, "extra_headers": headers, **AT_ONCE, **body}


async def ask(client: openai.AsyncOpenAI, name: str, **body: Any) -> Answer:
    """Return an answer, which is the same whole and streamed."""
    whole, streamed = await asyncio.gather(
        ask_whole(client, name, **body), ask_streamed(client, name, **body)
    )
    assert whole == streamed
    return whole


async def ask_whole(client: openai.AsyncOpenAI, name: str, **body: Any) -> Answer:
    answer = await client.chat.completions.create(**make_body(name, body))
    (choice,) = answer.choices
    message = choice.message
    calls = (Call(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ())
    reasoning = getattr(message, "reasoning", None)
    return Answer(message.content or "", reasoning or "", tuple(calls), choice.finish_reason)


async def ask_streamed(
    client: openai.AsyncOpenAI, name: str, begun: asyncio.Event | None = None, **body: Any
) -> Answer:
    """`begun` is set with BEGUN_CHARS of the arguments."""
    stream = await client.chat.completions.create(stream=True, **make_body(name, body))
    choices, num_chars = [], 0
    async for chunk in stream:
        choices.append(chunk.choices[0])
        for piece in chunk.choices[0].delta.tool_calls or ():
            num_chars += len(piece.function.arguments or "")
        if begun is not None and num_chars > BEGUN_CHARS:
            begun.set()
    deltas = [choice.delta for choice in choices]
    return Answer(
        "".join(delta.content or "" for delta in deltas),
        "".join(getattr(delta, "reasoning", None) or "" for delta in deltas),
        joined_calls([piece for delta in deltas for piece in delta.tool_calls or ()]),
        choices[-1].finish_reason,
    )


def joined_calls(pieces: Sequence[Any]) -> tuple[Call, ...]:
    calls = []
    for index, group in itertools.groupby(pieces, lambda piece: piece.index):
        first, *others = group
        assert index == len(calls)
        assert not any(piece.id or piece.function.name for piece in others)
        arguments = "".join(piece.function.arguments or "" for piece in (first, *others))
        calls.append(Call(first.id, first.function.name, arguments))
    return tuple(calls)


def check_calls(answer: Answer, names: Sequence[str]) -> None:
    assert answer.finish_reason == "tool_calls"
    assert answer.calls
    assert not answer.content
    assert len({call.id for call in answer.calls}) == len(answer.calls)
    for call in answer.calls:
        assert call.name in names
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


# By kind: what is asked, and which tools may be called.
CHOICES: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "required": ({}, ("get_weather", "now")),
    "one": ({"parallel_tool_calls": False}, ("get_weather", "now")),
    "named": ({"tool_choice": named("get_weather")}, ("get_weather",)),
    "allowed": (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [named("now")]},
            }
        },
        ("now",),
    ),
}


async def test_calls_that_are_asked_for_are_valid(client: openai.AsyncOpenAI) -> None:
    for kind, (choice, names) in CHOICES.items():
        body = {**FORCED, **choice}
        asked = (ask(client, f"{kind}-{seed}", seed=seed, **body) for seed in range(NUM_SEEDS))
        answers = await asyncio.gather(*asked)
        for answer in answers:
            check_calls(answer, names)
            assert kind != "one" or len(answer.calls) == 1


async def test_a_model_that_may_call_does_as_it_likes(client: openai.AsyncOpenAI) -> None:
    """Here what it likes is biased."""
    call, end = (str(token_id) for token_id in (marker_id("<tool_call>"), EOS))
    content = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    body = {"tools": SHORT, "seed": 1}
    calling = await ask(
        client, "calling", **body, response_format=content, logit_bias={call: 100, end: 50}
    )
    check_calls(calling, ("get_weather", "now"))
    saying = await ask(client, "saying", **body, response_format=content, logit_bias={call: -100})
    assert (saying.finish_reason, saying.calls) == ("stop", ())
    jsonschema.validate(json.loads(saying.content), WEATHER)
    free = await ask(client, "free", **body, logit_bias={call: -100})
    assert (free.finish_reason, free.calls) == ("stop", ())
    assert free.content


def marker_id(marker: str) -> int:
    return 1392 - len(MARKERS) + MARKERS.index(marker)


@pytest.mark.parametrize("chat_format", [name for name in FORMATS if name != "hermes"])
async def test_calls_of_other_formats_are_valid(
    stack: RunningStack, start_router: Any, make_model: Callable[[str], Path], chat_format: str
) -> None:
    reasoning = FORMATS[chat_format].reasoning
    body = {
        **FORCED,
        "parallel_tool_calls": False,
        **thinking("" if reasoning is None else "".join(reasoning)),
    }
    router = start_router(stack, prefill="prefill-0", model=str(make_model(chat_format)))
    async with router as routed, client_of(routed.server.http_port) as client:
        answer = await ask(client, "mine", seed=1, **body)
        check_calls(answer, ("get_weather", "now"))
        assert len(answer.calls) == 1


# ---- reasoning


@pytest.mark.parametrize("prompt_end", ["", "<think>\n\n</think>\n\n"])
async def test_without_reasoning_a_constraint_begins_at_once(
    client: openai.AsyncOpenAI, prompt_end: str
) -> None:
    """The model does not like to begin it, or the prompt has closed it."""
    content = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    bias = {str(marker_id("<think>")): -100}
    body = make_body("r", {"response_format": content, "logit_bias": bias, **thinking(prompt_end)})
    answer = await client.chat.completions.create(**body)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), WEATHER)
    assert not getattr(choice.message, "reasoning", None)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


async def test_a_constraint_begins_behind_reasoning(client: openai.AsyncOpenAI) -> None:
    """The prompt has begun it; where it ends the model says, by chance."""
    content = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    end = marker_id("</think>")
    extra = {**thinking("<think>\n")["extra_body"], "return_token_ids": True}
    bias = {str(marker_id("<think>")): -100, str(end): 10}
    lengths = []
    for seed in (1, 2):
        fields = {"response_format": content, "logit_bias": bias, "seed": seed, "extra_body": extra}
        answer = await client.chat.completions.create(**make_body(f"{seed}", fields))
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), WEATHER)
        lengths.append(choice.token_ids.index(end))
        assert bool(getattr(choice.message, "reasoning", None)) == (lengths[-1] > 0)
        assert answer.usage.completion_tokens_details.reasoning_tokens == lengths[-1]
    assert max(lengths) > 0


async def test_reasoning_that_takes_all_room_ends_for_its_length(
    client: openai.AsyncOpenAI,
) -> None:
    content = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    bias = {str(marker_id("<think>")): 100, str(marker_id("</think>")): -100}
    asked = [{"response_format": content}, FORCED]
    for body in ({**each, **thinking(end)} for each in asked for end in ("", "<think>\n")):
        answer = await ask(client, "r", **body, logit_bias=bias, max_completion_tokens=20)
        assert (answer.finish_reason, answer.content, answer.calls) == ("length", "", ())
        assert answer.reasoning
        # Turned off, there is none; the template knows nothing of it.
        off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
        answer = await ask(client, "r", **{**body, **off}, seed=1)
        assert (answer.reasoning, bool(answer.content or answer.calls)) == ("", True)


# ---- streams that go on


async def test_a_stream_goes_on_at_another_router_in_the_middle_of_arguments(
    stack: RunningStack, start_router: Any
) -> None:
    tell = pb2.Tool(name="tell", parameters=json.dumps(STORY))
    chat = pb2.ChatPrompt(tools=[tell], tool_choice=pb2.TOOL_CHOICE_REQUIRED)
    bias = {marker_id("<think>"): -100.0}
    params = SamplingParams(seed=3, max_tokens=1000, logit_bias=bias)
    fields = {"chat": chat, "request_id": "mine", "timeout_s": 60}

    async def outputs_of(client: AsyncClient, cut: Callable[[], None]) -> list[Any]:
        outputs, num_chars = [], 0
        async for output in client.generate(QUESTION, params, **fields):
            outputs += output.outputs
            num_chars += sum(len(c.arguments) for o in output.outputs for c in o.tool_calls)
            if num_chars > BEGUN_CHARS:
                cut()
        await client.close()
        return outputs

    def answer_of(outputs: list[Any]) -> tuple[Any, ...]:
        pieces = [piece for output in outputs for piece in output.tool_calls]
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        (first, *others) = pieces
        assert not any(piece.id or piece.name for piece in others)
        arguments = "".join(piece.arguments for piece in pieces)
        return (token_ids, first.id, first.name, arguments, outputs[-1].finish_reason)

    async with (
        start_router(stack, prefill="prefill-0") as one,
        start_router(stack, prefill="prefill-0") as other,
        cut_proxies(one.server.grpc_port, 1) as (proxy,),
    ):
        address = f"127.0.0.1:{other.server.grpc_port}"
        whole = answer_of(await outputs_of(AsyncClient(address), lambda: None))
        resumed = answer_of(await outputs_of(AsyncClient([proxy.address, address]), proxy.cut))
        # Both ended there.
        assert other.count("pdserve_requests_total", model="tiny", outcome="stop") == 2
    assert resumed == whole
    jsonschema.validate(json.loads(whole[3]), STORY)
