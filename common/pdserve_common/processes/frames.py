"""Messages over a socket between two processes of one build on one machine.

A frame is a header (bytes of the body, type of the message, what it refers to) and the message in
msgpack. It is decoded into exactly the type the header names, never into one that it names itself.
Of a message that is bytes the body is these.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from pdserve_common.processes.calls import ProtocolError

# Far above what a step of the largest batch with all its logprobs takes.
MAX_FRAME_BYTES = 256 * 1024 * 1024

_HEADER = struct.Struct("!IHQ")

MessageT = TypeVar("MessageT")
# Turns an object that msgpack does not know into one that it does.
EncodeHook = Callable[[Any], Any]
# The other way round, given the type that is wanted.
DecodeHook = Callable[[type, Any], Any]


class FrameCodec(Generic[MessageT]):
    """The frames of a table of message types, which are numbered by their place in it."""

    def __init__(
        self,
        types: Sequence[type],
        *,
        enc_hook: EncodeHook | None = None,
        dec_hook: DecodeHook | None = None,
    ) -> None:
        self.types = tuple(types)
        self._type_ids = {cls: number for number, cls in enumerate(self.types)}
        self._encode_body = msgspec.msgpack.Encoder(enc_hook=enc_hook).encode
        self._decoders: list[Callable[[memoryview], Any]] = [
            bytes if cls is bytes else msgspec.msgpack.Decoder(cls, dec_hook=dec_hook).decode
            for cls in self.types
        ]

    def encode(self, message: MessageT, ref: int = 0) -> bytes:
        """Return the frame. Raises ProtocolError for one that is too large."""
        body = message if isinstance(message, bytes) else self._encode_body(message)
        return self.header(type(message), len(body), ref) + body

    def header(self, cls: type, size: int, ref: int = 0) -> bytes:
        """Return what comes in front of a body of so many bytes. Raises ProtocolError for one that
        is too large.
        """
        if size > MAX_FRAME_BYTES:
            raise ProtocolError(f"{cls.__name__} has {size} bytes, at most {MAX_FRAME_BYTES} fit")
        return _HEADER.pack(size, self._type_ids[cls], ref)

    def reader(self) -> "FrameReader[MessageT]":
        return FrameReader(self)

    def decode(self, type_id: int, body: memoryview) -> MessageT:
        """Raises ProtocolError if the body is not of the type of that number."""
        try:
            message: MessageT = self._decoders[type_id](body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self.types[type_id].__name__}: {error}") from error
        return message


class FrameReader(Generic[MessageT]):
    """Turns a stream of bytes into messages."""

    def __init__(self, codec: FrameCodec[MessageT]) -> None:
        self._codec = codec
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[MessageT, int]]:
        """Yield what is complete: messages and what they refer to. Raises ProtocolError."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            size, type_id, ref = _HEADER.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES or type_id >= len(self._codec.types):
                raise ProtocolError(f"a frame of type {type_id} with {size} bytes")
            end = _HEADER.size + size
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as buffer, buffer[_HEADER.size : end] as body:
                message = self._codec.decode(type_id, body)
            del self._buffer[:end]
            yield message, ref
