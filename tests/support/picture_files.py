"""Pictures that tests show, and what transformers makes of them."""

import base64
import random
from io import BytesIO
from typing import Any

from PIL import Image


def make_picture(width: int, height: int, *, mode: str = "RGB", seed: int = 0) -> Any:
    """A Pillow image of random colours in patches, which resizing changes everywhere."""
    draw = random.Random(seed)
    small = Image.new("RGB", (7, 5))
    small.putdata([tuple(draw.randrange(256) for _ in range(3)) for _ in range(35)])
    return small.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encoded(picture: Any, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of its file."""
    file = BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def picture_part(data: bytes, **more: Any) -> dict[str, Any]:
    """A part of an OpenAI message."""
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}
