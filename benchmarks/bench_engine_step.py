"""What a step costs on the host, apart from the model: by part, in us a step and us a request.

    python benchmarks/bench_engine_step.py

The engine's core, the scheduler with prefix caching, the runner and everything between the engine
and the bytes that go to a router are the real ones; the model computes nothing, and what it takes
is left out. `cuda` is the runner for GPUs, whose graphs and events do nothing here: its figures are
those of its Python alone. All runs on one thread, so that each part's time is its own.
"""

import argparse
import asyncio
import gc
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from machine import describe
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import EngineMetrics
from pdserve_common.types.engine import EngineCoreOutputs, EngineCoreRequest, Generate
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_common.wire.output import engine_core_outputs_to_proto
from pdserve_engine.clients.messages import CODEC
from pdserve_engine.clients.owners import RequestOwners
from pdserve_engine.clients.stats import EngineStatsRecorder
from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.engine_core import EngineCore, StepResult
from pdserve_engine.core.scheduler import Scheduler
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.kv.block_pool import BlockPool
from pdserve_engine.kv.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv.kv_groups import group_layers
from pdserve_engine.models.base import ForwardInputs
from pdserve_engine.models.config import ModelConfig
from pdserve_engine.request.sched_output import AsyncModelRunnerOutput, SchedulerOutput
from pdserve_engine.runner.load.make_runner import make_runner
from pdserve_engine.runner.run.model_runner import ModelRunner
from pdserve_kernels.sampling_batch import Argmax
from pdserve_worker.attached_router import AttachedRouter

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
# All begin with the same blocks, which the prefix cache has.
SHARED_TOKENS, OWN_TOKENS = 48, 16
MAX_NUM_BATCHED_TOKENS = 8192
# Requests, and how many of them end in a step and are replaced.
CASES = ((1, 0), (64, 0), (256, 0), (256, 32))
WARMUP_STEPS = 20
CONFIG = ModelConfig(
    architecture="none",
    vocab_size=32000,
    hidden_size=1,
    num_layers=1,
    num_attention_heads=1,
    num_kv_heads=1,
    head_dim=16,
    attention_windows=(None,),
    max_model_len=MAX_MODEL_LEN,
    dtype=torch.float32,
    eos_token_ids=(2,),
)


class Parts:
    """How long calls take without those within them, by the names of parts."""

    def __init__(self) -> None:
        self.step: dict[str, float] = defaultdict(float)
        # When the innermost part was entered or was left for last, and those around it.
        self._stack: list[str] = []
        self._since = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function; what it takes counts for the part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._stack.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._stack.pop()

        return call

    def time_method(self, part: str, owner: Any, name: str) -> None:
        """Have a method of an object or a class count for the part."""
        setattr(owner, name, self.timed(part, getattr(owner, name)))

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        step, self.step = self.step, defaultdict(float)
        return step

    def _switch(self) -> None:
        now = time.thread_time()
        if self._stack:
            self.step[self._stack[-1]] += now - self._since
        self._since = now


class NoModel:
    """A model that computes nothing; all its tokens are 7."""

    config = CONFIG
    device = CPU
    is_row_independent = True
    can_be_captured = True

    def __init__(self) -> None:
        self._hidden = torch.zeros(MAX_NUM_BATCHED_TOKENS, 1)
        self._ids = torch.full((MAX_NUM_BATCHED_TOKENS,), 7)

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        return self._hidden[: len(inputs.token_ids)]

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        raise AssertionError("all requests are greedy, which need no logits")

    def choose_greedily(
        self, hidden_rows: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> Argmax:
        n = len(hidden_rows)
        return Argmax(self._ids[:n], torch.zeros(n, dtype=torch.int64), self._hidden[:n, 0])


class Rank:
    """What the executor has of a rank while it steps."""

    def __init__(self, runner: ModelRunner, parts: Parts) -> None:
        self._execute = parts.timed("runner", runner.execute_model)
        self._parts = parts

    def execute_model(self, scheduled: SchedulerOutput) -> AsyncModelRunnerOutput:
        output = self._execute(scheduled)
        return _Output(self._parts.timed("runner", output.get_output))


class _Output:
    def __init__(self, get_output: Callable[..., Any]) -> None:
        self.get_output = get_output


class NoEngine:
    """What an attachment has of an engine client."""

    def register_client(self, on_outputs: Callable[[EngineCoreOutputs], None]) -> int:
        return 0


def runner_of(kind: str, cache: KVCache, batch: int, parts: Parts) -> ModelRunner:
    sizes = {"max_num_seqs": batch, "max_model_len": MAX_MODEL_LEN}
    if kind == "cuda":
        return _make_cuda_runner(cache, sizes, parts)
    model = NoModel()
    parts.time_method("model", model, "forward")
    parts.time_method("model", model, "choose_greedily")
    return make_runner(model, cache, **sizes)


def _make_cuda_runner(cache: KVCache, sizes: dict[str, int], parts: Parts) -> ModelRunner:
    """Return the runner with graphs and events that do nothing; all its steps bring tokens 7."""
    from pdserve_engine.runner.run.graph_buffers import RecordedDraw, StepKind
    from pdserve_engine.runner.sample.device_sampler import Drawn

    class Nothing:
        def __init__(self, **options: object) -> None: ...
        def record(self) -> None: ...
        def synchronize(self) -> None: ...
        def replay(self) -> None: ...
        def query(self) -> bool:
            return True

    results = torch.zeros((2, MAX_NUM_BATCHED_TOKENS), dtype=torch.int64)
    results[0] = 7
    hidden_states = torch.zeros(MAX_NUM_BATCHED_TOKENS, 1)

    torch.cuda.Event = torch.cuda.CUDAGraph = Nothing  # type: ignore[assignment,misc]
    runner = make_runner(NoModel(), cache, on_cuda=True, **sizes)
    stepper: Any = runner.stepper
    stepper._run = lambda model, views, *args: hidden_states
    stepper._draw = lambda model, views, *args: Drawn(
        results[:, : len(views["batch_rows"])], hidden_states
    )
    num = sizes["max_num_seqs"]
    kind = StepKind(is_decode=True)
    graph = stepper._make_graph(num, num, kind)
    graph.hidden_states = hidden_states
    graph.draws[False] = RecordedDraw(graph.forward, results[:, :num])
    stepper.graphs = {kind: [graph]}
    return runner


class Bench:
    """One engine, and what its outputs go through."""

    def __init__(self, kind: str, batch: int, num_replaced: int) -> None:
        self.parts = parts = Parts()
        self._num_replaced = num_replaced
        self._batch = batch
        spec = KVCacheSpec(
            groups=group_layers(CONFIG.attention_windows),
            num_kv_heads=1,
            head_dim=CONFIG.head_dim,
            block_size=BLOCK_SIZE,
            dtype=CONFIG.dtype,
        )
        cache = KVCache(spec, num_blocks=batch * MAX_MODEL_LEN // BLOCK_SIZE, device=CPU)
        config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS)
        pool = BlockPool(cache.num_blocks, enable_caching=True)
        scheduler = Scheduler(config, KVCacheManager(pool, BLOCK_SIZE))
        rank: Any = Rank(runner_of(kind, cache, config.max_batch_size, parts), parts)
        executor = UniprocExecutor(rank, async_scheduling=False)
        self._core = EngineCore(scheduler=scheduler, executor=executor, max_model_len=MAX_MODEL_LEN)
        parts.time_method("schedule", scheduler, "schedule")
        parts.time_method("update", scheduler, "update_from_output")
        self._step = parts.timed("core", self._core.step)
        self._record = parts.timed(
            "metrics", EngineStatsRecorder(EngineMetrics(CollectorRegistry()))
        )
        self._owners = RequestOwners()
        self._deliver = parts.timed("pipe out", self._to_pipe)
        self._receive = parts.timed("pipe in", self._from_pipe)
        self._write = parts.timed("wire", self._to_wire)
        self._reader = CODEC.reader()
        engine: Any = NoEngine()
        self._attachment = AttachedRouter(engine, "router")
        self._on_outputs = parts.timed("outbox", self._attachment._on_outputs)
        self._next_frames = parts.timed("outbox", self._attachment.next_frames)
        self._stream = self._attachment.open_stream()
        self._requests = self._make_requests()

    def _make_requests(self) -> Iterator[EngineCoreRequest]:
        shared = tuple(range(100, 100 + SHARED_TOKENS))
        life = self._batch // self._num_replaced if self._num_replaced else MAX_MODEL_LEN
        for index in itertools.count():
            first = index < self._batch and self._num_replaced > 0
            params = SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=1 + index % life if first else life,
            )
            own = (1000 + index % 30000,) * OWN_TOKENS
            yield EngineCoreRequest(
                request_id=f"cmpl-{index:032x}",
                prompt_token_ids=shared + own,
                task=Generate(params),
            )

    async def run(self, num_steps: int) -> list[dict[str, float]]:
        """Return the seconds of each part in each of so many steps."""
        gc.collect()
        gc.freeze()  # as a worker does when its model is loaded
        steps = []
        for number in range(WARMUP_STEPS + num_steps):
            self._fill()
            self.parts.take()
            await self._run_step()
            if number >= WARMUP_STEPS:
                steps.append(self.parts.take())
        return steps

    def _fill(self) -> None:
        """Add requests until the batch is full."""
        while len(self._core.scheduler.requests) < self._batch:
            request = next(self._requests)
            self._owners.add(request)
            self._core.add_request(request)
            self._attachment._running[request.request_id] = request.attempt
            self._attachment.handles[request.request_id, request.attempt] = 1 + len(
                self._attachment.handles
            )

    async def _run_step(self) -> None:
        result: StepResult = self._step()
        self._record(result.stats, [o for group in result.outputs.values() for o in group], True)
        outputs = self._receive(self._deliver(result))
        self._on_outputs(outputs)
        parts = await self._attachment.outbox.get(0.0)
        frames = self._next_frames(self._stream, parts, 1)
        self._write(frames)
        self._attachment.acknowledge(frames[-1].seq + 1)

    def _to_pipe(self, result: StepResult) -> bytes:
        outputs = self._owners.release_ended(result.outputs[0])
        return CODEC.encode(EngineCoreOutputs(outputs=outputs, scheduler_stats=result.stats))

    def _from_pipe(self, frame: bytes) -> EngineCoreOutputs:
        ((outputs, _),) = self._reader.feed(frame)
        assert isinstance(outputs, EngineCoreOutputs)
        return outputs

    def _to_wire(self, frames: Any) -> None:
        handles = self._attachment.handles
        for frame in frames:
            engine_core_outputs_to_proto(
                frame.outputs, step_seq=1, handles=handles
            ).SerializeToString()


PARTS = ("schedule", "runner", "update", "core", "metrics", "pipe out", "pipe in", "outbox", "wire")


def main() -> None:
    args = _parse_args()
    torch.set_num_threads(1)
    print(describe("torch", "numpy"))
    print(
        "us a step: median"
        + "".join(f"{part:>10}" for part in PARTS)
        + f"{'all':>10}{'/request':>10}"
    )
    for kind in args.runner:
        for batch, num_replaced in CASES:
            steps = asyncio.run(Bench(kind, batch, num_replaced).run(args.steps))
            us = {p: 1e6 * statistics.median(step[p] for step in steps) for p in PARTS}
            total = 1e6 * statistics.median(sum(step[p] for p in PARTS) for step in steps)
            name = f"{kind} {batch}" + (f", {num_replaced} new" if num_replaced else "")
            columns = "".join(f"{us[part]:>10.0f}" for part in PARTS)
            print(f"{name:<17}{columns}{total:>10.0f}{total / batch:>10.2f}", flush=True)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runner", nargs="+", default=["plain", "cuda"])
    parser.add_argument("--steps", type=int, default=300, help="of each case (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
