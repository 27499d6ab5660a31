"""One GPU: its limits, our kernels and engine against them, transformers, and the handoff.

    python benchmarks/bench_gpu.py [--only limits,attention,...] [--output FILE]

Takes some minutes on a machine with torch, triton and nixl, and prints one page. Each section is a
process of its own with a time limit: what fails or hangs costs no other section its result, and
results are written as they come. Models have the named shapes and random weights, which are drawn
where they would be read. Shares are of what the same run measures: bytes of its copies, FLOPs of
its largest matrix product.

    python benchmarks/bench_gpu.py --device cpu --tiny

runs the same code on small shapes, to see that it runs.
"""

import argparse
import ast
import contextlib
import functools
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DEFAULT_OUTPUT = Path(__file__).parent / "results" / "gpu.json"
BLOCK_SIZE = 64
# Larger than any GPU's L2 cache. To clear it takes longer than to launch what is timed after it.
FLUSH_BYTES = 512 << 20
WEIGHT_STD = 0.02
MAX_TRACEBACK_LINES = 12


class Shape(NamedTuple):
    """A model as its config.json says it."""

    name: str
    config: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.config[name]


def _shape(name: str, architecture: str, model_type: str, **fields: Any) -> Shape:
    common = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 32768,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    return Shape(name, common | fields)


LARGE = _shape(
    "8B",
    "LlamaForCausalLM",
    "llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
SMALL = _shape(
    "0.6B",
    "Qwen3ForCausalLM",
    "qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)


def _shrink(shape: Shape) -> Shape:
    small = {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    return Shape(f"tiny {shape.name}", shape.config | small)


class Sizes(NamedTuple):
    """How much is done."""

    copy_bytes: int
    matrix: int
    # Of one measurement.
    seconds: float
    # (requests, context).
    decode_attention: list[tuple[int, int]]
    prefill_attention: list[tuple[int, int]]
    linear_rows: list[int]
    context: int
    decode_batches: dict[str, list[int]]
    num_steps: int
    num_profiled_steps: int
    prefill: tuple[int, int]
    chunks: list[int]
    hf: tuple[int, int, int]
    handoff_blocks: list[int]
    handoff_lengths: list[int]


FULL = Sizes(
    copy_bytes=4 << 30,
    matrix=8192,
    seconds=0.2,
    decode_attention=[(64, 4096), (1, 32768)],
    prefill_attention=[(1, 8192), (8, 2048)],
    linear_rows=[1, 64, 16384],
    context=1024,
    decode_batches={"8B": [1, 64], "0.6B": [1, 64, 256]},
    num_steps=64,
    num_profiled_steps=20,
    prefill=(8, 2048),
    chunks=[2048, 8192, 16384],
    hf=(256, 128, 128),
    handoff_blocks=[1, 32, 128, 512],
    handoff_lengths=[512, 2048, 8192],
)
TINY = Sizes(
    copy_bytes=1 << 20,
    matrix=128,
    seconds=0.01,
    decode_attention=[(4, 64), (1, 256)],
    prefill_attention=[(1, 128), (4, 32)],
    linear_rows=[1, 4, 32],
    context=32,
    decode_batches={"tiny 8B": [1, 4], "tiny 0.6B": [1, 8]},
    num_steps=8,
    num_profiled_steps=4,
    prefill=(4, 32),
    chunks=[32, 128],
    hf=(8, 8, 8),
    handoff_blocks=[1, 4],
    handoff_lengths=[64],
)


class Limits(NamedTuple):
    """What the device does at best, as measured: bytes and FLOPs a second."""

    copy: float
    read: float
    matrix: float


class Timing(NamedTuple):
    """Medians, in seconds: of the device, and of the host until it has launched everything."""

    device_s: float
    host_s: float


class Bench:
    """What all sections need: device, sizes, and where results go."""

    def __init__(self, args: argparse.Namespace, part: Path) -> None:
        import torch

        self.device = torch.device(args.device)
        self.is_cuda = self.device.type == "cuda"
        self.sizes = TINY if args.tiny else FULL
        self.large, self.small = (_shrink(LARGE), _shrink(SMALL)) if args.tiny else (LARGE, SMALL)
        self.options: dict[str, Any] = dict(args.option)
        self.records: list[dict[str, Any]] = []
        self._part = part

    def record(self, name: str, **values: Any) -> None:
        """Print a line, and keep it whatever happens next."""
        self.records.append({"name": name} | values)
        self._part.write_text(json.dumps(self.records))
        print(f"  {name:<44} {', '.join(_formatted(values))}", flush=True)

    def measure(self, function: Callable[[], object]) -> Timing:
        """Time a call, on CUDA with cold caches."""
        for _ in range(2):
            function()
        return self._measure_cuda(function) if self.is_cuda else self._measure_cpu(function)

    @functools.cached_property
    def limits(self) -> Limits:
        import torch

        source = torch.ones(self.sizes.copy_bytes // 4, dtype=torch.float32, device=self.device)
        copy_s = self.measure(functools.partial(torch.empty_like(source).copy_, source)).device_s
        read_s = self.measure(source.sum).device_s
        shape = (self.sizes.matrix, self.sizes.matrix)
        a, b = (torch.randn(shape, device=self.device).bfloat16() for _ in range(2))
        matrix_s = self.measure(lambda: a @ b).device_s
        num_bytes = self.sizes.copy_bytes
        return Limits(
            copy=2 * num_bytes / copy_s,
            read=num_bytes / read_s,
            matrix=2 * self.sizes.matrix**3 / matrix_s,
        )

    def _measure_cpu(self, function: Callable[[], object]) -> Timing:
        times, end = [], time.perf_counter() + self.sizes.seconds
        while not times or time.perf_counter() < end:
            times.append(_seconds(function))
        return Timing(statistics.median(times), statistics.median(times))

    def _measure_cuda(self, function: Callable[[], object]) -> Timing:
        import torch

        torch.cuda.synchronize()
        once_s = _seconds(lambda: (function(), torch.cuda.synchronize()))
        count = max(5, min(100, round(self.sizes.seconds / max(once_s, 1e-6))))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        host_s = []
        for start, end in events:
            self._flush.zero_()
            start.record()
            host_s.append(_seconds(function))
            end.record()
        torch.cuda.synchronize()
        device_ms = [start.elapsed_time(end) for start, end in events]
        return Timing(statistics.median(device_ms) / 1e3, statistics.median(host_s))

    @functools.cached_property
    def _flush(self) -> Any:
        import torch

        return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _formatted(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if name.startswith("share") or name.endswith("_share"):
            yield f"{name} {value:.1%}"
        elif isinstance(value, float):
            yield f"{name} {value:.4g}"
        elif isinstance(value, list | dict):
            yield f"{name}:" + "".join(f"\n      {item}" for item in _items(value))
        else:
            yield f"{name} {value}"


def _items(value: Any) -> list[str]:
    return [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else list(value)


# ---- limits


def bench_limits(bench: Bench) -> None:
    """How fast the device copies, reads and multiplies; the machine."""
    import torch
    from machine import describe

    bench.record("machine", what=describe("torch"))
    if bench.is_cuda:
        import triton

        properties = torch.cuda.get_device_properties(bench.device)
        bench.record(
            "GPU",
            what=properties.name,
            memory_gib=properties.total_memory / 2**30,
            sms=properties.multi_processor_count,
            l2_mib=properties.L2_cache_size / 2**20,
            cuda=str(torch.version.cuda),
            driver=_driver(),
            triton=triton.__version__,
        )
    limits = bench.limits
    bench.record("copy, bytes read and written", gb_s=limits.copy / 1e9)
    bench.record("read, sum of fp32", gb_s=limits.read / 1e9)
    bench.record(f"matrix, bf16 {bench.sizes.matrix}^3", tflops=limits.matrix / 1e12)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return repr(error)
    return done.stdout.strip().partition("\n")[0]


# ---- attention


def bench_attention(bench: Bench) -> None:
    """Paged attention of one layer against the copy's bandwidth and the matrix rate; torch's SDPA
    on dense keys and values.
    """
    for shape in (bench.large, bench.small):
        for requests, context in bench.sizes.decode_attention:
            _with_memory_freed(bench, functools.partial(_decode, bench, shape, requests, context))
        for requests, length in bench.sizes.prefill_attention:
            _with_memory_freed(bench, functools.partial(_prefill, bench, shape, requests, length))


def _with_memory_freed(bench: Bench, case: Callable[[], object]) -> None:
    """Run a case; one that fails leaves the others alone."""
    import gc

    import torch

    try:
        case()
    except Exception as error:  # whatever a kernel may raise
        bench.record("failed", case=str(getattr(case, "args", ""))[-120:], error=_short(error))
    gc.collect()
    if bench.is_cuda:
        torch.cuda.empty_cache()


def _decode(bench: Bench, shape: Shape, requests: int, context: int) -> None:
    attend = _paged_attention(bench, shape, [1] * requests, [context] * requests, requests)
    timing = bench.measure(attend)
    del attend
    num_bytes = 2 * 2 * requests * context * shape.num_key_value_heads * shape.head_dim
    sdpa = _sdpa(bench, shape, requests, 1, context)
    sdpa_s = bench.measure(sdpa).device_s
    bench.record(
        f"decode {shape.name} {requests} x {context}",
        us=timing.device_s * 1e6,
        host_us=timing.host_s * 1e6,
        share_of_copy=num_bytes / timing.device_s / bench.limits.copy,
        sdpa_us=sdpa_s * 1e6,
        sdpa_share=num_bytes / sdpa_s / bench.limits.copy,
    )


def _prefill(bench: Bench, shape: Shape, requests: int, length: int) -> None:
    attend = _paged_attention(bench, shape, [length] * requests, [length] * requests, 0)
    timing = bench.measure(attend)
    del attend
    flops = requests * attention_flops(shape, length)
    sdpa_s = bench.measure(_sdpa(bench, shape, requests, length, length)).device_s
    bench.record(
        f"prefill {shape.name} {requests} x {length}",
        us=timing.device_s * 1e6,
        host_us=timing.host_s * 1e6,
        share_of_matrix=flops / timing.device_s / bench.limits.matrix,
        sdpa_us=sdpa_s * 1e6,
        sdpa_share=flops / sdpa_s / bench.limits.matrix,
    )


def attention_flops(shape: Shape, length: int) -> float:
    """Of one prompt in one layer: half of two products, as the causal mask leaves it."""
    return 2 * 2 * length * length / 2 * shape.num_attention_heads * shape.head_dim


def _paged_attention(
    bench: Bench, shape: Shape, query_lens: list[int], seq_lens: list[int], num_decodes: int
) -> Callable[[], object]:
    """Return a call that attends in one layer, another one each time."""
    import torch
    from bench_kernels import make_metadata

    from pdserve_kernels import select

    kernels, layers = select(bench.device), shape.num_hidden_layers
    metadata = make_metadata(query_lens, seq_lens, num_decodes, str(bench.device), BLOCK_SIZE)
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in seq_lens)
    kv_shape = (num_blocks, shape.num_key_value_heads, layers, 2, BLOCK_SIZE, shape.head_dim)
    kv_cache = torch.empty(kv_shape, dtype=torch.bfloat16, device=bench.device).normal_()
    query_shape = (sum(query_lens), shape.num_attention_heads, shape.head_dim)
    query = torch.randn(query_shape, device=bench.device).bfloat16()
    numbers = itertools.cycle(range(layers))
    scale = shape.head_dim**-0.5
    return lambda: kernels.paged_attention(query, kv_cache, next(numbers), metadata, scale)


def _sdpa(
    bench: Bench, shape: Shape, requests: int, query_len: int, context: int
) -> Callable[[], object]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def random_heads(num_heads: int, length: int) -> torch.Tensor:
        size = (requests, num_heads, length, shape.head_dim)
        return torch.empty(size, dtype=torch.bfloat16, device=bench.device).normal_()

    query = random_heads(shape.num_attention_heads, query_len)
    key, value = (random_heads(shape.num_key_value_heads, context) for _ in range(2))
    return lambda: scaled_dot_product_attention(
        query, key, value, is_causal=query_len > 1, enable_gqa=True
    )


# ---- layers


def bench_layers(bench: Bench) -> None:
    """Every other kernel of a layer, and the sampling, against what its bytes or FLOPs take."""
    for rows in (1, 64):
        _with_memory_freed(bench, functools.partial(_small_kernels, bench, bench.large, rows))
    for rows in (1, 64):
        _with_memory_freed(bench, functools.partial(_samplers, bench, bench.small, rows))
    for rows in bench.sizes.linear_rows:
        _with_memory_freed(bench, functools.partial(_linears, bench, bench.large, rows))


def _record_bytes(bench: Bench, name: str, call: Callable[[], object], num_bytes: int) -> None:
    try:
        timing = bench.measure(call)
    except Exception as error:  # whatever a kernel may raise
        bench.record(name, error=_short(error))
        return
    bench.record(
        name,
        us=timing.device_s * 1e6,
        host_us=timing.host_s * 1e6,
        share_of_copy=num_bytes / bench.limits.copy / timing.device_s,
    )


def _small_kernels(bench: Bench, shape: Shape, rows: int) -> None:
    import torch

    from pdserve_kernels import select

    kernels, layers = select(bench.device), 4
    hidden, heads, kv_heads = (
        shape.hidden_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
    )

    def random_rows(*size: int) -> torch.Tensor:
        return torch.randn(rows, *size, device=bench.device).bfloat16()

    x, residual = random_rows(hidden), random_rows(hidden)
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=bench.device)
    row_bytes = rows * hidden * 2
    _record_bytes(
        bench, f"rms_norm x {rows}", lambda: kernels.rms_norm(x, weight, 1e-5), 2 * row_bytes
    )
    _record_bytes(
        bench,
        f"fused_add_rms_norm x {rows}",
        lambda: kernels.fused_add_rms_norm(x, residual, weight, 1e-5),
        4 * row_bytes,
    )
    query, key = random_rows(heads, shape.head_dim), random_rows(kv_heads, shape.head_dim)
    value = random_rows(kv_heads, shape.head_dim)
    positions = torch.arange(rows, device=bench.device)
    cos_sin = torch.randn(4096, shape.head_dim, device=bench.device)
    head_bytes = rows * shape.head_dim * 2
    _record_bytes(
        bench,
        f"rotary_embedding x {rows}",
        lambda: kernels.rotary_embedding(positions, query, key, cos_sin),
        2 * (heads + kv_heads) * head_bytes,
    )
    kv_shape = (rows, kv_heads, layers, 2, BLOCK_SIZE, shape.head_dim)
    kv_cache = torch.zeros(kv_shape, dtype=torch.bfloat16, device=bench.device)
    slots = positions * BLOCK_SIZE
    _record_bytes(
        bench,
        f"reshape_and_cache x {rows}",
        lambda: kernels.reshape_and_cache(key, value, kv_cache, 1, slots),
        4 * kv_heads * head_bytes,
    )
    if bench.is_cuda:
        _record_heads(bench, shape, rows, kv_cache, positions, slots)
    gate_up = random_rows(2 * shape.intermediate_size)
    _record_bytes(
        bench,
        f"silu_and_mul x {rows}",
        lambda: kernels.silu_and_mul(gate_up),
        3 * rows * shape.intermediate_size * 2,
    )


def _record_heads(
    bench: Bench, shape: Shape, rows: int, kv_cache: Any, positions: Any, slots: Any
) -> None:
    """What the decoder does to its heads between two products, with norms as Qwen3 has them."""
    import torch

    from pdserve_kernels.decoder import Decoder, DecoderLayer
    from pdserve_kernels.triton.heads import prepare_heads

    head_dim = shape.head_dim
    num_heads, num_kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    norm = torch.ones(head_dim, dtype=torch.bfloat16, device=bench.device)
    nothing = dict.fromkeys(("qkv", "attention_output", "gate_up", "down"))
    layer = DecoderLayer(
        input_norm=norm,
        q_norm=norm,
        k_norm=norm,
        post_attention_norm=norm,
        group=0,
        slot=1,
        window=None,
        **nothing,
    )
    decoder = Decoder(
        layers=(layer,),
        final_norm=norm,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        cos_sin_cache=torch.randn(4096, head_dim, device=bench.device),
    )
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(rows, width, device=bench.device).bfloat16()
    _record_bytes(
        bench,
        f"prepare_heads x {rows}",
        lambda: prepare_heads(qkv, decoder, layer, positions, kv_cache, slots),
        2 * 2 * rows * width,
    )


def _samplers(bench: Bench, shape: Shape, rows: int) -> None:
    import numpy as np
    import torch

    from pdserve_kernels import select
    from pdserve_kernels.sampling_batch import SamplingBatch

    kernels = select(bench.device)
    # As the model makes them.
    logits = (3 * torch.randn(rows, shape.vocab_size, device=bench.device)).bfloat16()
    num_bytes = logits.nbytes

    def batch(top_k: int, top_p: float) -> SamplingBatch:
        return SamplingBatch(
            temperature=np.ones(rows, dtype=np.float32),
            top_k=np.full(rows, top_k, dtype=np.int64),
            top_p=np.full(rows, top_p, dtype=np.float64),
            min_p=np.zeros(rows, dtype=np.float32),
            seeds=np.arange(rows, dtype=np.int64),
            positions=np.arange(rows, dtype=np.int64),
        )

    _record_bytes(bench, f"argmax x {rows}", lambda: kernels.argmax(logits), num_bytes)
    for name, top_k, top_p in (
        ("temperature", 0, 1.0),
        ("top-k 50", 50, 1.0),
        ("top-p 0.9", 0, 0.9),
        ("top-k 50, top-p 0.9", 50, 0.9),
    ):
        settings = batch(top_k, top_p)
        call = functools.partial(kernels.sample, logits, settings)
        _record_bytes(bench, f"sample, {name} x {rows}", call, num_bytes)


def _linears(bench: Bench, shape: Shape, rows: int) -> None:
    import torch

    from pdserve_kernels import select

    kernels, hidden = select(bench.device), shape.hidden_size
    q_size = shape.num_attention_heads * shape.head_dim
    qkv_size = q_size + 2 * shape.num_key_value_heads * shape.head_dim
    cases = {
        "qkv": (qkv_size, hidden),
        "attention output": (hidden, q_size),
        "gate, up and silu": (2 * shape.intermediate_size, hidden),
        "down": (hidden, shape.intermediate_size),
    }
    if rows <= 64:
        cases["lm_head"] = (shape.vocab_size, hidden)
    for name, (out_features, in_features) in cases.items():
        size = (out_features, in_features)
        weight = torch.empty(size, dtype=torch.bfloat16, device=bench.device).normal_(
            std=WEIGHT_STD
        )
        is_mlp = name.startswith("gate")
        packed = kernels.pack_linear(weight, num_parts=2 if is_mlp else 1)
        x = torch.randn(rows, in_features, device=bench.device).bfloat16()
        linear = kernels.linear_silu_mul if is_mlp else kernels.linear
        call = functools.partial(linear, x, packed)
        num_bytes = 2 * (weight.numel() + x.numel() + rows * out_features)
        flops = 2 * rows * weight.numel()
        bound_s = max(num_bytes / bench.limits.copy, flops / bench.limits.matrix)
        timing = bench.measure(call)
        bench.record(
            f"{name} {out_features} x {in_features}, {rows} rows",
            us=timing.device_s * 1e6,
            host_us=timing.host_s * 1e6,
            share_of_bound=bound_s / timing.device_s,
            bound="bytes" if num_bytes / bench.limits.copy == bound_s else "FLOPs",
        )


# ---- whole models


class BenchEngine:
    """An engine over a model of a shape, with weights drawn instead of read."""

    def __init__(self, bench: Bench, shape: Shape, **settings: Any) -> None:
        from prometheus_client import CollectorRegistry

        from pdserve_common.metrics import KVTransferMetrics
        from pdserve_engine.clients.loading import load_engine
        from pdserve_engine.config import EngineConfig

        self.shape, self._number = shape, itertools.count()
        # Tokens of each request, once it has its first one.
        self.num_tokens: dict[str, int] = {}
        self._prompt_lens: dict[str, int] = {}
        fields = {"kv_connector": "none", "enable_prefix_caching": False, "max_model_len": 4096}
        fields |= {"device": bench.device.type} | settings | bench.options
        if not bench.is_cuda:
            fields |= {"kv_cache_memory_mib": 64, "num_threads": 1, "max_model_len": 1024}
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, weights_drawn():
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
        from pdserve_common.engine_types import EngineCoreRequest
        from pdserve_common.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for prompt in make_prompts(batch, prompt_len, self.shape.vocab_size):
            request_id = f"r{next(self._number)}"
            self._prompt_lens[request_id] = prompt_len
            self._core.add_request(
                EngineCoreRequest(
                    request_id=request_id,
                    prompt_token_ids=tuple(prompt),
                    sampling_params=params,
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

    def stop(self) -> None:
        self._core.abort_requests(self._prompt_lens)
        while self._core.has_work():
            self._core.step()
        self._prompt_lens, self.num_tokens = {}, {}


def make_prompts(batch: int, length: int, vocab_size: int) -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(2, vocab_size) for _ in range(length)] for _ in range(batch)]


def weight_shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    from pdserve_engine.models.config import LlamaConfig
    from pdserve_engine.models.llama import weight_shapes
    from pdserve_engine.models.registry import read_model_config

    config = read_model_config(folder)
    assert isinstance(config, LlamaConfig)
    return weight_shapes(config)


def write_model(folder: Path, shape: Shape) -> None:
    """Write a checkpoint whose weights are a hole in the file: it takes no time and no room."""
    (folder / "config.json").write_text(json.dumps(shape.config))
    header, end = {}, 0
    for name, size in weight_shapes_of(folder).items():
        start, end = end, end + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)


@contextlib.contextmanager
def weights_drawn() -> Iterator[None]:
    """Weights are random numbers instead of what the checkpoint has."""
    from pdserve_engine.models.loader import Checkpoint

    def draw(self: Checkpoint, target: Any, name: str) -> None:
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


class Cost(NamedTuple):
    """What a model's tokens take at least."""

    # Read by each step.
    weight_bytes: int
    kv_bytes_per_token: int
    # Of each token's products but the last one's, with the vocabulary.
    flops_per_token: int

    @classmethod
    def of(cls, shape: Shape) -> "Cost":
        hidden = shape.hidden_size
        q_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        layer = hidden * (2 * q_size + 2 * kv_size + 3 * shape.intermediate_size)
        weights = layer * shape.num_hidden_layers
        return cls(
            weight_bytes=2 * (weights + shape.vocab_size * hidden),
            kv_bytes_per_token=2 * 2 * kv_size * shape.num_hidden_layers,
            flops_per_token=2 * weights,
        )


def bench_decode(bench: Bench) -> None:
    """Whole engines that decode: steps against the bytes of weights and KV, and how long the GPU
    waits between kernels.
    """
    for shape in (bench.large, bench.small):
        case = functools.partial(_decode_model, bench, shape)
        _with_memory_freed(bench, case)


def _decode_model(bench: Bench, shape: Shape) -> None:
    batches = bench.sizes.decode_batches[shape.name]
    with BenchEngine(
        bench, shape, max_num_seqs=max(batches), max_num_batched_tokens=8192
    ) as engine:
        bench.record(f"{shape.name} loaded", s=engine.load_s)
        for batch in batches:
            _with_memory_freed(bench, functools.partial(_decode_batch, bench, engine, batch))
            engine.stop()


def _decode_batch(bench: Bench, engine: BenchEngine, batch: int) -> None:
    sizes, cost = bench.sizes, Cost.of(engine.shape)
    num_steps = sizes.num_steps
    engine.start(batch, sizes.context, 3 * num_steps + sizes.num_profiled_steps + batch + 100)
    # All have their first token, and some more: what is compiled or captured on the way is.
    engine.run(8 * batch)
    while len(engine.num_tokens) < batch:
        engine.run(batch)
    context = statistics.mean(engine.num_tokens.values())
    started = time.perf_counter()
    count = engine.run(num_steps * batch)
    elapsed_s = time.perf_counter() - started
    step_s = elapsed_s / (count / batch)
    num_bytes = cost.weight_bytes + batch * (context + num_steps / 2) * cost.kv_bytes_per_token
    name = f"decode {engine.shape.name} batch {batch}, context {context:.0f}"
    bench.record(
        name,
        ms_per_step=step_s * 1e3,
        tokens_per_s=count / elapsed_s,
        share_of_copy=num_bytes / bench.limits.copy / step_s,
    )
    if bench.is_cuda:
        busy = profile_steps(lambda: engine.run(sizes.num_profiled_steps * batch) / batch)
        bench.record(
            f"{name}, profiled",
            gpu_ms_per_step=busy.busy_s * 1e3,
            idle_share=1 - busy.busy_s / step_s,
            kernels_per_step=busy.num_kernels,
            kernels=busy.longest,
        )


class Busy(NamedTuple):
    """What a profile says of a step."""

    busy_s: float
    num_kernels: float
    # The kernels that take longest: microseconds and launches.
    longest: dict[str, str]


def profile_steps(run: Callable[[], float]) -> Busy:
    """Run steps, whose number `run` returns, and see when the GPU did something."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        num_steps = run()
        torch.cuda.synchronize()
    spans: list[tuple[float, float]] = []
    total: dict[str, tuple[float, int]] = {}
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            start, end = event.time_range.start, event.time_range.end
            spans.append((start, end))
            us, count = total.get(event.name, (0.0, 0))
            total[event.name] = (us + end - start, count + 1)
    if not spans:
        raise RuntimeError("the profile has no kernels")
    longest = sorted(total.items(), key=lambda item: -item[1][0])[:12]
    return Busy(
        busy_s=_union(spans) / 1e6 / num_steps,
        num_kernels=len(spans) / num_steps,
        longest={
            name[:70]: f"{us / num_steps:.1f} us in {count / num_steps:.1f}"
            for name, (us, count) in longest
        },
    )


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of the spans lasts."""
    total, covered = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


# ---- prompts


def bench_prefill(bench: Bench) -> None:
    """Whole prompts through an engine, in chunks of several sizes, against the matrix rate."""
    for chunk in bench.sizes.chunks:
        _with_memory_freed(bench, functools.partial(_prefill_model, bench, chunk))


def _prefill_model(bench: Bench, chunk: int) -> None:
    shape, (batch, length) = bench.large, bench.sizes.prefill
    cost = Cost.of(shape)
    flops = batch * length * cost.flops_per_token
    flops += batch * shape.num_hidden_layers * attention_flops(shape, length)
    with BenchEngine(bench, shape, max_num_seqs=64, max_num_batched_tokens=chunk) as engine:

        def run() -> None:
            engine.start(batch, length, 1)
            assert engine.run(batch) == batch

        run()
        elapsed_s = min(_seconds(run) for _ in range(2))
    bench.record(
        f"prefill {shape.name} {batch} x {length}, chunks of {chunk}",
        s=elapsed_s,
        tokens_per_s=batch * length / elapsed_s,
        share_of_matrix=flops / elapsed_s / bench.limits.matrix,
    )


# ---- transformers


def bench_hf(bench: Bench) -> None:
    """Tokens a second of a full batch, ours and transformers'."""
    batch, prompt_len, num_new = bench.sizes.hf
    rates: list[float] = []
    _with_memory_freed(bench, lambda: rates.append(_rate_of_engine(bench)))
    ours = rates[0] if rates else math.nan
    prompts = make_prompts(batch, prompt_len, bench.small.vocab_size)
    for name, generate in (("generate, sdpa", _hf_generate), ("generate_batch", _hf_continuous)):
        _with_memory_freed(
            bench, functools.partial(_time_hf, bench, name, generate, prompts, num_new, ours)
        )


def _rate_of_engine(bench: Bench) -> float:
    batch, prompt_len, num_new = bench.sizes.hf
    count = batch * num_new
    settings = {"max_num_seqs": batch, "max_num_batched_tokens": 8192}
    with BenchEngine(bench, bench.small, **settings) as engine:

        def run() -> None:
            engine.start(batch, prompt_len, num_new)
            assert engine.run(count) == count

        run()
        rate = count / min(_seconds(run) for _ in range(2))
    what = f"{batch} x {prompt_len} + {num_new}"
    bench.record(f"{bench.small.name} {what}, pdserve", tokens_per_s=rate)
    return rate


def _time_hf(
    bench: Bench,
    name: str,
    generate: Callable[[Any, list[list[int]], int], int],
    prompts: list[list[int]],
    num_new: int,
    ours: float,
) -> None:
    import torch

    model = _hf_model(bench, bench.small)
    rates = []
    generate(model, prompts, 4)
    for _ in range(2):
        started = time.perf_counter()
        count = generate(model, prompts, num_new)
        if bench.is_cuda:
            torch.cuda.synchronize()
        rates.append(count / (time.perf_counter() - started))
        bench.record(f"transformers {name}", tokens_per_s=rates[-1], ours_is_x=ours / rates[-1])


def _hf_model(bench: Bench, shape: Shape) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config))
        config = AutoConfig.from_pretrained(folder)
    with bench.device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.generation_config.eos_token_id = None
    return model.to(bench.device).eval()


def _hf_generate(model: Any, prompts: list[list[int]], num_new: int) -> int:
    import torch

    tokens = torch.tensor(prompts, device=model.device)
    generated = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
    )
    return int(generated[:, tokens.shape[1] :].numel())


def _hf_continuous(model: Any, prompts: list[list[int]], num_new: int) -> int:
    from transformers import GenerationConfig

    settings = GenerationConfig(max_new_tokens=num_new, do_sample=False, pad_token_id=0)
    results = model.generate_batch(inputs=prompts, generation_config=settings)
    count = sum(len(result.generated_tokens) for result in results.values())
    if count < len(prompts) * num_new:
        raise RuntimeError(f"{count} tokens came, not {len(prompts) * num_new}")
    return count


# ---- the handoff


def bench_handoff(bench: Bench) -> None:
    """NIXL between two processes on one GPU, with and without CUDA IPC; then a prefill and a decode
    service against a decode service alone.
    """
    for tls in ("", "^cuda_ipc") if bench.is_cuda else ("",):
        _with_memory_freed(bench, functools.partial(_read_blocks, bench, tls))
    for num_prefill in (1, 0):
        _with_memory_freed(bench, functools.partial(_serve, bench, num_prefill))


def _read_blocks(bench: Bench, tls: str) -> None:
    """Blocks of the large model, read by one process out of another's pool."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    for_p, for_d = context.Pipe()
    counts = bench.sizes.handoff_blocks
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ucx"
        common = (bench.device.type, bench.large, 2 * max(counts), tls)
        p = context.Process(target=_run_p, args=(for_p, *common), daemon=True)
        receiver, sender = context.Pipe(duplex=False)
        d = context.Process(
            target=_run_d, args=(for_d, sender, *common, counts, str(log)), daemon=True
        )
        for process in (p, d):
            process.start()
        for end in (for_p, for_d, sender):  # what has ended is heard of
            end.close()
        try:
            for name, values in _answers(receiver):
                bench.record(f"{name}, UCX_TLS={tls or 'unset'}", **values)
        finally:
            for process in (d, p):
                process.join(5.0)
                process.kill()
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        bench.record(f"UCX's choice, UCX_TLS={tls or 'unset'}", lines=_protocols(lines))


def _answers(receiver: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    while True:
        if not receiver.poll(60.0):
            raise TimeoutError("no answer from the reading process")
        try:
            message = receiver.recv()
        except EOFError:
            raise RuntimeError("the reading process has ended") from None
        if message is None:
            return
        if isinstance(message, str):
            raise RuntimeError(message)
        yield message


def _protocols(lines: list[str]) -> list[str]:
    """What UCX says it does with GPU memory, each line once."""
    seen = dict.fromkeys(
        line.strip() for line in lines if any(word in line for word in ("cuda", "Error", "ERROR"))
    )
    return list(seen)[:16]


def _make_side(
    engine_id: str, device: str, shape: Shape, num_blocks: int, tls: str
) -> tuple[Any, Any, Any]:
    """Return (pool, transport, what a peer is told)."""
    if tls:
        os.environ["UCX_TLS"] = tls
    import torch

    from pdserve_common.kv_types import PROTOCOL_VERSION, KVLinkWelcome, new_epoch
    from pdserve_engine.kv.kv_cache import KVCache, KVCacheSpec
    from pdserve_engine.kv.kv_groups import group_layers
    from pdserve_engine.kv_transfer.base import KVIdentity
    from pdserve_engine.kv_transfer.factory import make_transport

    spec = KVCacheSpec(
        groups=group_layers([None] * shape.num_hidden_layers),
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
    )
    identity = KVIdentity(
        engine_id=engine_id,
        epoch=new_epoch(),
        compatibility_hash="bench",
        layout=spec.layout(),
        vocab_size=shape.vocab_size,
    )
    pool = KVCache(spec, num_blocks=num_blocks, device=torch.device(device))
    transport = make_transport(identity, device=device)
    transport.register(pool)
    welcome = KVLinkWelcome(
        protocol_version=PROTOCOL_VERSION,
        engine_id=engine_id,
        epoch=identity.epoch,
        compatibility_hash="bench",
        link=1,
        endpoint=transport.endpoint(),
    )
    return pool, transport, welcome


def _run_p(pipe: Any, device: str, shape: Shape, num_blocks: int, tls: str) -> None:
    import torch

    pool, transport, welcome = _make_side("p", device, shape, num_blocks, tls)
    numbers = torch.arange(num_blocks, device=device).to(torch.int16)
    pool.tensor.view(torch.int16).copy_(numbers.view(-1, 1, 1, 1, 1, 1))
    if pool.tensor.is_cuda:
        torch.cuda.synchronize()
    transport.expect_peer()
    transport.set_exporting(True)
    pipe.send(welcome)
    while pipe.recv() == "poke":
        transport.poke()
    transport.close()


def _run_d(
    pipe: Any,
    sender: Any,
    device: str,
    shape: Shape,
    num_blocks: int,
    tls: str,
    counts: list[int],
    log: str,
) -> None:
    os.environ["UCX_PROTO_INFO"] = "y"
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        if not pipe.poll(60.0):
            raise TimeoutError("P does not start")
        _time_reads(pipe, sender, _make_side("d", device, shape, num_blocks, tls), counts)
        sender.send(None)
    except Exception as error:  # for whoever waits
        sender.send(_short(error))
    pipe.send("stop")


def _time_reads(pipe: Any, sender: Any, side: tuple[Any, Any, Any], counts: list[int]) -> None:
    import threading

    import torch

    pool, transport, _ = side
    peer = transport.add_peer(pipe.recv(), lambda why: None)

    def read(block_ids: range) -> Any:
        results, is_over = [], threading.Event()

        def on_done(result: Any) -> None:
            results.append(result)
            is_over.set()

        pipe.send("poke")
        transport.read(peer, block_ids, block_ids, 20.0, on_done, lambda: None)
        if not is_over.wait(30.0):
            raise TimeoutError("the READ does not end")
        if not results[0].is_ok:
            raise RuntimeError(results[0].error)
        return results[0]

    read(range(pool.num_blocks))
    first = pool.tensor.view(torch.int16).flatten(1)
    expected = torch.arange(pool.num_blocks, device=first.device).to(torch.int16)
    if not bool((first == expected[:, None]).all()):
        raise RuntimeError("wrong bytes")
    for count in counts:
        for step in (1, 2):
            ids = range(0, count * step, step)
            times = [_seconds(functools.partial(read, ids)) for _ in range(10)]
            num_bytes = count * pool.block_bytes
            values = {
                "ms": statistics.median(times) * 1e3,
                "gb_s": num_bytes / statistics.median(times) / 1e9,
                "transport": read(ids).transport,
            }
            name = f"READ {count} blocks, {num_bytes / 2**20:.1f} MiB, every {step}."
            sender.send((name, values))


def _serve(bench: Bench, num_prefill: int) -> None:
    """One request at a time: time to the first token and between tokens."""
    from pdserve_client.client import Client
    from pdserve_client.config import StackConfig
    from pdserve_client.stack import Stack

    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from support.models import save_byte_tokenizer

    lengths, shape = bench.sizes.handoff_lengths, bench.small
    with tempfile.TemporaryDirectory() as folder:
        # Weights of zeros, as services read them: what they compute takes as long.
        write_model(Path(folder), shape)
        save_byte_tokenizer(Path(folder))
        config = StackConfig(
            model=folder,
            prefill=num_prefill,
            device=bench.device.type,
            max_model_len=max(lengths) + 256,
            kv_cache_memory_mib=4096 if bench.is_cuda else 64,
            require_disaggregation=num_prefill > 0,
            log_dir=f"{folder}/logs",
            **dict.fromkeys(("grpc_port", "http_port", "metrics_port", "worker_port"), 0),
        )
        try:
            with Stack(config) as stack, Client(stack.grpc_address) as client:
                for _ in stack.wait_until_ready():
                    pass
                _time_requests(bench, client, num_prefill)
        except BaseException:
            for log in Path(folder).glob("logs/*"):
                print(f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}", flush=True)
            raise


def _time_requests(bench: Bench, client: Any, num_prefill: int) -> None:
    import bench_handoff as requests

    args = argparse.Namespace(tokens=32, timeout_s=60.0)
    lengths = bench.sizes.handoff_lengths
    args.lengths = lengths
    requests.warm_up(client, args)
    for length in lengths:
        requests.measure(client, args, num_prompt_tokens=length)  # its shapes are compiled
        rows = [requests.measure(client, args, num_prompt_tokens=length) for _ in range(4)]
        names = ("TTFT", "prefill", "plain step")
        if num_prefill:
            names += ("raw transfer", "exposed", "admit", "first step", "handoff")
        values: dict[str, Any] = {
            f"{name} ms": statistics.median(row.values[name] for row in rows) for name in names
        }
        if num_prefill:
            values["moved"] = rows[0].moved
        what = "1P1D" if num_prefill else "alone"
        bench.record(f"{what}, {bench.small.name}, {length} tokens", **values)


# ---- all of it


class Section(NamedTuple):
    """A part of the page, and how many seconds it may take."""

    run: Callable[[Bench], None]
    limit_s: float


SECTIONS = {
    "limits": Section(bench_limits, 60),
    "attention": Section(bench_attention, 120),
    "layers": Section(bench_layers, 120),
    "decode": Section(bench_decode, 180),
    "prefill": Section(bench_prefill, 120),
    "hf": Section(bench_hf, 150),
    "handoff": Section(bench_handoff, 180),
}


def main() -> None:
    """Run the sections one after another, each in a process of its own."""
    args = _parse_args()
    if args.part is not None:
        _run_here(args)
        return
    results: dict[str, Any] = {}
    if args.output.exists():
        results = json.loads(args.output.read_text())  # of other sections they stay
    for name in args.only:
        print(f"{name}: {_first_sentence(SECTIONS[name].run)}", flush=True)
        results[name] = _run_apart(name, args)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    if any(results[name]["status"] != "ok" for name in args.only):
        sys.exit(1)


def _run_apart(name: str, args: argparse.Namespace) -> dict[str, Any]:
    limit_s = args.limit_s or SECTIONS[name].limit_s
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "records.json"
        arguments = [*sys.argv[1:], "--only", name, "--part", str(part)]
        command = [sys.executable, str(Path(__file__)), *arguments]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            status = "ok" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = f"took more than {limit_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and all that it has started
            process.wait()
        records = json.loads(part.read_text()) if part.exists() else []
    elapsed_s = time.monotonic() - started
    if any(record["name"] == "failed" for record in records):
        status = "failed"
    print(f"  [{name}: {status}, {elapsed_s:.0f} s]\n", flush=True)
    return {
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "status": status,
        "seconds": round(elapsed_s, 1),
        "records": records,
    }


def _run_here(args: argparse.Namespace) -> None:
    (name,) = args.only
    bench = Bench(args, args.part)
    try:
        if name != "handoff":
            # Before an engine takes the memory.
            _with_memory_freed(bench, lambda: bench.limits)
        SECTIONS[name].run(bench)
    except Exception as error:  # whatever it may be, the next section is none the worse
        bench.record("failed", error=_short(error))
        sys.exit(1)


def _short(error: BaseException) -> list[str]:
    lines = "".join(traceback.format_exception(error)).splitlines()
    return [line[:200] for line in lines[-MAX_TRACEBACK_LINES:]]


def _first_sentence(function: Callable[..., object]) -> str:
    return " ".join((function.__doc__ or "").split()).partition(".")[0]


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__
        + "\nsections:\n"
        + "\n".join(
            f"  {name:<10} {_first_sentence(section.run)}" for name, section in SECTIONS.items()
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", type=_section_names, default=list(SECTIONS), help="sections, comma between them"
    )
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="(%(default)s)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="NAME=VALUE",
        help="of the engines' EngineConfig, as often as you like: async_scheduling=False",
    )
    parser.add_argument("--limit-s", type=float, help="of each section, instead of its own")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _section_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(SECTIONS)}")
    return names


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a plain word
        return name, value


if __name__ == "__main__":
    main()
