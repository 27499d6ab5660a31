"""The grammar compiler's process, as the engine sees it."""

import contextlib
import os
import socket
import subprocess

from pdserve_common import processes
from pdserve_engine.grammar.child import MAX_WALL_S
from pdserve_engine.grammar.messages import (
    READY,
    Answer,
    decode_answer,
    receive_frame,
    send_frame,
)

START_TIMEOUT_S = 60.0
# The process keeps its own limit; this is for one that is stopped.
ANSWER_TIMEOUT_S = MAX_WALL_S + 2.0
EXIT_TIMEOUT_S = 5.0


class CompilerProcess:
    """Started by the constructor, on a thread that lives as long: it ends with that thread."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = processes.spawn(
                "pdserve_engine.grammar",
                [str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # It forks, so it must have one thread.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def get_ready(self, tokenizer_info: str) -> None:
        """Wait for its start and give it the vocabulary. Raises OSError."""
        self._connection.settimeout(START_TIMEOUT_S)
        send_frame(self._connection, tokenizer_info.encode())
        if receive_frame(self._connection) != READY:
            raise ConnectionError("the grammar compiler did not start")

    def compile(self, text: str) -> Answer:
        """Raises OSError if it is gone or silent."""
        self._connection.settimeout(ANSWER_TIMEOUT_S)
        send_frame(self._connection, text.encode(errors="surrogatepass"))
        return decode_answer(receive_frame(self._connection))

    def kill(self) -> None:
        """End it now. Any thread: another one that waits for it hears of it.

        Where others take all of the processor it may take its time to die, at its priority: it is
        not waited for longer, and reaped with the start of another process.
        """
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S)

    def close(self) -> None:
        self.kill()
        self._connection.close()
