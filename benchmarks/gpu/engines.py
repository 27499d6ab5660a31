"""Whole engines over models of a shape, with weights drawn instead of read."""

import contextlib
import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu.bench import Bench
from gpu.measure import seconds
from gpu.shapes import WEIGHT_STD, Shape
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.types.engine import EngineCoreRequest, Generate
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.assemble import load_engine
from pdserve_engine.config import EngineConfig
from pdserve_engine.models.config import LlamaConfig
from pdserve_engine.models.registry import read_model_config
from pdserve_engine.models.weights.llama import weight_shapes
from pdserve_engine.models.weights.loader import Checkpoint


class BenchEngine:
    """An engine that is stepped here; settings are of its EngineConfig."""

    def __init__(self, bench: Bench, shape: Shape, **settings: Any) -> None:
        self.shape, self._number = shape, itertools.count()
        # Tokens of each request, once it has its first one.
        self.num_tokens: dict[str, int] = {}
        self._prompt_lens: dict[str, int] = {}
        fields = {"kv_connector": "none", "enable_prefix_caching": False, "max_model_len": 4096}
        fields |= {"device": bench.device.type} | settings | bench.options
        if not bench.is_cuda:
            fields |= {"kv_cache_memory_mib": 64, "num_threads": 1, "max_model_len": 1024}
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, _weights_drawn():
            write_model(Path(folder), shape)
            self._loaded = load_engine(
                EngineConfig(model=folder, **fields),
                role="decode",
                engine_id="bench",
                metrics=KVTransferMetrics(CollectorRegistry()),
            )
        self._core = self._loaded.core
        self.load_s = time.perf_counter() - started

    def __enter__(self) -> "BenchEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loaded.close()

    def start(self, batch: int, prompt_len: int, max_tokens: int) -> None:
        """Add requests that take exactly so many new tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for prompt in make_prompts(batch, prompt_len, self.shape.vocab_size):
            request_id = f"r{next(self._number)}"
            self._prompt_lens[request_id] = prompt_len
            self._core.add_request(
                EngineCoreRequest(
                    request_id=request_id,
                    prompt_token_ids=tuple(prompt),
                    task=Generate(params),
                )
            )

    def run(self, num_tokens: int) -> int:
        """Step until so many tokens have come, or all requests are over; return how many have."""
        count = 0
        while count < num_tokens and self._core.has_work():
            for outputs in self._core.step().outputs.values():
                for output in outputs:
                    if output.error is not None:
                        raise RuntimeError(output.error.message)
                    self._count(output.request_id, len(output.new_token_ids))
                    count += len(output.new_token_ids)
        return count

    def _count(self, request_id: str, num_new: int) -> None:
        before = self.num_tokens.get(request_id, self._prompt_lens[request_id])
        self.num_tokens[request_id] = before + num_new

    def time_requests(self, batch: int, prompt_len: int, max_tokens: int) -> float:
        """Return the seconds from the first request to the last one's end: the better of two runs,
        after one in which all that is compiled is.
        """

        def run() -> None:
            self.start(batch, prompt_len, max_tokens)
            assert self.run(batch * max_tokens) == batch * max_tokens

        run()
        return min(seconds(run) for _ in range(2))

    def stop(self) -> None:
        """Have it without requests."""
        self._core.abort_requests(self._prompt_lens)
        while self._core.has_work():
            self._core.step()
        self._prompt_lens, self.num_tokens = {}, {}


def make_prompts(batch: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return the same prompts each time."""
    chance = random.Random(0)
    return [[chance.randrange(2, vocab_size) for _ in range(length)] for _ in range(batch)]


def write_model(folder: Path, shape: Shape) -> None:
    """Write a checkpoint whose weights are a hole in the file: it takes no time and no room."""
    (folder / "config.json").write_text(json.dumps(shape.config))
    config = read_model_config(folder)
    assert isinstance(config, LlamaConfig)
    header, end = {}, 0
    for name, size in weight_shapes(config).items():
        start, end = end, end + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)


@contextlib.contextmanager
def _weights_drawn() -> Iterator[None]:
    """Weights are random numbers instead of what the checkpoint has."""

    def draw(self: Checkpoint, target: torch.Tensor, name: str) -> None:
        if target.dim() == 1:
            target.fill_(1.0)
        else:
            target.normal_(std=WEIGHT_STD)

    read_into = Checkpoint._read_into
    Checkpoint._read_into = draw  # type: ignore[method-assign]
    try:
        yield
    finally:
        Checkpoint._read_into = read_into  # type: ignore[method-assign]
