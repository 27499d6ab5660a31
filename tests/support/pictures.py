"""Prompts with pictures, and what transformers makes of them."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pdserve_common.types.engine import EngineCoreRequest, MultiModalFeatureSpec
from pdserve_common.types.tensors import tensor_ref
from support.models import IMAGE_MEAN, IMAGE_SIZE, IMAGE_STD, IMAGE_TOKEN_ID, NUM_IMAGE_TOKENS

SHAPE = (IMAGE_SIZE, IMAGE_SIZE, 3)


class Picture(NamedTuple):
    """One of many, each with pixels of its own."""

    number: int

    @property
    def pixels(self) -> torch.Tensor:
        """uint8 [height, width, 3]."""
        generator = torch.Generator().manual_seed(self.number)
        return torch.randint(0, 256, SHAPE, dtype=torch.uint8, generator=generator)

    @property
    def data(self) -> bytes:
        return self.pixels.numpy().tobytes()


class Prompt:
    """Token ids and pictures, in their order."""

    def __init__(self, *parts: Sequence[int] | Picture, length: int = NUM_IMAGE_TOKENS) -> None:
        self.token_ids: list[int] = []
        self.pictures: list[Picture] = []
        self.features: list[MultiModalFeatureSpec] = []
        self.tensors: dict[bytes, bytes] = {}
        for part in parts:
            if isinstance(part, Picture):
                self._append(part, length)
            else:
                self.token_ids += part

    def _append(self, picture: Picture, length: int) -> None:
        data = tensor_ref("uint8", SHAPE, picture.data)
        feature = MultiModalFeatureSpec(
            modality="image",
            identifier=data.content_hash.hex(),
            position=len(self.token_ids),
            length=length,
            data=data,
        )
        self.token_ids += [IMAGE_TOKEN_ID] * length
        self.pictures.append(picture)
        self.features.append(feature)
        self.tensors[data.content_hash] = picture.data

    @property
    def pixels(self) -> dict[MultiModalFeatureSpec, bytes]:
        """Of each feature."""
        return dict(zip(self.features, (each.data for each in self.pictures), strict=True))

    def request(self, request_id: str, **fields: Any) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=tuple(self.token_ids),
            mm_features=tuple(self.features),
            **fields,
        )


@functools.cache
def _load(folder: Path) -> Any:
    from transformers import LlavaForConditionalGeneration

    model: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def hf_greedy(folder: Path, prompt: Prompt, num_tokens: int) -> list[int]:
    """Return the tokens that transformers generates in fp32."""
    token_ids = torch.tensor([prompt.token_ids])
    fields = {}
    if prompt.pictures:
        colours = torch.stack([p.pixels for p in prompt.pictures]).permute(0, 3, 1, 2) / 255
        mean, std = (torch.tensor(each)[:, None, None] for each in (IMAGE_MEAN, IMAGE_STD))
        fields["pixel_values"] = (colours - mean) / std
    generated = _load(folder).generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        **fields,
    )
    tokens: list[int] = generated[0, len(prompt.token_ids) :].tolist()
    return tokens
