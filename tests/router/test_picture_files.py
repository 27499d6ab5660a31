"""Picture files to pixels: as transformers makes them, and what is refused."""

import json
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from pdserve_common.errors import InvalidRequestError
from pdserve_router.text.parts import Picture
from pdserve_router.text.picture_files import MAX_PIXELS, Resizing, _webp_size, rgb_pixels
from pdserve_router.text.picture_processor import PictureProcessor
from support.models import IMAGE_SIZE, IMAGE_TOKEN_ID, LLAVA, NUM_IMAGE_TOKENS
from support.picture_files import encoded, make_picture

FIELD = "messages[0].content[1].image_url.url"
CLIP = Resizing(shortest_edge=24, resample=3, crop_width=24, crop_height=24)
SIGLIP = Resizing(width=24, height=24, resample=2, crop_width=24, crop_height=24)
SQUARE = {"height": 24, "width": 24}
PROCESSORS = {
    "clip": (CLIP, CLIPImageProcessorPil, {"size": {"shortest_edge": 24}, "crop_size": SQUARE}),
    "wide crop": (
        Resizing(shortest_edge=16, resample=1, crop_width=25, crop_height=24),
        CLIPImageProcessorPil,
        {"size": {"shortest_edge": 16}, "resample": 1, "crop_size": {"height": 24, "width": 25}},
    ),
    "siglip": (SIGLIP, SiglipImageProcessorPil, {"size": SQUARE, "resample": 2}),
}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "RGB": ("PNG", {}),
    "RGBA": ("WEBP", {"lossless": True}),
    "L": ("JPEG", {"quality": 80}),
    "LA": ("PNG", {}),
    "P": ("PNG", {}),
    "1": ("PNG", {}),
    "CMYK": ("JPEG", {}),
}


@pytest.mark.parametrize("mode", FILES)
@pytest.mark.parametrize("size", [(24, 24), (100, 37), (13, 61), (1, 1)])
@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_those_of_transformers(name: str, size: tuple[int, int], mode: str) -> None:
    resizing, processor_class, settings = PROCESSORS[name]
    kind, options = FILES[mode]
    data = encoded(make_picture(*size, mode=mode), kind, **options)
    processor = processor_class(**settings, do_rescale=False, do_normalize=False)
    expected = processor(Image.open(BytesIO(data)), return_tensors="np")["pixel_values"][0]
    shape = (resizing.crop_height, resizing.crop_width, 3)
    pixels = np.frombuffer(rgb_pixels(data, resizing, FIELD), np.uint8).reshape(shape)
    np.testing.assert_array_equal(pixels.transpose(2, 0, 1), expected)


def test_a_picture_is_turned_as_its_camera_says() -> None:
    picture = make_picture(40, 24)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    turned = picture.transpose(Image.Transpose.ROTATE_270)
    data = encoded(picture, "PNG", exif=exif)
    assert rgb_pixels(data, CLIP, FIELD) == rgb_pixels(encoded(turned), CLIP, FIELD)


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is so large, and has no pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    head = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + head + struct.pack(">I", 1000) + b"IDAT"


def webp_header(width: int, height: int) -> bytes:
    """The same of an extended WebP."""
    head = b"VP8X" + struct.pack("<I", 10) + bytes(4)
    head += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", len(head) + 4) + b"WEBP" + head


def animated(kind: str) -> bytes:
    frames = [make_picture(30, 30, seed=seed) for seed in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "no picture that can be read"),
    "text": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture that can be read"),
    "gif": (lambda: encoded(make_picture(9, 9), "GIF"), "no picture that can be read"),
    "cut": (lambda: encoded(make_picture(90, 90))[:-200], "cannot be decoded"),
    "header": (lambda: png_header(30, 30), "cannot be decoded"),
    "bomb": (lambda: png_header(50_000, 50_000), "pixels"),
    "large": (lambda: png_header(4097, 4096), f"4097 x 4096 pixels, must have 1 to {MAX_PIXELS}"),
    "webp bomb": (lambda: webp_header(16_383, 16_383), "16383 x 16383 pixels, must have"),
    "narrow": (lambda: png_header(1, 100_000), "24 x 2400000, at most .*: it is too narrow"),
    "moving png": (lambda: animated("PNG"), "is animated, must be one picture"),
    "moving webp": (lambda: animated("WEBP"), "is animated, must be one picture"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_picture_is_refused_by_its_field(name: str) -> None:
    make, expected = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=expected) as error:
        rgb_pixels(make(), CLIP, FIELD)
    assert error.value.field == FIELD
    assert error.value.message.startswith(FIELD)


def test_a_webp_tells_its_size_before_it_is_opened() -> None:
    for options in ({"lossless": True}, {"quality": 50}, {"exif": Image.Exif().tobytes()}):
        assert _webp_size(encoded(make_picture(123, 45), "WEBP", **options)) == (123, 45)


def test_a_models_folder_says_how_it_looks_at_pictures(
    make_served_model: Callable[..., Path],
) -> None:
    processor = PictureProcessor.from_folder(str(make_served_model(LLAVA)))
    assert processor is not None
    assert (processor.image_token_id, processor.num_tokens) == (IMAGE_TOKEN_ID, NUM_IMAGE_TOKENS)
    ref, pixels = processor.process(Picture(encoded(make_picture(50, 40)), FIELD))
    assert (ref.dtype, ref.shape) == ("uint8", (IMAGE_SIZE, IMAGE_SIZE, 3))
    assert len(pixels) == IMAGE_SIZE * IMAGE_SIZE * 3


def write_model(folder: Path, config: dict[str, Any], processor: dict[str, Any] | None) -> str:
    (folder / "config.json").write_text(json.dumps({"architectures": [LLAVA], **config}))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


CLIP_TOWER = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP_TOWER = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
CLIP_336 = {
    "image_processor_type": "CLIPImageProcessorFast",
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
}


@pytest.mark.parametrize(
    ("tower", "strategy", "processor", "expected"),
    [
        (CLIP_TOWER, "default", CLIP_336, 576),
        (CLIP_TOWER, "full", CLIP_336, 577),
        # As of older files.
        (CLIP_TOWER, "default", {**CLIP_336, "size": 336, "crop_size": 336}, 576),
        (
            SIGLIP_TOWER,
            "full",
            {
                "image_processor_type": "SiglipImageProcessor",
                "size": {"height": 384, "width": 384},
            },
            729,
        ),
    ],
)
def test_known_models_have_their_numbers_of_tokens(
    tmp_path: Path, tower: dict[str, Any], strategy: str, processor: dict[str, Any], expected: int
) -> None:
    config = {"vision_config": tower, "vision_feature_select_strategy": strategy}
    processor = PictureProcessor.from_folder(write_model(tmp_path, config, processor))
    assert processor is not None
    assert processor.num_tokens == expected


@pytest.mark.parametrize(
    ("tower", "changes", "expected"),
    [
        ({"model_type": "pixtral"}, {}, "vision_config.model_type is 'pixtral'"),
        ({}, {"image_processor_type": "LlavaImageProcessor"}, "image_processor_type is 'Llava"),
        ({}, {"do_resize": False}, "do_resize of the image processor is false"),
        ({}, {"do_pad": True}, "do_pad"),
        ({}, {"size": {"longest_edge": 336}}, "size of the image processor is"),
        ({}, {"crop_size": 224}, "image_size is 336"),
        ({}, None, "has no preprocessor_config.json"),
    ],
)
def test_other_ways_to_look_are_refused_by_name(
    tmp_path: Path, tower: dict[str, Any], changes: dict[str, Any] | None, expected: str
) -> None:
    fields = None if changes is None else {**CLIP_336, **changes}
    folder = write_model(tmp_path, {"vision_config": {**CLIP_TOWER, **tower}}, fields)
    with pytest.raises(ValueError, match=expected):
        PictureProcessor.from_folder(folder)


def test_a_model_of_text_takes_none(model_dir: Path) -> None:
    assert PictureProcessor.from_folder(str(model_dir)) is None
