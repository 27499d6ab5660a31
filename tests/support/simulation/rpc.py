"""gRPC without sockets: a channel and a server that generated code takes for grpc.aio's, over the
network of a simulation.

Messages are serialized, ordered and bounded by a window. A call ends as one of grpc.aio does, with
the same exceptions. `tests/simulation/test_rpc.py` runs the same calls over both.
"""

import asyncio
import collections
import contextlib
import functools
import inspect
import itertools
import zlib
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from support.simulation.loop import Process
from support.simulation.network import End, Frame, Listener, Network

# Of one call and direction: what the other side's application has not read yet.
WINDOW_BYTES = 64 * 1024
# How long after a stream looks half-closed its handler hears that it is broken.
MAX_CANCEL_DELAY_S = 5e-3
EOF = grpc.aio.EOF
Serialize = Callable[[Any], bytes] | None


@dataclass(frozen=True, slots=True)
class _Status:
    code: grpc.StatusCode
    details: str = ""
    trailing: tuple[tuple[str, str], ...] = ()


class _Stream:
    """One side of a call: what has come and is not read, and how much may be sent."""

    def __init__(self, end: End, number: int, network: Network, method: str) -> None:
        self._end, self._number, self._network = end, number, network
        self._name = f"{method.rpartition('/')[2]}#{number}"
        self._unread: collections.deque[bytes] = collections.deque()
        self._num_unacknowledged = 0
        self._changed = asyncio.Event()
        # Nothing more comes; nothing more goes out.
        self.is_eof = self.is_closed = False

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    def send(self, kind: str, *args: Any) -> None:
        self._end.send((kind, self._number, *args))

    async def write(self, payload: bytes) -> bool:
        """Wait until it may go out, and send it; False if the stream is closed."""
        await asyncio.sleep(0)
        while self._num_unacknowledged > WINDOW_BYTES and not self.is_closed:
            await self._wait()
        if self.is_closed:
            return False
        self._num_unacknowledged += len(payload)
        self._network.journal.note(
            f"wire {self._name} sends {len(payload)} bytes {zlib.crc32(payload):08x}"
        )
        self.send("message", payload)
        return True

    async def read(self) -> bytes | None:
        """Return the next message, None behind the last."""
        while not self._unread and not self.is_eof:
            await self._wait()
        if not self._unread:
            return None
        payload = self._unread.popleft()
        self.send("read", len(payload))
        return payload

    def on_message(self, payload: bytes) -> None:
        if not self.is_eof:
            self._unread.append(payload)
            self._changed.set()

    def on_read(self, num_bytes: int) -> None:
        self._num_unacknowledged -= num_bytes
        self._changed.set()

    def end_input(self) -> None:
        self.is_eof = True
        self._changed.set()

    def close(self, *, drops_unread: bool) -> None:
        """It is over, in both directions."""
        self.is_closed = self.is_eof = True
        if drops_unread:
            self._unread.clear()
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class Call:
    """A client's call of any kind, as grpc.aio's."""

    def __init__(
        self,
        channel: "Channel",
        method: str,
        serialize: Serialize,
        deserialize: Serialize,
        timeout: float | None,
    ) -> None:
        self._serialize, self._deserialize = serialize, deserialize
        self._loop = asyncio.get_running_loop()
        self._status: asyncio.Future[_Status] = self._loop.create_future()
        self._is_connected = asyncio.Event()
        self._is_cancelled = self._is_half_closed = False
        # Behind the last message that came.
        self._final: _Status | None = None
        self._stream, self._forget = channel.open(self, method)
        self._deadline = None
        if timeout is not None:
            status = _Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._deadline = self._loop.call_later(timeout, self._give_up, status)

    # ---- what stubs' callers call

    async def write(self, request: Any) -> None:
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._is_half_closed:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        try:
            await self._is_connected.wait()
            if self.done():
                await self._raise_for_status()
            if not await self._stream.write(_encode(request, self._serialize)):
                await self._raise_for_status()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def done_writing(self) -> None:
        if not self.done() and not self._is_half_closed:
            self._is_half_closed = True
            self._stream.send("half_close")

    async def read(self) -> Any:
        if self.done():
            await self._raise_for_status()
            return EOF
        try:
            payload = await self._stream.read()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if payload is None:
            self._end(self._final)
            await self._raise_for_status()
            return EOF
        return _decode(payload, self._deserialize)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not EOF:
            yield response

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only_response().__await__()

    def cancel(self) -> bool:
        status = _Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        if self.done():
            return False
        self._is_cancelled = True
        self._give_up(status)
        return True

    def cancelled(self) -> bool:
        return self.done() and self._status.result().code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._status.done()

    async def code(self) -> grpc.StatusCode:
        return (await asyncio.shield(self._status)).code

    async def details(self) -> str:
        return (await asyncio.shield(self._status)).details

    # ---- what the channel calls

    def on_connected(self) -> None:
        self._is_connected.set()

    def on_frame(self, kind: str, *args: Any) -> None:
        if kind == "message":
            self._stream.on_message(*args)
        elif kind == "read":
            self._stream.on_read(*args)
        elif kind == "status" and not self.done():
            # It counts once the messages before it are read.
            self._final = args[0]
            self._stream.end_input()
            if not self._stream.has_unread:
                self._end(self._final)

    def on_broken(self, reason: str) -> None:
        self._end(_Status(grpc.StatusCode.UNAVAILABLE, reason))

    # ---- inside

    def send_unary(self, request: Any) -> None:
        """Send the only request."""
        self._is_half_closed = True
        self._stream.send("message", _encode(request, self._serialize))
        self._stream.send("half_close")

    async def _only_response(self) -> Any:
        response = await self.read()
        if response is EOF:
            raise AssertionError("the call has brought nothing, and no error")
        await self.read()  # its status
        return response

    def _give_up(self, status: _Status) -> None:
        self._stream.send("cancel")
        self._end(status)

    def _end(self, status: _Status | None) -> None:
        if status is None or self.done():
            return
        self._status.set_result(status)
        self._stream.close(drops_unread=True)
        self._is_connected.set()
        self._forget()
        if self._deadline is not None:
            self._deadline.cancel()

    async def _raise_for_status(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
        status = await asyncio.shield(self._status)
        if status.code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                status.code,
                grpc.aio.Metadata(),
                grpc.aio.Metadata(*status.trailing),
                status.details,
            )


class Channel:
    """In the place of grpc.aio.Channel, for one process. One connection, made with the first call
    and again after it broke.
    """

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network, self._process, self._address = network, process, address
        self._end: End | None = None
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in list(self._calls.values()):
            call.cancel()

    def stream_stream(self, method: str, *codec: Any, **options: Any) -> Any:
        return lambda **given: self._call(method, codec, options, given)

    def unary_stream(self, method: str, *codec: Any, **options: Any) -> Any:
        return functools.partial(self._unary_call, method, codec, options)

    def stream_unary(self, method: str, *codec: Any, **options: Any) -> Any:
        return lambda **given: self._call(method, codec, options, given)

    def unary_unary(self, method: str, *codec: Any, **options: Any) -> Any:
        return functools.partial(self._unary_call, method, codec, options)

    def open(self, call: Call, method: str) -> tuple[_Stream, Callable[[], object]]:
        """Return a call's stream, and what to call when it is over."""
        if self._end is None or self._end.is_broken:
            self._end = self._network.connect(self._process, self._address)
            self._end.on_frame, self._end.on_broken = self._on_frame, self._on_broken
        number = next(self._numbers)
        self._calls[number] = call
        self._end.send(("open", number, method))
        stream = _Stream(self._end, number, self._network, method)
        return stream, lambda: self._calls.pop(number, None)

    def _unary_call(
        self, method: str, codec: Any, options: Any, request: Any, **given: Any
    ) -> Call:
        call = self._call(method, codec, options, given)
        call.send_unary(request)
        return call

    def _call(
        self, method: str, codec: tuple[Any, ...], options: Mapping[str, Any], given: Any
    ) -> Call:
        serialize, deserialize = (*codec, None, None)[:2]
        return Call(
            self,
            method,
            options.get("request_serializer", serialize),
            options.get("response_deserializer", deserialize),
            given.get("timeout"),
        )

    def _on_frame(self, frame: Frame) -> None:
        kind, number, *args = frame
        if (call := self._calls.get(number)) is None:
            return
        if kind == "connected":
            call.on_connected()
        else:
            call.on_frame(kind, *args)

    def _on_broken(self, reason: str) -> None:
        for call in list(self._calls.values()):
            call.on_broken(reason)


class ServicerContext:
    """In the place of grpc.aio.ServicerContext, for one call."""

    def __init__(self, stream: _Stream, serialize: Serialize) -> None:
        self._stream, self._serialize = stream, serialize
        self._trailing: tuple[tuple[str, str], ...] = ()
        self.status: _Status | None = None

    async def write(self, response: Any) -> None:
        """Raises InternalError if the stream is gone, as cygrpc does."""
        if not await self._stream.write(_encode(response, self._serialize)):
            raise grpc.aio.InternalError("the stream is gone")

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> None:
        self.status = _Status(code, details, (*self._trailing, *trailing))
        raise grpc.aio.AbortError

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._trailing = metadata

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class _ServerCall:
    """A call as its server has it."""

    def __init__(self, stream: _Stream, handler: grpc.RpcMethodHandler) -> None:
        self.stream = stream
        self._handler = handler
        self._context = ServicerContext(stream, handler.response_serializer)
        self.task = asyncio.get_running_loop().create_task(self._serve())

    def on_frame(self, kind: str, *args: Any) -> None:
        if kind == "message":
            self.stream.on_message(*args)
        elif kind == "read":
            self.stream.on_read(*args)
        elif kind == "half_close":
            self.stream.end_input()

    def break_(self, delay_s: float) -> None:
        """The client is gone: it looks half-closed first, then the handler is cancelled."""
        self.stream.close(drops_unread=False)
        asyncio.get_running_loop().call_later(delay_s, self.task.cancel)

    async def _serve(self) -> None:
        status = _Status(grpc.StatusCode.OK)
        try:
            await self._handle()
        except asyncio.CancelledError:
            status = _Status(grpc.StatusCode.CANCELLED, "the server has ended the call")
        except grpc.aio.AbortError:
            assert self._context.status is not None
            status = self._context.status
        except Exception as error:  # as cygrpc: whatever a handler raises
            details = f"Unexpected {type(error)}: {error}"
            status = _Status(grpc.StatusCode.UNKNOWN, details)
        if not self.stream.is_closed:
            self.stream.send("status", status)
            self.stream.close(drops_unread=True)

    async def _handle(self) -> None:
        handler, context = self._handler, self._context
        method = (
            handler.stream_stream
            or handler.stream_unary
            or handler.unary_stream
            or handler.unary_unary
        )
        given = self._requests() if handler.request_streaming else await self._only_request()
        answer = method(given, context)
        if inspect.isasyncgen(answer):
            async with contextlib.aclosing(answer) as responses:
                async for response in responses:
                    await context.write(response)
            return
        response = await answer
        if not handler.response_streaming:
            await context.write(response)

    def _requests(self) -> "_Requests":
        return _Requests(self.stream, self._handler.request_deserializer)

    async def _only_request(self) -> Any:
        return await self._requests().__anext__()


class _Requests:
    """What a handler iterates over."""

    def __init__(self, stream: _Stream, deserialize: Serialize) -> None:
        self._stream, self._deserialize = stream, deserialize

    def __aiter__(self) -> "_Requests":
        return self

    async def __anext__(self) -> Any:
        payload = await self._stream.read()
        if payload is None:
            raise StopAsyncIteration
        return _decode(payload, self._deserialize)


class Server:
    """In the place of grpc.aio.Server, at one address."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network, self._process, self._address = network, process, address
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}
        self._calls: dict[tuple[End, int], _ServerCall] = {}
        self._ends: list[End] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The registered ones are the same."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    async def start(self) -> None:
        self._network.listen(self._address, Listener(self._process, self._accept))

    async def stop(self, grace: float | None) -> None:
        """Take no more calls, wait for those that run, then end them and the connections."""
        self._network.close_listener(self._address, self._process)
        tasks = [call.task for call in self._calls.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=grace or 0.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in self._ends:
            end.send(("goaway", 0))

    def _accept(self, end: End) -> None:
        self._ends.append(end)
        end.on_frame = lambda frame: self._on_frame(end, frame)
        end.on_broken = lambda reason: self._on_broken(end)

    def _on_frame(self, end: End, frame: Frame) -> None:
        kind, number, *args = frame
        call = self._calls.get((end, number))
        if kind == "open":
            self._open(end, number, *args)
        elif kind == "cancel" and call is not None:
            call.break_(0.0)
        elif call is not None:
            call.on_frame(kind, *args)

    def _open(self, end: End, number: int, method: str) -> None:
        handler = self._handlers.get(method)
        if handler is None:
            status = _Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            end.send(("status", number, status))
            return
        end.send(("connected", number))
        call = _ServerCall(_Stream(end, number, self._network, method), handler)
        self._calls[end, number] = call
        call.task.add_done_callback(lambda _: self._calls.pop((end, number), None))

    def _on_broken(self, end: End) -> None:
        self._ends.remove(end)
        for (of_end, _), call in list(self._calls.items()):
            if of_end is end:
                call.break_(self._network.random.uniform(0.0, MAX_CANCEL_DELAY_S))


def _encode(message: Any, serialize: Serialize) -> bytes:
    return serialize(message) if serialize is not None else message


def _decode(payload: bytes, deserialize: Serialize) -> Any:
    return deserialize(payload) if deserialize is not None else payload
