"""Who may send requests: API keys from a file, asked for by both APIs."""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc
from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve_common.processes.followed import Followed
from pdserve_router.api.api_keys_file import read_api_keys
from pdserve_router.api.grpc.service import SERVICE_NAME
from pdserve_router.api.openai.format import plain_error_object
from pdserve_router.requests.records.request_log import note_api_key
from pdserve_router.requests.tenants.quotas import Quotas
from pdserve_router.requests.tenants.tenant import tenant_var
from pdserve_router.requests.tenants.tenant_account import TenantLimits

_SCHEME = "bearer "
# Served to everybody: they say nothing that is not public, and need no worker.
OPEN_PATHS = ("/", "/health", "/version", "/openapi.json", "/docs")
# In metrics, those of all keys without a name.
UNNAMED = "unnamed"

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


class UnauthorizedError(Exception):
    """A caller has no key; the message tells them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """What a file says."""

    # Names and tenants by the keys' digests.
    owners: Mapping[bytes, tuple[str, str]]
    limits: Mapping[str, TenantLimits]


class ApiKeys:
    """The keys of a file, which is read again when it changes."""

    def __init__(self, path: str, refused: Counter) -> None:
        """`refused` counts by api and reason. Raises what `read_api_keys` raises."""
        self._refused = refused
        # Keys are compared by digests that nobody can foretell: how long a look-up takes says
        # nothing about them, however many there are.
        self._salt = secrets.token_bytes(32)
        self._keys = Followed([path], lambda: self._read(path))

    async def check(self, authorization: str, *, api: str) -> None:
        """Let a caller pass whose header says `authorization`. Raises UnauthorizedError."""
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            self._refused.labels(api=api, reason="missing").inc()
            raise UnauthorizedError("no API key: send it as Authorization: Bearer KEY")
        key = authorization[len(_SCHEME) :].strip()
        keys = await self._keys.get_off_loop()
        owner = keys.owners.get(self._digest(key))
        if owner is None:
            self._refused.labels(api=api, reason="unknown").inc()
            raise UnauthorizedError("the API key is not known here")
        name, tenant = owner
        note_api_key(name)
        tenant_var.set(tenant)

    def limits(self) -> Mapping[str, TenantLimits]:
        """Return all tenants' as the file said them when a key was checked last; the same ones
        until it changes.
        """
        return self._keys.last.limits

    def _read(self, path: str) -> _Keys:
        owners, limits = {}, {}
        for key, (name, fields) in read_api_keys(path).items():
            # Keys without a name are a tenant each, the same one on every router.
            tenant = name or hashlib.sha256(key.encode()).hexdigest()
            owners[self._digest(key)] = name, tenant
            limits[tenant] = TenantLimits(name=name or UNNAMED, **fields)
        return _Keys(owners=owners, limits=limits)

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(), key=self._salt).digest()


class HttpApiKeyGuard:
    """Lets through what has a key, and OPEN_PATHS without. Answers say what is left of the key's
    limits when they begin.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, quotas: Quotas) -> None:
        self._app = app
        self._keys = keys
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            await self._keys.check(Headers(scope=scope).get("authorization", ""), api="http")
        except UnauthorizedError as error:
            await _refuse(str(error))(scope, receive, send)
            return
        tenant = tenant_var.get()
        is_limited = bool(self._quotas.headers(tenant))

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                limits = self._quotas.headers(tenant).items()
                added = [(name.encode(), value.encode()) for name, value in limits]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await self._app(scope, receive, send_with_limits if is_limited else send)


def _refuse(message: str) -> ASGIApp:
    return JSONResponse(
        plain_error_object(message, status=401, code="invalid_api_key"),
        status_code=401,
        headers={"www-authenticate": "Bearer"},
    )


class GrpcApiKeyGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets through what has a key, and calls of health and reflection without."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        if handler_call_details.method.startswith(f"/{SERVICE_NAME}/"):
            authorization = _authorization(handler_call_details.invocation_metadata)
            try:
                await self._keys.check(authorization, api="grpc")
            except UnauthorizedError as error:
                return _abort(str(error))
        return await continuation(handler_call_details)


def _authorization(metadata: Sequence[tuple[str, str | bytes]]) -> str:
    values = [value for key, value in metadata if key == "authorization"]
    return values[0] if values and isinstance(values[0], str) else ""


def _abort(message: str) -> grpc.RpcMethodHandler:
    """A status without messages is an answer to every kind of call. Were it one with a message,
    that would be received first.
    """

    async def abort(requests: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

    return grpc.stream_stream_rpc_method_handler(abort)
