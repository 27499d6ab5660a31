"""What grammars cost: steps, first tokens and neighbours with them and without, in turns.

    make bench-grammars
    python benchmarks/bench_grammars.py [--only steps large ttft http hostile] [--rounds N]

All but http is one engine a model, on all cores, without a service around it. Rows write records of
JSON, the same tokens with a grammar and without: what the model chooses, and pays for, is replaced.

- steps: seconds a step, of 1, 8 and 32 rows, greedy and drawn; also with strings of bounded length.
- large: the same of 1 row, with a vocabulary of 151,936.
- ttft: until the only token of a request, whose grammar is known.
- http: the same through router and prefill service.
- hostile: the latencies between tokens of rows beside which strangers' grammars are compiled.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import tokenizers
import torch
from bench_pair import ours
from grammar_neighbours import Windows, bench_neighbours
from json_records import constraint, records, schema_of
from machine import describe
from make_model import DEFAULT_MODEL, LARGE_MODEL, LARGE_VOCAB_SIZE, make_model
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.types.engine import EngineCoreRequest, Generate
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.assemble import LoadedEngine, load_engine
from pdserve_engine.clients.inproc import SWITCH_INTERVAL_S
from pdserve_engine.config import EngineConfig
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.grammar.manager import TokenMasks
from pdserve_engine.grammar.native import CompiledGrammar, Matcher
from pdserve_engine.runner.sample.sampler import TokenSampler
from pdserve_engine.sampling.logits_rows import LogitsRows
from pdserve_engine.sampling.state import SampledTokens
from pdserve_kernels.sampling_batch import MASK_BITS

PLAIN, CONSTRAINED = ARMS = ("without", "with")
MAX_MODEL_LEN = 4096
MAX_TOKENS = 2048
PROMPT_TOKENS = 16
TTFT_PROMPT_TOKENS = 64
TEMPERATURES = {"greedy": 0.0, "drawn": 1.0}
# At the beginning of a turn: not timed.
UNTIMED_STEPS = 2
# Between turns, so that the masks of one arm are not made while the other is timed.
PAUSE_S = 0.05
NARROW_TOKENS = 64
TIMEOUT_S = 120.0
# Rows with the same text are at the same place of it.
NUM_TEXTS = 8
NUM_DRAWS = 400


class Case(NamedTuple):
    """Rows that write, how their tokens are chosen, and whether the schema bounds their strings."""

    batch: int
    choice: str = "greedy"
    is_bounded: bool = False


STEP_CASES = (
    *(Case(*case) for case in itertools.product((1, 8, 32), TEMPERATURES)),
    Case(32, is_bounded=True),
)
LARGE_CASES = tuple(Case(1, choice) for choice in TEMPERATURES)


class Turn(NamedTuple):
    """Some steps: the seconds of each, and the share of rows that they left out."""

    step_s: list[float]
    late: float


def main() -> None:
    args = _parse_args()
    print(f"{describe('torch', 'xgrammar')}\n")
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a worker
    make_model(DEFAULT_MODEL)
    if {"steps", "ttft"} & {*args.only}:
        bench_model(DEFAULT_MODEL, STEP_CASES if "steps" in args.only else (), args)
    if "large" in args.only:
        if args.large_model == LARGE_MODEL:
            make_model(LARGE_MODEL, LARGE_VOCAB_SIZE)
        bench_model(args.large_model, LARGE_CASES, args)
    if "http" in args.only:
        bench_http(args)
    if "hostile" in args.only:
        windows = Windows(args.windows, args.window_s)
        asyncio.run(bench_neighbours(config_of(DEFAULT_MODEL), args.neighbours, windows))


def config_of(model: Path) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        kv_connector="none",
        kv_cache_memory_mib=2048,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
    )


def params_of(
    arm: str, *, max_tokens: int, temperature: float = 0.0, is_bounded: bool = False
) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        ignore_eos=arm == PLAIN,
        structured_outputs=constraint(is_bounded=is_bounded) if arm == CONSTRAINED else None,
    )


def prompt_of(index: int, num_tokens: int) -> tuple[int, ...]:
    return tuple((7 * i + 13 * index) % 1_000 + 2 for i in range(num_tokens))


# ---- one engine's steps


class Dictation:
    """Has a model's rows write the tokens of texts."""

    def __init__(self, loaded: LoadedEngine, texts: Sequence[Sequence[int]]) -> None:
        executor = loaded.core.executor
        assert isinstance(executor, UniprocExecutor)
        runner = executor.rank.runner
        self._texts = np.array([token_ids[:MAX_TOKENS] for token_ids in texts])
        sampler = runner.sampler
        assert isinstance(sampler, TokenSampler)
        self._choose = sampler.choose
        sampler.choose = self.choose  # type: ignore[method-assign]

    def choose(
        self, head: Any, hidden_states: torch.Tensor, rows: LogitsRows, masks: TokenMasks | None
    ) -> SampledTokens:
        chosen = self._choose(head, hidden_states, rows, masks)
        return chosen._replace(
            token_ids=self._texts[rows.batch_rows % len(self._texts), rows.positions]
        )


class Arm:
    """An engine whose rows have a grammar, or none."""

    def __init__(self, name: str, model: Path) -> None:
        metrics = KVTransferMetrics(CollectorRegistry())
        self.name = name
        self.loaded = load_engine(config_of(model), role="decode", engine_id=name, metrics=metrics)
        self._request_ids: list[str] = []

    def add(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        request_id = str(len(self._request_ids))
        self.loaded.core.add_request(
            EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt, task=Generate(params))
        )
        self._request_ids.append(request_id)

    def start(self, case: Case) -> None:
        """Have all rows decode."""
        params = params_of(
            self.name,
            max_tokens=MAX_TOKENS,
            temperature=TEMPERATURES[case.choice],
            is_bounded=case.is_bounded,
        )
        for index in range(case.batch):
            self.add(prompt_of(index, PROMPT_TOKENS), params)
        while self.step() < case.batch:
            pass

    def step(self) -> int:
        """Return how many tokens came."""
        core = self.loaded.core
        result = core.step() if core.has_work() else core.poll()
        outputs = list(itertools.chain.from_iterable(result.outputs.values()))
        for output in outputs:
            assert output.error is None, output.error
        return sum(len(output.new_token_ids) for output in outputs)

    def turn(self, num_steps: int) -> Turn:
        time.sleep(PAUSE_S)
        for _ in range(UNTIMED_STEPS):
            self.step()
        step_s, num_tokens = [], 0
        for _ in range(num_steps):
            started = time.perf_counter()
            num_tokens += self.step()
            step_s.append(time.perf_counter() - started)
        return Turn(step_s, 1 - num_tokens / (num_steps * len(self._request_ids)))

    def ttft_s(self, index: int) -> float:
        """Return the seconds until a request's only token."""
        started = time.perf_counter()
        self.add(prompt_of(index, TTFT_PROMPT_TOKENS), params_of(self.name, max_tokens=1))
        while not self.step():
            pass
        ttft_s = time.perf_counter() - started
        self.end()
        return ttft_s

    def end(self) -> None:
        self.loaded.core.abort_requests(self._request_ids)
        self.loaded.core.step()  # so that the model runner hears of it
        self._request_ids = []


def bench_model(model: Path, cases: Sequence[Case], args: argparse.Namespace) -> None:
    """Two engines in turns, with grammars and without."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [
        tokenizer.encode(records(seed), add_special_tokens=False).ids for seed in range(NUM_TEXTS)
    ]
    arms = [Arm(name, model) for name in ARMS]
    for arm in arms:
        Dictation(arm.loaded, texts)
    vocab_size = arms[0].loaded.info.vocab_size
    print(f"vocabulary of {vocab_size}; masks: with nothing beside")
    for is_bounded in (False, True):
        describe_masks(compile_grammar(arms[1].loaded, is_bounded), vocab_size, texts[0])
    print("\n| rows | chosen | strings | ms, without | with | medians | means | late rows |")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases:
        bench_steps(arms, case, args)
    if "ttft" in args.only:
        bench_ttft(arms, args)
    for arm in arms:
        arm.loaded.close()


def compile_grammar(loaded: LoadedEngine, is_bounded: bool) -> CompiledGrammar:
    assert loaded.compiler is not None
    return loaded.compiler.compile(constraint(is_bounded=is_bounded)).result(TIMEOUT_S)


def bench_steps(arms: Sequence[Arm], case: Case, args: argparse.Namespace) -> None:
    for arm in arms:
        arm.start(case)
    turns = [[arm.turn(args.steps) for arm in arms] for _ in range(args.rounds)]
    for arm in arms:
        arm.end()
    pairs = [(plain.step_s, constrained.step_s) for plain, constrained in turns]
    plain_s, constrained_s = map(statistics.median, pooled(pairs))
    late = statistics.mean(turn.late for _, turn in turns)
    print(
        f"| {case.batch} | {case.choice} | {'bounded' if case.is_bounded else 'free'} "
        f"| {plain_s * 1e3:.2f} | {constrained_s * 1e3:.2f} | {ratio(pairs, statistics.median)} "
        f"| {ratio(pairs, statistics.mean)} | {late:.1%} |",
        flush=True,
    )


# Seconds without and with a grammar, of steps in turns after each other.
Pair = tuple[Sequence[float], Sequence[float]]


def pooled(pairs: Sequence[Pair]) -> tuple[list[float], list[float]]:
    plain_s, constrained_s = (
        list(itertools.chain.from_iterable(column)) for column in zip(*pairs, strict=True)
    )
    return plain_s, constrained_s


def ratio(pairs: Sequence[Pair], average: Callable[[Sequence[float]], float]) -> str:
    """Return that of the averages of all steps, and its 95% interval, of pairs drawn again."""
    rng = random.Random(0)
    draws = [pairs, *(rng.choices(pairs, k=len(pairs)) for _ in range(NUM_DRAWS))]
    plain_s, constrained_s = zip(*map(pooled, draws), strict=True)
    ratios = [average(b) / average(a) for a, b in zip(plain_s, constrained_s, strict=True)]
    low, *_, high = statistics.quantiles(ratios[1:], n=40)
    return f"{ratios[0]:.3f} ({low:.2f} to {high:.2f})"


def describe_masks(grammar: CompiledGrammar, vocab_size: int, token_ids: Sequence[int]) -> None:
    """Say of the masks of a text how narrow they are, and how long they take."""
    matcher, mask = Matcher(grammar), np.zeros(-(-vocab_size // MASK_BITS), dtype=np.int32)
    seconds, num_narrow = [], 0
    for token_id in token_ids:
        started = time.thread_time()
        matcher.fill(mask)
        seconds.append(time.thread_time() - started)
        num_narrow += int(np.unpackbits(mask.view(np.uint8)).sum()) < NARROW_TOKENS
        assert matcher.accept(token_id)
    p99 = statistics.quantiles(seconds, n=100)[98]
    print(
        f"{num_narrow / len(token_ids):.0%} below {NARROW_TOKENS} tokens; us: mean "
        f"{statistics.mean(seconds) * 1e6:.0f}, median {statistics.median(seconds) * 1e6:.0f}, p99 "
        f"{p99 * 1e6:.0f}; compiled {grammar.num_bytes / 1e6:.1f} MB"
    )


# ---- first tokens


def bench_ttft(arms: Sequence[Arm], args: argparse.Namespace) -> None:
    pairs = [[arm.ttft_s(index) for arm in arms] for index in range(args.requests)]
    report_ttft("engine", [(plain, constrained) for plain, constrained in pairs])


def report_ttft(where: str, pairs: Sequence[tuple[float, float]]) -> None:
    plain, constrained = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles((b - a for a, b in pairs), n=4)
    print(
        f"\nTTFT, {where}, {len(pairs)} pairs: {plain:.2f} ms without, {constrained:.2f} ms with; "
        f"a pair's difference {middle * 1e3:.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f})",
        flush=True,
    )


def bench_http(args: argparse.Namespace) -> None:
    """A prefill and a decode service of one core each; the answer is its only token."""
    stack_args = argparse.Namespace(model=DEFAULT_MODEL, loads=[(MAX_MODEL_LEN - 1, 1, 1.0)])
    with ours(stack_args) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        for arm in ARMS:  # now the grammar is known
            complete_s(http, arm, 0)
        indexes = range(1, args.requests + 1)
        pairs = [[complete_s(http, arm, index) for arm in ARMS] for index in indexes]
        report_ttft("HTTP", [(plain, constrained) for plain, constrained in pairs])


def complete_s(http: httpx.Client, arm: str, index: int) -> float:
    body: dict[str, object] = {
        "model": DEFAULT_MODEL.name,
        # No prompt begins like another one.
        "prompt": [2 + ARMS.index(arm), 2 + index, *prompt_of(index, TTFT_PROMPT_TOKENS - 2)],
        "max_tokens": 1,
        "temperature": 0,
    }
    if arm == CONSTRAINED:
        body["structured_outputs"] = {"json": schema_of(is_bounded=False)}
    started = time.perf_counter()
    http.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - started


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("steps", "large", "ttft", "http", "hostile")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=30, help="turns of each arm (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="timed in a turn (%(default)s)")
    parser.add_argument("--requests", type=int, default=100, help="for a TTFT (%(default)s)")
    parser.add_argument("--neighbours", type=int, nargs="+", default=(1, 8), help="(%(default)s)")
    parser.add_argument("--windows", type=int, default=4, help="of each arm (%(default)s)")
    parser.add_argument("--window-s", type=float, default=10.0, help="(%(default)s)")
    parser.add_argument("--large-model", type=Path, default=LARGE_MODEL, help="the default is made")
    return parser.parse_args()


if __name__ == "__main__":
    main()
