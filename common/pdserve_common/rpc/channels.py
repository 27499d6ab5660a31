"""gRPC plumbing that every process shares: channels, a server with health and reflection, errors
to statuses.
"""

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve_common.errors import ModelNotFoundError, PdserveError
from pdserve_common.observability import defects
from pdserve_common.rpc.addresses import join_address
from pdserve_common.rpc.tls import Tls
from pdserve_common.types.engine import ErrorCode

# Returns a channel to host:port.
OpenChannel = Callable[[str], grpc.aio.Channel]

# The health of the process itself, for those who restart it: what is paused, asleep or draining is
# alive.
LIVENESS_SERVICE = "liveness"
# How long `RpcServer.is_healthy` waits for the event loop.
HEALTH_TIMEOUT_S = 2.0
# A prompt of 128 k tokens is 0.5 MB packed; tensors are not to ride in requests.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
# One connection has at most so many; a client's library keeps the others back until one has ended.
MAX_CONCURRENT_STREAMS = 1024
HANDSHAKE_TIMEOUT_S = 10.0
# Trailing metadata, in milliseconds.
_RETRY_AFTER = "retry-after-ms"

_STATUS = {
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.NO_WORKER: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.KV_TRANSFER_FAILED: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.KV_EXPIRED: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorCode.ENGINE_DEAD: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.DRAINING: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.CLIENT_TOO_SLOW: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.FAILED_PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
}


def status_of(error: PdserveError) -> grpc.StatusCode:
    """Return the gRPC status that says what `error` says."""
    if isinstance(error, ModelNotFoundError):
        return grpc.StatusCode.NOT_FOUND
    return _STATUS[error.code]


def channel_options() -> list[tuple[str, Any]]:
    """Options for channels between pdserve's processes.

    A stopped peer is noticed after ping_timeout_ms instead of a minute; a peer whose event loop
    hangs still answers pings, so streams carry heartbeats besides.
    """
    return [
        ("grpc.keepalive_time_ms", 5000),
        ("grpc.keepalive_timeout_ms", 3000),
        ("grpc.http2.ping_timeout_ms", 1500),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def open_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """Return a channel to host:port, in plain text without `tls`."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=channel_options())
    options = channel_options() + _name_options(tls)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


def end_call(call: Any) -> None:
    """Cancel a call of a stream, also one whose write has failed as the stream ended: gRPC says
    that it is done, and keeps it, with a task and what was not read of it, for ever.
    """
    if not call.cancel():
        call._cython_call.cancel("it has ended")


def open_blocking_channel(address: str, tls: Tls | None = None) -> grpc.Channel:
    """`open_channel` for callers without an event loop."""
    if tls is None:
        return grpc.insecure_channel(address, options=channel_options())
    options = channel_options() + _name_options(tls)
    return grpc.secure_channel(address, tls.channel_credentials(), options=options)


def _name_options(tls: Tls) -> list[tuple[str, Any]]:
    return [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []


def server_options() -> list[tuple[str, Any]]:
    """Options for every server; they admit the pings of `channel_options`."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A connection that says nothing, not even which settings it has.
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_TIMEOUT_S * 1000)),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        # It widens the windows of streams to 8 MiB, also of messages that nobody has asked for.
        # Those that are asked for get windows of their own.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # Two processes on one port would split the traffic silently.
        ("grpc.so_reuseport", 0),
    ]


class RpcServer:
    """A grpc.aio server with health (per service and overall) and reflection."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        options: Mapping[str, Any] | None = None,
        binds_late: bool = False,
    ) -> None:
        """Bind the port, without serving yet; must run inside the event loop. Plain text without
        `credentials`. `options` come besides `server_options`, or instead of them. `binds_late`:
        only `start` binds it, as who shares a port gets connections from then on. Raises OSError
        if the port is taken.
        """
        # Each once: of two, gRPC takes now the first, now the last.
        all_options = {**dict(server_options()), **(options or {})}
        self.server = grpc.aio.server(interceptors=interceptors, options=list(all_options.items()))
        # gRPC calls into them and does not hold them.
        self._credentials = credentials
        self._address = join_address(host, port)
        self.port: int = 0 if binds_late else self._bind(self._address)
        self._loop = asyncio.get_running_loop()
        self._is_healthy: dict[str, bool] = {}
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._services: list[str] = []

    async def start(self, services: Sequence[str]) -> None:
        """Serve what was added to `server`; NOT_SERVING until `set_serving(True)`, but alive.
        Raises OSError if the port is taken.
        """
        self.port = self.port or self._bind(self._address)
        self._services = list(services)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)
        await self.set_serving(False)
        await self.set_alive(True)
        await self.server.start()

    def _bind(self, address: str) -> int:
        try:
            if self._credentials is None:
                port: int = self.server.add_insecure_port(address)
            else:
                port = self.server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {address}: the port is in use or the address is not ours"
            ) from error
        return port

    async def set_serving(self, is_serving: bool) -> None:
        for service in ("", *self._services):
            await self._set(service, is_serving)

    async def set_alive(self, is_alive: bool) -> None:
        """Say under LIVENESS_SERVICE whether the process, ready or not, can go on, or has to be
        restarted.
        """
        await self._set(LIVENESS_SERVICE, is_alive)

    def probes(self) -> dict[str, Callable[[], bool]]:
        """Return for `MetricsServer` what answers the paths of HTTP probes."""
        return {
            "/live": partial(self.is_healthy, LIVENESS_SERVICE),
            "/ready": partial(self.is_healthy, ""),
        }

    def is_healthy(self, service: str) -> bool:
        """Return what the health service says of `service`, from any thread but the event loop's.
        That one is asked: if it hangs, nothing is healthy.
        """
        found: concurrent.futures.Future[bool] = concurrent.futures.Future()

        def tell() -> None:
            found.set_result(self._is_healthy.get(service, False))

        try:
            self._loop.call_soon_threadsafe(tell)
            return found.result(HEALTH_TIMEOUT_S)
        except (RuntimeError, concurrent.futures.TimeoutError):  # closed, or it hangs
            return False

    async def _set(self, service: str, is_healthy: bool) -> None:
        self._is_healthy[service] = is_healthy
        status = health_pb2.HealthCheckResponse
        await self._health.set(service, status.SERVING if is_healthy else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls and tell clients to open other connections, give running ones `grace_s`,
        then cancel them. Of several calls the one whose grace ends first counts.
        """
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


@asynccontextmanager
async def rpc_errors(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Turn exceptions of a servicer method into statuses, those that nobody expected as well."""
    try:
        yield
    except PdserveError as error:
        if error.retry_after_ms is not None:
            context.set_trailing_metadata(((_RETRY_AFTER, str(error.retry_after_ms)),))
        await _abort(context, status_of(error), error.message)
    # InternalError: the caller is gone, and nothing can be sent. If it is not that, gRPC logs it.
    except (grpc.aio.AbortError, grpc.aio.InternalError, asyncio.CancelledError):
        raise
    except Exception as error:
        defects.record("requests", error, "an RPC")
        await _abort(context, grpc.StatusCode.INTERNAL, "internal error, see the server's log")


def retry_after_ms_of(error: grpc.aio.AioRpcError) -> int | None:
    """Return when a server wants to be asked again, in ms, at least 1; None if it does not say."""
    for key, value in error.trailing_metadata() or ():
        if key == _RETRY_AFTER and isinstance(value, str) and value.isascii() and value.isdigit():
            return max(1, int(value[:9]))
    return None


async def _abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, message: str) -> None:
    try:
        await context.abort(code, message)
    except grpc.aio.AbortError as error:
        asyncio.get_running_loop().call_soon(_forget_frames, error)
        raise


def _forget_frames(error: grpc.aio.AbortError) -> None:
    """gRPC keeps the exception with its call, and its frames hold the call: until a garbage
    collection nothing would go, the call's buffers and a message of megabytes among it.
    """
    error.__traceback__ = error.__context__ = None
