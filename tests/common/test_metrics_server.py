"""The port of metrics and probes answers whatever else its clients do."""

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.limits.names import MADE_ROOM, SLOW_HEADERS
from pdserve_common.metrics import port as metrics_server
from pdserve_common.metrics.port import MAX_METRICS_CONNECTIONS, MetricsServer


@pytest.fixture
def limits_hit() -> list[str]:
    return []


@pytest.fixture
def server(limits_hit: list[str]) -> Iterator[MetricsServer]:
    probes = {"/ready": lambda: True, "/live": lambda: False}
    server = MetricsServer(
        "127.0.0.1", 0, CollectorRegistry(), probes=probes, on_limit=limits_hit.append
    )
    yield server
    server.close()


def connect(server: MetricsServer, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(data)
    return connection


def is_ready(server: MetricsServer) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/ready", timeout=60) as answer:
        return bool(answer.read() == b"ok\n")


@pytest.mark.parametrize("data", [b"", b"GET /ready HTTP/1.1\r\n"], ids=["silent", "half"])
def test_a_probe_takes_the_place_of_who_has_been_there_for_longest(
    server: MetricsServer, limits_hit: list[str], data: bytes
) -> None:
    before = threading.active_count()
    connections = [connect(server, data) for _ in range(5 * MAX_METRICS_CONNECTIONS)]
    assert all(is_ready(server) for _ in range(3))
    assert limits_hit.count(MADE_ROOM) >= 4 * MAX_METRICS_CONNECTIONS
    assert connections[0].recv(100) == b"", "the oldest was cut"
    for connection in connections[: 4 * MAX_METRICS_CONNECTIONS]:
        assert connection.recv(100) == b""
    assert threading.active_count() - before <= MAX_METRICS_CONNECTIONS + 8
    for connection in connections:
        connection.close()


def test_who_takes_too_long_is_cut(
    server: MetricsServer, limits_hit: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "METRICS_TIMEOUT_S", 0.1)
    with connect(server, b"GET /ready HTTP/1.1\r\n") as connection:
        assert connection.recv(100) == b""
    assert limits_hit == [SLOW_HEADERS]


def test_large_requests_are_cut(server: MetricsServer) -> None:
    connection = connect(server, b"GET /ready HTTP/1.1\r\n" + b"a:\r\n" * 5000)
    with connection, contextlib.suppress(ConnectionResetError):  # some of it was not read
        assert connection.recv(100) == b""
    assert is_ready(server)
