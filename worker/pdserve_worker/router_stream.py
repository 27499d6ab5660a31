"""One Attach stream as the worker sees it: written to, and watched for silence."""

import time
from collections.abc import Callable

import grpc
from google.protobuf.message import Message

from pdserve_common.errors import ClientTooSlowError, DeadlineExceededError, RequestAbortedError
from pdserve_common.rpc.liveness import HEARTBEAT_S, SILENCE_S, AwakeClock
from pdserve_worker.attached_router import AttachedRouter
from pdserve_worker.kv_cache_feed import KVCacheFeed

# Silence after which a router is taken for dead, and how long one write to it may take; while this
# process is awake.
ROUTER_TIMEOUT_S = SILENCE_S
WRITE_TIMEOUT_S = 10.0


class RouterStream:
    """The stream that a router has begun. Used on the event loop's thread only."""

    def __init__(
        self,
        attachment: AttachedRouter,
        context: grpc.aio.ServicerContext,
        *,
        kv_cache: KVCacheFeed | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.attachment = attachment
        # What the router is still to be told, if it wants that.
        self.kv_cache = kv_cache
        self.number = attachment.open_stream()
        self._context = context
        self._awake = AwakeClock(HEARTBEAT_S, clock=clock)
        self._last_heard = self._awake()
        # When the write under way began.
        self._write_began: float | None = None

    @property
    def is_current(self) -> bool:
        """False once the router has another one, or is forgotten."""
        return self.attachment.is_current(self.number)

    def note_heard(self) -> None:
        """The router has said something."""
        self._last_heard = self._awake()

    def tick(self) -> None:
        """Call it every HEARTBEAT_S. Raises DeadlineExceededError of a silent router and
        ClientTooSlowError of one that does not read.
        """
        self._awake.tick()
        now = self._awake()
        if now - self._last_heard > ROUTER_TIMEOUT_S:
            raise DeadlineExceededError(f"router has been silent for {ROUTER_TIMEOUT_S:g} s")
        if self._write_began is not None and now - self._write_began > WRITE_TIMEOUT_S:
            raise ClientTooSlowError(f"router has read nothing for {WRITE_TIMEOUT_S:g} s")

    async def write(self, message: Message) -> None:
        """As bounded as `tick` says. Raises RequestAbortedError if the stream broke."""
        self._write_began = self._awake()
        try:
            await self._context.write(message)
        except grpc.aio.InternalError:  # gRPC says nothing better of a stream that is gone
            raise RequestAbortedError("the stream broke") from None
        self._write_began = None
