"""A request's spans in the router, by OpenTelemetry's semantic conventions for HTTP, RPC and
generative AI, and by vLLM's names where it has one of its own: docs/tracing.md. They say where a
request went and what it took: nothing of what it asks, and nothing of its answer.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pdserve_common.types.engine import EngineCoreRequest, EngineError, ErrorCode, Pool
from pdserve_common.types.pooling_params import EMBED
from pdserve_router.requests.input.generation_request import trace_context
from pdserve_router.requests.live_request import LiveRequest
from pdserve_router.requests.records.request_metrics import RequestMetrics, Timeline
from pdserve_router.workers.routing.route_chooser import AnyRoute

if TYPE_CHECKING:
    from pdserve_common.observability.tracing import AttributeValue, Span, Tracing

# What clients have caused, which is no error of a server's span.
_CLIENTS_ERRORS = (
    ErrorCode.INVALID_ARGUMENT,
    ErrorCode.FAILED_PRECONDITION,
    ErrorCode.OVERLOADED,
    ErrorCode.CANCELLED,
    ErrorCode.CLIENT_TOO_SLOW,
)
# The same of gRPC's statuses.
_SERVERS_STATUSES = (
    "UNKNOWN",
    "DEADLINE_EXCEEDED",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
)


def begin_request(
    tracing: "Tracing", headers: Mapping[str, str], *, method: str, path: str, began_ns: int
) -> "Span":
    """Return the span of a request that has just come; `method` is "" over gRPC. Of its `headers`
    counts what workers take.
    """
    attributes: dict[str, AttributeValue] = (
        {"http.request.method": method, "url.path": path}
        if method
        else {"rpc.system.name": "grpc", "rpc.method": path.removeprefix("/")}
    )
    # By anybody's path there would be any number of names.
    context = trace_context(headers)
    return tracing.begin(method or "grpc", context, began_ns, attributes=attributes)


def end_request(
    span: "Span",
    *,
    method: str,
    path: str,
    status: str,
    error: ErrorCode | None,
    lives: Sequence[LiveRequest],
    is_chat: bool,
    model: str,
    now_ns: int,
) -> None:
    """Its answer is sent, or nobody waits for it. `status` is HTTP's number or gRPC's name, `model`
    the name of what an adapter is for; `is_chat`: its prompt was a conversation.
    """
    if method:
        if status.isdecimal():
            span.set({"http.response.status_code": int(status)})
        is_error = status.isdecimal() and int(status) >= 500
    else:
        span.set({"rpc.response.status_code": status})
        is_error = status in _SERVERS_STATUSES
    if lives:
        span.rename(f"{method} {path}" if method else path.removeprefix("/"))
        span.set(_inference(lives, model, is_chat=is_chat))
    if error is not None:
        span.set({"error.type": error.name.lower()})
        # A stream that breaks has had its good status before.
        is_error = is_error or error not in _CLIENTS_ERRORS
    elif is_error:
        span.set({"error.type": status})
    if is_error:
        span.fail()
    span.end(now_ns)


def add_stages(span: "Span", timeline: Timeline) -> None:
    """Add the waterfall's stages before a request was sent to its workers."""
    span.add("router_queue", timeline.arrival_ns, timeline.tokenize_start_ns)
    span.add("tokenize", timeline.tokenize_start_ns, timeline.tokenize_end_ns)
    if timeline.dispatched_ns:
        span.add("dispatch", timeline.tokenize_end_ns, timeline.dispatched_ns)


def begin_attempt(
    span: "Span", request: EngineCoreRequest, route: AnyRoute, *, num_tokens: int, now_ns: int
) -> "Span":
    """Return the span of an attempt that is about to be sent; the workers' are below it.
    `num_tokens` of the answer are there already.
    """
    attributes: dict[str, AttributeValue] = {
        "pdserve.attempt": request.attempt,
        "pdserve.path": route.path,
    }
    for worker in route.workers:
        role = worker.role.name.lower()
        attributes[f"pdserve.{role}.engine_id"] = worker.engine_id
        attributes[f"pdserve.{role}.address"] = worker.address
    if route.reason:
        attributes["pdserve.route_reason"] = route.reason
    if num_tokens:
        attributes["pdserve.num_tokens_before"] = num_tokens
    return span.begin("attempt", now_ns, attributes, is_client=True)


def end_attempt(
    span: "Span", error: EngineError | None, now_ns: int, *, redrive_reason: str = ""
) -> None:
    """An attempt is over; with a `redrive_reason` the request is sent again."""
    if error is not None:
        span.set({"error.type": error.code.name.lower()})
    if redrive_reason:
        span.set({"pdserve.redrive_reason": redrive_reason})
    if error is not None and error.code not in _CLIENTS_ERRORS:
        span.fail(error.message)
    span.end(now_ns)


def _inference(
    lives: Sequence[LiveRequest], model: str, *, is_chat: bool
) -> "dict[str, AttributeValue]":
    """Return what the prompts of a request came to, all together; the rest is of the first."""
    first = lives[0].core_request
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": _operation(first, is_chat=is_chat),
        "gen_ai.provider.name": "pdserve",
        **_request(first, model),
    }
    endings = [live.ending for live in lives if live.ending is not None]
    if not endings:
        return attributes
    usages = [ending.usage for ending in endings]
    attributes["gen_ai.usage.input_tokens"] = sum(each.num_prompt_tokens for each in usages)
    attributes["gen_ai.usage.output_tokens"] = sum(each.num_output_tokens for each in usages)
    attributes["gen_ai.usage.cache_read.input_tokens"] = sum(u.num_cached_tokens for u in usages)
    if num_reasoning := sum(each.num_reasoning_tokens for each in usages):
        attributes["gen_ai.usage.reasoning.output_tokens"] = num_reasoning
    # Each once: there may be thousands of prompts.
    reasons = dict.fromkeys(str(ending.finish_reason) for ending in endings)
    attributes["gen_ai.response.finish_reasons"] = list(reasons)
    attributes.update(_waterfall(endings[0].metrics))
    return attributes


def _operation(request: EngineCoreRequest, *, is_chat: bool) -> str:
    if isinstance(request.task, Pool):
        task = request.task.pooling_params.task
        # The others have no name there.
        return "embeddings" if task == EMBED else task
    return "chat" if is_chat else "text_completion"


def _request(request: EngineCoreRequest, model: str) -> "dict[str, AttributeValue]":
    lora = request.lora_request
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.model": model if lora is None else lora.lora_name,
        "gen_ai.request.id": request.external_req_id or request.request_id,
    }
    if isinstance(request.task, Pool):
        return attributes
    params = request.task.sampling_params
    attributes |= {
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    if params.n > 1:
        attributes["gen_ai.request.choice.count"] = params.n
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    return attributes


def _waterfall(metrics: RequestMetrics) -> "dict[str, AttributeValue]":
    """Return the stages (ms), and what else the answer's trailers say."""
    attributes: dict[str, AttributeValue] = {
        f"pdserve.{name}_ms": value for name, value in metrics.milliseconds()
    }
    for name, fact in metrics.facts():
        if fact != "":
            attributes[f"pdserve.{name}"] = fact
    if metrics.ttft_ns:
        attributes["gen_ai.response.time_to_first_chunk"] = metrics.ttft_ns / 1e9
        attributes["gen_ai.latency.time_to_first_token"] = metrics.ttft_ns / 1e9
    attributes["gen_ai.latency.e2e"] = metrics.e2e_ns / 1e9
    return attributes
