"""What routing by cached prefixes brings to chats of many tenants, beside others and an oracle.

    python benchmarks/bench_trace.py

Each tenant has a system prompt, each chat some turns; a turn's prompt is all that came before and
new text. The router's real pool, index and policies choose; the workers are modelled: a prefill
worker computes what its LRU cache lacks, one prompt after another, a decode worker steps as long as
its batch says. Their speeds are those measured of one core each with a model of Qwen3-0.6B's shape
(RESULTS.md). The oracle sees every prefill worker's cache and queue as they are, and takes the one
that is ready with the prompt first. Chats wait for their answer, and a while, before the next turn;
as one ends, another begins. The first quarter of all turns, with cold caches, does not count.
"""

import argparse
import asyncio
import heapq
import itertools
import random
import statistics
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pdserve_common.types.engine import EngineCoreRequest, Generate, SchedulerStats
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.workers.routing.prefix_index import prefix_hashes
from pdserve_router.workers.worker import Worker
from support.modelled_pool import ModelledPool, modelled

BLOCK_SIZE = 16
NUM_WORKERS = 4  # of each role
PREFILL_TOKENS_PER_S = 340.0
# A decode step of b requests takes STEP_S + b * STEP_S_PER_REQUEST.
STEP_S, STEP_S_PER_REQUEST = 0.020, 0.0024
MAX_BATCH = 32
# Until a router knows what a worker has cached.
EVENT_DELAY_S = 0.05
VOCAB_SIZE = 30_000
ORACLE = "oracle"


class Trace(NamedTuple):
    """What chats there are."""

    num_tenants: int = 16
    system_tokens: int = 768
    # At a time, and turns of each.
    num_chats: int = 48
    num_turns: int = 6
    # Of all.
    total_turns: int = 3000
    user_tokens: int = 48
    answer_tokens: int = 64
    think_s: float = 4.0
    # Of each worker.
    cached_blocks: int = 2500


@dataclass(slots=True)
class Turn:
    """A request, and what became of it."""

    chat: int
    prompt: tuple[int, ...]
    # Of prompt and answer.
    hashes: Sequence[int]
    began: float
    on_end: Callable[["Turn"], None]
    num_left: int
    num_prompt_blocks: int
    first_token: float = 0.0
    num_cached: int = 0
    # What P lacked of it when it came.
    num_waiting: int = 0
    decode: "DecodeWorker | None" = None
    # Where P reads what it lacks.
    source: "Cache | None" = None


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), act))

    def run(self) -> None:
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()


class Cache:
    """A worker's blocks by hash, the one used last at the end; its router hears of changes."""

    def __init__(self, clock: Clock, pool: ModelledPool, client: Worker, size: int) -> None:
        self._clock, self._index = clock, pool.pool.prefix_index
        self._client, self._size = client, size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_cached(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks it has."""
        return next((i for i, h in enumerate(hashes) if h not in self._blocks), len(hashes))

    def use(self, hashes: Sequence[int]) -> None:
        """Have these blocks, the first of which go last."""
        new = [h for h in hashes if h not in self._blocks]
        for each in reversed(hashes):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._size)]
        self._clock.after(EVENT_DELAY_S, lambda: self._tell(new, gone))

    def _tell(self, new: list[int], gone: list[int]) -> None:
        self._index.stored(self._client, new)
        self._index.removed(self._client, gone)


class PrefillWorker:
    """Computes one prompt after another."""

    def __init__(self, clock: Clock, client: Worker, cache: Cache) -> None:
        self._clock, self.client, self.cache = clock, client, cache
        self._queue: deque[Turn] = deque()
        self._running: Turn | None = None
        self._ends = 0.0

    def add(self, turn: Turn) -> None:
        blocks = turn.hashes[: turn.num_prompt_blocks]
        turn.num_waiting = self._num_missing(blocks, len(turn.prompt), None)
        self._queue.append(turn)
        if self._running is None:
            self._next()
        self._report()

    def ready_at(self, blocks: Sequence[int], num_tokens: int, source: Cache | None) -> float:
        """Return when it would have computed such a prompt."""
        waiting = sum(
            self._num_missing(turn.hashes[: turn.num_prompt_blocks], len(turn.prompt), turn.source)
            for turn in self._queue
        )
        missing = self._num_missing(blocks, num_tokens, source)
        free = self._ends if self._running is not None else self._clock.now
        return free + (waiting + missing) / PREFILL_TOKENS_PER_S

    def _num_missing(self, blocks: Sequence[int], num_tokens: int, source: Cache | None) -> int:
        """Return what it has to compute: the last token always."""
        num_blocks = self.cache.num_cached(blocks)
        if source is not None:
            num_blocks = max(num_blocks, source.num_cached(blocks))
        return max(1, num_tokens - num_blocks * BLOCK_SIZE)

    def _next(self) -> None:
        self._running = turn = self._queue.popleft() if self._queue else None
        if turn is None:
            return
        blocks = turn.hashes[: turn.num_prompt_blocks]
        num_missing = self._num_missing(blocks, len(turn.prompt), turn.source)
        turn.num_cached = len(turn.prompt) - num_missing
        seconds = num_missing / PREFILL_TOKENS_PER_S
        self._ends = self._clock.now + seconds
        self._clock.after(seconds, self._end)

    def _end(self) -> None:
        turn = self._running
        assert turn is not None
        assert turn.decode is not None
        self.cache.use(turn.hashes[: turn.num_prompt_blocks])
        turn.first_token = self._clock.now
        turn.decode.add(turn)
        self._next()
        self._report()

    def _report(self) -> None:
        waiting = sum(turn.num_waiting for turn in self._queue)
        self.client.stats = SchedulerStats(
            num_running_reqs=self._running is not None,
            num_waiting_reqs=len(self._queue),
            num_waiting_tokens=waiting,
            num_free_blocks=1 << 20,
        )


class DecodeWorker:
    """Steps while it has requests."""

    def __init__(self, clock: Clock, client: Worker, cache: Cache) -> None:
        self._clock, self.client, self.cache = clock, client, cache
        self._running: list[Turn] = []
        self._waiting: deque[Turn] = deque()
        self._is_stepping = False

    def add(self, turn: Turn) -> None:
        self._waiting.append(turn)
        if not self._is_stepping:
            self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self._running) < MAX_BATCH:
            self._running.append(self._waiting.popleft())
        self._is_stepping = bool(self._running)
        if self._is_stepping:
            self._clock.after(STEP_S + STEP_S_PER_REQUEST * len(self._running), self._step)
        self.client.stats = SchedulerStats(
            num_running_reqs=len(self._running),
            num_waiting_reqs=len(self._waiting),
            num_free_blocks=1 << 20,
        )

    def _step(self) -> None:
        for turn in self._running:
            turn.num_left -= 1
        ended = [turn for turn in self._running if not turn.num_left]
        self._running = [turn for turn in self._running if turn.num_left]
        for turn in ended:
            self.cache.use(turn.hashes)
            turn.on_end(turn)
        self._begin()


@dataclass
class Run:
    """One policy's run over a trace."""

    policy: str
    trace: Trace
    pool: ModelledPool
    seed: int
    has_pulls: bool
    clock: Clock = field(default_factory=Clock)
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefill = [self._worker(PrefillWorker, c) for c in self.pool.pool.prefill]
        self.decode = [self._worker(DecodeWorker, c) for c in self.pool.pool.decode]
        self._by_client = {each.client: each for each in (*self.prefill, *self.decode)}
        self._caches = {each.client.engine_id: each.cache for each in self.decode}
        self._rng = random.Random(self.seed)
        self._num_chats = self._num_sent = 0

    def _worker(self, kind: Any, client: Worker) -> Any:
        cache = Cache(self.clock, self.pool, client, self.trace.cached_blocks)
        return kind(self.clock, client, cache)

    def go(self) -> None:
        trace = self.trace
        self._systems = [_text(self._rng, trace.system_tokens) for _ in range(trace.num_tenants)]
        for _ in range(trace.num_chats):
            self._begin_chat()
        self.clock.run()

    def _begin_chat(self) -> None:
        # Some tenants have more chats than others.
        tenant = int(self._rng.expovariate(4.0 / self.trace.num_tenants))
        system = self._systems[min(tenant, self.trace.num_tenants - 1)]
        self._num_chats += 1
        self._begin_after(self._rng.expovariate(1 / self.trace.think_s), self._num_chats, system, 0)

    def _begin_after(self, seconds: float, chat: int, text: tuple[int, ...], number: int) -> None:
        prompt = text + _text(self._rng, self.trace.user_tokens)
        whole = prompt + _text(self._rng, self.trace.answer_tokens)

        def end(turn: Turn) -> None:
            self.turns.append(turn)
            if self._num_sent >= self.trace.total_turns:
                return
            if number + 1 < self.trace.num_turns:
                think_s = self._rng.expovariate(1 / self.trace.think_s)
                self._begin_after(think_s, chat, whole, number + 1)
            else:
                self._begin_chat()

        def begin() -> None:
            hashes = prefix_hashes(_request(chat, whole), BLOCK_SIZE)
            num_blocks = len(prompt) // BLOCK_SIZE
            turn = Turn(
                chat, prompt, hashes, self.clock.now, end, self.trace.answer_tokens, num_blocks
            )
            self._num_sent += 1
            self._send(turn)

        self.clock.after(seconds, begin)

    def _send(self, turn: Turn) -> None:
        if self.policy == ORACLE:
            blocks = turn.hashes[: turn.num_prompt_blocks]
            turn.decode = min(self.decode, key=lambda d: d.client.stats.num_running_reqs)
            if self.has_pulls:
                turn.source = max(
                    (d.cache for d in self.decode), key=lambda c: c.num_cached(blocks)
                )
            p = min(self.prefill, key=lambda p: p.ready_at(blocks, len(turn.prompt), turn.source))
            p.add(turn)
            return
        request = _request(turn.chat, turn.prompt)
        hashes = turn.hashes[: turn.num_prompt_blocks]
        route = self.pool.pool.route(request, hashes=hashes, session=str(turn.chat))
        assert route.prefill is not None
        turn.decode = self._by_client[route.decode]
        if route.prefix_source is not None:
            turn.source = self._caches[route.prefix_source.engine_id]
        self._by_client[route.prefill].add(turn)

    def results(self) -> dict[str, float]:
        # In the order of their ends; the last ones have the workers to themselves.
        first, last = len(self.turns) // 4, len(self.turns) - self.trace.num_chats
        turns = self.turns[first:last]
        ttft = sorted(turn.first_token - turn.began for turn in turns)
        return {
            "hit rate": sum(t.num_cached for t in turns) / sum(len(t.prompt) for t in turns),
            "turns/s": len(turns) / (turns[-1].first_token - turns[0].first_token),
            "TTFT p50": statistics.median(ttft),
            "TTFT p99": ttft[len(ttft) * 99 // 100],
        }


def _text(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))


def _request(chat: int, token_ids: tuple[int, ...]) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=str(chat),
        prompt_token_ids=token_ids,
        task=Generate(SamplingParams(max_tokens=100)),
    )


async def simulate(policy: str, trace: Trace, seed: int, *, has_pulls: bool) -> dict[str, float]:
    routing = "round_robin" if policy == ORACLE else policy
    pool = ModelledPool(NUM_WORKERS, NUM_WORKERS, routing_policy=routing)
    for worker in pool.workers:
        pool.attach(worker, has_prefix_pulls=has_pulls, max_model_len=1 << 20)
        worker.stats = SchedulerStats(num_free_blocks=1 << 20)
    await pool.proven()
    run = Run(policy, trace, pool, seed, has_pulls)
    run.go()
    await pool.pool.close()
    return run.results()


def _traces(args: argparse.Namespace) -> Iterator[tuple[str, Trace]]:
    for num_chats in args.chats:
        yield f"{num_chats} chats", Trace()._replace(num_chats=num_chats)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--chats", type=int, nargs="+", default=[16, 48, 120], help="at a time (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (%(default)s)")
    args = parser.parse_args()
    names = ("hit rate", "turns/s", "TTFT p50", "TTFT p99")
    print(f"{'':36}" + "".join(f"{name:>10}" for name in names))
    with modelled():
        for load, trace in _traces(args):
            cases = [(p, False) for p in ("round_robin", "power_of_two", "session", "prefix")]
            for policy, has_pulls in (*cases, (ORACLE, False), ("prefix", True), (ORACLE, True)):
                rows = []
                for seed in range(args.seeds):
                    random.seed(seed)
                    rows.append(await simulate(policy, trace, seed, has_pulls=has_pulls))
                values = [statistics.median(row[name] for row in rows) for name in names]
                what = f"{load}, {policy}" + (", prefix pulls" if has_pulls else "")
                print(f"{what:36}" + "".join(f"{value:10.3f}" for value in values), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
