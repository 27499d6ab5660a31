"""The ASGI application behind the POST paths of vectors, classes and scores."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from functools import partial

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from pdserve_common.errors import ClientTooSlowError
from pdserve_router.api.http.body import address_of, read_in_time
from pdserve_router.api.http.stall_guard import StallGuard
from pdserve_router.api.large_requests.processes import EdgeProcesses, Job
from pdserve_router.api.openai.answer import raise_error, send_json
from pdserve_router.api.openai.endpoints import (
    abort_on_disconnect,
    call_fields,
    cut_connection,
    leave_on_disconnect,
)
from pdserve_router.api.openai.fields import UnknownFields
from pdserve_router.api.openai.request import HttpCall
from pdserve_router.api.pooling.answer import (
    ClassesAnswer,
    EmbeddingsAnswer,
    PoolingAnswer,
    RerankAnswer,
    ScoresAnswer,
    VectorsAnswer,
    frame_of,
)
from pdserve_router.api.pooling.batch import MAX_AT_ONCE, PoolingBatch
from pdserve_router.api.pooling.prepare import (
    Prepared,
    prepare_classes,
    prepare_embeddings,
    prepare_pooling,
    prepare_reranking,
    prepare_scores,
)
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.input.request_limits import is_small
from pdserve_router.requests.output.outputs import RequestOutput, Usage
from pdserve_router.requests.tenants.part_slots import PartSlots
from pdserve_router.router import Router
from pdserve_router.workers.model_limits import ModelLimits

# Says what a request's vectors are; it gets the names of a classifier's labels.
MakeAnswer = Callable[[Prepared, Mapping[int, str]], PoolingAnswer]


def _embeddings(prepared: Prepared, labels: Mapping[int, str]) -> PoolingAnswer:
    return EmbeddingsAnswer(len(prepared.inputs), is_base64=prepared.is_base64)


def _vectors(prepared: Prepared, labels: Mapping[int, str]) -> PoolingAnswer:
    return VectorsAnswer(len(prepared.inputs), is_base64=prepared.is_base64)


def _classes(prepared: Prepared, labels: Mapping[int, str]) -> PoolingAnswer:
    return ClassesAnswer(len(prepared.inputs), labels)


def _scores(prepared: Prepared, labels: Mapping[int, str]) -> PoolingAnswer:
    return ScoresAnswer(len(prepared.inputs), prepared.compared)


def _reranking(prepared: Prepared, labels: Mapping[int, str]) -> PoolingAnswer:
    return RerankAnswer(
        len(prepared.inputs),
        prepared.compared,
        documents=prepared.documents,
        top_n=prepared.top_n,
        returns_documents=prepared.returns_documents,
    )


# By path: OpenAI's, vLLM's, and those of Cohere and Jina.
POOLING_PATHS: Mapping[str, tuple[Job[Prepared], MakeAnswer]] = {
    "/v1/embeddings": (prepare_embeddings, _embeddings),
    "/pooling": (prepare_pooling, _vectors),
    **dict.fromkeys(("/classify", "/v1/classify"), (prepare_classes, _classes)),
    **dict.fromkeys(("/score", "/v1/score"), (prepare_scores, _scores)),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), (prepare_reranking, _reranking)),
}


class PoolingEndpoint:
    """An ASGI application that has the inputs of a body pooled, and answers when all are."""

    def __init__(
        self,
        router: Router,
        prepare: Job[Prepared],
        make_answer: MakeAnswer,
        *,
        labels: Mapping[int, str],
        client_stall_timeout_s: float,
        max_body_bytes: int,
        body_timeout_s: float,
        edge: EdgeProcesses,
        unknown_fields: UnknownFields,
    ) -> None:
        self._router = router
        self._prepare = prepare
        self._make_answer = make_answer
        self._labels = labels
        self._client_stall_timeout_s = client_stall_timeout_s
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._edge = edge
        self._unknown_fields = unknown_fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = HttpCall(**call_fields(Request(scope)))
        client = address_of(scope)
        with ExitStack() as stack:
            # A large body counts to the end, in the slot of its inputs: these wait here for those
            # before them, and take more than the body, which is gone.
            held = stack.enter_context(self._edge.hold(client))
            raw = await read_in_time(
                Request(scope, receive), self._max_body_bytes, held, timeout_s=self._body_timeout_s
            )
            stack.enter_context(self._router.answering())
            slots = stack.enter_context(PartSlots())
            preparation = _Preparation(
                self._router, self._edge, self._prepare, raw, call, client, slots
            )
            del raw
            async with leave_on_disconnect(receive):
                lives = await self._router.submit(preparation, slots)
            for live in lives:
                stack.enter_context(live)
            prepared = preparation.prepared
            assert prepared is not None, "a request that was taken is prepared"
            self._unknown_fields.count(prepared.unknown_fields)
            follow = partial(self._router.follow, slots=slots)
            batch = PoolingBatch(lives, prepared.inputs[len(lives) :], follow)
            await self._answer(batch, prepared, scope, receive, send)

    async def _answer(
        self, batch: PoolingBatch, prepared: Prepared, scope: Scope, receive: Receive, send: Send
    ) -> None:
        answer = self._make_answer(prepared, self._labels)
        lora = prepared.inputs[0].core_request.lora_request
        model = self._router.model_name if lora is None else lora.lora_name
        async with abort_on_disconnect((batch,), receive) as disconnected:
            usage, last = await _take_all(batch, answer)
            assert last.metrics is not None, "it has ended"
            body = await answer.body(frame_of(answer, last.request_id, model), usage)
            headers = {**dict(last.metrics.trailers()), "x-request-id": last.request_id}
            try:
                with StallGuard(self._client_stall_timeout_s) as guard:
                    await send_json(body, headers, send, guard)
            except ClientTooSlowError:
                await cut_connection(scope, disconnected)


async def _take_all(batch: PoolingBatch, answer: PoolingAnswer) -> tuple[Usage, RequestOutput]:
    """Return what all inputs have used, and the last output. Raises the first one's error."""
    usages: list[Usage] = []
    async with aclosing(batch.outputs()) as outputs:
        async for index, output in outputs:
            raise_error(output)
            assert output.pooling_output is not None, "it has not failed"
            answer.take(index, output.pooling_output)
            assert output.usage is not None, "it has ended"
            usages.append(output.usage)
            # Between many that are there others' events come.
            await asyncio.sleep(0)
    return Usage.total(usages), output


class _Preparation:
    """Makes tokens of a body, and has as many inputs begin as may at once."""

    def __init__(
        self,
        router: Router,
        edge: EdgeProcesses,
        prepare: Job[Prepared],
        raw: bytes,
        call: HttpCall,
        client: str,
        slots: PartSlots,
    ) -> None:
        self._router = router
        self._edge = edge
        self._prepare = prepare
        self._raw = raw
        self._call = call
        self._client = client
        self._slots = slots
        self.prepared: Prepared | None = None

    async def __call__(self, limits: ModelLimits) -> Sequence[ProcessedInput]:
        self.prepared = await self._edge.run(
            self._prepare,
            self._raw,
            self._call,
            limits,
            client=self._client,
            is_small=is_small(self._raw, b"{"),
        )
        self._raw = b""
        inputs = self.prepared.inputs
        first = inputs[: self._router.num_at_once(MAX_AT_ONCE)]
        self._slots.num_to_follow = len(inputs) - len(first)
        return first
