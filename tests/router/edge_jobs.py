"""Jobs for processes of large requests; a module of its own, so that they find it."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pdserve_common.errors import InvalidRequestError


async def report(processor, raw: bytes) -> tuple[int, int]:
    """Return the process and the number of bytes that have come."""
    return os.getpid(), len(raw)


async def refuse(processor, raw: bytes, field: str) -> None:
    raise InvalidRequestError("it is refused", field=field)


async def fail(processor, raw: bytes) -> None:
    raise KeyError("a defect")


async def crash(processor, raw: bytes) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


async def allocate(processor, raw: bytes, num_bytes: int) -> int:
    return len(bytearray(num_bytes))


async def hang(processor, raw: bytes, file: str) -> None:
    """Hold the interpreter for ever, after its process is named in `file`."""
    path = Path(file)
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    while True:
        pass


async def wait(processor, raw: bytes, file: str) -> str:
    """Return when `file` is there."""
    while not os.path.exists(file):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.01)
    return "waited"


class SlowInput:
    """Notes in which turn of the event loop each of them is taken over, which takes a while."""

    # Of the process that takes them over.
    turn = 0
    turns: ClassVar[list[int]] = []

    def __setstate__(self, state: object) -> None:
        time.sleep(0.002)
        self.turns.append(SlowInput.turn)

    def __getstate__(self) -> object:
        return True


async def many(processor, raw: bytes, num_inputs: int) -> tuple[tuple[SlowInput, ...], str]:
    return tuple(SlowInput() for _ in range(num_inputs)), "options"


@dataclass
class Inputs:
    inputs: tuple[SlowInput, ...]


async def many_within(processor, raw: bytes, num_inputs: int) -> Inputs:
    return Inputs((await many(processor, raw, num_inputs))[0])
