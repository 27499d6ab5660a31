"""Seeded load on any server that speaks OpenAI's completions over HTTP."""

import argparse
import asyncio
import json
import random
import time

import httpx

from pdserve_client.bench import RequestResult, summarize

NUM_WARM_UP = 3
CONNECT_S = 60.0
MAX_PROMPT_TOKEN_ID = 1000

# Tokens of a prompt, tokens of its answer, requests per second.
Load = tuple[int, int, float]


async def measure(
    url: str, load: Load, args: argparse.Namespace
) -> dict[str, float | int | str | None]:
    """Send the load and return what `pdserve bench` would say of it."""
    num_input, num_output, rate = load
    rng = random.Random(f"{args.seed} {load}")  # no prompt begins like one of another load
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=args.timeout_s, limits=limits) as http:
        for _ in range(NUM_WARM_UP):
            await warm_up(http, prompt_of(rng, num_input), num_output, args)
        tasks, started = [], time.monotonic()
        for _ in range(args.requests):
            prompt = prompt_of(rng, num_input)
            tasks.append(asyncio.create_task(send(http, prompt, num_output, args)))
            await asyncio.sleep(rng.expovariate(rate))
        results = await asyncio.gather(*tasks)
    return summarize(results, time.monotonic() - started, args)


async def warm_up(
    http: httpx.AsyncClient, prompt: list[int], num_output: int, args: argparse.Namespace
) -> None:
    """Servers are ready before their workers are connected: until then they refuse."""
    end = time.monotonic() + CONNECT_S
    while (result := await send(http, prompt, num_output, args)).error:
        if time.monotonic() > end:
            raise SystemExit(f"{http.base_url} does not work: {result.error}")
        await asyncio.sleep(0.5)


def prompt_of(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(3, MAX_PROMPT_TOKEN_ID) for _ in range(num_tokens)]


async def send(
    http: httpx.AsyncClient, prompt: list[int], num_output: int, args: argparse.Namespace
) -> RequestResult:
    """Stream one completion; each event with a choice is one moment."""
    body = {
        "model": args.model.name,
        "prompt": prompt,
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    result = RequestResult(time.monotonic())
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                result.error = (await answer.aread()).decode()
                return result
            async for line in answer.aiter_lines():
                take_line(line, result)
    except httpx.HTTPError as error:
        result.error = f"{type(error).__name__}: {error}"
    if not result.error and result.num_tokens != num_output:
        result.error = f"{result.num_tokens} tokens came of {num_output}"
    return result


def take_line(line: str, result: RequestResult) -> None:
    """One line of the answer's server-sent events."""
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if event.get("choices"):
        result.token_times.append(time.monotonic())
    if event.get("usage"):
        result.num_tokens = event["usage"]["completion_tokens"]
    if event.get("error"):
        result.error = str(event["error"])
