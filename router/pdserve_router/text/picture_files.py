"""Picture files to pixels, exactly as transformers' image processors on Pillow make them. Imported
only where a model takes pictures; used in processes of one request each, whose time and memory are
bounded.
"""

import struct
import warnings
from dataclasses import dataclass
from io import BytesIO

from PIL import Image, ImageOps, UnidentifiedImageError

from pdserve_common.errors import InvalidRequestError

FORMATS = ("PNG", "JPEG", "WEBP")
# A picture, and what it is resized to before it is cropped, has at most so many: 4096 x 4096. Each
# takes four bytes, several times over.
MAX_PIXELS = 1 << 24
# Their decoder has room for two of them besides.
MAX_WEBP_PIXELS = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class Resizing:
    """How a picture gets the model's size: resized, then cropped around its center."""

    # The width of the resized picture; None: the shortest edge says it.
    width: int | None = None
    height: int | None = None
    shortest_edge: int | None = None
    # As in Pillow: 3 is bicubic.
    resample: int
    crop_width: int
    crop_height: int

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of what a picture is resized to."""
        if self.width is not None and self.height is not None:
            return self.width, self.height
        edge = self.shortest_edge
        assert edge is not None, "one or the other is set"
        # As transformers rounds.
        if width <= height:
            return edge, int(edge * height / width)
        return int(edge * width / height), edge


def rgb_pixels(data: bytes, resizing: Resizing, field: str) -> bytes:
    """Return a picture's pixels: uint8, (crop_height, crop_width, 3). Raises InvalidRequestError,
    which names `field`, for what is no picture, too large, animated or broken.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns of sizes, which are checked here, and of metadata that nobody needs.
            warnings.simplefilter("ignore")
            return _rgb_pixels(data, resizing, field)
    except (InvalidRequestError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise InvalidRequestError(
            f"{field} is no picture that can be read: PNG, JPEG and WebP are", field=field
        ) from None
    except Image.DecompressionBombError:
        raise InvalidRequestError(
            f"{field} has more pixels than the {MAX_PIXELS} that a picture may have", field=field
        ) from None
    except Exception as error:
        # Pillow's parsers raise what they meet in a broken file: OSError, SyntaxError, struct.error
        # and others.
        raise InvalidRequestError(
            f"{field} cannot be decoded: {str(error)[:128] or type(error).__name__}", field=field
        ) from error


def _rgb_pixels(data: bytes, resizing: Resizing, field: str) -> bytes:
    # Pillow makes room for the whole of a WebP when it opens it.
    if (size := _webp_size(data)) is not None:
        _check_size(size, resizing, field, MAX_WEBP_PIXELS)
    with Image.open(BytesIO(data), formats=FORMATS) as opened:
        _check_size(opened.size, resizing, field)
        # Phones write JPEGs with a second picture of the same; the first one is meant.
        if opened.format in FORMATS and getattr(opened, "is_animated", False):
            raise InvalidRequestError(f"{field} is animated, must be one picture", field=field)
        opened.load()
        picture = ImageOps.exif_transpose(opened)
    picture = picture.convert("RGB")
    picture = picture.resize(resizing.resized(*picture.size), resizing.resample)
    # Beyond its edges it is black.
    left = (picture.width - resizing.crop_width) // 2
    top = (picture.height - resizing.crop_height) // 2
    right, bottom = left + resizing.crop_width, top + resizing.crop_height
    return picture.crop((left, top, right, bottom)).tobytes()


def _check_size(
    size: tuple[int, int], resizing: Resizing, field: str, most: int = MAX_PIXELS
) -> None:
    width, height = size
    if not 0 < width * height <= most:
        raise InvalidRequestError(
            f"{field} has {width} x {height} pixels, must have 1 to {most}", field=field
        )
    resized_width, resized_height = resizing.resized(width, height)
    if resized_width * resized_height > MAX_PIXELS:
        raise InvalidRequestError(
            f"{field} has {width} x {height} pixels, of which the model's size makes "
            f"{resized_width} x {resized_height}, at most {MAX_PIXELS}: it is too narrow",
            field=field,
        )


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height of a WebP by its header; None if it is none, or a broken one."""
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = data[24:27], data[27:30]
        return 1 + int.from_bytes(width, "little"), 1 + int.from_bytes(height, "little")
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width_and_scale, height_and_scale = struct.unpack_from("<HH", data, 26)
    return width_and_scale & 0x3FFF, height_and_scale & 0x3FFF
