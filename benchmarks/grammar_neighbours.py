"""Latencies between tokens of rows beside which strangers' grammars are compiled."""

import asyncio
import contextlib
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pdserve_common.errors import InvalidRequestError
from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.structured import to_structural_tag
from pdserve_common.types.engine import EngineCoreOutputs, EngineCoreRequest, Generate
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_engine.clients.inproc import InprocEngineClient
from pdserve_engine.config import EngineConfig
from support import hostile_grammars

# Requests whose grammars wait or are compiled at once.
NUM_STRANGERS = 8
# More than are compiled while a batch is watched.
NUM_CONSTRAINTS = 1000
PROMPT_TOKENS = 16
MAX_TOKENS = 2048
SETTLE_S = 1.0
TIMEOUT_S = 120.0


class Windows(NamedTuple):
    """How often rows are watched alone and beside strangers, and for how long each time."""

    number: int
    seconds: float


class Latencies:
    """A client of an engine that keeps rows decoding and notes when their tokens come."""

    def __init__(self, client: InprocEngineClient, batch: int) -> None:
        self._client = client
        self._batch = batch
        self._index = client.register_client(self._on_outputs)
        self._last: dict[str, float] = {}
        self._gaps_s: list[float] = []
        self._numbers = itertools.count()

    def start(self) -> None:
        for _ in range(self._batch):
            self._add()

    async def gaps_s(self, window_s: float) -> list[float]:
        """Return the latencies between tokens of the next `window_s`."""
        self._gaps_s = []
        await asyncio.sleep(window_s)
        return self._gaps_s

    def end(self) -> None:
        self._client.unregister_client(self._index)

    def _add(self) -> None:
        number = next(self._numbers)
        request = EngineCoreRequest(
            request_id=f"neighbour-{self._batch}-{number}",
            prompt_token_ids=tuple(range(2 + number, 2 + number + PROMPT_TOKENS)),
            task=Generate(SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)),
            client_index=self._index,
        )
        self._client.add_request(request)

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        now = time.perf_counter()
        for output in outputs.outputs:
            last = self._last.pop(output.request_id, None)
            if output.finished:
                self._add()
                continue
            if last is not None:
                self._gaps_s.append(now - last)
            self._last[output.request_id] = now


class Strangers:
    """A client of an engine with odd grammars, that sends the next as soon as one has an answer."""

    def __init__(self, client: InprocEngineClient, seed: int) -> None:
        self._client = client
        self._index = client.register_client(self._on_outputs)
        # Made now: checking them takes the engine's GIL.
        self._constraints = enumerate([*islice(odd_constraints(seed), NUM_CONSTRAINTS)])
        self._num_waiting = 0
        self._is_over = False
        # By what came of them.
        self.outcomes: Counter[str] = Counter()

    def begin(self) -> None:
        self._is_over = False
        for _ in range(NUM_STRANGERS):
            self._send()

    async def end(self) -> None:
        """Send nothing more, and wait until all have their answers."""
        self._is_over = True
        deadline = time.monotonic() + TIMEOUT_S
        while self._num_waiting:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    def _send(self) -> None:
        number, params = next(self._constraints)
        request = EngineCoreRequest(
            request_id=f"stranger-{self._index}-{number}",
            prompt_token_ids=(2,),
            task=Generate(SamplingParams(max_tokens=1, structured_outputs=params)),
            client_index=self._index,
        )
        self._client.add_request(request)
        self._num_waiting += 1

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            if output.finished:
                error = output.error
                self.outcomes["compiled" if error is None else error.code.name.lower()] += 1
                self._num_waiting -= 1
                if not self._is_over:
                    self._send()


def odd_constraints(seed: int) -> Iterator[StructuredOutputsParams]:
    """Yield those that a router lets through."""
    for text in hostile_grammars.texts(seed, sys.maxsize):
        params = StructuredOutputsParams(structural_tag=text or " ")
        with contextlib.suppress(InvalidRequestError):
            to_structural_tag(params)
            yield params


async def bench_neighbours(config: EngineConfig, batches: Sequence[int], windows: Windows) -> None:
    """Print a table of the latencies of each batch of rows."""
    client = await InprocEngineClient.load(
        config,
        role="decode",
        engine_id="neighbours",
        metrics=KVTransferMetrics(CollectorRegistry()),
    )
    print("\n| rows | ITL alone, p50 / p99 ms | beside strangers | ratio of p99 | their grammars |")
    print("|---|---|---|---|---|")
    for batch in batches:
        await _bench_batch(client, batch, windows)
    await client.close()


async def _bench_batch(client: InprocEngineClient, batch: int, windows: Windows) -> None:
    neighbours, strangers = Latencies(client, batch), Strangers(client, seed=batch)
    neighbours.start()
    await neighbours.gaps_s(SETTLE_S)
    alone_s: list[float] = []
    beside_s: list[float] = []
    for _ in range(windows.number):
        alone_s += await neighbours.gaps_s(windows.seconds)
        strangers.begin()
        beside_s += await neighbours.gaps_s(windows.seconds)
        await strangers.end()
    neighbours.end()
    alone, beside = _percentiles_ms(alone_s), _percentiles_ms(beside_s)
    print(
        f"| {batch} | {alone[0]:.1f} / {alone[1]:.1f} | {beside[0]:.1f} / {beside[1]:.1f} "
        f"| {beside[1] / alone[1]:.2f} | {dict(strangers.outcomes)} |",
        flush=True,
    )


def _percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    return statistics.median(seconds) * 1e3, statistics.quantiles(seconds, n=100)[98] * 1e3
