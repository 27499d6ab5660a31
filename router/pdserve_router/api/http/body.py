"""Reading the bodies of HTTP requests: in time, and no more than is of use."""

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from pdserve_common.errors import RequestAbortedError
from pdserve_router.api.large_requests.held_bytes import Held
from pdserve_router.api.openai.format import BodyTooLargeError
from pdserve_router.requests.input.request_limits import INLINE_BYTES
from pdserve_router.router import Router

# A client that sends its body more slowly holds a connection, and nothing else.
BODY_TIMEOUT_S = 30.0


async def read_in_time(http: Request, limit: int, held: Held, *, timeout_s: float) -> bytes:
    try:
        return await asyncio.wait_for(_read_body(http, limit, held), timeout_s)
    except asyncio.TimeoutError:
        raise HTTPException(
            408,
            f"the body did not come within {timeout_s:g} s",
            headers={"connection": "close"},
        ) from None


async def _read_body(http: Request, limit: int, held: Held) -> bytes:
    """Read the body. Raises BodyTooLargeError as soon as it is known to be too large, and
    OverloadedError as soon as there is no room for it.
    """
    declared = http.headers.get("content-length", "0")
    if declared.isdigit():
        _check_size(int(declared), limit, held)
    chunks = []
    num_bytes = 0
    try:
        async for chunk in http.stream():
            num_bytes += len(chunk)
            _check_size(num_bytes, limit, held)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise RequestAbortedError("the client disconnected while sending its body") from error
    return b"".join(chunks)


def _check_size(num_bytes: int, limit: int, held: Held) -> None:
    if num_bytes > limit:
        raise BodyTooLargeError(
            f"body has {num_bytes} bytes or more, at most {limit} are of use or allowed "
            "(max_model_len, max_body_bytes)"
        )
    if num_bytes > INLINE_BYTES:
        held.grow(num_bytes)


def most_bytes(router: Router, max_body_bytes: int) -> int:
    most = router.max_request_bytes
    return max_body_bytes if most is None else min(most, max_body_bytes)


def address_of(scope: Scope) -> str:
    """Of whoever sent it, without the port."""
    return str(scope["client"][0]) if scope.get("client") else ""
