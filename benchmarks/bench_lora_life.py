"""Latencies between tokens of rows beside which LoRA adapters come and go, one after the other, on
the model of `make_model.py`.

    python benchmarks/bench_lora_life.py [--batch 8] [--rank 16] [--seconds 8] [--windows 8]

Rows are watched alone and beside adapters in turns. Prints a table, and how long one takes to load.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from grammar_neighbours import Latencies
from make_model import DEFAULT_MODEL, make_model
from prometheus_client import CollectorRegistry
from safetensors.torch import save_file

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.types.lora import LoRARequest
from pdserve_common.types.verbs import AddLora, RemoveLora
from pdserve_engine.clients.inproc import InprocEngineClient
from pdserve_engine.config import EngineConfig
from pdserve_engine.lora.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from pdserve_engine.models.config import LlamaConfig
from pdserve_engine.models.registry import read_model_config
from pdserve_engine.models.weights.llama import lora_targets

# That come by turns: each is read, checked and packed anew.
NUM_FOLDERS = 3
SETTLE_S = 2.0


def write_adapter(model: Path, folder: Path, rank: int, seed: int) -> None:
    """Write one on all linears, with random weights in fp32, as peft does."""
    config = read_model_config(str(model))
    assert isinstance(config, LlamaConfig)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (num_outputs, num_inputs) in lora_targets(config).items():
        for part, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            key = f"base_model.model.{name}.lora_{part}.weight"
            weights[key] = 0.01 * torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(weights, folder / WEIGHTS_FILE)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / CONFIG_FILE).write_text(json.dumps(fields))


class ComingAndGoing:
    """Loads and removes adapters until it is told to end."""

    def __init__(self, client: InprocEngineClient) -> None:
        self._client = client
        self._is_over = False
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None
        self.load_s: list[float] = []

    def begin(self) -> None:
        self._is_over = False
        self._task = asyncio.create_task(self._run())

    async def end(self) -> None:
        self._is_over = True
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while not self._is_over:
            number = next(self._numbers)
            name = f"adapter {number}"
            lora = LoRARequest(lora_name=name, lora_path=str(number % NUM_FOLDERS), digest="")
            began = time.perf_counter()
            await self._client.call(AddLora(lora_request=lora))
            self.load_s.append(time.perf_counter() - began)
            await self._client.call(RemoveLora(lora_name=name))


async def bench(model: Path, root: Path, args: argparse.Namespace) -> None:
    config = EngineConfig(
        model=str(model),
        lora_root=str(root),
        kv_connector="none",
        kv_cache_memory_mib=1024,
        max_model_len=4096,
        max_loras=4,
    )
    metrics = KVTransferMetrics(CollectorRegistry())
    client = await InprocEngineClient.load(config, role="decode", engine_id="lora", metrics=metrics)
    neighbours, adapters = Latencies(client, args.batch), ComingAndGoing(client)
    neighbours.start()
    await neighbours.gaps_s(SETTLE_S)
    alone_s: list[float] = []
    beside_s: list[float] = []
    for _ in range(args.windows):
        alone_s += await neighbours.gaps_s(args.seconds)
        adapters.begin()
        beside_s += await neighbours.gaps_s(args.seconds)
        await adapters.end()
    neighbours.end()
    await client.close()
    alone, beside = percentiles_ms(alone_s), percentiles_ms(beside_s)
    print("| rows | ITL alone, p50 / p99 ms | beside adapters | ratio of p99 | adapters, s each |")
    print("|---|---|---|---|---|")
    print(
        f"| {args.batch} | {alone[0]:.1f} / {alone[1]:.1f} | {beside[0]:.1f} / {beside[1]:.1f} "
        f"| {beside[1] / alone[1]:.2f} | {len(adapters.load_s)}, "
        f"{statistics.median(adapters.load_s):.2f} |"
    )


def percentiles_ms(seconds: list[float]) -> tuple[float, float]:
    return statistics.median(seconds) * 1e3, statistics.quantiles(seconds, n=100)[98] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--windows", type=int, default=8)
    args = parser.parse_args()
    make_model(args.model)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(NUM_FOLDERS):
            write_adapter(args.model, Path(folder) / str(seed), args.rank, seed)
        asyncio.run(bench(args.model, Path(folder), args))


if __name__ == "__main__":
    main()
