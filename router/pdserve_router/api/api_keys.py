"""Who may send requests: API keys from a file, asked for by both APIs."""

import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc
from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve_common.followed import Followed
from pdserve_router.api.grpc_service import SERVICE_NAME
from pdserve_router.api.openai_format import plain_error_object
from pdserve_router.requests.request_log import note_api_key
from pdserve_router.requests.tenant import tenant_var

MAX_FILE_BYTES = 1 << 20
MIN_KEY_CHARS = 16

_KEY = re.compile(rf"[!-~]{{{MIN_KEY_CHARS},}}")
_SCHEME = "bearer "
# Served to everybody: they say nothing that is not public, and need no worker.
OPEN_PATHS = ("/", "/health", "/version", "/openapi.json", "/docs")

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


class UnauthorizedError(Exception):
    """A caller has no key; the message tells them."""


class ApiKeys:
    """The keys of a file: one a line, `key` or, for people, `name:key`; empty lines and those that
    begin with # do not count. The file is read again when it changes.
    """

    def __init__(self, path: str, refused: Counter) -> None:
        """`refused` counts by api and reason. Raises OSError or ValueError for a file that cannot
        be read, or holds no key or one that is none.
        """
        self._refused = refused
        # Keys are compared by digests that nobody can foretell: how long a look-up takes says
        # nothing about them, however many there are.
        self._salt = secrets.token_bytes(32)
        self._names = Followed(
            [path], lambda: {self._digest(key): name for key, name in _read_keys(path).items()}
        )

    def check(self, authorization: str, *, api: str) -> None:
        """Let a caller pass whose header says `authorization`. Raises UnauthorizedError."""
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            self._refused.labels(api=api, reason="missing").inc()
            raise UnauthorizedError("no API key: send it as Authorization: Bearer KEY")
        key = authorization[len(_SCHEME) :].strip()
        name = self._names.get().get(self._digest(key))
        if name is None:
            self._refused.labels(api=api, reason="unknown").inc()
            raise UnauthorizedError("the API key is not known here")
        note_api_key(name)
        # Keys without a name are a tenant each, the same one on every router.
        tenant_var.set(name or hashlib.sha256(key.encode()).hexdigest())

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(), key=self._salt).digest()


def _read_keys(path: str) -> dict[str, str]:
    """Return the keys' names, "" of one that has none. Raises OSError or ValueError; neither says
    what is in the file.
    """
    keys = {}
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not (entry := line.strip()) or entry.startswith("#"):
            continue
        name, _, key = (part.strip() for part in entry.rpartition(":"))
        if not _KEY.fullmatch(key):
            raise ValueError(
                f"api_keys_file {path}: the key in line {number} must be {MIN_KEY_CHARS} or more "
                "visible ASCII characters"
            )
        keys[key] = name
    if not keys:
        raise ValueError(f"api_keys_file {path} has no keys, must have at least 1")
    return keys


def _read_text(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise OSError(f"api_keys_file {path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"api_keys_file {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"api_keys_file {path} is no UTF-8 text") from None


class HttpApiKeyGuard:
    """Lets through what has a key, and OPEN_PATHS without."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            authorization = Headers(scope=scope).get("authorization", "")
            try:
                self._keys.check(authorization, api="http")
            except UnauthorizedError as error:
                app = _refuse(str(error))
        await app(scope, receive, send)


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
                self._keys.check(authorization, api="grpc")
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
