"""Seeded load on any server that speaks OpenAI's completions over HTTP, and a table of it."""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence

import httpx

from pdserve_client.bench import RequestResult, summarize

NUM_WARM_UP = 3
CONNECT_S = 60.0
MAX_PROMPT_TOKEN_ID = 1000

# Tokens of a prompt, tokens of its answer, requests per second.
Load = tuple[int, int, float]
COLUMNS = (
    "goodput_requests_per_s", "requests_per_s", "num_failed", "ttft_ms_p50", "ttft_ms_p99",
    "tpot_ms_p50", "itl_ms_p50", "itl_ms_p99",
)  # fmt: skip


def add_load_flags(parser: argparse.ArgumentParser, loads: Sequence[Load]) -> None:
    """The flags that `run_loads` and `measure` read; `loads` are the default ones."""
    parser.add_argument("--loads", nargs="+", type=parse_load, default=loads, help="IN:OUT:RATE")
    parser.add_argument("--requests", type=int, default=30, help="of each load (%(default)s)")
    parser.add_argument("--goodput-ttft-ms", type=float, default=2000.0, help="TTFT objective")
    parser.add_argument("--goodput-tpot-ms", type=float, default=100.0, help="TPOT objective")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="between two events")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")


def parse_load(text: str) -> Load:
    num_input, num_output, rate = text.split(":")
    return int(num_input), int(num_output), float(rate)


def max_model_len(args: argparse.Namespace) -> int:
    return max(num_input + num_output for num_input, num_output, _ in args.loads)


def run_loads(name: str, url: str, args: argparse.Namespace) -> dict[Load, dict[str, float]]:
    """Return, and print, the figures of each load."""
    figures = {}
    for load in args.loads:
        summary = asyncio.run(measure(url, load, args))
        figures[load] = {column: float(summary[column] or 0.0) for column in COLUMNS}
        print_row(load, name, [f"{value:.2f}" for value in figures[load].values()])
        if summary["first_error"]:
            print(f"{name}: {summary['first_error']}", file=sys.stderr)
    return figures


def print_header() -> None:
    print(f"| in:out:rate | system | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}")


def print_row(load: Load, name: str, cells: Sequence[str]) -> None:
    print(f"| {':'.join(map(str, load))} | {name} | {' | '.join(cells)} |", flush=True)


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
