"""What crosses between an engine and its grammar compiler, and its encoding.

A frame is the length of its body and the body. To the compiler these are texts, the tokenizer info
first; from it, READY and then an answer to each text. Both ends are one build on one machine.
"""

import socket
import struct

import msgspec

READY = b"ready"
# A vocabulary of 256,000 tokens takes 10 MB, a grammar at most MAX_SENT_BYTES.
MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct("!I")


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """A CompiledGrammar, serialized, and what its first mask took."""

    grammar: str
    first_mask_s: float


class CompiledLarge(msgspec.Struct, frozen=True, tag=True):
    """The text compiles within its bounds, to what is not worth sending."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The text is no grammar, or one that takes too much."""

    reason: str


class TimedOut(msgspec.Struct, frozen=True, tag=True):
    """The compiler had no time: a text that takes much of its time is refused."""

    after_s: float


class Killed(msgspec.Struct, frozen=True, tag=True):
    """Somebody else ended the compilation."""


Answer = Compiled | CompiledLarge | Refused | TimedOut | Killed

encode_answer = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Answer)


def decode_answer(body: bytes) -> Answer:
    answer: Answer = _decoder.decode(body)
    return answer


def send_frame(connection: socket.socket, body: bytes) -> None:
    """Raises OSError."""
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(connection: socket.socket) -> bytes:
    """Raises OSError, also if the other end is gone."""
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise OSError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES} are expected")
    return _receive(connection, length)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    body = bytearray()
    while len(body) < num_bytes:
        piece = connection.recv(min(num_bytes - len(body), 1 << 20))
        if not piece:
            raise ConnectionResetError("the other end is gone")
        body += piece
    return bytes(body)
