"""Keeps the writing of large answers off the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from pdserve_router.output_processor import RequestOutput

# Positions of logprobs that are written at once; each has up to 21 tokens, which take about 1 us
# each.
INLINE_POSITIONS = 128

R = TypeVar("R")


async def write_off_loop(output: RequestOutput, write: Callable[[], R]) -> R:
    """Return what `write` makes of `output`; in a thread if that takes long, so that the answers of
    others go on meanwhile.
    """
    if output.num_logprob_positions <= INLINE_POSITIONS:
        return write()
    return await asyncio.to_thread(write)
