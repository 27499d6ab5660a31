"""Files that are read again when they change: certificates that are renewed, keys that are revoked,
without a restart.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

Stamp = tuple[tuple[int, int, int] | None, ...]


class Followed(Generic[T]):
    """What `read` makes of some files. Looking whether they have changed costs microseconds."""

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        """Raises what `read` does: OSError or ValueError."""
        self._paths = tuple(paths)
        self._read = read
        # One tuple: threads that look at the same time see parts of one version.
        self._state = (self._stamp(), read())

    def get(self) -> T:
        """Return what the files say now, on any thread. If they cannot be read, that is logged once
        and what they said before stays.
        """
        stamp = self._stamp()
        before, value = self._state
        if stamp != before:
            try:
                value = self._read()
                logger.info("read %s again", ", ".join(self._paths))
            except (OSError, ValueError) as error:
                logger.error("%s; what was read before stays in use", error)
            # Older than what was read: a change meanwhile is seen the next time.
            self._state = (stamp, value)
        return value

    def _stamp(self) -> Stamp:
        return tuple(map(_stamp_of, self._paths))


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
