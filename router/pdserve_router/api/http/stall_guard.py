"""Bounds how long a client may not read: writes block under flow control, and only the writer
notices.
"""

import asyncio
from collections.abc import Awaitable

from pdserve_common.errors import ClientTooSlowError


class StallGuard:
    """Interrupts its task when one write takes longer than the timeout. One timer for a stream
    instead of one for each write.
    """

    def __init__(self, timeout_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._write_began: float | None = None
        self._is_stalled = False
        self._timer = self._loop.call_later(timeout_s, self._check)

    def __enter__(self) -> "StallGuard":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._timer.cancel()

    async def write(self, writing: Awaitable[None]) -> None:
        """Await one write. Raises ClientTooSlowError if it takes too long."""
        self._write_began = self._loop.time()
        try:
            await writing
        except asyncio.CancelledError:
            if not self._is_stalled:
                raise
            raise ClientTooSlowError(f"the client read nothing for {self._timeout_s:g} s") from None
        finally:
            self._write_began = None

    def _check(self) -> None:
        now = self._loop.time()
        began = now if self._write_began is None else self._write_began
        left = began + self._timeout_s - now
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self._is_stalled = True
            self._task.cancel()
