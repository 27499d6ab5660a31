"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: for operators, off by default."""

from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from pdserve_common.errors import InvalidRequestError
from pdserve_common.types.lora import LoRARequest
from pdserve_router.api.http.body import address_of, read_in_time
from pdserve_router.api.large_requests.processes import EdgeProcesses
from pdserve_router.api.openai.fields import UnknownFields, UnknownNames
from pdserve_router.api.openai.model import CONFIG, Int
from pdserve_router.api.openai.parse import json_object, validate
from pdserve_router.router import Router

MAX_BYTES = 64 * 1024
MAX_WORKERS = 1 << 16

_Body = TypeVar("_Body", bound=BaseModel)


class LoadBody(BaseModel):
    """POST /v1/load_lora_adapter."""

    model_config = CONFIG

    lora_name: str
    """What clients ask for."""
    lora_path: str = ""
    """The folder below each worker's --lora-root; that of its name if unset."""
    num_workers: Int = 0
    """Prefill workers, and as many decode workers, that get it; 0: all."""


class UnloadBody(BaseModel):
    """POST /v1/unload_lora_adapter."""

    model_config = CONFIG

    lora_name: str
    """What clients ask for."""


class LoraEndpoints:
    """Each answers when every worker has done it and the router knows."""

    def __init__(
        self,
        router: Router,
        edge: EdgeProcesses,
        *,
        body_timeout_s: float,
        unknown_fields: UnknownFields,
    ) -> None:
        self._router = router
        self._edge = edge
        self._body_timeout_s = body_timeout_s
        self._unknown_fields = unknown_fields

    @property
    def routes(self) -> Sequence[BaseRoute]:
        return (
            Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
        )

    async def _load(self, request: Request) -> Response:
        body = await self._body(LoadBody, request)
        if body.lora_name == self._router.model_name:
            raise InvalidRequestError("lora_name is the model's", field="lora_name")
        if not 0 <= body.num_workers <= MAX_WORKERS:
            raise InvalidRequestError(
                f"num_workers is {body.num_workers}, must be 0 to {MAX_WORKERS}",
                field="num_workers",
            )
        lora = LoRARequest(lora_name=body.lora_name, lora_path=body.lora_path, digest="")
        adapter = await self._router.adapters.load(lora, num_workers=body.num_workers)
        return PlainTextResponse(
            f"Success: LoRA adapter '{adapter.name}' added successfully: {adapter.digest}"
        )

    async def _unload(self, request: Request) -> Response:
        body = await self._body(UnloadBody, request)
        await self._router.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _body(self, cls: type[_Body], request: Request) -> _Body:
        with self._edge.hold(address_of(request.scope)) as held:
            raw = await read_in_time(request, MAX_BYTES, held, timeout_s=self._body_timeout_s)
            values = json_object(raw)
        unknown = UnknownNames()
        unknown.add(values.keys() - cls.model_fields.keys())
        self._unknown_fields.count(unknown.names())
        return validate(cls, values)
