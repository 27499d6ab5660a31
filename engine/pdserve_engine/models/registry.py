"""Which class runs which architecture, and the one call that loads a model."""

from collections.abc import Mapping
from pathlib import Path

import torch

from pdserve_engine.models.config import FAMILIES, ModelConfig
from pdserve_engine.models.llama import LlamaModel
from pdserve_engine.models.loader import Checkpoint, Progress, tty_progress

MODELS: Mapping[str, type[LlamaModel]] = dict.fromkeys(FAMILIES, LlamaModel)


def load_model(
    model_dir: str | Path,
    config: ModelConfig,
    *,
    device: torch.device,
    progress: Progress | None = None,
) -> LlamaModel:
    """Load the weights onto `device`; raise ModelError when they do not fit the config.

    Without `progress` a bar is drawn where stderr is a terminal.
    """
    checkpoint = Checkpoint(model_dir, progress=progress or tty_progress())
    return MODELS[config.architecture](config, checkpoint, device)
