"""Bounds what gRPC messages take before anybody has looked at them.

gRPC's core keeps what has come of a message until the last byte is there. While nobody asks for a
message its sender gets no further than the stream's window (64 KiB, see `rpc.server_options`), so a
call asks only once it has a slot. What refuses a call before that, as API keys do, receives
nothing of it.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pdserve_common.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from pdserve_common.limits.names import SLOW_MESSAGE, TOO_MANY_STREAMS
from pdserve_common.limits.receive_slots import (
    RETRY_AFTER_MS,
    ReceiveLimits,
    ReceiveSlot,
    ReceiveSlots,
)
from pdserve_common.rpc.channels import rpc_errors

# Calls that need no key, some of which stay open for ever: they are few, and take no slot of
# requests.
FREE_METHODS = ("/grpc.health.", "/grpc.reflection.")
_FREE_LIMITS = ReceiveLimits(num_slots=4, num_per_address=3, num_per_connection=1, num_waiting=64)
_MAX_FREE_STREAMS = 256
_MAX_FREE_STREAMS_OF_CONNECTION = 16

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]
OnLimit = Callable[[str], None]


class ReceiveGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Receives the messages of calls that get one answer or send one message, of health and of
    reflection. Others that send a stream and get one (workers') receive as they do without it, but
    what cannot be parsed is refused.

    Handlers are called as ever. It is the last interceptor, as it changes the kind of calls.
    """

    def __init__(self, on_limit: OnLimit, limits: ReceiveLimits | None = None) -> None:
        """`on_limit` gets a reason, one of four, for each call that is refused or cut."""
        limits = limits or ReceiveLimits()
        self._messages = _Messages(limits, on_limit)
        self._free_messages = _Messages(
            replace(_FREE_LIMITS, timeout_s=limits.timeout_s, grace_s=limits.grace_s), on_limit
        )
        self._free_streams = _OpenStreams(on_limit)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        is_free = handler_call_details.method.startswith(FREE_METHODS)
        if handler is None:
            return handler
        if handler.request_streaming and handler.response_streaming and not is_free:
            return _parse_stream(handler)
        messages = self._free_messages if is_free else self._messages
        if not handler.response_streaming:
            guard = _guard_upload if handler.request_streaming else _guard_unary
            return guard(handler, messages)
        return _guard_stream(handler, messages, self._free_streams.open if is_free else _no_limit)


class _Messages:
    """Receives messages one by one, each in a slot of its own."""

    def __init__(self, limits: ReceiveLimits, on_limit: OnLimit) -> None:
        self._slots = ReceiveSlots(limits, on_limit)
        self._timeout_s = limits.timeout_s
        self._on_limit = on_limit

    async def only(
        self, context: grpc.aio.ServicerContext, deserialize: Callable[[bytes], Any] | None
    ) -> Any:
        """Return the message of a call that has one. Raises OverloadedError, DeadlineExceededError
        or InvalidRequestError.
        """
        data = await self._receive(context)
        if data is grpc.aio.EOF:
            raise InvalidRequestError("the call has no message, must have 1")
        return _parse(data, deserialize)

    async def all(
        self, context: grpc.aio.ServicerContext, deserialize: Callable[[bytes], Any] | None
    ) -> AsyncGenerator[Any, None]:
        """The messages of a call; raises as `only` does."""
        while (data := await self._receive(context)) is not grpc.aio.EOF:
            yield _parse(data, deserialize)

    async def _receive(self, context: grpc.aio.ServicerContext) -> Any:
        slot = await self._slots.take(context.peer())
        # Not cancelled when it takes too long: gRPC would lose the message's memory if it came at
        # that moment. It ends with the call, and so does its slot.
        reading = asyncio.ensure_future(context.read())
        reading.add_done_callback(partial(_give_back, slot))
        await asyncio.wait(
            (reading, slot.revoked),
            timeout=self._timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if reading.done():
            return reading.result()
        if slot.revoked.done():
            raise OverloadedError(
                "the message was slow to come and others wait", retry_after_ms=RETRY_AFTER_MS
            )
        self._on_limit(SLOW_MESSAGE)
        raise DeadlineExceededError(f"the message did not come within {self._timeout_s:g} s")


class _OpenStreams:
    """How many streams are open that need no key."""

    def __init__(self, on_limit: OnLimit) -> None:
        self._by_connection: Counter[str] = Counter()
        self._on_limit = on_limit

    @contextmanager
    def open(self, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """Raises OverloadedError if there are too many."""
        connection = context.peer()
        if (
            self._by_connection.total() >= _MAX_FREE_STREAMS
            or self._by_connection[connection] >= _MAX_FREE_STREAMS_OF_CONNECTION
        ):
            self._on_limit(TOO_MANY_STREAMS)
            raise OverloadedError(
                f"{self._by_connection.total()} streams of health and reflection are open, "
                f"{self._by_connection[connection]} of this connection, at most "
                f"{_MAX_FREE_STREAMS} and {_MAX_FREE_STREAMS_OF_CONNECTION}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._by_connection[connection] += 1
        try:
            yield
        finally:
            self._by_connection[connection] -= 1
            self._by_connection += Counter()  # drops what is 0


@contextmanager
def _no_limit(context: grpc.aio.ServicerContext) -> Iterator[None]:
    yield


def _guard_unary(handler: grpc.RpcMethodHandler, messages: _Messages) -> grpc.RpcMethodHandler:
    async def answer(_: object, context: grpc.aio.ServicerContext) -> Any:
        async with rpc_errors(context):
            message = await messages.only(context, handler.request_deserializer)
            return await handler.unary_unary(message, context)
        raise AssertionError("unreachable: rpc_errors aborts")

    return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)


def _guard_upload(handler: grpc.RpcMethodHandler, messages: _Messages) -> grpc.RpcMethodHandler:
    async def answer(_: object, context: grpc.aio.ServicerContext) -> Any:
        incoming = messages.all(context, handler.request_deserializer)
        async with rpc_errors(context), aclosing(incoming):
            return await handler.stream_unary(incoming, context)
        raise AssertionError("unreachable: rpc_errors aborts")

    return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)


def _guard_stream(
    handler: grpc.RpcMethodHandler,
    messages: _Messages,
    limit: Callable[[grpc.aio.ServicerContext], AbstractContextManager[None]],
) -> grpc.RpcMethodHandler:
    inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
    deserialize = handler.request_deserializer

    async def incoming(context: grpc.aio.ServicerContext) -> Any:
        if handler.request_streaming:
            return messages.all(context, deserialize)
        return await messages.only(context, deserialize)

    async def write(_: object, context: grpc.aio.ServicerContext) -> None:
        async with rpc_errors(context):
            with limit(context):
                await inner(await incoming(context), context)

    async def generate(_: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async with rpc_errors(context):
            with limit(context):
                async for response in inner(await incoming(context), context):
                    yield response

    return grpc.stream_stream_rpc_method_handler(
        generate if inspect.isasyncgenfunction(inner) else write, None, handler.response_serializer
    )


def _parse_stream(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """A handler that gets InvalidRequestError of its messages."""
    inner = handler.stream_stream

    async def parsed(received: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in received:
            yield _parse(data, handler.request_deserializer)

    async def write(received: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await inner(parsed(received), context)

    async def generate(
        received: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        async with aclosing(inner(parsed(received), context)) as responses:
            async for response in responses:
                yield response

    return grpc.stream_stream_rpc_method_handler(
        generate if inspect.isasyncgenfunction(inner) else write, None, handler.response_serializer
    )


def _parse(data: bytes, deserialize: Callable[[bytes], Any] | None) -> Any:
    """Raises InvalidRequestError."""
    if deserialize is None:
        return data
    try:
        return deserialize(data)
    except DecodeError as error:
        raise InvalidRequestError(f"the message cannot be parsed: {error}") from None


def _give_back(slot: ReceiveSlot, reading: asyncio.Future[Any]) -> None:
    if not reading.cancelled():
        reading.exception()  # nobody may be left to look at it
    slot.give_back()
