"""Defects in what a KvLink's messages and ticks do: everybody concerned hears of them. Both ends
with the real services, gRPC between them.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pdserve_common.observability.defects import DEFECTS, watch_event_loop
from pdserve_engine.kv_transfer.connectors.links import LinkTable
from pdserve_engine.kv_transfer.connectors.owner import OwnerConnector
from pdserve_engine.kv_transfer.connectors.reader import ReaderConnector
from pdserve_engine.kv_transfer.ports import GrantRequested, PullLost, StartAllowed
from pdserve_engine.request.request import RequestStatus
from pdserve_worker.kv_link import client as kv_link_client
from pdserve_worker.kv_link import service as kv_link_service
from support.call_sites import CallSite, UnexpectedError, call_sites, each_site, fault_at
from support.handoff import Pair
from support.metrics import value
from support.waiting import until


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_link_client, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(kv_link_service, "HEARTBEAT_S", 0.01)


@contextlib.asynccontextmanager
async def serving(
    pair: Pair, servicer: kv_link_service.KvTransferServicer | None = None
) -> AsyncIterator[int]:
    """Carry the links of a pair, and give P's port."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    servicer = servicer or kv_link_service.KvTransferServicer(pair.p)
    servicer.add_to_server(server)
    await server.start()
    pool = kv_link_client.KVLinkPool(pair.d)
    yield port
    await pool.close()
    await servicer.close()
    await server.stop(None)
    pair.d.shutdown()
    pair.p.shutdown()


@pytest.fixture
async def pair() -> AsyncIterator[Any]:
    """P and D with a link that is up."""
    pair = Pair("local")
    async with serving(pair) as port:
        pair.d.dial("p0", "127.0.0.1", port)
        await until(lambda: value(pair.d_metrics.links) == 1)
        yield pair


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
    await until(lambda: "link 1 to d0 ended: failed: see the log" in caplog.messages)
    assert defect in caplog.messages


async def test_what_p_has_said_before_it_stops_reaches_d() -> None:
    """As that a session is over, which ends the drain that P waited for."""
    pair = Pair("local")
    servicer = kv_link_service.KvTransferServicer(pair.p)
    async with serving(pair, servicer) as port:
        pair.d.dial("p0", "127.0.0.1", port)
        await until(lambda: value(pair.d_metrics.links) == 1)
        names = [f"r{number}" for number in range(5)]
        for name in names:
            pair.ticket(name)
            pair.ask(name)
        await servicer.close()
        await until(lambda: value(pair.d_metrics.links) == 0)
        claimed = [e for e in pair.take_d_events() if isinstance(e, GrantRequested)]
        assert [event.request.request_id for event in claimed] == names


@pytest.mark.parametrize("side", ["p", "d"])
async def test_a_tick_that_fails_is_the_workers_failure(
    pair: Any, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    connector = getattr(pair, side)
    assert connector.failure() is None
    monkeypatch.setattr(LinkTable, "tick", break_down)
    await until(lambda: connector.failure() is not None)
    assert connector.failure() == ("a tick of the KV connector failed: AssertionError('a defect')")


class Handshakes:
    """Requests for which P asks D, one after the other. Time passes while they are waited for."""

    def __init__(self, pair: Pair, port: int) -> None:
        self.pair = pair
        self.port = port
        self.names = map(str, itertools.count())

    async def succeed(self) -> None:
        """D hears P and P hears D, over a link that is dialed until it is up: a defect and what
        it leaves behind may cost several.
        """
        for _ in range(10):
            with contextlib.suppress(UnexpectedError):
                self.pair.d.dial("p0", "127.0.0.1", self.port)
            if not await self.is_lost(asks=True):
                return
        raise AssertionError("there is no link any more")

    async def is_lost(self, *, asks: bool = False) -> bool:
        """Either side hears that a request is lost, and not that it may start. Of itself it dials
        in vain.
        """
        pair, name = self.pair, next(self.names)
        request = pair.ticket(name)
        asked = pair.ask(name) if asks else None

        def find() -> str | None:
            pair.now += 0.05
            for event in (*pair.take_p_events(), *pair.take_d_events()):
                if isinstance(event, PullLost) and event.request is request:
                    return event.lost.reason
                if asked is not None and getattr(event, "request", None) is asked:
                    return "none" if isinstance(event, StartAllowed) else "link_lost"
            return None

        reason = await until(find)
        pair.end_d(request)
        if asked is not None:
            pair.end_p(asked, RequestStatus.FINISHED_ABORTED)
        assert reason in ("no_link", "link_lost", "none")
        return reason != "none"


LINK = (
    *call_sites(
        kv_link_client.KVLinkPool,
        "_request_link",
        "_dial",
        "_start_link",
        "_forget",
        "_fail",
        "_serve_link",
        "_back_off",
        "_shake_hands",
        "_carry",
        "_read",
    ),
    *call_sites(kv_link_client, "_write", "_end_of"),
    *call_sites(kv_link_service.KvTransferServicer, "KvLink", "_accept", "_read"),
    *call_sites(ReaderConnector, "hello", "link_up", "link_failed"),
    *call_sites(OwnerConnector, "accept_link"),
)


@each_site(LINK, "_dial", "_start_link", "_fail", "_carry", "KvLink")
async def test_a_defect_at_any_call_of_a_link_leaves_a_peer_that_is_usable_or_said_to_be_lost(
    site: CallSite,
) -> None:
    watch_event_loop(asyncio.get_running_loop())
    tasks_before = asyncio.all_tasks()
    num_defects = value(DEFECTS)
    pair = Pair("local")
    with fault_at(site) as fault:
        async with serving(pair) as port:
            handshakes = Handshakes(pair, port)
            await handshakes.succeed()
            pair.p.suspend("on purpose")
            for _ in range(2):
                assert await handshakes.is_lost()
            pair.p.resume()
            await handshakes.succeed()
            pair.d.suspend("on purpose")
            pair.d.resume()
            await handshakes.succeed()
    if fault.has_raised and site.method != "_request_link":
        assert value(DEFECTS) > num_defects
    try:
        await until(lambda: asyncio.all_tasks() <= tasks_before)
    except AssertionError:
        raise AssertionError(f"left: {asyncio.all_tasks() - tasks_before}") from None
