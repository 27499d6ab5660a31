"""Several live requests, read as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from pdserve_router.requests.live_request import LiveRequest
from pdserve_router.requests.output.outputs import RequestOutput

MergedOutputs = AsyncGenerator[tuple[int, RequestOutput], None]


async def merged_outputs(lives: Sequence[LiveRequest]) -> MergedOutputs:
    """Yield each output with its request's place in `lives`, as they come, until all have ended.

    While nobody reads, outputs merge in the requests' own collectors. Close it to leave early.
    """
    if len(lives) == 1:
        async for output in lives[0]:
            yield 0, output
        return
    outputs: asyncio.Queue[tuple[int, RequestOutput]] = asyncio.Queue(maxsize=len(lives))

    async def read(index: int, live: LiveRequest) -> None:
        async for output in live:
            await outputs.put((index, output))

    readers = [asyncio.create_task(read(index, live)) for index, live in enumerate(lives)]
    num_running = len(lives)
    try:
        while num_running:
            index, output = await outputs.get()
            num_running -= output.finished
            yield index, output
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
