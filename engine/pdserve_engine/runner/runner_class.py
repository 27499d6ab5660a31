"""Which runner a device has."""

import torch

from pdserve_engine.runner.model_runner import ModelRunner


def runner_class(device: torch.device) -> type[ModelRunner]:
    """Return the class; that of CUDA needs Triton."""
    if device.type != "cuda":
        return ModelRunner
    from pdserve_engine.runner.cuda_runner import CudaModelRunner

    return CudaModelRunner
