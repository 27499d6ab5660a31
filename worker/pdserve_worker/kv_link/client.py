"""Decode's end of the KvLink: one link for each prefill worker, dialed when a request first needs
it.
"""

import asyncio
import contextlib
import functools
import logging

import grpc

from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve.v1 import kv_transfer_service_pb2_grpc as kv_grpc
from pdserve_common.errors import InvalidRequestError, KVTransferError
from pdserve_common.observability import defects
from pdserve_common.rpc.channels import OpenChannel, end_call, open_channel
from pdserve_common.rpc.liveness import HEARTBEAT_S, keep_calling
from pdserve_common.types.kv import KVLinkRequestMessage, KVLinkWelcome
from pdserve_common.wire import kv_link_request_to_proto, kv_link_response_from_proto
from pdserve_engine.kv_transfer.connectors.endpoint import KVConsumerEndpoint
from pdserve_engine.kv_transfer.connectors.links import KVLink
from pdserve_worker.kv_link.outgoing import HANDSHAKE_S, Outgoing

logger = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.1
# A request that needs the link waits this long at most before it is dialed again.
MAX_BACKOFF_S = 1.0
# Workers whose backoff is remembered; the oldest failures are forgotten first.
MAX_BACKOFFS = 1024
_DEFECT = "failed: see the log"


class KVLinkPool:
    """Owns the links of decode's connector and sends its heartbeats until `close`."""

    def __init__(
        self, connector: KVConsumerEndpoint, *, open_channel: OpenChannel = open_channel
    ) -> None:
        """Serve the connector's wishes for links. Must run inside the event loop."""
        self._connector = connector
        self._open_channel = open_channel
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._backoff_s: dict[str, float] = {}
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._ticker = keep_calling(
            "kv_link", HEARTBEAT_S, connector.on_tick, costs="a heartbeat of KvLinks"
        )
        self._connector.bind_link_pool(self._request_link)

    async def close(self) -> None:
        """End every link and wait for their tasks."""
        self._is_closed = True
        tasks = [self._ticker, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _request_link(self, engine_id: str, host: str, port: int) -> None:
        """Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it this process
            self._loop.call_soon_threadsafe(self._dial, engine_id, host, port)

    def _dial(self, engine_id: str, host: str, port: int) -> None:
        if self._is_closed:
            self._connector.link_failed(engine_id, "shutdown")
            return
        address = f"{host}:{port}"
        try:
            self._start_link(engine_id, address)
        except Exception as error:  # a defect: whoever waits for the link must hear of it
            defects.record("kv_link", error, f"the KvLink to {engine_id}")
            self._fail(engine_id, address, _DEFECT)

    def _start_link(self, engine_id: str, address: str) -> None:
        task = defects.spawn(
            "kv_link",
            self._serve_link(engine_id, address, self._tasks.get(engine_id)),
            costs=f"the KvLink to {engine_id}",
            on_defect=lambda error: self._fail(engine_id, address, _DEFECT),
        )
        self._tasks[engine_id] = task
        task.add_done_callback(functools.partial(self._forget, engine_id))

    def _forget(self, engine_id: str, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(engine_id) is task:
            del self._tasks[engine_id]

    def _fail(self, engine_id: str, address: str, reason: str) -> None:
        """There is no link; the next one is dialed later."""
        logger.warning("no KvLink to %s at %s: %s", engine_id, address, reason)
        self._connector.link_failed(engine_id, reason)
        self._back_off(engine_id)

    async def _serve_link(
        self, engine_id: str, address: str, before: "asyncio.Task[None] | None"
    ) -> None:
        """Dial, shake hands, carry messages until the link ends. What it raises is a defect."""
        is_up = False
        try:
            if before is not None:
                await asyncio.gather(before, return_exceptions=True)
            await asyncio.sleep(self._backoff_s.get(engine_id, 0.0))
            async with self._open_channel(address) as channel:
                call: grpc.aio.StreamStreamCall = kv_grpc.KvTransferServiceStub(channel).KvLink()
                try:
                    link, outgoing = await asyncio.wait_for(
                        self._shake_hands(engine_id, call), HANDSHAKE_S
                    )
                    is_up = True  # from here on link_lost tells how it ended
                    await self._carry(call, link, outgoing)
                    return
                finally:
                    end_call(call)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except asyncio.TimeoutError:
            reason = f"no welcome within {HANDSHAKE_S:g} s"
        except (KVTransferError, InvalidRequestError) as error:
            reason = error.message
        except asyncio.CancelledError:
            if not is_up:
                self._fail(engine_id, address, "shutdown")
            raise
        self._fail(engine_id, address, reason)

    def _back_off(self, engine_id: str) -> None:
        """Wait longer before the next dial."""
        backoff_s = self._backoff_s.pop(engine_id, 0.0)
        self._backoff_s[engine_id] = min(MAX_BACKOFF_S, max(MIN_BACKOFF_S, 2 * backoff_s))
        if len(self._backoff_s) > MAX_BACKOFFS:
            del self._backoff_s[next(iter(self._backoff_s))]

    async def _shake_hands(
        self, engine_id: str, call: grpc.aio.StreamStreamCall
    ) -> tuple[KVLink, Outgoing[KVLinkRequestMessage]]:
        outgoing: Outgoing[KVLinkRequestMessage] = Outgoing()
        await call.write(kv_link_request_to_proto(self._connector.hello()))
        response = await call.read()
        if not isinstance(response, kv_pb2.KvLinkResponse):  # EOF
            raise KVTransferError("the stream ended before welcome")
        welcome = kv_link_response_from_proto(response)
        if not isinstance(welcome, KVLinkWelcome):
            raise InvalidRequestError("the first message is not welcome", field="message")
        link = self._connector.link_up(engine_id, welcome, outgoing)
        logger.info("link %d to %s is up", link.number, engine_id)
        self._backoff_s.pop(engine_id, None)
        return link, outgoing

    async def _carry(
        self,
        call: grpc.aio.StreamStreamCall,
        link: KVLink,
        outgoing: Outgoing[KVLinkRequestMessage],
    ) -> None:
        """Carry messages until either side ends the link."""
        tasks: list[asyncio.Task[str]] = []
        reason = "shutdown"
        try:
            tasks += [
                asyncio.create_task(self._read(call, link)),
                asyncio.create_task(_write(call, outgoing)),
                asyncio.create_task(outgoing.wait_closed()),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = _end_of(done.pop())
        finally:
            for task in tasks:
                task.cancel()
            self._connector.link_lost(link, reason)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: grpc.aio.StreamStreamCall, link: KVLink) -> str:
        """Return why there is nothing more to read."""
        try:
            while isinstance(response := await call.read(), kv_pb2.KvLinkResponse):
                self._connector.on_message(link, kv_link_response_from_proto(response))
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except InvalidRequestError as error:
            return error.message
        return "closed by prefill"


def _end_of(task: "asyncio.Task[str]") -> str:
    """Why a link's task is over, also if it is a defect."""
    error = task.exception()
    if error is None:
        return task.result()
    defects.record("kv_link", error, "a KvLink")
    return f"failed: {error!r}"


async def _write(call: grpc.aio.StreamStreamCall, outgoing: Outgoing[KVLinkRequestMessage]) -> str:
    """Return why nothing more can be written."""
    try:
        while (message := await outgoing.get()) is not None:
            await call.write(kv_link_request_to_proto(message))
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        return f"cannot write: {error}"
    return outgoing.closed_because
