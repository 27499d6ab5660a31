"""Services on a machine that has no compiled kernels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve_client.client import Client
from pdserve_common.types.sampling_params import SamplingParams


def test_a_stack_generates_on_reference_kernels(
    make_served_model: Callable[..., Path], start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CPU_ISA", "reference")
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=256)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with start_stack(model=model, dtype="bfloat16", quantization="int8", num_threads=1) as stack:
        with Client([stack.grpc_address]) as client:
            *_, last = client.generate([3] * 40, params, timeout_s=30)
        for name in stack.worker_names():
            (info,) = [s for s in stack.metrics(name) if s.startswith("pdserve_build_info{")]
            assert 'kernels="reference"' in info
            assert stack.log(name).count("quantization saves nothing here") == 1
        router = stack.metrics("router")
    assert last.usage.num_output_tokens == 8
    assert router['pdserve_handoffs_total{outcome="completed"}'] == 1
