"""The grammar compiler's process, as the engine sees it."""

import os
from typing import TypeVar

from pdserve_common.processes.calls import Call
from pdserve_common.processes.child import ChildProcess, start
from pdserve_common.processes.connection import Connection
from pdserve_engine.grammar.compiler_process import MAX_WALL_S
from pdserve_engine.grammar.messages import CODEC, LoadVocabulary

START_TIMEOUT_S = 60.0
# The process keeps its own limit; this is for one that is stopped.
ANSWER_TIMEOUT_S = MAX_WALL_S + 2.0

ResultT = TypeVar("ResultT")


class CompilerProcess(ChildProcess):
    """Started by the constructor, on a thread that lives as long: it ends with that thread."""

    def __init__(self) -> None:
        # It forks, so it must have one thread.
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        super().__init__("the grammar compiler", *start("pdserve_engine.grammar", env=env))
        self._connection = Connection(self.sockets[0], CODEC)

    def get_ready(self, tokenizer_info: str) -> None:
        """Wait for its start and give it the vocabulary. Raises OSError."""
        self._connection.call(LoadVocabulary(tokenizer_info), START_TIMEOUT_S)

    def ask(self, call: Call[ResultT]) -> ResultT:
        """Raises OSError if it is gone or silent."""
        return self._connection.call(call, ANSWER_TIMEOUT_S)
