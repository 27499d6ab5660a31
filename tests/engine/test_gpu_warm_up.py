"""On a GPU no request waits for Triton's compiler.

PDSERVE_TEST_DEVICE=cpu runs the same traffic on the CPU, to see that it runs.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.adapters import write_adapter
from support.cuda_traffic import any_text, serve
from support.grammars import VOCAB_SIZE
from support.model_driver import Driver
from support.models import NATIVE_MODELS
from support.triton_kernels import num_compiled

pytest.importorskip("triton")

DEVICE = torch.device(os.environ.get("PDSERVE_TEST_DEVICE", "cuda"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
    ),
]


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_traffic_compiles_nothing_that_the_start_has_not(
    make_model: Callable[..., Path], tmp_path: Path, quantization: str | None
) -> None:
    architecture, overrides = NATIVE_MODELS["qwen3-window"]
    sizes = {"vocab_size": VOCAB_SIZE, "intermediate_size": 128}
    folder = make_model(architecture, **overrides | sizes)
    driver = Driver(
        folder,
        device=DEVICE,
        dtype="bfloat16",
        quantization=quantization,
        adapters=[write_adapter(folder, tmp_path / "adapter", r=8)],
        max_lora_rank=8,
        num_blocks=2048,
    )
    driver.runner.warm_up()
    driver.runner.capture_graphs()
    warm = num_compiled()
    with any_text() as grammar:
        serve(driver, grammar)
    assert num_compiled() == warm
