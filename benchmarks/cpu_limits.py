"""What this machine's cores can do at most, and how fast a model could run if they always did."""

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from peers.offline import Case

from pdserve_engine.models.config import LlamaConfig
from pdserve_kernels.cpu.compiled import pin_threads
from pdserve_kernels.cpu.memory import empty_on_huge_pages

Kernel = Callable[[], object]

READ_BYTES = 2**29
DOTS = 100_000  # half a millisecond: starting the threads takes microseconds
DOT_FLOPS = 16 * 16 * 4  # of each thread and count of `dot_pairs`
PRODUCT = (512, 1024, 6144)  # rows, in_features, out_features


def fastest(kernels: dict[str, Kernel], seconds: float) -> dict[str, float]:
    """Seconds of each kernel's fastest call; the kernels are called in turn."""
    best = dict.fromkeys(kernels, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or float("inf") in best.values():
        for name, kernel in kernels.items():
            start = time.perf_counter()
            kernel()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def load_limits() -> ctypes.CDLL:
    """Compile and load `cpu_limits.cpp`; raises CalledProcessError without AVX512-BF16."""
    source = Path(__file__).with_name("cpu_limits.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "cpu_limits.so"
        # Without a library of its own, OpenMP is the one that torch has loaded.
        command = ["g++", "-O3", "-march=native", "-fPIC", "-fno-exceptions", "-fopenmp"]
        command += ["-shared", "-nodefaultlibs", str(source), "-o", str(library)]
        subprocess.run(command, check=True, timeout=60)
        limits = ctypes.CDLL(str(library))
    limits.read_bytes.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    limits.dot_pairs.argtypes = (ctypes.c_int64,)
    return limits


class Limits(NamedTuple):
    """Per second and by all of torch's threads; a multiplication and an addition are two flops."""

    read_bytes: float  # in order, from memory
    flops: float  # of bf16 pairs in registers
    product_flops: float  # of oneDNN's bf16 product of 512 rows, for comparison

    def seconds(self, work: "Work") -> float:
        """The shortest time for `work`: reading and computing overlap perfectly."""
        return max(work.num_bytes / self.read_bytes, work.flops / self.flops)


class LimitsMeter:
    """Measures the limits again and again on the same buffers."""

    def __init__(self, cores: Sequence[int]) -> None:
        """`cores` get a thread each."""
        torch.set_num_threads(len(cores))
        pin_threads(cores)
        library = load_limits()
        data = empty_on_huge_pages(READ_BYTES, torch.uint8).fill_(1)
        rows, in_features, out_features = PRODUCT
        x = torch.randn(rows, in_features).bfloat16()
        weight = torch.randn(out_features, in_features).bfloat16()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        product = torch.ops.mkldnn._linear_pointwise
        self._kernels: dict[str, Kernel] = {
            "read": lambda: library.read_bytes(data.data_ptr(), READ_BYTES),
            "dots": lambda: library.dot_pairs(DOTS),
            "product": lambda: product(x, packed, None, "none", [], ""),
        }

    def measure(self, seconds: float) -> Limits:
        best = fastest(self._kernels, seconds)
        rows, in_features, out_features = PRODUCT
        return Limits(
            read_bytes=READ_BYTES / best["read"],
            flops=torch.get_num_threads() * DOTS * DOT_FLOPS / best["dots"],
            product_flops=2 * rows * in_features * out_features / best["product"],
        )


class Work(NamedTuple):
    """Bytes that have to be read, and operations, at least."""

    num_bytes: float
    flops: float


def decode_work(model: LlamaConfig, case: Case) -> Work:
    """The middle one of the case's steps: all weights, and each request's keys and values, once."""
    context = case.batch * (case.prompt_len + case.num_steps / 2)
    num_weights = _layer_weights(model) + _head_weights(model)
    return Work(
        num_bytes=2 * num_weights + _kv_bytes(model) * context,
        flops=2 * num_weights * case.batch + _attention_flops(model) * context,
    )


def prefill_work(model: LlamaConfig, case: Case) -> Work:
    """All prompts: weights read once, logits of the last tokens only, causal attention."""
    num_tokens = case.batch * case.prompt_len
    attended = num_tokens * (case.prompt_len + 1) / 2
    head = _head_weights(model)
    return Work(
        num_bytes=2 * (_layer_weights(model) + head),
        flops=2 * (_layer_weights(model) * num_tokens + head * case.batch)
        + _attention_flops(model) * attended,
    )


def _layer_weights(model: LlamaConfig) -> int:
    heads = 2 * model.num_attention_heads + 2 * model.num_kv_heads  # q, output, k, v
    per_layer = model.hidden_size * (heads * model.head_dim + 3 * model.intermediate_size)
    return model.num_layers * per_layer


def _head_weights(model: LlamaConfig) -> int:
    return model.hidden_size * model.vocab_size


def _kv_bytes(model: LlamaConfig) -> int:
    """Of each token."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype.itemsize


def _attention_flops(model: LlamaConfig) -> int:
    """For each token and each position that it sees."""
    return 4 * model.num_layers * model.num_attention_heads * model.head_dim
