"""The chat page at `/`: one static file that talks to this router's own API."""

from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from pdserve_router.api.http.page_headers import page_headers

PATH = Path(__file__).with_name("chat_page.html")


async def show(request: Request) -> Response:
    """Answer GET / with the page."""
    return HTMLResponse(_page(), headers=_headers())


@cache
def _page() -> bytes:
    return PATH.read_bytes()


@cache
def _headers() -> dict[str, str]:
    return page_headers(_page())
