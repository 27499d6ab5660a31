"""Spans of OpenTelemetry over requests, exported with OTLP over gRPC by a thread of the SDK's.

The only module that imports OpenTelemetry; `tracing_config.open_tracing` imports it if it is asked
to. What a span says comes from times that are taken anyway: callers give them as
`time.monotonic_ns()` of their process. A collector that is away or slow costs spans, never a
request anything.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import (
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdserve_common.metrics.tracing import EXPORT_FAILED, EXPORTED, QUEUE_FULL, TracingMetrics
from pdserve_common.version import VERSION

# How long the end of a process may wait for its last spans to be taken, and then for the thread.
CLOSE_TIMEOUT_S = 2.0
JOIN_TIMEOUT_S = 0.5
_DEFAULT_QUEUE_SIZE = 2048

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

_propagator = TraceContextTextMapPropagator()
# They warn, for each request, of trace contexts that are none, and quote them: what strangers send.
for _name in ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class Span:
    """One span, and what its children and other processes have to know of it. All times are
    `time.monotonic_ns()` of this process.
    """

    __slots__ = ("_context", "_offset_ns", "_otel", "_tracer")

    def __init__(
        self, tracer: Tracer, otel: OtelSpan, context: Context | None, offset_ns: int
    ) -> None:
        self._tracer = tracer
        self._otel = otel
        self._context = set_span_in_context(otel, context)
        # What to add to a time of ours for one since 1970.
        self._offset_ns = offset_ns

    @property
    def is_recording(self) -> bool:
        """False: its trace is not sampled, and nothing of it is exported."""
        return self._otel.is_recording()

    @property
    def trace_id(self) -> str:
        """In hexadecimal."""
        return format_trace_id(self._otel.get_span_context().trace_id)

    @property
    def span_id(self) -> str:
        """In hexadecimal."""
        return format_span_id(self._otel.get_span_context().span_id)

    @property
    def headers(self) -> dict[str, str]:
        """The W3C trace context for whoever makes children of it elsewhere."""
        headers: dict[str, str] = {}
        _propagator.inject(headers, self._context)
        return headers

    def begin(
        self,
        name: str,
        start_ns: int,
        attributes: Attributes | None = None,
        *,
        is_client: bool = False,
    ) -> "Span":
        """Return a child that has not ended. `is_client`: another process serves it."""
        otel = self._tracer.start_span(
            name,
            self._context,
            kind=SpanKind.CLIENT if is_client else SpanKind.INTERNAL,
            attributes=attributes,
            start_time=start_ns + self._offset_ns,
        )
        return Span(self._tracer, otel, self._context, self._offset_ns)

    def add(
        self, name: str, start_ns: int, end_ns: int, attributes: Attributes | None = None
    ) -> "Span":
        """Add a child that is over, and return it for children of its own."""
        child = self.begin(name, start_ns, attributes)
        child.end(end_ns)
        return child

    def set(self, attributes: Attributes) -> None:
        self._otel.set_attributes(attributes)

    def rename(self, name: str) -> None:
        self._otel.update_name(name)

    def event(self, name: str, at_ns: int) -> None:
        """Add a moment."""
        self._otel.add_event(name, timestamp=at_ns + self._offset_ns)

    def fail(self, description: str = "") -> None:
        """Set the status to an error."""
        self._otel.set_status(Status(StatusCode.ERROR, description or None))

    def end(self, at_ns: int) -> None:
        """It is over, and will be exported. Nothing may be set any more."""
        self._otel.end(at_ns + self._offset_ns)


class Tracing:
    """Makes a process's spans and exports them."""

    def __init__(
        self, endpoint: str, metrics: TracingMetrics, *, service: str, instance: str
    ) -> None:
        """Raises ValueError if a variable of the environment makes no sense."""
        resource = Resource.create(
            {
                "service.name": service,
                "service.version": VERSION,
                "service.instance.id": instance,
                **OTELResourceDetector().detect().attributes,
            }
        )
        self._exporter = _Exporter(OTLPSpanExporter(endpoint=endpoint), metrics)
        self._processor = _Processor(self._exporter, metrics)
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("pdserve", VERSION)

    def begin(
        self,
        name: str,
        headers: Mapping[str, str],
        start_ns: int,
        *,
        attributes: Attributes | None = None,
    ) -> Span:
        """Return a SERVER span below the one that the W3C trace context in `headers` names, if
        there is one, sampled as the SDK's sampler says: by default as its parent is.
        """
        context = _propagator.extract(headers)
        offset_ns = _epoch_offset_ns()
        otel = self._tracer.start_span(
            name,
            context,
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=start_ns + offset_ns,
        )
        return Span(self._tracer, otel, context, offset_ns)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Export what is left, for so long at most, and drop the rest."""
        _run_within(timeout_s, self._processor.force_flush)
        self._exporter.shutdown()
        _run_within(JOIN_TIMEOUT_S, self._processor.shutdown)


class _Exporter(SpanExporter):
    """Counts what becomes of batches."""

    def __init__(self, exporter: SpanExporter, metrics: TracingMetrics) -> None:
        self._exporter = exporter
        self._metrics = metrics
        self._is_closed = False
        self.num_ended = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            if not self._is_closed:
                result = self._exporter.export(spans)
        finally:
            is_ok = result is SpanExportResult.SUCCESS
            self.num_ended += len(spans)
            self._metrics.spans.labels(EXPORTED if is_ok else EXPORT_FAILED).inc(len(spans))
        return result

    def shutdown(self) -> None:
        """An export under way fails at once, and so do all later ones."""
        if not self._is_closed:
            self._is_closed = True
            self._exporter.shutdown()


class _Processor(BatchSpanProcessor):
    """Drops what comes while its queue is full, and counts it. The SDK's own drops what is oldest,
    and counts nothing. Spans end on one thread and are exported on another.
    """

    def __init__(self, exporter: _Exporter, metrics: TracingMetrics) -> None:
        self._max_queue_size = _queue_size()
        super().__init__(exporter, max_queue_size=self._max_queue_size)
        self._counting_exporter = exporter
        self._metrics = metrics
        self._num_taken = 0

    def on_end(self, span: ReadableSpan) -> None:
        if self._num_taken - self._counting_exporter.num_ended >= self._max_queue_size:
            self._metrics.spans.labels(QUEUE_FULL).inc()
            return
        self._num_taken += 1
        super().on_end(span)


def _queue_size() -> int:
    text = os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, str(_DEFAULT_QUEUE_SIZE))
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{OTEL_BSP_MAX_QUEUE_SIZE} is {text!r}, must be a number above 0")
    return int(text)


def _epoch_offset_ns() -> int:
    """Return time.time_ns() - time.monotonic_ns(), of the closest pair of three."""
    samples = []
    for _ in range(3):
        before, epoch, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        samples.append((after - before, epoch - (before + after) // 2))
    return min(samples)[1]


def _run_within(timeout_s: float, function: Callable[[], object]) -> None:
    """Wait for it so long; it may go on until the process ends."""
    thread = threading.Thread(target=function, daemon=True, name="tracing")
    thread.start()
    thread.join(timeout_s)
