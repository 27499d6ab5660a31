"""Calls from one process to another: a dataclass of the arguments says of which type the result is,
and a table has a handler for each.
"""

import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NoReturn, TypeVar, get_args

import msgspec

from pdserve_common.errors import PdserveError, error_from_engine
from pdserve_common.types.engine import EngineError

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
CallT = TypeVar("CallT", bound="Call[Any]")
HandlerT = TypeVar("HandlerT")
# How an object of HandlerT carries a call out: a function, or a coroutine function.
Handler = Callable[[HandlerT, CallT], ResultT | Coroutine[Any, Any, ResultT]]


class ProtocolError(Exception):
    """The other end sent, or is to be sent, what no correct end sends."""


class Call(Generic[ResultT]):
    """What another process is asked for, to be answered with a ResultT."""

    __slots__ = ()
    # Does a defect in it leave the engine as it was? Then it fails the verb alone.
    IS_CONTAINED: ClassVar[bool] = False

    @classmethod
    def title(cls) -> str:
        """Its name in words, for messages."""
        return re.sub(r"(?<!^)(?=[A-Z])", " ", cls.__name__).lower()

    @classmethod
    def result_type(cls) -> Any:
        """What ResultT is."""
        (base,) = vars(cls)["__orig_bases__"]
        return get_args(base)[0]

    @classmethod
    def handled_by(
        cls: type[CallT], handler: Handler[HandlerT, CallT, ResultT]
    ) -> tuple[type[CallT], Handler[HandlerT, CallT, ResultT]]:
        """Return an entry for a table of handlers; the type checker compares the two."""
        return cls, handler


@dataclass(frozen=True, slots=True)
class Answer:
    """A call's result, in msgpack."""

    result: bytes

    @classmethod
    def of(cls, result: object) -> "Answer":
        return cls(msgspec.msgpack.encode(result))

    def result_of(self, call: Call[ResultT]) -> ResultT:
        """Raises ProtocolError if it is not of the type of the call's results."""
        try:
            result: ResultT = msgspec.msgpack.decode(self.result, type=call.result_type())
        except msgspec.DecodeError as error:
            raise ProtocolError(f"answer to {type(call).__name__}: {error}") from error
        return result


Kind = Literal["value", "os", "pdserve", "other"]
_KINDS: dict[Kind, type[Exception]] = {"value": ValueError, "os": OSError}


@dataclass(frozen=True, slots=True)
class Failed:
    """What a call has raised: which kind of exception, and what it says."""

    kind: Kind
    error: EngineError

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        if isinstance(error, PdserveError):
            return cls("pdserve", error.to_engine_error())
        kinds = (kind for kind, base in _KINDS.items() if isinstance(error, base))
        return cls(next(kinds, "other"), PdserveError(str(error)).to_engine_error())

    def result_of(self, call: Call[Any]) -> NoReturn:
        """Raise it."""
        raise self.to_exception()

    def to_exception(self) -> Exception:
        if self.kind == "pdserve":
            return error_from_engine(self.error)
        return _KINDS.get(self.kind, RuntimeError)(self.error.message)


@dataclass(frozen=True, slots=True)
class CancelCall:
    """Nobody waits any more for the answer to the call that it refers to."""


Handlers = Mapping[type[Call[Any]], Handler[HandlerT, Any, Any]]


def answer(call: CallT, handlers: Handlers[HandlerT], target: HandlerT) -> Answer | Failed:
    """Have `target` carry a call out, and return what comes of it, whatever it raises."""
    try:
        return Answer.of(handlers[type(call)](target, call))
    except BaseException as error:  # whoever waits gets it
        if not isinstance(error, ValueError | OSError):
            logger.exception("%s failed", type(call).__name__)
        return Failed.of(error)
