"""An ASGI server on the event loop that gRPC runs on too."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from pdserve_router.api.http.connections import Connections, LimitedProtocol, Listener

_BACKLOG = 2048
# Applications learn of a cut connection within a turn of the event loop.
CUT_TIMEOUT_S = 1.0


class _Server(uvicorn.Server):
    """The process handles its signals itself: gRPC has to drain too. And it accepts connections
    itself, as far as there is room.
    """

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        await self.lifespan.startup()
        self.servers = [
            Listener(listener, self._connections, self._new_protocol, self.config.ssl)  # type: ignore[misc]
            for listener in sockets
        ]
        self.started = True

    def _new_protocol(self, address: str) -> LimitedProtocol:
        return LimitedProtocol(
            self._connections,
            address,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an ASGI application until closed."""

    def __init__(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext | None,
        connections: Connections,
        shares_port: bool = False,
    ) -> None:
        """Plain text without `context`. With `shares_port` other processes may listen there, too.
        Raises OSError if the port is taken.
        """
        self._socket = _listen(host, port, shares_port)
        self._connections = connections
        self._context = context
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
        )
        config.load()
        config.ssl = self._context
        self._server = _Server(config, self._connections)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    def stop_accepting(self) -> None:
        """Close the port and, within 0.1 s, idle connections; the others end with the response that
        is running, so that clients open new ones, to whoever takes them.
        """
        if self._server is not None:
            self._server.should_exit = True

    async def close(self, *, grace_s: float) -> None:
        """Stop accepting, give running responses `grace_s`, then cut them."""
        if self._server is None or self._task is None:
            self._socket.close()
            return
        self.stop_accepting()
        _, running = await asyncio.wait([self._task], timeout=grace_s)
        if running:
            await self._cut_all(self._server, self._task)

    async def _cut_all(self, server: uvicorn.Server, task: asyncio.Task[None]) -> None:
        for connection in list(server.server_state.connections):
            if connection.transport:
                connection.transport.abort()
        _, running = await asyncio.wait([task], timeout=CUT_TIMEOUT_S)
        for left in (*running, *(server.server_state.tasks if running else ())):
            left.cancel()


def _listen(host: str, port: int, shares_port: bool) -> socket.socket:
    """Bind at once, so that a taken port is an OSError here and not an exit in uvicorn."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio sets TCP_NODELAY only then, and without it each answer waits
    # 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
