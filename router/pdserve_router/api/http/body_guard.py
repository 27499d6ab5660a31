"""Bounds what HTTP bodies take before their last byte is there: few large ones come at a time."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve_common.errors import OverloadedError
from pdserve_common.limits.receive_slots import RETRY_AFTER_MS, ReceiveSlot, ReceiveSlots

# A body that is not larger needs no slot.
FREE_BYTES = 64 * 1024


class BodyGuard:
    """Reads large bodies only in a slot of their own. While they wait for one their connections
    are not read. Without it, or when others need it, reading raises OverloadedError.
    """

    def __init__(self, app: ASGIApp, slots: ReceiveSlots) -> None:
        self._app = app
        self._slots = slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(scope, receive, self._slots)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.end()


class _Body:
    def __init__(self, scope: Scope, receive: Receive, slots: ReceiveSlots) -> None:
        self._connection = "{}:{}".format(*(scope.get("client") or ("", 0)))
        self._receive = receive
        self._slots = slots
        self._slot: ReceiveSlot | None = None
        self._num_bytes = 0

    async def receive(self) -> Message:
        message = await (self._receive() if self._slot is None else self._receive_in(self._slot))
        self._num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            self.end()
        elif self._num_bytes > FREE_BYTES and self._slot is None:
            self._slot = await self._slots.take(self._connection)
        return message

    async def _receive_in(self, slot: ReceiveSlot) -> Message:
        receiving = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((receiving, slot.revoked), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                return receiving.result()
        finally:
            receiving.cancel()
        self.end()
        raise OverloadedError(
            "the body was slow to come and others wait", retry_after_ms=RETRY_AFTER_MS
        )

    def end(self) -> None:
        """The body is there, or nobody wants it."""
        if self._slot is not None:
            self._slot.give_back()
            self._slot = None
