"""transformers' modules with the weights of one of our checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from pdserve_engine.models.config import ModelError
from pdserve_engine.models.transformers_backend.config import MAX_REASON
from pdserve_engine.models.weights.loader import Checkpoint, name_some


def load_pretrained(
    model_class: type[PreTrainedModel],
    hf_config: PreTrainedConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    attention: str | None = None,
) -> PreTrainedModel:
    """Let transformers load the weights: it knows what was renamed, and which experts to fuse.
    `attention` names an implementation; None: transformers' choice. Raises ModelError if they do
    not fit.
    """
    # It would draw its own bar beside ours.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = model_class.from_pretrained(
            None,
            config=hf_config,
            state_dict={name: _WeightReader(checkpoint, name) for name in checkpoint.names},
            dtype=dtype,
            attn_implementation=attention,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (ModelError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    # Modules of some 200 architectures check sizes, each with the exceptions its author liked.
    except Exception as error:
        raise ModelError(
            f"transformers cannot make {model_class.__name__} of its config and weights"
            f" ({type(error).__name__}: {error!s:.{MAX_REASON}})"
        ) from error
    model: PreTrainedModel = loaded[0]
    _refuse_mismatched_weights(loaded[1])
    return model.requires_grad_(False)


class _WeightReader:
    """A weight that has yet to be read; `[...]` reads it, as in a slice of a safetensors file."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, _: object) -> torch.Tensor:
        # transformers casts it; some weights stay in fp32.
        return self._checkpoint.read_as_stored(self._name)


def _refuse_mismatched_weights(info: Mapping[str, Any]) -> None:
    """transformers would go on with random weights."""
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"checkpoint lacks {len(missing)} weights: {name_some(missing)}")
    if unexpected := sorted(info["unexpected_keys"]):
        raise ModelError(
            f"checkpoint has {len(unexpected)} weights the model has no place for:"
            f" {name_some(unexpected)}"
        )
    for name, shape, expected in sorted(info["mismatched_keys"]):
        raise ModelError(f"{name} has shape {tuple(shape)}, the config asks {tuple(expected)}")
