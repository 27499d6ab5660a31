"""What waits to be written to one attached router: merged while the router is slow, bounded in
bytes.
"""

import asyncio
import dataclasses
from collections.abc import Iterable, Iterator

from pdserve_common.engine_types import EngineCoreOutput, EngineCoreOutputs, LogprobsLists
from pdserve_common.errors import OverloadedError

MAX_PENDING_BYTES = 16 * 1024 * 1024
# A frame stays well below gRPC's message limit and does not hold up the frames behind it.
MAX_FRAME_BYTES = 1024 * 1024
# Rough size of an output without its tokens, of a token and of a logprob, on the wire.
OUTPUT_BYTES = 96
TOKEN_BYTES = 5
LOGPROB_BYTES = 9

EMPTY = EngineCoreOutputs()


class Outbox:
    """Outputs not written yet. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._pending: dict[str, EngineCoreOutput] = {}
        self._rest = EMPTY
        self._num_bytes = 0
        self._event = asyncio.Event()

    @property
    def is_overfull(self) -> bool:
        """Has the router let too much pile up?"""
        return self._num_bytes > MAX_PENDING_BYTES

    def put(self, outputs: EngineCoreOutputs) -> None:
        """Add a step's outputs; those of a request that is still waiting here are merged."""
        for output in outputs.outputs:
            self._put(output)
        self._rest = dataclasses.replace(
            outputs, outputs=(), engine_dead=outputs.engine_dead or self._rest.engine_dead
        )
        self._event.set()

    def ended(self) -> set[tuple[str, int]]:
        """Return the requests, with their attempts, whose end is waiting here."""
        return {(o.request_id, o.attempt) for o in self._pending.values() if o.finished}

    def wake(self) -> None:
        """Let a waiting `get` return, with nothing if there is nothing."""
        self._event.set()

    async def get(self, timeout_s: float) -> list[EngineCoreOutputs]:
        """Return what is pending as frames, or nothing after `timeout_s`.

        Raises OverloadedError if the router has let too much pile up.
        """
        # With a timeout of 0 wait_for gives up before it looks, on Python 3.11 and older.
        if not self._event.is_set():
            try:
                await asyncio.wait_for(self._event.wait(), timeout_s)
            except asyncio.TimeoutError:
                return []
        if self.is_overfull:
            raise OverloadedError(
                f"router is {self._num_bytes} bytes behind, at most {MAX_PENDING_BYTES}"
            )
        self._event.clear()
        pending, self._pending, self._num_bytes = self._pending, {}, 0
        frames = [
            dataclasses.replace(self._rest, outputs=tuple(frame))
            for frame in _frames(pending.values())
        ]
        rest, self._rest = self._rest, EMPTY
        return frames or ([] if rest is EMPTY else [rest])

    def _put(self, output: EngineCoreOutput) -> None:
        """Of two attempts of a request only the higher one is wanted any more (rule K7)."""
        waiting = self._pending.pop(output.request_id, None)
        if waiting is not None and waiting.attempt < output.attempt:
            self._num_bytes -= size_of(waiting)
            waiting = None
        if waiting is None:
            self._pending[output.request_id] = output
        elif waiting.attempt == output.attempt:
            self._pending[output.request_id] = merge(waiting, output)
        else:
            self._pending[output.request_id] = waiting
            return
        self._num_bytes += size_of(output)


def _join(first: LogprobsLists | None, second: LogprobsLists | None) -> LogprobsLists | None:
    if first is None or second is None:
        return first or second
    return first + second


def merge(first: EngineCoreOutput, second: EngineCoreOutput) -> EngineCoreOutput:
    """Return one output that says what two consecutive ones of a request said."""
    return dataclasses.replace(
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
    )


def size_of(output: EngineCoreOutput) -> int:
    """Return its bytes on the wire, roughly."""
    num_logprobs = sum(
        len(values)
        for logprobs in (output.new_logprobs, output.new_prompt_logprobs)
        if logprobs is not None
        for values in logprobs.logprobs
    )
    return OUTPUT_BYTES + TOKEN_BYTES * len(output.new_token_ids) + LOGPROB_BYTES * num_logprobs


def _frames(outputs: Iterable[EngineCoreOutput]) -> Iterator[list[EngineCoreOutput]]:
    frame: list[EngineCoreOutput] = []
    num_bytes = 0
    for output in outputs:
        size = size_of(output)
        if frame and num_bytes + size > MAX_FRAME_BYTES:
            yield frame
            frame, num_bytes = [], 0
        frame.append(output)
        num_bytes += size
    if frame:
        yield frame
