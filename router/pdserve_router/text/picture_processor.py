"""What a model says of pictures, and pictures made ready for it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve_common.types.engine import TensorRef
from pdserve_common.types.tensors import tensor_ref
from pdserve_router.text.parts import Picture

if TYPE_CHECKING:
    from pdserve_router.text.picture_files import Resizing

ARCHITECTURE = "LlavaForConditionalGeneration"
# By the vision tower's type: tokens that it has besides those of patches.
_EXTRA_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
_BICUBIC = 3
# By the image processor's name without what says how it computes: its defaults.
_PROCESSORS: Mapping[str, Mapping[str, object]] = {
    "CLIPImageProcessor": {
        "size": {"shortest_edge": 224},
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
    },
    "SiglipImageProcessor": {"size": {"height": 224, "width": 224}, "do_center_crop": False},
}
# What transformers' processors do by default, and who leaves it out is not served.
_STEPS = ("do_resize", "do_rescale", "do_normalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureProcessor:
    """Makes pixels of pictures as the model's image processor does, up to what is rescaled and
    normalized, which the engine does.
    """

    image_token_id: int
    # Tokens that stand for each picture.
    num_tokens: int
    resizing: "Resizing"

    @classmethod
    def from_folder(cls, folder: str) -> "PictureProcessor | None":
        """Return what is in a model's folder; None if it takes no pictures. Raises ValueError for
        ways of looking at pictures that are not served.
        """
        path = Path(folder) / "config.json"
        config = json.loads(path.read_text()) if path.is_file() else {}
        if ARCHITECTURE not in (config.get("architectures") or ()):
            return None
        from transformers import LlavaConfig

        # With the defaults of what the file leaves out.
        config = LlavaConfig.from_dict(config)
        vision: Any = config.vision_config
        resizing = _resizing(_processor_fields(Path(folder)), vision.image_size)
        return cls(
            image_token_id=config.image_token_index,
            num_tokens=_num_tokens(vision, config.vision_feature_select_strategy),
            resizing=resizing,
        )

    def process(self, picture: Picture) -> tuple[TensorRef, bytes]:
        """Return a picture's pixels, uint8 (height, width, 3), and their name. Raises
        InvalidRequestError, which names the picture's field.
        """
        from pdserve_router.text.picture_files import rgb_pixels

        pixels = rgb_pixels(picture.data, self.resizing, picture.field)
        shape = (self.resizing.crop_height, self.resizing.crop_width, 3)
        return tensor_ref("uint8", shape, pixels), pixels


def _num_tokens(vision: Any, strategy: str) -> int:
    if vision.model_type not in _EXTRA_TOKENS:
        raise ValueError(
            f"vision_config.model_type is {vision.model_type!r}, served are "
            f"{', '.join(_EXTRA_TOKENS)}"
        )
    num_patches: int = (vision.image_size // vision.patch_size) ** 2
    # "default" leaves the first one out, whatever it stands for.
    return num_patches + _EXTRA_TOKENS[vision.model_type] - (strategy == "default")


def _processor_fields(folder: Path) -> dict[str, Any]:
    """Return the image processor's settings, wherever this version of transformers has put them.
    Raises ValueError.
    """
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path := folder / name).is_file():
            fields = json.loads(path.read_text())
            fields = fields.get("image_processor", fields)
            if "image_processor_type" in fields or name == "preprocessor_config.json":
                return dict(fields)
    raise ValueError(f"{folder} has no preprocessor_config.json: its model takes pictures")


def _resizing(fields: Mapping[str, Any], image_size: int) -> "Resizing":
    # Also of older files, which name a feature extractor.
    named = fields.get("image_processor_type") or fields.get("feature_extractor_type") or ""
    name = (
        named.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    )
    if name not in _PROCESSORS:
        raise ValueError(f"image_processor_type is {named!r}, served are {', '.join(_PROCESSORS)}")
    for step in _STEPS:
        if not fields.get(step, True):
            raise ValueError(f"{step} of the image processor is false, only true is served")
    if fields.get("do_pad"):
        raise ValueError("do_pad of the image processor is true, only false is served")
    fields = {**_PROCESSORS[name], **fields}
    size = _size(fields["size"])
    crop = size
    if fields["do_center_crop"]:
        edge = fields["crop_size"]
        crop = {"height": edge, "width": edge} if isinstance(edge, int) else edge
    if (crop.get("height"), crop.get("width")) != (image_size, image_size):
        raise ValueError(
            f"the image processor makes pictures of {crop}, the model's image_size is {image_size}"
        )
    from pdserve_router.text.picture_files import Resizing

    return Resizing(
        **size,
        resample=fields.get("resample", _BICUBIC),
        crop_width=image_size,
        crop_height=image_size,
    )


def _size(size: int | Mapping[str, int]) -> dict[str, int]:
    """Return either height and width or the shortest edge. Raises ValueError."""
    if isinstance(size, int):
        return {"shortest_edge": size}
    known = {name: size[name] for name in ("shortest_edge", "height", "width") if size.get(name)}
    if set(known) not in ({"shortest_edge"}, {"height", "width"}) or len(known) < sum(
        value is not None for value in size.values()
    ):
        raise ValueError(
            f"size of the image processor is {dict(size)}, served are shortest_edge, or height "
            "and width"
        )
    return known
