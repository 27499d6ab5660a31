"""Pictures in messages as OpenAI's clients send them: data URLs, and no others."""

import base64
import re
from typing import Any, TypeGuard

from pdserve_common.errors import InvalidRequestError
from pdserve_router.api.openai.fields import UnknownNames
from pdserve_router.text.parts import Picture

# What it says is not believed: the file tells.
_DATA_URL = re.compile(r"data:image/(?:png|jpe?g|webp);base64,", re.IGNORECASE)
# The model sees all pictures in one size.
DETAILS = ("auto", "low", "high")

PICTURE_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {
                "url": {
                    "type": "string",
                    "description": "data:image/png;base64,..., or jpeg or webp",
                },
                "detail": {"enum": [*DETAILS, None]},
            },
            "required": ["url"],
        },
    },
    "required": ["type", "image_url"],
}
_PART_FIELDS = frozenset(("type", "image_url"))
_URL_FIELDS = frozenset(("url", "detail"))


def is_picture_part(part: object) -> TypeGuard[dict[str, Any]]:
    """Is this part of a content a picture?"""
    return isinstance(part, dict) and part.get("type") == "image_url"


def check_picture_names(part: dict[str, Any], unknown: UnknownNames) -> None:
    """Note unknown fields of a picture."""
    unknown.add(part.keys() - _PART_FIELDS, path="messages.content.")
    if isinstance(image_url := part.get("image_url"), dict):
        unknown.add(image_url.keys() - _URL_FIELDS, path="messages.content.image_url.")


def picture_of(part: dict[str, Any], field: str) -> Picture:
    """Return what a picture's part shows; `field` is its image_url. Raises InvalidRequestError,
    which names what of it is not served.
    """
    image_url = part.get("image_url")
    if not isinstance(image_url, dict):
        raise InvalidRequestError(f"{field} must be an object with a url", field=field)
    if (detail := image_url.get("detail")) not in (None, *DETAILS):
        raise InvalidRequestError(
            f"{field}.detail is {str(detail)[:64]!r}, must be one of {', '.join(DETAILS)}",
            field=f"{field}.detail",
        )
    field = f"{field}.url"
    url = image_url.get("url")
    if not isinstance(url, str):
        raise InvalidRequestError(f"{field} must be a string", field=field)
    head = _DATA_URL.match(url)
    if head is None:
        raise InvalidRequestError(
            f"{field} begins with {url[:32]!r}, must be data:image/png, image/jpeg or image/webp "
            "in base64: nothing is fetched from elsewhere",
            field=field,
        )
    try:
        return Picture(base64.b64decode(url[head.end() :], validate=True), field)
    except ValueError as error:
        raise InvalidRequestError(f"{field} is not valid base64: {error}", field=field) from error
