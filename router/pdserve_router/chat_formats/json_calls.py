"""Calls as JSON objects: {"name": ..., "arguments": {...}}."""

from pdserve_router.chat_formats.base import Answer
from pdserve_router.chat_formats.reader import (
    MAX_READ_AGAIN,
    Reader,
    Steps,
    escape_halves,
    is_json,
)

_ARGUMENTS = ("arguments", "parameters")


class _Call:
    """A call whose name may come behind its arguments."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.name: str | None = None
        self.has_begun = False
        self._early: list[str] = []

    def set_name(self, name: str | None) -> bool:
        """Return whether it may be called so."""
        if self.name is not None or name not in self._answer.options.tools:
            return False
        self.name = name
        if self._early:
            self._begin()
        return True

    def arguments(self, text: str) -> None:
        if self.name is None:
            self._early.append(text)
            return
        self._begin()
        self._answer.arguments(text)

    def end(self, *, needs_arguments: bool) -> bool:
        """Return whether it is one."""
        if self.name is None or (needs_arguments and not self.has_begun):
            return False
        if not self.has_begun:
            self.arguments("{}")
        return True

    def _begin(self) -> None:
        if self.has_begun:
            return
        assert self.name is not None, "a call begins with its name"
        self.has_begun = True
        self._answer.begin_call(self.name)
        for text in self._early:
            self._answer.arguments(text)
        self._early.clear()


def read_json_calls(
    reader: Reader, answer: Answer, *, separator: str = "", needs_arguments: bool = False
) -> Steps[bool]:
    """Read objects side by side, each a call, between which the separator or nothing stands. Return
    False, with nothing added, if the first is none.
    """
    if not (yield from _read_json_call(reader, answer, needs_arguments=needs_arguments)):
        return False
    is_call = True
    while is_call:
        reader.mark()
        yield from reader.accept(separator)
        is_call = yield from _read_json_call(reader, answer, needs_arguments=needs_arguments)
    answer.content(reader.rewind(at_most=MAX_READ_AGAIN))
    return True


def _read_json_call(reader: Reader, answer: Answer, *, needs_arguments: bool) -> Steps[bool]:
    """Read an object with the name of a tool and its arguments, which go on as they stand. Return
    False, with nothing added, if it is none; what is wrong behind the beginning of the arguments is
    left to read.
    """
    if not (yield from reader.accept("{")):
        return False
    call = _Call(answer)
    is_whole = yield from _read_fields(reader, call)
    if not is_whole:
        return call.has_begun
    return call.end(needs_arguments=needs_arguments)


def _read_fields(reader: Reader, call: _Call) -> Steps[bool]:
    """Read up to the end of the object. Return False where something else stands.

    What may be no call is strictly JSON: then a trigger can only be within its strings. What begins
    there has a string wherever this one has none, so at the next trigger one of both ends. Nothing
    is read more than three times, however triggers are nested.
    """
    has_arguments = False
    while True:
        key = yield from reader.json_string()
        if key is None or not (yield from reader.accept(":")):
            return False
        if key == "name":
            if not call.set_name((yield from reader.json_string())):
                return False
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            if not (yield from _read_arguments(reader, call)):
                return False
        elif not (yield from reader.json_value(_nowhere, is_strict=not call.has_begun)):
            return False
        if (yield from reader.accept("}")):
            return True
        if not (yield from reader.accept(",")):
            return False


def _read_arguments(reader: Reader, call: _Call) -> Steps[bool]:
    """Return whether they are an object, or a string that is one, and have an end."""
    first = yield from reader.peek()
    if first == "{":
        return (yield from reader.json_value(call.arguments, is_strict=call.name is None))
    text = yield from reader.json_string()
    if text is None or not _is_object(text):
        return False
    call.arguments(escape_halves(text.strip()))
    return True


def _is_object(text: str) -> bool:
    return text.lstrip().startswith("{") and is_json(text)


def _nowhere(text: str) -> None:
    """What is no part of a call."""
