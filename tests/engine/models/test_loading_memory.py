"""What loading a model adds to a process at its peak."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

pytestmark = pytest.mark.slow

# Peak memory over that of the weights in the dtype they are served in.
LIMIT = 1.2
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
DENSE = SHAPE | {"intermediate_size": 2816}
# A table of half the weights, used twice.
TIED = DENSE | {"tie_word_embeddings": True, "vocab_size": 65536, "num_hidden_layers": 6}
EXPERTS = SHAPE | {"intermediate_size": 384, "num_local_experts": 8}
# Prints the most memory the process has ever had, before and after. (Not ru_maxrss, in which a new
# process starts where its parent was.)
LOAD = """
import sys, torch
from pathlib import Path
from pdserve_engine.models.config import ModelConfig
from pdserve_engine.models.registry import load_model
from pdserve_engine.models import transformers_backend
from pdserve_kernels import select

def peak_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

folder, dtype, quantization, model_impl = sys.argv[1:]
cpu = torch.device("cpu")
kernels = select(cpu)
small = torch.ones(64, 64, dtype=torch.bfloat16)
kernels.linear(small, kernels.pack_linear(small))
config = ModelConfig.from_dir(
    folder, dtype=dtype, model_impl=model_impl, quantization=quantization or None
)
before = peak_bytes()
model = load_model(folder, config, device=cpu)
print(before, peak_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("architecture", "shape", "stored", "served", "model_impl"),
    [
        ("LlamaForCausalLM", DENSE, "bfloat16", "bfloat16", "native"),
        ("LlamaForCausalLM", DENSE, "float32", "bfloat16", "native"),
        ("LlamaForCausalLM", TIED, "bfloat16", "bfloat16", "native"),
        ("LlamaForCausalLM", DENSE, "bfloat16", "int8", "native"),
        ("LlamaForCausalLM", DENSE, "bfloat16", "bfloat16", "transformers"),
        ("MixtralForCausalLM", EXPERTS, "bfloat16", "bfloat16", "transformers"),
    ],
)
def test_the_peak_is_hardly_more_than_the_weights(
    make_model: Callable[..., Path],
    architecture: str,
    shape: dict[str, Any],
    stored: str,
    served: str,
    model_impl: str,
) -> None:
    folder = make_model(architecture, dtype=stored, shard_size="80MB", **shape)
    dtype, quantization = ("bfloat16", served) if served == "int8" else (served, "")
    command = [sys.executable, "-c", LOAD, str(folder), dtype, quantization, model_impl]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    before, after = map(int, result.stdout.split())
    weights = count_weights(folder) * {"int8": 1, "bfloat16": 2, "float32": 4}[served]
    assert weights > 90 << 20, "too small to tell"
    assert after - before < LIMIT * weights


def count_weights(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return total
