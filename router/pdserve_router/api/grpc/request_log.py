"""The line in the log of a request over gRPC."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from pdserve_common.errors import PdserveError
from pdserve_common.limits.receive_guard import FREE_METHODS
from pdserve_router.requests.records.request_log import RequestLine, RequestLog

_STATUS_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]


class GrpcRequestLog(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The first interceptor: it sees what all others refuse."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        method = handler_call_details.method
        if method.startswith(FREE_METHODS):
            return await continuation(handler_call_details)
        headers = None
        if self._log.tracing is not None:
            headers = dict(handler_call_details.invocation_metadata)
        line = self._log.begin(RequestLine(path=method), headers)
        handler = await continuation(handler_call_details)
        if handler is None:
            line.status = grpc.StatusCode.UNIMPLEMENTED.name
            self._log.end(line)
            return None
        return self._around(handler, line)

    def _around(self, handler: grpc.RpcMethodHandler, line: RequestLine) -> grpc.RpcMethodHandler:
        """ReceiveGuard and ApiKeyGuard have made it one of a stream of messages."""
        inner = handler.stream_stream or handler.stream_unary

        async def answer(requests: object, context: grpc.aio.ServicerContext) -> Any:
            try:
                response = await inner(requests, context)
                line.status = _status(context)
                return response
            except grpc.aio.AbortError as aborted:
                line.status = _status(context)
                # What it was made of, by `rpc_errors`.
                if isinstance(aborted.__context__, PdserveError):
                    line.error = aborted.__context__
                raise
            except (asyncio.CancelledError, grpc.aio.InternalError):
                is_late = context.time_remaining() == 0
                code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
                line.status = code.name
                raise
            finally:
                self._log.end(line)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(answer, handler.request_deserializer, handler.response_serializer)


def _status(context: grpc.aio.ServicerContext) -> str:
    code = context.code()  # None, a number, or what somebody has set
    return str(code.name if isinstance(code, grpc.StatusCode) else _STATUS_NAMES[code or 0])
