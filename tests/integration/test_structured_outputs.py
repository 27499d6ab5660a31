"""Answers that follow a grammar, through router, P, NIXL and D and on D alone."""

import asyncio
import json
from typing import Any

import grpc
import httpx
import jsonschema
import pytest
import regex
import tokenizers

from pdserve_common.engine_types import SamplingParams, StructuredOutputsParams
from support.grammars import MODEL
from support.stack import RunningStack

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Mia", "Theo", "Oscar"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_happy": {"type": "boolean"},
    },
    "required": ["name", "age", "is_happy"],
    "additionalProperties": False,
}
PATTERN = "(Mia|Theo) [a-z]{3,9}( and [a-z]{2,9}){0,2}[.!]"
CHOICES = ("a kite", "a boat", "two cats")
NUM_SEEDS = 4


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def check(constraint: StructuredOutputsParams, text: str) -> None:
    if constraint.json_schema is not None:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif constraint.regex is not None:
        assert regex.fullmatch(PATTERN, text), text
    else:
        assert text in CHOICES


CONSTRAINTS = (
    StructuredOutputsParams(json_schema=json.dumps(SCHEMA)),
    StructuredOutputsParams(regex=PATTERN),
    StructuredOutputsParams(choice=CHOICES),
)


async def test_answers_follow_their_grammars_the_same_way_with_and_without_p(
    start_stack: Any, start_router: Any, tokenizer: tokenizers.Tokenizer
) -> None:
    prompt = tokenizer.encode("One afternoon Mia found a kite in the garden. " * 4).ids
    with start_stack(model=MODEL, num_threads=1, max_num_batched_tokens=32) as stack:
        async with (
            start_router(stack, prefill="prefill-0") as both,
            start_router(stack) as without_prefill,
        ):

            async def ask(constraint: StructuredOutputsParams, seed: int) -> None:
                params = SamplingParams(
                    temperature=0.0 if seed == 0 else 1.0,
                    seed=seed,
                    max_tokens=200,
                    structured_outputs=constraint,
                )
                handed_over, _ = await both.ask(prompt, params)
                alone, _ = await without_prefill.ask(prompt, params, cache_salt="alone")
                assert handed_over == alone
                check(constraint, tokenizer.decode(handed_over))

            tasks = (ask(each, seed) for each in CONSTRAINTS for seed in range(NUM_SEEDS))
            await asyncio.gather(*tasks)
            await check_refusals(stack, both, prompt)
        stack.assert_idle()


async def check_refusals(stack: RunningStack, routed: Any, prompt: list[int]) -> None:
    asked = {
        "not": StructuredOutputsParams(json_schema='{"type": "object", "not": {}}'),
        "nowhere": StructuredOutputsParams(grammar="root ::= nowhere"),
    }
    for reason, constraint in asked.items():
        with pytest.raises((grpc.aio.AioRpcError, AssertionError), match=reason):
            await routed.ask(prompt, SamplingParams(structured_outputs=constraint))
    for name in ("prefill-0", "decode-0"):
        metrics = stack.metrics(name)
        # One for each constraint: answers of other seeds find it.
        assert metrics['pdserve_grammar_compilations_total{outcome="compiled"}'] == len(CONSTRAINTS)
        assert metrics["pdserve_requests_waiting_for_fsm"] == 0


async def test_over_http(start_stack: Any) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "child", "schema": SCHEMA}}
    question = "Who is it? " * 20
    bodies = {
        "completions": {"prompt": question, "max_tokens": 200},
        "chat/completions": {"messages": [{"role": "user", "content": question}]},
    }
    with start_stack(model=MODEL, num_threads=1, max_num_batched_tokens=32) as stack:
        url = f"http://127.0.0.1:{stack.http_port}/v1"
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:

            async def ask(path: str, seed: int, **constraint: object) -> str:
                body = {**bodies[path], "seed": seed, "temperature": 1.0, **constraint}
                response = await http.post(f"/{path}", json=body)
                assert response.status_code == 200, response.text
                (choice,) = response.json()["choices"]
                assert choice["finish_reason"] == "stop"
                text: str = choice["text"] if "text" in choice else choice["message"]["content"]
                return text

            for path in bodies:
                for text in await asyncio.gather(
                    *(ask(path, seed, response_format=named) for seed in range(NUM_SEEDS))
                ):
                    jsonschema.validate(json.loads(text), SCHEMA)
                assert await ask(path, 0, guided_choice=CHOICES) in CHOICES
        stack.assert_idle()
