"""An ASGI server on the event loop that gRPC runs on too."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp, Scope


class _Server(uvicorn.Server):
    """The process handles its signals itself: gRPC has to drain too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an ASGI application until closed."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp) -> None:
        """Serve from now on: the socket listens already."""
        config = uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    def cut(self, scope: Scope) -> None:
        """Close a connection without sending what its client does not read."""
        if self._server is None:
            return
        for connection in list(self._server.server_state.connections):
            if getattr(connection, "client", None) == scope["client"] and connection.transport:
                connection.transport.abort()

    async def close(self) -> None:
        """Stop accepting, let running responses end for a moment, then cut them."""
        if self._server is None or self._task is None:
            self._socket.close()
            return
        self._server.should_exit = True
        await self._task


def _listen(host: str, port: int) -> socket.socket:
    """Bind at once, so that a taken port is an OSError here and not an exit in uvicorn."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
