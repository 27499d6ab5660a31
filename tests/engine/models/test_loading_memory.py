"""What loading a model adds to a process at its peak."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors import safe_open

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

# Peak memory over that of the weights in the dtype they are served in.
LIMIT = 1.2
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
DENSE = SHAPE | {"intermediate_size": 2816, "num_hidden_layers": 8}
HALF = DENSE | {"num_hidden_layers": 4}
# A table of half the weights, used twice.
TIED = HALF | {"tie_word_embeddings": True, "vocab_size": 49152}
EXPERTS = SHAPE | {"intermediate_size": 384, "num_local_experts": 8, "num_hidden_layers": 4}
MANY_EXPERTS = EXPERTS | {"num_hidden_layers": 8}
BYTES = {"int8": 1, "bfloat16": 2}


class Case(NamedTuple):
    """A model as it is stored and served."""

    architecture: str
    shape: dict[str, Any]
    stored: str = "bfloat16"
    served: str = "bfloat16"
    model_impl: str = "native"


CASES = {
    "as stored": Case("LlamaForCausalLM", DENSE),
    "from fp32": Case("LlamaForCausalLM", HALF, stored="float32"),
    "tied": Case("LlamaForCausalLM", TIED),
    "int8": Case("LlamaForCausalLM", DENSE, served="int8"),
    "transformers": Case("LlamaForCausalLM", DENSE, model_impl="transformers"),
    "experts": Case("MixtralForCausalLM", EXPERTS),
    "experts in int8": Case("MixtralForCausalLM", MANY_EXPERTS, served="int8"),
    "experts of transformers": Case("MixtralForCausalLM", EXPERTS, model_impl="transformers"),
}
# Prints for each case the most memory that a process had before and after. (Not ru_maxrss, in which
# a new process starts where its parent was.) The processes share what takes longest, the imports; a
# small model comes first, as code is counted when it is first run.
LOAD = """
import json, os, sys, torch
from pathlib import Path
from pdserve_engine.models.registry import read_model_config
from pdserve_engine.models.registry import load_model
from pdserve_engine.models import transformers_backend

def peak_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

def load(folder, quantization, model_impl):
    config = read_model_config(
        folder, dtype="bfloat16", model_impl=model_impl, quantization=quantization
    )
    return load_model(folder, config, device=torch.device("cpu"))

def measure(small, folder, *how):
    load(small, *how)
    before = peak_bytes()
    model = load(folder, *how)
    print(before, peak_bytes(), flush=True)

for case in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        measure(*case)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def folders(make_model: Callable[..., Path]) -> dict[str, Path]:
    return {
        name: make_model(case.architecture, dtype=case.stored, shard_size="80MB", **case.shape)
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def growth(folders: dict[str, Path], make_model: Callable[..., Path]) -> dict[str, int]:
    """Bytes at the peak of loading, above those before."""
    cases = []
    for name, case in CASES.items():
        small = make_model(case.architecture, dtype=case.stored)
        quantization = "int8" if case.served == "int8" else None
        cases.append((str(small), str(folders[name]), quantization, case.model_impl))
    command = [sys.executable, "-c", LOAD, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    peaks = (map(int, line.split()) for line in done.stdout.splitlines())
    return {name: after - before for name, (before, after) in zip(CASES, peaks, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_hardly_more_than_the_weights(
    folders: dict[str, Path], growth: dict[str, int], name: str
) -> None:
    weights = count_weights(folders[name]) * BYTES[CASES[name].served]
    assert weights > 90 << 20, "too small to tell"
    assert growth[name] < LIMIT * weights


def count_weights(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return total
