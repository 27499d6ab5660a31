"""The port of metrics and probes."""

import contextlib
import io
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from pdserve_common.limits.names import MADE_ROOM, SLOW_HEADERS
from pdserve_common.observability import defects

# Connections at a time, and how long one may take.
MAX_METRICS_CONNECTIONS = 16
METRICS_TIMEOUT_S = 10.0
_MAX_HEAD_BYTES = 16 * 1024
# How often it looks for those that take longer.
_POLL_S = 0.25


class MetricsServer:
    """Serves a registry on /metrics, with what the process takes of its machine (`process_*`), and
    answers to probes, from daemon threads. Plain HTTP: where gRPC speaks TLS, which kubelet's gRPC
    probes cannot, this is what kubelet asks.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        probes: Mapping[str, Callable[[], bool]],
        on_limit: Callable[[str], None] = lambda limit: None,
    ) -> None:
        """`probes` say by path, on any thread, whether to answer 200 or 503; `on_limit` gets one of
        LIMITS["metrics"] on any thread. Raises OSError if the port is taken.
        """
        self._probes = probes
        # Before the first answer: a worker that dies while it loads shows when it was started, too.
        ProcessCollector(registry=registry)
        self._metrics = make_wsgi_app(registry)
        self._server = _MetricsWSGIServer(host, port, on_limit)
        self._server.set_app(self._answer)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), daemon=True, name="metrics"
        )
        self._thread.start()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """The WSGI application."""
        probe = self._probes.get(environ["PATH_INFO"])
        if probe is None:
            metrics: Iterable[bytes] = self._metrics(environ, start_response)
            return metrics
        is_healthy = probe()
        status = "200 OK" if is_healthy else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain")])
        return [b"ok\n" if is_healthy else b"unavailable\n"]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _MetricsHandler(WSGIRequestHandler):
    timeout = METRICS_TIMEOUT_S

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BytesIO(_read_head(self.rfile))

    def log_message(self, format: str, *args: object) -> None:
        pass


def _read_head(file: io.BufferedIOBase) -> bytes:
    """Return a request without its body, nothing if it is too large or ends early."""
    head = b""
    while len(head) <= _MAX_HEAD_BYTES:
        line = file.readline(_MAX_HEAD_BYTES)
        head += line
        if line in (b"\r\n", b"\n"):
            return head
        if not line:
            break
    return b""


class _MetricsWSGIServer(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each connection: there are few at a time, none for long, and who comes is served
    instead of who has been there for longest.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, on_limit: Callable[[str], None]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._on_limit = on_limit
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}  # the oldest first
        super().__init__((host, port), _MetricsHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            while len(self._since) >= MAX_METRICS_CONNECTIONS:
                self._cut(next(iter(self._since)), MADE_ROOM)
            self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called between two connections, and every `_POLL_S`."""
        with defects.contained("metrics", "a look at slow connections"):
            self._cut_slow()

    def _cut_slow(self) -> None:
        until = time.monotonic() - METRICS_TIMEOUT_S
        with self._lock:
            for request in [request for request, since in self._since.items() if since < until]:
                self._cut(request, SLOW_HEADERS)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client has left, or was cut."""

    def _cut(self, request: socket.socket, limit: str) -> None:
        """Its thread sees the end and closes it."""
        del self._since[request]
        self._on_limit(limit)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)
