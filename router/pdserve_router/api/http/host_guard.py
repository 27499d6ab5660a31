"""Which pages' browsers may use an API that asks for no key.

A browser sends requests of any page to whatever its machine can reach: across origins, and, if the
page's name leads here by now, as to the page's own server. The page is in Origin, the name in Host.
"""

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve_router.api.openai.format import plain_error_object

ALL = "*"
_MAX_SHOWN = 100


class HostGuard:
    """Refuses requests to names, and of pages, that are not listed, before their bodies."""

    def __init__(
        self, app: ASGIApp, allowed_hosts: Sequence[str], allowed_origins: Sequence[str]
    ) -> None:
        """Hosts are names without ports, origins as browsers write them; `ALL` is each of them.
        Addresses, and pages of the host that is asked, need no entry.
        """
        self._app = app
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self._origins = frozenset(origin.lower() for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        answer = JSONResponse(plain_error_object(problem, status=403), status_code=403)
        await answer(scope, receive, send)

    def _problem(self, headers: Headers) -> str | None:
        # None at all: HTTP/1.0, and no browser.
        hosts = headers.getlist("host")
        for host in hosts:
            if not self._is_served(host):
                return (
                    f"the host {host[:_MAX_SHOWN]!r} is neither an address nor listed in "
                    "--allowed-hosts"
                )
        for origin in headers.getlist("origin"):
            if not self._may_ask(origin, hosts):
                return (
                    f"pages of the origin {origin[:_MAX_SHOWN]!r} may not use this API: it is not "
                    "listed in --allowed-origins"
                )
        return None

    def _is_served(self, host: str) -> bool:
        name = _name_of(host)
        return ALL in self._hosts or name in self._hosts or _is_address(name)

    def _may_ask(self, origin: str, hosts: Sequence[str]) -> bool:
        origin = origin.lower()
        _, _, asking = origin.partition("://")
        return not self._origins.isdisjoint((ALL, origin)) or (
            bool(asking) and any(asking == host.lower() for host in hosts)
        )


def _name_of(host: str) -> str:
    """Return the name or address of `host[:port]`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
