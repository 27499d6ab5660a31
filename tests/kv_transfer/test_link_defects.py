"""Defects in what a KvLink's messages and ticks do: everybody concerned hears of them. Both ends
with the real services, gRPC between them.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pdserve_engine.kv_transfer.links import LinkTable
from pdserve_engine.kv_transfer.ports import PullLost
from pdserve_worker import kv_link_client, kv_link_service
from support.handoff import Pair
from support.metrics import value
from support.waiting import until


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """P and D with a link that is up."""
    monkeypatch.setattr(kv_link_client, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(kv_link_service, "HEARTBEAT_S", 0.01)
    pair = Pair("local")
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    servicer = kv_link_service.KvTransferServicer(pair.p)
    servicer.add_to_server(server)
    await server.start()
    pool = kv_link_client.KVLinkPool(pair.d)
    pair.d.dial("p0", "127.0.0.1", port)
    await until(lambda: value(pair.d_metrics.links) == 1)
    yield pair
    await pool.close()
    await servicer.close()
    await server.stop(None)
    pair.d.shutdown()
    pair.p.shutdown()


def break_down(*args: Any) -> Any:
    raise AssertionError("a defect")


def fail_on_messages_of(engine_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end breaks down under its lock, at the next message."""
    heard = LinkTable.heard

    def fail(table: Any, link: Any) -> None:
        if link.engine_id == engine_id:
            break_down()
        heard(table, link)

    monkeypatch.setattr(LinkTable, "heard", fail)


async def test_a_message_that_d_fails_on_loses_its_link_and_says_why(
    pair: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    request = pair.ticket()
    fail_on_messages_of("p0", monkeypatch)
    await until(lambda: value(pair.d_metrics.links) == 0)
    (lost,) = (event for event in pair.d.take_events() if isinstance(event, PullLost))
    assert lost.request is request
    assert lost.lost.message == "link to p0 lost: failed: AssertionError('a defect')"
    assert "a defect costs a KvLink: AssertionError('a defect')" in caplog.messages
    await until(lambda: value(pair.p_metrics.links) == 0)


async def test_a_message_that_p_fails_on_loses_its_link_and_says_why(
    pair: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fail_on_messages_of("d0", monkeypatch)
    defect = "a defect costs the KvLink of d0: AssertionError('a defect')"
    await until(lambda: defect in caplog.messages)
    assert "link 1 to d0 ended: failed: see the log" in caplog.messages


@pytest.mark.parametrize("side", ["p", "d"])
async def test_a_tick_that_fails_is_the_workers_failure(
    pair: Any, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    connector = getattr(pair, side)
    assert connector.failure() is None
    monkeypatch.setattr(LinkTable, "tick", break_down)
    await until(lambda: connector.failure() is not None)
    assert connector.failure() == ("a tick of the KV connector failed: AssertionError('a defect')")
