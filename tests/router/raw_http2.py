"""An HTTP/2 client that sends what no gRPC library would: half of a message, or nothing at all."""

import asyncio
import contextlib
import struct
from types import TracebackType

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4
_MAX_FRAME = 16384
_DEFAULT_WINDOW = 65535


class RawHttp2:
    """One connection. It keeps to flow control: `num_sent` says what the other side has taken."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._next_stream = 1
        self._window = _DEFAULT_WINDOW
        self._stream_window = _DEFAULT_WINDOW
        self._windows: dict[int, int] = {}
        self._moved = asyncio.Condition()
        self.num_sent: dict[int, int] = {}
        self.ended: set[int] = set()
        self.is_closed = False

    async def __aenter__(self) -> "RawHttp2":
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def open_stream(self, method: str, **metadata: str) -> int:
        """Begin a gRPC call; return its stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._windows[stream] = self._stream_window
        self.num_sent[stream] = 0
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "test",
            "content-type": "application/grpc",
            "te": "trailers",
            **metadata,
        }
        block = b"".join(_field(*field) for field in fields.items())
        self._writer.write(_frame(_HEADERS, _END_HEADERS, stream, block))
        return stream

    async def send(self, stream: int, data: bytes) -> None:
        """Send all of it, as far as flow control lets it, or until the stream ends."""
        view = memoryview(data)
        while view:
            async with self._moved:
                await self._moved.wait_for(lambda: self._room(stream) > 0 or self._is_over(stream))
            if self._is_over(stream):
                return
            part = view[: min(self._room(stream), _MAX_FRAME)]
            self._window -= len(part)
            self._windows[stream] -= len(part)
            self.num_sent[stream] += len(part)
            self._writer.write(_frame(_DATA, 0, stream, bytes(part)))
            await self._writer.drain()
            view = view[len(part) :]

    def _room(self, stream: int) -> int:
        return min(self._window, self._windows[stream])

    def _is_over(self, stream: int) -> bool:
        return self.is_closed or stream in self.ended

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                length, kind, flags, stream = _parse(head)
                self._on_frame(kind, flags, stream, await self._reader.readexactly(length))
                async with self._moved:
                    self._moved.notify_all()
        except (asyncio.IncompleteReadError, OSError):
            self.is_closed = True
            async with self._moved:
                self._moved.notify_all()

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self._on_settings(payload)
            self._writer.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._writer.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            (more,) = struct.unpack(">I", payload)
            if stream:
                self._windows[stream] += more
            else:
                self._window += more
        elif kind == _RST_STREAM or (kind in (_HEADERS, _DATA) and flags & _END_STREAM):
            self.ended.add(stream)

    def _on_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == _INITIAL_WINDOW_SIZE:
                for stream in self._windows:
                    self._windows[stream] += value - self._stream_window
                self._stream_window = value


def half_a_message(num_bytes: int) -> bytes:
    """A gRPC message of `num_bytes` that lacks its last byte."""
    return struct.pack(">BI", 0, num_bytes) + b"x" * (num_bytes - 1)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _parse(head: bytes) -> tuple[int, int, int, int]:
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    return int.from_bytes(head[:3], "big"), kind, flags, stream & 0x7FFFFFFF


def _field(name: str, value: str) -> bytes:
    """A header as HPACK has it without a table and without Huffman's code."""
    return b"\x00" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127, "longer ones have another form"
    return bytes([len(data)]) + data
