"""What a worker has for each router: its requests, and what is on its way to it. All of it outlives
a broken stream for a while, so that the router can attach again and go on.
"""

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from pdserve_common.errors import PdserveError, RequestFailedError
from pdserve_common.observability import defects
from pdserve_common.rpc.liveness import sleep_awake
from pdserve_common.types.engine import EngineCoreOutputs, EngineCoreRequest
from pdserve_common.types.engine_client import NO_TENSORS, EngineClient, Tensors
from pdserve_worker.outbox import MAX_PENDING_BYTES, Outbox, size_of
from pdserve_worker.request_spans import RequestSpans

if TYPE_CHECKING:
    from pdserve_common.observability.tracing import Tracing

logger = logging.getLogger(__name__)

# How long a router whose stream broke keeps its requests, while this process is awake.
REATTACH_S = 5.0
# Frames that a router has not acknowledged take at most so much. A router that lacks older ones
# cannot resume.
MAX_KEPT_BYTES = MAX_PENDING_BYTES


class RequestAttempt(NamedTuple):
    """One request at one attempt."""

    request_id: str
    attempt: int


class Resume(NamedTuple):
    """What a router wants to go on with."""

    worker_epoch: str
    next_frame_seq: int
    requests: Collection[RequestAttempt]


class Frame(NamedTuple):
    """A message of outputs, numbered; `has_more` tells that the step has further ones."""

    seq: int
    step_seq: int
    outputs: EngineCoreOutputs
    has_more: bool
    num_bytes: int


class AttachedRouter:
    """One router. Used on the event loop's thread only."""

    def __init__(
        self, engine: EngineClient, router_id: str, tracing: "Tracing | None" = None
    ) -> None:
        self.router_id = router_id
        self._spans = RequestSpans(tracing, model=engine.info.model) if tracing else None
        self.outbox = Outbox(lambda request_id: self.abort_requests([request_id]))
        self.client_index = engine.register_client(self._on_outputs)
        self._engine = engine
        # Attempts of requests that have not ended.
        self._running: dict[str, int] = {}
        # The router's numbers of those.
        self.handles: dict[tuple[str, int], int] = {}
        # Sent and not acknowledged, or about to be sent; their numbers have no gap.
        self._frames: deque[Frame] = deque()
        self._num_kept_bytes = 0
        self._next_seq = 1
        self._next_to_send = 1
        # The stream in use; those with other numbers have nothing to say any more.
        self._stream = 0

    def open_stream(self) -> int:
        """Begin a stream and return its number."""
        self._stream += 1
        return self._stream

    def close_stream(self) -> None:
        """End the stream in use."""
        self._stream += 1
        self.outbox.wake()

    def is_current(self, stream: int) -> bool:
        return stream == self._stream

    # ---- requests

    def add_request(
        self,
        request: EngineCoreRequest,
        tensors: Tensors = NO_TENSORS,
        *,
        handle: int = 0,
    ) -> None:
        """Hand a validated request to the engine, with the `tensors` that it names; a higher
        attempt supersedes a lower one. `handle` is the router's number of it, if not 0. Raises a
        PdserveError; a lower attempt is aborted then, as the router has given it up.
        """
        running = self._running.get(request.request_id)
        self._trace(lambda spans: spans.begin(request))
        try:
            own = dataclasses.replace(request, client_index=self.client_index)
            self._engine.add_request(own, tensors)
        except PdserveError:
            self._trace(lambda spans: spans.refuse(request.request_id))
            if running is not None:
                self.abort_requests([request.request_id])
            raise
        if running is not None:
            self.handles.pop((request.request_id, running), None)
        self._running[request.request_id] = request.attempt
        if handle:
            self.handles[request.request_id, request.attempt] = handle

    def is_running(self, request_id: str, attempt: int) -> bool:
        """Does the request run at this attempt, or at a higher one?"""
        return self._running.get(request_id, -1) >= attempt

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_requests(self.client_index, request_ids)

    def end(self) -> None:
        """Abort the router's requests and forget it."""
        self.close_stream()
        self._engine.unregister_client(self.client_index)
        self._trace(RequestSpans.end_all)

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        try:
            self._take(outputs)
        except BaseException as error:  # other routers get theirs
            defects.record("attach", error, f"the stream of router {self.router_id}")
            self.outbox.fail(RequestFailedError("outputs were lost, see the worker's log"))
        self._trace(lambda spans: spans.take(outputs.outputs))

    def _take(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            if (
                output.finish_reason is not None
                and self._running.get(output.request_id) == output.attempt
            ):
                del self._running[output.request_id]
                self.handles.pop((output.request_id, output.attempt), None)
        self.outbox.put(outputs)

    def _trace(self, call: Callable[[RequestSpans], None]) -> None:
        if self._spans is not None:
            with defects.contained("tracing", "spans"):
                call(self._spans)

    # ---- frames

    def next_frames(
        self, stream: int, outputs: Sequence[EngineCoreOutputs], step_seq: int
    ) -> list[Frame]:
        """Number and keep what the outbox has given; return it behind what `stream` has not sent
        yet, or nothing if it is not the one in use.
        """
        for index, part in enumerate(outputs):
            self._keep(part, step_seq, has_more=index < len(outputs) - 1)
        if not self.is_current(stream):
            self.outbox.wake()  # the one in use may be waiting for what was just taken
            return []
        num_unsent = self._next_seq - self._next_to_send
        unsent = list(islice(self._frames, len(self._frames) - num_unsent, None))
        self._next_to_send = self._next_seq
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            self._forget_oldest()
        return unsent

    def acknowledge(self, next_frame_seq: int) -> None:
        """The router has every frame before this one."""
        while self._frames and self._frames[0].seq < next_frame_seq:
            self._forget_oldest()

    def _keep(self, outputs: EngineCoreOutputs, step_seq: int, *, has_more: bool) -> None:
        num_bytes = sum(size_of(output) for output in outputs.outputs)
        self._frames.append(Frame(self._next_seq, step_seq, outputs, has_more, num_bytes))
        self._num_kept_bytes += num_bytes
        self._next_seq += 1

    def _forget_oldest(self) -> None:
        self._num_kept_bytes -= self._frames.popleft().num_bytes

    # ---- resuming

    def can_resume(self, resume: Resume) -> bool:
        """Is every frame here that the router lacks?"""
        first_kept = self._next_seq - len(self._frames)
        has_frames = first_kept <= resume.next_frame_seq <= self._next_seq
        return has_frames and not self.outbox.has_lost_any

    def resume(self, resume: Resume) -> list[RequestAttempt]:
        """Go on from the router's next frame, abort what it does not list, and return which of the
        rest still runs here or has ended in what is about to be sent. It can_resume.
        """
        self.close_stream()
        self.acknowledge(resume.next_frame_seq)
        self._next_to_send = resume.next_frame_seq
        known = self._running.items() | self.outbox.ended() | self._ended()
        running = self._running.items()
        self.abort_requests([r for r, a in running if (r, a) not in resume.requests])
        return [request for request in resume.requests if request in known]

    def _ended(self) -> set[tuple[str, int]]:
        outputs = [output for frame in self._frames for output in frame.outputs.outputs]
        return {(output.request_id, output.attempt) for output in outputs if output.finished}


class AttachedRouters:
    """All routers of a worker."""

    def __init__(
        self,
        engine: EngineClient,
        tracing: "Tracing | None" = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._tracing = tracing
        self._clock = clock
        self._by_router: dict[tuple[str, str], AttachedRouter] = {}
        self._expiries: dict[AttachedRouter, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Those whose stream broke count: they come back with their requests."""
        return len(self._by_router)

    def attach(
        self, router: tuple[str, str], resume: Resume | None
    ) -> tuple[AttachedRouter, list[RequestAttempt]]:
        """Return what there is of this router, given by its name and process start, if it can and
        wants to resume that, or a new attachment; and the requests it adopts.
        """
        attachment = self._by_router.get(router)
        if attachment is not None:
            if resume is not None and self._can_resume(attachment, resume):
                self._cancel_expiry(attachment)
                return attachment, attachment.resume(resume)
            self.end(attachment)
        attachment = self._by_router[router] = AttachedRouter(
            self._engine, router[0], self._tracing
        )
        return attachment, []

    def keep(self, attachment: AttachedRouter) -> None:
        """The stream broke: leave the router REATTACH_S to come back."""
        attachment.close_stream()
        self._expiries[attachment] = defects.spawn(
            "attach", self._expire(attachment), costs=f"the end of router {attachment.router_id}"
        )

    def end(self, attachment: AttachedRouter) -> None:
        """Abort a router's requests and forget it."""
        self._cancel_expiry(attachment)
        self._by_router = {k: a for k, a in self._by_router.items() if a is not attachment}
        attachment.end()

    def wake_all(self) -> None:
        """Have every stream look what has changed."""
        for attachment in self._by_router.values():
            attachment.outbox.wake()

    def end_broken(self) -> None:
        """Wait for nobody any more."""
        for attachment in list(self._expiries):
            self.end(attachment)

    def _can_resume(self, attachment: AttachedRouter, resume: Resume) -> bool:
        is_ours = resume.worker_epoch == self._engine.info.epoch
        return is_ours and attachment.can_resume(resume)

    async def _expire(self, attachment: AttachedRouter) -> None:
        await sleep_awake(REATTACH_S, clock=self._clock)
        del self._expiries[attachment]
        logger.warning("router %s did not come back: its requests end", attachment.router_id)
        self.end(attachment)

    def _cancel_expiry(self, attachment: AttachedRouter) -> None:
        expiry = self._expiries.pop(attachment, None)
        if expiry is not None:
            expiry.cancel()
