"""HTTP over a socket, as bytes: what clients send who do not keep to it, and what comes back."""

import contextlib
import socket
from collections.abc import Sequence
from typing import NamedTuple

# Of an answer that has to come, or an end.
ANSWER_S = 60.0


class Response(NamedTuple):
    """One response; `is_whole` is False if the connection ended in its midst."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool


def exchange(port: int, pieces: Sequence[bytes], *, quiet_s: float | None = None) -> bytes:
    """Send the pieces and return all that comes back until the server closes the connection.

    With `quiet_s` our side of it is closed once nothing has come for so long: a server that waits
    for more then ends it as well. Raises TimeoutError if it does not, within ANSWER_S.
    """
    data = b""
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # What the server has refused it does not read; its answer is there all the same.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                sock.sendall(piece)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.settimeout(ANSWER_S if quiet_s is None else quiet_s)
            try:
                while chunk := sock.recv(2**16):
                    data += chunk
            except TimeoutError:
                if quiet_s is None:
                    raise
                sock.settimeout(ANSWER_S)
                sock.shutdown(socket.SHUT_WR)
                while chunk := sock.recv(2**16):
                    data += chunk
    return data


def parse(data: bytes) -> list[Response]:
    """Return the responses in what a server has sent. Raises ValueError for what is none."""
    responses = []
    while data:
        response, data = parse_one(data)
        responses.append(response)
    return responses


def parse_one(data: bytes) -> tuple[Response, bytes]:
    """Return the first response and what follows it."""
    head, end, rest = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    version, _, status = lines[0].partition(" ")
    if version not in ("HTTP/1.1", "HTTP/1.0") or not status[:3].isdigit():
        raise ValueError(f"no status line: {lines[0]!r}")
    if not end:
        return Response(int(status[:3]), {}, b"", is_whole=False), b""
    headers = dict(_header(line) for line in lines[1:])
    if status.startswith("1"):
        return Response(int(status[:3]), headers, b"", is_whole=True), rest
    body, rest, is_whole = _body(headers, rest)
    return Response(int(status[:3]), headers, body, is_whole), rest


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name or name != name.strip():
        raise ValueError(f"no header: {line!r}")
    return name.lower(), value.strip()


def _body(headers: dict[str, str], data: bytes) -> tuple[bytes, bytes, bool]:
    """Return a response's body, what follows it, and whether it is whole."""
    if headers.get("transfer-encoding") == "chunked":
        return _chunks(data)
    if "content-length" not in headers:
        raise ValueError(f"a body without a length: {headers}")
    length = int(headers["content-length"])
    return data[:length], data[length:], len(data) >= length


def _chunks(data: bytes) -> tuple[bytes, bytes, bool]:
    body = b""
    while True:
        line, end, data = data.partition(b"\r\n")
        if not end:
            return body, b"", False
        size = int(line, 16)
        chunk, data = data[:size], data[size:]
        body += chunk
        if len(chunk) < size or len(data) < 2:
            return body, b"", False
        if data[:2] != b"\r\n":
            raise ValueError(f"a chunk without an end: {data[:20]!r}")
        data = data[2:]
        if size == 0:
            return body, data, True
