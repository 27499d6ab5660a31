"""Prefill's end of the KvLink: accepts decode workers and carries messages to and from the
connector.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve.v1 import kv_transfer_service_pb2_grpc as kv_grpc
from pdserve_common.errors import InvalidRequestError, KVTransferError
from pdserve_common.observability import defects
from pdserve_common.rpc.channels import rpc_errors
from pdserve_common.rpc.liveness import HEARTBEAT_S, keep_calling
from pdserve_common.types.kv import (
    KVLinkHello,
    KVLinkRequestMessage,
    KVLinkResponseMessage,
)
from pdserve_common.wire import kv_link_request_from_proto, kv_link_response_to_proto
from pdserve_engine.kv_transfer.connectors.endpoint import KVProducerEndpoint
from pdserve_engine.kv_transfer.connectors.links import KVLink
from pdserve_worker.kv_link.outgoing import HANDSHAKE_S, Outgoing

logger = logging.getLogger(__name__)

SERVICE_NAME = "pdserve.v1.KvTransferService"


class KvTransferServicer(kv_grpc.KvTransferServiceServicer):
    """Serves KvLink, sends heartbeats and ends what is overdue until `close`."""

    def __init__(self, connector: KVProducerEndpoint) -> None:
        """Must run inside the event loop."""
        self._connector = connector
        self._links: dict[Outgoing[KVLinkResponseMessage], None] = {}
        self._ticker = keep_calling(
            "kv_link", HEARTBEAT_S, connector.on_tick, costs="a heartbeat of KvLinks"
        )

    def add_to_server(self, server: grpc.aio.Server) -> None:
        kv_grpc.add_KvTransferServiceServicer_to_server(self, server)

    async def close(self) -> None:
        """End every link behind what is to be sent, so that decode hears of each session that is
        over; those that are not end with their links.
        """
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        for outgoing in list(self._links):
            outgoing.finish("shutdown")

    async def KvLink(
        self,
        request_iterator: AsyncIterator[kv_pb2.KvLinkRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[kv_pb2.KvLinkResponse]:
        async with rpc_errors(context):
            outgoing: Outgoing[KVLinkResponseMessage] = Outgoing()
            link = await self._accept(request_iterator, outgoing, context)
            self._links[outgoing] = None
            try:
                reader = defects.spawn(
                    "kv_link",
                    self._read(request_iterator, link, outgoing),
                    costs=f"the KvLink of {link.engine_id}",
                )
                try:
                    while (message := await outgoing.get()) is not None:
                        yield kv_link_response_to_proto(message)
                finally:
                    reader.cancel()
            finally:
                self._links.pop(outgoing, None)
                self._connector.link_lost(link, outgoing.closed_because or "stream ended")

    async def _accept(
        self,
        requests: AsyncIterator[kv_pb2.KvLinkRequest],
        outgoing: Outgoing[KVLinkResponseMessage],
        context: grpc.aio.ServicerContext,
    ) -> KVLink:
        try:
            first = await asyncio.wait_for(_next(requests), HANDSHAKE_S)
            hello = kv_link_request_from_proto(first)
            if not isinstance(hello, KVLinkHello):
                raise InvalidRequestError("the first message is not hello", field="message")
            return self._connector.accept_link(hello, outgoing)
        except KVTransferError as error:
            logger.warning("refused a KvLink: %s", error.message)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        except InvalidRequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except asyncio.TimeoutError:
            message = f"no hello within {HANDSHAKE_S:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, message)
        except StopAsyncIteration:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the stream ended before hello")
        raise AssertionError("abort raises")

    async def _read(
        self,
        requests: AsyncIterator[kv_pb2.KvLinkRequest],
        link: KVLink,
        outgoing: Outgoing[KVLinkResponseMessage],
    ) -> None:
        reason = "failed: see the log"  # a defect, unless one of the ends below comes
        try:
            async for request in requests:
                message: KVLinkRequestMessage = kv_link_request_from_proto(request)
                self._connector.on_message(link, message)
            reason = "closed by decode"
        except InvalidRequestError as error:
            reason = error.message
        except grpc.aio.AioRpcError as error:
            reason = error.details() or "stream broke"
        finally:
            outgoing.close(reason)


async def _next(requests: AsyncIterator[kv_pb2.KvLinkRequest]) -> kv_pb2.KvLinkRequest:
    """`anext` as a coroutine, which wait_for wants."""
    return await requests.__anext__()
