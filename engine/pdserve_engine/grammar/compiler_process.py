"""The grammar compiler's process: reads and compiles what clients send, each in a fork of itself,
which has limits and whose death harms nobody.
"""

import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from pdserve_common.errors import InvalidRequestError
from pdserve_common.processes.calls import Answer, Call, Handlers
from pdserve_common.processes.connection import Connection, answer_calls
from pdserve_common.processes.lifecycle import confine, fork
from pdserve_common.structured import to_structural_tag
from pdserve_engine.grammar.messages import (
    CODEC,
    Compile,
    Compiled,
    CompiledLarge,
    Killed,
    LoadVocabulary,
    NotEnforced,
    Read,
    ReadConstraint,
    Refused,
    TimedOut,
    Unfinished,
)
from pdserve_engine.grammar.native import TokenizerInfo, compile_structural_tag

MAX_CPU_S = 2
MAX_WALL_S = 10.0
# Besides what the process has before it forks.
MAX_MEMORY_BYTES = 512 * 1024 * 1024
# A compiled grammar takes at most so much memory.
MAX_GRAMMAR_BYTES = 64 * 1024 * 1024
# A grammar that is sent takes at most this in memory, and as text, which has up to 40 times as
# many.
MAX_SMALL_BYTES = 256 * 1024
MAX_SENT_BYTES = 16 * 1024 * 1024
MAX_REASON_CHARS = 500
LOWEST_PRIORITY = 19

ResultT = TypeVar("ResultT")

# "[12:34:56] /project/cpp/file.cc:83: " before the library's messages.
_ORIGIN = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class _Compiler:
    _tokenizer_info: TokenizerInfo

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def load(self, call: LoadVocabulary) -> None:
        self._tokenizer_info = TokenizerInfo.deserialize(call.tokenizer_info)
        os.nice(LOWEST_PRIORITY)  # also what hands answers on: megabytes of them take their time

    def read(self, call: ReadConstraint) -> Read | NotEnforced | Unfinished:
        return self._in_fork(call, lambda: _read(call))

    def compile(self, call: Compile) -> Compiled | CompiledLarge | Unfinished:
        text = call.text.decode(errors="surrogatepass")
        return self._in_fork(call, lambda: _compile(text, self._tokenizer_info))

    def _in_fork(
        self, call: Call[ResultT | Unfinished], work: Callable[[], ResultT]
    ) -> ResultT | Unfinished:
        reader, writer = os.pipe()

        def work_in_fork() -> None:
            self._connection.close()
            os.close(reader)
            _confine()
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(Answer.of(work()).result)

        pid = fork(work_in_fork)
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            body = _read_all(pipe.fileno(), MAX_WALL_S)
        if body is None:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if body is None:
            return TimedOut(MAX_WALL_S)
        return _judge(call, os.waitstatus_to_exitcode(status), body)


_HANDLERS: Handlers[_Compiler] = dict(
    [
        LoadVocabulary.handled_by(_Compiler.load),
        ReadConstraint.handled_by(_Compiler.read),
        Compile.handled_by(_Compiler.compile),
    ]
)


def serve(connection: socket.socket) -> None:
    """Load a vocabulary, then serve calls in turn; return when the engine is gone."""
    answer_calls(Connection(connection, CODEC), _HANDLERS, _Compiler(connection))


def _judge(call: Call[ResultT | Unfinished], exit_code: int, body: bytes) -> ResultT | Unfinished:
    if exit_code == 0:
        return Answer(body).result_of(call)
    if exit_code == -signal.SIGXCPU:
        return Refused(f"it takes more than {MAX_CPU_S} s of CPU time to compile")
    if exit_code == -signal.SIGKILL:
        return Killed()
    return Refused("the compiler cannot cope with it")


def _read_all(
    fd: int, timeout_s: float, *, clock: Callable[[], float] = time.monotonic
) -> bytes | None:
    """Return what comes until the other end closes; None if that takes too long."""
    deadline = clock() + timeout_s
    body = bytearray()
    while (left_s := deadline - clock()) > 0 and select.select([fd], [], [], left_s)[0]:
        piece = os.read(fd, 1 << 20)
        if not piece:
            return bytes(body)
        body += piece
    return None


# ---- in the fork


def _read(call: ReadConstraint) -> Read | NotEnforced | Refused:
    try:
        tag = to_structural_tag(call.params, before=call.before)
    except InvalidRequestError as error:
        return NotEnforced(error.message, error.field)
    except MemoryError:
        return Refused(f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB to read")
    return Read(tag.text, tag.digest)


def _compile(text: str, tokenizer_info: TokenizerInfo) -> Compiled | CompiledLarge | Refused:
    try:
        grammar = compile_structural_tag(text, tokenizer_info)
    except MemoryError:
        return Refused(f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB to compile")
    except (RuntimeError, ValueError, TypeError) as error:
        return Refused(_reason(error))
    if grammar.num_bytes > MAX_GRAMMAR_BYTES:
        return Refused(
            f"compiled it has {grammar.num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} fit"
        )
    if grammar.num_bytes > MAX_SMALL_BYTES or len(sent := grammar.serialize()) > MAX_SENT_BYTES:
        return CompiledLarge()
    return Compiled(sent, grammar.first_mask_s)


def _reason(error: Exception) -> str:
    text = _ORIGIN.sub("", str(error)).strip()
    return " ".join(text.split())[:MAX_REASON_CHARS]


def _confine() -> None:
    # Grammars that are odd make the library write warnings, which would quote what clients sent.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    confine(MAX_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 1))
