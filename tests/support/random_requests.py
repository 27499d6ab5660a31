"""Requests of all kinds, by gRPC and as OpenAI's clients send them, and all that their clients get.

Prompts and answers of the bundled model, as `support.chat_models` makes it for the format hermes,
take less than MAX_MODEL_LEN tokens.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
import tokenizers

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.sampling_params import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from support.chat_models import MARKERS
from support.grammars import EOS, VOCAB_SIZE
from support.stack import Routed

MAX_MODEL_LEN = 192
TIMEOUT_S = 300.0
WORDS = "a", "the", "Mia", " kite", "cats", "."
TEXT = (
    "One afternoon Mia found a kite in the garden. Theo found a boat by the sea. Mia and Theo "
    "found two cats, and one afternoon the cats found a kite by the sea. "
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Mia", "Theo", "Oscar"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "friends": {"type": "array", "items": {"enum": ["a kite", "a boat"]}, "maxItems": 3},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}
# What a client's tools become.
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call"],
        "tags": [
            {
                "type": "tag",
                "begin": "<call>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</call>",
            }
        ],
        "at_least_one": True,
    },
}
REGEX = "(Mia|Theo) [a-z]{3,9}( and [a-z]{2,9}){0,2}[.!]"
CHOICE = ("a kite", "a boat by the sea", "a boat", "two cats")
CONSTRAINTS = (
    StructuredOutputsParams(json_schema=json.dumps(SCHEMA)),
    StructuredOutputsParams(regex=REGEX),
    StructuredOutputsParams(choice=CHOICE),
    StructuredOutputsParams(structural_tag=json.dumps(TAG)),
)
HTTP_CONSTRAINTS: Sequence[dict[str, Any]] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": REGEX}},
    {"guided_choice": list(CHOICE)},
)
TOOLS = [
    {"type": "function", "function": {"name": "befriend", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
THINK, CALL = (
    VOCAB_SIZE - len(MARKERS) + MARKERS.index(marker) for marker in ("<think>", "<tool_call>")
)
# What a prompt ends with: nothing, or reasoning that is over.
THINKING = ("", "<think>\n\n</think>\n\n")


class Answer(NamedTuple):
    """What a client gets: token ids of the prompt and of each completion, and all else."""

    prompt: list[int]
    token_ids: list[list[int]]
    shown: object


# Is told how often a request was sent again so far.
Watch = Callable[[int], None]


class GrpcRequest(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    lora_name: str

    def without_drafts(self) -> "GrpcRequest":
        return self._replace(params=replace(self.params, max_draft_tokens=0))

    async def ask(self, routed: Routed, watch: Watch) -> Answer:
        found: dict[int, dict[str, Any]] = {}
        prompt_logprobs: list[str] = []
        last = pb2.RequestOutput()
        fields: dict[str, Any] = {"lora_name": self.lora_name, "timeout_s": TIMEOUT_S}
        async for last in routed.client.generate(self.prompt, self.params, **fields):
            watch(last.metrics.num_redrives)
            prompt_logprobs += map(str, last.prompt_logprobs.positions)
            for part in last.outputs:
                assert not part.HasField("error"), part.error
                new = {
                    "token_ids": list(part.token_ids),
                    "text": part.text,
                    "logprobs": list(map(str, part.logprobs.positions)),
                    "reason": f"{part.finish_reason} {part.stop_token_id} {part.stop_string}"
                    if part.finish_reason
                    else None,
                }
                found[part.index] = joined(found.get(part.index), new)
        completions = [found[index] for index in sorted(found)]
        usage = (last.usage.num_prompt_tokens, last.usage.num_output_tokens)
        return Answer(
            self.prompt,
            [each["token_ids"] for each in completions],
            (completions, usage, prompt_logprobs),
        )


class HttpRequest(NamedTuple):
    path: str
    body: dict[str, Any]
    # Ids of calls depend on it.
    name: str

    def without_drafts(self) -> "HttpRequest":
        return self._replace(body={**self.body, "max_draft_tokens": 0})

    async def ask(self, routed: Routed, watch: Watch) -> Answer:
        url = f"http://127.0.0.1:{routed.server.http_port}{self.path}"
        headers = {"x-request-id": self.name}
        async with (
            httpx.AsyncClient(timeout=TIMEOUT_S) as client,
            client.stream("POST", url, json=self.body, headers=headers) as response,
        ):
            read = _read_stream if self.body["stream"] else _read_whole
            answer = await read(response, watch)
        assert response.status_code == 200, (self.body, answer)
        assert "error" not in answer, answer
        choices = answer["choices"]
        usage = answer["usage"]
        shown = {name: answer.get(name) for name in ("choices", "prompt_logprobs")}
        return Answer(
            answer.get("prompt_token_ids") or choices[0]["prompt_token_ids"],
            [choice["token_ids"] for choice in choices],
            (shown, usage["prompt_tokens"], usage["completion_tokens"]),
        )


Asked = GrpcRequest | HttpRequest


async def _read_whole(response: httpx.Response, watch: Watch) -> dict[str, Any]:
    await response.aread()
    watch(int(response.headers.get("pdserve-num-redrives", 0)))
    answer: dict[str, Any] = response.json()
    return answer


async def _read_stream(response: httpx.Response, watch: Watch) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            chunk = json.loads(line.removeprefix("data: "))
            watch((chunk.get("metrics") or {}).get("num_redrives", 0))
            choices = joined(answer.get("choices"), chunk.pop("choices", []))
            answer |= {name: value for name, value in chunk.items() if value is not None}
            answer["choices"] = choices
    return answer


def joined(before: Any, new: Any) -> Any:
    """Return what pieces of an answer are together."""
    if before is None or new is None:
        return new if before is None else before
    if isinstance(new, dict):
        keys = {**before, **new}
        return {key: joined(before.get(key), new.get(key)) for key in keys}
    if isinstance(new, list) and any(isinstance(each, dict) and "index" in each for each in new):
        found = {each["index"]: each for each in before}
        for each in new:
            found[each["index"]] = joined(found.get(each["index"]), each)
        return [found[index] for index in sorted(found)]
    return before + new if isinstance(new, list | str) else new


def random_requests(num: int, tokenizer: tokenizers.Tokenizer, loras: Sequence[str]) -> list[Asked]:
    """Return as many of either kind; some are for one of the adapters."""
    rng = random.Random(num)
    return [
        _random_http(rng, index, loras) if index % 2 else _random_grpc(rng, index, tokenizer, loras)
        for index in range(num)
    ]


def _random_grpc(
    rng: random.Random, index: int, tokenizer: tokenizers.Tokenizer, loras: Sequence[str]
) -> GrpcRequest:
    prompt = tokenizer.encode(f"Story {index}. {TEXT * 2}").ids[: rng.randrange(12, 80)]
    return GrpcRequest(prompt, _random_params(rng, index), _maybe(rng, 0.3, rng.choice(loras), ""))


def _random_params(rng: random.Random, index: int) -> SamplingParams:
    """Any that go together."""

    def maybe(probability: float, value: Any, otherwise: Any) -> Any:
        return _maybe(rng, probability, value, otherwise)

    words = rng.sample(WORDS, k=2)
    max_tokens = rng.randrange(1, 100)
    constraint = maybe(0.35, rng.choice(CONSTRAINTS), None)
    return SamplingParams(
        n=maybe(0.2, rng.randrange(2, 4), 1),
        temperature=maybe(0.3, 0.0, rng.choice([0.3, 1.0, 1.5])),
        seed=index,
        top_p=maybe(0.3, 0.8, 1.0),
        top_k=maybe(0.3, rng.randrange(1, 50), 0),
        min_p=maybe(0.2, 0.05, 0.0),
        presence_penalty=maybe(0.2, rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(0.2, rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(0.2, rng.uniform(0.8, 1.5), 1.0),
        stop=maybe(0.25, tuple(words), ()),
        include_stop_str_in_output=rng.random() < 0.5,
        stop_token_ids=maybe(0.15, (rng.randrange(VOCAB_SIZE),), ()),
        ignore_eos=rng.random() < 0.3 and constraint is None,
        max_tokens=max_tokens,
        min_tokens=maybe(0.2, rng.randrange(max_tokens), 0) if constraint is None else 0,
        logprobs=maybe(0.4, rng.randrange(4), None),
        prompt_logprobs=maybe(0.1, rng.randrange(3), None),
        bad_words=maybe(0.2, tuple(words[:1]), ()) if constraint is None else (),
        logit_bias=maybe(0.2, {rng.randrange(3, VOCAB_SIZE): rng.uniform(-5, 5)}, {}),
        allowed_token_ids=maybe(0.1, (EOS, *rng.sample(range(3, VOCAB_SIZE), 40)), ())
        if constraint is None
        else (),
        repetition_detection=maybe(0.1, RepetitionDetectionParams(max_pattern_size=4), None),
        structured_outputs=constraint,
    )


def _random_http(rng: random.Random, index: int, loras: Sequence[str]) -> HttpRequest:
    """Two of three are chats, and two of three chats have tools."""
    start = rng.randrange(40)
    text = (TEXT * 2)[start : start + rng.randrange(10, 160)]
    kind = rng.choice(["chat", "tools", "tools", "completion"])
    body = _random_fields(rng, index, has_constraint=kind != "tools")
    if lora := _maybe(rng, 0.3, rng.choice(loras), ""):
        body["model"] = lora
    if kind == "completion":
        body |= {"prompt": f"Story {index}. {text}"}
        body |= _maybe(rng, 0.4, {"logprobs": rng.randrange(4)}, {})
        path = "/v1/completions"
    else:
        body |= {"messages": [{"role": "user", "content": text}]}
        body |= _maybe(rng, 0.4, {"logprobs": True, "top_logprobs": rng.randrange(4)}, {})
        body |= _maybe(rng, 0.3, {"prediction": {"type": "content", "content": TEXT}}, {})
        body |= {"chat_template_kwargs": {"thinking": rng.choice(THINKING)}}
        body |= _random_tools(rng) if kind == "tools" else {}
        path = "/v1/chat/completions"
    return HttpRequest(path, body, f"request-{index}")


def _random_fields(rng: random.Random, index: int, *, has_constraint: bool) -> dict[str, Any]:
    """Return fields that both endpoints have."""
    words = rng.sample(WORDS, k=2)
    is_streamed = rng.random() < 0.5
    fields: dict[str, Any] = {
        "max_tokens": rng.randrange(1, 90),
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.5]),
        "seed": index,
        "stream": is_streamed,
        "return_token_ids": True,
    }
    if is_streamed:
        fields["stream_options"] = {"include_usage": True, "include_metrics": True}
    for probability, some in (
        (0.25, {"n": rng.randrange(2, 4)}),
        (0.5, {"stop": words[: rng.randrange(1, 3)]}),
        (0.2, {"include_stop_str_in_output": True}),
        (0.2, {"top_p": 0.8}),
        (0.2, {"top_k": rng.randrange(1, 50)}),
        (0.2, {"presence_penalty": rng.uniform(-2, 2)}),
        (0.2, {"frequency_penalty": rng.uniform(-2, 2)}),
        (0.2, {"repetition_penalty": rng.uniform(0.8, 1.5)}),
        (0.3 * has_constraint, rng.choice(HTTP_CONSTRAINTS)),
    ):
        fields |= _maybe(rng, probability, some, {})
    return fields


def _random_tools(rng: random.Random) -> dict[str, Any]:
    """Calls that must be made, or that are likely."""
    choice = rng.choice(["auto", "required", TOOLS[0]])
    bias = {THINK: -100, CALL: rng.choice([8, 100])} if rng.random() < 0.8 else {}
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": choice,
        "logit_bias": {str(token_id): value for token_id, value in bias.items()},
        "max_tokens": rng.randrange(1, 110),
    }
    if rng.random() < 0.5:
        fields["parallel_tool_calls"] = False
    return fields


def _maybe(rng: random.Random, probability: float, value: Any, otherwise: Any) -> Any:
    return value if rng.random() < probability else otherwise
