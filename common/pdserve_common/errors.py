"""The exceptions of pdserve. Each leaf has one ErrorCode; `rpc.py` and the HTTP edge turn it into
a status.
"""

from typing import ClassVar

from pdserve_common.types.engine import EngineError, ErrorCode, ErrorFault


class PdserveError(Exception):
    """Base of all errors that a client may see. Its message may quote anything that was sent: half
    a surrogate pair, which UTF-8 has no bytes for, is shown by its number.
    """

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    is_retryable: ClassVar[bool] = False
    # UNSPECIFIED: as usual with the code (`EngineError`).
    fault: ErrorFault = ErrorFault.UNSPECIFIED

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms

    def to_engine_error(self) -> EngineError:
        return EngineError(
            code=self.code,
            message=self.message,
            is_retryable=self.is_retryable,
            retry_after_ms=self.retry_after_ms,
            fault=self.fault,
        )


class InvalidRequestError(PdserveError):
    """The request can never be served; names field, value and limit. Not retryable."""

    code = ErrorCode.INVALID_ARGUMENT

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here. Not retryable."""


class RequestFailedError(PdserveError):
    """The model or a plugin failed on this request, and on no other of its step. Not retryable."""

    fault = ErrorFault.REQUEST


class OverloadedError(PdserveError):
    """A queue or pool is full. Retryable after a while."""

    code = ErrorCode.OVERLOADED
    is_retryable = True


class NoWorkerError(PdserveError):
    """No worker of a needed role is ready. Retryable."""

    code = ErrorCode.NO_WORKER
    is_retryable = True


class KVTransferError(PdserveError):
    """KV blocks could not be moved. Retryable: computed again."""

    code = ErrorCode.KV_TRANSFER_FAILED
    is_retryable = True


class KVExpiredError(PdserveError):
    """A KV session ended before its blocks were accepted. Retryable: computed again."""

    code = ErrorCode.KV_EXPIRED
    is_retryable = True


class DeadlineExceededError(PdserveError):
    """The request's deadline passed. Not retryable within it."""

    code = ErrorCode.DEADLINE_EXCEEDED


class RequestAbortedError(PdserveError):
    """The client cancelled the request. Not retryable."""

    code = ErrorCode.CANCELLED


class EngineDeadError(PdserveError):
    """The engine process is gone or going. Retryable on another worker."""

    code = ErrorCode.ENGINE_DEAD
    is_retryable = True


class DrainingError(PdserveError):
    """The process takes no new work. Retryable on another one."""

    code = ErrorCode.DRAINING
    is_retryable = True


class ClientTooSlowError(PdserveError):
    """The client did not read its stream in time. Not retryable."""

    code = ErrorCode.CLIENT_TOO_SLOW


class FailedPreconditionError(PdserveError):
    """The call does not suit the state the worker is in (wake_up of one that is awake). Not
    retryable as such.
    """

    code = ErrorCode.FAILED_PRECONDITION


class AdapterNotHeldError(FailedPreconditionError):
    """The worker does not hold the request's LoRA adapter. Retryable on another one."""

    is_retryable = True
    # It would not fail anywhere. The worker is in order all the same.
    fault = ErrorFault.WORKER


_BY_CODE: dict[ErrorCode, type[PdserveError]] = {
    cls.code: cls
    for cls in (
        InvalidRequestError,
        OverloadedError,
        NoWorkerError,
        KVTransferError,
        KVExpiredError,
        DeadlineExceededError,
        RequestAbortedError,
        EngineDeadError,
        DrainingError,
        ClientTooSlowError,
        FailedPreconditionError,
    )
}

RETRYABLE_CODES = tuple(code for code, cls in _BY_CODE.items() if cls.is_retryable)


def error_from_engine(error: EngineError) -> PdserveError:
    """Return the exception that says the same as `error`."""
    cls = _BY_CODE.get(error.code, PdserveError)
    exception = cls(error.message)
    exception.retry_after_ms = error.retry_after_ms
    exception.fault = error.fault
    return exception
