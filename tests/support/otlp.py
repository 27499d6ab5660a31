"""A collector of OpenTelemetry: OTLP's TraceService over gRPC, which keeps what it gets."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from support.waiting import wait_until

# How long an export is held at most by a collector that does not answer.
HOLD_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedSpan:
    """A span as it came; ids in hexadecimal, "" for none, times in ns since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    is_error: bool
    description: str
    resource: dict[str, Any]

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class Collector(service_grpc.TraceServiceServicer):
    """Listens on a free port of loopback; use as a context manager. With `holds` it accepts all and
    answers nothing.
    """

    def __init__(self, *, holds: bool = False) -> None:
        self._spans: list[CollectedSpan] = []
        self.metadata: list[dict[str, str]] = []
        self._go = threading.Event()
        if not holds:
            self._go.set()
        self._server = grpc.server(ThreadPoolExecutor(8))
        service_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> "Collector":
        self._server.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._go.set()
        self._server.stop(0).wait()

    def Export(
        self, request: service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> service_pb2.ExportTraceServiceResponse:
        self._go.wait(HOLD_S)
        self.metadata.append(dict(context.invocation_metadata()))
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self._spans.extend(_collected(span, resource) for span in of_scope.spans)
        return service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> Sequence[CollectedSpan]:
        """All so far."""
        return tuple(self._spans)

    def trace(
        self, trace_id: str, is_whole: Callable[[Sequence[CollectedSpan]], object]
    ) -> list[CollectedSpan]:
        """Wait until `is_whole` is true of a trace's spans and return them."""

        def spans() -> list[CollectedSpan]:
            return [span for span in self.spans if span.trace_id == trace_id]

        wait_until(lambda: is_whole(spans()), f"trace {trace_id} is whole")
        return spans()


def _collected(span: SpanMessage, resource: dict[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=SpanMessage.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(event.name for event in span.events),
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        description=span.status.message,
        resource=resource,
    )


def _attributes(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    assert kind in ("string_value", "bool_value", "int_value", "double_value")
    return getattr(value, kind)
