"""Files that are read again when they change: certificates that are renewed, keys that are revoked,
without a restart.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

Stamp = tuple[tuple[int, ...] | None, ...]
RETRY_S = 1.0


class Followed(Generic[T]):
    """What `read` makes of some files. Looking whether they have changed costs microseconds."""

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        """Raises what `read` does: OSError or ValueError."""
        self._paths = tuple(paths)
        self._read = read
        self._reading = asyncio.Lock()
        # One tuple: threads that look at the same time see parts of one version.
        self._state = (self._stamp(), read(), math.inf)

    def get(self) -> T:
        """Return what the files say now, on any thread. If they cannot be read, that is logged once
        and what they said before stays, until one of the attempts that follow each second succeeds.
        """
        stamp, now = self._stamp(), time.monotonic()
        before, value, retry_at = self._state
        if stamp != before or now >= retry_at:
            try:
                value, retry_at = self._read(), math.inf
                logger.info("read %s again", ", ".join(self._paths))
            except (OSError, ValueError) as error:
                retry_at = now + RETRY_S
                if stamp != before:
                    logger.error("%s; what was read before stays in use", error)
            # Older than what was read: a change meanwhile is seen the next time.
            self._state = (stamp, value, retry_at)
        return value

    async def get_off_loop(self) -> T:
        """`get` for an event loop, which goes on while files that have changed are read: who asks
        meanwhile waits for that as well.
        """
        stamp, _, retry_at = self._state
        if self._stamp() == stamp and time.monotonic() < retry_at:
            return self.last
        async with self._reading:
            return await asyncio.to_thread(self.get)

    @property
    def last(self) -> T:
        """What the files said when somebody asked last."""
        return self._state[1]

    def _stamp(self) -> Stamp:
        return tuple(map(_stamp_of, self._paths))


def _stamp_of(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    # ctime: of a file whose permissions were corrected nothing else changes.
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
