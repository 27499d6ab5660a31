"""The setting that turns spans on. Without it nothing of OpenTelemetry is imported."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry

from pdserve_common.config import opt
from pdserve_common.metrics.tracing import TracingMetrics

if TYPE_CHECKING:
    from pdserve_common.observability.tracing import Tracing

_SCHEMES = ("http", "https", "grpc")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def endpoint_opt() -> Any:
    """Return the field `otlp_traces_endpoint` of a process's config."""
    return opt(
        None,
        "Where spans of requests go, a collector's OTLP over gRPC such as http://localhost:4317; "
        "the OTEL_* variables say the rest. Needs the extra `tracing`. Unset: no spans.",
    )


def check_endpoint(endpoint: str | None) -> None:
    """Raises ValueError, which repeats no secret. None may be in it, as configs are logged."""
    if endpoint is None:
        return
    expected = "must be http://HOST:PORT or https://HOST:PORT"
    if (part := _needless_part(endpoint)) is not None:
        raise ValueError(f"otlp_traces_endpoint has {part}, {expected}")
    try:
        url = urlsplit(endpoint)
        is_valid = url.scheme in _SCHEMES and bool(url.hostname) and bool(url.port)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError(f"otlp_traces_endpoint is {endpoint!r}, {expected}")


def _needless_part(endpoint: str) -> str | None:
    """Return what is in it besides scheme, host and port."""
    # A password may have any character in it, also one that ends the host for a parser.
    if "@" in endpoint:
        return "a user or password (OTEL_EXPORTER_OTLP_HEADERS is for those)"
    _, _, rest = endpoint.partition("://")
    for mark, part in (("#", "a fragment"), ("?", "a query"), ("/", "a path")):
        if mark in rest:
            return part
    return None


def open_tracing(
    endpoint: str | None,
    registry: CollectorRegistry,
    *,
    service: str,
    instance: str,
    environ: Mapping[str, str] = os.environ,
) -> "Tracing | None":
    """Return what exports this process's spans; None without an endpoint. What becomes of them is
    in `registry` either way. `service` is its
    service.name unless the environment names it, `instance` its service.instance.id. Raises
    ValueError if a variable makes no sense or the libraries are not installed.
    """
    metrics = TracingMetrics(registry)
    if endpoint is None:
        return None
    for name in _PROTOCOL_VARIABLES:
        if environ.get(name, "grpc") != "grpc":
            raise ValueError(f"{name} is {environ[name]!r}, must be grpc: nothing else is spoken")
    try:
        from pdserve_common.observability.tracing import Tracing
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise ValueError(
            "otlp_traces_endpoint is set, which needs the extra `tracing`: "
            "pip install 'pdserve[tracing]'"
        ) from error
    return Tracing(endpoint, metrics, service=service, instance=instance)
