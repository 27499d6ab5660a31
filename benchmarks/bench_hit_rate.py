"""What routing by cached prefixes finds cached in real workers, beside the most there is to find.

    python benchmarks/bench_hit_rate.py

4 prefill and 4 decode services serve the bundled model to chats of several tenants: each tenant has
a system prompt, each chat some turns, and a turn's prompt is all that came before and new text.
Policies get the same chats, each from fresh workers. The hit rate is the share of prompt tokens
that prefill workers found cached, as they count it. The most there is: the whole blocks of each
prompt that an earlier prompt began with, whoever computed it; no cache here is too small for that.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from machine import describe

from pdserve_client.client import AsyncClient
from pdserve_client.config import StackConfig
from pdserve_client.stack import Stack
from pdserve_common.types.sampling_params import SamplingParams
from support.metrics import scrape, total

MODEL = Path(__file__).parents[1] / "models" / "pdserve-tiny"
LOG_DIR = Path(".bench/hit-rate")
NUM_WORKERS = 4  # of each role
BLOCK_SIZE = 16
NUM_TENANTS = 8
SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 384, 48, 32
NUM_TURNS = 6
TIMEOUT_S = 120.0
POLICIES: dict[str, tuple[str, ...]] = {
    "round_robin": ("--routing-policy=round_robin",),
    "power_of_two": ("--routing-policy=power_of_two",),
    "prefix": ("--routing-policy=prefix",),
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)


@dataclass(slots=True)
class Prompts:
    """All that was asked, and what of it had been asked before."""

    num_tokens: int = 0
    num_seen: int = 0
    ttft_s: list[float] = field(default_factory=list)
    # Hashes of all beginnings of prompts in whole blocks.
    seen: set[int] = field(default_factory=set)

    def add(self, prompt: Sequence[int]) -> None:
        ends = range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)
        known = [hash(tuple(prompt[:end])) in self.seen for end in ends]
        self.seen.update(hash(tuple(prompt[:end])) for end in ends)
        self.num_tokens += len(prompt)
        self.num_seen += BLOCK_SIZE * sum(known)


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[Stack]:
    """Run a stack whose router has these flags."""
    config = StackConfig(
        model=str(MODEL),
        prefill=NUM_WORKERS,
        decode=NUM_WORKERS,
        num_threads=1,
        kv_cache_memory_mib=256,
        log_dir=str(LOG_DIR),
        **dict.fromkeys(("grpc_port", "http_port", "metrics_port", "worker_port"), 0),
    )
    stack = Stack(config)
    stack.router.flags += flags
    with stack:
        for _ in stack.wait_until_ready():
            pass
        yield stack


async def take_turn(client: AsyncClient, prompt: Sequence[int], prompts: Prompts) -> list[int]:
    """Return the answer."""
    prompts.add(prompt)
    began = time.perf_counter()
    token_ids: list[int] = []
    async for message in client.generate(list(prompt), PARAMS, timeout_s=TIMEOUT_S):
        if not token_ids:
            prompts.ttft_s.append(time.perf_counter() - began)
        for completion in message.outputs:
            token_ids += completion.token_ids
    return token_ids


async def chat(
    client: AsyncClient, number: int, systems: Sequence[list[int]], think_s: float, prompts: Prompts
) -> None:
    rng = random.Random(number)
    text = list(rng.choice(systems))
    for _ in range(NUM_TURNS):
        text += words(rng, USER_TOKENS)
        text += await take_turn(client, text, prompts)
        await asyncio.sleep(rng.expovariate(1 / think_s))


def words(rng: random.Random, num: int) -> list[int]:
    return rng.choices(range(3, 1390), k=num)


async def run(stack: Stack, args: argparse.Namespace) -> Prompts:
    """Have all chats, so many at a time."""
    systems = [words(random.Random(-1 - i), SYSTEM_TOKENS) for i in range(NUM_TENANTS)]
    left, prompts = iter(range(args.num_chats)), Prompts()
    client = AsyncClient(stack.grpc_address)

    async def one_after_the_other() -> None:
        for number in left:
            await chat(client, number, systems, args.think_s, prompts)

    await asyncio.gather(*(one_after_the_other() for _ in range(args.chats)))
    await client.close()
    return prompts


def hit_rate(stack: Stack) -> float:
    """Return it of all prefill workers, from their metrics."""
    samples = [
        scrape(f"http://127.0.0.1:{worker.metrics_port}/metrics")
        for worker in stack.workers
        if worker.name.startswith("prefill")
    ]
    hits, queries = (
        sum(total(each, f"pdserve_prefix_cache_{name}_total") for each in samples)
        for name in ("hits", "queries")
    )
    return hits / queries


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chats", type=int, default=16, help="at a time (%(default)s)")
    parser.add_argument("--num-chats", type=int, default=64, help="in all (%(default)s)")
    parser.add_argument("--think-s", type=float, default=1.0, help="after an answer (%(default)s)")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    args = parser.parse_args()
    print(describe("torch", "nixl-cu13"))
    print("\n| policy | hit rate | the most | turns/s | TTFT p50, ms | p99 |")
    print("|---|---|---|---|---|---|")
    for policy in args.policies:
        with serving(POLICIES[policy]) as stack:
            began = time.perf_counter()
            prompts = asyncio.run(run(stack, args))
            num_turns, wall_s = len(prompts.ttft_s), time.perf_counter() - began
            ordered = sorted(prompts.ttft_s)
            p50, p99 = (1e3 * ordered[num_turns * share // 100] for share in (50, 99))
            print(
                f"| {policy} | {hit_rate(stack):.1%} | {prompts.num_seen / prompts.num_tokens:.1%} "
                f"| {num_turns / wall_s:.1f} | {p50:.0f} | {p99:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
