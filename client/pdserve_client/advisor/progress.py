"""How far a long command is, on a terminal."""

import math
import os
import sys
import time

BAR_WIDTH = 20
# Between two changes of the line.
EVERY_S = 0.1


class Progress:
    """One line on a terminal that changes, nothing elsewhere; gone at the end."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown_at = -math.inf
        self._place, self._num = 0, 1

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def begin(self, text: str, place: int, num: int) -> None:
        """The next of `num` parts begins."""
        self._place, self._num = place, num
        self.at(0.0, text)

    def at(self, share: float, text: str) -> None:
        """Show how many parts are done, and how far a run of this one is."""
        full = round(BAR_WIDTH * self._place / self._num)
        bar = "#" * full + "-" * (BAR_WIDTH - full)
        self.say(f"[{bar}] {text}, {share:.0%}")

    def say(self, text: str) -> None:
        now = time.monotonic()
        if self._is_terminal and now - self._shown_at > EVERY_S:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            print(f"\r\x1b[K{text[: width - 1]}", end="", file=sys.stderr, flush=True)
            self._shown_at = now
