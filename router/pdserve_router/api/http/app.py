"""The OpenAI-compatible HTTP API."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve_common.errors import ModelNotFoundError, PdserveError
from pdserve_common.version import VERSION
from pdserve_router.api.api_keys import OPEN_PATHS
from pdserve_router.api.http import chat_page
from pdserve_router.api.http.connections import connection_of
from pdserve_router.api.http.lora_endpoints import LoraEndpoints
from pdserve_router.api.http.openapi import docs_page, openapi
from pdserve_router.api.http.page_headers import page_headers
from pdserve_router.api.http.write_queue import WriteQueue
from pdserve_router.api.large_requests.processes import EdgeProcesses, Job
from pdserve_router.api.openai.endpoints import GenerationEndpoint, JobEndpoint
from pdserve_router.api.openai.fields import UnknownFields
from pdserve_router.api.openai.format import (
    error_headers,
    error_object,
    http_status,
    plain_error_object,
)
from pdserve_router.api.openai.request import Body
from pdserve_router.api.openai.tokenize import Result, detokenize, tokenize
from pdserve_router.api.openai.types import ChatCompletionBody, CompletionBody
from pdserve_router.api.pooling.endpoint import POOLING_PATHS, PoolingEndpoint
from pdserve_router.api.responses.types import ResponsesBody
from pdserve_router.requests.records.request_log import note_error
from pdserve_router.router import Router


def build_app(
    router: Router,
    *,
    client_stall_timeout_s: float,
    max_body_bytes: int,
    body_timeout_s: float,
    writes: WriteQueue,
    edge: EdgeProcesses,
    unknown_fields: Counter,
    has_lora_updates: bool = False,
    labels: Mapping[int, str] = MappingProxyType({}),
) -> "BareGeneration":
    """Return the ASGI application. `unknown_fields` counts by field; `labels` are the names of a
    classifier's.
    """
    unknown = UnknownFields(unknown_fields)

    def endpoint(body: type[Body]) -> GenerationEndpoint:
        return GenerationEndpoint(
            router,
            body,
            client_stall_timeout_s=client_stall_timeout_s,
            max_body_bytes=max_body_bytes,
            body_timeout_s=body_timeout_s,
            writes=writes,
            edge=edge,
            unknown_fields=unknown,
        )

    def job(function: Job[Result]) -> JobEndpoint:
        return JobEndpoint(
            router,
            function,
            max_body_bytes=max_body_bytes,
            body_timeout_s=body_timeout_s,
            edge=edge,
            unknown_fields=unknown,
        )

    pooling = {
        path: PoolingEndpoint(
            router,
            prepare,
            make_answer,
            labels=labels,
            client_stall_timeout_s=client_stall_timeout_s,
            max_body_bytes=max_body_bytes,
            body_timeout_s=body_timeout_s,
            edge=edge,
            unknown_fields=unknown,
        )
        for path, (prepare, make_answer) in POOLING_PATHS.items()
    }
    updates = LoraEndpoints(router, edge, body_timeout_s=body_timeout_s, unknown_fields=unknown)
    info = InfoEndpoints(router)
    pages = {
        "/": chat_page.show,
        "/health": info.health,
        "/version": info.version,
        "/openapi.json": info.openapi,
        "/docs": info.docs,
    }
    generation = {
        "/v1/completions": endpoint(CompletionBody),
        "/v1/chat/completions": endpoint(ChatCompletionBody),
        "/v1/responses": endpoint(ResponsesBody),
    }
    others = Starlette(
        routes=[
            *(Route(path, app, methods=["POST"]) for path, app in generation.items()),
            *(Route(path, app, methods=["POST"]) for path, app in pooling.items()),
            Route("/v1/models", info.list_models),
            Route("/v1/models/{model:path}", info.get_model),
            Route("/tokenize", job(tokenize), methods=["POST"]),
            Route("/detokenize", job(detokenize), methods=["POST"]),
            *(Route(path, pages[path]) for path in OPEN_PATHS),
            *(updates.routes if has_lora_updates else ()),
        ],
        exception_handlers=dict.fromkeys((HTTPException, PdserveError, Exception), _on_error),
    )
    return BareGeneration(generation, others)


class BareGeneration:
    """Serves POSTs of `generation`, by path, without Starlette: each of its layers takes its part
    of every message of a stream, 3 us together, and of every request. The rest is for `others`.
    """

    def __init__(self, generation: Mapping[str, ASGIApp], others: Starlette) -> None:
        """`others` has a route for each path, also those of `generation`."""
        self._generation = generation
        self._others = others

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """Of all paths."""
        return self._others.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._generation.get(scope["path"]) if scope["method"] == "POST" else None
        if app is None:
            await self._others(scope, receive, send)
            return
        try:
            await app(scope, receive, send)
        except Exception as error:  # as Starlette does: each has its answer
            if connection_of(scope).has_answered:
                raise
            await _answer_to(error)(scope, receive, send)
            if not isinstance(error, HTTPException | PdserveError):
                raise  # a defect, which uvicorn logs


class InfoEndpoints:
    """What is served, and whether."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._created = int(time.time())

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._models()})

    async def get_model(self, request: Request) -> Response:
        name, limits = request.path_params["model"], self._router.pool.limits
        self._router.input_processor.check_model(name, limits)
        models = {each["id"]: each for each in self._models()}
        if name not in models:
            raise ModelNotFoundError(f"model {name[:256]!r} is not ready yet", field="model")
        return JSONResponse(models[name])

    async def health(self, request: Request) -> Response:
        if self._router.is_ready:
            return JSONResponse({"status": "ok"})
        name = self._router.pool.answering_name
        reason = "draining" if self._router.is_draining else f"no {name} is ready"
        return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi())

    async def docs(self, request: Request) -> Response:
        page = docs_page().encode()
        return HTMLResponse(page, headers=page_headers(page))

    def _models(self) -> list[dict[str, object]]:
        """The model, and its adapters."""
        limits = self._router.pool.limits
        model: dict[str, object] = {
            "id": self._router.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdserve",
            "max_model_len": limits.max_model_len if limits is not None else None,
            "tasks": sorted(limits.capabilities.tasks) if limits is not None else None,
        }
        if limits is not None and limits.embedding_size:
            model["embedding_size"] = limits.embedding_size
        adapters = self._router.pool.listed_adapters()
        return [model, *({**model, "id": each.name, "parent": model["id"]} for each in adapters)]


async def _on_error(request: Request, error: Exception) -> Response:
    # If it is a defect Starlette raises it again behind this answer, and uvicorn logs it.
    return _answer_to(error)


def _answer_to(error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse(
            plain_error_object(str(error.detail), status=error.status_code),
            status_code=error.status_code,
            headers=error.headers,
        )
    if isinstance(error, PdserveError):
        note_error(error)
        return JSONResponse(
            error_object(error), status_code=http_status(error), headers=error_headers(error)
        )
    message = "internal error, see the server's log"
    return JSONResponse(plain_error_object(message, status=500), status_code=500)
