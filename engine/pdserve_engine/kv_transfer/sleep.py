"""What of the handoff sleeps with the KV pool: its registration, and the links that tell of it."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pdserve_common.errors import KVTransferError
from pdserve_engine.kv_transfer.base import RankTransport
from pdserve_engine.kv_transfer.connectors.connector import Connector
from pdserve_engine.kv_transfer.transport.sharded_transport import ShardedTransport

logger = logging.getLogger(__name__)


class SleepingTransfer:
    """Deregisters a worker's pool, so that its memory can be given back, and registers it anew. On
    the engine thread, while no session is open and no block is held.
    """

    def __init__(
        self,
        transport: ShardedTransport,
        connectors: Sequence[Connector[Any]],
        *,
        open_ranks: Callable[[], Sequence[RankTransport]],
        shares_memory: bool,
    ) -> None:
        """`open_ranks` does what `Executor.open_transports` does. `shares_memory`: peers of this
        machine may open the pool's memory in their processes.
        """
        self._transport = transport
        self._connectors = connectors
        self._open_ranks = open_ranks
        self._shares_memory = shares_memory
        self._is_suspended = False

    def suspend(self) -> bool:
        """End all links and deregister the pool. No peer is waited for: what one reads from then on
        fails there. Return False, and do nothing, if the memory has to stay: UCX keeps what it has
        opened by CUDA IPC until its process ends, and such memory must not be freed before.
        """
        if self._shares_memory and self._transport.has_had_peers:
            logger.warning("the KV pool keeps its memory: peers may have it open by CUDA IPC")
            return False
        for connector in self._connectors:
            connector.suspend("asleep")
        self._transport.suspend()
        self._is_suspended = True
        return True

    def resume(self) -> None:
        """Register the pool, whose memory is back, and let links come up; no-op if it is not
        suspended. Raises KVTransferError, and then the worker cannot go on.
        """
        if not self._is_suspended:
            return
        try:
            ranks = self._open_ranks()
        except KVTransferError as error:
            self._transport.fail(f"the KV pool cannot be registered again: {error.message}")
            raise
        self._transport.resume(ranks)
        self._is_suspended = False
        for connector in self._connectors:
            connector.resume()
