"""What happened in a simulation, in order: to be read, and to be compared with another run."""

import hashlib
import logging
from collections.abc import Callable


class Journal(logging.Handler):
    """One line for each event, with its virtual time and process. It takes what the product logs as
    well.
    """

    def __init__(self, clock: Callable[[], float], who: Callable[[], str]) -> None:
        """`who` names the process that runs."""
        super().__init__(logging.INFO)
        self._clock, self._who = clock, who
        self._lines: list[str] = []

    def note(self, text: str, who: str = "") -> None:
        """`who` did it, or the process that runs."""
        self._lines.append(f"{self._clock():12.6f} {who or self._who():>7} {text}")

    def emit(self, record: logging.LogRecord) -> None:
        self.note(f"{record.levelname.lower()}: {record.getMessage()}")

    @property
    def digest(self) -> str:
        """The same for two runs in which the same has happened."""
        return hashlib.sha256("\n".join(self._lines).encode()).hexdigest()

    @property
    def lines(self) -> list[str]:
        return self._lines
