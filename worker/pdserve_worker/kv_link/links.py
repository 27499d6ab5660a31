"""Carries the KvLinks of an engine's connectors: those that others dial, and those it dials."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from pdserve_common.rpc.channels import OpenChannel
from pdserve_engine.kv_transfer.connectors.endpoint import KVConsumerEndpoint, KVProducerEndpoint
from pdserve_worker.kv_link.client import KVLinkPool
from pdserve_worker.kv_link.service import SERVICE_NAME, KvTransferServicer
from pdserve_worker.process import Worker


def carry_links(worker: Worker, connectors: Iterable[object], open_channel: OpenChannel) -> None:
    """Serve and dial for all that have links, until the worker closes. Must run inside the event
    loop.
    """
    closers: list[Callable[[], Awaitable[None]]] = []
    for connector in connectors:
        if isinstance(connector, KVProducerEndpoint):
            servicer = KvTransferServicer(connector)
            worker.services[SERVICE_NAME] = servicer.add_to_server
            closers.append(servicer.close)
        elif isinstance(connector, KVConsumerEndpoint):
            closers.append(KVLinkPool(connector, open_channel=open_channel).close)

    async def close() -> None:
        await asyncio.gather(*(closer() for closer in closers))

    worker.close = close
