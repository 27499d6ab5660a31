"""The LoRA adapters of several ranks: the engine's end, and a rank's.

Each rank reads the folder by itself and keeps its part of the adapter.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from pdserve_common.processes.calls import Answer, Failed
from pdserve_engine.core.executor import AdapterStore, PackedAdapter
from pdserve_engine.executor.messages import (
    AdapterCommand,
    AddAdapter,
    DiscardAdapter,
    ReadAdapter,
    ReadAdapterResult,
    RemoveAdapter,
)
from pdserve_engine.kv.memory import out_of_memory_reason
from pdserve_engine.lora.adapter_config import LoraError

# Asks all ranks; the future holds their answers.
AskRanks = Callable[[ReadAdapter], "Future[list[Answer]]"]


class RemoteAdapters:
    """The engine's end. Implements core.executor.AdapterStore; `weights` of what it reads is the
    number by which the ranks know it.
    """

    def __init__(self, *, ask: AskRanks, tell: Callable[[AdapterCommand], None]) -> None:
        """What is told comes to all ranks in order with steps, and may not fail: a rank that is
        gone is the end of the engine.
        """
        self._ask = ask
        self._tell = tell
        self._numbers = itertools.count(1)

    def read(self, folder: Path) -> "Future[PackedAdapter]":
        """See AdapterStore. Ranks that do not agree on what the folder holds refuse it."""
        number = next(self._numbers)
        reading: Future[PackedAdapter] = Future()

        def end(answers: "Future[list[Answer]]") -> None:
            try:
                results = [answer.result_of(call) for answer in answers.result()]
                reading.set_result(self._agree(folder, number, results))
            except Exception as error:  # whoever waits gets it
                reading.set_exception(error)

        call = ReadAdapter(number=number, folder=str(folder))
        self._ask(call).add_done_callback(end)
        return reading

    def add(self, adapter: PackedAdapter) -> None:
        self._tell(AddAdapter(adapter.weights))

    def discard(self, reading: "Future[PackedAdapter]") -> None:
        reading.add_done_callback(self._discard)

    def remove(self, digest: str) -> None:
        self._tell(RemoveAdapter(digest))

    def close(self) -> None:
        """Ranks wait for what they read themselves."""

    def _agree(
        self, folder: Path, number: int, answers: Sequence[ReadAdapterResult]
    ) -> PackedAdapter:
        failures = [answer.failure for answer in answers if answer.failure is not None]
        digests = {answer.digest for answer in answers}
        if not failures and len(digests) == 1:
            return PackedAdapter(answers[0].digest, answers[0].rank, number)
        self._tell(DiscardAdapter(number))
        if not failures:
            raise LoraError(f"adapter {folder}: its files have changed while they were read")
        error = failures[0].to_exception()
        raise LoraError(str(error)) if isinstance(error, ValueError) else error

    def _discard(self, reading: "Future[PackedAdapter]") -> None:
        if reading.exception() is None:
            self._tell(DiscardAdapter(reading.result().weights))


class AdapterHost:
    """A rank's end: has the rank's own store do what comes from the engine."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        # By number: what has been read, and neither added nor discarded.
        self._read: dict[int, PackedAdapter] = {}

    @property
    def num_read(self) -> int:
        """How many wait to be added or discarded."""
        return len(self._read)

    def read(self, call: ReadAdapter) -> ReadAdapterResult:
        """Read a folder and keep it for the commands that follow; takes seconds. What cannot be
        served, and want of memory, is an answer: other ranks may say otherwise.
        """
        try:
            adapter = self._store.read(Path(call.folder)).result()
        except (LoraError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and out_of_memory_reason(error) is None:
                raise
            return ReadAdapterResult(failure=Failed.of(error))
        self._read[call.number] = adapter
        return ReadAdapterResult(digest=adapter.digest, rank=adapter.rank)

    def handle(self, command: AdapterCommand) -> None:
        """Do what a command says."""
        if isinstance(command, AddAdapter):
            self._store.add(self._read.pop(command.number))
        elif isinstance(command, DiscardAdapter):
            self._read.pop(command.number, None)
        else:
            self._store.remove(command.digest)
