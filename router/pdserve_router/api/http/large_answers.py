"""Keeps the writing of large answers off the event loop."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from pdserve_router.requests.output.outputs import RequestOutput

# Positions of logprobs that are written at once; each has up to 21 tokens, which take about 1 us
# each.
INLINE_POSITIONS = 128

R = TypeVar("R")


async def write_off_loop(output: RequestOutput, write: Callable[[], R]) -> R:
    """Return what `write` makes of `output`; in a thread if that takes long, so that the answers of
    others go on meanwhile.
    """
    return await write_all_off_loop((output,), write)


async def write_all_off_loop(outputs: Iterable[RequestOutput], write: Callable[[], R]) -> R:
    """`write_off_loop` for several outputs that are written as one."""
    if sum(output.num_logprob_positions for output in outputs) <= INLINE_POSITIONS:
        return write()
    return await asyncio.to_thread(write)
