"""Which GPU each rank gets, and that there must be enough."""

import os

import pytest
import torch

from pdserve_engine.config import EngineConfig
from pdserve_engine.executor.gpus import VISIBLE, use_gpu
from pdserve_engine.executor.multiproc import MultiprocExecutor


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "1"), ("2,3", "3"), ("GPU-5f, GPU-6a ,GPU-7b", "GPU-6a")],
)
def test_a_rank_sees_its_own_gpu_among_those_of_the_service(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: str
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    use_gpu(1)
    assert os.environ[VISIBLE] == expected


def test_too_few_gpus_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0,1,2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    config = EngineConfig(device="cuda", tensor_parallel_size=4)
    message = r"is 4, which takes as many GPUs: torch sees 3 \(CUDA_VISIBLE_DEVICES is 0,1,2\)"
    with pytest.raises(ValueError, match=message):
        MultiprocExecutor(config, name="d", hidden_size=64, compatibility_hash="")
