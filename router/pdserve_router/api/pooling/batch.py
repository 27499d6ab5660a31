"""The inputs of one request for vectors: some at a time on workers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pdserve_common.errors import RequestAbortedError
from pdserve_router.api.merged_outputs import MergedOutputs
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.live_request import LiveRequest
from pdserve_router.requests.output.outputs import RequestOutput

# So many inputs of one request run at once. Others' inputs come between those that wait for them.
MAX_AT_ONCE = 64

Follow = Callable[[ProcessedInput, LiveRequest], Awaitable[LiveRequest]]
_Item = tuple[int, RequestOutput] | Exception


class PoolingBatch:
    """Each input that waits follows one that has ended, by `Router.follow`."""

    def __init__(
        self, begun: Sequence[LiveRequest], rest: Sequence[ProcessedInput], follow: Follow
    ) -> None:
        self._begun = begun
        self._rest = iter(enumerate(rest, len(begun)))
        self._num_inputs = len(begun) + len(rest)
        self._follow = follow
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        # Guards whose turn it is to follow: many may end at once.
        self._turns = asyncio.Lock()

    async def outputs(self) -> MergedOutputs:
        """Yield each input's place and its one output, as they come. Raises what `follow` does.
        Close it to leave early: that ends what is on workers and what waits for its turn.
        """
        readers = [
            asyncio.create_task(self._read(index, live)) for index, live in enumerate(self._begun)
        ]
        try:
            for _ in range(self._num_inputs):
                item = await self._items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    def abort(self) -> None:
        """The client is gone: `outputs` raises, and so ends what is on workers or waits for one."""
        self._items.put_nowait(RequestAbortedError("the client cancelled the request"))

    async def _read(self, index: int, live: LiveRequest) -> None:
        try:
            while True:
                with live:
                    output = await anext(live)
                self._items.put_nowait((index, output))
                # One failure is the request's: nothing follows it.
                following = next(self._rest, None) if output.error is None else None
                if following is None:
                    return
                index, processed = following
                async with self._turns:
                    await asyncio.sleep(0)  # others' events come between two of many
                live = await self._follow(processed, self._begun[0])
        except Exception as error:  # it is whose that reads the outputs
            self._items.put_nowait(error)
