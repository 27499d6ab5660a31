"""What waits to be written to one attached router: merged while the router is slow, and bounded in
bytes. When they do not fit the largest request is cut off, so that others' go on.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from pdserve_common.errors import OverloadedError, PdserveError
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    LogprobsLists,
)

MAX_PENDING_BYTES = 16 * 1024 * 1024
# One request's output has at most so much: it has to fit into one message, by this rough measure.
MAX_OUTPUT_BYTES = 8 * 1024 * 1024
# A frame stays well below gRPC's message limit and does not hold up the frames behind it.
MAX_FRAME_BYTES = 1024 * 1024
# Rough size of an output without its tokens, of a token, of an expert's id, of a logprob and of a
# pooled number, on the wire.
OUTPUT_BYTES = 96
TOKEN_BYTES = 5
EXPERT_BYTES = 2
LOGPROB_BYTES = 9
POOLED_BYTES = 4

EMPTY = EngineCoreOutputs()


class _Waiting(NamedTuple):
    output: EngineCoreOutput
    num_bytes: int


class Outbox:
    """Outputs not written yet. Used on the event loop's thread only."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        """`abort` has the engine end a request that is cut off."""
        self._abort = abort
        self._pending: dict[str, _Waiting] = {}
        # Attempts that have got their end here, and are still to get it from the engine.
        self._cut_off: dict[str, int] = {}
        self._rest = EMPTY
        self._num_bytes = 0
        self._failure: PdserveError | None = None
        self._event = asyncio.Event()

    @property
    def is_overfull(self) -> bool:
        """Has the router let too much pile up, though no request has much of it?"""
        return self._num_bytes > MAX_PENDING_BYTES

    @property
    def has_lost_any(self) -> bool:
        """Can the router not be told all any more?"""
        return self.is_overfull or self._failure is not None

    def fail(self, error: PdserveError) -> None:
        """Outputs have been lost: have `get` raise this."""
        self._failure = error
        self._event.set()

    def put(self, outputs: EngineCoreOutputs) -> None:
        """Add a step's outputs; those of a request that is still waiting here are merged."""
        for output in outputs.outputs:
            self._put(output)
        while self.is_overfull and self._cut_off_largest():
            pass
        rest = self._rest
        self._rest = dataclasses.replace(
            outputs,
            outputs=(),
            scheduler_stats=outputs.scheduler_stats or rest.scheduler_stats,
            finished_requests=outputs.finished_requests | rest.finished_requests,
            engine_dead=outputs.engine_dead or rest.engine_dead,
            wave_complete=_later(rest.wave_complete, outputs.wave_complete),
            start_wave=_later(rest.start_wave, outputs.start_wave),
        )
        self._event.set()

    def ended(self) -> set[tuple[str, int]]:
        """Return the requests, with their attempts, whose end is waiting here."""
        outputs = [waiting.output for waiting in self._pending.values()]
        return {(o.request_id, o.attempt) for o in outputs if o.finished}

    def wake(self) -> None:
        """Let a waiting `get` return, with nothing if there is nothing."""
        self._event.set()

    async def get(self, timeout_s: float) -> list[EngineCoreOutputs]:
        """Return what is pending as frames, or nothing after `timeout_s`.

        Raises OverloadedError if the router has let too much pile up, and what `fail` got.
        """
        # With a timeout of 0 wait_for gives up before it looks, on Python 3.11 and older.
        if not self._event.is_set():
            try:
                await asyncio.wait_for(self._event.wait(), timeout_s)
            except asyncio.TimeoutError:
                return []
        if self._failure is not None:
            raise type(self._failure)(self._failure.message)
        if self.is_overfull:
            raise OverloadedError(
                f"router is {self._num_bytes} bytes behind, at most {MAX_PENDING_BYTES}"
            )
        self._event.clear()
        pending, self._pending, self._num_bytes = self._pending, {}, 0
        rest, self._rest = self._rest, EMPTY
        frames = [tuple(frame) for frame in _frames(pending.values())]
        if not frames:
            return [] if rest is EMPTY else [rest]
        # What ends requests, or the engine, comes behind all outputs.
        before = dataclasses.replace(rest, finished_requests=frozenset(), engine_dead=None)
        return [
            *(dataclasses.replace(before, outputs=frame) for frame in frames[:-1]),
            dataclasses.replace(rest, outputs=frames[-1]),
        ]

    def _put(self, output: EngineCoreOutput) -> None:
        """Of two attempts of a request only the higher one is wanted any more (rule K7)."""
        request_id, num_bytes = output.request_id, size_of(output)
        if self._cut_off and self._cut_off.get(request_id) == output.attempt:
            if output.finished:
                del self._cut_off[request_id]
            return
        before = self._pending.get(request_id)
        if before is not None and before.output.attempt > output.attempt:
            return
        if before is not None and before.output.attempt == output.attempt:
            output = merge(before.output, output)
            num_bytes += before.num_bytes
        self._replace(output, num_bytes)
        if num_bytes > MAX_OUTPUT_BYTES:
            self._cut(request_id)

    def _replace(self, output: EngineCoreOutput, num_bytes: int) -> None:
        """Have this, and nothing else, wait of its request; behind the others."""
        before = self._pending.pop(output.request_id, None)
        self._num_bytes += num_bytes - (before.num_bytes if before is not None else 0)
        self._pending[output.request_id] = _Waiting(output, num_bytes)

    def _cut_off_largest(self) -> bool:
        """Cut off the request of which most waits; False if it has nothing but its end."""
        request_id = max(self._pending, key=lambda name: self._pending[name].num_bytes)
        is_large = self._pending[request_id].num_bytes > OUTPUT_BYTES
        if is_large:
            self._cut(request_id)
        return is_large

    def _cut(self, request_id: str) -> None:
        """Have a request end with an OverloadedError instead of what waits of it."""
        output, num_bytes = self._pending[request_id]
        error = OverloadedError(
            f"the router is {self._num_bytes} bytes behind, {num_bytes} of them are this request's"
        )
        end = EngineCoreOutput(
            request_id=request_id,
            attempt=output.attempt,
            finish_reason=FinishReason.ERROR,
            error=error.to_engine_error(),
        )
        self._replace(end, OUTPUT_BYTES)
        if not output.finished:
            self._cut_off[request_id] = output.attempt
            self._abort(request_id)


def _later(wave: int | None, other: int | None) -> int | None:
    """Return the later of two waves; None: there is none."""
    return max((each for each in (wave, other) if each is not None), default=None)


def _join(first: LogprobsLists | None, second: LogprobsLists | None) -> LogprobsLists | None:
    if first is None or second is None:
        return first or second
    return first + second


def merge(first: EngineCoreOutput, second: EngineCoreOutput) -> EngineCoreOutput:
    """Return one output that says what two consecutive ones of a request said."""
    return msgspec.structs.replace(
        second,
        new_token_ids=first.new_token_ids + second.new_token_ids,
        first_token_index=first.first_token_index,
        new_logprobs=_join(first.new_logprobs, second.new_logprobs),
        new_prompt_logprobs=_join(first.new_prompt_logprobs, second.new_prompt_logprobs),
        events=first.events + second.events,
        prefill_stats=first.prefill_stats or second.prefill_stats,
        kv_transfer_stats=first.kv_transfer_stats or second.kv_transfer_stats,
        num_nans_in_logits=first.num_nans_in_logits + second.num_nans_in_logits,
        kv_lost=first.kv_lost or second.kv_lost,
        draft_stats=first.draft_stats + second.draft_stats,
        routed_experts=first.routed_experts + second.routed_experts,
    )


def size_of(output: EngineCoreOutput) -> int:
    """Return its bytes on the wire, roughly."""
    num_bytes = OUTPUT_BYTES + TOKEN_BYTES * len(output.new_token_ids)
    num_bytes += EXPERT_BYTES * len(output.routed_experts)
    for logprobs in (output.new_logprobs, output.new_prompt_logprobs):
        if logprobs is not None:
            num_bytes += LOGPROB_BYTES * sum(map(len, logprobs.logprobs))
    if output.pooling_output is not None:
        num_bytes += POOLED_BYTES * len(output.pooling_output)
    return num_bytes


def _frames(pending: Iterable[_Waiting]) -> Iterator[list[EngineCoreOutput]]:
    frame: list[EngineCoreOutput] = []
    num_bytes = 0
    for output, size in pending:
        if frame and num_bytes + size > MAX_FRAME_BYTES:
            yield frame
            frame, num_bytes = [], 0
        frame.append(output)
        num_bytes += size
    if frame:
        yield frame
