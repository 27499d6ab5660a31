"""The chat page at `/`: one static file that talks to this router's own API."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

PATH = Path(__file__).with_name("chat_page.html")


async def show(request: Request) -> Response:
    """Answer GET / with the page."""
    return Response(_page(), media_type="text/html", headers=_headers())


@cache
def _page() -> bytes:
    return PATH.read_bytes()


@cache
def _headers() -> dict[str, str]:
    """The browser runs what stands in the page and nothing else: an answer cannot bring code."""
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        f"script-src {_hash_of('script')}; style-src {_hash_of('style')}"
    )
    return {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def _hash_of(element: str) -> str:
    found = re.search(rf"<{element}>(.*?)</{element}>".encode(), _page(), re.DOTALL)
    assert found is not None, f"the page has one <{element}>"
    digest = base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
    return f"'sha256-{digest}'"
