"""Which class runs a model, and the one call that loads it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pdserve_engine.models.base import Model
from pdserve_engine.models.config import LlamaConfig, ModelConfig, ModelError
from pdserve_engine.models.llama import LlamaModel
from pdserve_engine.models.loader import (
    Checkpoint,
    Progress,
    large_tensors_mapped_apart,
    show_progress,
)


def load_model(
    model_dir: str | Path,
    config: ModelConfig,
    *,
    device: torch.device,
    progress: Progress | None = None,
) -> Model:
    """Load the weights onto `device`; raise ModelError when they do not fit the config.

    Without `progress` a bar is drawn where stderr is a terminal, lines are logged elsewhere.
    """
    if config.quantization is not None and device.type != "cpu":
        raise ModelError(
            f"quantization is {config.quantization.method}, device is {device.type}: kernels for "
            "integer weights exist for cpu only"
        )
    checkpoint = Checkpoint(model_dir, progress=progress or show_progress())
    with large_tensors_mapped_apart():
        return _model_class(config)(config, checkpoint, device)


def _model_class(config: ModelConfig) -> Callable[[Any, Checkpoint, torch.device], Model]:
    if isinstance(config, LlamaConfig):
        return LlamaModel
    # Takes seconds to import, and most models need none of it.
    from pdserve_engine.models.transformers_backend import TransformersModel

    return TransformersModel
