"""One attempt at a request: its legs, and what the end of one means for the other."""

import dataclasses
from typing import TYPE_CHECKING, Literal, Protocol

from pdserve_common.errors import NoWorkerError
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    ErrorCode,
)
from pdserve_router.requests.output.output_processor import RequestState
from pdserve_router.requests.records.request_spans import begin_attempt, end_attempt
from pdserve_router.workers.clients.legs import failure_of, has_failed, make_legs
from pdserve_router.workers.clients.listeners import OutputCallback, TokenCallback, no_token
from pdserve_router.workers.routing.route_chooser import Route
from pdserve_router.workers.worker import Worker

if TYPE_CHECKING:
    from pdserve_common.observability.tracing import Span

# How a handoff ends; values of a metric's label.
HandoffOutcome = Literal[
    "completed", "ended_at_prefill", "prefill_failed", "decode_failed", "aborted"
]


class AttemptOwner(Protocol):
    """The request that an attempt serves."""

    state: RequestState

    def accept(self, output: EngineCoreOutput, worker: Worker) -> bool:
        """Take an output's tokens. Returns False if that ended the request."""

    def on_done(self, output: EngineCoreOutput, *, outcome: HandoffOutcome) -> None:
        """This output is the end of the answer."""

    def on_failed(self, worker: Worker, error: EngineError) -> None:
        """A worker cannot go on."""

    def on_kv_lost(self, output: EngineCoreOutput) -> None:
        """Decode waits for a decision; the output has a `kv_lost`."""

    def on_defect(self) -> None:
        """This process is at fault."""


class Attempt:
    """A request, at one attempt, on one route. Both legs get it at once: prefill computes the
    prompt and the first token, decode pulls the KV blocks and goes on.
    """

    def __init__(self, request: EngineCoreRequest, route: Route, owner: AttemptOwner) -> None:
        self.request = request
        self.route = route
        # Prefill stays in here after it handed the request off: it may still hold the blocks.
        self.running: set[Worker] = set()
        # Tokens of this stream before this attempt.
        self.num_tokens_before = owner.state.num_new_tokens
        self._num_known = len(owner.state.token_ids)
        self._owner = owner
        # Decode waits for prefill; neither has said that prefill handed the request off.
        self._is_ticket = route.prefill is not None
        # Outputs of decode that wait until prefill has said what only prefill knows.
        self._early: list[EngineCoreOutput] = []
        self._span: Span | None = None

    def begin_span(self, parent: "Span", now_ns: int) -> None:
        """Call it before `send`: workers make children of it."""
        self._span = begin_attempt(
            parent,
            self.request,
            self.route,
            num_tokens=self._num_known,
            now_ns=now_ns,
        )
        self.request = dataclasses.replace(self.request, trace_headers=self._span.headers)

    def end_span(self, error: EngineError | None, now_ns: int, *, redrive_reason: str = "") -> None:
        """Does nothing if it has none, or that has ended."""
        if self._span is not None:
            end_attempt(self._span, error, now_ns, redrive_reason=redrive_reason)
            self._span = None

    def send(self) -> None:
        prefill, decode = self.route.prefill, self.route.decode
        if prefill is None:
            self._send(decode, self.request, self._on_decode_output, self._owner.state.take_token)
            return
        prefill_leg, decode_leg = make_legs(
            self.request, prefill=prefill, decode=decode, prefix_source=self.route.prefix_source
        )
        if self._send(prefill, prefill_leg, self._on_prefill_output):
            self._send(decode, decode_leg, self._on_decode_output, self._owner.state.take_token)
        else:
            # Nothing comes of a ticket, and an earlier attempt has no successor there.
            decode.abort(self.request.request_id)

    def abort(self, *, but: frozenset[Worker] = frozenset()) -> None:
        """End it on every worker. It says nothing any more; on the workers in `but` the next
        attempt takes its place.
        """
        for worker in self.route.workers:
            if worker in self.running and worker not in but:
                worker.abort(self.request.request_id)
        self.running.clear()

    def _send(
        self,
        worker: Worker,
        request: EngineCoreRequest,
        on_output: OutputCallback,
        take_token: TokenCallback = no_token,
    ) -> bool:
        """False if the worker takes nothing."""
        try:
            worker.add_request(request, on_output, self._owner.on_defect, take_token=take_token)
        except NoWorkerError as error:
            # What an earlier attempt may still have there has no successor.
            worker.abort(request.request_id)
            self._owner.on_failed(worker, error.to_engine_error())
            return False
        self.running.add(worker)
        return True

    def _on_prefill_output(self, output: EngineCoreOutput) -> None:
        prefill = self.route.prefill
        assert prefill is not None
        if not self._owner.accept(output, prefill) or not output.finished:
            return
        if has_failed(output) and not self._is_ticket:
            # Decode, which generates, has all of prefill's work already.
            self.running.discard(prefill)
        elif has_failed(output):
            self._fail_leg(prefill, output)
        elif output.kv_transfer_params is None:
            # The first token was the last: decode's ticket is void.
            self.running.discard(prefill)
            self._owner.on_done(output, outcome="ended_at_prefill")
        else:
            self._is_ticket = False
            self._take_early()

    def _take_early(self) -> None:
        early, self._early = self._early, []
        for held in early:
            if self.running:
                self._on_decode_output(held)

    def _on_decode_output(self, output: EngineCoreOutput) -> None:
        if self._is_early(output):
            self._early.append(output)
            return
        if output.kv_lost is not None:
            self._owner.on_kv_lost(output)
            return
        self._is_ticket = self._is_ticket and not output.new_token_ids
        if not self._owner.accept(output, self.route.decode) or not output.finished:
            return
        if self._is_void_ticket(output):
            self.running.discard(self.route.decode)
            self._early.append(output)
        elif has_failed(output):
            self._fail_leg(self.route.decode, output)
        else:
            # Decode is done, so prefill has nothing left to do either.
            self.running.clear()
            self._owner.on_done(output, outcome="completed")

    def _is_early(self, output: EngineCoreOutput) -> bool:
        """Only prefill has the logprobs of the prompt and of its first token, which decode repeats.
        What decode sends behind tokens that wait for prefill waits with them, but for a failure
        that brings none.
        """
        has_tokens = bool(output.new_token_ids)
        is_behind = bool(self._early) and not has_failed(output)
        is_first = (has_tokens or is_behind) and (
            len(self._owner.state.token_ids) == self._num_known
        )
        is_disaggregated = self.route.prefill is not None
        return is_first and is_disaggregated and self._owner.state.wants_logprobs

    def _is_void_ticket(self, output: EngineCoreOutput) -> bool:
        """Decode heard from prefill that the request ends there. Prefill's own output comes, or
        came before; if it is another one decode was wrong.
        """
        return self._is_ticket and _is_cancelled(output)

    def _fail_leg(self, worker: Worker, output: EngineCoreOutput) -> None:
        self.running.discard(worker)
        self._owner.on_failed(worker, failure_of(output, worker))


def _is_cancelled(output: EngineCoreOutput) -> bool:
    return output.error is not None and output.error.code is ErrorCode.CANCELLED
