"""Whose connections the HTTP port takes, and what one may do before its request is there."""

import asyncio
import contextlib
import itertools
import json
import logging
import select
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdserve_common.limits.names import (
    BAD_HANDSHAKE,
    HEADERS_TOO_LARGE,
    MADE_ROOM,
    PIPELINED,
    SLOW_HEADERS,
    TOO_MANY_CONNECTIONS,
    TOO_MANY_OF_ADDRESS,
)
from pdserve_router.api.openai.format import plain_error_object

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
# Headers that are not there yet take at most so much, of all connections.
MAX_ALL_HEADER_BYTES = 32 * 1024 * 1024
# Connections above the limit that are told so at a time; more wait in the system's queue.
NUM_REFUSING = 16
HEADERS_TIMEOUT_S = 10.0
HANDSHAKE_TIMEOUT_S = 10.0
# A connection without a request makes room for another when it has been so for this long.
MIN_IDLE_S = 2.0
# So many idle connections are looked at, in search of one that is idle indeed.
_NUM_LOOKED_AT = 16
# A refusal is lost if the connection is closed while its client still sends.
LINGER_S = 1.0
_TLS_CLOSE_TIMEOUT_S = 5.0
_RETRY_ACCEPT_S = 0.05
_ACCEPTS_PER_TURN = 16
# A colon, a space and the line's end.
_HEADER_OVERHEAD = 4
_TOO_LARGE = f"headers have more than {MAX_HEADER_BYTES} bytes, or are more than {MAX_HEADERS}"

_CONNECTION = "connection"

# Gets one of LIMITS["http"].
OnLimit = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How many connections are served."""

    num_total: int
    num_of_address: int
    # Between two requests.
    idle_timeout_s: float


class Connections:
    """All connections of the port, from accept to close."""

    def __init__(self, limits: ConnectionLimits, on_limit: OnLimit) -> None:
        self.limits = limits
        self.on_limit = on_limit
        self._all: set[LimitedProtocol] = set()
        self._by_address: Counter[str] = Counter()
        self._num_refusing = 0
        # Without a request, the longest so first.
        self._idle: dict[LimitedProtocol, float] = {}
        self._num_header_bytes = 0
        # Called when there may be room again.
        self.on_room: Callable[[], None] = lambda: None

    def has_room(self) -> bool:
        """Whether one more may be accepted, be it to tell it that it is one too many."""
        return self._num_refusing < NUM_REFUSING or self._oldest_idle(None) is not None

    def add(self, connection: "LimitedProtocol") -> None:
        """Take it, instead of the one that has been without a request for longest if need be; sets
        its `refusal` if it is too many all the same.
        """
        connection.refusal = self._limit_for(connection.address)
        if connection.refusal is not None and self._make_room(connection):
            connection.refusal = None
        self._all.add(connection)
        self._count(connection, 1)
        self.is_idle(connection)

    def remove(self, connection: "LimitedProtocol") -> None:
        """It is closed, or about to be; a second time does nothing."""
        if connection in self._all:
            self._all.remove(connection)
            self._idle.pop(connection, None)
            self._count(connection, -1)
            self.hold(connection, 0)
            self.on_room()

    def is_idle(self, connection: "LimitedProtocol") -> None:
        """It has no request."""
        if connection in self._all:
            self._idle[connection] = asyncio.get_running_loop().time()

    def is_busy(self, connection: "LimitedProtocol") -> None:
        """It has one, and is refused no longer if others have left."""
        self._idle.pop(connection, None)
        if connection.refusal is not None and self._limit_for(connection.address) is None:
            self._count(connection, -1)
            connection.refusal = None
            self._count(connection, 1)
        if connection.refusal is not None:
            self.on_limit(connection.refusal)

    def hold(self, connection: "LimitedProtocol", num_bytes: int) -> None:
        """It has `num_bytes` of headers that are not whole. If all together have too many, those
        that have been at it for longest are cut.
        """
        self._num_header_bytes += num_bytes - connection.num_held
        connection.num_held = num_bytes
        while self._num_header_bytes > MAX_ALL_HEADER_BYTES:
            self._cut(next(held for held in self._idle if held.num_held))

    def _count(self, connection: "LimitedProtocol", change: int) -> None:
        if connection.refusal is not None:
            self._num_refusing += change
            return
        self._by_address[connection.address] += change
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]

    def _limit_for(self, address: str) -> str | None:
        """The limit that one more connection of this address is above."""
        if self._by_address[address] >= self.limits.num_of_address:
            return TOO_MANY_OF_ADDRESS
        if len(self._all) - self._num_refusing >= self.limits.num_total:
            return TOO_MANY_CONNECTIONS
        return None

    def _make_room(self, connection: "LimitedProtocol") -> bool:
        is_full_of_address = connection.refusal == TOO_MANY_OF_ADDRESS
        oldest = self._oldest_idle(connection.address if is_full_of_address else None)
        if oldest is not None:
            self._cut(oldest)
        return self._limit_for(connection.address) is None

    def _oldest_idle(self, address: str | None) -> "LimitedProtocol | None":
        until = asyncio.get_running_loop().time() - MIN_IDLE_S
        old = itertools.takewhile(lambda each: self._idle[each] <= until, self._idle)
        # One without a transport shakes hands, for which it has a time of its own.
        of_address = (each for each in old if each.transport and address in (None, each.address))
        few = itertools.islice(of_address, _NUM_LOOKED_AT)
        return next((each for each in few if not each.has_unread()), None)

    def _cut(self, connection: "LimitedProtocol") -> None:
        self.on_limit(MADE_ROOM)
        connection.transport.abort()
        self.remove(connection)


def connection_of(scope: Scope) -> "LimitedProtocol":
    """Return the connection that a request came over."""
    connection = scope["state"][_CONNECTION]
    assert isinstance(connection, LimitedProtocol)
    return connection


class _StopParsingError(Exception):
    """Raised in callbacks of the parser; `LimitedProtocol` knows why."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Its headers are bounded in size and time; it has one request at a time, and
    closes behind the answer if its client has sent another meanwhile.
    """

    def __init__(self, connections: Connections, address: str, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        # uvicorn's configuration knows whole seconds.
        self.timeout_keep_alive = connections.limits.idle_timeout_s  # type: ignore[assignment]
        self.address = address
        # The limit that this connection is above, if it is.
        self.refusal: str | None = None
        # Kept by `Connections.hold`.
        self.num_held = 0
        self._connections = connections
        self._served_app = self.app
        self._timer: asyncio.TimerHandle | None = None
        # How many bytes of this request's headers are parsed.
        self._num_header_bytes = 0
        # Since the request began, its headers ended or its body went on.
        self._num_unparsed = 0
        self._is_whole = True
        self._stopped_by: str | None = None
        # What comes is dropped: the answer that is under way is the last one.
        self._is_over = False
        connections.add(self)

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._connections.remove(self)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._unset_keepalive_if_required()
        if self._timer is None and not self._has_request:
            self._expect_headers()
        self._num_unparsed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._on_bad_data()
        except httptools.HttpParserUpgrade:
            pass  # to nothing that is served here: it is answered as the request that it is
        self._check_unparsed()

    def _check_unparsed(self) -> None:
        if self._is_over:
            return
        if self._num_unparsed > MAX_HEADER_BYTES:
            self._refuse(431, _TOO_LARGE, limit=HEADERS_TOO_LARGE)
        elif not self._has_request:
            self._connections.hold(self, self._num_unparsed)

    def _on_bad_data(self) -> None:
        if self._stopped_by == PIPELINED:
            self._connections.on_limit(PIPELINED)
            self._is_over = True
            self.cycle.keep_alive = False
        elif self._stopped_by is not None:
            self._refuse(431, _TOO_LARGE, limit=self._stopped_by)
        else:
            self._refuse(400, "this is no HTTP/1.1 request")

    def on_message_begin(self) -> None:
        if self._has_request:
            self._stop_parsing(PIPELINED)
        super().on_message_begin()
        self._is_whole = False
        self._num_header_bytes = 0

        self.scope["state"][_CONNECTION] = self

    def has_unread(self) -> bool:
        """Its client has sent what this process had no time to read."""
        sock = self.transport.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:  # it has just been lost
            return False
        poller = select.poll()
        poller.register(sock.fileno(), select.POLLIN)
        return bool(poller.poll(0))

    @property
    def is_write_paused(self) -> bool:
        """Its client reads too slowly; what is sent waits for it."""
        return self.flow.write_paused

    @property
    def has_answered(self) -> bool:
        """The answer to its request has begun."""
        return self.cycle.response_started

    def write_chunk(self, data: bytes) -> None:
        """Send a piece of an answer that has begun and has no length; uvicorn's `send` does the
        same, as a coroutine, behind those of all that stands between it and the application.
        """
        if not self.cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def cut(self) -> None:
        """Close it at once, without what its client does not read."""
        self.transport.abort()

    def on_url(self, url: bytes) -> None:
        self._add_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Also those behind a body.
        self._add_header_bytes(len(name) + len(value) + _HEADER_OVERHEAD)
        if len(self.headers) >= MAX_HEADERS:
            self._stop_parsing(HEADERS_TOO_LARGE)
        super().on_header(name, value)

    def _add_header_bytes(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._stop_parsing(HEADERS_TOO_LARGE)

    def _stop_parsing(self, limit: str) -> NoReturn:
        self._stopped_by = limit
        raise _StopParsingError

    def on_headers_complete(self) -> None:
        self._num_unparsed = 0
        self._stop_timer()
        self._connections.hold(self, 0)
        self._connections.is_busy(self)
        self.app = self._served_app if self.refusal is None else self._say_too_many
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unparsed = 0
        self._is_whole = True
        super().on_message_complete()
        if not self._has_request:  # it was answered before
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._connections.is_idle(self)
        if not self._is_whole:  # the rest of its body is of no use, and may take as long as headers
            self._expect_headers()

    def _expect_headers(self) -> None:
        self._set_timer(HEADERS_TIMEOUT_S, self._on_slow_headers)

    def _on_slow_headers(self) -> None:
        self._connections.on_limit(SLOW_HEADERS)
        self.transport.abort()

    def _set_timer(self, delay_s: float, then: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(delay_s, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, message: str, *, limit: str | None = None) -> None:
        """Say why, and close when the client has had time to read it."""
        self._is_over = True
        self._connections.hold(self, 0)
        if limit is not None:
            self._connections.on_limit(limit)
        if self._has_request:
            self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self.transport.write(_plain_answer(status, message))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._set_timer(LINGER_S, self.transport.abort)
        else:
            self.transport.close()

    async def _say_too_many(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of a connection that is one too many."""
        if scope["path"] == "/health":
            await self._served_app(scope, receive, send)
            return
        # Behind the whole request: a client that still sends may not see an answer.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_drop_body(receive), HEADERS_TIMEOUT_S)
        limits = self._connections.limits
        message = (
            f"more than {limits.num_of_address} connections of one address"
            if self.refusal == TOO_MANY_OF_ADDRESS
            else f"more than {limits.num_total} connections"
        )
        answer = JSONResponse(
            plain_error_object(message, status=503),
            status_code=503,
            headers={"retry-after": "1", "connection": "close"},
        )
        await answer(scope, receive, send)


async def _drop_body(receive: Receive) -> None:
    while (await receive()).get("more_body"):
        pass


def _plain_answer(status: int, message: str) -> bytes:
    """An answer to what is no request."""
    body = json.dumps(plain_error_object(message, status=status)).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class Listener:
    """Accepts connections while there is room for them; to uvicorn it is a server of asyncio."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        new_protocol: Callable[[str], LimitedProtocol],
        context: ssl.SSLContext | None,
    ) -> None:
        """`new_protocol` makes one for a peer's address. Must run in the event loop."""
        listener.setblocking(False)
        self._socket = listener
        self._connections = connections
        self._new_protocol = new_protocol
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        connections.on_room = self._resume
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more. A second time does nothing."""
        if self._socket.fileno() < 0:
            return
        self._connections.on_room = lambda: None
        self._loop.remove_reader(self._socket)
        if self._retry is not None:
            self._retry.cancel()
        self._socket.close()

    async def wait_closed(self) -> None:
        """Those that have not shaken hands yet are no one's."""
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if not self._connections.has_room():
                return self._pause()
            try:
                connected, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return None
            except OSError as error:  # no descriptors or no memory
                logger.error("cannot accept a connection: %s", error)
                return self._pause()
            self._open(connected, address[0])
        return None

    def _open(self, connected: socket.socket, address: str) -> None:
        connected.setblocking(False)
        task = self._loop.create_task(self._serve(connected, self._new_protocol(address)))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _serve(self, connected: socket.socket, protocol: LimitedProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, connected, ssl=self._context, **self._tls_timeouts()
            )
        except OSError:
            # The client left, or its handshake failed or took too long.
            if protocol.transport is None:
                self._connections.on_limit(BAD_HANDSHAKE)
        finally:
            if protocol.transport is None:
                self._connections.remove(protocol)

    def _tls_timeouts(self) -> dict[str, float]:
        if self._context is None:
            return {}
        return {
            "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S,
            "ssl_shutdown_timeout": _TLS_CLOSE_TIMEOUT_S,
        }

    def _pause(self) -> None:
        """Whoever comes waits in the system's queue."""
        self._loop.remove_reader(self._socket)
        self._retry = self._loop.call_later(_RETRY_ACCEPT_S, self._resume)

    def _resume(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
            self._loop.add_reader(self._socket, self._accept)
