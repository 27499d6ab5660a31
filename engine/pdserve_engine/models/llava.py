"""LLaVA-1.5: a text model of the Llama family that takes a picture's tokens from a vision tower,
which is transformers' own module, and a projector.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionModel, PreTrainedModel, SiglipVisionModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from pdserve_engine.models.config import LlamaConfig, VisionConfig
from pdserve_engine.models.llama import LlamaModel
from pdserve_engine.models.transformers_backend.config import load_hf_config
from pdserve_engine.models.transformers_backend.weights import load_pretrained
from pdserve_engine.models.weights.llama import MODEL_PREFIX
from pdserve_engine.models.weights.loader import HEADS, Checkpoint, Progress

TEXT, TOWER, PROJECTOR = "language_model.", "vision_tower.", "multi_modal_projector."
_TOWERS: dict[str, type[PreTrainedModel]] = {
    "clip_vision_model": CLIPVisionModel,
    "siglip_vision_model": SiglipVisionModel,
}
# What SigLIP pools its states with; here they are not pooled.
_SIGLIP_HEAD = ("head.", "vision_model.head.")
# A buffer that old checkpoints have.
_POSITION_IDS = "position_ids"


class LlavaModel(LlamaModel):
    """The family behind the interface of `models.base.Model`, with pictures."""

    def __init__(
        self,
        config: LlamaConfig,
        folder: Path,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        """Raises ModelError."""
        super().__init__(config, Checkpoint(folder, progress=progress, part=_text_name), device)
        assert config.vision is not None
        if device.type == "cuda":  # whose libraries do not promise the tower's bits
            self.is_row_independent = False
        self._tower = VisionTower(config.vision, folder, device, config.dtype)

    def embed_picture(self, pixels: bytes) -> torch.Tensor:
        """See `models.base.SupportsMultiModal`."""
        return self._tower.embed(pixels)


class VisionTower:
    """What makes a picture's embeddings; not quantized, in the text model's dtype."""

    def __init__(
        self, config: VisionConfig, folder: Path, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Raises ModelError."""
        self._config = config
        self._device = device
        self._dtype = dtype
        hf_config: Any = load_hf_config(folder)
        self._layers = hf_config.vision_feature_layer
        self._first_state = 1 if hf_config.vision_feature_select_strategy == "default" else 0
        tower = hf_config.vision_config
        tower.vision_use_head = False
        weights = Checkpoint(folder, part=_tower_name)
        model_class = _TOWERS[tower.model_type]
        loaded: Any = load_pretrained(model_class, tower, weights, dtype=dtype)
        self._tower: nn.Module = loaded.eval().to(device)
        self._projector = _load_projector(hf_config, folder, device, dtype)
        # As transformers does it: in one step, with the factor in mean and deviation.
        colours = torch.tensor((config.image_mean, config.image_std), device=device)
        self._mean, self._std = (colours * (1.0 / config.rescale_factor))[:, :, None, None]

    @torch.inference_mode()
    def embed(self, pixels: bytes) -> torch.Tensor:
        """Return the embeddings [num_image_tokens, hidden_size] in the model's dtype. A picture is
        a batch of its own, so that the bits of none depend on others.
        """
        size = self._config.image_size
        picture = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(size, size, -1)
        colours = picture.to(self._device).permute(2, 0, 1).to(torch.float32)
        pixel_values = ((colours - self._mean) / self._std).to(self._dtype)
        output = self._tower(pixel_values[None], output_hidden_states=True, return_dict=True)
        layers = [self._layers] if isinstance(self._layers, int) else self._layers
        states = [output.hidden_states[layer][:, self._first_state :] for layer in layers]
        embeds: torch.Tensor = self._projector(torch.cat(states, dim=-1))
        return embeds[0]


def _load_projector(
    hf_config: Any, folder: Path, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    with torch.device("meta"):
        projector: nn.Module = LlavaMultiModalProjector(hf_config)
    weights = Checkpoint(folder, part=_projector_name)
    weights.check({name: tuple(w.shape) for name, w in projector.state_dict().items()})
    read = {name: weights.read(name, dtype=dtype, device=device) for name in weights.names}
    projector.load_state_dict(read, assign=True)
    return projector.requires_grad_(False)


def _text_name(stored: str) -> str | None:
    """Return what a stored weight is called in a text model alone; None if it is none of its."""
    name = _without_model(stored)
    if name.startswith((TOWER, PROJECTOR)):
        return None
    name = name.removeprefix(TEXT)
    return name if name.startswith((MODEL_PREFIX, *HEADS)) else MODEL_PREFIX + name


def _tower_name(stored: str) -> str | None:
    name = _without_model(stored)
    if not name.startswith(TOWER) or name.endswith(_POSITION_IDS):
        return None
    name = name.removeprefix(TOWER)
    return None if name.startswith(_SIGLIP_HEAD) else name


def _projector_name(stored: str) -> str | None:
    name = _without_model(stored)
    return name.removeprefix(PROJECTOR) if name.startswith(PROJECTOR) else None


def _without_model(stored: str) -> str:
    """Some tools put the parts into a module of that name, and the head beside it."""
    name = stored.removeprefix(MODEL_PREFIX)
    return name if name.startswith((TEXT, TOWER, PROJECTOR)) else stored
