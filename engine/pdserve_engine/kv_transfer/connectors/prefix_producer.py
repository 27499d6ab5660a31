"""Lends blocks of this worker's prefix cache to a worker that is to compute what comes after them.
The owner is a decode worker here, and the reader a prefill worker.

The scheduler looks for the blocks and holds them; what it found is the session's until the reader
has read it.
"""

import dataclasses

from pdserve_common.types.engine import EngineCoreRequest
from pdserve_common.types.kv import CancelRequest, PrefixRequest, SessionEndReason
from pdserve_engine.kv_transfer.base import ConnectorContext
from pdserve_engine.kv_transfer.connectors.links import KVLink
from pdserve_engine.kv_transfer.connectors.owner import KindMessage, OwnerConnector
from pdserve_engine.kv_transfer.ports import PrefixWanted
from pdserve_engine.kv_transfer.protocol.session import Session
from pdserve_engine.kv_transfer.protocol.transitions import ProducerEvent, ProducerState

# The reader gives a prefix up much sooner, and says so: this is for one that says nothing.
HOLD_S = 30.0
# Prefixes that are looked for or lent at once.
MAX_PREFIXES = 64
HASH_BYTES = 32


class PrefixProducer(OwnerConnector):
    """The owner's connector of prefixes, a PrefixProducerPort."""

    def __init__(self, context: ConnectorContext, *, num_blocks: int) -> None:
        """No prefix can have more than `num_blocks` blocks."""
        super().__init__(dataclasses.replace(context, session_timeout_s=HOLD_S))
        self._num_blocks = num_blocks

    # ---- the event loop's thread

    def on_dispatched(self, request: EngineCoreRequest) -> None:
        """Nothing: the reader dials."""

    # ---- the engine thread

    def lend(self, wanted: PrefixWanted, block_ids: tuple[list[int], ...]) -> bool:
        with self._lock:
            session = self._machine.get(wanted.key.request_id)
            if (
                session is None
                or session.key != wanted.key
                or session.state is not ProducerState.LOOKING_UP
            ):
                return False
            if not block_ids[0]:
                return self._machine.advance(session, ProducerEvent.NOT_FOUND)
            assert session.link is not None, "a session that is looked up for came over a link"
            self._machine.give_id(session, session.link)
            num_blocks = len(block_ids[0])
            session.limit_to(num_blocks, self._identity.layout.block_size)
            session.add_blocks(block_ids, num_blocks)
            return self._machine.advance(session, ProducerEvent.FOUND)

    # ---- under the lock

    def _take_message_of_kind(
        self, link: KVLink, session: Session | None, message: KindMessage
    ) -> bool:
        if not isinstance(message, PrefixRequest) or not self._makes_sense(message):
            return False
        old = self._machine.get(message.request_id)
        if old is not None:
            if old.key.attempt >= message.attempt:
                return False
            self._machine.advance(old, ProducerEvent.FINISHED, SessionEndReason.SUPERSEDED)
        session = self._machine.add_prefix(link, message)
        if len(self._machine) > MAX_PREFIXES:
            return self._machine.advance(session, ProducerEvent.NOT_FOUND)
        self._machine.tell(PrefixWanted(session.key, message.first_block, message.block_hashes))
        return True

    def _makes_sense(self, message: PrefixRequest) -> bool:
        num_blocks = message.first_block + len(message.block_hashes)
        has_hashes = all(len(block_hash) == HASH_BYTES for block_hash in message.block_hashes)
        return bool(message.block_hashes) and has_hashes and num_blocks <= self._num_blocks

    def _on_unknown_cancel(self, link: KVLink, message: CancelRequest) -> bool:
        return False
