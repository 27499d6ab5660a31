"""What drafts are worth: two engines in turns, with drafts and without.

    python benchmarks/bench_speculation.py [--only copy json random schema draft_model] [--rounds N]

One process, all cores, no service around it. Tokens a second of rows that decode, until the first
of them ends, in turns of some steps.

- copy: a Python source of the prompt is written again, with 15% of its names changed.
- json: a list of records of JSON is written, of which the prompt says nothing.
- random: what the model draws at temperature 1, which with random weights repeats nothing.
- schema: an object of JSON by a schema, whose names the grammar forces; both engines have drafts of
  its text, and one has drafts of the grammar besides.
- draft_model: the same as random of another model, with drafts of a draft model that knows much of
  what it knows (make_draft_pair.py).

The tokens of copy, json and schema are those of a text, in both arms: what the model chooses, and
pays for, is replaced.
"""

import argparse
import itertools
import json
import random
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
from json_records import records, schema_of
from machine import describe
from make_draft_pair import DEFAULT_PAIR, make_draft_pair
from make_model import DEFAULT_MODEL, make_model
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.types.engine import EngineCoreOutput, EngineCoreRequest, Generate
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_engine.assemble import LoadedEngine, load_engine
from pdserve_engine.clients.inproc import SWITCH_INTERVAL_S
from pdserve_engine.config import EngineConfig, Speculation
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.grammar.manager import TokenMasks
from pdserve_engine.runner.run.model_runner import ModelRunner
from pdserve_engine.runner.sample.sampler import TokenSampler
from pdserve_engine.sampling.logits_rows import LogitsRows
from pdserve_engine.sampling.state import SampledTokens

BATCHES: Mapping[str, Sequence[int]] = {
    "copy": (1, 4, 8),
    "json": (1,),
    "random": (1, 8, 32),
    "schema": (1, 4),
    "draft_model": (1, 4, 8),
}
SOURCES = ("textwrap", "argparse", "random", "calendar", "shlex", "csv", "heapq", "bisect")
MAX_MODEL_LEN = 2048
SOURCE_TOKENS = 384
MAX_TOKENS = {"copy": 384, "json": 1024, "random": 128, "schema": 128, "draft_model": 256}
SHORT_PROMPT = 16
CHANGED_NAMES = 0.15
NEW_WORDS = ("alpha", "value", "item", "count", "node", "inner", "total", "handle")
TURN_STEPS = 16
# The first token of a prompt says which row's it is.
FIRST_MARK = 2


class Task(NamedTuple):
    """A prompt, and what is written behind it, if that is not the model's choice."""

    prompt: list[int]
    text: list[int]
    num_tokens: int
    constraint: StructuredOutputsParams | None = None


class Rate(NamedTuple):
    num_tokens: int
    num_steps: int
    seconds: float
    num_drafts: int = 0
    num_accepted: int = 0

    def __add__(self, other: "Rate") -> "Rate":  # type: ignore[override]
        return Rate(*(a + b for a, b in zip(self, other, strict=True)))


def main() -> None:
    args = _parse_args()
    print(f"{describe('torch')}\n")
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a worker
    print(
        "| text | rows | tokens/s, without | with | ratio | of rounds | tokens a row and step "
        "| drafts | accepted |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    own = [kind for kind in args.only if kind not in ("schema", "draft_model")]
    if own:
        make_model(args.model)
        bench_all(args, own, [Arm("none", args.model), Arm("suffix", args.model)])
    if "schema" in args.only:
        make_model(args.model)
        arms = [Arm("suffix", args.model, is_forcing=is_forcing) for is_forcing in (False, True)]
        bench_all(args, ["schema"], arms)
    if "draft_model" in args.only:
        model, draft_model = make_draft_pair(args.pair)
        arms = [Arm("none", model), Arm("draft_model", model, draft_model=str(draft_model))]
        bench_all(args, ["draft_model"], arms)


class Arm:
    """An engine with drafts, or without."""

    def __init__(
        self,
        speculation: Speculation,
        model: Path,
        *,
        draft_model: str | None = None,
        is_forcing: bool = True,
    ) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        config = EngineConfig(
            model=str(model),
            kv_connector="none",
            kv_cache_memory_mib=1536,
            max_model_len=MAX_MODEL_LEN,
            speculation=speculation,
            draft_model=draft_model,
        )
        metrics = KVTransferMetrics(CollectorRegistry())
        self.loaded: LoadedEngine = load_engine(
            config, role="decode", engine_id=speculation, metrics=metrics
        )
        self._texts: Sequence[Sequence[int]] = ()
        self._dictate()
        if not is_forcing:
            self._runner.input_batch.sampling.grammars.encode = None
        self._names = map(str, itertools.count())
        self.is_over = False

    def start(self, tasks: Sequence[Task], seed: int) -> None:
        """Have all rows decode."""
        self.is_over = False
        self._texts = [task.text for task in tasks]
        for task in tasks:
            params = SamplingParams(
                temperature=0.0 if task.text else 1.0,
                seed=seed,
                max_tokens=task.num_tokens,
                ignore_eos=task.constraint is None,
                structured_outputs=task.constraint,
            )
            self.loaded.core.add_request(
                EngineCoreRequest(
                    request_id=next(self._names),
                    prompt_token_ids=tuple(task.prompt),
                    task=Generate(params),
                )
            )
        num_rows = 0
        while num_rows < len(tasks):
            num_rows = len(self._step())

    def turn(self) -> Rate:
        """Compute some steps, or until the first row ends."""
        steps: list[list[EngineCoreOutput]] = []
        started = time.perf_counter()
        while len(steps) < TURN_STEPS and not self.is_over:
            steps.append(self._step())
        seconds = time.perf_counter() - started
        outputs = list(itertools.chain.from_iterable(steps))
        drafts = [each for output in outputs for each in output.draft_stats]
        return Rate(
            sum(len(output.new_token_ids) for output in outputs),
            len(steps),
            seconds,
            sum(each.num_draft_tokens for each in drafts),
            sum(each.num_accepted_tokens for each in drafts),
        )

    def end(self) -> None:
        core = self.loaded.core
        core.abort_requests(list(core.scheduler.requests))
        while core.has_work():
            core.step()

    def _step(self) -> list[EngineCoreOutput]:
        """Return what came, of each row that brought something."""
        core = self.loaded.core
        result = core.step() if core.has_work() else core.poll()  # a grammar is being compiled
        outputs = list(itertools.chain.from_iterable(result.outputs.values()))
        for output in outputs:
            assert output.error is None, output.error
            self.is_over |= output.finished
        return outputs

    @property
    def _runner(self) -> ModelRunner:
        executor = self.loaded.core.executor
        assert isinstance(executor, UniprocExecutor)
        return executor.rank.runner

    def _dictate(self) -> None:
        runner = self._runner
        sampler = runner.sampler
        assert isinstance(sampler, TokenSampler)
        choose = sampler.choose

        def write(
            head: Any, hidden_states: torch.Tensor, rows: LogitsRows, masks: TokenMasks | None
        ) -> SampledTokens:
            chosen = choose(head, hidden_states, rows, masks)
            if not any(self._texts):
                return chosen
            marks = runner.input_batch.token_ids[rows.batch_rows, 0] - FIRST_MARK
            pairs = zip(marks.tolist(), rows.positions.tolist(), strict=True)
            token_ids = [self._texts[mark][position] for mark, position in pairs]
            return chosen._replace(token_ids=np.array(token_ids, dtype=np.int64))

        sampler.choose = write  # type: ignore[method-assign]


def bench_all(args: argparse.Namespace, kinds: Sequence[str], arms: Sequence[Arm]) -> None:
    for kind in kinds:
        for batch in args.batch or BATCHES[kind]:
            bench(arms, kind, batch, args.rounds)
    for arm in arms:
        arm.loaded.close()


def bench(arms: Sequence[Arm], kind: str, batch: int, num_rounds: int) -> None:
    rounds = []
    for number in range(num_rounds):
        tasks = [make_task(kind, index, number, arms[0].tokenizer) for index in range(batch)]
        for arm in arms:
            arm.start(tasks, seed=number)
        rates = [Rate(0, 0, 0.0) for _ in arms]
        while not any(arm.is_over for arm in arms):
            rates = [rate + arm.turn() for rate, arm in zip(rates, arms, strict=True)]
        for arm in arms:
            arm.end()
        rounds.append(rates)
    without, with_drafts = (sum(column[1:], column[0]) for column in zip(*rounds, strict=True))
    ratios = [_per_s(b) / _per_s(a) for a, b in rounds]
    print(
        f"| {kind} | {batch} | {_per_s(without):.1f} | {_per_s(with_drafts):.1f} "
        f"| {_per_s(with_drafts) / _per_s(without):.2f} | {min(ratios):.2f} to {max(ratios):.2f}, "
        f"median {statistics.median(ratios):.2f} "
        f"| {with_drafts.num_tokens / with_drafts.num_steps / batch:.2f} "
        f"| {with_drafts.num_drafts} | {with_drafts.num_accepted} |",
        flush=True,
    )


def make_task(kind: str, index: int, number: int, tokenizer: tokenizers.Tokenizer) -> Task:
    rng = random.Random(100 * number + index)
    mark = FIRST_MARK + index
    if kind == "copy":
        name = SOURCES[(index + number) % len(SOURCES)]
        path = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
        source = tokenizer.encode(path.read_text()).ids[:SOURCE_TOKENS]
        text = tokenizer.encode(renamed(tokenizer.decode(source), rng)).ids
        return Task([mark, *source], text, min(len(text), MAX_TOKENS[kind]))
    prompt = [mark, *(rng.randrange(100, 20_000) for _ in range(SHORT_PROMPT))]
    if kind == "json":
        text = tokenizer.encode(records(rng.randrange(1000))).ids
        return Task(prompt, text, MAX_TOKENS[kind])
    if kind == "schema":
        text = tokenizer.encode(json.dumps(json.loads(records(rng.randrange(1000)))[0])).ids
        constraint = StructuredOutputsParams(
            json_schema=json.dumps(schema_of(is_bounded=False)["items"])
        )
        return Task(prompt, text, min(len(text), MAX_TOKENS[kind]), constraint)
    return Task(prompt, [], MAX_TOKENS[kind])


def renamed(source: str, rng: random.Random) -> str:
    """Return the source with other names for some that it has."""
    names = sorted(set(re.findall(r"\b[a-z_]{4,}\b", source)))
    changed = rng.sample(names, k=round(CHANGED_NAMES * len(names)))
    new = {name: f"{rng.choice(NEW_WORDS)}_{name[:3]}" for name in changed}
    return re.sub(r"\b[a-z_]{4,}\b", lambda match: new.get(match[0], match[0]), source)


def _per_s(rate: Rate) -> float:
    return rate.num_tokens / rate.seconds


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--batch", nargs="+", type=int, help="instead of the usual numbers of rows")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="(%(default)s)")
    parser.add_argument("--pair", type=Path, default=DEFAULT_PAIR, help="(%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
