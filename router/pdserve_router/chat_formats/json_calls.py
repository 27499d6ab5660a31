"""Calls as JSON objects: {"name": ..., "arguments": {...}}."""

from collections.abc import Container

from pdserve_router.chat_formats.base import Answer
from pdserve_router.chat_formats.reader import Reader, Steps

_ARGUMENTS = ("arguments", "parameters")


class _Call:
    """A call whose name may come behind its arguments."""

    def __init__(self, answer: Answer, names: Container[str] | None) -> None:
        self._answer = answer
        self._names = names
        self.name: str | None = None
        self.has_begun = False
        self._early: list[str] = []

    def set_name(self, name: str | None) -> bool:
        """Return whether it may be called so."""
        if (
            self.name is not None
            or not name
            or (self._names is not None and name not in self._names)
        ):
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


def read_json_call(
    reader: Reader,
    answer: Answer,
    *,
    names: Container[str] | None = None,
    needs_arguments: bool = False,
) -> Steps[bool]:
    """Read an object with a name and arguments, which go on as they stand. Return False, with
    nothing added, if it is none, or its name is none of `names`; what is wrong behind the beginning
    of the arguments is left to read.
    """
    if not (yield from reader.accept("{")):
        return False
    call = _Call(answer, names)
    is_whole = yield from _read_fields(reader, call)
    if not is_whole:
        return call.has_begun
    return call.end(needs_arguments=needs_arguments)


def _read_fields(reader: Reader, call: _Call) -> Steps[bool]:
    """Read up to the end of the object. Return False where something else stands."""
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
            if not (yield from reader.json_value(call.arguments)):
                return False
        elif not (yield from reader.json_value(_nowhere)):
            return False
        if (yield from reader.accept("}")):
            return True
        if not (yield from reader.accept(",")):
            return False


def _nowhere(text: str) -> None:
    """What is no part of a call."""
